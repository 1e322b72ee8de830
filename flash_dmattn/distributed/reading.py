"""Which keys each rank reads, and what ranks have to send each other so that each has those, and no others."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .layout import Interval, SequenceLayout, from_flat
from .slices import Slice, plan

# The largest share of the positions of an all_gather for which ranks send each other parts instead: an all_gather of as
# many bytes is faster, and half is a clear margin.
CLEAR_SHARE = 0.5

# Positions in runs [start, stop), ascending, none touching the next.
Runs = tuple[Interval, ...]


class Moves(NamedTuple):
    """What one rank sends and receives, in positions of the whole sequence of keys.

    Attributes:
        rank: which one.
        own: positions that it has.
        held: positions that its tensor has afterwards, in this order.
        to: of each rank the positions of this one that it reads.
        of: of each rank the positions that this one reads of it. Both have its own for itself, which nobody sends.
        pieces: `held` in order, as (rank that has them, start, stop); -1 for positions that this one does not read.
    """

    rank: int
    own: Runs
    held: Runs
    to: tuple[Runs, ...]
    of: tuple[Runs, ...]
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def sent(self) -> int:
        """Number of positions that it sends to others, each as often as it is sent."""
        return sum(length_of(runs) for rank, runs in enumerate(self.to) if rank != self.rank)

    @property
    def received(self) -> int:
        """Number of positions that it receives from others."""
        return sum(length_of(runs) for rank, runs in enumerate(self.of) if rank != self.rank)


def length_of(runs: Runs) -> int:
    """Number of positions."""
    return sum(stop - start for start, stop in runs)


def place_in(runs: Runs, position: int) -> int:
    """Where a position of the runs is among all of theirs."""
    place = 0
    for start, stop in runs:
        if start <= position < stop:
            return place + position - start
        place += stop - start
    raise ValueError(f"position is {position}; it needs to be in {runs}")


def places_in(held: Runs, parts: tuple[Slice, ...]) -> tuple[slice, ...]:
    """Of each slice where its keys are in tensors of those that are held."""
    starts = [place_in(held, part.start) if part.seqlen_k else 0 for part in parts]
    return tuple(slice(start, start + part.seqlen_k) for start, part in zip(starts, parts))


def runs_read(layout: SequenceLayout, rank: int, seqlen_k: int, window: tuple[int, int]) -> Runs:
    """The keys that the slices of a rank read; arguments as `plan` has them."""
    found: list[Interval] = []
    for start, stop in sorted((part.start, part.stop) for part in plan(layout, rank, seqlen_k, window)):
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def common(first: Runs, second: Runs) -> Runs:
    """The positions of both."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            found.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


@lru_cache(maxsize=256)
def moves_of(
    layout: tuple[int, ...], layout_k: tuple[int, ...], rank: int, window: tuple[int, int], whole: bool = False
) -> Moves:
    """What a rank sends and receives.

    Args:
        layout, layout_k: of queries and keys, `SequenceLayout.flat`.
        rank: whose moves.
        window: of the whole call with causality folded in.
        whole: whether all keys are held, of which those that are not read are nobody's.
    """
    of_q, of_k = from_flat(layout), from_flat(layout_k)
    reads = [runs_read(of_q, r, of_k.length, window) for r in range(of_q.world_size)]
    own, held = of_k.of_rank(rank), ((0, of_k.length),) if whole else reads[rank]
    to = tuple(common(own, runs) for runs in reads)
    of = tuple(common(of_k.of_rank(r), reads[rank]) for r in range(of_k.world_size))
    return Moves(rank, own, held, to, of, _pieces(held, of))


def _pieces(held: Runs, of: tuple[Runs, ...]) -> tuple[tuple[int, int, int], ...]:
    arriving = sorted((start, stop, rank) for rank, runs in enumerate(of) for start, stop in runs)
    found = []
    for first, last in held:
        place = first
        for start, stop, rank in arriving:
            if first <= start < last:
                found += [(-1, place, start)] * (start > place) + [(rank, start, stop)]
                place = stop
        found += [(-1, place, last)] * (last > place)
    return tuple(found)


def share_moved(layout: SequenceLayout, layout_k: SequenceLayout, window: tuple[int, int]) -> float:
    """The most positions that a rank sends or receives where each has what it reads, over those of an all_gather.

    Args:
        layout, layout_k: of queries and keys.
        window: of the whole call with causality folded in.
    """
    if window[0] < 0 or layout.world_size == 1:  # the last row reads back to the first key, or nothing moves
        return 1.0
    return _share_moved(layout.flat, layout_k.flat, window)


@lru_cache(maxsize=256)
def _share_moved(layout: tuple[int, ...], layout_k: tuple[int, ...], window: tuple[int, int]) -> float:
    of_q, of_k = from_flat(layout), from_flat(layout_k)
    ranks = range(of_q.world_size)
    reads = [runs_read(of_q, rank, of_k.length, window) for rank in ranks]
    kept = [length_of(common(of_k.of_rank(rank), reads[rank])) for rank in ranks]
    # From one place to the next both the owner and the number of readers are the same.
    owner_from = {start: rank for rank in ranks for start, _ in of_k.of_rank(rank)}
    change = {place: 0 for place in (*owner_from, of_k.length)}
    for start, stop in [run for runs in reads for run in runs]:
        change[start] = change.get(start, 0) + 1
        change[stop] = change.get(stop, 0) - 1
    places = sorted(change)
    sent, owner, readers = [-n for n in kept], 0, 0
    for at, place in enumerate(places[:-1]):
        owner, readers = owner_from.get(place, owner), readers + change[place]
        sent[owner] += readers * (places[at + 1] - place)
    received = [length_of(runs) - n for runs, n in zip(reads, kept)]
    return max(*sent, *received) / ((len(ranks) - 1) * of_k.local_length)
