"""dq of attention over lists from stored ds, for head dims that leave no shared memory for sums of dq."""

from __future__ import annotations

import triton
import triton.language as tl

from .list_ops import keys_at, load_keys, members_of, row_of_lists


@triton.jit(do_not_specialize=["first_owner", "first_row"])
def list_product_kernel(
    k,
    entries,
    counts,
    kept_ds,
    dq,
    first_owner,
    first_row,
    k_strides,
    shape,
    lists,
    chunk,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS_EACH: tl.constexpr,
    PARTS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMN_PARTS: tl.constexpr,
):
    """Compute some columns of dq, equally many of both parts of the head dim, for one part of the members of a row."""
    scale = tl.cast(scale, tl.float32)
    program = tl.program_id(0)
    column = program % COLUMN_PARTS
    program = program // COLUMN_PARTS
    part = program % PARTS
    program = program // PARTS
    row = first_row + program % chunk
    owner = first_owner + program // chunk
    heads_k = shape.num_heads // GROUP
    if row >= lists.rows or owner >= shape.batch * heads_k:
        return
    b = (owner // heads_k).to(tl.int64)
    h_k = owner % heads_k
    rows, h, row_ok = members_of(part, row, h_k, shape, BLOCK_M, GROUP, QUERIES)
    WIDTH: tl.constexpr = BLOCK_D // COLUMN_PARTS
    WIDTH_REST: tl.constexpr = REST // COLUMN_PARTS if REST > 0 else 1
    dims = column * WIDTH + tl.arange(0, WIDTH)
    dims_rest = BLOCK_D + column * WIDTH_REST + tl.arange(0, WIDTH_REST)
    k += b * k_strides.batch + h_k.to(tl.int64) * k_strides.head
    number = row_of_lists(b, h_k, row, lists)
    entries += number * lists.most
    end = tl.load(counts + number) * KEYS_EACH
    pitch = lists.most * KEYS_EACH
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    kept = kept_ds + ((program.to(tl.int64) * (GROUP * QUERIES) + member) * pitch)[:, None]
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc_rest = acc
    if REST > 0:
        acc_rest = tl.zeros([BLOCK_M, WIDTH_REST], tl.float32)
    for start in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        _, keys, key_ok = keys_at(entries, start, end, row, shape, BLOCK_N, QUERIES, KEYS_EACH, LEFT, RIGHT)
        place = start + tl.arange(0, BLOCK_N)
        ds = tl.load(kept + place[None, :], mask=row_ok[:, None] & (place < pitch)[None, :], other=0.0)
        k_tile = load_keys(k, k_strides.row, keys, key_ok, dims, shape.head_dim, PAD_D and REST == 0, WIDE, KEYS_EACH)
        acc = tl.dot(ds, k_tile, acc, input_precision=PRECISION)
        if REST > 0:
            k_rest = load_keys(k, k_strides.row, keys, key_ok, dims_rest, shape.head_dim, PAD_D, WIDE, KEYS_EACH)
            acc_rest = tl.dot(ds, k_rest, acc_rest, input_precision=PRECISION)
    at = dq + (((b * shape.seqlen_q + rows) * shape.num_heads + h) * shape.head_dim)[:, None]
    inside = row_ok[:, None] & (dims < shape.head_dim)[None, :]
    tl.store(at + dims[None, :], (acc * scale).to(dq.dtype.element_ty), mask=inside)
    if REST > 0:
        inside = row_ok[:, None] & (dims_rest < shape.head_dim)[None, :]
        tl.store(at + dims_rest[None, :], (acc_rest * scale).to(dq.dtype.element_ty), mask=inside)
