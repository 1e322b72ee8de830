"""The plan of a rank's calls: flags of the whole call become slices of keys, one ordinary call for each run of rows."""

from __future__ import annotations

from typing import NamedTuple

from .layout import SequenceLayout

# Slices of keys start on a multiple of it, so that rows of masks and biases stay on the alignment that kernels need.
ALIGNMENT = 128


class Slice(NamedTuple):
    """One ordinary call: a run of a rank's rows over a run of keys.

    Attributes:
        row, row_stop: among the rows of the rank's tensors.
        start, stop: keys, in global order; none where they are equal.
        window: (left, right) of this call, -1 for an unlimited side. Causality is a right of 0.
    """

    row: int
    row_stop: int
    start: int
    stop: int
    window: tuple[int, int]

    @property
    def rows(self) -> slice:
        """Where its rows are in the tensors of the rank."""
        return slice(self.row, self.row_stop)

    @property
    def keys(self) -> slice:
        """Where its keys are in tensors of all of them."""
        return slice(self.start, self.stop)

    @property
    def seqlen_q(self) -> int:
        """Number of its queries."""
        return self.row_stop - self.row

    @property
    def seqlen_k(self) -> int:
        """Number of its keys."""
        return self.stop - self.start


def slice_keys(
    a: int, b: int, seqlen_q: int, seqlen_k: int, window: tuple[int, int], alignment: int
) -> tuple[int, int, tuple[int, int]]:
    """The keys that rows [a, b) of a call need, and their window in a call of their own.

    Args:
        a, b: rows of the whole call, a < b.
        seqlen_q, seqlen_k: of the whole call, which aligns rows and keys at their ends.
        window: of the whole call with causality folded in, -1 for an unlimited side.
        alignment: the first key is rounded down to a multiple of it.

    Returns:
        (start, stop, window). Keys past `stop` and before `start` are seen by none of the rows; the call of rows
        [a, b) on keys [start, stop) is aligned at its own end, so the window shifts by as much, and is never negative.
    """
    left, right = window
    offset = seqlen_k - seqlen_q
    stop = seqlen_k if right < 0 else max(0, min(seqlen_k, b + offset + right))
    start = 0 if left < 0 else min(max(0, a + offset - left), stop) // alignment * alignment
    if start >= stop:
        return stop, stop, (-1, -1)
    shift = stop - b - offset
    return start, stop, (left + shift if left >= 0 else -1, right - shift if right >= 0 else -1)


def plan(layout: SequenceLayout, rank: int, seqlen_k: int, window: tuple[int, int]) -> tuple[Slice, ...]:
    """The calls of one rank.

    Args:
        layout: of the queries.
        rank: whose calls.
        seqlen_k: number of all keys.
        window: of the whole call with causality folded in.
    """
    slices, row = [], 0
    for a, b in layout.of_rank(rank):
        slices.append(Slice(row, row + b - a, *slice_keys(a, b, layout.length, seqlen_k, window, ALIGNMENT)))
        row += b - a
    return tuple(slices)
