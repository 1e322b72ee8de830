"""What ranks send each other: parts of a sequence gathered to whole ones, and gradients of whole ones sent back.

Only copies of bytes travel. Sums are made here, in the order of ranks, so that they are equal bit by bit from run to
run, whatever the network does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .group import process_group
from .layout import SequenceLayout

# torch renamed it after 2.12, and warns of the old name.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Gathering:
    """Tensors of this rank's rows on their way to every rank; `wait` has them whole, rows in global order."""

    def __init__(self, tensors: Sequence[Tensor], dim: int, layout: SequenceLayout, group: str) -> None:
        """Start sending.

        Args:
            tensors: of one dtype, with the rows of this rank along `dim`, of equal shapes on every rank.
            layout: which rows those are.
            group: name of the process group.
        """
        self._shapes = [x.shape for x in tensors]
        self._dim, self._layout = dim, layout
        self._sent = _joined(tensors)
        self._received = self._sent.new_empty((layout.world_size, self._sent.numel()))
        # Both buffers stay referenced until `wait`: the network still reads and writes them.
        self._work = _all_gather(_bytes(self._received), _bytes(self._sent), process_group(group), True)

    def wait(self) -> list[Tensor]:
        """The tensors of the whole sequence."""
        self._work.wait()
        numbers = [shape.numel() for shape in self._shapes]
        of_ranks = [row.split(numbers) for row in self._received.unbind()]
        return [
            self._layout.unshard([pieces[i].view(shape) for pieces in of_ranks], self._dim)
            for i, shape in enumerate(self._shapes)
        ]


class Returning:
    """Each rank's gradients of whole tensors on their way to the ranks that have the rows; `wait` has their sums."""

    def __init__(self, tensors: Sequence[Tensor], dim: int, layout: SequenceLayout, rank: int, group: str) -> None:
        """Start sending.

        Args:
            tensors: of one dtype, which is that of the exchange, with all rows along `dim`, of equal shapes on every
                rank.
            layout: which rank has which rows.
            rank: this one.
            group: name of the process group.
        """
        self._own = layout.of_rank(rank)
        self._dim, self._shapes = dim, [list(x.shape) for x in tensors]
        runs = [interval for of_rank in layout.intervals for interval in of_rank]
        self._sent = _joined([x.narrow(dim, start, stop - start) for start, stop in runs for x in tensors])
        self._received = torch.empty_like(self._sent).view(layout.world_size, -1)
        self._work = dist.all_to_all_single(
            _bytes(self._received), _bytes(self._sent), group=process_group(group), async_op=True
        )

    def wait(self) -> list[Tensor]:
        """For each tensor the sum of what all ranks have sent of this rank's rows: fp32, fp64 for fp64."""
        self._work.wait()
        total = summed(self._received.unbind())
        shapes = [
            (*shape[: self._dim], stop - start, *shape[self._dim + 1 :])
            for start, stop in self._own
            for shape in self._shapes
        ]
        runs = [x.view(shape) for x, shape in zip(total.split([torch.Size(s).numel() for s in shapes]), shapes)]
        number = len(self._shapes)
        return [torch.cat(runs[i::number], self._dim) for i in range(number)]


class Pieces:
    """Pieces on their way from each rank to each other one, as many as they have for each other."""

    def __init__(
        self, outgoing: list[list[Tensor]], incoming: list[list[int]], rank: int, like: Tensor, group: str
    ) -> None:
        """Start sending.

        Args:
            outgoing: of each rank the pieces for it. Those for this one stay.
            incoming: of each rank the numbers of elements of its pieces for this one.
            rank: this one.
            like: a tensor of the dtype and on the device of all.
            group: name of the process group.
        """
        self._numbers = [[] if r == rank else numbers for r, numbers in enumerate(incoming)]
        sent = [[] if r == rank else pieces for r, pieces in enumerate(outgoing)]
        to = [like.itemsize * sum(x.numel() for x in pieces) for pieces in sent]
        of = [like.itemsize * sum(numbers) for numbers in self._numbers]
        # Both buffers stay referenced until `wait`, as above.
        self._sent = _joined([like.new_empty(0), *(x for pieces in sent for x in pieces)])
        self._received = like.new_empty(sum(of) // like.itemsize)
        self._work = dist.all_to_all_single(
            _bytes(self._received),
            _bytes(self._sent),
            output_split_sizes=of,
            input_split_sizes=to,
            group=process_group(group),
            async_op=True,
        )

    def wait(self) -> list[list[Tensor]]:
        """Of each rank its pieces, flat."""
        self._work.wait()
        pieces = iter(self._received.split([n for numbers in self._numbers for n in numbers]))
        return [[next(pieces) for _ in numbers] for numbers in self._numbers]


def sum_over(x: Tensor, size: int, group: str) -> Tensor:
    """The sum of one tensor over all ranks, the same bits on each: fp32, fp64 for fp64."""
    sent = x.contiguous()
    received = sent.new_empty((size, *sent.shape))
    _all_gather(_bytes(received), _bytes(sent), process_group(group), False)
    return summed(received.unbind())


def trade(x: Tensor, group: str) -> Tensor:
    """What every rank has for this one, x[i] going to rank i: (W, ...), contiguous."""
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(_bytes(received), _bytes(sent), group=process_group(group))
    return received


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum, one after the other, in fp32, or fp64 for fp64."""
    first, *others = tensors
    total = first.to(sum_dtype(first.dtype), copy=True)
    for x in others:
        total += x
    return total


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _bytes(x: Tensor) -> Tensor:
    # Not every transport knows every dtype.
    return x.view(-1).view(torch.uint8)
