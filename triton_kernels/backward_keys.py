"""The key-stationary backward kernel: dk, dv, and the gradient of a bias of one value per key.

Scores are computed transposed, (keys, queries), so that p and ds feed dv and dk without being turned::

    p = exp2(s - lse);  dv += p @ dout;  ds = p * (v @ dout^T - delta);  dk += ds @ q;  dbias += rowsum(ds)
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
    band_of_keys,
    bits_by_key,
    blocks_of,
    in_band,
    load_rows,
    load_vector,
    soft_cap,
)


@triton.jit
def backward_keys_kernel(
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
    dk,
    dv,
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
    NEED_K: tl.constexpr,
    NEED_V: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    SPLIT_HEADS: tl.constexpr,
):
    """One tile of keys of one key-value head, or of one query head under SPLIT_HEADS; its queries in turn.

    dk, dv (B, Lk, owners, D) and dbias (B, owners, Lk) are contiguous, an owner being one of those heads.
    """
    scale_log2 = tl.cast(scale_log2, tl.float32)  # Inductor passes floats as fp64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    owners = num_heads if SPLIT_HEADS else num_heads // group
    program = tl.program_id(0)
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    tile_n = program % tiles_n  # under a causal band the first keys have most queries
    b = (program // tiles_n // owners).to(tl.int64)
    owner = program // tiles_n % owners
    h_k = owner // group if SPLIT_HEADS else owner
    first_key = tile_n * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    key_ok = keys < seqlen_k
    k_base = k + b * stride_kb + h_k.to(tl.int64) * stride_kh
    v_base = v + b * stride_vb + h_k.to(tl.int64) * stride_vh
    k_tile = load_rows(k_base, keys, seqlen_k, stride_kl, dims, head_dim, True, PAD_D)
    v_tile = load_rows(v_base, keys, seqlen_k, stride_vl, dims_v, head_dim_v, True, PAD_DV)
    if not HAS_MASK:
        last_key = tl.minimum(first_key + BLOCK_N, seqlen_k) - 1
        lo, lo_full, hi_full, hi = band_of_keys(first_key, last_key, seqlen_q, seqlen_k, left, right, LEFT, RIGHT)
        # A tile that reaches beyond the last key is masked for every query.
        lo_full = tl.where(first_key + BLOCK_N > seqlen_k, seqlen_q, lo_full)
        start, full, end, stop = blocks_of(lo, lo_full, hi_full, hi, BLOCK_M)
    acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    acc_bias = tl.zeros([BLOCK_N], tl.float32)
    SPLIT: tl.constexpr = TILE // BLOCK_M
    for member in range(0, 1 if SPLIT_HEADS else group):
        h = owner if SPLIT_HEADS else h_k * group + member
        q_base = q + b * stride_qb + h.to(tl.int64) * stride_qh
        g_base = dout + b * stride_gb + h.to(tl.int64) * stride_gh
        statistics = (b * num_heads + h) * seqlen_q
        if BIAS != NO_BIAS:
            bias_base = bias + b * stride_bb + (h // bias_group).to(tl.int64) * stride_bh
            if BIAS == KEY_BIAS:
                key_bias = load_vector(bias_base, keys, seqlen_k, stride_bj) * LOG2E
        if HAS_MASK:
            mask_head = (h // mask_group).to(tl.int64)
            tile_column = b * stride_tb + mask_head * stride_th + first_key // TILE
            num_full = tl.load(full_count + tile_column)
            num_partial = tl.load(partial_count + tile_column)
            column_indices = indices + tile_column * list_length
            bit_base = bits + b * stride_mb + mask_head * stride_mh
        for phase in tl.static_range(0, 2 if HAS_MASK else 3):
            if HAS_MASK:
                begin = 0 if phase == 0 else num_full
                steps = (num_full if phase == 0 else num_partial) * SPLIT
            else:
                begin = full if phase == 0 else (start if phase == 1 else end)
                steps = (end if phase == 0 else (full if phase == 1 else stop)) - begin
            for step in range(0, steps):
                if HAS_MASK:
                    first = tl.load(column_indices + begin + step // SPLIT) * TILE + step % SPLIT * BLOCK_M
                else:
                    first = (begin + step) * BLOCK_M
                first = tl.multiple_of(first, BLOCK_M)
                rows = first + tl.arange(0, BLOCK_M)
                row_ok = rows < seqlen_q
                q_tile = load_rows(q_base, rows, seqlen_q, stride_ql, dims, head_dim, True, PAD_D)
                lse_rows = tl.load(lse_log2 + statistics + rows, mask=row_ok, other=float("inf"))
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                if SOFTCAP:
                    t, slope = soft_cap(s * scale_log2)
                    s = t * (softcap * LOG2E)
                else:
                    s = s * scale_log2
                if BIAS == KEY_BIAS:
                    s += key_bias[:, None]
                elif BIAS == ROW_BIAS:
                    s += (load_vector(bias_base, rows, seqlen_q, stride_bi) * LOG2E)[None, :]
                elif BIAS == TILE_BIAS:
                    place = rows.to(tl.int64)[None, :] * stride_bi + keys.to(tl.int64)[:, None] * stride_bj
                    tile = tl.load(bias_base + place, mask=row_ok[None, :] & key_ok[:, None], other=0.0)
                    s += tile.to(tl.float32) * LOG2E
                if phase > 0:
                    if HAS_MASK:
                        allowed = bits_by_key(bit_base, rows, first_key, seqlen_q, stride_mi, BLOCK_M, BLOCK_N)
                    else:
                        allowed = in_band(rows[None, :], keys[:, None], seqlen_q, seqlen_k, left, right, LEFT, RIGHT)
                    s = tl.where(allowed, s, float("-inf"))
                p = tl.math.exp2(s - lse_rows[None, :])
                g_tile = load_rows(g_base, rows, seqlen_q, stride_gl, dims_v, head_dim_v, True, PAD_DV)
                if NEED_V:
                    acc_dv = tl.dot(p.to(g_tile.dtype), g_tile, acc_dv, input_precision=PRECISION)
                if NEED_K or NEED_BIAS:
                    d = tl.load(delta + statistics + rows, mask=row_ok, other=0.0)
                    dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
                    ds = p * (dp - d[None, :])
                    if NEED_BIAS:
                        acc_bias += tl.sum(ds, 1)
                    if NEED_K:
                        if SOFTCAP:
                            ds = ds * slope
                        acc_dk = tl.dot(ds.to(q_tile.dtype), q_tile, acc_dk, input_precision=PRECISION)
    line = ((b * seqlen_k + keys) * owners + owner)[:, None]
    if NEED_K:
        stored = key_ok[:, None] & (dims < head_dim)[None, :]
        tl.store(dk + line * head_dim + dims[None, :], (acc_dk * scale).to(dk.dtype.element_ty), mask=stored)
    if NEED_V:
        stored = key_ok[:, None] & (dims_v < head_dim_v)[None, :]
        tl.store(dv + line * head_dim_v + dims_v[None, :], acc_dv.to(dv.dtype.element_ty), mask=stored)
    if NEED_BIAS:
        tl.store(dbias + (b * owners + owner) * seqlen_k + keys, acc_bias, mask=key_ok)
