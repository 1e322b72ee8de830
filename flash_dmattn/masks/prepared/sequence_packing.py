"""Packing of a mask beside sequences in plain PyTorch: bits of all queries, and lists of the tiles of each sequence.

The oracle of `triton_kernels/sequence_pack.py`, whose `pack_sequences` has these arguments and results, bit for bit.

Each sequence has tiles of its own. The tiles of sequence s begin with number `first // 128 + s`, where `first` is its
first row among all rows. So tiles of two sequences never meet, and no sequence has to know the lengths before it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ...problem import SequenceSpec
from ...sequences.layout import TokenPlaces, token_places
from ..arguments import pad
from . import packing
from .packing import TILE, TILE_WORDS, pack_words, tiles, unpack_words

# How a mask lies: as `Packing` of a call has it; "ragged", the pairs of all sequences one behind the other; or "tree",
# new tokens alone.
MaskPacking = Literal["none", "queries", "keys", "ragged", "tree"]


class Side(NamedTuple):
    """The queries or the keys of all sequences, numbered in one row; slots of padded ones stand behind one another.

    `first` and `lengths`, int64 (S,), are in ascending order. `rows` counts rows of no sequence, too.
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

    def tile_places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return for each tile its sequence, its number there, and whether the sequence has it; S is at least 1."""
        number = torch.arange(self.tiles, device=self.first.device)
        own = (torch.searchsorted(self.first_tile, number, right=True) - 1).clamp(min=0)
        place = number - self.first_tile[own]
        return own, place, (place >= 0) & (place * TILE < self.lengths[own])


def row_counts(spec: SequenceSpec) -> tuple[int, int]:
    """Count the rows of queries and of keys in all, as `Side` does."""
    rows_q = spec.rows_q if spec.packs_queries else spec.number * spec.rows_q
    return rows_q, spec.rows_k if spec.packs_keys else spec.number * spec.rows_k


def tile_count(rows: int, spec: SequenceSpec) -> int:
    """Count the tiles that so many rows of these sequences have numbers for."""
    return rows // TILE + spec.number


def packs_nothing(mask: torch.Tensor, spec: SequenceSpec) -> bool:
    """Tell whether no pair has a bit that may be set, or none has a bit at all."""
    return spec.number == 0 or mask.numel() == 0 or row_counts(spec)[0] == 0 or spec.max_seqlen_k == 0


def sides_of(bounds: torch.Tensor, spec: SequenceSpec) -> tuple[Side, Side]:
    """Return queries and keys, from the bounds of a `SequenceView`."""
    first_q, length_q, first_k, length_k = bounds.long().T.contiguous().unbind(0)
    slots, (rows_q, rows_k) = torch.arange(spec.number, device=bounds.device), row_counts(spec)
    queries = Side(first_q if spec.packs_queries else slots * spec.rows_q, length_q, rows_q)
    return queries, Side(first_k if spec.packs_keys else slots * spec.rows_k, length_k, rows_k)


def pack_sequences(
    mask: torch.Tensor, bounds: torch.Tensor, mask_packing: MaskPacking, spec: SequenceSpec, window: tuple[int, int]
) -> list[torch.Tensor]:
    """Make the tensors of a `SequenceTileMask`: bits, classes, row_lists, col_lists.

    The mask, bool, lies as `attention` reads it beside these sequences. "ragged" is (1, Hm, 1, N), "tree"
    (S or 1, 1, n, n). The window has causality folded in.
    """
    queries, keys = sides_of(bounds, spec)
    num_heads, columns = mask.shape[1], tiles(spec.max_seqlen_k)
    bits = torch.zeros(num_heads, queries.rows, columns * TILE_WORDS, dtype=torch.int32, device=mask.device)
    if not packs_nothing(mask, spec):
        tokens = token_places(bounds, queries.rows // spec.rows_q, spec.rows_q, spec.packs_queries)
        step = max(1, packing.CHUNK_ELEMENTS // max(1, num_heads * spec.max_seqlen_k))
        for start in range(0, queries.rows, step):
            some = TokenPlaces(*(x[start : start + step] for x in tokens))
            allowed = _inside(some, queries, keys, spec.max_seqlen_k, window)
            values = _rows_of(mask, mask_packing, some, start, queries, keys, spec.max_seqlen_k)
            bits[:, start : start + step] = pack_words(values & allowed)
    classes = _classify(bits, queries, columns)
    columns_first = _by_column(classes, queries, keys, tiles(spec.max_seqlen_q))
    return [x[None] for x in (bits, classes, packing.list_rows(classes), packing.list_rows(columns_first))]


def _inside(tokens: TokenPlaces, queries: Side, keys: Side, max_seqlen_k: int, window: tuple[int, int]) -> torch.Tensor:
    """Return the keys of its sequence that each row reaches: bool (rows, max_seqlen_k), aligned at the last of both."""
    left, right = window
    own, place, is_used = tokens
    column = torch.arange(max_seqlen_k, device=own.device)
    diagonal = (place + keys.lengths[own] - queries.lengths[own])[:, None]
    allowed = (column < keys.lengths[own][:, None]) & is_used[:, None]
    if left >= 0:
        allowed &= column >= diagonal - left
    if right >= 0:
        allowed &= column <= diagonal + right
    return allowed


def _rows_of(
    mask: torch.Tensor,
    mask_packing: MaskPacking,
    tokens: TokenPlaces,
    start: int,
    queries: Side,
    keys: Side,
    number: int,
) -> torch.Tensor:
    """Read rows of a mask from `start` on and `number` keys of their sequences: bool (Hm, rows, number or 1)."""
    own, place, _ = tokens

    def within(size: int, index: torch.Tensor) -> torch.Tensor:
        return index.clamp(0, size - 1)  # what is of no sequence reads anything; `_inside` forbids it

    if mask_packing == "queries":
        return mask[0, :, start : start + len(own)] if mask.shape[2] > 1 else mask[0]
    if mask_packing == "none":
        return mask[within(mask.shape[0], own), :, within(mask.shape[2], place)].transpose(0, 1)
    if mask_packing == "tree":
        earlier = keys.lengths[own] - queries.lengths[own]
        token = torch.arange(number, device=mask.device) - earlier[:, None]
        tree = mask[within(mask.shape[0], own), 0, within(mask.shape[2], place)]
        return (tree.gather(1, within(mask.shape[3], token)) | (token < 0))[None]
    if mask_packing == "keys":
        first = keys.first[own]
    else:
        pairs = queries.lengths * keys.lengths
        first = (pairs.cumsum(0) - pairs)[own] + place * keys.lengths[own]
    index = first[:, None] + torch.arange(number, device=mask.device)
    return mask[0, :, 0][:, within(mask.shape[3], index)]


def _classify(bits: torch.Tensor, queries: Side, columns: int) -> torch.Tensor:
    """Classify every tile: uint8 (Hm, rows of tiles, columns). Rows that a sequence has not forbid nothing."""
    num_heads, _, words = bits.shape
    classes = torch.zeros(num_heads, queries.tiles, columns, dtype=torch.uint8, device=bits.device)
    if classes.numel() == 0 or queries.rows == 0 or len(queries.first) == 0:
        return classes
    own, place, exists = queries.tile_places()
    # Rows behind the last one are that one again, which changes no class.
    row = torch.minimum(
        place[:, None] * TILE + torch.arange(TILE, device=bits.device), queries.lengths[own][:, None] - 1
    )
    row = (queries.first[own][:, None] + row).clamp(0, queries.rows - 1)
    step = max(1, packing.CHUNK_ELEMENTS // max(1, num_heads * TILE * words))
    for start in range(0, queries.tiles, step):
        classes[:, start : start + step] = packing.classify(bits[:, row[start : start + step]]).squeeze(2)
    return torch.where(exists[:, None], classes, 0)


def _by_column(classes: torch.Tensor, queries: Side, keys: Side, most_rows: int) -> torch.Tensor:
    """Turn classes to columns of tiles, each with the rows of its own sequence: uint8 (Hm, columns of tiles, rows)."""
    num_heads, rows, columns = classes.shape
    if classes.numel() == 0 or len(queries.first) == 0:
        return classes.new_zeros(num_heads, keys.tiles, most_rows)
    own, place, has_keys = keys.tile_places()
    inner = torch.arange(most_rows, device=classes.device)
    exists = (inner * TILE < queries.lengths[own][:, None]) & has_keys[:, None]
    row = (queries.first_tile[own][:, None] + inner).clamp(max=rows - 1)
    return torch.where(exists, classes[:, row, place.clamp(0, columns - 1)[:, None]], 0)


def unpack_sequences(bits: torch.Tensor, spec: SequenceSpec) -> torch.Tensor:
    """Make the bool mask of bits (1, Hm, rows, words), as `attention` reads one beside these sequences.

    Returns:
        (1, Hm, Tq, max_seqlen_k) where queries are packed, else (S, Hm, max_seqlen_q, max_seqlen_k); contiguous.
    """
    rows = unpack_words(bits, spec.max_seqlen_k)
    if spec.packs_queries:
        return rows
    by_slot = rows[0].unflatten(1, (spec.number, spec.rows_q)).transpose(0, 1)[:, :, : spec.max_seqlen_q]
    return pad(by_slot, (0, 0, 0, max(0, spec.max_seqlen_q - spec.rows_q)), value=False).contiguous()
