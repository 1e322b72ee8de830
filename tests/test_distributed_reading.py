"""Ranks that send each other the keys that are read, and no others: what moves, when, and that results are the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from distributed_calls import ParallelCase, layout_of
from distributed_workers import workers
from test_distributed_explain import check_bytes

from flash_dmattn.distributed import SequenceLayout
from flash_dmattn.distributed.exchange import (
    CLEAR_SHARE,
    Moves,
    Runs,
    common,
    length_of,
    moves_of,
    place_in,
    places_in,
    runs_read,
    share_moved,
)
from flash_dmattn.distributed.slices import plan
from flash_dmattn.distributed.transfers import choose_strategy

P = ParallelCase
TOLERANCE = 1e-10


def positions(runs: Runs) -> set[int]:
    """Every position of the runs, none twice."""
    listed = [x for run in runs for x in range(*run)]
    assert listed == sorted(set(listed))
    return set(listed)


def moves_of_all(layout: SequenceLayout, layout_k: SequenceLayout, window: tuple[int, int]) -> list[Moves]:
    return [moves_of(layout.flat, layout_k.flat, rank, window) for rank in range(layout.world_size)]


PLANS = [
    (name, name_k, size, seqlen_q, seqlen_k, window)
    for name, name_k in itertools.product(("zigzag", "contiguous", "balanced"), repeat=2)
    for size in (1, 2, 4)
    for seqlen_q, seqlen_k in ((1024, 1024), (512, 1536), (1024, 512))
    for window in ((100, 0), (300, 200), (5, -1), (-1, 3))
]


def test_every_key_that_is_read_is_held_and_nothing_else_is_sent() -> None:
    for name, name_k, size, seqlen_q, seqlen_k, window in PLANS:
        of_q, of_k = layout_of(name, seqlen_q, size), layout_of(name_k, seqlen_k, size)
        every = moves_of_all(of_q, of_k, window)
        most = 0
        for rank, moves in enumerate(every):
            parts = plan(of_q, rank, seqlen_k, window)
            read = set().union(*(range(part.start, part.stop) for part in parts))
            assert positions(moves.held) == read and moves.own == of_k.runs(rank)
            from_ranks = [positions(runs) for runs in moves.of]
            assert set().union(*from_ranks) == read and sum(map(len, from_ranks)) == len(read)
            for other, theirs in enumerate(every):
                assert moves.of[other] == theirs.to[rank] and from_ranks[other] <= positions(theirs.own)
            order = [x for _, start, stop in moves.pieces for x in range(start, stop)]
            assert order == sorted(read)
            for part, place in zip(parts, places_in(moves.held, parts)):
                assert order[place] == list(range(part.start, part.stop))
            most = max(most, moves.sent, moves.received)
        if size == 1:
            assert share_moved(of_q, of_k, window) == 1.0
        elif window[0] >= 0:
            assert share_moved(of_q, of_k, window) == most / (seqlen_k // size * (size - 1))
        else:  # the last row reads all keys
            assert most == seqlen_k // size * (size - 1) and share_moved(of_q, of_k, window) == 1.0


def test_a_tensor_of_all_keys_has_gaps_where_none_are_read() -> None:
    layout = SequenceLayout.zigzag(2048, 4)
    moves = moves_of(layout.flat, layout.flat, 1, (10, 0), True)
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
    layout, beside = SequenceLayout.zigzag(131072, 8), SequenceLayout.contiguous(131072, 8)
    moved = share_moved(layout, layout, (window, 0))
    most = max(length_of(runs_read(layout, rank, 131072, (window, 0))) for rank in range(8))
    assert (f"{100 * moved:.2g}%", f"{most / 131072:.0%}") == (share, held)
    if window <= 8192:  # of 14 chunks of 8192 that others have, the ends of two; or the end of one neighbour
        assert moved == 2 * window / (7 * 16384) == 2 * share_moved(beside, beside, (window, 0))


def test_auto_compares_ulysses_with_what_is_sent() -> None:
    assert choose_strategy("auto", 8, 8, 4, False, 1.0)[0] == "ulysses"
    found = choose_strategy("auto", 8, 8, 4, False, 0.3)
    assert found == ("gather", "ranks read so few keys of others that it sends less than ulysses")
    assert choose_strategy("auto", 8, 8, 4, False, 0.4)[0] == "ulysses"  # 4 x 0.4 > 2 / 1.5


WINDOWED = P(window=(20, 0), seqlen_q=1024, seqlen_k=1024, heads=2, heads_k=2, lse=True)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "contiguous": {"layout": "contiguous", "window": (100, 7)},
    "balanced": {"layout": "balanced", "bias": "keys"},
    "bias of pairs": {"bias": "full", "mask": "full", "batch": 1},
    "groups of heads": {"heads": 4, "heads_k": 2, "groups": 2, "bias": "group", "batch": 1},
    "sharded": {"bias": "sharded", "mask": "sharded"},
    "sharded, contiguous": {"bias": "sharded_one", "layout": "contiguous", "window": (200, 1)},
    "mask, prepared": {"mask": "prepared", "batch": 1},
    "sharded and summed": {"bias": "sharded", "reduce": True, "sink": True},
    "bias of heads, summed": {"bias": "head", "reduce": True},
    "empty rows": {"mask": "shared", "empty": True, "batch": 1},
    "more keys": {"seqlen_q": 512, "seqlen_k": 2048, "batch": 1},
    "fewer keys, rows without": {"seqlen_q": 1536, "seqlen_k": 1024, "batch": 1},
    "other keys": {"seqlen_q": 768, "seqlen_k": 1024, "layout": "contiguous", "window": (0, 0)},
    "only dv": {"needs": ("v",), "dim_v": 8},
    "only dk": {"needs": ("k",)},
    "no gradient": {"needs": ()},
    "wide exchange": {"exchange": torch.float64, "dim": 8, "dim_v": 3},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_process_and_the_bits_of_all_keys_sent(name: str, size: int) -> None:
    case = P(**{**vars(WINDOWED), **CASES[name]})
    for rank, (errors, equal) in enumerate(workers(size).run("distributed_calls.in_parts", case)):
        assert max(errors.values()) < TOLERANCE, (rank, errors)
        assert all(equal.values()), (rank, equal)


@pytest.mark.parametrize("name", ["plain", "sharded", "bias of pairs", "groups of heads"])
def test_a_mesh_sends_parts_over_its_outer_dim(name: str) -> None:
    flags = {"mesh": (2, 2), "strategy": "auto", "heads": 4, "heads_k": 2, "groups": None, "reduce": True}
    case = P(**{**vars(WINDOWED), **CASES[name], **flags})
    for errors, equal in workers(4).run("distributed_calls.in_parts", case):
        assert max(errors.values()) < TOLERANCE and all(equal.values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_parts_are_those_that_collectives_are_handed(name: str, size: int) -> None:
    check_bytes(P(**{**vars(WINDOWED), **CASES[name]}), size)


NARROW = {"dtype": torch.bfloat16, "dim": 16, "dim_v": 16}


@pytest.mark.parametrize("change", [{}, {"layout": "balanced", "bias": "sharded"}, {"exchange": torch.float32}])
def test_bits_are_repeated(change: dict[str, Any]) -> None:
    case = P(**{**vars(WINDOWED), **NARROW, **change})
    assert workers(4).run("distributed_calls.repeated", case) == [True] * 4
    assert all(all(equal.values()) for _, equal in workers(4).run("distributed_calls.in_parts", case))


@pytest.mark.parametrize("name", ["plain", "sharded", "groups of heads"])
def test_it_compiles_to_one_graph_of_operators_that_are_what_they_say(name: str) -> None:
    case = P(**{**vars(WINDOWED), **CASES[name]})
    assert max(workers(2).run("distributed_calls.compiled", case)) < TOLERANCE
    ran = {name.split(".")[1] for names in workers(2).run("distributed_calls.check_operators", case) for name in names}
    assert ran >= {"gather_forward", "gather_backward"} | (
        {"gather_keys", "return_keys"} if name == "sharded" else set()
    )


def test_a_backend_that_reads_prepared_masks_gets_those_of_its_slices() -> None:
    case = P(**{**vars(WINDOWED), "mask": "prepared", "groups": 2})
    answers = workers(4).run("distributed_calls.compared_by_unpacking", case)
    assert all(max(errors.values()) < TOLERANCE and forms == {"tiles"} for errors, forms in answers), answers


def test_ranks_that_differ_in_it_raise() -> None:
    answers = workers(2).run("distributed_calls.mistaken", WINDOWED, 1, {"window": (900, 0)}, {})
    assert {kind for raised, _ in answers for kind, _ in raised} == {"ValueError"}
