"""The bias-stationary backward kernel: the gradient of a bias of one value per score shared by batch or heads.

One tile of dbias per program; the batch entries and heads that read it in turn, recomputing ds, so that the sum stays
in registers in fp32, in a fixed order, and is rounded once. Where the tiles are too few for the GPU, programs share
those heads in chunks, each with a slot for its sum, which sum_slots.py adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    KEYS,
    LOG2E,
    TILE,
    TILES,
    bits_by_row,
    entry_of,
    in_band,
    load_bias,
    load_tile,
    mask_head,
    reader_of,
    renormalize,
    row_totals,
    soft_cap,
)


@triton.jit
def backward_bias_kernel(
    q,
    k,
    v,
    bias,
    dout,
    lse_log2,
    delta,
    mask_data,
    mask_index,
    classes,
    dbias,
    sink,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    bias_strides,
    mask_strides,
    shape,
    scale_log2,
    softcap,
    bias_batch,
    bias_heads,
    chunk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """dbias (chunks, bias_batch, bias_heads, Lq, Lk) is contiguous; `classes` is 0 for a tile with nothing allowed.

    A chunk has `chunk` heads of batch entries.
    """
    scale_log2 = tl.cast(scale_log2, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
    tiles_n = tl.cdiv(shape.seqlen_k, BLOCK_N)
    first_key = program % tiles_n * BLOCK_N
    first = program // tiles_n % tiles_m * BLOCK_M
    owner = program // tiles_n // tiles_m % bias_heads
    slot = program // tiles_n // tiles_m // bias_heads
    owner_b = slot % bias_batch
    begin = slot // bias_batch * chunk
    rows = first + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < shape.seqlen_q
    members = shape.num_heads // bias_heads
    entries = shape.batch // bias_batch
    first_reader = reader_of(owner_b, 0, bias_strides.repeat, bias_batch).to(tl.int64)
    bias_tile = load_bias(
        bias, bias_strides, first_reader, owner * members, first, first_key, rows, keys, shape,
        BLOCK_M, BLOCK_N, False, WIDE,
    )  # fmt: skip
    last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
    last_key = tl.minimum(first_key + BLOCK_N, shape.seqlen_k) - 1
    shift = shape.seqlen_k - shape.seqlen_q
    end = tl.minimum(begin + chunk, entries * members)
    if RIGHT:
        end = tl.where(first_key > last + shift + shape.right, 0, end)
    if LEFT:
        end = tl.where(last_key < first + shift - shape.left, 0, end)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for entry in range(begin, end):
        b = reader_of(owner_b, entry // members, bias_strides.repeat, bias_batch).to(tl.int64)
        h = owner * members + entry % members
        h_k = h // shape.group
        visit = True
        if MASK == TILES:
            h_m = (h // mask_strides.group).to(tl.int64)
            # A list has two counts before its tiles, and as many tiles as a row of classes.
            b_m = entry_of(b, mask_strides)
            place = b_m * mask_strides.list_batch + h_m * mask_strides.list_head + first // TILE * mask_strides.list_row
            line = place // mask_strides.list_row * (mask_strides.list_row - 2)
            visit = tl.load(classes + line + first_key // TILE) != 0
        if MASK == KEYS:
            data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
            before = tl.load(index + keys, mask=keys < shape.seqlen_k, other=0)
            kept = tl.load(index + keys + 1, mask=keys < shape.seqlen_k, other=0) > before
            visit = tl.max(kept.to(tl.int32)) > 0
        if visit:
            statistics = (b * shape.num_heads + h) * shape.seqlen_q
            lse_rows = tl.load(lse_log2 + statistics + rows, mask=row_ok, other=float("inf"))
            d = tl.load(delta + statistics + rows, mask=row_ok, other=0.0)
            q_tile = load_tile(
                q, q_strides, b, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
                BLOCK_M, BLOCK_D, TMA, WIDE, True, PAD_D,
            )  # fmt: skip
            k_tile = load_tile(
                k, k_strides, b, h_k, first_key, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, BLOCK_D, TMA, WIDE, True, PAD_D,
            )  # fmt: skip
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if SOFTCAP:
                s = soft_cap(s * scale_log2)[0] * (softcap * LOG2E)
            else:
                s = s * scale_log2
            s += bias_tile.to(tl.float32) * LOG2E
            allowed = in_band(rows[:, None], keys[None, :], shape, LEFT, RIGHT)
            if MASK == TILES:
                data, _ = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
                allowed &= bits_by_row(data, first_key, rows, shape.seqlen_q, mask_strides.row, BLOCK_M, BLOCK_N)
            elif MASK == KEYS:
                allowed &= kept[None, :]
            s = tl.where(allowed, s, float("-inf"))
            p = tl.math.exp2(s - lse_rows[:, None])
            if FEW_KEYS:
                p = renormalize(p, row_totals(p, sink, h, lse_rows, 1, HAS_SINK), 1)
            v_tile = load_tile(
                v, v_strides, b, h_k, first_key, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
                BLOCK_N, BLOCK_DV, TMA, WIDE, True, PAD_DV,
            )  # fmt: skip
            g_tile = load_tile(
                dout, dout_strides, b, h, first, rows, shape.seqlen_q, dims_v, shape.head_dim_v,
                BLOCK_M, BLOCK_DV, TMA, WIDE, True, PAD_DV,
            )  # fmt: skip
            dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
            if FEW_KEYS:
                d += tl.sum(p * dp, 1)
            acc += p * (dp - d[:, None])
    line = ((slot * bias_heads + owner).to(tl.int64) * shape.seqlen_q + rows)[:, None] * shape.seqlen_k
    inside = row_ok[:, None] & (keys < shape.seqlen_k)[None, :]
    tl.store(dbias + line + keys[None, :], acc.to(dbias.dtype.element_ty), mask=inside)
