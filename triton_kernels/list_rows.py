"""dk and dv of attention over lists: the contribution of a row of lists to each key is stored, then added by key.

A chunk of rows of lists goes through four kernels:

1. `list_bits_kernel` sets a bit for each pair of a key and a row of lists, by atomic or, whose order does not matter.
2. `list_counts_kernel` counts the bits, which gives each pair an index: the rows of a key are consecutive, in the order
   of the lists. 3. `list_queries_kernel` stores [ds^T q | p^T dout] of each pair at its index, in one row. If the
   members are split over programs, or the head dims are wide, it stores p and ds instead, and `list_rows_kernel`
   computes the rows.
4. `list_add_kernel` adds the rows of each key to its sums.

The order of every sum depends only on sizes and lists, so results are reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .list_ops import keys_at, load_members, members_of, places_in_rows, popcount, row_of_lists, store_row


@triton.jit(do_not_specialize=["first_owner", "first_row"])
def list_bits_kernel(
    entries,
    counts,
    words,
    first_owner,
    first_row,
    shape,
    lists,
    chunk,
    heads_k,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS_EACH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Set the bits of one row of lists; words (owners, Lk, WORDS) are zero at first."""
    program = tl.program_id(0)
    local = program % chunk
    row = first_row + local
    owner = first_owner + program // chunk
    if row >= lists.rows or owner >= shape.batch * heads_k:
        return
    number = row_of_lists((owner // heads_k).to(tl.int64), owner % heads_k, row, lists)
    entries += number * lists.most
    end = tl.load(counts + number) * KEYS_EACH
    first_key = (owner - first_owner).to(tl.int64) * shape.seqlen_k
    bit = tl.zeros([BLOCK_N], tl.int32) + (1 << (local % 32))
    for start in range(0, end, BLOCK_N):
        _, keys, key_ok = keys_at(entries, start, end, row, shape, BLOCK_N, QUERIES, KEYS_EACH, LEFT, RIGHT)
        at = words + (first_key + keys) * WORDS + local // 32
        tl.atomic_or(at, bit, mask=key_ok, sem="relaxed")


@triton.jit
def list_counts_kernel(words, before, counts, number, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Count the bits before each word, and of all words, for BLOCK of `number` keys."""
    key = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = key < number
    at = key[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    bits = popcount(tl.load(words + at, mask=is_key[:, None], other=0))
    tl.store(before + at, tl.cumsum(bits, 1) - bits, mask=is_key[:, None])
    tl.store(counts + key, tl.sum(bits, 1), mask=is_key)


@triton.jit
def load_kept(
    kept, row, block, place, pitch, shape,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Load stored p or ds of a block of members, with places as rows. Rows without a key are undefined."""
    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = (member < GROUP * QUERIES) & (row * QUERIES + member // GROUP < shape.seqlen_q)
    at = kept + (member.to(tl.int64) * pitch)[:, None] + place[None, :]
    return tl.trans(tl.load(at, mask=row_ok[:, None] & (place < pitch)[None, :], other=0.0))


@triton.jit
def add_members(
    sums, tile, kept, x, strides, b, h_k, row, places, pitch, dims, shape,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    IS_CUT: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of p or ds of all members with their rows of x; p or ds is `tile`, or loaded if that is None.

    Several blocks are a separate loop, because unrolled blocks would all be in shared memory at the same time.
    """
    if BLOCKS == 1:
        queries, h, row_ok = members_of(0, row, h_k, shape, BLOCK_M, GROUP, QUERIES)
        part = load_members(x, strides, b, queries, h, row_ok, dims, DIM, IS_CUT)
        sums = tl.dot(tile, part, sums, input_precision=PRECISION)
    else:
        for block in tl.range(0, BLOCKS, num_stages=STAGES):
            part_of_kept = load_kept(kept, row, block, places, pitch, shape, BLOCK_M, BLOCK_N, GROUP, QUERIES)
            queries, h, row_ok = members_of(block, row, h_k, shape, BLOCK_M, GROUP, QUERIES)
            part = load_members(x, strides, b, queries, h, row_ok, dims, DIM, IS_CUT)
            sums = tl.dot(part_of_kept, part, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["first_owner", "first_row"])
def list_rows_kernel(
    q,
    entries,
    counts,
    dout,
    words,
    before,
    offsets,
    rows,
    kept_p,
    kept_ds,
    first_owner,
    first_row,
    q_strides,
    dout_strides,
    shape,
    lists,
    chunk,
    scale,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS_EACH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LATENT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WORDS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the rows of BLOCK_N places of one row of lists from p and ds of all of its members."""
    scale = tl.cast(scale, tl.float32)
    start = tl.program_id(0) % TILES * BLOCK_N
    program = tl.program_id(0) // TILES
    local = program % chunk
    row = first_row + local
    owner = first_owner + program // chunk
    heads_k = shape.num_heads // GROUP
    if row >= lists.rows or owner >= shape.batch * heads_k:
        return
    b = (owner // heads_k).to(tl.int64)
    h_k = owner % heads_k
    number = row_of_lists(b, h_k, row, lists)
    end = tl.load(counts + number) * KEYS_EACH
    if start >= end:
        return
    MEMBERS: tl.constexpr = GROUP * QUERIES
    _, keys, key_ok = keys_at(
        entries + number * lists.most, start, end, row, shape, BLOCK_N, QUERIES, KEYS_EACH, LEFT, RIGHT
    )
    place = places_in_rows(words, before, offsets, owner - first_owner, keys, key_ok, local, shape, WORDS)
    SIZE: tl.constexpr = DIM if LATENT else DIM + DIM_V
    pitch = lists.most * KEYS_EACH
    kept, places = program.to(tl.int64) * MEMBERS * pitch, start + tl.arange(0, BLOCK_N)
    BLOCKS: tl.constexpr = (MEMBERS + BLOCK_M - 1) // BLOCK_M
    if BLOCKS == 1:  # all columns use one tile of p and ds
        ds_tile = load_kept(kept_ds + kept, row, 0, places, pitch, shape, BLOCK_M, BLOCK_N, GROUP, QUERIES)
        p_tile = load_kept(kept_p + kept, row, 0, places, pitch, shape, BLOCK_M, BLOCK_N, GROUP, QUERIES)
    else:
        ds_tile = None
        p_tile = None
    for column in tl.range(0, DIM, COLUMNS, num_stages=STAGES if BLOCKS == 1 else 1):
        dims = column + tl.arange(0, COLUMNS)
        sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        sums = add_members(
            sums, ds_tile, kept_ds + kept, q, q_strides, b, h_k, row, places, pitch, dims, shape,
            BLOCK_M, BLOCK_N, GROUP, QUERIES, DIM, DIM % COLUMNS != 0, BLOCKS, STAGES, PRECISION,
        )  # fmt: skip
        sums = sums * scale
        if LATENT:
            sums = add_members(
                sums, p_tile, kept_p + kept, dout, dout_strides, b, h_k, row, places, pitch, dims, shape,
                BLOCK_M, BLOCK_N, GROUP, QUERIES, DIM_V, DIM != DIM_V, BLOCKS, STAGES, PRECISION,
            )  # fmt: skip
        store_row(rows + place * SIZE, sums, dims, key_ok, DIM, DIM % COLUMNS != 0)
    if not LATENT:
        for column in tl.range(0, DIM_V, COLUMNS, num_stages=STAGES if BLOCKS == 1 else 1):
            dims = column + tl.arange(0, COLUMNS)
            sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
            sums = add_members(
                sums, p_tile, kept_p + kept, dout, dout_strides, b, h_k, row, places, pitch, dims, shape,
                BLOCK_M, BLOCK_N, GROUP, QUERIES, DIM_V, DIM_V % COLUMNS != 0, BLOCKS, STAGES, PRECISION,
            )  # fmt: skip
            store_row(rows + place * SIZE + DIM, sums, dims, key_ok, DIM_V, DIM_V % COLUMNS != 0)


@triton.jit(do_not_specialize=["first_owner"])
def list_add_kernel(
    rows,
    offsets,
    counts,
    sums,
    first_owner,
    seqlen_k,
    number,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the rows of one of `number` keys, COLUMNS of SIZE columns, to its fp32 sums, BLOCK rows at a time."""
    key = tl.program_id(0) // PARTS
    dims = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    is_column = dims < SIZE
    begin = tl.load(offsets + key).to(tl.int64)
    count = tl.load(counts + key)
    if count == 0:
        return
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < count)[:, None] & is_column[None, :]
        acc += tl.load(rows + (begin + at)[:, None] * SIZE + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    at_sums = sums + (tl.cast(first_owner, tl.int64) * seqlen_k + key) * SIZE + dims
    tl.store(at_sums, tl.load(at_sums, mask=is_column, other=0.0) + tl.sum(acc, 0), mask=is_column)
