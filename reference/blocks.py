"""The slice of a call that one chunk computes, and the slices of its tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from . import formula


class Block(NamedTuple):
    """The entries, key-value heads and queries of one chunk; its keys come from :meth:`Chunks.spans`."""

    batch: slice
    heads: slice
    rows: slice
    is_whole: bool = False  # whether it has all entries, heads and queries, so that tensors are not sliced

    def pick(self, x: Tensor, keys: slice | Tensor, repeat: int) -> Tensor:
        """Return the chunk's part of a (Bx | 1, Hk | 1, G | 1, Lq | 1, Lk | 1) tensor.

        Entry b of the batch has entry b // repeat % Bx. A chunk has one entry or consecutive ones: see
        :meth:`Chunks.pairs`.
        """
        if self.is_whole and isinstance(keys, slice) and keys.stop - keys.start >= x.shape[4]:
            return x
        in_order = keys if isinstance(keys, slice) else slice(None)
        wanted = (entries_of(self.batch, x.shape[0], repeat), self.heads, slice(None), self.rows, in_order)
        part = x[tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, wanted, strict=True))]
        return part if isinstance(keys, slice) or x.shape[4] == 1 else part.index_select(4, keys)

    def by_group(self, s: Tensor, group: int) -> Tensor:
        """View the (pairs, G * rows, keys) scores of the chunk as (batch, heads, G, rows, keys)."""
        batch, heads, rows = (part.stop - part.start for part in self[:3])
        return s.view(batch, heads, group, rows, s.shape[2])


def entries_of(batch: slice, size: int, repeat: int) -> slice:
    """Return the entries, of a tensor with size entries, for a slice of the batch: b // repeat % size."""
    first = batch.start // repeat % max(size, 1)
    return slice(first, first + (batch.stop - batch.start if repeat == 1 else 1))


def grouped_own(x: Tensor, num_heads_k: int, num_heads: int) -> Tensor:
    """View a mask or bias as (B | 1, Hk | 1, G | 1, Lq | 1, Lk | 1), dims expanded with stride 0 narrowed to 1."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(dim, 0, 1)
    return formula.grouped(x, num_heads_k, num_heads)
