"""`SequenceLayout`: the positions of a sequence that each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ..masks.arguments import integer

Interval = tuple[int, int]


@dataclass(frozen=True)
class SequenceLayout:
    """The positions of a sequence that each rank of a group has: host ints, hashable, equal on every rank.

    Attributes:
        length: positions of the whole sequence.
        intervals: for each rank its runs of positions [start, stop), ascending; adjacent runs are merged. Rows of a
            rank's tensors are in this order. Every rank has the same number of rows.

    Raises:
        TypeError: `length` or a bound is no int.
        ValueError: a position belongs to no rank or to two, or ranks differ in their number of rows.

    >>> from flash_dmattn.distributed import SequenceLayout
    >>> layout = SequenceLayout.zigzag(16, 2)
    >>> layout.intervals
    (((0, 4), (12, 16)), ((4, 12),))
    >>> layout.positions(0).tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    """

    length: int
    intervals: tuple[tuple[Interval, ...], ...]

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`: the class itself, which `torch.load` may call.
        return type(self), (self.length, self.intervals)

    def __post_init__(self) -> None:
        bounds = [x for runs in self.intervals for interval in runs for x in interval]
        for x in (self.length, *bounds):
            if isinstance(x, bool) or not isinstance(x, int):
                raise TypeError(f"layout has {x!r} among its length and bounds; it needs ints")
        if not (self.intervals and all(self.intervals)):
            raise ValueError(f"intervals is {self.intervals}; each rank needs one interval at least")
        merged = tuple(_merged(runs) for runs in self.intervals)
        object.__setattr__(self, "intervals", merged)
        place = 0
        for start, stop in sorted(interval for runs in merged for interval in runs):
            if start != place or stop <= start:
                raise ValueError(
                    f"intervals has [{start}, {stop}) where position {place} comes next; each of the {self.length} "
                    "positions needs to belong to one rank"
                )
            place = stop
        if place != self.length:
            raise ValueError(f"intervals ends at position {place}; it needs to cover the length, {self.length}")
        counts = [sum(stop - start for start, stop in runs) for runs in merged]
        if len(set(counts)) != 1:
            raise ValueError(f"ranks have {counts} rows; they need the same number each")

    @classmethod
    def zigzag(cls, length: int, world_size: int) -> SequenceLayout:
        """Give rank r chunks r and 2 * world_size - 1 - r of 2 * world_size: equal work under causality.

        This is the order of `context_parallel` in torch (head-tail) and of TransformerEngine (DualChunkSwap), so their
        data loaders can be used. Chunks of a multiple of 128 are fastest.

        Raises:
            ValueError: `length` is no multiple of 2 * world_size.
        """
        chunk = _share(length, 2 * integer("world_size", world_size, 1))
        ends = [(i * chunk, (i + 1) * chunk) for i in range(2 * world_size)]
        return cls(length, tuple((ends[r], ends[-1 - r]) for r in range(world_size)))

    @classmethod
    def contiguous(cls, length: int, world_size: int) -> SequenceLayout:
        """Give rank r rows r * length / world_size and the following: for calls without causality.

        Raises:
            ValueError: `length` is no multiple of `world_size`.
        """
        rows = _share(length, integer("world_size", world_size, 1))
        return cls(length, tuple(((r * rows, (r + 1) * rows),) for r in range(world_size)))

    @classmethod
    def balanced(cls, work: Sequence[float], length: int, world_size: int, *, pieces: int = 8) -> SequenceLayout:
        """Balance the work of ranks, for masks whose rows differ.

        The sequence is cut into `pieces` chunks for each rank. The chunk with most work is assigned first, to the rank
        with least work among those with fewer than `pieces` chunks.

        Args:
            work: the work of each run of ceil(length / len(work)) rows, on the host, the same on every rank. For
                example the number of live tiles for each 128 rows of a prepared mask, `mask.row_lists[..., :2].sum((0,
                1, 3)).tolist()`.
            length, world_size: the number of positions, and of ranks.
            pieces: chunks of a rank. With more of them the work is balanced better, in more calls.

        Raises:
            ValueError: `length` is no multiple of world_size * pieces, or `work` is empty or has more entries.

        Largest-first scheduling is Graham, Bounds on multiprocessing timing anomalies (1969).

        >>> from flash_dmattn.distributed import SequenceLayout
        >>> SequenceLayout.balanced([9, 1, 1, 1], length=8, world_size=2, pieces=2).intervals
        (((0, 2), (6, 8)), ((2, 6),))
        """
        chunk = _share(length, integer("world_size", world_size, 1) * integer("pieces", pieces, 1))
        if not 0 < len(work) <= length:
            raise ValueError(f"work has {len(work)} entries; it needs 1 to {length}, one for each run of rows")
        run = -(-length // len(work))
        # Sums over rows, because the ends of chunks and of runs may differ.
        sums = list(accumulate((work[row // run] / run for row in range(length)), initial=0.0))
        chunks = [(i * chunk, (i + 1) * chunk) for i in range(world_size * pieces)]
        weights = {interval: sums[interval[1]] - sums[interval[0]] for interval in chunks}
        loads = [0.0] * world_size
        dealt: list[list[Interval]] = [[] for _ in range(world_size)]
        for interval in sorted(chunks, key=lambda x: (-weights[x], x)):
            rank = min((r for r in range(world_size) if len(dealt[r]) < pieces), key=lambda r: (loads[r], r))
            dealt[rank].append(interval)
            loads[rank] += weights[interval]
        return cls(length, tuple(tuple(sorted(chunks)) for chunks in dealt))

    def joined(self, number: int) -> tuple[SequenceLayout, tuple[SequenceLayout, ...]]:
        """Merge each `number` consecutive ranks; return the layout of the merged ranks, and the layouts within each.

        Raises:
            ValueError: the ranks are no multiple of `number`.

        >>> from flash_dmattn.distributed import SequenceLayout
        >>> outer, inner = SequenceLayout.zigzag(16, 4).joined(2)
        >>> outer.intervals, inner[0].intervals
        ((((0, 4), (12, 16)), ((4, 12),)), (((0, 2), (6, 8)), ((2, 6),)))
        """
        if self.world_size % integer("number", number, 1):
            raise ValueError(f"number is {number}; it needs to divide the {self.world_size} ranks of the layout")
        outer, inner = [], []
        for first in range(0, self.world_size, number):
            members = self.intervals[first : first + number]
            runs = sorted((start, stop, r) for r, intervals in enumerate(members) for start, stop in intervals)
            within: list[list[Interval]] = [[] for _ in members]
            row = 0
            for start, stop, r in runs:
                within[r].append((row, row + stop - start))
                row += stop - start
            outer.append(tuple((start, stop) for start, stop, _ in runs))
            inner.append(SequenceLayout(row, tuple(tuple(x) for x in within)))
        return SequenceLayout(self.length, tuple(outer)), tuple(inner)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.intervals)

    @property
    def local_length(self) -> int:
        """Rows of each rank."""
        return self.length // self.world_size

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions of a rank's rows, int64 (local_length,): for rotary embeddings and labels."""
        runs = [torch.arange(start, stop, device=device) for start, stop in self.runs(rank)]
        return torch.cat(runs)

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Take a rank's rows out of a tensor of the whole sequence; differentiable.

        Equivalent to `x.index_select(dim, layout.positions(rank))`.

        Raises:
            ValueError: `x` has another length along `dim`, or there is no such rank.
        """
        if x.shape[dim] != self.length:
            raise ValueError(f"x has size {x.shape[dim]} along dim {dim}; it needs that of the layout, {self.length}")
        runs = [x.narrow(dim, start, stop - start) for start, stop in self.runs(rank)]
        return torch.cat(runs, dim)

    def unshard(self, pieces: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate the tensors of all ranks, in their order, to the tensor of the whole sequence; differentiable.

        Raises:
            ValueError: there is not one piece for each rank, or one has another length along `dim`.
        """
        if len(pieces) != self.world_size:
            raise ValueError(f"pieces has {len(pieces)} tensors; it needs one for each of {self.world_size} ranks")
        runs: list[tuple[int, Tensor]] = []
        for piece, intervals in zip(pieces, self.intervals):
            if piece.shape[dim] != self.local_length:
                raise ValueError(
                    f"a piece has size {piece.shape[dim]} along dim {dim}; it needs that of a rank, {self.local_length}"
                )
            lengths = [stop - start for start, stop in intervals]
            runs += zip((start for start, _ in intervals), piece.split(lengths, dim))
        return torch.cat([x for _, x in sorted(runs, key=lambda run: run[0])], dim)

    def runs(self, rank: int) -> tuple[Interval, ...]:
        """Return the intervals of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; the layout has ranks 0 to {self.world_size - 1}")
        return self.intervals[rank]

    @property
    def flat(self) -> tuple[int, ...]:
        """The layout as ints, for operators: the length, then for each rank the number and the bounds of intervals."""
        return self.length, *(
            x for runs in self.intervals for x in (len(runs), *(bound for run in runs for bound in run))
        )


@lru_cache(maxsize=256)
def from_flat(flat: tuple[int, ...]) -> SequenceLayout:
    """Return the layout from the ints of `flat`."""
    length, *rest = flat
    intervals = []
    while rest:
        number, rest = rest[0], rest[1:]
        bounds, rest = rest[: 2 * number], rest[2 * number :]
        intervals.append(tuple(zip(bounds[::2], bounds[1::2])))
    return SequenceLayout(length, tuple(intervals))


def _merged(runs: Sequence[Interval]) -> tuple[Interval, ...]:
    """Merge adjacent intervals; refuse intervals that do not ascend, because they are the order of a rank's rows."""
    merged: list[Interval] = []
    for start, stop in runs:
        if merged and start < merged[-1][1]:
            raise ValueError(f"intervals has {tuple(runs)} for a rank; they need to ascend, and not to overlap")
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _share(length: int, parts: int) -> int:
    if integer("length", length, 1) % parts:
        raise ValueError(f"length is {length}; it needs to be a multiple of {parts}")
    return length // parts
