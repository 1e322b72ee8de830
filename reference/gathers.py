"""Biases by position: a score gets a value for the difference of the positions of key and query, from each term.

`join` lays the values of all terms side by side in one table; `Places` tells where in it the values of a score are.
`gather` reads them, and `add_gradient` is its transpose: a sum over all scores with the same value, in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .lists import repeat_heads


class Places(NamedTuple):
    """Where the values of the scores of a call are in a joined table.

    Attributes:
        queries: (terms, 1 or B, Lq), int64.
        keys: (terms, 1 or B, Lk), int64, plus the index of difference 0 among the values of the term.
        sizes: the number of values of each term.
        clamps: whether differences beyond the values of a term get its first or its last value; otherwise they get 0.
    """

    queries: Tensor
    keys: Tensor
    sizes: tuple[int, ...]
    clamps: tuple[bool, ...]

    @property
    def batch(self) -> int:
        """The entries of the batch that have positions of their own; 1 if all share them."""
        return max(self.queries.shape[1], self.keys.shape[1])

    def of(self, span: slice) -> Places:
        """Return the places of some entries of the batch."""
        queries, keys = (x if x.shape[1] == 1 else x[:, span] for x in (self.queries, self.keys))
        return self._replace(queries=queries, keys=keys)

    def indices(self, term: int) -> Tensor:
        """Return the index in the table for each score, (1 or B, Lq, Lk); one behind the last where there is no value.

        >>> places = Places(torch.tensor([[[0, 4]]]), 1 + torch.tensor([[[0, 1, 9]]]), (3,), (False,))
        >>> places.indices(0)
        tensor([[[1, 2, 3],
                 [3, 3, 3]]])
        """
        place = self.keys[term, :, None, :] - self.queries[term, :, :, None]
        size, first = self.sizes[term], sum(self.sizes[:term])
        if self.clamps[term]:
            return place.clamp(0, size - 1) + first
        return torch.where((place >= 0) & (place < size), place + first, sum(self.sizes))


def prepare(factors: Sequence[Tensor], terms: Sequence[tuple[int, bool]]) -> tuple[Tensor, Places, torch.dtype]:
    """Return the joined table of a bias, its places, and its dtype; differentiable.

    Args:
        factors: of each term its values, (1 or B, 1 or the heads of a group, n), then the positions of queries and of
            keys, (1 or B, L), int64.
        terms: the index of difference 0 among the values of each term, and whether it clamps.
    """
    values = factors[::3]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in values])
    moved = [x + zero for x, (zero, _) in zip(factors[2::3], terms, strict=True)]
    queries, keys = (torch.stack(torch.broadcast_tensors(*each)) for each in (factors[1::3], moved))
    places = Places(queries, keys, tuple([x.shape[2] for x in values]), tuple([clamps for _, clamps in terms]))
    return join(values), places, dtype


def join(values: Sequence[Tensor]) -> Tensor:
    """Lay values (1 or B, heads, n) side by side, (1 or B, most heads, sum of n), in fp32 at least; differentiable."""
    batch, heads = (max(x.shape[dim] for x in values) for dim in (0, 1))
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in values]
    return torch.cat([repeat_heads(x, heads).expand(batch, heads, -1) for x in wide], -1).contiguous()


def split_gradient(dtable: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of each of the values from the gradient of what `join` made of them."""
    parts = dtable.split([x.shape[2] for x in values], -1)
    made = []
    for part, x in zip(parts, values, strict=True):
        shared = part.unflatten(1, (x.shape[1], -1)).sum(2)
        made.append((shared.sum(0, keepdim=True) if x.shape[0] == 1 else shared).to(x.dtype))
    return made


def gather(table: Tensor, places: Places) -> Tensor:
    """Return the bias of every score, (B, heads, Lq, Lk) in the dtype of the table (1 or B, heads, n); differentiable.

    B is 1 if all entries of the batch have the same bias. Terms are added in their order.
    """
    batch, heads, number = table.shape
    rows = F.pad(table, (0, 1)).transpose(1, 2).reshape(batch * (number + 1), heads)
    own = torch.arange(batch, device=table.device)[:, None, None] * (number + 1)
    total: Tensor | None = None
    for term in range(len(places.sizes)):
        # The gradient of an embedding is a sum in a fixed order, on GPUs too.
        made = F.embedding(places.indices(term) + own, rows)
        total = made if total is None else total + made
    assert total is not None
    return total.movedim(-1, 1)


def add_gradient(ds: Tensor, places: Places, sums: Tensor) -> None:
    """Add the gradient of the table to `sums` (1 or B, heads, n) from the gradient of `gather`, (B, heads, Lq, Lk).

    Entries of the batch are added one after the other, so that parts of a batch give the bits of the whole.
    """
    number = sums.shape[2]
    for entry, part in enumerate(ds):
        rows = part.movedim(0, -1).flatten(0, 1).to(sums.dtype)
        own = places.of(slice(entry, entry + 1))
        total = sums[entry if sums.shape[0] > 1 else 0]
        for term in range(len(places.sizes)):
            index = own.indices(term).flatten()
            made = torch.ops.aten.embedding_dense_backward(rows, index, number + 1, -1, False)
            total += made[:number].T


class Gathers:
    """The bias by position of one call in PyTorch, for some entries of the batch at a time.

    Args:
        table: (1 or B, heads, n), of `join`.
        places: of the call.
        dtype: of the bias.
        entries: the most entries of the batch that are computed at once.
    """

    def __init__(self, table: Tensor, places: Places, dtype: torch.dtype, entries: int) -> None:
        self.table, self.places, self.dtype = table, places, dtype
        self.sums: Tensor | None = None

    def scores(self, span: slice) -> Tensor:
        """Return the bias of some entries, (entries, heads, Lq, Lk), or (1, ...) if they share it."""
        return gather(entries_of(self.table, span), self.places.of(span)).to(self.dtype).contiguous()

    def place(self, entries: int) -> Tensor | None:
        """Return where a backward pass may store the gradient of the bias of so many entries; None for anywhere."""
        return None

    def add_gradient(self, ds: Tensor, span: slice) -> None:
        """Add the gradient of the table from the gradient of the bias of some entries, which follow those before."""
        if self.sums is None:  # in fp64, because each of them may be a sum over all scores of the call
            self.sums = torch.zeros_like(self.table, dtype=torch.float64)
        add_gradient(ds, self.places.of(span), entries_of(self.sums, span))

    def table_gradient(self) -> Tensor:
        """Return the gradient of the table that `add_gradient` has added, in fp32 at least."""
        assert self.sums is not None
        return self.sums


def entries_of(x: Tensor, span: slice) -> Tensor:
    """Return some entries of the batch, or the one that all share."""
    return x if x.shape[0] == 1 else x[span]
