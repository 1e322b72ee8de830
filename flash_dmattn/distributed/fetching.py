"""Keys and values for the ranks that read them, and no others; their gradients back to the ranks that have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Pieces, sum_dtype
from .reading import Moves, Runs, length_of, place_in


class Fetching:
    """Tensors of this rank's rows on their way to the ranks that read them; `wait` has what this rank holds."""

    def __init__(self, tensors: Sequence[Tensor], dim: int, moves: Moves, group: str) -> None:
        """Start sending.

        Args:
            tensors: of one dtype, with the rows of this rank along `dim`, of equal shapes on every rank.
            moves: who reads what.
            group: name of the process group.
        """
        self._tensors, self._dim, self._moves = tensors, dim, moves
        outgoing = [_cut(tensors, dim, moves.own, runs) for runs in moves.to]
        incoming = [_numbers(tensors, dim, runs) for runs in moves.of]
        self._own = outgoing[moves.rank]
        self._pieces = Pieces(outgoing, incoming, moves.rank, tensors[0], group)

    def wait(self) -> list[Tensor]:
        """The tensors with the positions that are held along `dim`, zero in those that this rank does not read."""
        moves, dim = self._moves, self._dim
        arrived = [iter(self._own if rank == moves.rank else x) for rank, x in enumerate(self._pieces.wait())]
        found: list[list[Tensor]] = [[] for _ in self._tensors]
        for rank, start, stop in moves.pieces:  # of each rank in the order in which it has sent them
            for pieces, x in zip(found, self._tensors):
                shape = _resized(x, dim, stop - start)
                pieces.append(x.new_zeros(shape) if rank < 0 else next(arrived[rank]).view(shape))
        return [
            torch.cat(pieces, dim) if pieces else x.new_empty(_resized(x, dim, 0))
            for pieces, x in zip(found, self._tensors)
        ]


class GivingBack:
    """Each rank's gradients of what it has fetched, on their way to the ranks that have it; `wait` has their sums."""

    def __init__(self, tensors: Sequence[Tensor], dim: int, moves: Moves, group: str) -> None:
        """Start sending.

        Args:
            tensors: of one dtype, which is that of the exchange, with what this rank holds along `dim`.
            moves: who has read what.
            group: name of the process group.
        """
        self._tensors, self._dim, self._moves = tensors, dim, moves
        outgoing = [_cut(tensors, dim, moves.held, runs) for runs in moves.of]
        incoming = [_numbers(tensors, dim, runs) for runs in moves.to]
        self._own = outgoing[moves.rank]
        self._pieces = Pieces(outgoing, incoming, moves.rank, tensors[0], group)

    def wait(self) -> list[Tensor]:
        """For each tensor the sum of what all ranks have sent of this rank's rows: fp32, fp64 for fp64."""
        moves, dim = self._moves, self._dim
        rows, dtype = length_of(moves.own), sum_dtype(self._tensors[0].dtype)
        total = [x.new_zeros(_resized(x, dim, rows), dtype=dtype) for x in self._tensors]
        for rank, arrived in enumerate(self._pieces.wait()):
            pieces = iter(self._own if rank == moves.rank else arrived)
            for start, stop in moves.to[rank]:
                place = place_in(moves.own, start)
                for x in total:
                    x.narrow(dim, place, stop - start).add_(next(pieces).view(_resized(x, dim, stop - start)))
        return total


def _cut(tensors: Sequence[Tensor], dim: int, present: Runs, runs: Runs) -> list[Tensor]:
    """Of each run the part of each tensor, whose positions along `dim` are `present`."""
    return [x.narrow(dim, place_in(present, start), stop - start) for start, stop in runs for x in tensors]


def _numbers(tensors: Sequence[Tensor], dim: int, runs: Runs) -> list[int]:
    """Of each run the number of elements that each tensor has of it."""
    return [_resized(x, dim, stop - start).numel() for start, stop in runs for x in tensors]


def _resized(x: Tensor, dim: int, size: int) -> torch.Size:
    return torch.Size((*x.shape[:dim], size, *x.shape[dim + 1 :]))
