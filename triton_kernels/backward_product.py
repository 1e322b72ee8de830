"""The kernel that computes dq from a stored ds: dq = softmax_scale * ds @ k.

The gradient of a bias of one value per score of every head is ds itself. The key-stationary kernel has stored it, and
loading it is faster than computing ds again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pieces import add_product, load_pieces
from .tile_ops import EDGE, INSIDE, block_at, keys_of_queries, mask_head


@triton.jit
def backward_product_kernel(
    k,
    dbias,
    mask_data,
    mask_index,
    dq,
    k_strides,
    mask_strides,
    shape,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    TMA: tl.constexpr,
    BIAS_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of dq. dbias (B, Hq, Lq, Lk) and dq (B, Lq, Hq, D) are contiguous.

    Tiles that the band or the lists exclude are not loaded.
    """
    scale = tl.cast(scale, tl.float32)
    program = tl.program_id(0)
    tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
    tile_m = tiles_m - 1 - program % tiles_m
    b = (program // tiles_m // shape.num_heads).to(tl.int64)
    h = program // tiles_m % shape.num_heads
    h_k = h // shape.group
    first = tile_m * BLOCK_M
    last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_ok = rows < shape.seqlen_q
    _, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
    walk, start, inside, before, after = keys_of_queries(
        first, last, index, mask_strides, shape, MASK, LEFT, RIGHT, BLOCK_N
    )
    lines = ((b * shape.num_heads + h) * shape.seqlen_q + rows)[:, None] * shape.seqlen_k
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(INSIDE, EDGE + 1):
        steps = inside if phase == INSIDE else before + after
        for step in range(0, steps):
            place = block_at(step, walk, start, inside, before, phase == EDGE, MASK, BLOCK_N)
            keys = place + tl.arange(0, BLOCK_N)
            k_pieces = load_pieces(
                k, k_strides, shape.batch, b, h_k, place, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, BLOCK_D, TMA, WIDE, phase == EDGE, PAD_D, PRECISION,
            )  # fmt: skip
            if BIAS_TMA:
                ds = dbias.load([b.to(tl.int32), h, first, place]).reshape(BLOCK_M, BLOCK_N)
            else:
                stored = row_ok[:, None] & (keys < shape.seqlen_k)[None, :]
                ds = tl.load(dbias + lines + keys[None, :], mask=stored, other=0.0)
            acc_dq = add_product(acc_dq, ds, k_pieces, PRECISION)
    place = ((b * shape.seqlen_q + rows) * shape.num_heads + h)[:, None] * shape.head_dim + dims[None, :]
    stored = row_ok[:, None] & (dims < shape.head_dim)[None, :]
    tl.store(dq + place, (acc_dq * scale).to(dq.dtype.element_ty), mask=stored)
