"""The forward kernel: out and lse of one tile of queries of one head per program.

With s the scores in base 2, over tiles j of keys (Dao, FlashAttention-2, algorithm 1)::

    m' = max(m, rowmax(s_j));  p = exp2(s_j - m');  c = exp2(m - m');  l = l * c + rowsum(p);  acc = acc * c + p @ v_j
    out = acc / l;  lse = (m + log2(l)) * ln 2

Tiles that need no mask come first, in a loop without mask code; then those at an edge, or partial tiles of a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    KEY_BIAS,
    LN2,
    LOG2E,
    NO_BIAS,
    ROW_BIAS,
    TILE_BIAS,
    band_of_queries,
    bits_by_row,
    blocks_of,
    in_band,
    load_rows,
    load_vector,
    soft_cap,
)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    bias,
    bits,
    full_count,
    partial_count,
    indices,
    out,
    lse,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    stride_vb,
    stride_vl,
    stride_vh,
    stride_bb,
    stride_bh,
    stride_bi,
    stride_bj,
    bias_group,
    stride_mb,
    stride_mh,
    stride_mi,
    stride_tb,
    stride_th,
    tiles_k,
    mask_group,
    scale,
    sign,
    softcap,
    seqlen_q,
    seqlen_k,
    num_heads,
    group,
    head_dim,
    head_dim_v,
    left,
    right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`scale` is |softmax_scale| * log2(e), or |softmax_scale| / softcap; `sign` that of softmax_scale."""
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    tile_m = tiles_m - 1 - program % tiles_m  # under a causal band the longest rows start first
    b = (program // tiles_m // num_heads).to(tl.int64)
    h = program // tiles_m % num_heads
    h_k = h // group

    first = tile_m * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < seqlen_q
    q_tile = load_rows(
        q + b * stride_qb + h.to(tl.int64) * stride_qh, rows, seqlen_q, stride_ql, dims, head_dim, True, PAD_D
    )
    # Exact, and it leaves a scale >= 0, under which the maximum of the products is that of the scores.
    q_tile = (q_tile * sign).to(q_tile.dtype)
    if not TMA:
        k_base = k + b * stride_kb + h_k.to(tl.int64) * stride_kh
        v_base = v + b * stride_vb + h_k.to(tl.int64) * stride_vh
    if BIAS != NO_BIAS:
        bias_base = bias + b * stride_bb + (h // bias_group).to(tl.int64) * stride_bh
        if BIAS == ROW_BIAS:
            row_bias = load_vector(bias_base, rows, seqlen_q, stride_bi) * LOG2E
        if BIAS == TILE_BIAS:
            bias_rows = bias_base + rows.to(tl.int64)[:, None] * stride_bi
    if HAS_MASK:
        mask_head = (h // mask_group).to(tl.int64)
        tile_row = b * stride_tb + mask_head * stride_th + first // TILE
        num_full = tl.load(full_count + tile_row)
        num_partial = tl.load(partial_count + tile_row)
        row_indices = indices + tile_row * tiles_k
        bit_base = bits + b * stride_mb + mask_head * stride_mh
    else:
        last = tl.minimum(first + BLOCK_M, seqlen_q) - 1
        lo, lo_full, hi_full, hi = band_of_queries(first, last, seqlen_q, seqlen_k, left, right, LEFT, RIGHT)
        start, full, end, stop = blocks_of(lo, lo_full, hi_full, hi, BLOCK_N)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    SPLIT: tl.constexpr = TILE // BLOCK_N
    for phase in tl.static_range(0, 2 if HAS_MASK else 3):
        if HAS_MASK:
            begin = 0 if phase == 0 else num_full
            steps = (num_full if phase == 0 else num_partial) * SPLIT
        else:
            begin = full if phase == 0 else (start if phase == 1 else end)
            steps = (end if phase == 0 else (full if phase == 1 else stop)) - begin
        for step in range(0, steps):
            if HAS_MASK:
                first_key = tl.load(row_indices + begin + step // SPLIT) * TILE + step % SPLIT * BLOCK_N
            else:
                first_key = (begin + step) * BLOCK_N
            first_key = tl.multiple_of(first_key, BLOCK_N)
            keys = first_key + tl.arange(0, BLOCK_N)
            if TMA:
                k_tile = k.load([b.to(tl.int32), h_k, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
            else:
                k_tile = load_rows(k_base, keys, seqlen_k, stride_kl, dims, head_dim, phase > 0, PAD_D)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if SOFTCAP:
                s = soft_cap(s * scale)[0] * (softcap * LOG2E)
            elif BIAS != NO_BIAS or phase > 0:
                s = s * scale
            if BIAS == KEY_BIAS:
                s += (load_vector(bias_base, keys, seqlen_k, stride_bj) * LOG2E)[None, :]
            elif BIAS == ROW_BIAS:
                s += row_bias[:, None]
            elif BIAS == TILE_BIAS:
                inside = row_ok[:, None] & (keys < seqlen_k)[None, :]
                tile = tl.load(bias_rows + keys.to(tl.int64)[None, :] * stride_bj, mask=inside, other=0.0)
                s += tile.to(tl.float32) * LOG2E
            if phase > 0:
                if HAS_MASK:
                    allowed = bits_by_row(bit_base, rows, first_key, seqlen_q, stride_mi, BLOCK_M, BLOCK_N)
                else:
                    allowed = in_band(rows[:, None], keys[None, :], seqlen_q, seqlen_k, left, right, LEFT, RIGHT)
                s = tl.where(allowed, s, float("-inf"))
            if SOFTCAP or BIAS != NO_BIAS or phase > 0:
                new_max = tl.maximum(row_max, tl.max(s, 1))
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf is NaN
                p = tl.math.exp2(s - shift[:, None])
            else:
                new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
                shift = new_max
                p = tl.math.exp2(s * scale - shift[:, None])  # one fma
            rescale = tl.math.exp2(row_max - shift)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            acc_o = acc_o * rescale[:, None]
            if TMA:
                v_tile = v.load([b.to(tl.int32), h_k, first_key, 0]).reshape(BLOCK_N, BLOCK_DV)
            else:
                v_tile = load_rows(v_base, keys, seqlen_k, stride_vl, dims_v, head_dim_v, phase > 0, PAD_DV)
            acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o, input_precision=PRECISION)
            row_max = new_max

    total = tl.where(row_sum > 0, row_sum, 1.0)
    out_rows = out + ((b * seqlen_q + rows) * num_heads + h)[:, None] * head_dim_v + dims_v[None, :]
    stored = row_ok[:, None] & (dims_v < head_dim_v)[None, :]
    tl.store(out_rows, (acc_o / total[:, None]).to(out.dtype.element_ty), mask=stored)
    natural = tl.where(row_sum > 0, (row_max + tl.math.log2(total)) * LN2, float("-inf"))
    tl.store(lse + (b * num_heads + h) * seqlen_q + rows, natural, mask=row_ok)
