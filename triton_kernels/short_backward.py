"""The backward kernel of short rows: it computes p and ds of a head once, and all gradients from them.

p = exp(s - lse);  dp = dout @ v^T;  ds = p * (dp - rowsum(p * dp) + dlse);
dv = p^T @ dout;  dk = ds^T @ q;  dq = ds @ k;  dbias = ds, or its sum over the heads of a walk

With dropout, dv is computed from the dropped p, and dp is dropped like p; ds is computed from p itself.

If a tile of all queries and keys is too large, the kernel runs twice. The first run has all keys and some queries of a
head, computes dq and stores delta. The second has all queries and some keys, and computes the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import ROW_BIAS, row_values
from .dropout import is_kept
from .scores import (
    exponents_of_rows,
    less_totals,
    load_entropy_gradient,
    row_totals,
    scaled,
    score_gradients,
    sink_logits,
)
from .sequences import NO_SEQUENCES
from .short_rows import base_scores, head_of, load_dense, masked, walk_of
from .tile_ops import LOG2E, load_tile, lse_less, renormalize, split_lse

# The computed gradient of a bias: none, sums over the queries of each key, ds of every head, or the sum of ds over the
# heads of a walk, with slots for chunks.
NO_DBIAS: tl.constexpr = tl.constexpr(0)
KEY_SUM: tl.constexpr = tl.constexpr(1)
STORE: tl.constexpr = tl.constexpr(2)
SLOTS: tl.constexpr = tl.constexpr(3)


@triton.jit
def store_rows(x, tile, b, h, rows, num_rows, num_heads, dims, num_dims):
    """Store a tile of a contiguous (B, L, H, D) tensor."""
    at = x + ((b * num_rows + rows) * num_heads + h)[:, None] * num_dims + dims[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=(rows < num_rows)[:, None] & (dims < num_dims)[None, :])


@triton.jit
def short_backward_kernel(
    q,
    k,
    v,
    bias,
    dout,
    lse,
    dlse,
    dentropy,
    mask,
    stop,
    delta,
    dq,
    dk,
    dv,
    dbias,
    sink,
    dropout_key,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dlse_strides,
    bias_strides,
    access,
    shape,
    walk,
    score_scale,
    scale,
    softcap,
    dropout,
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
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    ALL_KEYS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    STORE_DELTA: tl.constexpr,
    NEED_Q: tl.constexpr,
    NEED_K: tl.constexpr,
    NEED_V: tl.constexpr,
    DBIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute gradients from one tile of scores, for each head of a walk.

    With ALL_KEYS the tile has whole rows, and dq is computed. Otherwise it has whole columns, and uses what the first
    run has stored: `delta`, fp32 (2, B, Hq, Lq), has delta, and the number that `exponents_of_rows` subtracts so that p
    sums to 1. A tile of whole rows and columns gives all gradients.

    dq, dk, dv (B, L, H, D) are contiguous. So is dbias: (B, Hq, Lq, Lk), or slots (chunks, Bb, Hb, Lq, Lk) in fp32, or
    sums (B, Hq, Lk) in fp32.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    owner_b, slot, tile, begin, end, first_head, members_h = walk_of(walk, shape, tl.program_id(0))
    first = 0
    first_key = 0
    if ALL_KEYS:
        first = tile * BLOCK_M
    else:
        first_key = tile * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < shape.seqlen_q
    inside = row_ok[:, None] & (keys < shape.seqlen_k)[None, :]
    # tl.cast, because Triton makes a batch of 1 a constant, which has no `.to`.
    all_rows = tl.cast(shape.batch, tl.int64) * shape.num_heads * shape.seqlen_q
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b, h = head_of(begin, owner_b, first_head, members_h, walk)
    base = base_scores(
        bias, bias_strides, b, first_head, first, first_key, rows, keys, shape,
        BLOCK_M, BLOCK_N, BIAS, WIDE,
    )  # fmt: skip
    BIASED: tl.constexpr = BIAS > ROW_BIAS
    IS_WIDE: tl.constexpr = lse.dtype.element_ty == tl.float64
    row_bias = row_values(bias, bias_strides, b, first_head, rows, shape, BIAS)
    next_dense = load_dense(mask, access, b, h, rows, keys, shape, MASK, WIDE)
    for member in tl.range(begin, end, num_stages=STAGES):
        dense = next_dense
        b, h = head_of(tl.minimum(member + 1, end - 1), owner_b, first_head, members_h, walk)
        next_dense = load_dense(mask, access, b, h, rows, keys, shape, MASK, WIDE)
        b, h = head_of(member, owner_b, first_head, members_h, walk)
        q_tile = load_tile(
            q, q_strides, b, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
            BLOCK_M, BLOCK_D, False, WIDE, True, PAD_D,
        )  # fmt: skip
        k_tile = load_tile(
            k, k_strides, b, h, first_key, keys, shape.seqlen_k, dims, shape.head_dim,
            BLOCK_N, BLOCK_D, False, WIDE, True, PAD_D,
        )  # fmt: skip
        v_tile = load_tile(
            v, v_strides, b, h, first_key, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
            BLOCK_N, BLOCK_DV, False, WIDE, True, PAD_DV,
        )  # fmt: skip
        g_tile = load_tile(
            dout, dout_strides, b, h, first, rows, shape.seqlen_q, dims_v, shape.head_dim_v,
            BLOCK_M, BLOCK_DV, False, WIDE, True, PAD_DV,
        )  # fmt: skip
        line = (b * shape.num_heads + h) * shape.seqlen_q + rows
        g = load_entropy_gradient(dentropy, line, row_ok)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
        s = tl.fma(s, factor, base)
        s = masked(
            s, dense, mask, stop, access, b, h, first_key, rows, keys, shape, MASK, LEFT, RIGHT, BLOCK_M, BLOCK_N
        )
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        if DROPOUT:
            kept = is_kept(dropout_key, dropout, b, h, first, first_key, rows, keys, BLOCK_M, BLOCK_N, False, 1)
            dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)
        if ALL_KEYS:
            natural = tl.load(lse + line, mask=row_ok, other=float("-inf"))
            empty = natural == float("-inf")
            if BIAS == ROW_BIAS:
                natural = lse_less(natural, row_bias)
            lse_rows, low_rows = split_lse(natural)
            low_rows = low_rows * -LOG2E
            if not BIASED:
                lse_rows = lse_rows * LOG2E
            lse_rows = tl.where(empty, float("inf"), lse_rows)  # exp(-inf - -inf) is NaN
            exponents = exponents_of_rows(s, lse_rows, low_rows, 1, BIASED, IS_WIDE)
            p = tl.math.exp2(exponents)
            logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
            total = row_totals(p, lse_rows, low_rows, logits, 1, HAS_SINK, BIASED)
            p, exponents = renormalize(p, total, 1), less_totals(exponents, total, 1)
            d = tl.sum(p * dp, 1)
            if HAS_DLSE:
                at = dlse + b * dlse_strides[0] + h.to(tl.int64) * dlse_strides[1] + rows.to(tl.int64) * dlse_strides[2]
                d -= tl.where(empty, 0.0, tl.load(at, mask=row_ok, other=0.0).to(tl.float32))
            if STORE_DELTA:
                tl.store(delta + line, d, mask=row_ok)
                divisor = tl.math.log2(tl.where(total > 0.0, total, 1.0))
                divisor = low_rows - divisor if BIASED else lse_rows + divisor
                tl.store(delta + all_rows + line, divisor, mask=row_ok)
        else:
            d = tl.load(delta + line, mask=row_ok, other=0.0)
            divisor = tl.load(delta + all_rows + line, mask=row_ok, other=float("-inf" if BIASED else "inf"))
            lse_rows = divisor
            if BIASED:
                lse_rows = tl.load(lse + line, mask=row_ok, other=float("-inf")).to(tl.float32)
                lse_rows = tl.where(lse_rows == float("-inf"), float("inf"), lse_rows)
            exponents = exponents_of_rows(s, lse_rows, divisor, 1, BIASED, IS_WIDE)
            p = tl.math.exp2(exponents)
        if NEED_V:
            weights = p
            if DROPOUT:
                weights = tl.where(kept, p * tl.cast(dropout.scale, tl.float32), 0.0)
            dv_tile = tl.dot(tl.trans(weights.to(g_tile.dtype)), g_tile, input_precision=PRECISION)
            store_rows(dv, dv_tile, b, h, keys, shape.seqlen_k, shape.num_heads, dims_v, shape.head_dim_v)
        ds, _ = score_gradients(p, exponents, dp, d, g, False, 1, False, NO_SEQUENCES, dentropy is not None)
        if DBIAS == SLOTS:
            acc += ds
        elif DBIAS == KEY_SUM:
            at = dbias + (b * shape.num_heads + h) * shape.seqlen_k + keys
            tl.store(at, tl.sum(ds, 0), mask=keys < shape.seqlen_k)
        elif DBIAS == STORE:
            at = dbias + line[:, None] * shape.seqlen_k + keys[None, :]
            tl.store(at, ds.to(dbias.dtype.element_ty), mask=inside)
        if NEED_Q or NEED_K:
            if SOFTCAP:
                ds = ds * slope
            ds_tile = ds.to(q_tile.dtype)
            if NEED_K:
                dk_tile = tl.dot(tl.trans(ds_tile), q_tile, input_precision=PRECISION) * scale
                store_rows(dk, dk_tile, b, h, keys, shape.seqlen_k, shape.num_heads, dims, shape.head_dim)
            if NEED_Q:
                dq_tile = tl.dot(ds_tile, k_tile, input_precision=PRECISION) * scale
                store_rows(dq, dq_tile, b, h, rows, shape.seqlen_q, shape.num_heads, dims, shape.head_dim)
    if DBIAS == SLOTS:
        at = dbias + (slot.to(tl.int64) * shape.seqlen_q + rows)[:, None] * shape.seqlen_k + keys[None, :]
        tl.store(at, acc, mask=inside)
