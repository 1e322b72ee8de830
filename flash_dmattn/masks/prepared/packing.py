"""Packs masks in plain PyTorch, on any device: bits, tile classes, tile lists and key sets.

`triton_kernels/mask_pack.py` has `pack_mask`, `list_tiles` and `key_set`, `triton_kernels/sequence_pack.py` has
`pack_sequences`. Signatures are the same, and tests check that results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...definition import is_mapped
from ...problem import Band, SequenceSpec
from ...sequences.layout import TokenPlaces, token_places
from ..arguments import pad

TILE = 128
WORD = 32
TILE_WORDS = TILE // WORD
EMPTY, PARTIAL, FULL = 0, 1, 2

# Elements packed at once: as many bytes of dense rows, and twice that in temporaries.
CHUNK_ELEMENTS = 1 << 24

# Eight bools, viewed as one little-endian int64, times this constant have their bits in order in the top byte: byte k
# is shifted by 56 - 7k bits. No two of the 64 partial products overlap, so there is no carry.
GATHER_EIGHT = 0x0102040810204080


# Tiles in the order in which kernels walk them: row_lists, col_lists (see `TileMask`).
TileLists = tuple[Tensor, Tensor]

# The keys that a mask without query dim keeps: kept, count, prefix (see `KeyMask`).
KeySet = tuple[Tensor, Tensor, Tensor]


def tiles(length: int) -> int:
    """Count the tiles that cover a length."""
    return -(-length // TILE)


def refuse_mapped(what: str, x: Tensor, instead: str) -> None:
    """Refuse a tensor that `torch.vmap` maps, for functions that depend on its values."""
    if not torch.compiler.is_compiling() and is_mapped(x):
        raise NotImplementedError(f"{what} needs the values of one call, and torch.vmap maps several; {instead}")


def pack_words(rows: Tensor) -> Tensor:
    """Pack bool rows (..., Lk) as bits: int32 (..., 4 * ceil(Lk / 128)), bit j % 32 of word j // 32; padding is 0."""
    refuse_mapped("this mask", rows, "pass a bool mask, or PreparedMask.from_mask of it")
    padded = pad(rows, (0, -rows.size(-1) % TILE)).contiguous()
    # A contiguous tensor may start at an unaligned address, or have odd strides in a dim of size 1. A compiler cannot
    # trace storage offsets.
    if (
        torch.compiler.is_compiling()
        or padded.storage_offset() % 8
        or any(stride % 8 for stride in padded.stride()[:-1])
    ):
        padded = padded.clone(memory_format=torch.contiguous_format)
    eights = padded.view(torch.int64) * GATHER_EIGHT >> 56
    return eights.to(torch.uint8).view(torch.int32)


def unpack_words(words: Tensor, seqlen_k: int) -> Tensor:
    """Undo `pack_words`: bool (..., seqlen_k)."""
    eights = words.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (eights.flatten(-2)[..., :seqlen_k] & 1).bool()


def pack_tree(tree: Tensor) -> Tensor:
    """Pack bool trees (S or 1, n, n) as bits: int32 (S or 1, n, ceil(n / 32)), in the order of `pack_words`."""
    # Not by `pack_words`, which pads rows to 128 bits.
    words = pad(tree, (0, -tree.shape[2] % WORD)).unflatten(2, (-1, WORD)).long()
    shifts = torch.arange(WORD, device=tree.device)
    return (words << shifts).sum(3).to(torch.int32)  # the lower 32 bits, also if bit 31 is set


def unpack_tree(bits: Tensor) -> Tensor:
    """Undo `pack_tree`: bool (S or 1, n, n)."""
    return unpack_words(bits, bits.shape[1])


def band_words(start: int, stop: int, seqlen_k: int, band: Band | None, device: torch.device) -> Tensor:
    """Return the bits of a band in rows `start` to `stop`: int32 (stop - start, 4 * ceil(Lk / 128))."""
    first = torch.arange(0, tiles(seqlen_k) * TILE, WORD, device=device)
    rows = torch.arange(start, stop, device=device)[:, None]
    if band is None:
        low, high = torch.zeros_like(rows), torch.full_like(rows, seqlen_k)
    else:
        low, high = rows + band.low, (rows + (band.high + 1)).clamp(max=seqlen_k)
    ones_below = [1 << (limit - first).clamp(0, WORD) for limit in (low, torch.maximum(low, high))]
    return (ones_below[1] - ones_below[0]).to(torch.int32)


def pack_rows(
    words_of: Callable[[int, int], Tensor], shape: tuple[int, int, int, int], band: Band | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Make bits (Bm, Hm, Lq, 4 * ceil(Lk / 128)) and classes of a mask in chunks of rows, with the band folded in.

    `words_of(start, stop)` returns these rows in the form of `pack_words`; chunks bound the memory.
    """
    batch, num_heads, seqlen_q, seqlen_k = shape
    bits = torch.empty(batch, num_heads, seqlen_q, tiles(seqlen_k) * TILE_WORDS, dtype=torch.int32, device=device)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * num_heads * seqlen_k))
    # A loop over chunks would specialise the graph of a compiler on sizes.
    starts = (0,) if torch.compiler.is_compiling() else range(0, seqlen_q if bits.numel() else 0, step)
    for start in starts:
        stop = seqlen_q if torch.compiler.is_compiling() else min(start + step, seqlen_q)
        words = words_of(start, stop)
        bits[:, :, start:stop] = words if band is None else words & band_words(start, stop, seqlen_k, band, device)
    return bits, classify(bits)


def pack_mask(mask: Tensor, band: Band | None) -> tuple[Tensor, Tensor]:
    """Make bits and classes of a bool mask (Bm, Hm, Lq, Lk), any strides, with the band folded in."""
    batch, num_heads, seqlen_q, seqlen_k = mask.shape
    shape = (batch, num_heads, seqlen_q, seqlen_k)
    return pack_rows(lambda start, stop: pack_words(mask[:, :, start:stop]), shape, band, mask.device)


def classify(bits: Tensor) -> Tensor:
    """Classify every tile of packed rows (..., Lq, 4 * Tk): uint8 (..., Tq, Tk). Padding rows do not count."""
    tiles_k = bits.size(-1) // TILE_WORDS
    missing = -bits.size(-2) % TILE
    seen = (bits != 0).unflatten(-1, (tiles_k, TILE_WORDS)).any(-1)
    full = (bits == -1).unflatten(-1, (tiles_k, TILE_WORDS)).all(-1)
    tiles_q = tiles(bits.size(-2))
    seen = pad(seen, (0, 0, 0, missing), value=False).unflatten(-2, (tiles_q, TILE)).any(-2)
    full = pad(full, (0, 0, 0, missing), value=True).unflatten(-2, (tiles_q, TILE)).all(-2)
    return seen.to(torch.uint8) + full


def list_tiles(classes: Tensor) -> TileLists:
    """List the tiles of a class table uint8 (Bm, Hm, Tq, Tk), along its rows and along its columns."""
    return list_rows(classes), list_rows(classes.transpose(-1, -2))


def list_rows(classes: Tensor) -> Tensor:
    """List the tiles along the rows (..., tiles) of a class table: int32 (..., 2 + tiles)."""
    order = (FULL - classes).argsort(dim=-1, stable=True).to(torch.int32)
    counts = [(classes == kind).sum(-1, keepdim=True, dtype=torch.int32) for kind in (FULL, PARTIAL)]
    return torch.cat([*counts, order], dim=-1).contiguous()


def key_set(mask: Tensor) -> KeySet:
    """Return (kept, count, prefix) of a bool mask (Bm, Hm, 1, Lk), any strides."""
    flags = mask[:, :, 0].contiguous()  # because the results keep its strides
    seqlen_k = flags.size(-1)
    prefix = pad(flags.cumsum(-1, dtype=torch.int32), (1, 0))
    count = prefix[..., -1].clone(memory_format=torch.contiguous_format)  # `contiguous` may return a view of prefix
    order = flags.logical_not().to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
    kept = order.masked_fill_(torch.arange(seqlen_k, device=mask.device) >= count[..., None], seqlen_k)
    return kept, count, prefix


def count_bits(bits: Tensor) -> Tensor:
    """Count the bits that are set: int64 scalar tensor."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for x in bits.flatten().split(max(1, CHUNK_ELEMENTS // 4)):
        # Sums of pairs of bits, of nibbles, of bytes, then of all four bytes: Warren, "Hacker's Delight", 2002, 5-1.
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        total += (x * 0x01010101 >> 24).sum(dtype=torch.int64)
    return total


# No tile has rows of two sequences. The tiles of sequence s begin with number `first // 128 + s`, where `first` is its
# first row. If two sequences have 200 and 100 rows, the first has tiles 0 and 1; the second begins at row 200, so its
# first tile is 200 // 128 + 1 = 2. Numbers may have gaps, but do not depend on the lengths of earlier sequences.

# The layout of a mask: one of `Packing`; "ragged", where the pairs of all sequences follow one another; or "tree", only
# the new tokens.
MaskPacking = Literal["none", "queries", "keys", "ragged", "tree"]


class TiledSide(NamedTuple):
    """The queries, or the keys, of all sequences, as rows that are numbered through; padded slots follow one another.

    `first`, int64 (S,), is the first row of each sequence, ascending; `lengths`, int64 (S,), its number of rows. `rows`
    is the number of all rows, including rows of no sequence.
    """

    first: Tensor
    lengths: Tensor
    rows: int

    @property
    def first_tile(self) -> Tensor:
        """The number of the first tile of each sequence."""
        return self.first // TILE + torch.arange(self.first.shape[0], device=self.first.device)

    @property
    def tiles(self) -> int:
        """The number of tiles as they are numbered, gaps included."""
        return self.rows // TILE + self.first.shape[0]

    def tile_places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each tile number its sequence, its index there, and whether the tile exists; S is at least 1."""
        number = torch.arange(self.tiles, device=self.first.device)
        sequence = (torch.searchsorted(self.first_tile, number, right=True) - 1).clamp(min=0)
        place = number - self.first_tile[sequence]
        return sequence, place, (place >= 0) & (place * TILE < self.lengths[sequence])


def row_counts(spec: SequenceSpec) -> tuple[int, int]:
    """Return the number of all rows of queries, and of keys: `TiledSide.rows`."""
    rows_q = spec.rows_q if spec.packs_queries else spec.number * spec.rows_q
    return rows_q, spec.rows_k if spec.packs_keys else spec.number * spec.rows_k


def tile_count(rows: int, spec: SequenceSpec) -> int:
    """Return `TiledSide.tiles` for a number of rows."""
    return rows // TILE + spec.number


def packs_nothing(mask: Tensor, spec: SequenceSpec) -> bool:
    """Return whether there are no bits, or no bit may be set."""
    return spec.number == 0 or mask.numel() == 0 or row_counts(spec)[0] == 0 or spec.max_seqlen_k == 0


def tiled_sides(bounds: Tensor, spec: SequenceSpec) -> tuple[TiledSide, TiledSide]:
    """Return the `TiledSide` of queries and of keys, from the bounds of a `SequenceView`."""
    first_q, length_q, first_k, length_k = bounds.long().T.contiguous().unbind(0)
    slots, (rows_q, rows_k) = torch.arange(spec.number, device=bounds.device), row_counts(spec)
    queries = TiledSide(first_q if spec.packs_queries else slots * spec.rows_q, length_q, rows_q)
    return queries, TiledSide(first_k if spec.packs_keys else slots * spec.rows_k, length_k, rows_k)


def pack_sequences(
    mask: Tensor, bounds: Tensor, mask_packing: MaskPacking, spec: SequenceSpec, window: tuple[int, int]
) -> list[Tensor]:
    """Make the tensors of a `SequenceTileMask`: bits, classes, row_lists, col_lists.

    The bool mask has the layout of `attention` with these sequences; for "ragged" it is (1, Hm, 1, N), for "tree"
    (S or 1, 1, n, n). The window has causality folded in.
    """
    queries, keys = tiled_sides(bounds, spec)
    num_heads, columns = mask.shape[1], tiles(spec.max_seqlen_k)
    bits = torch.zeros(num_heads, queries.rows, columns * TILE_WORDS, dtype=torch.int32, device=mask.device)
    if not packs_nothing(mask, spec):
        tokens = token_places(bounds, queries.rows // spec.rows_q, spec.rows_q, spec.packs_queries)
        step = max(1, CHUNK_ELEMENTS // max(1, num_heads * spec.max_seqlen_k))
        for start in range(0, queries.rows, step):
            some = TokenPlaces(*(x[start : start + step] for x in tokens))
            allowed = _inside(some, queries, keys, spec.max_seqlen_k, window)
            values = _rows_of(mask, mask_packing, some, start, queries, keys, spec.max_seqlen_k)
            bits[:, start : start + step] = pack_words(values & allowed)
    classes = _classify(bits, queries, columns)
    columns_first = _by_column(classes, queries, keys, tiles(spec.max_seqlen_q))
    return [x[None] for x in (bits, classes, list_rows(classes), list_rows(columns_first))]


def _inside(
    tokens: TokenPlaces, queries: TiledSide, keys: TiledSide, max_seqlen_k: int, window: tuple[int, int]
) -> Tensor:
    """Return the keys of its sequence that the window permits each row: bool (rows, max_seqlen_k)."""
    left, right = window
    sequence, place, is_used = tokens
    column = torch.arange(max_seqlen_k, device=sequence.device)
    diagonal = (place + keys.lengths[sequence] - queries.lengths[sequence])[:, None]
    allowed = (column < keys.lengths[sequence][:, None]) & is_used[:, None]
    if left >= 0:
        allowed &= column >= diagonal - left
    if right >= 0:
        allowed &= column <= diagonal + right
    return allowed


def _rows_of(
    mask: Tensor,
    mask_packing: MaskPacking,
    tokens: TokenPlaces,
    start: int,
    queries: TiledSide,
    keys: TiledSide,
    number: int,
) -> Tensor:
    """Return the mask of the rows `tokens`, which begin at row `start`: bool (Hm, rows, number of keys or 1)."""
    sequence, place, _ = tokens

    def within(size: int, index: Tensor) -> Tensor:
        return index.clamp(0, size - 1)  # rows and keys of no sequence get any value; `_inside` hides them

    if mask_packing == "queries":
        return mask[0, :, start : start + len(sequence)] if mask.shape[2] > 1 else mask[0]
    if mask_packing == "none":
        return mask[within(mask.shape[0], sequence), :, within(mask.shape[2], place)].transpose(0, 1)
    if mask_packing == "tree":
        earlier = keys.lengths[sequence] - queries.lengths[sequence]
        token = torch.arange(number, device=mask.device) - earlier[:, None]
        tree = mask[within(mask.shape[0], sequence), 0, within(mask.shape[2], place)]
        return (tree.gather(1, within(mask.shape[3], token)) | (token < 0))[None]
    if mask_packing == "keys":
        first = keys.first[sequence]
    else:
        pairs = queries.lengths * keys.lengths
        first = (pairs.cumsum(0) - pairs)[sequence] + place * keys.lengths[sequence]
    index = first[:, None] + torch.arange(number, device=mask.device)
    return mask[0, :, 0][:, within(mask.shape[3], index)]


def _classify(bits: Tensor, queries: TiledSide, columns: int) -> Tensor:
    """Classify every tile: uint8 (Hm, rows of tiles, columns). Rows after the end of a sequence do not count."""
    num_heads, _, words = bits.shape
    classes = torch.zeros(num_heads, queries.tiles, columns, dtype=torch.uint8, device=bits.device)
    if classes.numel() == 0 or queries.rows == 0 or len(queries.first) == 0:
        return classes
    sequence, place, exists = queries.tile_places()
    # Rows after the end are replaced by the last row, which does not change the class.
    row = torch.minimum(
        place[:, None] * TILE + torch.arange(TILE, device=bits.device), queries.lengths[sequence][:, None] - 1
    )
    row = (queries.first[sequence][:, None] + row).clamp(0, queries.rows - 1)
    step = max(1, CHUNK_ELEMENTS // max(1, num_heads * TILE * words))
    for start in range(0, queries.tiles, step):
        classes[:, start : start + step] = classify(bits[:, row[start : start + step]]).squeeze(2)
    return torch.where(exists[:, None], classes, 0)


def _by_column(classes: Tensor, queries: TiledSide, keys: TiledSide, most_rows: int) -> Tensor:
    """Transpose classes: for each column of tiles, the rows of its sequence: uint8 (Hm, columns of tiles, rows)."""
    num_heads, rows, columns = classes.shape
    if classes.numel() == 0 or len(queries.first) == 0:
        return classes.new_zeros(num_heads, keys.tiles, most_rows)
    sequence, place, has_keys = keys.tile_places()
    inner = torch.arange(most_rows, device=classes.device)
    exists = (inner * TILE < queries.lengths[sequence][:, None]) & has_keys[:, None]
    row = (queries.first_tile[sequence][:, None] + inner).clamp(max=rows - 1)
    return torch.where(exists, classes[:, row, place.clamp(0, columns - 1)[:, None]], 0)


def unpack_sequences(bits: Tensor, spec: SequenceSpec) -> Tensor:
    """Unpack bits (1, Hm, rows, 4 * C) to a bool mask in the layout of `attention` with sequences; contiguous."""
    rows = unpack_words(bits, spec.max_seqlen_k)
    if spec.packs_queries:
        return rows
    by_slot = rows[0].unflatten(1, (spec.number, spec.rows_q)).transpose(0, 1)[:, :, : spec.max_seqlen_q]
    return pad(by_slot, (0, 0, 0, max(0, spec.max_seqlen_q - spec.rows_q)), value=False).contiguous()
