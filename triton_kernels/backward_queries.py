"""The query-stationary backward kernel: dq, and the gradient of a bias that has a value of its own per score.

    p = exp2(s - lse);  ds = p * (dout @ v^T - delta);  dq += ds @ k;  dbias = ds

Every score is visited once, so a full-size dbias is stored tile by tile and needs no sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    KEY_BIAS,
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
def backward_queries_kernel(
    q,
    k,
    v,
    bias,
    dout,
    lse_log2,
    delta,
    bits,
    full_count,
    partial_count,
    indices,
    dq,
    dbias,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    stride_vb,
    stride_vl,
    stride_vh,
    stride_gb,
    stride_gl,
    stride_gh,
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
    list_length,
    mask_group,
    scale_log2,
    scale,
    softcap,
    batch,
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
    PRECISION: tl.constexpr,
    NEED_Q: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):
    """One tile of queries of one head; its keys in turn. dq and dbias are contiguous, dbias zero where none comes."""
    scale_log2 = tl.cast(scale_log2, tl.float32)  # Inductor passes floats as fp64
    scale = tl.cast(scale, tl.float32)
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
    q_base = q + b * stride_qb + h.to(tl.int64) * stride_qh
    g_base = dout + b * stride_gb + h.to(tl.int64) * stride_gh
    k_base = k + b * stride_kb + h_k.to(tl.int64) * stride_kh
    v_base = v + b * stride_vb + h_k.to(tl.int64) * stride_vh
    q_tile = load_rows(q_base, rows, seqlen_q, stride_ql, dims, head_dim, True, PAD_D)
    g_tile = load_rows(g_base, rows, seqlen_q, stride_gl, dims_v, head_dim_v, True, PAD_DV)
    statistics = (b * num_heads + h) * seqlen_q
    lse_rows = tl.load(lse_log2 + statistics + rows, mask=row_ok, other=float("inf"))
    d = tl.load(delta + statistics + rows, mask=row_ok, other=0.0)
    if BIAS != NO_BIAS:
        bias_base = bias + b * stride_bb + (h // bias_group).to(tl.int64) * stride_bh
        if BIAS == ROW_BIAS:
            row_bias = load_vector(bias_base, rows, seqlen_q, stride_bi) * LOG2E
    if HAS_MASK:
        mask_head = (h // mask_group).to(tl.int64)
        tile_row = b * stride_tb + mask_head * stride_th + first // TILE
        num_full = tl.load(full_count + tile_row)
        num_partial = tl.load(partial_count + tile_row)
        row_indices = indices + tile_row * list_length
        bit_base = bits + b * stride_mb + mask_head * stride_mh
    else:
        last = tl.minimum(first + BLOCK_M, seqlen_q) - 1
        lo, lo_full, hi_full, hi = band_of_queries(first, last, seqlen_q, seqlen_k, left, right, LEFT, RIGHT)
        start, full, end, stop = blocks_of(lo, lo_full, hi_full, hi, BLOCK_N)
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
            key_ok = keys < seqlen_k
            k_tile = load_rows(k_base, keys, seqlen_k, stride_kl, dims, head_dim, phase > 0, PAD_D)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if SOFTCAP:
                t, slope = soft_cap(s * scale_log2)
                s = t * (softcap * LOG2E)
            else:
                s = s * scale_log2
            if BIAS == KEY_BIAS:
                s += (load_vector(bias_base, keys, seqlen_k, stride_bj) * LOG2E)[None, :]
            elif BIAS == ROW_BIAS:
                s += row_bias[:, None]
            elif BIAS == TILE_BIAS:
                place = rows.to(tl.int64)[:, None] * stride_bi + keys.to(tl.int64)[None, :] * stride_bj
                tile = tl.load(bias_base + place, mask=row_ok[:, None] & key_ok[None, :], other=0.0)
                s += tile.to(tl.float32) * LOG2E
            if phase > 0:
                if HAS_MASK:
                    allowed = bits_by_row(bit_base, rows, first_key, seqlen_q, stride_mi, BLOCK_M, BLOCK_N)
                else:
                    allowed = in_band(rows[:, None], keys[None, :], seqlen_q, seqlen_k, left, right, LEFT, RIGHT)
                s = tl.where(allowed, s, float("-inf"))
            p = tl.math.exp2(s - lse_rows[:, None])
            v_tile = load_rows(v_base, keys, seqlen_k, stride_vl, dims_v, head_dim_v, phase > 0, PAD_DV)
            dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = p * (dp - d[:, None])
            if NEED_BIAS:
                place = (statistics + rows)[:, None] * seqlen_k + keys[None, :]
                tl.store(dbias + place, ds.to(dbias.dtype.element_ty), mask=row_ok[:, None] & key_ok[None, :])
            if NEED_Q:
                if SOFTCAP:
                    ds = ds * slope
                acc_dq = tl.dot(ds.to(k_tile.dtype), k_tile, acc_dq, input_precision=PRECISION)
    if NEED_Q:
        place = ((b * seqlen_q + rows) * num_heads + h)[:, None] * head_dim + dims[None, :]
        stored = row_ok[:, None] & (dims < head_dim)[None, :]
        tl.store(dq + place, (acc_dq * scale).to(dq.dtype.element_ty), mask=stored)
