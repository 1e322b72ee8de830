"""The bias-stationary backward kernel: the gradient of a bias of one value per score shared by batch or heads.

One tile of dbias per program; the batch entries and heads that read it in turn, recomputing ds, so that the sum stays
in registers in fp32, in a fixed order, and is rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import LOG2E, bits_by_row, in_band, load_rows, soft_cap


@triton.jit
def backward_bias_kernel(
    q,
    k,
    v,
    bias,
    dout,
    lse_log2,
    delta,
    bits,
    classes,
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
    bias_batch,
    bias_heads,
):
    """dbias (bias_batch, bias_heads, Lq, Lk) is contiguous; `classes` is 0 for a tile with nothing allowed."""
    scale_log2 = tl.cast(scale_log2, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    first_key = program % tiles_n * BLOCK_N
    first = program // tiles_n % tiles_m * BLOCK_M
    owner = program // tiles_n // tiles_m % bias_heads
    owner_b = program // tiles_n // tiles_m // bias_heads
    rows = first + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < seqlen_q
    key_ok = keys < seqlen_k
    inside = row_ok[:, None] & key_ok[None, :]
    place = rows.to(tl.int64)[:, None] * stride_bi + keys.to(tl.int64)[None, :] * stride_bj
    bias_base = bias + owner_b.to(tl.int64) * stride_bb + owner.to(tl.int64) * stride_bh
    bias_tile = tl.load(bias_base + place, mask=inside, other=0.0).to(tl.float32) * LOG2E
    allowed = in_band(rows[:, None], keys[None, :], seqlen_q, seqlen_k, left, right, LEFT, RIGHT)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    members = num_heads // bias_heads
    entries = batch // bias_batch
    for entry in range(0, entries * members):
        b = (owner_b + entry // members).to(tl.int64)
        h = owner * members + entry % members
        h_k = h // group
        visit = True
        if HAS_MASK:
            mask_head = (h // mask_group).to(tl.int64)
            tile_row = b * stride_tb + mask_head * stride_th + first // TILE
            visit = tl.load(classes + tile_row * list_length + first_key // TILE) != 0
        if visit:
            q_base = q + b * stride_qb + h.to(tl.int64) * stride_qh
            k_base = k + b * stride_kb + h_k.to(tl.int64) * stride_kh
            v_base = v + b * stride_vb + h_k.to(tl.int64) * stride_vh
            g_base = dout + b * stride_gb + h.to(tl.int64) * stride_gh
            q_tile = load_rows(q_base, rows, seqlen_q, stride_ql, dims, head_dim, True, PAD_D)
            k_tile = load_rows(k_base, keys, seqlen_k, stride_kl, dims, head_dim, True, PAD_D)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if SOFTCAP:
                s = soft_cap(s * scale_log2)[0] * (softcap * LOG2E)
            else:
                s = s * scale_log2
            s += bias_tile
            if HAS_MASK:
                bit_base = bits + b * stride_mb + mask_head * stride_mh
                seen = bits_by_row(bit_base, rows, first_key, seqlen_q, stride_mi, BLOCK_M, BLOCK_N)
                s = tl.where(seen & allowed, s, float("-inf"))
            else:
                s = tl.where(allowed, s, float("-inf"))
            statistics = (b * num_heads + h) * seqlen_q
            lse_rows = tl.load(lse_log2 + statistics + rows, mask=row_ok, other=float("inf"))
            d = tl.load(delta + statistics + rows, mask=row_ok, other=0.0)
            p = tl.math.exp2(s - lse_rows[:, None])
            v_tile = load_rows(v_base, keys, seqlen_k, stride_vl, dims_v, head_dim_v, True, PAD_DV)
            g_tile = load_rows(g_base, rows, seqlen_q, stride_gl, dims_v, head_dim_v, True, PAD_DV)
            acc += p * (tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION) - d[:, None])
    line = ((owner_b * bias_heads + owner).to(tl.int64) * seqlen_q + rows)[:, None] * seqlen_k
    tl.store(dbias + line + keys[None, :], acc.to(dbias.dtype.element_ty), mask=inside)
