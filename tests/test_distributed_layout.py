"""`SequenceLayout` and the plan of slices: which rank has what, and what each of its calls is."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
import torch

from flash_dmattn.distributed import SequenceLayout
from flash_dmattn.distributed.layout import from_flat
from flash_dmattn.distributed.slices import plan, slice_keys
from flash_dmattn.problem import causal_window

LAYOUTS = [
    SequenceLayout.zigzag(24, 3),
    SequenceLayout.zigzag(8, 1),
    SequenceLayout.contiguous(12, 4),
    SequenceLayout.balanced([5.0, 1.0, 1.0, 1.0, 8.0], 40, 2, pieces=5),
    SequenceLayout(6, (((1, 2), (3, 5)), ((0, 1), (2, 3), (5, 6)))),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_position_is_on_one_rank_and_comes_back(layout: SequenceLayout) -> None:
    positions = [layout.positions(rank) for rank in range(layout.world_size)]
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(layout.length))
    assert {len(x) for x in positions} == {layout.local_length}
    x = torch.randn(2, layout.length, 3, requires_grad=True)
    pieces = [layout.shard(x, 1, rank) for rank in range(layout.world_size)]
    for piece, own in zip(pieces, positions):
        assert torch.equal(piece, x[:, own])
    back = layout.unshard(pieces, 1)
    assert torch.equal(back, x)
    (gradient,) = torch.autograd.grad((back * back).sum(), x)
    assert torch.equal(gradient, 2 * x)
    assert torch.equal(layout.unshard([p.transpose(1, 2) for p in pieces], -1), x.transpose(1, 2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_is_a_value(layout: SequenceLayout) -> None:
    assert from_flat(layout.flat) == layout == pickle.loads(pickle.dumps(layout))
    assert hash(from_flat(layout.flat)) == hash(layout)


def test_chunks_in_zigzag() -> None:
    assert SequenceLayout.zigzag(24, 3).intervals == (((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 16),))


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
def test_ranks_are_joined(name: str) -> None:
    layout = getattr(SequenceLayout, name)(48, 6)
    outer, inner = layout.joined(3)
    assert outer.world_size == len(inner) == 2
    for rank in range(6):
        place, within = divmod(rank, 3)
        own = outer.positions(place)[inner[place].positions(within)]
        assert torch.equal(own, layout.positions(rank))
    assert layout.joined(1)[0] == layout
    with pytest.raises(ValueError, match="number is 4; it needs to divide the 6 ranks"):
        layout.joined(4)


def test_zigzag_shares_causal_work_equally() -> None:
    layout = SequenceLayout.zigzag(96, 4)
    work = [int((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1


def test_balanced_work() -> None:
    generator = random.Random(0)
    for size, pieces in ((2, 4), (4, 8), (3, 5)):
        work = [generator.random() ** 3 for _ in range(size * pieces)]
        layout = SequenceLayout.balanced(work, 2 * len(work), size, pieces=pieces)
        loads = [sum(work[p // 2] for p in layout.positions(rank).tolist()) / 2 for rank in range(size)]
        assert max(loads) - min(loads) <= max(work), loads
        contiguous = SequenceLayout.contiguous(2 * len(work), size)
        plain = [sum(work[p // 2] for p in contiguous.positions(rank).tolist()) / 2 for rank in range(size)]
        assert max(loads) <= max(plain)


def test_work_of_runs_that_chunks_do_not_end_with() -> None:
    layout = SequenceLayout.balanced([3.0, 0.0, 0.0], 8, 2, pieces=2)  # runs of 3 rows, chunks of 2
    assert layout.intervals == (((0, 2), (6, 8)), ((2, 6),))


REFUSED = {
    "multiple": (lambda: SequenceLayout.zigzag(12, 4), ValueError, "length is 12; it needs to be a multiple of 8"),
    "contiguous": (lambda: SequenceLayout.contiguous(5, 2), ValueError, "length is 5; it needs to be a multiple of 2"),
    "ranks": (lambda: SequenceLayout.zigzag(8, 0), ValueError, "world_size is 0; it needs to be 1 or more"),
    "kind": (lambda: SequenceLayout.zigzag(8.0, 2), TypeError, "length is 8.0; it needs to be an int"),
    "bool": (lambda: SequenceLayout(2, (((0, True),), ((1, 2),))), TypeError, "layout has True among"),
    "none": (lambda: SequenceLayout(4, ((), ((0, 4),))), ValueError, "each rank needs one interval"),
    "gap": (lambda: SequenceLayout(4, (((0, 1),), ((2, 3),))), ValueError, "position 1 comes next"),
    "twice": (lambda: SequenceLayout(4, (((0, 3),), ((2, 4),))), ValueError, "position 3 comes next"),
    "end": (lambda: SequenceLayout(4, (((0, 1),), ((1, 2),))), ValueError, "ends at position 2; it needs to cover"),
    "uneven": (lambda: SequenceLayout(3, (((0, 1),), ((1, 3),))), ValueError, r"ranks have \[1, 2\] rows"),
    "order": (lambda: SequenceLayout(2, (((1, 2), (0, 1)),)), ValueError, "they need to ascend"),
    "work": (lambda: SequenceLayout.balanced([], 8, 2, pieces=2), ValueError, "work has 0 entries; it needs 1 to 8"),
    "rank": (lambda: LAYOUTS[0].positions(3), ValueError, "rank is 3; the layout has ranks 0 to 2"),
    "shard": (lambda: LAYOUTS[0].shard(torch.ones(5), 0, 0), ValueError, "x has size 5 along dim 0"),
    "number": (lambda: LAYOUTS[0].unshard([torch.ones(8)], 0), ValueError, "pieces has 1 tensors; it needs one for"),
    "piece": (lambda: LAYOUTS[1].unshard([torch.ones(7)], 0), ValueError, "a piece has size 7 along dim 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        make()


WINDOWS = [None, (3, -1), (0, 0), (2, 1), (-1, 2), (5, 9), (-1, 0), (30, 30)]


def allowed(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> torch.Tensor:
    """(Lq, Lk): what a window, -1 for an unlimited side, leaves of a call aligned at its end."""
    left, right = window
    diagonal = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= diagonal >= -left
    if right >= 0:
        seen &= diagonal <= right
    return seen


@pytest.mark.parametrize("alignment", [1, 4, 128])
def test_slices_allow_what_the_whole_call_allows(alignment: int) -> None:
    met = 0
    for seqlen_q, seqlen_k, causal, window in itertools.product((1, 4, 9), (0, 3, 9, 17), (False, True), WINDOWS):
        folded = causal_window(causal, (-1, -1) if window is None else window)
        want = allowed(seqlen_q, seqlen_k, folded)
        for a, b in itertools.combinations(range(seqlen_q + 1), 2):
            start, stop, own = slice_keys(a, b, seqlen_q, seqlen_k, folded, alignment)
            assert 0 <= start <= stop <= seqlen_k and min(own) >= -1
            assert start == stop or start % alignment == 0
            assert (own[0] < 0) == (folded[0] < 0) or start == stop
            found = torch.zeros(b - a, seqlen_k, dtype=torch.bool)
            found[:, start:stop] = allowed(b - a, stop - start, own)
            assert torch.equal(found, want[a:b]), (seqlen_q, seqlen_k, folded, a, b)
            met += 1
    assert met > 10000 // 6


def test_slices_leave_out_what_no_row_sees() -> None:
    layout = SequenceLayout.zigzag(1024, 2)
    first, last = plan(layout, 0, 1024, (-1, 0))
    assert (first.start, first.stop, first.window) == (0, 256, (-1, 0))
    assert (last.start, last.stop, last.row, last.row_stop) == (0, 1024, 256, 512)
    _, last = plan(layout, 0, 1024, (100, 0))
    assert (last.start, last.stop, last.window) == (640, 1024, (100, 0))  # 668 rounded down to whole tiles
