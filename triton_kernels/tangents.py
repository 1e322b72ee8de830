"""The forward kernel in forward mode: each program computes out and lse of one tile of queries, and their tangents.

With s the scores in base 2 and ts their tangents, over tiles j of keys, in addition to what `forward.py` computes::

    total = total * c + rowsum(p * ts_j);  mean' = total / l
    acc_t = acc_t * c + acc * c * (mean - mean') + p @ tv_j + (p * (ts_j - mean')) @ v_j
    tout = acc_t / l;  tlse = mean

So acc_t has differences from the mean over the keys so far, and no large numbers cancel in the end. There are six
products instead of two, and none for a tangent that is None.

If tangents of scores are large, the rounding of the mean would dominate the error of tout in fp32. So a kernel in fp32
also sums the remainder of the mean::

    rest = rest * c + (mean - mean') * l * c + rowsum(p * (ts_j - mean'))
    tout = (acc_t - acc * rest / l) / l;  tlse = mean + rest / l
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import ROW_BIAS, add_bias, bias_from, bias_vector, row_values, values_of_tile
from .dropout import is_kept
from .scores import exp_of, log_sums, masked_scores, scaled
from .sequences import (
    NO_SEQUENCES,
    bounds_of,
    entry_of_tile,
    load_keys,
    mask_from,
    pages_from,
    place_of,
    rows_from,
    tiles_of_queries,
)
from .tile_ops import (
    EDGE,
    INSIDE,
    KEYS,
    LOWEST,
    TREE,
    block_at,
    join_sink,
    keys_of_queries,
    load_tile,
    mask_head,
    store_lse,
)
from .tree_mask import keys_of_trees


@triton.jit
def tangents_kernel(
    q,
    k,
    v,
    bias,
    tq,
    tk,
    tv,
    tbias,
    mask_data,
    mask_index,
    out,
    lse,
    tout,
    tlse,
    sink,
    tsink,
    bounds,
    table,
    dropout_key,
    q_strides,
    k_strides,
    v_strides,
    bias_strides,
    tq_strides,
    tk_strides,
    tv_strides,
    tbias_strides,
    mask_strides,
    shape,
    scale,
    tangent_scale,
    softcap,
    layout,
    dropout,
    extent,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    TBIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    TMA: tl.constexpr,
    BIAS_TMA: tl.constexpr,
    TBIAS_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    NEGATIVE: tl.constexpr,
    EDGES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_TQ: tl.constexpr,
    HAS_TK: tl.constexpr,
    HAS_TV: tl.constexpr,
    HAS_TSINK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
    PAGE: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    COLUMN_PARTS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute out, lse and their tangents of one tile of queries.

    Programs of SIDE_BY_SIDE entries of the batch follow each other, tile by tile, to read the same bias. COLUMN_PARTS
    programs compute the same scores, and each has BLOCK_DV columns of v and of out.

    out and tout (B, Lq, Hq, Dv), lse and tlse (B, Hq, Lq) are contiguous. `scale` is as for the forward kernel, and
    `tangent_scale` is |softmax_scale|. Masks, sequences and dropout are as for the forward kernel.
    """
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats as fp64
    tangent_scale = tl.cast(tangent_scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    BIASED: tl.constexpr = BIAS > ROW_BIAS
    MOVES_SCORES: tl.constexpr = HAS_TQ or HAS_TK or TBIAS > ROW_BIAS
    SUMS_REST: tl.constexpr = MOVES_SCORES and q.dtype.element_ty == tl.float32
    program = tl.program_id(0) // COLUMN_PARTS
    column = tl.program_id(0) % COLUMN_PARTS * BLOCK_DV
    side = program % SIDE_BY_SIDE
    program = program // SIDE_BY_SIDE
    tiles = tiles_of_queries(shape.seqlen_q, layout, SEQUENCES, SEARCH, BLOCK_M)
    entry, tile, h = entry_of_tile(
        program % tiles, program // tiles, bounds, shape.seqlen_q, shape, layout, SEQUENCES, SEARCH, BLOCK_M
    )
    entry = entry * SIDE_BY_SIDE + side
    first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
    tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
    if SEQUENCES != NO_SEQUENCES:
        if tile >= tiles_m:
            return
    at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b
    h_k = h // shape.group
    statistics = (at.b_q * shape.num_heads + h) * at.entry_rows + at.first_q
    q = rows_from(q, q_strides, at.first_q, SEQUENCES)
    k = rows_from(k, k_strides, at.first_k, SEQUENCES)
    v = rows_from(v, v_strides, at.first_k, SEQUENCES)
    if HAS_TQ:
        tq = rows_from(tq, tq_strides, at.first_q, SEQUENCES)
    if HAS_TK:
        tk = rows_from(tk, tk_strides, at.first_k, SEQUENCES)
    if HAS_TV:
        tv = rows_from(tv, tv_strides, at.first_k, SEQUENCES)
    bias = bias_from(bias, bias_strides, at, layout, SEQUENCES, BIAS, BIAS_TMA)
    tbias = bias_from(tbias, tbias_strides, at, layout, SEQUENCES, TBIAS, TBIAS_TMA)
    mask_data, mask_index = mask_from(mask_data, mask_index, mask_strides, at, at.row_q, layout, SEQUENCES, MASK)
    table = pages_from(table, at, layout, SEQUENCES)

    first = (tiles_m - 1 - tile) * BLOCK_M  # under a causal band the longest rows start first
    last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    dims_v = column + tl.arange(0, BLOCK_DV)
    q_tile = load_tile(
        q, q_strides, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
        BLOCK_M, BLOCK_D, False, True, True, PAD_D,
    )  # fmt: skip
    if NEGATIVE:
        q_tile = -q_tile
    if HAS_TQ:
        tq_tile = load_tile(
            tq, tq_strides, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
            BLOCK_M, BLOCK_D, False, True, True, PAD_D,
        )  # fmt: skip
        if NEGATIVE:
            tq_tile = -tq_tile
    bias_head, vector = bias_vector(bias, bias_strides, b, h, rows, shape, BIAS, 1)
    tbias_head, tvector = bias_vector(tbias, tbias_strides, b, h, rows, shape, TBIAS, 1)
    data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
    if MASK == TREE:
        walk, start, inside, before, after = keys_of_trees(
            first, last, rows, data, mask_strides.row, shape, LEFT, BLOCK_N
        )
    else:
        walk, start, inside, before, after = keys_of_queries(
            first, last, index, mask_strides, shape, MASK, LEFT, RIGHT, BLOCK_N
        )

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M], tl.float32)
    rest = tl.zeros([BLOCK_M], tl.float32)
    acc_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc_t = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for phase in tl.static_range(INSIDE, EDGE + 1 if EDGES else EDGE):
        steps = inside if phase == INSIDE else before + after
        for step in tl.range(0, steps, num_stages=STAGES):
            place = block_at(step, walk, start, inside, before, phase == EDGE, MASK, BLOCK_N)
            keys = place + tl.arange(0, BLOCK_N)
            if MASK == KEYS:
                keys = tl.load(data + keys, mask=keys < shape.seqlen_k, other=shape.seqlen_k)
            k_tile = load_keys(
                k, table, layout, k_strides, at.b_k, h_k, place, keys, shape.seqlen_k, dims, shape.head_dim,
                SEQUENCES, PAGE, BLOCK_N, BLOCK_D, TMA, WIDE, phase == EDGE, PAD_D,
            )  # fmt: skip
            window = values_of_tile(
                bias_head, bias_strides, first, place, shape, extent, BLOCK_M, BLOCK_N, BIAS, MASK == KEYS
            )
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            s, factor, slope = scaled(s, scale, softcap, SOFTCAP, BIASED)
            s = add_bias(
                s, factor, bias, bias_head, vector, window, bias_strides, b, h, first + at.bias_row, place, rows, keys,
                shape, extent, BLOCK_M, BLOCK_N, BIAS, 1, BIAS_TMA, WIDE, False, MASK == KEYS,
            )  # fmt: skip
            if phase == EDGE:
                s = masked_scores(
                    s, data, mask_strides, b, h, place, rows, keys, shape,
                    BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 1, False,
                )  # fmt: skip
            new_max = tl.maximum(row_max, tl.max(s, 1))
            p = exp_of(s - new_max[:, None], BIASED)
            rescale = exp_of(row_max - new_max, BIASED)
            earlier_sum = row_sum * rescale
            row_sum = earlier_sum + tl.sum(p, 1)
            row_max = new_max
            if MOVES_SCORES:
                ts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                if HAS_TQ:
                    ts = tl.dot(tq_tile, tl.trans(k_tile), ts, input_precision=PRECISION)
                if HAS_TK:
                    tk_tile = load_keys(
                        tk, table, layout, tk_strides, at.b_k, h_k, place, keys, shape.seqlen_k, dims, shape.head_dim,
                        SEQUENCES, PAGE, BLOCK_N, BLOCK_D, TMA, WIDE, phase == EDGE, PAD_D,
                    )  # fmt: skip
                    ts = tl.dot(q_tile, tl.trans(tk_tile), ts, input_precision=PRECISION)
                if SOFTCAP:
                    ts *= slope
                moved = values_of_tile(
                    tbias_head, tbias_strides, first, place, shape, extent, BLOCK_M, BLOCK_N, TBIAS, MASK == KEYS
                )
                ts = add_bias(
                    ts, tangent_scale, tbias, tbias_head, tvector, moved, tbias_strides, b, h, first + at.bias_row,
                    place, rows, keys, shape, extent, BLOCK_M, BLOCK_N, TBIAS, 1, TBIAS_TMA, WIDE, False,
                    MASK == KEYS,
                )  # fmt: skip
                total = total * rescale + tl.sum(p * ts, 1)
                new_mean = total / tl.where(row_sum == 0.0, 1.0, row_sum)
                lift = mean - new_mean
                ts = ts - new_mean[:, None]
                mean = new_mean
                if SUMS_REST:
                    rest = rest * rescale + lift * earlier_sum + tl.sum(p * ts, 1)
            acc_o = acc_o * rescale[:, None]
            acc_t = acc_t * rescale[:, None]
            if MOVES_SCORES:  # after the rescale, because this needs fewer registers
                acc_t += acc_o * lift[:, None]
            if DROPOUT:
                kept = is_kept(dropout_key, dropout, b, h, first, place, rows, keys, BLOCK_M, BLOCK_N, MASK == KEYS, 1)
                p = tl.where(kept, p, 0.0)
            v_tile = load_keys(
                v, table, layout, v_strides, at.b_k, h_k, place, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
                SEQUENCES, PAGE, BLOCK_N, BLOCK_DV, TMA, WIDE, phase == EDGE, PAD_DV, column,
            )  # fmt: skip
            if MOVES_SCORES:
                acc_t = tl.dot((p * ts).to(v_tile.dtype), v_tile, acc_t, input_precision=PRECISION)
            weights = p.to(v_tile.dtype)
            acc_o = tl.dot(weights, v_tile, acc_o, input_precision=PRECISION)
            if HAS_TV:
                tv_tile = load_keys(
                    tv, table, layout, tv_strides, at.b_k, h_k, place, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
                    SEQUENCES, PAGE, BLOCK_N, BLOCK_DV, TMA, WIDE, phase == EDGE, PAD_DV, column,
                )  # fmt: skip
                acc_t = tl.dot(weights, tv_tile, acc_t, input_precision=PRECISION)

    row_bias = row_values(bias, bias_strides, b, h, rows, shape, BIAS)
    great, small, total = log_sums(row_max, row_sum, row_bias, BIAS)
    row_ok = rows < shape.seqlen_q
    if SUMS_REST:
        rest = rest / total
        acc_t -= acc_o * rest[:, None]
        mean += rest
    if TBIAS == ROW_BIAS:
        mean += row_values(tbias, tbias_strides, b, h, rows, shape, TBIAS)
    if BIAS == ROW_BIAS or TBIAS == ROW_BIAS:
        mean = tl.where(great == float("-inf"), 0.0, mean)
    if DROPOUT:
        factor = tl.cast(dropout.scale, tl.float32)
        acc_o = acc_o * factor
        acc_t = acc_t * factor
    if HAS_SINK:
        logits = tl.load(sink + h).to(tl.float32) + tl.zeros([BLOCK_M], tl.float32)
        great, small, share = join_sink(great, small, logits)
        joint = mean * share
        if HAS_TSINK:
            # A sink of -inf has no effect, also in a row without keys.
            joint += tl.where(logits > float("-inf"), (1.0 - share) * tl.load(tsink + h).to(tl.float32), 0.0)
        acc_t = (acc_t + acc_o * (mean - joint)[:, None]) * share[:, None]
        acc_o = acc_o * share[:, None]
        mean = joint
    line = ((at.row_q + rows) * shape.num_heads + h)[:, None] * shape.head_dim_v + dims_v[None, :]
    stored = row_ok[:, None] & (dims_v < shape.head_dim_v)[None, :]
    tl.store(out + line, (acc_o / total[:, None]).to(out.dtype.element_ty), mask=stored)
    tl.store(tout + line, (acc_t / total[:, None]).to(tout.dtype.element_ty), mask=stored)
    row_ok = row_ok & (column == 0)  # one part stores what all parts have computed
    store_lse(lse + statistics + rows, great, small, row_ok)
    tl.store(tlse + statistics + rows, mean, mask=row_ok)
