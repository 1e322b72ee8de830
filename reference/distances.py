"""A bias with one value for each distance between a key and a query, or for each query and distance.

`dense` makes the matrix of such a bias, for a whole call or for a chunk of one; `distance_sums` is its transpose. Both
shift rows of a matrix against each other, so that a gradient is a sum in a fixed order, on every device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .lists import ListValues


class Distances(NamedTuple):
    """A bias by distance: score (i, j) gets values[b, h, i, zero + j - i - (Lk - Lq)].

    Attributes:
        values: (Bv, Hv, 1 or Lq, n). One row is for all queries.
        zero: the index of distance 0; any integer.
        clamps: whether distances beyond the values get the first or the last value; otherwise they get 0.
    """

    values: Tensor
    zero: int
    clamps: bool

    def moved(self, row: int, key: int, seqlen_q: int, seqlen_k: int, lengths: tuple[int, int]) -> Distances:
        """Return the bias of the scores from (row, key) on, seqlen_q x seqlen_k of them, of a call of these lengths.

        Rows of values are not selected: if there is one for each query, the caller takes the rows of its scores.
        """
        zero = self.zero + key - row - (lengths[1] - lengths[0]) + (seqlen_k - seqlen_q)
        return self._replace(zero=zero)


# A bias of a call: a value for each score, with broadcast dims, or for each distance.
AnyBias = Tensor | Distances
# The chunked passes index entries of lists in place; the formula receives a matrix.
ChunkBias = AnyBias | ListValues


def values_of(bias: ChunkBias | None) -> Tensor | None:
    """Return the tensor of a bias."""
    return bias if bias is None or isinstance(bias, Tensor) else bias.values


def with_values(bias: ChunkBias | None, values: Tensor | None) -> Any:
    """Return a bias of the same kind with another tensor."""
    return values if bias is None or isinstance(bias, Tensor) or values is None else bias._replace(values=values)


def dense(bias: Distances, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the bias of every score, (Bv, Hv, Lq, Lk); differentiable, with sums in a fixed order.

    Equivalent PyTorch::

        place = zero + torch.arange(Lk) - torch.arange(Lq)[:, None] - (Lk - Lq)
        bias = values[:, :, 0, place.clamp(0, n - 1)]  # all 0 where place is no place of values, unless it clamps

    >>> import torch
    >>> dense(Distances(torch.tensor([[[[1, 2, 3]]]]), 1, True), 3, 4)
    tensor([[[[1, 2, 3, 3],
              [1, 1, 2, 3],
              [1, 1, 1, 2]]]])
    """
    values = bias.values
    if seqlen_q == 0 or seqlen_k == 0:
        return values.new_zeros(*values.shape[:2], seqlen_q, seqlen_k) + values.flatten()[:0].sum()
    strip = by_distance(bias, seqlen_q, seqlen_k)
    if seqlen_q == 1:
        return strip
    # Rows of `count` values, viewed as rows that are one shorter, are shifted by one value per row.
    count = seqlen_q + seqlen_k - 1
    repeated = strip.expand(-1, -1, seqlen_q, -1).flatten(2)
    moved = repeated[..., seqlen_q - 1 :][..., : seqlen_q * (count - 1)]
    return moved.unflatten(2, (seqlen_q, count - 1))[..., :seqlen_k]


def by_distance(bias: Distances, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the bias of each distance of a call, (Bv, Hv, 1 or Lq, Lq + Lk - 1); of a call with a score.

    Distances ascend: the first is from the last query to the first key, the last from the first query to the last key.
    """
    values, zero, clamps = bias
    n = values.shape[-1]
    count, first = seqlen_q + seqlen_k - 1, zero - (seqlen_k - 1)
    before = min(max(-first, 0), count)
    start = min(max(first, 0), n)
    stop = max(min(first + count, n), start)
    after = count - before - (stop - start)
    if not clamps:
        return F.pad(values[..., start:stop], (before, after))
    ends = (values[..., :1].expand(-1, -1, -1, before), values[..., -1:].expand(-1, -1, -1, after))
    return torch.cat((ends[0], values[..., start:stop], ends[1]), -1)


def distance_sums(ds: Tensor, bias: Distances) -> Tensor:
    """Return the gradient of the values, shaped as these, from the gradient of `dense`, (Bv, Hv, Lq, Lk).

    Both may have more leading dims; only the last two sizes of the values matter. It is differentiable.
    """
    rows, n = bias.values.shape[-2:]
    seqlen_q, seqlen_k = ds.shape[-2:]
    # Rows of Lk + Lq values, viewed as rows that are one longer, are shifted back by one value per row. The first
    # column and the last one have no distance.
    padded = F.pad(F.pad(ds, (seqlen_q, 0)).flatten(-2), (0, seqlen_q))
    strip = padded.unflatten(-1, (seqlen_q, seqlen_k + seqlen_q + 1))[..., 1 : seqlen_q + seqlen_k]
    if rows == 1:
        strip = strip.sum(-2, keepdim=True)
    return fold_distances(strip, n, bias.zero, bias.clamps, (seqlen_q, seqlen_k))


def fold_distances(strip: Tensor, number: int, zero: int, clamps: bool, lengths: tuple[int, int]) -> Tensor:
    """Return the gradient of values from the gradient of `by_distance`: (..., Lq + Lk - 1) becomes (..., number)."""
    count, first = lengths[0] + lengths[1] - 1, zero - (lengths[1] - 1)
    start = min(max(first, 0), number)
    stop = max(min(first + count, number), start)
    before, after = min(max(-first, 0), count), min(max(first + count - number, 0), count)
    sums = F.pad(strip[..., before : count - after], (start, number - stop))
    if clamps:
        ends = (strip[..., :before], strip[..., count - after :])
        low, high = (end.sum(-1, keepdim=True) for end in ends)
        sums = sums + F.pad(low, (0, number - 1)) + F.pad(high, (number - 1, 0))
    return sums


class Bands:
    """A bias of one value for each query and distance, which clamps, for some entries of the batch at a time.

    Args:
        number, zero: of the values of a query, and the index of distance 0 among them.
        dtype: of the bias.
        entries: the most entries of the batch that are computed at once.
        shape: (heads, Lq, Lk) of the bias.
        device: of the call.
    """

    def __init__(
        self,
        number: int,
        zero: int,
        dtype: torch.dtype,
        entries: int,
        shape: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        self.number, self.zero, self.dtype, self.entries, self.device = number, zero, dtype, entries, device
        self.heads, *self.lengths = shape

    def scores(self, values: Tensor) -> Tensor:
        """Return the bias of some entries, (entries, heads, Lq, Lk), from values (entries, heads, Lq, n)."""
        return dense(Distances(values, self.zero, True), *self.lengths).to(self.dtype).contiguous()

    def place(self, entries: int) -> Tensor | None:
        """Return where a backward pass may store the gradient of the bias of so many entries; None for anywhere."""
        return None

    def gradient(self, ds: Tensor) -> Tensor:
        """Return the gradient of the values of some entries, (entries, heads, Lq, n) in fp32 at least, from ds."""
        wide = ds.to(torch.promote_types(ds.dtype, torch.float32))
        values = wide.new_empty(()).expand(1, 1, self.lengths[0], self.number)
        return distance_sums(wide, Distances(values, self.zero, True))
