"""The packing kernels: they load a bool mask once, and write bits, tile classes and tile lists.

For the mask m of one head, with low <= j - i <= high the allowed diagonals:

    allowed[i, j] = m[i, j] and low <= j - i <= high
    bits[i, w]    = sum over t < 32 of allowed[i, 32 w + t] << t
    class[I, J]   = 0 where no bit of the 128 x 128 tile is set, 2 where all are, 1 otherwise

`_pack_kernel` is bound by the bandwidth of loading m: 1 byte per element, for 1/8 byte that it writes. A program takes
128 rows by BLOCK_K keys. Aligned rows are loaded by 16 bytes. A multiplication turns four bools in an int32 into four
bits (a nibble). Eight nibbles, four in each of two neighbouring threads, are summed to 32 bits. `_list_kernel` then
needs only the classes, which have 1/16384 of the bytes of the mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_dmattn.masks.prepared.packing import TILE, TILE_WORDS, TileLists, tiles
from flash_dmattn.problem import Band

from .kernel_launch import ceil_div, launch

# Keys of a strip, and warps, by the bytes of a load. Wide loads (16 bytes): 64 KB a program, 256 bytes a thread, and
# 512 contiguous bytes a warp. Narrow loads: half the keys, because a thread holds four times the addresses. Compiled
# for sm_90, the wide kernel takes 56 registers, or 97 with a band.
#
#     bytes of a load   instructions a byte   with a band
#     16                 3.0                   4.0
#      4                 5.5                   8.2
#      1                13                    16
STRIP = {16: (512, 8), 4: (256, 8), 1: (256, 8)}
# Tiles that a program of the list kernel takes at once (their counts fit 16 bits), and its warps.
LIST_BLOCK, LIST_NUM_WARPS = 256, 2


@triton.jit
def ones_below(n):
    """Return int32 with the n lowest bits set: none for n < 1, all 32 for n > 31."""
    n = tl.minimum(tl.maximum(n, 0), 32)
    ones = (tl.full(n.shape, 1, tl.uint32) << tl.minimum(n, 31).to(tl.uint32)) - 1
    return tl.where(n == 32, tl.full(n.shape, 0xFFFFFFFF, tl.uint32), ones)


@triton.jit
def tile_in_band(first_key, first_row, low, high, TILE: tl.constexpr):
    """Return whether a band reaches the tile that begins at `first_key` and `first_row`."""
    return (first_key + (TILE - 1) >= first_row + low) & (first_key <= first_row + (TILE - 1) + high)


@triton.jit
def nibbles(four):
    """Return the four bools of each int32 as four bits: bit k is 1 where byte k is not 0."""
    # The sum sets bit 7 of a byte if any lower bit is set. The multiplication moves bit 7 of byte k to bit 28 + k, and
    # no two partial products overlap.
    four = four.to(tl.uint32, bitcast=True)
    nonzero = (((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) & 0x80808080
    return (nonzero * 0x00204081) >> 28


@triton.jit
def load_wide(
    mask_ptr, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, low, high,
    HAS_BAND: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load bits of keys with unit stride, 16 bytes a load: rows start and end on 16 bytes, the unit of stride_q."""
    quads = tl.arange(0, BLOCK_K // 4)
    # Written so that the compiler sees one predicate for all 16 bytes.
    inside = first_key + quads // 4 * 16 < seqlen_k
    if HAS_BAND:
        inside &= tile_in_band(first_key + quads // (TILE // 4) * TILE, first_row, low, high, TILE)
    starts = (rows.to(tl.int64) * stride_q)[:, None] * 4
    four = tl.load(
        mask_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + starts + (first_key // 4 + quads)[None, :],
        mask=(rows < seqlen_q)[:, None] & inside[None, :],
        other=0,
    )
    bits = nibbles(four) << (quads % 8 * 4).to(tl.uint32)[None, :]
    return tl.sum(tl.reshape(bits, (TILE, BLOCK_K // 32, 8)), axis=2)


@triton.jit
def load_narrow(
    mask_ptr, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, stride_k, low, high,
    VEC: tl.constexpr, HAS_BAND: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load bits of keys with any stride and alignment (VEC = 1), or 4 aligned bytes at a time (VEC = 4)."""
    # Four neighbouring lanes load neighbouring keys of the same 32, step by step until all are loaded. So each lane
    # collects a quarter of the bits in its register, and two exchanges between lanes combine them. All but the first of
    # these loads hit the L1 cache.
    word_keys = first_key + tl.arange(0, BLOCK_K // 32) * 32
    starts = (rows.to(tl.int64) * stride_q)[:, None, None]
    wanted = (rows < seqlen_q)[:, None, None]
    if HAS_BAND:
        wanted &= tile_in_band(word_keys // TILE * TILE, first_row, low, high, TILE)[None, :, None]
    bits = tl.zeros((TILE, BLOCK_K // 32, 4), tl.uint32)
    for step in range(0, 32, 4 * VEC):
        shifts = step + tl.arange(0, 4) * VEC
        keys = word_keys[:, None] + shifts[None, :]
        inside = wanted & (keys < seqlen_k)[None, :, :]
        if VEC == 4:
            quads_ptr = mask_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            some = nibbles(tl.load(quads_ptr + starts + (keys // 4)[None, :, :], mask=inside, other=0))
        else:
            offsets = starts + (keys.to(tl.int64) * stride_k)[None, :, :]
            some = (tl.load(mask_ptr + offsets, mask=inside, other=0) != 0).to(tl.uint32)
        bits |= some << shifts.to(tl.uint32)[None, None, :]
    return tl.sum(bits, axis=2)


@triton.jit(
    do_not_specialize=[
        "seqlen_q", "seqlen_k", "num_heads", "stride_b", "stride_h", "low", "high", "tiles_q", "tiles_k",
        "strips",
    ]
)  # fmt: skip
def _pack_kernel(
    mask_ptr, bits_ptr, classes_ptr,
    seqlen_q, seqlen_k, num_heads, stride_b, stride_h, stride_q, stride_k, low, high,
    tiles_q, tiles_k, strips,
    VEC: tl.constexpr, HAS_BAND: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs load neighbouring keys of the same rows.
    strip = tl.program_id(0) % strips
    tile_q = tl.program_id(0) // strips % tiles_q
    head = tl.program_id(0) // strips // tiles_q
    first_row, first_key = tile_q * TILE, strip * BLOCK_K
    rows = first_row + tl.arange(0, TILE)

    start = (head // num_heads).to(tl.int64) * stride_b + (head % num_heads).to(tl.int64) * stride_h
    mask_ptr += start * VEC
    if VEC == 16:
        bits = load_wide(
            mask_ptr, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, low, high, HAS_BAND, BLOCK_K, TILE
        )
    else:
        bits = load_narrow(
            mask_ptr, rows, first_row, first_key, seqlen_q, seqlen_k, stride_q, stride_k, low, high,
            VEC, HAS_BAND, BLOCK_K, TILE,
        )  # fmt: skip
    words = strip * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    if HAS_BAND:
        offset = rows[:, None] - words[None, :] * 32
        # low <= high, so the first term has all bits of the second, and ^ leaves the bits from low to high.
        bits &= ones_below(offset + (high + 1)) ^ ones_below(offset + low)

    # Written so that the compiler sees rows that start on 16 bytes, and one predicate for each 16 bytes.
    row_starts = (head.to(tl.int64) * seqlen_q + rows) * tiles_k * 4
    stored = (rows < seqlen_q)[:, None] & (words // 4 < tiles_k)[None, :]
    tl.store(bits_ptr + row_starts[:, None] + words[None, :], bits.to(tl.int32, bitcast=True), mask=stored)

    # The lower 16 bits count words with any bit set. The upper ones count full words, and rows beyond the last as full.
    any_bit = (bits != 0).to(tl.int32)
    all_bits = ((bits == 0xFFFFFFFF) | (rows >= seqlen_q)[:, None]).to(tl.int32)
    tally = tl.reshape(any_bit + (all_bits << 16), (TILE, BLOCK_K // TILE, TILE // 32))
    tally = tl.sum(tl.sum(tally, axis=0), axis=1)  # rows first, because a thread holds several rows of one word
    seen = (tally & 0xFFFF) != 0
    full = seen & ((tally >> 16) == TILE * (TILE // 32))
    kind = seen.to(tl.int32) + full.to(tl.int32)
    tiles = strip * (BLOCK_K // TILE) + tl.arange(0, BLOCK_K // TILE)
    table_row = (head.to(tl.int64) * tiles_q + tile_q) * tiles_k
    tl.store(classes_ptr + table_row + tiles, kind.to(tl.uint8), mask=tiles < tiles_k)


@triton.jit
def write_list(classes_ptr, stride, length, existing, list_ptr, BLOCK: tl.constexpr):
    """Write the list of `length` tiles, whose classes are `stride` apart.

    A list has the number of full tiles, the number of partial tiles, and then all tiles: full, partial, empty. Tiles
    from `existing` on count as empty, whatever their class is.
    """
    offsets = tl.arange(0, BLOCK)
    num_full = 0
    num_partial = 0
    for start in range(0, length, BLOCK):
        tiles = start + offsets
        kind = tl.load(classes_ptr + tiles.to(tl.int64) * stride, mask=tiles < existing, other=0)
        num_full += tl.sum((kind == 2).to(tl.int32), axis=0)
        num_partial += tl.sum((kind == 1).to(tl.int32), axis=0)
    tl.store(list_ptr, num_full)
    tl.store(list_ptr + 1, num_partial)

    full_before = 0
    partial_before = 0
    for start in range(0, length, BLOCK):
        tiles = start + offsets
        kind = tl.load(classes_ptr + tiles.to(tl.int64) * stride, mask=tiles < existing, other=0)
        # One scan for both: full tiles in the lower half, partial ones in the upper.
        both = (kind == 2).to(tl.int32) + ((kind == 1).to(tl.int32) << 16)
        upto = tl.cumsum(both, axis=0)
        full = full_before + (upto & 0xFFFF) - (both & 0xFFFF)
        partial = partial_before + (upto >> 16) - (both >> 16)
        empty = tiles - full - partial
        place = tl.where(kind == 2, full, num_full + tl.where(kind == 1, partial, num_partial + empty))
        tl.store(list_ptr + 2 + place, tiles, mask=tiles < length)
        totals = tl.sum(both, axis=0)
        full_before += totals & 0xFFFF
        partial_before += totals >> 16


@triton.jit(do_not_specialize=["heads", "tiles_q", "tiles_k"])
def _list_kernel(classes_ptr, rows_ptr, cols_ptr, heads, tiles_q, tiles_k, BLOCK: tl.constexpr):
    # One program per row of tiles, then one per column.
    program = tl.program_id(0).to(tl.int64)
    num_rows = heads.to(tl.int64) * tiles_q
    is_row = program < num_rows
    index = tl.where(is_row, program, program - num_rows)
    length = tl.where(is_row, tiles_k, tiles_q)
    stride = tl.where(is_row, 1, tiles_k)
    columns = tl.maximum(tiles_k, 1)  # rows without tiles are counted too
    classes_ptr += tl.where(is_row, index * tiles_k, index // columns * tiles_q * tiles_k + index % columns)
    list_ptr = tl.where(is_row, rows_ptr, cols_ptr) + index * (2 + length)

    write_list(classes_ptr, stride, length, length, list_ptr, BLOCK)


def vector_bytes(mask: torch.Tensor) -> int:
    """Return how many bytes of a 4-D bool mask one load may take: 16 or 4 if every row is aligned to that, else 1."""
    stride_b, stride_h, stride_q, stride_k = mask.stride()
    # A dim of size 1 may have any stride, which no load uses.
    taken = [stride for size, stride in zip(mask.shape[:3], (stride_b, stride_h, stride_q), strict=True) if size > 1]
    if stride_k == 1:
        for width in (16, 4):
            if all(x % width == 0 for x in (mask.data_ptr(), mask.size(3), *taken)):
                return width
    return 1


def pack_mask(
    mask: torch.Tensor, band: Band | None, *, strip: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the packing kernel; return what `flash_dmattn.masks.prepared.packing.pack_mask` returns.

    Args:
        mask: bool (Bm, Hm, Lq, Lk), any strides, 0 included.
        band: the band that is folded into the bits. Tiles outside it are not loaded.
        strip: keys of a strip, a power of 2 from 128, and warps. None takes `STRIP`; only the benchmark passes others.

    Returns:
        bits int32 (Bm, Hm, Lq, words), classes uint8 (Bm, Hm, Tq, Tk).
    """
    batch, num_heads, seqlen_q, seqlen_k = mask.shape
    tiles_q, tiles_k = tiles(seqlen_q), tiles(seqlen_k)
    num_words = tiles_k * TILE_WORDS
    bits = torch.empty(batch, num_heads, seqlen_q, num_words, dtype=torch.int32, device=mask.device)
    classes = torch.empty(batch, num_heads, tiles_q, tiles_k, dtype=torch.uint8, device=mask.device)
    vec = vector_bytes(mask)
    block_k, num_warps = strip or STRIP[vec]
    strips = ceil_div(seqlen_k, block_k)
    programs = batch * num_heads * tiles_q * strips
    if programs:
        stride_b, stride_h, stride_q, stride_k = mask.stride()
        strides = (stride_b // vec, stride_h // vec, stride_q // vec, stride_k)
        numbers = (seqlen_q, seqlen_k, num_heads, *strides, *(band or (0, 0)), tiles_q, tiles_k, strips)
        constants = (vec, band is not None, block_k, TILE)
        launch(_pack_kernel, programs, (mask.view(torch.uint8), bits, classes), numbers, constants, num_warps)
    return bits, classes


def list_tiles(classes: torch.Tensor) -> TileLists:
    """Launch the list kernel; return what `flash_dmattn.masks.prepared.packing.list_tiles` returns.

    Args:
        classes: uint8 (Bm, Hm, Tq, Tk), contiguous.
    """
    batch, num_heads, tiles_q, tiles_k = classes.shape
    heads = batch * num_heads
    row_lists = torch.empty(batch, num_heads, tiles_q, 2 + tiles_k, dtype=torch.int32, device=classes.device)
    col_lists = torch.empty(batch, num_heads, tiles_k, 2 + tiles_q, dtype=torch.int32, device=classes.device)
    programs = heads * (tiles_q + tiles_k)
    if programs:
        tensors, numbers = (classes, row_lists, col_lists), (heads, tiles_q, tiles_k)
        launch(_list_kernel, programs, tensors, numbers, (LIST_BLOCK,), LIST_NUM_WARPS)
    return row_lists, col_lists
