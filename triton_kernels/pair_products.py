"""The kernels that multiply the stored pairs of a chunk: dq = ds @ k, dk = ds^T @ q, dv = p^T @ dout, and sums of ds.

pairs.py describes the layout of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import PLACE, head_at, line_of, tiles_of_chunk
from .sequences import NO_SEQUENCES, bounds_of, mask_from, place_of, rows_from, sequence_at, tiles_of_rows
from .tile_ops import KEYS, TILE, TILES, block_at, keys_of_queries, load_tile, mask_head, queries_of_keys


@triton.jit
def load_pairs(
    pairs, slot, row, lines, pitch, first_place, is_line,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Load BLOCK_M lines from `row` on, and BLOCK_N columns, of a slot; with CHECK zeros where `is_line` is False."""
    if TMA:
        return pairs.load([slot, row, first_place]).reshape(BLOCK_M, BLOCK_N)
    else:
        at = pairs + (slot.to(tl.int64) * lines + row + tl.arange(0, BLOCK_M))[:, None] * pitch
        at += first_place + tl.arange(0, BLOCK_N)[None, :]
        if CHECK:
            return tl.load(at, mask=is_line[:, None], other=0.0)
        else:
            return tl.load(at)


@triton.jit(do_not_specialize=PLACE)
def pair_rows_kernel(
    ds_pairs,
    k,
    mask_data,
    mask_index,
    dq,
    bounds,
    first_owner,
    end_owner,
    first_member,
    first_line,
    k_strides,
    mask_strides,
    shape,
    scale,
    layout,
    members,
    lines,
    pitch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Compute COLUMNS columns of BLOCK_M rows of dq (B, Lq, Hq, D), which is contiguous.

    Tiles have the rows of the tiles of pairs, so that every block that is loaded was written.
    """
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats as fp64
    program = tl.program_id(0)
    columns = tl.cdiv(shape.head_dim, COLUMNS)
    column = program % columns * COLUMNS
    program = program // columns
    tiles_m = tiles_of_chunk(lines, shape, layout, SEQUENCES, SEARCH, BLOCK_M)
    tile_m = tiles_m - 1 - program % tiles_m  # under a causal band the longest rows start first
    slot = program // tiles_m
    b, h, visit = head_at(slot, first_owner, end_owner, first_member, members, shape, SEQUENCES)
    h_k = h // shape.group
    first = first_line + tile_m * BLOCK_M
    entry = b
    if SEQUENCES != NO_SEQUENCES:
        entry, place = sequence_at(tile_m, bounds, shape.seqlen_q, layout.number, SEARCH, 0, BLOCK_M)
        first = place * BLOCK_M
    first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
    at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b
    first_line_row = line_of(at, SEQUENCES)
    if SEQUENCES != NO_SEQUENCES:
        visit &= (at.row_q + first + BLOCK_M > first_line) & (at.row_q + first < first_line + lines)
    k = rows_from(k, k_strides, at.first_k, SEQUENCES)
    mask_data, mask_index = mask_from(mask_data, mask_index, mask_strides, at, at.row_q, layout, SEQUENCES, MASK)
    if visit & (first < shape.seqlen_q):
        rows = first + tl.arange(0, BLOCK_M)
        last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
        dims = column + tl.arange(0, COLUMNS)
        row = (first_line_row + first - first_line).to(tl.int32)
        line = first_line_row + rows - first_line
        is_line = (line >= 0) & (line < lines) & (rows < shape.seqlen_q)
        data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
        walk, start, inside, before, after = keys_of_queries(
            first, last, index, mask_strides, shape, MASK, LEFT, RIGHT, BLOCK_N
        )
        if MASK != TILES:
            start -= before
        acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        for step in range(0, inside + before + after):
            first_place = block_at(step, walk, start, inside, before, False, MASK, BLOCK_N)
            keys = first_place + tl.arange(0, BLOCK_N)
            if MASK == KEYS:
                keys = tl.load(data + keys, mask=keys < shape.seqlen_k, other=shape.seqlen_k)
            ds = load_pairs(
                ds_pairs, slot, row, lines, pitch, first_place, is_line,
                BLOCK_M, BLOCK_N, TMA, SEQUENCES != NO_SEQUENCES,
            )  # fmt: skip
            k_tile = load_tile(
                k, k_strides, at.b_k, h_k, first_place, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, COLUMNS, TMA, WIDE, True, PAD_D, column,
            )  # fmt: skip
            acc = tl.dot(ds, k_tile, acc)
        rows_q = dq + ((at.row_q + rows) * shape.num_heads + h)[:, None] * shape.head_dim + dims[None, :]
        tl.store(
            rows_q, (acc * scale).to(dq.dtype.element_ty), mask=is_line[:, None] & (dims < shape.head_dim)[None, :]
        )


@triton.jit(do_not_specialize=PLACE)
def pair_columns_kernel(
    pairs,
    x,
    mask_data,
    mask_index,
    dx,
    bounds,
    first_owner,
    end_owner,
    first_member,
    first_line,
    x_strides,
    mask_strides,
    shape,
    factor,
    layout,
    members,
    lines,
    pitch,
    width,
    key_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
    CUT: tl.constexpr,
    ADD: tl.constexpr,
):
    """Compute COLUMNS of the `width` columns of BLOCK_N rows of dk, from ds and q, or of dv, from p and dout.

    The sum over the members of the chunk goes to dx (B, Lk, Hk, width). With ADD it is added to dx, fp32 (owners,
    key_rows, width), which has the owners of the chunk. With CUT a chunk has some lines of its slots.
    """
    factor = tl.cast(factor, tl.float32)  # Inductor passes floats as fp64
    program = tl.program_id(0)
    columns = tl.cdiv(width, COLUMNS)
    column = program % columns * COLUMNS
    program = program // columns
    if SEQUENCES == NO_SEQUENCES:
        tiles_n = tl.cdiv(shape.seqlen_k, BLOCK_N)
    else:
        tiles_n = tiles_of_rows(layout.rows_k, shape.seqlen_k, layout.number, SEARCH, BLOCK_N)
    tile_n = program % tiles_n  # under a causal band the first keys have the most queries
    own_owner = program // tiles_n
    b, h_first, exists = head_at(own_owner, first_owner, end_owner, 0, 1, shape, SEQUENCES)
    h_k = h_first // shape.group
    entry = b
    if SEQUENCES != NO_SEQUENCES:
        entry, tile_n = sequence_at(tile_n, bounds, shape.seqlen_k, layout.number, SEARCH, 2, BLOCK_N)
    first_place = tile_n * BLOCK_N
    first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
    at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b
    first_line_row = line_of(at, SEQUENCES)
    first_key_row = tl.zeros_like(b) if SEQUENCES == NO_SEQUENCES and ADD else at.row_k
    x = rows_from(x, x_strides, at.first_q, SEQUENCES)
    mask_data, mask_index = mask_from(mask_data, mask_index, mask_strides, at, at.row_k, layout, SEQUENCES, MASK)
    count = shape.seqlen_k
    data, index = mask_head(mask_data, mask_index, mask_strides, b, h_first + first_member, MASK)
    if MASK == KEYS:
        count = tl.load(index + shape.seqlen_k, mask=exists, other=0)
    if exists & (first_place < count):
        places = first_place + tl.arange(0, BLOCK_N)
        dims = column + tl.arange(0, COLUMNS)
        keys = places
        first_key = first_place
        last_key = tl.minimum(first_place + BLOCK_N, count) - 1
        if MASK == KEYS:
            keys = tl.load(data + places, mask=places < shape.seqlen_k, other=shape.seqlen_k)
            first_key = tl.load(data + first_key)
            last_key = tl.load(data + last_key)
        acc = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        # The lines of the chunk are queries low..high - 1.
        low = (first_line - first_line_row).to(tl.int32)
        high = tl.minimum(low + lines, shape.seqlen_q)
        for member in range(0, tl.minimum(members, shape.group - first_member)):
            h = h_first + first_member + member
            slot = own_owner * members + member
            if MASK == TILES:
                _, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
            walk, start, inside, before, after = queries_of_keys(
                first_key, last_key, first_place // TILE, True, index, mask_strides, shape, MASK, LEFT, RIGHT, BLOCK_M
            )
            steps = inside + before + after
            if MASK != TILES:
                start -= before
                if CUT:
                    begin = tl.maximum(start, tl.maximum(low, 0) // BLOCK_M)
                    steps = tl.minimum(start + steps, tl.cdiv(tl.maximum(high, 0), BLOCK_M)) - begin
                    start = begin
            for step in range(0, steps):
                first = block_at(step, walk, start, inside, before, False, MASK, BLOCK_M)
                visit = True
                if CUT and MASK == TILES:
                    visit = (first + BLOCK_M > low) & (first < high)
                if visit:
                    rows = first + tl.arange(0, BLOCK_M)
                    row = first - low
                    tile = load_pairs(
                        pairs, slot, row, lines, pitch, first_place, (rows >= low) & (rows < high),
                        BLOCK_M, BLOCK_N, TMA, SEQUENCES != NO_SEQUENCES,
                    )  # fmt: skip
                    x_tile = load_tile(
                        x, x_strides, at.b_q, h, first, rows, shape.seqlen_q, dims, width,
                        BLOCK_M, COLUMNS, TMA, WIDE, True, PAD, column,
                    )  # fmt: skip
                    acc = tl.dot(tl.trans(tile), x_tile, acc)
        stored = (keys < shape.seqlen_k)[:, None] & (dims < width)[None, :]
        if ADD:
            line = dx + (own_owner.to(tl.int64) * key_rows + first_key_row + keys)[:, None] * width + dims[None, :]
            tl.store(line, tl.load(line, mask=stored, other=0.0) + acc * factor, mask=stored)
        else:
            heads_k = shape.num_heads // shape.group
            line = dx + ((first_key_row + keys) * heads_k + h_k)[:, None] * width + dims[None, :]
            tl.store(line, (acc * factor).to(dx.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=PLACE)
def pair_sums_kernel(
    key_parts,
    sums,
    bounds,
    first_owner,
    end_owner,
    first_member,
    first_line,
    shape,
    layout,
    members,
    parts,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Add the sums of tiles of BLOCK_M queries to the sums of ds of each key, for BLOCK keys of one query head.

    `sums` is fp32 (B, Hq, Lk), or with sequences the gradient of a bias of keys as in `backward_keys_kernel`.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(shape.seqlen_k, BLOCK)
    keys = program % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = program // blocks
    most_keys = shape.seqlen_k
    number = parts
    part = tl.zeros_like(slot)
    if SEQUENCES != NO_SEQUENCES:
        entry = slot % layout.number
        slot = slot // layout.number
    b, h, exists = head_at(slot, first_owner, end_owner, first_member, members, shape, SEQUENCES)
    if SEQUENCES == NO_SEQUENCES:
        sums_of_head = sums + (b * shape.num_heads + h) * shape.seqlen_k
    else:
        first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
        at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
        number = tl.cdiv(shape.seqlen_q, BLOCK_M)
        part = (at.row_q // BLOCK_M).to(tl.int32) + entry
        sums_of_head = sums + (at.b * (1 - layout.bias_keys) * shape.num_heads + h) * layout.dbias_keys
        sums_of_head += at.first_k * layout.bias_keys
    if exists:
        is_key = keys < shape.seqlen_k
        acc = tl.load(sums_of_head + keys, mask=is_key, other=0.0)
        line = key_parts + (slot.to(tl.int64) * parts + part) * most_keys
        for tile in range(0, number):
            acc += tl.load(line + tile * most_keys + keys, mask=is_key, other=0.0)
        tl.store(sums_of_head + keys, acc, mask=is_key)
