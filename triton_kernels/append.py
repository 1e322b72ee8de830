"""The kernel that writes new keys and values into a cache, and its launch: one launch writes both k and v."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_dmattn.sequences.cache_writes import CacheWrite

from .kernel_launch import ceil_div, launch

# A program copies up to _TILE_BYTES bytes of k, and at most _MOST_ROWS rows. If there are at most _FEW rows in total
# (tokens times heads), a program copies _FEW_ROWS rows, because larger tiles would leave part of the GPU idle.
_TILE_BYTES, _MOST_ROWS = 8192, 32
_FEW, _FEW_ROWS = 4096, 4


@triton.jit
def append_kernel(
    k_cache,
    v_cache,
    k,
    v,
    bounds,
    table,
    k_cache_strides,
    v_cache_strides,
    k_strides,
    v_strides,
    rows,
    slots,
    number,
    search_steps,
    num_heads,
    head_dim,
    head_dim_v,
    pages,
    table_row,
    PACKS_TOKENS: tl.constexpr,
    PACKS_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_V: tl.constexpr,
):
    """Copy ROWS rows of new tokens of one head.

    New tokens have `slots` rows for each sequence, or are packed (PACKS_TOKENS): one row after the other. Strides are
    (entry, row, head, dim). PAGE is the size of a page, 0 without a `table` of pages; entries of the table are clamped.
    Rows of no sequence are skipped, and so are tokens whose position is before the first key of their sequence.
    """
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    row = tl.program_id(0) // num_heads * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    if PACKS_TOKENS:
        low = row * 0
        high = low + number
        for _ in range(0, search_steps):  # the last sequence that begins at or before the row
            middle = (low + high) // 2
            is_later = tl.load(bounds + middle * 4) > row
            high = tl.where(is_later, middle, high)
            low = tl.where(is_later, low, middle)
        sequence = low
        token = row - tl.load(bounds + sequence * 4)
        from_entry, from_row = row.to(tl.int64) * 0, row.to(tl.int64)
    else:
        sequence = tl.where(is_row, row // slots, 0)
        token = row % slots
        from_entry, from_row = sequence.to(tl.int64), token.to(tl.int64)
    tokens = tl.load(bounds + sequence * 4 + 1)
    keys = tl.load(bounds + sequence * 4 + 3)
    place = keys - tokens + token
    is_written = is_row & (token >= 0) & (token < tokens) & (place >= 0)
    if PAGE > 0:
        at = table + sequence.to(tl.int64) * table_row + place // PAGE
        page = tl.load(at, mask=is_written, other=0)
        entry = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
        key = (place % PAGE).to(tl.int64)
    else:
        key = (place + tl.load(bounds + sequence * 4 + 2)).to(tl.int64)
        entry = sequence.to(tl.int64) * (0 if PACKS_KEYS else 1)
    copy_rows(
        k_cache, k_cache_strides, k, k_strides, entry, key, from_entry, from_row, head, is_written, head_dim, BLOCK_D
    )  # fmt: skip
    if HAS_V:
        copy_rows(
            v_cache, v_cache_strides, v, v_strides, entry, key, from_entry, from_row, head, is_written, head_dim_v,
            BLOCK_DV,
        )  # fmt: skip


@triton.jit
def copy_rows(
    to, to_strides, x, strides, entry, key, from_entry, from_row, head, is_written, num_dims, BLOCK: tl.constexpr
):
    """Copy rows of one head of a tensor into a cache."""
    dims = tl.arange(0, BLOCK).to(tl.int64)
    inside = is_written[:, None] & (dims < num_dims)[None, :]
    source = x + from_entry * strides[0] + from_row * strides[1] + head * strides[2]
    target = to + entry * to_strides[0] + key * to_strides[1] + head * to_strides[2]
    values = tl.load(source[:, None] + dims[None, :] * strides[3], mask=inside, other=0.0)
    tl.store(target[:, None] + dims[None, :] * to_strides[3], values, mask=inside)


def write(request: CacheWrite) -> None:
    """Write the new keys and values of a `CacheWrite` that is not empty."""
    entries, slots, heads, head_dim = request.k.shape
    rows, number = entries * slots, request.bounds.shape[0]
    v, v_cache = request.v, request.v_cache
    has_v = v is not None and v_cache is not None
    if v is None or v_cache is None:
        v, v_cache = request.k, request.k_cache  # placeholders, which the kernel does not access without HAS_V
    head_dim_v = v.shape[3]
    block_d, block_dv = (1 << (dim - 1).bit_length() for dim in (head_dim, head_dim_v))  # powers of 2
    widest = max(block_d, block_dv) * request.k.element_size()
    block = max(1, min(_MOST_ROWS, _TILE_BYTES // widest))
    if rows * heads <= _FEW:
        block = min(block, _FEW_ROWS)
    table = request.bounds if request.block_table is None else request.block_table
    tensors = (request.k_cache, v_cache, request.k, v, request.bounds, table)
    strides = tuple(tuple(x.stride()) for x in tensors[:4])
    sizes = (rows, slots, number, number.bit_length(), heads, head_dim, head_dim_v, request.k_cache.shape[0])
    page = 0 if request.block_table is None else request.k_cache.shape[1]
    constants = (request.packs_tokens, request.packs_keys, page, block, block_d, block_dv, has_v)
    launch(
        append_kernel,
        ceil_div(rows, block) * heads,
        tensors,
        (*strides, *sizes, table.stride(0)),
        constants,
        num_warps=4,
    )
