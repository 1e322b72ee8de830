"""`Relative` with positions: its matrix, models' formulas, its kernels and its errors; test_projected has calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import refusal_of
from projected_cases import (
    BANDS,
    GATHERS,
    assert_bands,
    assert_gathers,
    by_gather,
    draw,
    placed,
    with_gradients,
    with_positions,
)
from test_projected import BANDED, BY_TIMES, HQ, LK, LQ, SHARED, TIMES, VALUES, K, Q, V, leaf, on_gpu
from torch import Tensor

import flash_dmattn
from flash_dmattn import attention, config, explain, nn, projected
from flash_dmattn.biases import Projected, Relative, require_dense_bias
from flash_dmattn.reference import gathers

F64 = torch.float64


def test_dense_is_the_value_of_every_score() -> None:
    for seed in range(60):
        case = with_positions(draw(seed), seed)
        bias: Any = case.bias
        lengths = case.q.shape[1], case.k.shape[1]
        values = [term.values for term in bias.terms]
        made, wanted = bias.dense(*lengths), placed(bias, *lengths)
        made = made if made.dim() == 4 else made[None]
        for x, y in zip(*(with_gradients((each,), values) for each in (made, wanted)), strict=True):
            torch.testing.assert_close(x, y)


def test_positions_in_order_are_those_of_a_relative_without_them() -> None:
    pair = torch.arange(LK - LQ, LK), torch.arange(LK)
    for outside in ("clamp", "zero"):
        plain = Relative(VALUES, 4, outside)  # type: ignore[arg-type]
        assert torch.equal(plain._replace(positions=pair).dense(LQ, LK), plain.dense(LQ, LK))
        results = [attention(Q, K, V, bias=bias) for bias in (plain, plain._replace(positions=pair))]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), ids=str)
def test_positions_of_any_integers(dtype: torch.dtype) -> None:
    """Differences of uint8 may be negative, and int8 does not hold all differences of int8."""
    most = min(torch.iinfo(dtype).max, 2**60)
    queries, keys = torch.tensor([0, most, most // 2]), torch.tensor([most, 0, 1])
    bias = Relative(leaf(2, 5), 2, "clamp", (queries.to(dtype), keys.to(dtype)))
    assert torch.equal(bias.dense(3, 3), placed(bias, 3, 3)[0])


def test_the_table_has_the_same_bits_in_any_parts() -> None:
    random = torch.Generator().manual_seed(0)
    times = [torch.randint(0, 9, (7, length), generator=random) for length in (30, 40)]
    values, ds = leaf(2, 11, dtype=torch.float32).detach(), leaf(7, 2, 30, 40, dtype=torch.float32).detach()
    table, places, dtype = gathers.prepare([values[None], *times], [(5, True)])
    made = []
    for entries in (1, 3, 7):
        each = gathers.Gathers(table, places, dtype, entries)
        for first in range(0, 7, entries):
            each.add_gradient(ds[first : first + entries], slice(first, first + entries))
        made.append(each.table_gradient())
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[2])


def test_positions_that_all_share_make_one_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", 1)
    assert explain(Q, K, V, bias=SHARED).copies[0].startswith("runs 1 part of 5 of 5 entries; their values of the Rel")
    assert explain(Q, K, V, bias=SHARED).problem.bias.shape == (1, HQ, LQ, LK)  # type: ignore[union-attr]
    assert explain(Q, K, V, bias=BY_TIMES).copies[0].startswith("runs 5 parts of 1 of 5 entries")
    assert explain(Q, K, V, bias=BY_TIMES, softcap=3.0).problem.softcap == 3.0
    records: list[Any] = []
    with config(record=records):
        attention(Q, K, V, bias=SHARED)
    explained = explain(Q, K, V, bias=SHARED)
    assert [(each.forward, each.backward) for each in records] == [(explained.forward, explained.backward)]


def test_no_bias_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (leaf(4, 200, 2, 8, seed=seed) for seed in range(3))
    times, sizes = torch.arange(800).view(4, 200), []
    keep = lambda x: sizes.append(x.numel()) or x
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", 2 * 2 * 200 * 208 * 8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(q, k, v, bias=Relative(leaf(2, 9), 4, "clamp", (times, times)), backend="eager")
    out.sum().backward()
    assert sizes and max(sizes) <= q.numel() < 200 * 200


def test_a_value_of_minus_infinity_masks_and_a_row_may_be_empty() -> None:
    times = torch.tensor([[0, 0, 1, 1, 2]])
    same_time = Relative(torch.tensor([[-torch.inf, 0.0, -torch.inf]], requires_grad=True), 1, "clamp", (times, times))
    q = leaf(2, 5, 2, 8, dtype=torch.float32)
    out = attention(q, q, q, bias=same_time)
    torch.testing.assert_close(out, attention(q, q, q, times[0][:, None] == times[0]))
    gradient = torch.autograd.grad(out.sum(), same_time.values, retain_graph=True)[0]
    assert gradient.isfinite().all() and gradient[0, [0, 2]].eq(0).all()
    far = same_time._replace(positions=(times + 9, times))
    out, lse = attention(q, q, q, bias=far, return_lse=True)
    assert not out.any() and lse.isneginf().all()


def test_values_keep_their_dtype_and_their_gradient_is_rounded_once() -> None:
    q = leaf(2, LQ, 2, 8, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        values = leaf(2, 9, dtype=dtype)
        bias = Relative(values, 4, "clamp", (TIMES[0][0], TIMES[0][0]))
        made, wanted = (attention(q, q, q, bias=x) for x in (bias, bias.dense(LQ, LQ)))
        assert torch.equal(made, wanted) and bias.dense(LQ, LQ).dtype == dtype
        gradient = torch.autograd.grad(made.sum(), values)[0]
        assert gradient.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):  # which casts no bias
        assert explain(q, q, q, bias=bias).problem.bias.dtype == torch.float32  # type: ignore[union-attr]


def test_batched_values_of_16_bits_that_some_entries_share() -> None:
    """The gradient of shared entries is summed in fp32."""
    q = leaf(2, 300, 5, 2, 8, dtype=torch.bfloat16)
    values = leaf(2, 1, 2, 9, dtype=torch.bfloat16)
    bias = Relative(values, 4, "clamp", (TIMES[0][0][:5], TIMES[0][0][:5]))
    wide = values.detach().double().requires_grad_()
    gradients = [
        torch.autograd.grad(attention(x, x, x, bias=bias._replace(values=y)).float().sin().sum(), y)[0]
        for x, y in ((q, values), (q.detach().double(), wide))
    ]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=0.05, atol=0.05)


def test_a_band_that_clamps_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", 1)
    assert (
        explain(Q, K, V, bias=BANDED).copies[0].startswith("runs 5 parts of 1 of 5 entries; their values of the Band")
    )
    one = BANDED._replace(values=BANDED.values[:1])
    assert explain(Q, K, V, bias=one).copies[0].startswith("runs 1 part of 5 of 5 entries")
    with pytest.raises(TypeError, match="bias is a Band that clamps with DTensors"):
        require_dense_bias(BANDED, "with DTensors")


def test_calls_without_scores() -> None:
    for rows in ((5, 0, LK), (5, LQ, 0), (0, LQ, LK)):
        q, k = Q[: rows[0], : rows[1]], K[: rows[0], : rows[2]]
        bias = Relative(VALUES, 4, "zero", (TIMES[0][: rows[0], : rows[1]], TIMES[1][: rows[0], : rows[2]]))
        out = attention(q, k, k, bias=bias)
        assert out.shape == (*q.shape[:3], 8) and not out.any()
        assert not torch.autograd.grad(out.sum(), VALUES)[0].any()
        assert explain(q, k, k, bias=bias).error is None


def test_transforms() -> None:
    leaves, func = (Q, K, V, VALUES), torch.func

    def run(q: Tensor, k: Tensor, v: Tensor, values: Tensor, dense: bool = False) -> Tensor:
        bias: Any = Relative(values, 3, "clamp", TIMES)
        return attention(q, k, v, bias=bias.dense(LQ, LK) if dense else bias)

    tangents = tuple(torch.randn_like(x) for x in leaves)
    made, wanted = (func.jvp(lambda *x, d=dense: run(*x, dense=d), leaves, tangents) for dense in (False, True))
    torch.testing.assert_close(made, wanted)

    def one(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return attention(q[None], k[None], v[None], bias=Relative(VALUES, 3, "clamp", (queries, keys)))[0]

    torch.testing.assert_close(func.vmap(one)(Q, K, V, *TIMES), run(*leaves))
    doubled = func.vmap(lambda values: run(Q, K, V, values))(torch.stack((VALUES, 2 * VALUES)))
    torch.testing.assert_close(doubled[1], run(Q, K, V, 2 * VALUES))
    gradients = [func.grad(lambda x, d=d: run(Q, K, V, x, d).square().sum())(VALUES) for d in (False, True)]
    torch.testing.assert_close(*gradients)


def test_point_transformers() -> None:
    """A table of values for the clamped difference of each coordinate, query minus key, in groups of points."""
    groups, points, heads, bound = 3, 20, 2, 4
    coordinates = torch.randint(0, 12, (groups, points, 3), generator=torch.Generator().manual_seed(0))
    table = leaf(3 * (2 * bound + 1), heads)
    q, k, v = (leaf(groups, points, heads, 8, seed=seed) for seed in range(3))

    difference = (coordinates[:, :, None] - coordinates[:, None]).clamp(-bound, bound)
    rows = difference + bound + torch.arange(3) * (2 * bound + 1)
    own = table.index_select(0, rows.flatten()).view(*rows.shape, heads).sum(3).movedim(-1, 1)
    scores = torch.einsum("bihd,bjhd->bhij", q * 8**-0.5, k) + own
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    bias: Relative | None = None
    for values, axis in zip(table.T.split(2 * bound + 1, 1), (-coordinates).unbind(2), strict=True):
        bias = Relative(values, bound, "clamp", (axis, axis), bias)
    made = attention(q, k, v, bias=bias)
    pairs = (with_gradients((each,), [q, k, v, table]) for each in (made, wanted))
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y)


def rel_shift(x: Tensor) -> Tensor:
    """Move row i of products with 2 L - 1 rows i places to the right, and keep L columns: Transformer-XL's trick."""
    length = x.shape[2]
    moved = torch.nn.functional.pad(x, (1, 0)).reshape(*x.shape[:2], -1, length)[:, :, 1:]
    return moved.reshape(x.shape)[..., :length]


def test_conformers_of_nemo() -> None:
    """Two learned vectors, a product with projected positions, rel_shift, and the scale outside of the sum."""
    batch, length, heads, dim = 2, 12, 2, 8
    q, k, v = (leaf(batch, length, heads, dim, seed=seed) for seed in range(3))
    table, u, w = leaf(heads, 2 * length - 1, dim, seed=3), leaf(heads, dim, seed=4), leaf(heads, dim, seed=5)
    used = torch.tensor([length, 7])
    hidden = torch.arange(length) >= used[:, None, None, None]  # keys; rows of padding count for nothing
    content = torch.einsum("bihd,bjhd->bhij", q + u, k)
    by_position = rel_shift(torch.einsum("bihd,hnd->bhin", q + w, table))
    scores = ((content + by_position) / dim**0.5).masked_fill(hidden, -10000.0)
    probs = scores.softmax(-1).masked_fill(hidden, 0.0)
    wanted = torch.einsum("bhij,bjhd->bihd", probs, v)
    made = attention(q + u, k, v, ~hidden, Projected(q + w, table, zero=length - 1))
    for x, y in zip(*(with_gradients((each,), [q, k, v, table, u, w]) for each in (made, wanted)), strict=True):
        torch.testing.assert_close(x, y)


def test_enformer() -> None:
    """Queries are scaled first, and learned vectors come behind the scale; values have another head dim."""
    batch, length, heads, dim = 2, 10, 2, 8
    q, k, v = leaf(batch, length, heads, dim), leaf(batch, length, heads, dim, seed=1), leaf(batch, length, heads, 24)
    table, c, p = leaf(heads, 2 * length - 1, dim, seed=3), leaf(heads, dim, seed=4), leaf(heads, dim, seed=5)
    s = dim**-0.5
    content = torch.einsum("bihd,bjhd->bhij", q * s + c, k)
    scores = content + rel_shift(torch.einsum("bihd,hnd->bhin", q * s + p, table))
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    made = attention(q * s + c, k, v, None, Projected(q * s + p, table, zero=length - 1), softmax_scale=1.0)
    for x, y in zip(*(with_gradients((each,), [q, k, v, table, c, p]) for each in (made, wanted)), strict=True):
        torch.testing.assert_close(x, y)


def test_windows_of_swin() -> None:
    """The offset of two tokens of a window is the difference of row * (2 * width - 1) + column."""
    height, width = 3, 4
    layer = nn.WindowPositionBias(height, width, 2, dtype=F64)
    torch.nn.init.normal_(layer.weight)
    at = torch.arange(height * width)
    places = at // width * (2 * width - 1) + at % width
    zero = len(layer.weight) // 2
    bias = Relative(layer.weight.T, zero, "zero", (-places, -places))  # its table has query minus key
    assert torch.equal(bias.dense(12, 12), layer()[0])
    q, order = leaf(2, 12, 2, 8), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    shuffled = bias._replace(positions=(-places[order], -places[order]))
    torch.testing.assert_close(
        attention(q[:, order], q[:, order], q[:, order], bias=shuffled), attention(q, q, q, bias=layer())[:, order]
    )


WRONG: tuple[tuple[Any, type[Exception], str], ...] = (
    (SHARED._replace(values=[1.0]), TypeError, "bias.values is a list; it needs to be a floating-point torch.Tensor"),
    (SHARED._replace(values=VALUES.long()), TypeError, "bias.values has dtype int64; it needs a floating-point dtype"),
    (SHARED._replace(values=VALUES.detach().to_sparse()), TypeError, "bias.values"),
    (SHARED._replace(values=VALUES.to("meta")), ValueError, "bias.values is on meta; it needs to be on the device of"),
    (SHARED._replace(values=VALUES[:3]), ValueError, "bias.values has 3 heads; it needs one of [1, 2, 4]"),
    (SHARED._replace(values=leaf(2, HQ, 9)), ValueError, "bias.values has batch dims (2,); they need to be 1 or those"),
    (SHARED._replace(zero=1.0), TypeError, "bias.zero is a float; it needs to be an int"),
    (SHARED._replace(outside="wrap"), ValueError, "bias.outside is 'wrap'; it needs to be one of 'error'"),
    (SHARED._replace(outside="error"), ValueError, 'bias.outside is "error" with positions, which no call reads in'),
    (SHARED._replace(positions=TIMES[0]), TypeError, "bias.positions is a Tensor; it needs to be a pair of integer"),
    (SHARED._replace(positions=(TIMES[0], [1])), TypeError, "bias.positions[1] is a list; it needs to be an integer"),
    (SHARED._replace(positions=(TIMES[0] / 2, TIMES[1])), TypeError, "bias.positions[0] has dtype float32; it needs"),
    (SHARED._replace(positions=(TIMES[0] > 2, TIMES[1])), TypeError, "bias.positions[0] has dtype bool; it needs an"),
    (SHARED._replace(positions=TIMES[::-1]), ValueError, "bias.positions[0] has shape (5, 33); it needs (*batch, seq"),
    (SHARED._replace(positions=(TIMES[0][:2], TIMES[1])), ValueError, "bias.positions[0] has batch dims (2,); they"),
    (SHARED._replace(positions=(TIMES[0][None], TIMES[1])), ValueError, "bias.positions[0] has batch dims (1, 5)"),
    (SHARED._replace(plus=torch.zeros(3)), TypeError, "bias.plus is a Tensor; it needs to be None or a Relative"),
    (SHARED._replace(plus=SHARED._replace(zero=None)), TypeError, "bias.plus.zero is a NoneType; it needs to be an"),
    (
        SHARED._replace(plus=SHARED._replace(plus=Relative(VALUES, 3))),
        ValueError,
        "bias.plus.plus has values for distances -3 to 5; it needs those of the call, -32 to 19",
    ),
)


@pytest.mark.parametrize(("bias", "kind", "says"), WRONG, ids=range(len(WRONG)))
def test_wrong_biases_are_named(bias: Any, kind: type[Exception], says: str) -> None:
    error = refusal_of(lambda: attention(Q, K, V, bias=bias), lambda: attention(Q, K, V, bias=SHARED), kind)
    assert says in str(error)
    with pytest.raises(kind):
        explain(Q, K, V, bias=bias)


def test_a_window_hides_distances_without_a_value() -> None:
    bias = Relative(VALUES, 4, "clamp", TIMES, Relative(leaf(1, 5), 4))
    attention(Q, K, V, bias=bias, window_size=(4, 0))
    with pytest.raises(ValueError, match=r"bias\.plus has values for distances -4 to 0"):
        attention(Q, K, V, bias=bias)


def test_a_matrix_needs_batch_dims_and_heads_that_broadcast() -> None:
    with pytest.raises(ValueError, match=r"bias has batch dims .*\(2,\).*\(3,\).*; each needs to be 1 or full"):
        Relative(leaf(2, 1, 3), 1, "clamp", (torch.zeros(3, 4).long(), torch.arange(5))).dense(4, 5)
    with pytest.raises(ValueError, match=r"bias has values of \[2, 3\] heads"):
        Relative(leaf(2, 3), 1, "clamp", plus=Relative(leaf(3, 3), 1, "clamp")).dense(4, 5)
    with pytest.raises(TypeError, match="is no tensor; to add to it, make one"):
        SHARED + torch.zeros(3)


def test_other_layouts_name_what_to_pass() -> None:
    rows = torch.nested.nested_tensor([torch.randn(n, HQ, 8) for n in (3, 5)], layout=torch.jagged)
    with pytest.raises(TypeError, match="bias is a Relative with positions with sequences; it needs to be None or ano"):
        attention(rows, rows, rows, bias=SHARED)
    lists = flash_dmattn.masks.PreparedMask.from_lists(torch.zeros(LQ, 2, dtype=torch.int64), seqlen_k=LK)
    with pytest.raises(TypeError, match="bias is a Relative with positions with lists; it needs to be a ListBias"):
        attention(Q, K, V, lists, SHARED)
    with pytest.raises(TypeError, match=r"bias is a Relative with positions with DTensors; .* rank of bias\.dense"):
        require_dense_bias(SHARED, "with DTensors")
    with config(invariant=True), pytest.raises(flash_dmattn.BackendError, match="bias is a Relative with positions"):
        attention(Q, K, V, bias=SHARED)


@on_gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_the_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    for band in (*BANDS, (8, 1500, 1500, 73, 64)):
        assert_bands(band, dtype, "cuda")
    for shape in (*GATHERS, (4, 4, 1024, 1024, (65, 65, 65), 1), (3, 2, 300, 130, (5000,), 3)):
        assert_gathers(shape, dtype, "cuda")


@on_gpu
def test_a_great_call_on_a_gpu_needs_no_tensor_of_all_scores() -> None:
    q, k, v = (leaf(64, 1024, 4, 64, seed=seed, dtype=torch.bfloat16).cuda().detach() for seed in range(3))
    q.requires_grad_()
    values = leaf(4, 65, dtype=torch.bfloat16).cuda().detach().requires_grad_()
    times = torch.randint(0, 99, (64, 1024), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, k, v, bias=Relative(values, 32, "clamp", (times, times)))
    assert torch.cuda.memory_allocated() - before < 64 * 2**20
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 3 * projected.WORKSPACE_BYTES


def test_a_gather_on_eager_is_that_of_the_oracle_in_16_bits() -> None:
    """out and gradients are as with the tensor: both round the sum of values once."""
    case = with_positions(draw(3, torch.bfloat16), 2)
    q, k, v, mask, bias, options = case
    tensor: Any = bias.dense(q.shape[1], k.shape[1])
    made, wanted = (attention(q, k, v, mask, x, return_lse=True, backend="eager", **options) for x in (bias, tensor))
    assert all(torch.equal(x, y) for x, y in zip(made, wanted, strict=True))
    assert by_gather(case)[0].shape == made[0].shape
