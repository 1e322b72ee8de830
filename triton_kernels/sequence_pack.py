"""The kernels that pack the mask of a call with sequences: `mask_pack.py`, applied to the mask of each sequence.

A program of `_pack_sequences_kernel` has a row of tiles, numbered as in `SequenceTileMask`, and a strip of keys. Each
sequence has a number for every 128 rows up to the first row of the next sequence, and at most one number more. So
programs also cover the rows between two sequences and write zeros there, and the bits need not be zeroed first. A
program only needs pairs within the lengths of its sequence and the band.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_dmattn.masks.prepared.packing import (
    TILE,
    TILE_WORDS,
    MaskPacking,
    packs_nothing,
    row_counts,
    tile_count,
    tiles,
)
from flash_dmattn.masks.prepared.packing import pack_sequences as pack_by_pytorch
from flash_dmattn.problem import SequenceSpec

from .kernel_launch import ceil_div, launch, next_power_of_2
from .mask_pack import (
    LIST_BLOCK,
    LIST_NUM_WARPS,
    STRIP,
    load_narrow,
    load_wide,
    ones_below,
    tile_in_band,
    vector_bytes,
    write_list,
)

# The index of an element of the mask. PLACES: query and key. RAGGED: the number of the pair among all pairs. TREE:
# query and new token.
PLACES, RAGGED, TREE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _first_of(bounds_ptr, sequence, slots, COLUMN: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return the first row of a sequence among the rows of all sequences: queries (COLUMN 0) or keys (COLUMN 2)."""
    if IS_PACKED:
        return tl.load(bounds_ptr + sequence * 4 + COLUMN).to(tl.int64)
    else:
        return sequence.to(tl.int64) * slots


@triton.jit
def _sequence_of(
    tile, bounds_ptr, number, slots, COLUMN: tl.constexpr, IS_PACKED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the sequence of a tile, its first row, and the number of the tile in it: negative before the first one."""
    low = tile * 0
    high = low + number
    while high - low > 1:
        middle = (low + high) // 2
        begins = _first_of(bounds_ptr, middle, slots, COLUMN, IS_PACKED) // TILE + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    first = _first_of(bounds_ptr, low, slots, COLUMN, IS_PACKED)
    return low, first, (tile - (first // TILE + low)).to(tl.int32)


@triton.jit
def _load_pairs(
    mask_ptr, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, stride_k, first_pair, last, low, high,
    KIND: tl.constexpr, HAS_BAND: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load bits like `load_narrow`, from masks whose rows do not begin with the first key: ragged masks and trees.

    `last` is the number of the last pair, or of the last token of a tree; larger numbers are clamped to it.
    """
    word_keys = first_key + tl.arange(0, BLOCK_K // 32) * 32
    wanted = (rows < seqlen_q)[:, None, None]
    if HAS_BAND:
        wanted &= tile_in_band(word_keys // TILE * TILE, first_row, low, high, TILE)[None, :, None]
    bits = tl.zeros((TILE, BLOCK_K // 32, 4), tl.uint32)
    for step in range(0, 32, 4):
        shifts = step + tl.arange(0, 4)
        keys = word_keys[:, None] + shifts[None, :]
        inside = wanted & (keys < seqlen_k)[None, :, :]
        if KIND == RAGGED:
            pairs = first_pair + rows.to(tl.int64)[:, None, None] * seqlen_k + keys[None, :, :]
            some = tl.load(mask_ptr + tl.minimum(pairs, last) * stride_k, mask=inside, other=0) != 0
        else:
            # All new tokens attend to the earlier keys.
            token = keys - (seqlen_k - seqlen_q)
            starts = rows.to(tl.int64)[:, None, None] * stride_q
            offsets = starts + (tl.minimum(tl.maximum(token, 0), last) * stride_k)[None, :, :]
            some = tl.load(mask_ptr + offsets, mask=inside & (token >= 0)[None, :, :], other=1) != 0
        bits |= (some & inside).to(tl.uint32) << shifts.to(tl.uint32)[None, None, :]
    return tl.sum(bits, axis=2)


@triton.jit(
    do_not_specialize=[
        "number", "slots", "num_rows", "stride_own", "stride_h", "stride_first_q", "stride_first_k", "last", "left",
        "right", "tiles_q", "tiles_k", "strips",
    ]
)  # fmt: skip
def _pack_sequences_kernel(
    mask_ptr, bounds_ptr, pairs_ptr, bits_ptr, classes_ptr,
    number, slots, num_rows, stride_own, stride_h, stride_q, stride_k, stride_first_q, stride_first_k, last,
    left, right, tiles_q, tiles_k, strips,
    VEC: tl.constexpr, KIND: tl.constexpr, IS_PACKED: tl.constexpr, HAS_BAND: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs load neighbouring keys of the same rows.
    strip = tl.program_id(0) % strips
    # Tile -1 covers the rows before the first sequence that no numbered tile covers.
    tile = tl.program_id(0) // strips % (tiles_q + 1) - 1
    head = (tl.program_id(0) // strips // (tiles_q + 1)).to(tl.int64)
    sequence, first_q, place = _sequence_of(tile, bounds_ptr, number, slots, 0, IS_PACKED, TILE)
    seqlen_q = tl.load(bounds_ptr + sequence * 4 + 1)
    first_k = tl.load(bounds_ptr + sequence * 4 + 2)
    seqlen_k = tl.load(bounds_ptr + sequence * 4 + 3)
    next_first_q = first_q * 0 + num_rows
    if sequence + 1 < number:
        next_first_q = _first_of(bounds_ptr, sequence + 1, slots, 0, IS_PACKED)

    first_row, first_key = place * TILE, strip * BLOCK_K
    rows = first_row + tl.arange(0, TILE)
    words = strip * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    low = seqlen_k - seqlen_q - left
    high = seqlen_k - seqlen_q + right
    is_read = (first_row >= 0) & (first_row < seqlen_q) & (first_key < seqlen_k)
    if HAS_BAND:
        is_read &= (first_key + (BLOCK_K - 1) >= first_row + low) & (first_key <= first_row + (TILE - 1) + high)
    bits = tl.zeros((TILE, BLOCK_K // 32), tl.uint32)
    if is_read:
        start = sequence.to(tl.int64) * stride_own + head * stride_h
        start += first_q * stride_first_q + first_k.to(tl.int64) * stride_first_k
        at = mask_ptr + start * VEC
        if KIND != PLACES:
            first_pair = first_q * 0
            if KIND == RAGGED:
                first_pair = tl.load(pairs_ptr + sequence)
            bits = _load_pairs(
                at, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, stride_k, first_pair, last, low, high,
                KIND, HAS_BAND, BLOCK_K, TILE,
            )  # fmt: skip
        elif VEC == 16:
            bits = load_wide(
                at, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, low, high, HAS_BAND, BLOCK_K, TILE
            )
        else:
            bits = load_narrow(
                at, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, stride_k, low, high,
                VEC, HAS_BAND, BLOCK_K, TILE,
            )  # fmt: skip
        if HAS_BAND:
            offset = rows[:, None] - words[None, :] * 32
            ends = tl.minimum(offset + (high + 1), (seqlen_k - words * 32)[None, :])
            bits &= ones_below(tl.maximum(ends, offset + low)) ^ ones_below(offset + low)
        else:
            bits &= ones_below(seqlen_k - words * 32)[None, :]

    # As in the dense kernel: the compiler sees rows that start on 16 bytes, and one predicate for each 16 bytes.
    at_rows = first_q + rows
    row_starts = (head * num_rows + at_rows) * tiles_k * 4
    stored = ((at_rows >= 0) & (at_rows < next_first_q))[:, None] & (words // 4 < tiles_k)[None, :]
    tl.store(bits_ptr + row_starts[:, None] + words[None, :], bits.to(tl.int32, bitcast=True), mask=stored)

    any_bit = (bits != 0).to(tl.int32)
    all_bits = ((bits == 0xFFFFFFFF) | (rows >= seqlen_q)[:, None]).to(tl.int32)
    tally = tl.reshape(any_bit + (all_bits << 16), (TILE, BLOCK_K // TILE, TILE // 32))
    tally = tl.sum(tl.sum(tally, axis=0), axis=1)
    seen = (tally & 0xFFFF) != 0
    full = seen & ((tally >> 16) == TILE * (TILE // 32))
    kind = seen.to(tl.int32) + full.to(tl.int32)
    tiles = strip * (BLOCK_K // TILE) + tl.arange(0, BLOCK_K // TILE)
    table_row = (head * tiles_q + tile) * tiles_k
    tl.store(classes_ptr + table_row + tiles, kind.to(tl.uint8), mask=(tiles < tiles_k) & (tile >= 0))


@triton.jit(do_not_specialize=["number", "slots_q", "slots_k", "tiles_q", "tiles_k", "columns", "most_rows"])
def _list_sequences_kernel(
    classes_ptr, bounds_ptr, rows_ptr, cols_ptr, number, slots_q, slots_k, tiles_q, tiles_k, columns, most_rows,
    PACKS_QUERIES: tl.constexpr, PACKS_KEYS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # Each head has a program per row of tiles, then one per column. The list of a column has the rows of its sequence.
    head = (tl.program_id(0) // (tiles_q + columns)).to(tl.int64)
    index = tl.program_id(0) % (tiles_q + columns)
    if index < tiles_q:
        row = head * tiles_q + index
        write_list(classes_ptr + row * tiles_k, 1, tiles_k, tiles_k, rows_ptr + row * (2 + tiles_k), BLOCK)
    else:
        column = index - tiles_q
        sequence, _, place = _sequence_of(column, bounds_ptr, number, slots_k, 2, PACKS_KEYS, TILE)
        top = _first_of(bounds_ptr, sequence, slots_q, 0, PACKS_QUERIES) // TILE + sequence
        seqlen_q = tl.load(bounds_ptr + sequence * 4 + 1)
        seqlen_k = tl.load(bounds_ptr + sequence * 4 + 3)
        has_keys = (place >= 0) & (place < tl.cdiv(seqlen_k, TILE))
        existing = tl.where(has_keys, tl.cdiv(seqlen_q, TILE), 0)
        classes_ptr += (head * tiles_q + top) * tiles_k + place
        list_ptr = cols_ptr + (head * columns + column) * (2 + most_rows)
        write_list(classes_ptr, tiles_k, most_rows, existing, list_ptr, BLOCK)


def pack_sequences(
    mask: torch.Tensor, bounds: torch.Tensor, mask_packing: MaskPacking, spec: SequenceSpec, window: tuple[int, int]
) -> list[torch.Tensor]:
    """Launch both kernels; return what `flash_dmattn.masks.prepared.packing.pack_sequences` returns.

    It takes the same arguments; the mask may have any strides, 0 included.
    """
    if packs_nothing(mask, spec):
        return pack_by_pytorch(mask, bounds, mask_packing, spec, window)
    bounds, heads = bounds.contiguous(), mask.shape[1]
    rows_q, rows_k = row_counts(spec)
    tiles_q, columns = tile_count(rows_q, spec), tile_count(rows_k, spec)
    tiles_k, most_rows = tiles(spec.max_seqlen_k), tiles(spec.max_seqlen_q)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty((1, heads, *shape), dtype=dtype, device=mask.device)

    bits, classes = empty(rows_q, tiles_k * TILE_WORDS), empty(tiles_q, tiles_k, dtype=torch.uint8)
    row_lists, col_lists = empty(tiles_q, 2 + tiles_k), empty(columns, 2 + most_rows)

    vec = vector_bytes(mask) if mask_packing in ("none", "queries") else 1
    kind = {"ragged": RAGGED.value, "tree": TREE.value}.get(mask_packing, PLACES.value)
    widest, num_warps = STRIP[vec]
    block_k = min(widest, next_power_of_2(tiles_k) * TILE)  # no wider than a row
    strips = ceil_div(tiles_k * TILE, block_k)
    pairs = zip(mask.shape, mask.stride(), (vec, vec, vec, 1), strict=True)
    # A dim of size 1 is broadcast, whatever its stride is.
    stride_own, stride_h, stride_q, stride_k = (stride // unit if size > 1 else 0 for size, stride, unit in pairs)
    stride_first_q = stride_q if mask_packing == "queries" else 0
    stride_first_k = stride_k if mask_packing == "keys" else 0
    strides = (stride_own, stride_h, stride_q, stride_k, stride_first_q, stride_first_k, mask.shape[3] - 1)
    # An unlimited side, or one longer than any sequence, becomes the maximum length, so that 32 bits are enough.
    sides = zip(window, (spec.max_seqlen_k, spec.max_seqlen_q), strict=True)
    left, right = (min(side, most) if side >= 0 else most for side, most in sides)
    numbers = (spec.number, spec.rows_q, rows_q, *strides, left, right, tiles_q, tiles_k, strips)
    constants = (vec, kind, spec.packs_queries, window != (-1, -1), block_k, TILE)
    firsts = _first_pairs(bounds) if mask_packing == "ragged" else bounds
    tensors = (mask.view(torch.uint8), bounds, firsts, bits, classes)
    programs = heads * (tiles_q + 1) * strips
    launch(_pack_sequences_kernel, programs, tensors, numbers, constants, min(num_warps, block_k // 32))

    numbers = (spec.number, spec.rows_q, spec.rows_k, tiles_q, tiles_k, columns, most_rows)
    constants = (spec.packs_queries, spec.packs_keys, LIST_BLOCK, TILE)
    lists = (classes, bounds, row_lists, col_lists)
    launch(_list_sequences_kernel, heads * (tiles_q + columns), lists, numbers, constants, LIST_NUM_WARPS)
    return [bits, classes, row_lists, col_lists]


def _first_pairs(bounds: torch.Tensor) -> torch.Tensor:
    """Return the number of the first pair of each sequence, int64 (S,); pairs are stored sequence after sequence."""
    pairs = bounds[:, 1].long() * bounds[:, 3]
    return pairs.cumsum(0) - pairs
