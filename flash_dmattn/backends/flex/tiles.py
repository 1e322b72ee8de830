"""Sequences laid out anew, each from a tile of rows of its own on: where the rows come from, and what goes there.

No tile is shared, so that nothing of one sequence meets another: kernels multiply what they mask by 0, and NaN stays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import Packing, SequenceSpec
from ...sequences.layout import token_places
from .blocks import BLOCK


class Extent(NamedTuple):
    """How much of queries, or of keys, there may be: Python numbers, which size the rows.

    Attributes:
        entries, tokens: the first sizes of the tensor.
        is_packed: whether it is one row of tokens.
        most: a bound on the tokens of a sequence, at least 1.
        tiles: a bound on the tiles of all sequences.
    """

    entries: int
    tokens: int
    is_packed: bool
    most: int
    tiles: int

    @property
    def width(self) -> int:
        """A bound on the tiles of a sequence."""
        return tiles_for(self.most)

    @property
    def rows(self) -> int:
        """Rows of all tiles."""
        return self.tiles * BLOCK


def tiles_for(length: int) -> int:
    """Tiles that hold so many rows."""
    return (length + BLOCK - 1) // BLOCK


def extents(spec: SequenceSpec) -> tuple[Extent, Extent]:
    """Those of the queries and of the keys of a call, as if there were a token where there is none."""
    sides = ((spec.rows_q, spec.max_seqlen_q, spec.packs_queries), (spec.rows_k, spec.max_seqlen_k, spec.packs_keys))
    queries, keys = (_extent(spec.number, *side) for side in sides)
    return queries, keys


def _extent(number: int, tokens: int, bound: int, is_packed: bool) -> Extent:
    tokens = 1 if tokens == 0 else tokens
    most = min(tokens, 1 if bound == 0 else bound)
    tiles = number * tiles_for(most)
    if is_packed:
        # A sequence has a tile more than whole ones at most.
        tiles = min(tiles, tokens // BLOCK + number)
    return Extent(1 if is_packed else number, tokens, is_packed, most, tiles)


class Tiles(NamedTuple):
    """The tiles of queries, or of keys: int32.

    Attributes:
        first: (S,), the first tile of each sequence.
        number: (S,), how many it has.
        own: (tiles,), the sequence of each tile; of a tile of none any that there is.
        local: (tiles,), which one of that sequence it is.
        is_used: bool (tiles,), whether a sequence has it.
    """

    first: Tensor
    number: Tensor
    own: Tensor
    local: Tensor
    is_used: Tensor


def tiles_of(lengths: Tensor, extent: Extent) -> Tiles:
    """The tiles of sequences of these lengths, int32 (S,)."""
    number = (lengths + (BLOCK - 1)) // BLOCK
    ends = number.cumsum(0, dtype=torch.int32)
    first = ends - number
    tile = torch.arange(extent.tiles, device=lengths.device, dtype=torch.int32)
    own = torch.searchsorted(ends, tile, right=True, out_int32=True)
    is_used = own < len(ends)
    own = own.clamp(max=len(ends) - 1)
    return Tiles(first, number, own, (tile - first[own]).masked_fill(~is_used, 0), is_used)


class Side(NamedTuple):
    """The queries, or the keys, in rows of tiles: int32.

    Attributes:
        token: (rows,), which token of all lies in each row; -1 of a row without one.
        row: (tokens,), the row of each token; -1 of those of no sequence.
        sequence, place: (rows,), the sequence of each row, and the place of its token in it; of a row without one that
            of a token of the same sequence, as kernels add what they mask to a gradient there: 0, or NaN where a row of
            that sequence is.
    """

    token: Tensor
    row: Tensor
    sequence: Tensor
    place: Tensor


def side_of(bounds: Tensor, extent: Extent, tiles: Tiles) -> Side:
    """The rows of sequences; `bounds` are the first token and how many there are, int32 (S, 2)."""
    own = tiles.own[:, None]
    inside = torch.arange(BLOCK, device=bounds.device, dtype=torch.int32)
    place = tiles.local[:, None] * BLOCK + inside
    length = bounds[:, 1][own]
    is_used = tiles.is_used[:, None] & (place < length)
    first = bounds[:, 0][own] if extent.is_packed else own * extent.tokens
    token = (first + place).masked_fill(~is_used, -1)
    of_tokens = token_places(bounds, extent.entries, extent.tokens, extent.is_packed)
    row = (tiles.first[of_tokens.own] * BLOCK + of_tokens.place).masked_fill(~of_tokens.is_used, -1)
    return Side(
        token.flatten(),
        row.to(torch.int32),
        own.expand(-1, BLOCK).flatten(),
        (place % length.clamp(1, extent.most)).flatten(),
    )


def moved(x: Tensor, dim: int, there: Tensor, back: Tensor, fill: float = 0.0) -> Tensor:
    """The rows `there` of a dim, `fill` for -1; its gradient are the rows `back` of what arrives, 0 for -1.

    Either way rows are read and none is added to, so that what lies in rows of no sequence goes nowhere, NaN included.
    """
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _Moved.apply(x, dim, there, back, fill)
        return result
    return _rows(x, dim, there, fill)


class _Moved(torch.autograd.Function):
    """`moved`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, there: Tensor, back: Tensor, fill: float) -> Tensor:
        ctx.save_for_backward(back)
        ctx.dim = dim
        return _rows(x, dim, there, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return _rows(gradient, ctx.dim, back, 0.0), None, None, None, None


def _rows(x: Tensor, dim: int, which: Tensor, fill: float) -> Tensor:
    is_none = (which < 0).view([-1] + [1] * (x.dim() - dim - 1))
    # Dynamo of torch 2.11 loses the gradient of a Function that writes in place in forward; a graph fuses the copy.
    write = Tensor.masked_fill if torch.compiler.is_compiling() else Tensor.masked_fill_
    return write(x.index_select(dim, which.clamp(min=0)), is_none, fill)


def laid_out(x: Tensor, packing: Packing, queries: Side, keys: Side) -> tuple[Tensor, Packing | None]:
    """A mask or a bias as calls of the rows read it, and how: None is as a dense one, for others see `graph.Shared`.

    One value per score stays as it is, and is read through the places of rows; any other is laid out as they are.
    """
    b, _, i, j = x.shape
    if i > 1 and j > 1:
        return x, packing
    if packing == "keys":
        return moved(x, 3, keys.token, keys.row), None
    if packing == "queries":
        return (moved(x, 2, queries.token, queries.row) if i > 1 else x), None
    if i == j == 1 and b == 1:
        return x, None
    side, dim = (keys, 3) if j > 1 else (queries, 2)
    of_rows = x.flatten(2)  # (S or 1, H, places or 1)
    sequence = side.sequence if b > 1 else torch.zeros_like(side.sequence)
    place = side.place if i > 1 or j > 1 else torch.zeros_like(side.place)
    return of_rows[sequence, :, place].t()[None].unsqueeze(5 - dim), None
