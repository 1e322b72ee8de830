"""All ranks of a call in one process: their slices together are the whole call, values and all gradients, in fp64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_calls import BIASES, P, ParallelCase, draw, layout_of, one_process, shard_scores

from flash_dmattn import Sequences
from flash_dmattn.backends.eager import BACKEND as EAGER
from flash_dmattn.backends.protocol import Backend, Backward, Forward
from flash_dmattn.distributed import SequenceLayout, ShardedMask
from flash_dmattn.distributed import exchange as exchanging
from flash_dmattn.distributed.documents import Spans
from flash_dmattn.distributed.exchange import places_in, runs_read
from flash_dmattn.distributed.operators import KeySum, RankRows, Sums
from flash_dmattn.distributed.slices import HeadGroup, plan, slice_problem
from flash_dmattn.gradients import with_dbias
from flash_dmattn.masks import IndexScores, PreparedMask, document_mask
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import AttentionProblem, Flags, Gradients, MaskView, NeedsGrad, causal_window
from flash_dmattn.problem.inputs import Inputs
from flash_dmattn.reference import formula

TOLERANCE = 1e-10
WINDOWS = (None, (3, -1), (0, 0), (2, 1), (-1, 2), (5, 9))


def simulated(case: ParallelCase, size: int, backend: Backend = EAGER) -> dict[str, torch.Tensor]:
    """Compute what ranks do between gathering keys and sending gradients back, and put it together."""
    x = draw(case)
    layout, layout_k = layouts = case.layouts(size)
    window = causal_window(case.is_causal, (-1, -1) if case.window_size is None else case.window_size)
    pieces: dict[str, list[torch.Tensor]] = {}
    dk, dv = torch.zeros_like(x.k), torch.zeros_like(x.v)
    shared_bias = case.bias is not None and case.bias[2] != "Lq"
    for rank in range(size):
        q, dout = layout.shard(x.q, 1, rank), layout.shard(x.dout, 1, rank)
        dlse = None if x.dlse is None else layout.shard(x.dlse, 2, rank)
        bias = None if x.bias is None or case.bias is None else shard_scores(case.bias, x.bias, layouts, rank)
        needs = NeedsGrad(True, True, True, bias is not None, False)
        scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
        flags = Flags(*window, scale, case.softcap, False)
        parts = plan(layout, rank, layout_k.length, window)
        views = [MaskView() for _ in parts]
        if x.mask is not None:
            mask = layout.shard(x.mask, 2, rank)
            views = [MaskView("dense", (part.cut(mask),)) for part in parts]
        # The keys that the rank reads, as where ranks send parts, or all of them.
        held = runs_read(layout, rank, layout_k.length, window) if case.seed % 2 else ((0, layout_k.length),)
        kept = torch.cat([torch.arange(0), *(torch.arange(*run) for run in held)])
        rows = RankRows(parts, places_in(held, parts), views, [None] * len(parts), q, bias, None, flags, needs)
        dtype = formula.softmax_dtype(q)
        out, lse = torch.empty_like(dout), torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype, device=q.device)
        sums = Sums.of(rows)
        groups = case.groups or 1
        for heads in [HeadGroup(place, groups) for place in range(groups)]:
            k, v = (y[:, kept, heads.of(case.num_heads_k)] for y in (x.k, x.v))
            rows.forward(backend, heads, k, v, out, lse)
            finite = None if dlse is None else dlse.masked_fill(lse == -torch.inf, 0)
            dk_part, dv_part = rows.backward(backend, heads, k, v, out, lse, dout, finite, sums, q.dtype)
            dk[:, kept, heads.of(case.num_heads_k)] += dk_part
            dv[:, kept, heads.of(case.num_heads_k)] += dv_part
        for name, y in (("out", out), ("lse", lse), ("dq", sums.q), ("dbias", sums.bias)):
            if y is not None:
                pieces.setdefault(name, []).append(y)
    results = {"dk": dk, "dv": dv}
    for name, own in pieces.items():
        if name == "dbias" and shared_bias:
            results[name] = sum(own)  # type: ignore[assignment]
        else:
            results[name] = layout.unshard(own, 2 if name in ("lse", "dbias") else 1)
    return results


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of small calls may start behind the first key."""
    monkeypatch.setattr("flash_dmattn.distributed.slices.ALIGNMENT", 4)


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("bias", [name for name in BIASES if not name.startswith("sharded")])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
def test_slices_together_are_the_whole_call(bias: str, layout: str) -> None:
    every = list(enumerate(itertools.product((16, 24), (8, 16, 32), (False, True), WINDOWS)))
    for number, (seqlen_q, seqlen_k, causal, window) in random.Random(f"{layout} {bias}").sample(every, 30):
        size = (1, 2, 4)[number % 3]
        case = P(
            layout=layout,
            bias=bias,
            mask=("none", "full", "shared")[number // 3 % 3],
            is_causal=causal,
            window_size=window,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            groups=1 + number % 2 if bias != "one_head" else 1,
            dlse=True,
            softcap=1.5 * (number % 5 == 0),
            seed=number,
        )
        wanted, results = one_process(case, draw(case)), simulated(case, size)
        assert wanted.keys() == results.keys()
        for name, x in wanted.items():
            assert torch.equal(x == -torch.inf, results[name] == -torch.inf)
            error = float((x - results[name]).nan_to_num().abs().max())
            assert error < TOLERANCE, (case, size, name, error)


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, (40, -1)), (False, (9, 5))])
@pytest.mark.parametrize("rows", [True, False])
def test_a_sharded_mask_is_that_of_the_rank(causal: bool, window: Any, rows: bool) -> None:
    torch.manual_seed(0)
    layout, layout_k = SequenceLayout.zigzag(288, 3), SequenceLayout.contiguous(144, 3)
    mask = torch.rand(2, 4, 288 if rows else 1, 144) > 0.4
    keys, i = torch.arange(144), torch.arange(288)[:, None] + 144 - 288
    left, right = causal_window(causal, (-1, -1) if window is None else window)
    band = (keys >= i - left) | torch.tensor(left < 0)
    band &= (keys <= i + right) | torch.tensor(right < 0)
    for rank in range(3):
        own = layout.shard(mask, 2, rank) if rows else mask
        prepared = ShardedMask.from_mask(own, layout, rank, layout_k=layout_k, is_causal=causal, window_size=window)
        wanted = layout.shard((mask & band).expand(2, 4, 288, 144), 2, rank)
        assert torch.equal(prepared.dense(), wanted)
        assert torch.equal(prepared.to("cpu").dense(), wanted)
        assert f"rank={rank} of 3" in repr(prepared)


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize(
    "layout", [SequenceLayout.zigzag(48, 2), SequenceLayout.balanced([5, 1, 9, 2], 48, 3, pieces=2)], ids=["2", "3"]
)
@pytest.mark.parametrize("blocks", [(1, 1), (1, 4), (4, 4), (2, 8)])
def test_lists_of_ranks_are_those_of_the_whole_call(layout: SequenceLayout, blocks: tuple[int, int]) -> None:
    torch.manual_seed(0)
    number = layout.length // blocks[0]
    runs = tuple(tuple((a // blocks[0], b // blocks[0]) for a, b in own) for own in layout.intervals)
    rows = SequenceLayout(number, runs)
    index = torch.randint(-1, -(-48 // blocks[1]), (2, 1, number, 5))
    for band in ({"is_causal": True}, {"window_size": (9, 3)}, {}):
        sizes = {"seqlen_q": 48, "seqlen_k": 48, "block_size": blocks}
        every = PreparedMask.from_lists(index, **sizes, **band).dense()  # type: ignore[arg-type]
        for rank in range(layout.world_size):
            if blocks[1] > 4 and "window_size" in band:  # slices begin at multiples of 4 here
                continue
            own = rows.shard(index, 2, rank)
            lists = ShardedMask.from_lists(own, layout, rank, block_size=blocks, **band)  # type: ignore[arg-type]
            assert torch.equal(lists.dense(), layout.shard(every, 2, rank))
            # Entries that remain are in their places.
            kept: Any = lists.lists
            assert bool(((kept.index == own) | (kept.index == -1)).all())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["index", "tensor", "blocks"])
def test_the_best_keys_of_ranks_are_those_of_the_whole_call(kind: str, size: int) -> None:
    """Short slices have fewer keys than entries."""
    torch.manual_seed(0)
    layout, block_size = SequenceLayout.zigzag(32, size), (1, 4) if kind == "blocks" else 1
    scores: Any = torch.rand(2, 1, 32, 8 if kind == "blocks" else 32)
    if kind == "index":
        scores = IndexScores(torch.randn(2, 32, 2, 4), torch.randn(2, 32, 4), torch.rand(2, 32, 2))
    causal = {"is_causal": True, "local": 1, "block_size": block_size}
    every: Any = PreparedMask.from_topk_lists(scores, 6, seqlen_q=32, seqlen_k=32, **causal)  # type: ignore[arg-type]
    for rank in range(size):
        if kind == "index":
            own: Any = IndexScores(layout.shard(scores.q, 1, rank), scores.k, layout.shard(scores.weights, 1, rank))
        else:
            own = layout.shard(scores, 2, rank)
        lists = ShardedMask.from_topk_lists(own, 6, layout, rank, **causal)  # type: ignore[arg-type]
        kept: Any = lists.lists
        assert torch.equal(kept.keys, layout.shard(every.keys, 2, rank))
        assert torch.equal(lists.dense(), layout.shard(every.dense(), 2, rank))
        if kind == "index":
            assert torch.equal(own.at(kept), layout.shard(scores.at(every), 2, rank))


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("window", [None, (3, -1), (2, 1), (-1, 0), (0, 5)])
def test_documents_of_ranks_are_those_of_the_whole_call(window: Any) -> None:
    rng = random.Random(str(window))
    for name, size in (("zigzag", 1), ("zigzag", 3), ("contiguous", 2), ("balanced", 2)):
        cu_seqlens = sorted(rng.choices(range(49), k=rng.choice((2, 5, 9))))
        cu_seqlens[0], cu_seqlens[-1] = 0, 48
        used = [rng.choice((n, n // 2)) for n in torch.tensor(cu_seqlens).diff().tolist()]
        layout = layout_of(name, 48, size)
        documents = Sequences.packed(torch.tensor(cu_seqlens), seqlens_q=torch.tensor(used))
        ids = torch.full((48,), -1)
        for number, (first, length) in enumerate(zip(cu_seqlens, used)):
            ids[first : first + length] = number
        every = PreparedMask.from_mask(document_mask(ids), window_size=window).dense()
        for rank in range(size):
            mask = ShardedMask.from_sequences(documents, layout, rank, window_size=window)
            assert torch.equal(mask.dense(), layout.shard(every, 2, rank)), (cu_seqlens, used, layout)
            assert torch.equal(mask.to("cpu").dense(), mask.dense())
            read = runs_read(layout, rank, 48, window or (-1, -1), mask.spans)
            assert all(any(a <= j < b for a, b in read) for j in mask.dense()[0, 0].any(0).nonzero().flatten().tolist())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (30, 0), (20, 9)])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_each_pair_of_a_sequence_is_in_one_call(kind: str, window: tuple[int, int]) -> None:
    """Numbers of rows and keys begin at blocks of dropout."""
    rng = random.Random(f"{kind} {window}")
    for name, size in (("zigzag", 1), ("zigzag", 3), ("contiguous", 2), ("balanced", 2)):
        layout, cuts = layout_of(name, 480, size), (0, *sorted(rng.choices(range(481), k=4)), 480)
        bounds = [x for pair in itertools.pairwise(cuts) for x in pair]
        spans, allowed = Spans(tuple(bounds), "packed"), torch.zeros(1, 480, 480)
        if kind == "padded":
            spans, allowed = Spans((480, 200, 480, 200, 70, 480, 0, 9), "padded"), torch.zeros(4, 480, 480)
        for piece in spans.pieces(0, 480):
            band = PreparedMask.from_mask(torch.ones(piece.seqlen_q, piece.seqlen_k) > 0, window_size=window).dense()
            rows = slice(piece.first, piece.first + piece.seqlen_q)
            own = allowed[piece.entry : piece.entry + piece.how_many, rows, piece.first : piece.first + piece.seqlen_k]
            own += band[0]
        for rank in range(size):
            seen = torch.zeros(allowed.shape[0], layout.local_length, 480)
            for part in plan(layout, rank, 480, window, spans):
                band = PreparedMask.from_mask(
                    torch.ones(part.seqlen_q, part.seqlen_k) > 0, window_size=part.window
                ).dense()
                seen[part.batch, part.rows, part.keys] += band[0]
                assert (part.first_row - part.lead(0.5)) % 16 == 0 == part.first_key % 16 and part.lead(0.0) == 0
            assert torch.equal(seen, layout.shard(allowed, 1, rank)), (spans, layout)


def test_the_description_of_a_slice_has_the_strides_of_its_call() -> None:
    """A slice with rows of zeros before its own has copies, contiguous whatever the bias was."""
    layout, window = SequenceLayout.contiguous(64, 2), (-1, -1)
    q, k = torch.randn(2, 32, 4, 8), torch.randn(2, 64, 4, 8)
    flags = Flags(*window, 1.0, 0.0, False, dropout_p=0.5)
    spans = Spans((0, 5, 5, 64), "packed")
    for bias in (torch.randn(2, 32, 64, 4).permute(0, 3, 1, 2), torch.randn(1, 4, 32, 64), torch.randn(2, 1, 1, 64)):
        needs, heads = NeedsGrad(True, True, True, True, False), HeadGroup(0, 1)
        parts = plan(layout, 1, 64, window, spans)
        rows = RankRows(parts, (), [], [], q, bias, None, flags, needs, is_split=True)
        rank = describe_operands(Inputs(q, k, k, MaskView(), bias, None), flags, needs)
        assert any(part.lead(0.5) for part in parts)
        for part in parts:
            described = slice_problem(rank, part, heads, 64)
            called, _ = rows._slice(part, heads, MaskView(), None, k, k, part.keys)
            assert described.bias == called.bias, part
            assert described.q_strides == called.q_strides or not part.lead(0.5)


def test_rows_of_one_document_need_no_mask() -> None:
    layout = SequenceLayout.contiguous(64, 4)
    documents = Sequences.packed(torch.tensor([0, 5, 16, 64]))
    masks = [ShardedMask.from_sequences(documents, layout, rank, is_causal=True) for rank in range(4)]
    assert [mask.masks[0] is None for mask in masks] == [False, True, True, True]
    assert [plan(layout, rank, 64, (-1, 0), masks[0].spans)[0][2:4] for rank in range(4)] == [
        (0, 16),
        (16, 32),
        (16, 48),
        (16, 64),
    ]
    assert masks[1].form == "intervals" and masks[1].device.type == "cpu"


def test_ranks_of_a_head_stand_side_by_side() -> None:
    """As the query heads of a key-value head do, where there are more ranks than such heads."""
    assert [HeadGroup(place, 4).of(2) for place in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [HeadGroup(place, 4).of(8) for place in range(4)] == [slice(i, i + 2) for i in (0, 2, 4, 6)]


@pytest.mark.parametrize("sends_parts", (True, False))
def test_gradients_of_all_ranks_are_added_in_fp32(monkeypatch: pytest.MonkeyPatch, sends_parts: bool) -> None:
    """The sum of 256, 1, 1 and 1, which four ranks send for the same keys, would be 256 in bfloat16."""

    def send(received: torch.Tensor, sent: torch.Tensor, **others: Any) -> Any:
        received.copy_(sent)  # what this rank sends to a rank is what that one sends to it
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(exchanging, "dist", SimpleNamespace(all_to_all_single=send))
    monkeypatch.setattr(exchanging, "process_group", lambda name: None)
    keys = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16).repeat_interleave(2).view(1, 8, 1)
    each = tuple(((2 * rank, 2 * rank + 2),) for rank in range(4))
    if sends_parts:
        moves = exchanging.Moves(0, each[0], ((0, 8),), (each[0],) * 4, each, ())
        pending = exchanging.give_back([keys], 1, moves, "")
    else:
        pending = exchanging.scatter([keys], 1, SequenceLayout.contiguous(8, 4), 0, "")
    assert torch.equal(pending.wait()[0], torch.full((1, 2, 1), 259.0))


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("exchange", [torch.bfloat16, torch.float32])
def test_gradients_layout_keys_are_rounded_once(number: int, exchange: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = torch.zeros(2, 24, 2, 4, dtype=torch.bfloat16)
    parts = [slice(*bounds) for bounds in ((0, 8), (4, 20), (0, 24))][-number:]
    total, exact = KeySum(keys, number, exchange), keys.float()
    for part in parts:
        gradient = torch.randn(2, part.stop - part.start, 2, 4).bfloat16()
        exact[:, part] += gradient
        total.add((slice(None), part), gradient.clone())
    assert torch.equal(total.total(), exact.to(exchange))


def bits_of(case: ParallelCase, size: int, backend: Backend = EAGER) -> dict[str, torch.Tensor]:
    """`simulated`, in memory that is NaN until something is written."""
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
        return simulated(case, size, backend)


@pytest.mark.usefixtures("starts")
def test_gradients_of_pairs_that_no_slice_has_are_zero() -> None:
    case = P(bias="full", window_size=(3, 1), dlse=True)
    parts = plan(case.layouts(2)[0], 0, 32, (3, 1))
    assert any(part.start > 0 for part in parts) and any(part.stop < 32 for part in parts)
    results, wanted = bits_of(case, 2), one_process(case, draw(case))
    assert float((results["dbias"] - wanted["dbias"]).abs().max()) < TOLERANCE


def placing(does: bool = True) -> tuple[Backend, list[torch.Tensor]]:
    """A backend that computes as eager does and puts dbias where it is told to, if it `does`; and all these places."""
    places: list[torch.Tensor] = []

    def plan_backward(problem: AttentionProblem) -> Backward:
        assert EAGER.plan_backward is not None
        run = EAGER.plan_backward(problem)

        def backward(*arguments: Any, dbias_out: torch.Tensor | None = None) -> Gradients:
            gradients = run(*arguments)
            if dbias_out is None:
                return gradients
            dbias = gradients[3]
            assert dbias is not None and (dbias.shape, dbias.dtype) == (dbias_out.shape, dbias_out.dtype)
            places.append(dbias_out)
            return with_dbias(gradients, dbias_out) if does else gradients

        return backward

    return replace(EAGER, plan_backward=plan_backward, stores_dbias=True), places


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", ["full", "shared", "group", "one_head"])
def test_the_place_of_a_slice_is_handed_to_a_backend_that_stores_there(bias: str, groups: int) -> None:
    drawn: Iterator[Any] = itertools.product(("zigzag", "balanced"), (16, 32), (False, True), (None, (3, -1), (5, 9)))
    for layout, seqlen_k, causal, window in drawn:  # of 16 keys some slices have none
        case = P(layout=layout, bias=bias, is_causal=causal, window_size=window, seqlen_k=seqlen_k)
        case = case.with_(groups=1 if bias == "one_head" else groups)
        (storing, places), (copying, ignored) = placing(), placing(does=False)
        wanted, results = bits_of(case, 2), bits_of(case, 2, storing)
        assert wanted.keys() == results.keys() and "dbias" in wanted
        assert all(torch.equal(x, results[name]) for name, x in wanted.items())
        layout, band = case.layouts(2)[0], causal_window(causal, window or (-1, -1))
        slices = [part for rank in range(2) for part in plan(layout, rank, case.seqlen_k, band)]
        keys = [part.seqlen_k for part in slices] * (case.groups or 1)
        assert sorted(x.shape[3] for x in places) == sorted(keys)
        assert all(x.stride(2) == case.seqlen_k for x in places), "a place in the gradient of whole rows"
        assert torch.equal(wanted["dbias"], bits_of(case, 2, copying)["dbias"]) and ignored


@pytest.mark.parametrize("bias", ["query", "keys", "head"])
def test_gradients_without_a_place_are_not_asked_for_in_one(bias: str) -> None:
    storing, places = placing()
    case = P(bias=bias, is_causal=True)
    assert torch.equal(simulated(case, 2, storing)["dbias"], simulated(case, 2)["dbias"])
    assert not places


def test_the_largest_slice_is_the_first_of_a_forward_pass() -> None:
    sizes: list[int] = []

    def plan_forward(problem: AttentionProblem) -> Forward:
        run = EAGER.plan_forward(problem)
        return lambda inputs: sizes.append(problem.seqlen_q * problem.seqlen_k) or run(inputs)  # type: ignore[func-returns-value]

    watched = replace(EAGER, plan_forward=plan_forward)
    case = P(is_causal=True, seqlen_q=64, seqlen_k=64)
    results, wanted = simulated(case, 2, watched), one_process(case, draw(case))
    assert sizes == [16 * 64, 16 * 16, 32 * 48]  # of rank 0, then of rank 1, whose chunks are neighbours
    assert float((results["out"] - wanted["out"]).abs().max()) < TOLERANCE
