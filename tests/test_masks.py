"""Every mask builder against a loop over positions, the smallest shapes, and the sentences of the errors."""

import itertools

import pytest
import torch
from dispatched import Dispatched

from flash_dmattn import masks

LENGTHS = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 7), (7, 1), (5, 5), (4, 9), (9, 4)]


def loop(seqlen_q, seqlen_k, allowed):
    """The mask (Lq, Lk) that `allowed(i, j)` describes, one position at a time."""
    out = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        out[i, j] = bool(allowed(i, j))
    return out


def assert_mask(mask, shape, *planes):
    """`mask` is bool, of this very shape, and its planes in batch order are the given ones."""
    assert mask.dtype == torch.bool
    assert tuple(mask.shape) == shape
    for got, expected in zip(mask[:, 0], planes, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_causal_is_bottom_right_aligned(seqlen_q, seqlen_k):
    expected = loop(seqlen_q, seqlen_k, lambda i, j: j <= i + seqlen_k - seqlen_q)
    assert_mask(masks.causal_mask(seqlen_q, seqlen_k), (1, 1, seqlen_q, seqlen_k), expected)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("window_size", [(0, 0), (2, 0), (0, 2), (1, 3), (-1, 0), (-1, 2), (2, -1), (-1, -1), (99, 99)])
def test_sliding_window(seqlen_q, seqlen_k, window_size):
    left, right = window_size

    def allowed(i, j):
        p = i + seqlen_k - seqlen_q
        return (left == -1 or j >= p - left) and (right == -1 or j <= p + right)

    mask = masks.sliding_window_mask(seqlen_q, seqlen_k, window_size)
    assert_mask(mask, (1, 1, seqlen_q, seqlen_k), loop(seqlen_q, seqlen_k, allowed))


@pytest.mark.parametrize(
    ("lengths", "total", "expected"),
    [
        ([2, 3], None, [0, 0, 1, 1, 1]),
        ([2, 3], 7, [0, 0, 1, 1, 1, -1, -1]),
        ([0, 2, 0, 0, 1, 0], None, [1, 1, 4]),
        ([], 2, [-1, -1]),
        ([], None, []),
        ([0], None, []),
        ([[2, 1], [1, 0]], None, [[0, 0, 1], [0, -1, -1]]),
    ],
)
def test_document_ids(lengths, total, expected):
    got = masks.document_ids(torch.tensor(lengths, dtype=torch.int32), total)
    assert got.tolist() == expected
    assert masks.document_ids(lengths, total).tolist() == expected


def test_document_mask_shared_and_per_batch():
    ids = [[0, 0, 1, -1, 1], [3, -1, 3, 3, 0]]

    def plane(q, k):
        return loop(len(q), len(k), lambda i, j: q[i] == k[j] and q[i] >= 0)

    assert_mask(masks.document_mask(torch.tensor(ids[0])), (1, 1, 5, 5), plane(ids[0], ids[0]))
    assert_mask(masks.document_mask(ids), (2, 1, 5, 5), *(plane(row, row) for row in ids))
    ids_k = [3, 1, 0, -1, -2, 0, 1]
    assert_mask(masks.document_mask(ids, ids_k), (2, 1, 5, 7), *(plane(row, ids_k) for row in ids))
    assert_mask(masks.document_mask(ids_k, ids), (2, 1, 7, 5), *(plane(ids_k, row) for row in ids))
    assert_mask(masks.document_mask(torch.zeros(0, dtype=torch.int64)), (1, 1, 0, 0), torch.zeros(0, 0).bool())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("seqlen", [0, 1, 5])
def test_padding_from_lengths(side, seqlen):
    lengths = list(range(seqlen + 1))
    expected = [loop(1, seqlen, lambda i, j, n=n: j < n if side == "right" else j >= seqlen - n) for n in lengths]
    shape = (len(lengths), 1, 1, seqlen)
    assert_mask(masks.padding_mask(lengths, seqlen, side=side), shape, *expected)
    assert_mask(masks.padding_mask(torch.tensor(lengths, dtype=torch.int32), seqlen, side=side), shape, *expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_padding_from_a_mask(dtype):
    inputs = torch.tensor([[1, 1, 0], [0, 1, 1]])
    mask = masks.padding_mask(inputs.to(dtype), 3)
    assert_mask(mask, (2, 1, 1, 3), *inputs.bool()[:, None])
    assert torch.equal(masks.padding_mask(inputs.to(dtype)), mask)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_prefix_lm(seqlen_q, seqlen_k):
    lengths = list(range(seqlen_k + 1))
    expected = [loop(seqlen_q, seqlen_k, lambda i, j, n=n: j < n or j <= i + seqlen_k - seqlen_q) for n in lengths]
    mask = masks.prefix_lm_mask(torch.tensor(lengths), seqlen_q, seqlen_k)
    assert_mask(mask, (len(lengths), 1, seqlen_q, seqlen_k), *expected)
    one = masks.prefix_lm_mask(seqlen_k // 2, seqlen_q, seqlen_k)
    assert_mask(one, (1, 1, seqlen_q, seqlen_k), expected[seqlen_k // 2])


def test_threshold_keeps_the_shape_of_the_scores():
    scores = torch.tensor([[-1.0, 0.0, 2.0, float("nan"), float("inf")]], requires_grad=True)
    assert_mask(masks.threshold_mask(scores), (1, 1, 1, 5), torch.tensor([[False, False, True, False, True]]))
    assert_mask(masks.threshold_mask(scores, 2.0), (1, 1, 1, 5), torch.tensor([[False, False, False, False, True]]))


def random_mask(*shape, density=0.5, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


@pytest.mark.parametrize("op", ["and", "or"])
def test_combine_broadcasts_to_the_smallest_shape(op):
    torch_op = torch.logical_and if op == "and" else torch.logical_or
    window, padding, per_head = random_mask(1, 1, 3, 4), random_mask(2, 1, 1, 4, seed=1), random_mask(5, 1, 1, seed=2)
    got = masks.combine(window, padding, per_head, op=op)
    assert torch.equal(got, torch_op(torch_op(window, padding), per_head))
    assert got.shape == (2, 5, 3, 4)
    # An expanded dim says nothing: it is not carried into the result.
    expanded = padding.expand(2, 7, 9, 4)
    assert torch.equal(masks.combine(expanded, padding[:1], op=op), torch_op(padding, padding[:1]))
    assert masks.combine(expanded, op=op).shape == (2, 1, 1, 4)
    assert masks.combine(torch.tensor(True), op=op).shape == (1, 1, 1, 1)


def test_combine_makes_one_mask_of_full_size():
    """Small masks are joined first, in whatever order they come; another full-size product costs as much again."""
    sizes = []

    def show(operator, arguments, result):
        if operator is torch.ops.aten.logical_and.default:
            sizes.append(result.numel())

    window, padding, keys = (
        random_mask(1, 1, 30, 40),
        random_mask(2, 1, 1, 40, seed=1),
        random_mask(1, 1, 1, 40, seed=2),
    )
    for order in itertools.permutations((window, padding, keys)):
        with Dispatched(show):
            assert masks.combine(*order).shape == (2, 1, 30, 40)
    assert sizes == [2 * 40, 2 * 30 * 40] * 6


def test_combine_and_none():
    mask = random_mask(1, 1, 3, 4)
    assert torch.equal(masks.combine(None, mask, None), mask)
    assert masks.combine(None, None) is None
    with pytest.raises(TypeError, match=r"combine\(\) has no masks; it needs one or more"):
        masks.combine()
    assert masks.combine(mask, None, op="or") is None


def test_combine_groups_heads_as_attention_does():
    mask_k, mask_q = random_mask(2, 2, 3, 4), random_mask(1, 6, 3, 1, seed=1)
    got = masks.combine(mask_k, mask_q)
    assert got.shape == (2, 6, 3, 4)
    for head in range(6):
        assert torch.equal(got[:, head], mask_k[:, head // 3] & mask_q[:, head])


@pytest.mark.parametrize("name", ["causal_mask", "sliding_window_mask", "prefix_lm_mask"])
@pytest.mark.parametrize(("argument", "value"), [("seqlen_q", -1), ("seqlen_k", -2)])
def test_negative_lengths(name, argument, value):
    lengths = {"seqlen_q": 3, "seqlen_k": 3, argument: value}
    more = {"sliding_window_mask": {"window_size": (1, 1)}, "prefix_lm_mask": {"prefix_lengths": 0}}.get(name, {})
    with pytest.raises(ValueError, match=rf"^{argument} is {value}; it needs to be >= 0$"):
        getattr(masks, name)(**lengths, **more)


@pytest.mark.parametrize("side", [2**63 - 1, 10**30])
def test_a_window_beyond_all_keys_hides_none(side):
    assert masks.sliding_window_mask(3, 5, (side, side)).all()


BAD_CALLS = [
    (lambda: masks.causal_mask(2.0, 2), TypeError, r"seqlen_q is 2\.0 \(float\); it needs to be an int >= 0"),
    (lambda: masks.causal_mask(True, 2), TypeError, r"seqlen_q is True \(bool\)"),
    (lambda: masks.sliding_window_mask(2, 2, 3), TypeError, r"window_size is 3; it needs to be a pair \(left, right\)"),
    (lambda: masks.sliding_window_mask(2, 2, (1, 2, 3)), TypeError, r"window_size is \(1, 2, 3\); it needs to be"),
    (lambda: masks.sliding_window_mask(2, 2, (-2, 0)), ValueError, r"window_size\[0\] is -2; it needs to be >= -1"),
    (lambda: masks.document_ids([1, -1]), ValueError, r"lengths has a negative length \(-1\)"),
    (lambda: masks.document_ids([3, 3], 5), ValueError, r"lengths sum to 6, more than total_length = 5"),
    (lambda: masks.document_ids([0.5]), TypeError, r"lengths has dtype torch\.float32; it needs an integer dtype"),
    (
        lambda: masks.document_ids(torch.tensor(3)),
        ValueError,
        r"lengths has shape \(\) \(0-D\); it needs to be 1-D",
    ),
    (lambda: masks.document_mask(torch.ones(3)), TypeError, r"ids has dtype torch\.float32"),
    (lambda: masks.document_mask([[[0]]]), ValueError, r"ids has shape \(1, 1, 1\) \(3-D\); it needs to be 1-D or 2-D"),
    (lambda: masks.document_mask([[0], [1]], [[0], [1], [2]]), ValueError, r"ids_k has batch size 3 .* ids has 2"),
    (lambda: masks.padding_mask([4], 3), ValueError, r"lengths_or_mask has a length of 4, longer .* at most 3"),
    (lambda: masks.padding_mask([-1], 3), ValueError, r"lengths_or_mask has a negative length \(-1\)"),
    (
        lambda: masks.padding_mask([4], 3),
        ValueError,
        "lengths_or_mask has a length of 4, longer than the sequence; at most 3",
    ),
    (lambda: masks.padding_mask([1, 2]), ValueError, r"seqlen is None; it needs to be the padded length"),
    (lambda: masks.padding_mask([[1, 0]], 3), ValueError, r"lengths_or_mask has shape \(1, 2\); it needs seqlen = 3"),
    (lambda: masks.padding_mask(torch.ones(1, 2)), TypeError, r"dtype torch\.float32.* pass mask > 0\.5"),
    (lambda: masks.padding_mask(torch.zeros(2, 1, 4)), ValueError, r"lengths_or_mask has shape .* be 1-D or 2-D"),
    (lambda: masks.padding_mask(torch.zeros(2, 1, 1, 4)), ValueError, r"no padding: pass it as mask, .* == 0 of 0 and"),
    (lambda: masks.padding_mask(torch.zeros(2, 4)), TypeError, r"pass mask > 0\.5 of 1 and 0, mask == 0 of 0 and -inf"),
    (lambda: masks.padding_mask(torch.ones(0), 2), TypeError, r"lengths_or_mask has dtype torch\.float32"),
    (lambda: masks.padding_mask([True, False], 2), TypeError, r"lengths_or_mask has dtype torch\.bool"),
    (lambda: masks.padding_mask(None), TypeError, r"lengths_or_mask is None \(NoneType\); it needs to be an integer"),
    (lambda: masks.document_ids("no"), TypeError, r"lengths is 'no' \(str\); it needs to be an integer torch.Tensor"),
    (lambda: masks.document_mask([[1], [1, 2]]), TypeError, r"ids is \[\[1\], \[1, 2\]\] \(list\); it needs to be"),
    (lambda: masks.padding_mask([1], 2, side="top"), ValueError, r"side is 'top'; it needs to be 'right' or 'left'"),
    (lambda: masks.prefix_lm_mask(4, 3, 3), ValueError, r"prefix_lengths has a length of 4, longer .* at most 3"),
    (lambda: masks.prefix_lm_mask(-1, 3, 3), ValueError, r"prefix_lengths is -1; it needs to be >= 0"),
    (lambda: masks.threshold_mask(torch.ones(2, dtype=torch.int64)), TypeError, r"scores has dtype int64"),
    (
        lambda: masks.combine(masks.PreparedMask.from_mask(torch.ones(2, 2).bool())),
        TypeError,
        r"masks\[0\] is a TileMask; it needs to be a bool torch.Tensor; masks\[0\]\.unpacked\(\) is one",
    ),
    (
        lambda: masks.combine(torch.ones(2, 2)),
        TypeError,
        r"masks\[0\] has dtype torch\.float32.* pass masks\[0\] != 0",
    ),
    (lambda: masks.combine([True]), TypeError, r"masks\[0\] is a list; it needs to be a bool torch.Tensor"),
    (lambda: masks.combine(random_mask(1, 1, 1, 1, 1)), ValueError, r"masks\[0\] has shape.* at most 4 dims"),
    (lambda: masks.combine(random_mask(3), None, random_mask(4)), ValueError, r"masks\[2\] has seqlen_k = 4 .* has 3"),
    (lambda: masks.combine(random_mask(4, 1, 1), random_mask(6, 1, 1)), ValueError, r"masks\[0\] has 4 heads .* 6"),
    (lambda: masks.combine(random_mask(3), random_mask(3).to("meta")), ValueError, r"masks\[1\] is on meta"),
    (lambda: masks.combine(random_mask(3), op="xor"), ValueError, r"op is 'xor'; it needs to be 'and' or 'or'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_errors_name_the_argument_what_it_has_and_what_it_needs(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda to: masks.causal_mask(3, 5, device="meta"), (1, 1, 3, 5)),
        (lambda to: masks.sliding_window_mask(3, 5, (1, 1), device="meta"), (1, 1, 3, 5)),
        (lambda to: masks.document_mask(masks.document_ids(to([1, 2]), 5)), (1, 1, 5, 5)),
        (lambda to: masks.padding_mask(to([1, 2]), 5), (2, 1, 1, 5)),
        (lambda to: masks.prefix_lm_mask(to([1, 2]), 3, 5), (2, 1, 3, 5)),
        (lambda to: masks.threshold_mask(to([0.5, 1.0])), (1, 1, 1, 2)),
        (lambda to: masks.combine(to([[True], [False]]), to([True, False])), (1, 1, 2, 2)),
        (lambda to: masks.expand_blocks(to([[True], [False]]), 4, 7, 9), (1, 1, 7, 1)),
        (lambda to: masks.smooth_blocks(to([[True, False]] * 2), 2, is_causal=True), (1, 1, 2, 2)),
        (lambda to: masks.topk_mask(to([1.0, 2.0, 3.0]), 2), (1, 1, 1, 3)),
        (lambda to: masks.topk_mask(to([1.0, 2.0, 3.0]), 2, is_causal=True), (1, 1, 3, 3)),
        (lambda to: masks.topk_mask(to([[1.0, 2.0, 3.0]] * 2), 2, is_causal=True, seqlen_q=2), (1, 1, 2, 3)),
    ],
)
def test_builders_read_no_value_and_so_never_wait_for_a_device(build, shape):
    # A meta tensor has no values: reading one raises.
    mask = build(lambda values: torch.tensor(values, device="meta"))
    assert (tuple(mask.shape), mask.dtype, mask.device.type) == (shape, torch.bool, "meta")
