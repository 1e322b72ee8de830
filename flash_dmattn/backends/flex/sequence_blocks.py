"""Tile lists and limits of sequences that are laid out in tiles of their own, made on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...definition import define
from ...problem import Packing
from .blocks import BLOCK, BlockLists, Blocks, Places, compact, mask_classes, tile_bounds, tile_sums
from .tiles import Extent, Side, Tiles, laid_out, side_of, tiles_of


class LaidOut(NamedTuple):
    """Sequences in tiles: their rows, and what a call of these is given."""

    queries: Side
    keys: Side
    places: Places
    blocks: Blocks


def prepare_sequences(
    bounds: Tensor,
    mask: Tensor | None,
    packing: Packing,
    extents: tuple[Extent, Extent],
    window: tuple[int, int],
    num_heads: int,
) -> LaidOut:
    """The rows, limits and tile lists of sequences, without a host synchronisation.

    Args:
        bounds: int32 (S, 4), of a `SequenceView`; S is at least 1.
        mask: 4-D bool, its broadcast dims of size 1, or None.
        packing: what of it is packed.
        extents: of queries and of keys.
        window: (left, right), with causality folded in; -1 is no limit.
        num_heads: of q.
    """
    queries, keys = extents
    given = (bounds, mask, packing, list(queries), list(keys), *window, num_heads)
    if torch.compiler.is_compiling():
        return _named(_OPERATOR(*given))
    if mask is not None:
        return _named(_prepared(*given))
    kept = _kept.setdefault(bounds, {})
    found = kept.get((extents, window))
    if found is None:
        found = kept[extents, window] = _named(_prepared(*given))
    return found


# Of calls without a mask, for as long as the bounds live, which `Sequences` remember: all layers of a model read the
# same tensors, and save them for the backward pass once.
_kept = WeakTensorKeyDictionary()


def _named(x: list[Tensor]) -> LaidOut:
    queries, keys = Side(*x[:4]), Side(*x[4:8])
    places = Places(queries.sequence, queries.place, x[8], keys.place)
    return LaidOut(queries, keys, places, Blocks(BlockLists(*x[11:]), x[9], x[10]))


def _prepared(
    bounds: Tensor,
    mask: Tensor | None,
    packing: Packing,
    extent_q: list[int],
    extent_k: list[int],
    left: int,
    right: int,
    num_heads: int,
) -> list[Tensor]:
    of_queries, of_keys = _extent(extent_q), _extent(extent_k)
    tiles_q, tiles_k = tiles_of(bounds[:, 1], of_queries), tiles_of(bounds[:, 3], of_keys)
    queries, keys = side_of(bounds[:, :2], of_queries, tiles_q), side_of(bounds[:, 2:], of_keys, tiles_k)
    some, every = _band(bounds, tiles_q, of_keys.width, left, right)
    if mask is not None:
        mask_some, mask_every = _of_mask(mask, packing, queries, keys, tiles_q, tiles_k, of_keys.width)
        some, every = some & mask_some, every & mask_every
        if some.shape[0] not in (1, num_heads):  # the kernels look a query head up modulo the number of lists
            some, every = (x.repeat_interleave(num_heads // x.shape[0], dim=0) for x in (some, every))
    by_row: list[Tensor] = []
    by_column: list[Tensor] = []
    for active in (some & ~every, every):
        columns = _columns(active, tiles_q, tiles_k, of_queries.width)
        by_row += _listed(active, tiles_k.first[tiles_q.own], of_keys.tiles)
        by_column += _listed(columns, tiles_q.first[tiles_k.own], of_queries.tiles)
    limits = _limits(bounds, queries, tiles_k.first, left, right)
    return [*queries, *keys, _some_token(queries, bounds[:, 0]), *limits, *by_row, *by_column]


def _extent(numbers: list[int]) -> Extent:
    entries, tokens, is_packed, most, tiles = numbers  # an operator has numbers alone
    return Extent(entries, tokens, bool(is_packed), most, tiles)


def _some_token(queries: Side, first: Tensor) -> Tensor:
    """The token of each row of packed queries, of a row without one that of the place that `Side.place` names."""
    return (first[queries.sequence] + queries.place).clamp(max=len(queries.row) - 1)


def _limits(bounds: Tensor, queries: Side, first_tile: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The first and the last row of keys that each row of queries may see: int32, 1 and 0 where it has no query."""
    seqlen_q, seqlen_k = bounds[:, 1], bounds[:, 3]
    own = queries.sequence
    middle = queries.place + (seqlen_k - seqlen_q)[own]
    last = seqlen_k[own] - 1
    lower = torch.zeros_like(middle) if left < 0 else (middle - left).clamp(min=0)
    upper = last if right < 0 else torch.minimum(last, middle + right)
    first, is_none = first_tile[own] * BLOCK, queries.token < 0
    return (first + lower).masked_fill(is_none, 1), (first + upper).masked_fill(is_none, 0)


def _band(bounds: Tensor, tiles: Tiles, width: int, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Which tiles have a pair of a sequence in its band, and which such pairs alone: bool (1, tiles of queries, width).

    Column c of a row is tile c of the keys of the row's sequence.
    """
    seqlen_q, seqlen_k = (bounds[:, side][tiles.own][:, None] for side in (1, 3))
    first_row = tiles.local[:, None] * BLOCK
    first_key = torch.arange(width, device=bounds.device, dtype=torch.int32) * BLOCK
    whole = (first_row + BLOCK <= seqlen_q) & (first_key + BLOCK <= seqlen_k)
    last_row = torch.minimum(first_row + (BLOCK - 1), seqlen_q - 1)
    last_key = torch.minimum(first_key + (BLOCK - 1), seqlen_k - 1)
    some = tiles.is_used[:, None] & (first_key < seqlen_k)
    every = some & whole
    offset = seqlen_k - seqlen_q
    least, most = first_key - last_row - offset, last_key - first_row - offset
    if left >= 0:
        some, every = some & (most >= -left), every & (least >= -left)
    if right >= 0:
        some, every = some & (least <= right), every & (most <= right)
    return some[None], every[None]


def _of_mask(
    mask: Tensor, packing: Packing, queries: Side, keys: Side, tiles_q: Tiles, tiles_k: Tiles, width: int
) -> tuple[Tensor, Tensor]:
    """The same of a mask, bool (heads, tiles of queries or 1, width or 1); of edges of sequences it says anything."""
    x, read = laid_out(mask, packing, queries, keys)
    if read == "queries":
        rows = tile_sums(x, 3)[0].index_select(1, queries.token.clamp(min=0)).masked_fill(queries.token[:, None] < 0, 0)
        count = rows.unflatten(1, (-1, BLOCK)).sum(2, dtype=torch.int32)
        return count[..., :width] > 0, count[..., :width] == BLOCK * BLOCK
    classes = mask_classes(x, *(tile_bounds(n, mask.device) for n in x.shape[2:]))
    if read == "none":
        entry = tiles_q.own if x.shape[0] > 1 else torch.zeros_like(tiles_q.own)
        some, every = (c[entry, :, tiles_q.local].transpose(0, 1)[..., :width] for c in classes)
        return some, every
    some, every = (c[0] for c in classes)
    if x.shape[3] > 1:
        column = torch.arange(width, device=mask.device, dtype=torch.int32)
        tile = (tiles_k.first[tiles_q.own][:, None] + column).clamp(max=some.shape[2] - 1)
        some, every = some[:, 0, tile], every[:, 0, tile]
    return some, every


def _columns(active: Tensor, tiles_q: Tiles, tiles_k: Tiles, width: int) -> Tensor:
    """The same tiles by columns: (heads, tiles of keys, width), whose last dim are tiles of the sequence's queries."""
    own, local = tiles_k.own[:, None], torch.arange(width, device=active.device, dtype=torch.int32)
    row = (tiles_q.first[own] + local).clamp(max=active.shape[1] - 1)
    exists = tiles_k.is_used[:, None] & (local < tiles_q.number[own])
    return active[:, row, tiles_k.local[:, None]] & exists


def _listed(active: Tensor, first: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Counts and indices of the active tiles, which are counted from a first one in each row, out of so many."""
    counts, indices = compact(active[None])
    indices = (indices + first[:, None]).clamp(max=tiles - 1)
    # FlexAttention on a CPU, and on GPUs some releases of it, want as many columns as there are tiles.
    return counts, torch.nn.functional.pad(indices, (0, tiles - indices.shape[3]))


def _fake(
    bounds: Tensor,
    mask: Tensor | None,
    packing: Packing,
    extent_q: list[int],
    extent_k: list[int],
    left: int,
    right: int,
    num_heads: int,
) -> list[Tensor]:
    queries, keys = _extent(extent_q), _extent(extent_k)
    heads = 1 if mask is None or mask.shape[1] == 1 else num_heads
    shapes: list[tuple[int, ...]] = []
    for side in (queries, keys):
        shapes += [(side.rows,), (side.entries * side.tokens,), (side.rows,), (side.rows,)]
    shapes += [(queries.rows,)] * 3
    for rows, columns in ((queries.tiles, keys.tiles), (keys.tiles, queries.tiles)):
        shapes += [(1, heads, rows), (1, heads, rows, columns)] * 2
    return [torch.empty(shape, dtype=torch.int32, device=bounds.device) for shape in shapes]


_OPERATOR = define(
    "flex_sequences",
    "(Tensor bounds, Tensor? mask, str packing, SymInt[] extent_q, SymInt[] extent_k, SymInt left, SymInt right, "
    "SymInt num_heads) -> Tensor[]",
    _prepared,
    _fake,
)
