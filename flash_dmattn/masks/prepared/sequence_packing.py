"""Packing of a mask beside sequences in plain PyTorch: bits of all queries, and lists of the tiles of each sequence.

Each sequence has tiles of its own, of no other's rows and columns. Those of sequence s begin with number
`first // 128 + s`, where `first` is its first row among those of all: tiles of two sequences never meet, and no
sequence has to know the lengths of those before it.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from ...definition import define
from ...problem import SequenceSpec
from ..pad import pad
from . import packing
from .packing import TILE, TILE_WORDS, pack_words, tiles, unpack_words

# What of a mask is packed, as `Packing` of a call has it; or all pairs of a sequence behind those of the one before; or
# nothing, of a tree of new tokens.
MaskPacking = Literal["none", "queries", "keys", "ragged", "tree"]


class Side(NamedTuple):
    """The queries or the keys of all sequences, numbered in one row; slots of padded ones stand behind one another.

    Attributes:
        first: int64 (S,), the first of each sequence, ascending.
        lengths: int64 (S,), how many it has.
        rows: how many there are in all, those of no sequence included.
    """

    first: torch.Tensor
    lengths: torch.Tensor
    rows: int

    @property
    def first_tile(self) -> torch.Tensor:
        """The number of the first tile of each sequence."""
        return self.first // TILE + torch.arange(self.first.shape[0], device=self.first.device)

    @property
    def tiles(self) -> int:
        """How many tiles of rows there are numbers for."""
        return self.rows // TILE + self.first.shape[0]


def sides_of(bounds: torch.Tensor, spec: SequenceSpec) -> tuple[Side, Side]:
    """Queries and keys, from the bounds of a `SequenceView`."""
    first_q, length_q, first_k, length_k = bounds.long().T.contiguous().unbind(0)
    slots = torch.arange(spec.number, device=bounds.device)
    queries = Side(first_q, length_q, spec.rows_q)
    if not spec.packs_queries:
        queries = Side(slots * spec.rows_q, length_q, spec.number * spec.rows_q)
    keys = Side(first_k, length_k, spec.rows_k)
    if not spec.packs_keys:
        keys = Side(slots * spec.rows_k, length_k, spec.number * spec.rows_k)
    return queries, keys


def _owners(starts: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last sequence that starts at or before each place, and how far behind its start that is, -1 before all."""
    found = torch.searchsorted(starts, places, right=True) - 1
    owner = found.clamp(min=0)
    return owner, torch.where(found >= 0, places - starts[owner], -1)


def pack_sequences(
    mask: torch.Tensor, bounds: torch.Tensor, mask_packing: MaskPacking, spec: SequenceSpec, window: tuple[int, int]
) -> list[torch.Tensor]:
    """The tensors of a `SequenceTileMask`: bits, classes, row_lists, col_lists.

    Args:
        mask: bool (Bm, Hm, Lq or 1, Lk or 1) as `attention` reads it beside these sequences; "ragged" is (1, Hm, 1, N),
            "tree" (S or 1, 1, n, n).
        bounds: of a `SequenceView`.
        window: with causality folded in, as `causal_window` has it.
    """
    queries, keys = sides_of(bounds, spec)
    num_heads, columns = mask.shape[1], tiles(spec.max_seqlen_k)
    bits = torch.zeros(num_heads, queries.rows, columns * TILE_WORDS, dtype=torch.int32, device=mask.device)
    if spec.number > 0 and mask.numel() > 0:
        step = max(1, packing.CHUNK_ELEMENTS // max(1, num_heads * spec.max_seqlen_k))
        for start in range(0, queries.rows if bits.numel() else 0, step):
            rows = torch.arange(start, min(start + step, queries.rows), device=mask.device)
            owner, place = _owners(queries.first, rows)
            allowed = _inside(owner, place, queries, keys, spec.max_seqlen_k, window)
            values = _rows_of(mask, mask_packing, owner, place, rows, queries, keys, spec.max_seqlen_k)
            bits[:, start : start + step] = pack_words(values & allowed)
    classes = _classify(bits, queries, columns)
    of_keys = _by_column(classes, queries, keys, tiles(spec.max_seqlen_q))
    return [x[None] for x in (bits, classes, packing.list_rows(classes), packing.list_rows(of_keys))]


def _inside(
    owner: torch.Tensor, place: torch.Tensor, queries: Side, keys: Side, max_seqlen_k: int, window: tuple[int, int]
) -> torch.Tensor:
    """Which keys of its sequence each row reaches: bool (rows, max_seqlen_k). The band ends at the last of both."""
    left, right = window
    column = torch.arange(max_seqlen_k, device=owner.device)
    diagonal = (place + keys.lengths[owner] - queries.lengths[owner])[:, None]
    allowed = (column < keys.lengths[owner][:, None]) & (place >= 0)[:, None]
    allowed &= (place < queries.lengths[owner])[:, None]
    if left >= 0:
        allowed &= column >= diagonal - left
    if right >= 0:
        allowed &= column <= diagonal + right
    return allowed


def _rows_of(
    mask: torch.Tensor,
    mask_packing: MaskPacking,
    owner: torch.Tensor,
    place: torch.Tensor,
    rows: torch.Tensor,
    queries: Side,
    keys: Side,
    number: int,
) -> torch.Tensor:
    """Rows of a mask, for the first `number` keys of their sequences: bool (Hm, rows, number or 1)."""

    def within(size: int, index: torch.Tensor) -> torch.Tensor:
        return index.clamp(0, size - 1)  # what is of no sequence reads anything; `_inside` forbids it

    if mask_packing == "queries":
        return mask[0][:, within(mask.shape[2], rows)]
    if mask_packing == "none":
        return mask[within(mask.shape[0], owner), :, within(mask.shape[2], place)].transpose(0, 1)
    if mask_packing == "tree":
        earlier = keys.lengths[owner] - queries.lengths[owner]
        token = torch.arange(number, device=mask.device) - earlier[:, None]
        tree = mask[within(mask.shape[0], owner), 0, within(mask.shape[2], place)]
        return (tree.gather(1, within(mask.shape[3], token)) | (token < 0))[None]
    if mask_packing == "keys":
        first = keys.first[owner]
    else:
        pairs = queries.lengths * keys.lengths
        first = (pairs.cumsum(0) - pairs)[owner] + place * keys.lengths[owner]
    index = first[:, None] + torch.arange(number, device=mask.device)
    return mask[0, :, 0][:, within(mask.shape[3], index)]


def _classify(bits: torch.Tensor, queries: Side, columns: int) -> torch.Tensor:
    """The class of every tile: uint8 (Hm, rows of tiles, columns). Rows that a sequence has not forbid nothing."""
    num_heads, _, words = bits.shape
    classes = torch.zeros(num_heads, queries.tiles, columns, dtype=torch.uint8, device=bits.device)
    if classes.numel() == 0 or queries.rows == 0:
        return classes
    first_tile, inner = queries.first_tile, torch.arange(TILE, device=bits.device)
    step = max(1, packing.CHUNK_ELEMENTS // max(1, num_heads * TILE * words))
    for start in range(0, queries.tiles, step):
        numbers = torch.arange(start, min(start + step, queries.tiles), device=bits.device)
        owner, place = _owners(first_tile, numbers)
        row = place[:, None] * TILE + inner
        exists = (place >= 0)[:, None] & (row < queries.lengths[owner][:, None])
        own = bits[:, (queries.first[owner][:, None] + row).clamp(0, queries.rows - 1)]
        own = own.unflatten(-1, (columns, TILE_WORDS))
        seen = ((own != 0).any(-1) & exists[..., None]).any(2)
        full = ((own == -1).all(-1) | ~exists[..., None]).all(2)
        classes[:, start : start + step] = seen.to(torch.uint8) + (seen & full)
    return classes


def _by_column(classes: torch.Tensor, queries: Side, keys: Side, most_rows: int) -> torch.Tensor:
    """The classes by columns of tiles, each with the rows of its own sequence: uint8 (Hm, columns of tiles, rows)."""
    num_heads, rows, columns = classes.shape
    if classes.numel() == 0:
        return classes.new_zeros(num_heads, keys.tiles, most_rows)
    numbers, inner = torch.arange(keys.tiles, device=classes.device), torch.arange(most_rows, device=classes.device)
    owner, place = _owners(keys.first_tile, numbers)
    exists = (inner * TILE < queries.lengths[owner][:, None]) & (place >= 0)[:, None] & (place < columns)[:, None]
    row = (queries.first_tile[owner][:, None] + inner).clamp(max=rows - 1)
    found = classes[:, row, place.clamp(0, columns - 1)[:, None]]
    return torch.where(exists, found, 0)


def unpack_sequences(bits: torch.Tensor, spec: SequenceSpec) -> torch.Tensor:
    """The bool mask of bits (1, Hm, rows, words), as `attention` reads one beside these sequences.

    Returns:
        (1, Hm, Tq, max_seqlen_k) where queries are packed, else (S, Hm, max_seqlen_q, max_seqlen_k); contiguous.
    """
    rows = unpack_words(bits, spec.max_seqlen_k)
    if spec.packs_queries:
        return rows
    by_slot = rows[0].unflatten(1, (spec.number, spec.rows_q)).transpose(0, 1)[:, :, : spec.max_seqlen_q]
    return pad(by_slot, (0, 0, 0, max(0, spec.max_seqlen_q - spec.rows_q)), value=False).contiguous()


def _prepare(
    mask: torch.Tensor,
    bounds: torch.Tensor,
    mask_packing: MaskPacking,
    layout: Any,
    rows_q: int,
    rows_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    left: int,
    right: int,
) -> list[torch.Tensor]:
    spec = SequenceSpec(layout, bounds.shape[0], rows_q, rows_k, max_seqlen_q, max_seqlen_k)
    return pack_sequences(mask, bounds, mask_packing, spec, (left, right))


def _prepare_fake(
    mask: torch.Tensor,
    bounds: torch.Tensor,
    mask_packing: MaskPacking,
    layout: Any,
    rows_q: int,
    rows_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    left: int,
    right: int,
) -> list[torch.Tensor]:
    number, heads = bounds.shape[0], (1, mask.shape[1])
    spec = SequenceSpec(layout, number, rows_q, rows_k, max_seqlen_q, max_seqlen_k)
    all_q = rows_q if spec.packs_queries else number * rows_q
    all_k = rows_k if spec.packs_keys else number * rows_k
    rows, columns = all_q // TILE + number, all_k // TILE + number
    of_rows, of_columns = tiles(max_seqlen_k), tiles(max_seqlen_q)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty((*heads, *shape), dtype=dtype, device=mask.device)

    return [
        empty(all_q, of_rows * TILE_WORDS),
        empty(rows, of_rows, dtype=torch.uint8),
        empty(rows, 2 + of_rows),
        empty(columns, 2 + of_columns),
    ]


prepare_sequences = define(
    "prepare_sequence_mask",
    "(Tensor mask, Tensor bounds, str mask_packing, str layout, SymInt rows_q, SymInt rows_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, int left, int right) -> Tensor[]",
    _prepare,
    _prepare_fake,
)
