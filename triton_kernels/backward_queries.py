"""The query-stationary backward kernel: dq of one tile of queries of one head per program.

p = exp(s - lse);  ds = p * (dout @ v^T - delta);  dq += ds @ k
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import is_kept
from .scores import (
    add_bias,
    bias_vector,
    block_by_distance,
    end_values,
    masked_scores,
    near_blocks,
    probabilities,
    scaled,
    score_gradients,
    sink_logits,
    values_of_tile,
)
from .tile_ops import (
    BAND,
    BANDED,
    CLAMPED,
    DENSE,
    DISTANCES,
    KEYS,
    LOG2E,
    NO_BIAS,
    NO_SEQUENCES,
    PACKED,
    ROW_BIAS,
    TILES,
    block_at,
    bounds_of,
    keys_of_queries,
    load_low_delta,
    load_tile,
    mask_head,
    scores_from,
    sequence_at,
    tiles_from,
    tiles_of_rows,
)


@triton.jit
def backward_queries_kernel(
    q,
    k,
    v,
    bias,
    dout,
    row_lse,
    low_delta,
    delta,
    mask_data,
    mask_index,
    dq,
    sink,
    bounds,
    dropout_key,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    bias_strides,
    mask_strides,
    shape,
    score_scale,
    scale,
    softcap,
    layout,
    dropout,
    distances,
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
    BIAS_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGES: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute one tile of dq (B, Lq, Hq, D), which is contiguous."""
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    if SEQUENCES == NO_SEQUENCES:
        tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
        tile_m = tiles_m - 1 - program % tiles_m  # under a causal band the longest rows start first
        b = (program // tiles_m // shape.num_heads).to(tl.int64)
        h = program // tiles_m % shape.num_heads
        b_row = b
        first_row = b * shape.seqlen_q
        statistics = (b * shape.num_heads + h) * shape.seqlen_q
        few = False
        bias_row = 0
    else:
        tiles = tiles_of_rows(layout.rows_q, shape.seqlen_q, layout.number, SEARCH, BLOCK_M)
        h = program // tiles
        own, place = sequence_at(program % tiles, bounds, shape.seqlen_q, layout.number, SEARCH, 0, BLOCK_M)
        first_q, first_k, shape = bounds_of(bounds, own, shape)
        tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
        if place >= tiles_m or shape.seqlen_k <= layout.one_pass_keys:
            return
        tile_m = tiles_m - 1 - place
        b = own.to(tl.int64)
        b_row = b * (0 if SEQUENCES == PACKED else 1)
        first_row = b_row * layout.rows_q + first_q
        statistics = (b_row * shape.num_heads + h) * layout.rows_q + first_q
        q += first_q.to(tl.int64) * q_strides.row
        dout += first_q.to(tl.int64) * dout_strides.row
        k += first_k.to(tl.int64) * k_strides.row
        v += first_k.to(tl.int64) * v_strides.row
        if BIAS != NO_BIAS and not BIAS_TMA:
            bias = scores_from(bias, bias_strides, layout.bias_rows, layout.bias_keys, first_q, first_k)
        if MASK == DENSE:
            mask_data = scores_from(mask_data, mask_strides, layout.mask_rows, layout.mask_keys, first_q, first_k)
        if MASK == TILES:
            mask_data, mask_index = tiles_from(mask_data, mask_index, mask_strides, first_row, first_row, own)
        few = shape.seqlen_k <= layout.few_keys
        bias_row = layout.bias_rows * first_q
    h_k = h // shape.group
    first = tile_m * BLOCK_M
    last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < shape.seqlen_q
    q_tile = load_tile(
        q, q_strides, b_row, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
        BLOCK_M, BLOCK_D, False, True, True, PAD_D,
    )  # fmt: skip
    g_tile = load_tile(
        dout, dout_strides, b_row, h, first, rows, shape.seqlen_q, dims_v, shape.head_dim_v,
        BLOCK_M, BLOCK_DV, False, True, True, PAD_DV,
    )  # fmt: skip
    lse_rows = tl.load(row_lse + statistics + rows, mask=row_ok, other=float("inf"))
    BIASED: tl.constexpr = BIAS > ROW_BIAS
    # What lse has below the steps of fp32 is a factor of whole rows of dq. In the loop it would take the registers that
    # leave room for a second program.
    LOW_LAST: tl.constexpr = BIASED and SEQUENCES == NO_SEQUENCES
    low_rows, d = load_low_delta(None if LOW_LAST else low_delta, delta, statistics + rows, row_ok)
    bias_head, vector = bias_vector(bias, bias_strides, b, h, rows, shape, BIAS, 1)
    logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
    data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
    walk, start, inside, before, after = keys_of_queries(
        first, last, index, mask_strides, shape, MASK, LEFT, RIGHT, BLOCK_N
    )
    # Blocks go by the distances that they have values for, as in the forward kernel.
    NEAR: tl.constexpr = (BIAS == DISTANCES or BIAS == CLAMPED or BIAS == BANDED) and MASK == BAND
    near = 0
    if NEAR:
        before_values, beyond_values = end_values(bias_head, bias_strides, distances, BIAS)
        nearest, near = near_blocks(
            first, start, inside, before_values, beyond_values, shape, distances, BLOCK_M, BLOCK_N, BIAS, 1
        )
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(-1 if NEAR else 0, 2 if EDGES else 1):
        steps = near if phase == -1 else inside - near if phase == 0 else before + after
        for step in range(0, steps):
            IS_FAR: tl.constexpr = NEAR and phase == 0
            block = step
            if NEAR and phase != 1:
                block = block_by_distance(step, nearest, near, phase == -1)
            place = block_at(block, walk, start, inside, before, phase == 1, MASK, BLOCK_N)
            keys = place + tl.arange(0, BLOCK_N)
            if MASK == KEYS:
                keys = tl.load(data + keys, mask=keys < shape.seqlen_k, other=shape.seqlen_k)
            if not IS_FAR:
                window = values_of_tile(
                    bias_head, bias_strides, first, place, shape, distances, BLOCK_M, BLOCK_N, BIAS, MASK == KEYS
                )
            k_tile = load_tile(
                k, k_strides, b_row, h_k, place, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, BLOCK_D, TMA, WIDE, phase == 1, PAD_D,
            )  # fmt: skip
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
            if not IS_FAR:
                s = add_bias(
                    s, factor, bias, bias_head, vector, window, bias_strides, b, h, first + bias_row, place, rows,
                    keys, shape, distances, BLOCK_M, BLOCK_N, BIAS, 1, BIAS_TMA, WIDE, False, MASK == KEYS,
                )  # fmt: skip
            if phase == 1:
                s = masked_scores(
                    s, data, mask_strides, b, h, place, rows, keys, shape,
                    BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 1, False,
                )  # fmt: skip
            if IS_FAR:
                value = tl.where(step < nearest, before_values, beyond_values)
                less = (lse_rows - value) * LOG2E - low_rows
                p = probabilities(
                    s * (factor * LOG2E), less, low_rows, logits - value, 1, FEW_KEYS, HAS_SINK, False, False
                )
            else:
                p = probabilities(s, lse_rows, low_rows, logits, 1, FEW_KEYS, HAS_SINK, BIASED, low_delta is not None)
            v_tile = load_tile(
                v, v_strides, b_row, h_k, place, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
                BLOCK_N, BLOCK_DV, TMA, WIDE, phase == 1, PAD_DV,
            )  # fmt: skip
            dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
            if DROPOUT:
                kept = is_kept(dropout_key, dropout, b, h, first, place, rows, keys, BLOCK_M, BLOCK_N, MASK == KEYS, 1)
                dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)
            ds, d = score_gradients(p, dp, d, few, 1, FEW_KEYS, SEQUENCES)
            if SOFTCAP:
                ds = ds * slope
            acc_dq = tl.dot(ds.to(k_tile.dtype), k_tile, acc_dq, input_precision=PRECISION)
    if LOW_LAST and not FEW_KEYS:
        low_rows, _ = load_low_delta(low_delta, delta, statistics + rows, row_ok)
        acc_dq = acc_dq * tl.math.exp2(low_rows)[:, None]
    place = ((first_row + rows) * shape.num_heads + h)[:, None] * shape.head_dim + dims[None, :]
    stored = row_ok[:, None] & (dims < shape.head_dim)[None, :]
    tl.store(dq + place, (acc_dq * scale).to(dq.dtype.element_ty), mask=stored)
