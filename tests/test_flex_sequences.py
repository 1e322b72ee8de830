"""Sequences on the flex backend: its results, the tiles that it lays them out in, what it compiles, and its rules."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE
from flex_fixture import ROUNDED, ROUNDS_GRADIENTS, eager_flex
from sequence_calls import SequenceCall, assert_accurate, draw, run, spoiled
from test_flex_graph import Counter, listed
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences, attention
from flash_dmattn.backends.flex import backend as flex
from flash_dmattn.backends.flex import graph, sequence_blocks
from flash_dmattn.backends.flex.blocks import BLOCK
from flash_dmattn.backends.flex.sequence_blocks import LaidOut, prepare_sequences
from flash_dmattn.backends.flex.tiles import extents
from flash_dmattn.problem import Packing, SequenceSpec
from flash_dmattn.sequences.values import make_bounds

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="flex on a GPU is checked by tests/flex_check.py")

SHORT, LONG = (0, 1, 2, 5, 17, 33), (0, 1, 31, 127, 128, 129, 300)


def drawn(number: int) -> SequenceCall:
    """A call that flex accepts; every third has sequences of more than a tile."""
    layout = ("packed", "packed", "padded")[number // 3 % 3]
    lengths = LONG if number % 3 == 0 else SHORT
    call = draw(number, layout, dtypes=(torch.float32,), lengths=lengths, head_dims=(16,))
    return replace(call, flags=call.flags | {"dropout_p": 0.0})


@pytest.mark.parametrize("part", range(6))
def test_random_calls_with_nan_in_all_rows_of_no_sequence(part: int) -> None:
    with eager_flex():
        for number in range(500 + part, 590, 6):
            call = drawn(number)
            assert_accurate(run(spoiled(call), "flex"), call)


FORMS = {
    **{f"by position {form}": form for form in itertools.product((1, 3), (1, 2, 4), (1, 140), (1, 130))},
    **{f"packed rows {form}": form for form in itertools.product((1, 2, 4), (301,), (1, 130))},
    **{f"packed keys {form}": form for form in ((1, 1, 171), (2, 1, 171), (4, 1, 171))},
}


def of_forms(bias: tuple[int, ...], mask: tuple[int, ...] | None, **flags: Any) -> SequenceCall:
    """Three sequences, one without queries, with rows of none between and behind, a bias and a mask of these shapes."""
    generator = torch.Generator().manual_seed(sum(bias))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lengths = ((0, 139, 0, 120), (141, 0, 128, 9), (141, 133, 140, 30))
    sequences = Sequences.packed(
        torch.tensor([0, 141, 141, 280]), torch.tensor([0, 128, 140, 171]), max_seqlen_q=140, max_seqlen_k=130,
        seqlens_q=torch.tensor([139, 0, 133]), seqlens_k=torch.tensor([120, 9, 30]),
    )  # fmt: skip
    allowed = None if mask is None else torch.rand(mask, generator=generator) < 0.7
    numbers = {"is_causal": False, "window_size": None, "softcap": 0.0, "softmax_scale": None, "dropout_p": 0.0} | flags
    q, k, v = normal(301, 4, 16), normal(171, 2, 16), normal(171, 2, 24)
    given = (
        q,
        k,
        v,
        allowed,
        normal(*bias),
        normal(4),
        sequences,
        lengths,
        numbers,
        normal(301, 4, 24),
        normal(4, 301),
    )
    return SequenceCall(*given, ("q", "k", "v", "bias", "sink"), f"of_forms({bias}, {mask})")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_bias_and_of_a_mask(name: str) -> None:
    """A bias of each form with a mask of the same one, and of another."""
    shapes = list(FORMS.values())
    other = shapes[(shapes.index(FORMS[name]) * 7 + 3) % len(shapes)]
    with eager_flex():
        for mask, flags in ((FORMS[name], {"is_causal": True}), (other, {"window_size": (60, 5), "softcap": 2.0})):
            call = of_forms(FORMS[name], mask, **flags)
            assert_accurate(run(spoiled(call), "flex"), call)


@pytest.mark.skipif(ROUNDS_GRADIENTS, reason=ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 4, 140, 130), (2, 301, 130), (1, 2, 1, 130), (4, 1, 171), (3, 1, 140, 1)], ids=str
)
def test_a_bias_of_16_bits_has_its_gradient_summed_in_32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    call = replace(of_forms(shape, None), sink=None, needs_grad=("q", "k", "v", "bias")).to(dtype)
    call = replace(call, dlse=call.dlse.float())
    with eager_flex():
        assert_accurate(run(spoiled(call), "flex"), call)


@pytest.mark.parametrize("needs_grad", [("q",), ("v", "sink"), ("bias",), ("sink",), ()])
def test_any_subset_of_gradients(needs_grad: tuple[str, ...]) -> None:
    with eager_flex():
        for shape in ((2, 301, 130), (4, 1, 171), (1, 2, 140, 1)):
            call = replace(of_forms(shape, None), needs_grad=needs_grad)
            assert_accurate(run(call, "flex"), call)


@pytest.mark.parametrize("lengths", [((0, 0), (0, 0)), ((0, 2), (0, 0)), ((0, 0), (0, 3)), ((2, 0), (0, 3))], ids=str)
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_calls_without_a_pair(lengths: tuple[tuple[int, int], ...], spare: int, layout: str) -> None:
    """No query, no key, or none in one sequence; with a sink, and a bias that may have no elements."""
    of_q, of_k = (torch.tensor(n) for n in lengths)
    most_q, most_k = (int(n.max()) for n in (of_q, of_k))
    if layout == "packed":
        edges = [torch.nn.functional.pad(n.cumsum(0), (1, 0)) for n in (of_q, of_k)]
        sequences = Sequences.packed(*edges, max_seqlen_q=most_q, max_seqlen_k=most_k)
        shape_q, shape_k, shape_lse = (int(of_q.sum()) + spare,), (int(of_k.sum()) + spare,), ()
    else:
        sequences = Sequences.padded(of_k, of_q)
        most_q, most_k = most_q + spare, most_k + spare
        shape_q, shape_k, shape_lse = (2, most_q), (2, most_k), (2,)
    q = torch.randn(*shape_q, 4, 16, requires_grad=True)
    k, v = (torch.randn(*shape_k, 2, 16, requires_grad=True) for _ in range(2))
    bias, sink = (torch.randn(shape, requires_grad=True) for shape in ((1, 1, most_q, most_k), (4,)))
    leaves = (q, k, v, bias, sink)
    dout, dlse = torch.randn(q.shape), torch.randn(*shape_lse, 4, shape_q[-1])
    found = []
    for backend in ("flex", "eager"):
        with eager_flex():
            out, lse = attention(
                *leaves[:4][:3], None, bias, sink=sink, sequences=sequences, return_lse=True, backend=backend
            )
            of_rows = dlse.masked_fill(lse == -torch.inf, 0.0)
            found.append((out, lse, *torch.autograd.grad((out, lse), leaves, (dout, of_rows))))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_no_sequences_at_all() -> None:
    q, sink = torch.randn(3, 4, 16, requires_grad=True), torch.randn(4, requires_grad=True)
    none = Sequences.packed(torch.tensor([0]), max_seqlen_q=4)
    with eager_flex():
        out, lse = attention(q, q, q, sink=sink, sequences=none, return_lse=True, backend="flex")
    assert not out.any() and (lse == -torch.inf).all()
    for x in torch.autograd.grad(out.sum(), (q, sink)):
        assert not x.any()


# Tiles.


def dense_pairs(
    spec: SequenceSpec, bounds: Tensor, mask: Tensor | None, packing: Packing, window: tuple[int, int], laid: LaidOut
) -> Tensor:
    """(heads, rows of queries, rows of keys): the pairs that a call allows, by a loop over its pairs of tokens."""
    heads = 1 if mask is None else mask.shape[1]
    pairs = torch.zeros(heads, len(laid.queries.token), len(laid.keys.token), dtype=torch.bool)
    for s, (first_q, len_q, first_k, len_k) in enumerate(bounds.tolist()):
        start_q, start_k = (
            first if is_packed else s * rows
            for first, is_packed, rows in (
                (first_q, spec.packs_queries, spec.rows_q),
                (first_k, spec.packs_keys, spec.rows_k),
            )
        )
        i, j = torch.arange(len_q)[:, None], torch.arange(len_k)[None]
        allowed = torch.ones(heads, len_q, len_k, dtype=torch.bool)
        middle = i + len_k - len_q
        if window[0] >= 0:
            allowed &= j >= middle - window[0]
        if window[1] >= 0:
            allowed &= j <= middle + window[1]
        if mask is not None:
            entry = mask[s if packing == "none" and mask.shape[0] > 1 else 0]
            rows = i + (first_q if packing == "queries" else 0) if mask.shape[2] > 1 else i * 0
            columns = j + (first_k if packing == "keys" else 0) if mask.shape[3] > 1 else j * 0
            allowed &= entry[:, rows, columns]
        at_q = laid.queries.row[start_q : start_q + len_q].long()
        at_k = laid.keys.row[start_k : start_k + len_k].long()
        pairs[:, at_q[:, None], at_k[None]] = allowed
    return pairs


WINDOWS = ((-1, -1), (-1, 0), (100, 0), (20, 150))
MASKS: tuple[tuple[str, Packing, tuple[int, ...] | None], ...] = (
    ("none", "none", None),
    ("by position", "none", (5, 2, 300, 270)),
    ("by position, shared", "none", (1, 1, 300, 270)),
    ("by position, of keys", "none", (5, 4, 1, 270)),
    ("by position, of queries", "none", (1, 2, 300, 1)),
    ("of sequences", "none", (5, 1, 1, 1)),
    ("rows", "queries", (1, 2, 730, 270)),
    ("query", "queries", (1, 1, 730, 1)),
    ("keys", "keys", (1, 4, 1, 605)),
)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("packing", "shape"), [x[1:] for x in MASKS], ids=[x[0] for x in MASKS])
def test_tile_lists_and_limits_against_brute_force(
    packing: Packing, shape: tuple[int, ...] | None, window: tuple[int, int]
) -> None:
    cu_q, cu_k = torch.tensor([0, 300, 300, 557, 600, 728]), torch.tensor([0, 270, 274, 274, 474, 603])
    used = {"seqlens_q": torch.tensor([300, 0, 256, 43, 100]), "seqlens_k": torch.tensor([256, 4, 0, 200, 129])}
    sequences = Sequences.packed(cu_q, cu_k, max_seqlen_q=300, max_seqlen_k=270, **used)
    q, k = torch.zeros(730, 4, 1), torch.zeros(605, 2, 1)
    spec = sequences.spec(q, k, k)
    bounds = sequences.view(spec).bounds
    mask = None
    if shape is not None:
        generator = torch.Generator().manual_seed(sum(shape))
        # Whole stretches on and off, single elements flipped in some: every class of tile occurs.
        coarse = torch.rand(*shape[:2], -(-shape[2] // 150), -(-shape[3] // 150), generator=generator) < 0.6
        mask = coarse.repeat_interleave(150, 2).repeat_interleave(150, 3)[:, :, : shape[2], : shape[3]]
        mask = mask ^ (torch.rand(shape, generator=generator) < 1e-4)
    laid = prepare_sequences(bounds, mask, packing, extents(spec), window, 4)
    pairs = dense_pairs(spec, bounds, mask, packing, window, laid)
    check_lists(laid, pairs, 4)
    if mask is None:
        key = torch.arange(pairs.shape[2])
        assert laid.blocks.lower is not None and laid.blocks.upper is not None
        inside = (key >= laid.blocks.lower[:, None]) & (key <= laid.blocks.upper[:, None])
        assert torch.equal(inside, pairs[0])


def check_lists(laid: LaidOut, pairs: Tensor, num_heads: int) -> None:
    """What is allowed somewhere is listed once; tiles that are allowed everywhere as such; columns as rows."""
    lists = laid.blocks.lists
    assert lists is not None
    heads = lists.kv_num_blocks.shape[1]
    assert heads == (1 if pairs.shape[0] == 1 else num_heads)
    pairs = pairs.repeat_interleave(heads // pairs.shape[0], 0)
    tiles = pairs.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    partial = listed(lists.kv_num_blocks, lists.kv_indices, some.shape[2])[0]
    full = listed(lists.full_kv_num_blocks, lists.full_kv_indices, some.shape[2])[0]
    assert torch.equal(full, every)
    assert not (partial & full).any() and not (some & ~(partial | full)).any()
    for by_row, counts, indices in (
        (partial, lists.q_num_blocks, lists.q_indices),
        (full, lists.full_q_num_blocks, lists.full_q_indices),
    ):
        assert torch.equal(listed(counts, indices, some.shape[1])[0], by_row.transpose(1, 2))
    for x in lists:
        assert x.dtype == torch.int32 and x.is_contiguous()


@pytest.mark.parametrize("seed", range(30))
def test_layouts_of_random_sequences(seed: int) -> None:
    """Each token has a row, its row has it, no tile has tokens of two sequences, and bounds hold what they bound."""
    rng = random.Random(seed)
    number, window = rng.randint(1, 7), rng.choice(WINDOWS)
    slots = [[rng.choice((0, 1, 60, 127, 128, 129, 300)) for _ in range(number)] for _ in range(2)]
    used = [[n if rng.random() < 0.5 else rng.randint(0, n) for n in side] for side in slots]
    named = {f"max_seqlen_{side}": max(n) + rng.choice((0, 200)) for side, n in zip("qk", slots) if rng.random() < 0.6}
    if rng.random() < 0.6:
        edges = [torch.tensor([0, *itertools.accumulate(n)]) for n in slots]
        sequences = Sequences.packed(*edges, **named, seqlens_q=torch.tensor(used[0]), seqlens_k=torch.tensor(used[1]))
        shapes = [(max(1, int(edge[-1]) + rng.choice((0, 3))), 2, 1) for edge in edges]
    else:
        sequences = Sequences.padded(torch.tensor(used[1]), torch.tensor(used[0]))
        shapes = [(number, max(1, *n), 2, 1) for n in slots]
    q, k = (torch.zeros(shape) for shape in shapes)
    spec = sequences.spec(q, k, k)
    bounds = sequences.view(spec).bounds
    laid = prepare_sequences(bounds, None, "none", extents(spec), window, 2)
    check_lists(laid, dense_pairs(spec, bounds, None, "none", window, laid), 2)
    for side, lengths, x in ((laid.queries, used[0], q), (laid.keys, used[1], k)):
        tokens = side.token[side.token >= 0]
        assert len(tokens) == sum(lengths) == int((side.row >= 0).sum())
        assert torch.equal(side.row[tokens.long()], (side.token >= 0).nonzero().flatten().to(torch.int32))
        assert len(side.row) == x.shape[:-2].numel()
        of_tiles = side.sequence.view(-1, BLOCK)
        assert torch.equal(of_tiles, of_tiles[:, :1].expand_as(of_tiles))
        for s, n in enumerate(lengths):
            own = (side.sequence == s) & (side.token >= 0)
            assert side.place[own].tolist() == list(range(n))


def test_wild_tables_leave_no_tensor() -> None:
    """What a GPU does not check: indices stay inside, whatever the tables say."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        spread = 10 ** int(torch.randint(1, 9, (), generator=generator))
        wild = [torch.randint(-spread, spread, (n,), generator=generator, dtype=torch.int32) for n in (6, 6, 5, 5)]
        sequences = Sequences("packed", *wild)
        spec = SequenceSpec("packed", 5, 400, 300, 160, 200)
        bounds = make_bounds(sequences._tables, sequences.device, spec)
        laid = prepare_sequences(bounds, torch.ones(5, 1, 160, 200, dtype=torch.bool), "none", extents(spec), (9, 0), 2)
        for side, tokens, most in ((laid.queries, 400, 160), (laid.keys, 300, 200)):
            for x, limit in ((side.token, tokens), (side.row, len(side.token)), (side.sequence, 5), (side.place, most)):
                assert int(x.min()) >= -1 and int(x.max()) < limit
            assert int(side.sequence.min()) >= 0 and int(side.place.min()) >= 0
        for x in laid.places:
            assert int(x.min()) >= 0
        assert int(laid.places.token.max()) < 400
        lists = laid.blocks.lists
        assert lists is not None
        for counts, indices in zip(lists[::2], lists[1::2], strict=True):
            assert int(counts.max()) <= indices.shape[3]
            assert int(indices.min()) >= 0
        assert int(lists.kv_indices.max()) < lists.q_indices.shape[2]
        assert int(lists.q_indices.max()) < lists.kv_indices.shape[2]


@pytest.mark.parametrize(("packing", "shape"), [x[1:] for x in MASKS], ids=[x[0] for x in MASKS])
def test_the_operator_is_what_it_tells_compilers(packing: Packing, shape: tuple[int, ...] | None) -> None:
    sequences = Sequences.packed(
        torch.tensor([0, 300, 300, 557, 600, 728]), torch.tensor([0, 270, 274, 274, 474, 603]), max_seqlen_q=300,
        max_seqlen_k=270,
    )  # fmt: skip
    q, k = torch.zeros(730, 4, 1), torch.zeros(605, 2, 1)
    spec = sequences.spec(q, k, k)
    queries, keys = (list(x) for x in extents(spec))
    mask = None if shape is None else torch.rand(shape) < 0.5
    given = (sequences.view(spec).bounds, mask, packing, queries, keys, 10, 0, 4)
    torch.library.opcheck(sequence_blocks._OPERATOR, given)


# What is compiled.


def one_class(seed: int, bias: str, mask: str) -> None:
    """A packed call, both passes, of lengths and a number of sequences that go by the seed."""
    rng = random.Random(seed)
    number = rng.randint(2, 7)
    of_q, of_k = ([rng.choice((0, 1, 5, 130, 260)) for _ in range(number)] + [3] for _ in range(2))
    edges = [torch.tensor([0, *itertools.accumulate(n)]) for n in (of_q, of_k)]
    most_q, most_k = max(of_q) + rng.choice((0, 3)), max(of_k) + rng.choice((0, 4))
    sequences = Sequences.packed(*edges, max_seqlen_q=most_q, max_seqlen_k=most_k)
    tokens_q, tokens_k = (int(edge[-1]) for edge in edges)
    shapes = {
        "shared": (1, 4, most_q, most_k),
        "by position": (number + 1, 1, most_q, most_k),
        "rows": (2, tokens_q, most_k),
        "keys": (4, 1, tokens_k),
    }
    q = torch.randn(tokens_q, 4, 16, requires_grad=True)
    k, v = (torch.randn(tokens_k, 2, 16, requires_grad=True) for _ in range(2))
    added = torch.randn(shapes[bias], requires_grad=True)
    allowed = None if mask == "none" else torch.rand(shapes[mask]) < 0.7
    call = {"is_causal": True, "sequences": sequences}
    found, wanted = (attention(q, k, v, allowed, added, **call, backend=name) for name in ("flex", "eager"))
    leaves = (q, k, v, added)
    for x, y in zip(*((out, *torch.autograd.grad(out.square().sum(), leaves)) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bias", "mask"), [("shared", "rows"), ("rows", "by position"), ("keys", "none")])
def test_new_lengths_and_numbers_of_sequences_settle_after_two_compilations(bias: str, mask: str) -> None:
    compilations = Counter()
    with eager_flex():
        for seed in range(12):
            one_class(seed, bias, mask)
    assert compilations() <= 2


compiled_on_cpu = pytest.mark.xdist_group("flex_compile")


@compiled_on_cpu
def test_compiled_nothing_of_one_sequence_reaches_another() -> None:
    """NaN in all other sequences and in rows of none leaves the bits of one as they were; tiles keep them apart."""
    assert graph.compiler == "inductor"
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((300, 4), (340, 2), (340, 2)))
    bias = torch.randn(4, 300, 200, generator=generator)
    cu_q, cu_k = torch.tensor([0, 40, 190, 295]), torch.tensor([0, 60, 250, 337])
    sequences = Sequences.packed(cu_q, cu_k, max_seqlen_q=150, max_seqlen_k=200)
    flags: dict[str, Any] = {"is_causal": True, "softcap": 3.0, "sequences": sequences}
    wanted = attention(q, k, v, None, bias, backend="flex", **flags)
    exact = attention(*(x.double() for x in (q, k, v)), None, bias.double(), backend="eager", **flags)
    assert (wanted - exact).norm() <= 1e-5 * exact.norm()
    assert not wanted[295:].any()
    bad = [x.clone() for x in (q, k, v, bias)]
    for x, rows in zip(bad, (slice(40, 190), *(slice(60, 250),) * 2), strict=False):
        kept = x[rows].clone()
        x.fill_(torch.nan)
        x[rows] = kept
    bad[3][:, :40], bad[3][:, 190:], bad[3][:, :, 190:] = torch.nan, torch.nan, torch.nan
    found = attention(*bad[:3], None, bad[3], backend="flex", **flags)
    assert torch.equal(found[40:190], wanted[40:190])
    assert not found[295:].any()


@compiled_on_cpu
def test_compiled_padded_slots_with_a_mask() -> None:
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(3, n, h, 16, generator=generator) for n, h in ((140, 4), (150, 2), (150, 2)))
    mask = torch.rand(3, 1, 140, 150, generator=generator) < 0.5
    used = torch.tensor([150, 9, 131])
    k[1, 9:], v[1, 9:], k[2, 131:], v[2, 131:] = (torch.nan,) * 4
    sequences = Sequences.padded(used, torch.tensor([140, 70, 129]))
    found = attention(q, k, v, mask, is_causal=True, sequences=sequences, backend="flex")
    exact = attention(q, k, v, mask, is_causal=True, sequences=sequences, backend="eager")
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [None, (1, 4, 24, 24), (2, 30, 24), (4, 1, 30)], ids=str)
def test_inside_a_callers_graph(form: tuple[int, ...] | None) -> None:
    """Sequences made in the graph, a bias computed there, both passes."""
    generator = torch.Generator().manual_seed(10)
    q, k, v = (torch.randn(30, h, 16, generator=generator).requires_grad_() for h in (4, 2, 2))
    scores = None if form is None else torch.randn(form, generator=generator).requires_grad_()

    def layer(edges: Tensor, *leaves: Tensor | None) -> Tensor:
        q, k, v, scores = leaves
        sequences = Sequences.packed(edges, max_seqlen_q=24)
        bias = None if scores is None else scores.exp()
        return 2 * attention(q + 1, k, v, None, bias, is_causal=True, sequences=sequences, backend=backend)

    leaves = [x for x in (q, k, v, scores) if x is not None]
    with eager_flex():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for edges in ([0, 12, 30], [0, 20, 25]):
            backend, found = "flex", []
            for function in (compiled, layer):
                out = function(torch.tensor(edges), q, k, v, scores)
                found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
                backend = "eager"
            for x, y in zip(*found, strict=True):
                assert (x - y).norm() <= 1e-4 * y.norm()
    torch._dynamo.reset()


@compiled_on_cpu
def test_compiled_inside_a_callers_graph() -> None:
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(40, h, 16, generator=generator) for h in (4, 2, 2))
    scores = torch.randn(1, 2, 25, 25, generator=generator)

    def layer(edges: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        sequences = Sequences.packed(edges, max_seqlen_q=25)
        return 2 * attention(
            q + 1, k, v, scores > -1, scores.exp(), is_causal=True, sequences=sequences, backend=backend
        )

    backend, edges = "flex", torch.tensor([0, 15, 40])
    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True)(edges, q, k, v, scores)
        backend = "eager"
        wanted = layer(edges, q, k, v, scores)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# Rules.


def explained(q: tuple[int, ...], spec: SequenceSpec, **call: Any) -> flash_dmattn.Explanation:
    return flash_dmattn.explain_problem(q, sequences=spec, device="sm_90", **call)


def test_explain_names_the_copies() -> None:
    spec = SequenceSpec("packed", 8, 8192, 8192, 2048, 2048)
    (verdict,) = (v for v in explained((1, 8192, 16, 64), spec, dtype="bf16").verdicts if v.backend == "flex")
    assert verdict.accepts
    # 8192 // 128 + 8 tiles of each; q, k, v and out; 4 lists of 72 x 72.
    assert (
        "copies q, k, v and out into rows of 128, none of which two sequences share, 72.0 MB, with 0.1 MB of lists"
        in (" ".join(verdict.notes))
    )


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (SequenceSpec("packed", 60000, 400000, 400000, 400000, 400000), "tile_lists", "has 3984765625 elements"),
        (SequenceSpec("packed", 1, 1 << 25, 1 << 25, 1 << 25, 1 << 25), "row_span", "spans 2147483648 elements"),
        (SequenceSpec("paged", 2, 1, 512, 1, 512, page_size=64), "paged", "paged is set"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_rules_of_sequences(change: SequenceSpec, code: str, text: str) -> None:
    rows = (change.number, change.rows_q) if change.has_pages else (1, change.rows_q)
    (verdict,) = (v for v in explained((*rows, 16, 64), change).verdicts if v.backend == "flex")
    (reason,) = (r for r in verdict.reasons if r.code == code)
    assert text in reason.text
    assert flex.probe().usable
