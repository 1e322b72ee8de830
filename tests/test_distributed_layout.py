"""Layouts, slices and moves: which rank has which positions, what its calls are, and what ranks send each other."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_calls import layout_of

from flash_dmattn.distributed import SequenceLayout
from flash_dmattn.distributed.call import choose_strategy
from flash_dmattn.distributed.exchange import (
    CLEAR_SHARE,
    Moves,
    Runs,
    common,
    length_of,
    place_in,
    places_in,
    plan_moves,
    runs_read,
    share_moved,
)
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


REFUSED: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    ValueError: [
        ("length is 12; it needs to be a multiple of 8", lambda: SequenceLayout.zigzag(12, 4)),
        ("length is 5; it needs to be a multiple of 2", lambda: SequenceLayout.contiguous(5, 2)),
        ("world_size is 0; it needs to be >= 1", lambda: SequenceLayout.zigzag(8, 0)),
        ("each rank needs one interval", lambda: SequenceLayout(4, ((), ((0, 4),)))),
        ("position 1 comes next", lambda: SequenceLayout(4, (((0, 1),), ((2, 3),)))),
        ("position 3 comes next", lambda: SequenceLayout(4, (((0, 3),), ((2, 4),)))),
        ("ends at position 2; it needs to cover", lambda: SequenceLayout(4, (((0, 1),), ((1, 2),)))),
        (r"ranks have \[1, 2\] rows", lambda: SequenceLayout(3, (((0, 1),), ((1, 3),)))),
        ("they need to ascend", lambda: SequenceLayout(2, (((1, 2), (0, 1)),))),
        ("work has 0 entries; it needs 1 to 8", lambda: SequenceLayout.balanced([], 8, 2, pieces=2)),
        ("rank is 3; the layout has ranks 0 to 2", lambda: LAYOUTS[0].positions(3)),
        ("x has size 5 along dim 0", lambda: LAYOUTS[0].shard(torch.ones(5), 0, 0)),
        ("pieces has 1 tensors; it needs one for", lambda: LAYOUTS[0].unshard([torch.ones(8)], 0)),
        ("a piece has size 7 along dim 0", lambda: LAYOUTS[1].unshard([torch.ones(7)], 0)),
    ],
    TypeError: [
        (r"length is 8.0 \(float\); it needs to be an int", lambda: SequenceLayout.zigzag(8.0, 2)),
        ("layout has True among", lambda: SequenceLayout(2, (((0, True),), ((1, 2),)))),
    ],
}


@pytest.mark.parametrize("kind, message, make", [(kind, *row) for kind, rows in REFUSED.items() for row in rows])
def test_refusals(kind: type[Exception], message: str, make: Callable[[], Any]) -> None:
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
            seen = torch.zeros(b - a, seqlen_k, dtype=torch.bool)
            seen[:, start:stop] = allowed(b - a, stop - start, own)
            assert torch.equal(seen, want[a:b]), (seqlen_q, seqlen_k, folded, a, b)
            met += 1
    assert met > 10000 // 6


def test_slices_leave_out_what_no_row_sees() -> None:
    layout = SequenceLayout.zigzag(1024, 2)
    first, last = plan(layout, 0, 1024, (-1, 0))
    assert (first.start, first.stop, first.window) == (0, 256, (-1, 0))
    assert (last.start, last.stop, last.row, last.row_stop) == (0, 1024, 256, 512)
    _, last = plan(layout, 0, 1024, (100, 0))
    assert (last.start, last.stop, last.window) == (640, 1024, (100, 0))  # 668 rounded down to whole tiles


def positions(runs: Runs) -> set[int]:
    """Every position of the runs, none twice."""
    listed = [x for run in runs for x in range(*run)]
    assert listed == sorted(set(listed))
    return set(listed)


def moves_of_all(layout: SequenceLayout, layout_k: SequenceLayout, window: tuple[int, int]) -> list[Moves]:
    return [plan_moves(layout.flat, layout_k.flat, rank, window) for rank in range(layout.world_size)]


PLANS = [
    (name, name_k, size, seqlen_q, seqlen_k, window)
    for name, name_k in itertools.product(("zigzag", "contiguous", "balanced"), repeat=2)
    for size in (1, 2, 4)
    for seqlen_q, seqlen_k in ((1024, 1024), (512, 1536), (1024, 512))
    for window in ((100, 0), (300, 200), (5, -1), (-1, 3))
]


def test_every_key_that_is_read_is_held_and_nothing_else_is_sent() -> None:
    for name, name_k, size, seqlen_q, seqlen_k, window in PLANS:
        layout, layout_k = layout_of(name, seqlen_q, size), layout_of(name_k, seqlen_k, size)
        every = moves_of_all(layout, layout_k, window)
        most = 0
        for rank, moves in enumerate(every):
            parts = plan(layout, rank, seqlen_k, window)
            read = set().union(*(range(part.start, part.stop) for part in parts))
            assert positions(moves.held) == read and moves.local == layout_k.runs(rank)
            from_ranks = [positions(runs) for runs in moves.receives]
            assert set().union(*from_ranks) == read and sum(map(len, from_ranks)) == len(read)
            for other, theirs in enumerate(every):
                assert moves.receives[other] == theirs.sends[rank] and from_ranks[other] <= positions(theirs.local)
            order = [x for _, start, stop in moves.pieces for x in range(start, stop)]
            assert order == sorted(read)
            for part, place in zip(parts, places_in(moves.held, parts)):
                assert order[place] == list(range(part.start, part.stop))
            most = max(most, moves.sent, moves.received)
        if size == 1:
            assert share_moved(layout, layout_k, window) == 1.0
        elif window[0] >= 0:
            assert share_moved(layout, layout_k, window) == most / (seqlen_k // size * (size - 1))
        else:  # the last row reads all keys
            assert most == seqlen_k // size * (size - 1) and share_moved(layout, layout_k, window) == 1.0


def test_a_tensor_of_all_keys_has_gaps_where_none_are_read() -> None:
    layout = SequenceLayout.zigzag(2048, 4)
    moves = plan_moves(layout.flat, layout.flat, 1, (10, 0), True)
    assert moves.held == ((0, 2048),) and runs_read(layout, 1, 2048, (10, 0)) == ((128, 512), (1408, 1792))
    assert moves.pieces == (
        (-1, 0, 128),
        (0, 128, 256),
        (1, 256, 512),
        (-1, 512, 1408),
        (2, 1408, 1536),
        (1, 1536, 1792),
        (-1, 1792, 2048),
    )
    assert moves.sent == 128 + 128 and moves.received == 256  # to ranks 0 and 2, of ranks 0 and 2


def test_runs() -> None:
    assert common(((0, 4), (6, 9)), ((2, 7), (8, 12))) == ((2, 4), (6, 7), (8, 9))
    assert common((), ((2, 7),)) == () and length_of(((0, 4), (6, 9))) == 7
    assert [place_in(((2, 4), (6, 9)), x) for x in (2, 3, 6, 8)] == [0, 1, 2, 4]
    with pytest.raises(ValueError, match=r"position is 5; it needs to be in \(\(2, 4\), \(6, 9\)\)"):
        place_in(((2, 4), (6, 9)), 5)


@pytest.mark.parametrize(
    "name, size, window, is_sent_in_parts",
    [
        ("zigzag", 8, (4096, 0), True),
        ("contiguous", 2, (4096, 0), True),
        ("zigzag", 2, (60000, 0), False),
        ("zigzag", 8, (-1, 0), False),
        ("contiguous", 8, (-1, 0), False),
        ("zigzag", 8, (-1, -1), False),
    ],
)
def test_parts_are_sent_where_that_is_clearly_less(
    name: str, size: int, window: tuple[int, int], is_sent_in_parts: bool
) -> None:
    layout = layout_of(name, 131072, size)
    assert (share_moved(layout, layout, window) <= CLEAR_SHARE) == is_sent_in_parts


@pytest.mark.parametrize("window, share, held", [(1024, "1.8%", "14%"), (4096, "7.1%", "19%"), (16384, "29%", "38%")])
def test_what_a_window_leaves_of_128k(window: int, share: str, held: str) -> None:
    layout, contiguous = SequenceLayout.zigzag(131072, 8), SequenceLayout.contiguous(131072, 8)
    moved = share_moved(layout, layout, (window, 0))
    most = max(length_of(runs_read(layout, rank, 131072, (window, 0))) for rank in range(8))
    assert (f"{100 * moved:.2g}%", f"{most / 131072:.0%}") == (share, held)
    if window <= 8192:  # of 14 chunks of 8192 that others have, the ends of two; or the end of one neighbour
        assert moved == 2 * window / (7 * 16384) == 2 * share_moved(contiguous, contiguous, (window, 0))


@pytest.mark.parametrize(
    "size, heads, heads_k, share, wanted",
    [
        (2, 8, 8, 1.0, "ulysses"),  # gather moves 1.5 times as much
        (2, 8, 4, 1.0, "gather"),  # as much: 2 = (2 + 1) / 1.5
        (4, 8, 4, 1.0, "ulysses"),
        (4, 32, 4, 1.0, "gather"),  # 4 < 6
        (8, 32, 4, 1.0, "ulysses"),  # key-value heads are repeated
        (8, 12, 12, 1.0, "gather"),  # heads do not divide
        (4, 8, 8, 0.4, "ulysses"),  # 4 x 0.4 > 2 / 1.5
        (4, 8, 8, 0.3, "gather"),
    ],
)
def test_auto_takes_what_sends_less(size: int, heads: int, heads_k: int, share: float, wanted: str) -> None:
    strategy, why = choose_strategy("auto", heads, heads_k, size, False, share)
    assert strategy == wanted
    assert choose_strategy("auto", heads, heads_k, size, True, share)[0] == "gather"
    assert (why == "ranks read so few keys of others that it sends less than ulysses") == (share == 0.3)
