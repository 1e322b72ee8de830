"""The query-stationary backward kernel: dq of one tile of queries of one head per program.

p = exp(s - lse);  ds = p * (dout @ v^T - delta);  dq += ds @ k
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import (
    ROW_BIAS,
    add_bias,
    bias_from,
    bias_vector,
    block_of_run,
    flat_blocks,
    flat_value,
    values_of_tile,
)
from .dropout import is_kept
from .pieces import add_product, load_pieces, product_of_rows
from .scores import load_entropy_gradient, masked_scores, probabilities, scaled, score_gradients, sink_logits
from .sequences import NO_SEQUENCES, bounds_of, entry_of_tile, mask_from, place_of, rows_from, tiles_of_queries
from .tile_ops import (
    DENSE,
    EDGE,
    INSIDE,
    KEYS,
    LOG2E,
    NEAR,
    TILES,
    block_at,
    blocks_in_order,
    keys_of_queries,
    load_low_delta,
    mask_head,
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
    dentropy,
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
    extent,
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
    FLAT: tl.constexpr,
    INVARIANT: tl.constexpr,
):
    """Compute one tile of dq (B, Lq, Hq, D), which is contiguous; FLAT is as for the forward kernel.

    With INVARIANT blocks ascend, and those inside and at an edge round alike: no other row changes the bits of a row.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    tiles = tiles_of_queries(shape.seqlen_q, layout, SEQUENCES, SEARCH, BLOCK_M)
    entry, tile, h = entry_of_tile(
        program % tiles, program // tiles, bounds, shape.seqlen_q, shape, layout, SEQUENCES, SEARCH, BLOCK_M
    )
    first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
    tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
    if SEQUENCES != NO_SEQUENCES:
        if tile >= tiles_m or shape.seqlen_k <= layout.one_pass_keys:
            return
    at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b
    statistics = (at.b_q * shape.num_heads + h) * at.entry_rows + at.first_q
    q = rows_from(q, q_strides, at.first_q, SEQUENCES)
    dout = rows_from(dout, dout_strides, at.first_q, SEQUENCES)
    k = rows_from(k, k_strides, at.first_k, SEQUENCES)
    v = rows_from(v, v_strides, at.first_k, SEQUENCES)
    bias = bias_from(bias, bias_strides, at, layout, SEQUENCES, BIAS, BIAS_TMA)
    mask_data, mask_index = mask_from(mask_data, mask_index, mask_strides, at, at.row_q, layout, SEQUENCES, MASK)
    h_k = h // shape.group
    first = (tiles_m - 1 - tile) * BLOCK_M  # under a causal band the longest rows start first
    last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < shape.seqlen_q
    q_pieces = load_pieces(
        q, q_strides, shape.batch, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
        BLOCK_M, BLOCK_D, False, True, True, PAD_D, PRECISION,
    )  # fmt: skip
    g_pieces = load_pieces(
        dout, dout_strides, shape.batch, at.b_q, h, first, rows, shape.seqlen_q, dims_v, shape.head_dim_v,
        BLOCK_M, BLOCK_DV, False, True, True, PAD_DV, PRECISION,
    )  # fmt: skip
    lse_rows = tl.load(row_lse + statistics + rows, mask=row_ok, other=float("inf"))
    BIASED: tl.constexpr = BIAS > ROW_BIAS
    # The part of lse below the precision of fp32 is a factor of whole rows of dq. Used in the loop, it would need
    # registers that now allow a second program on the SM.
    LOW_LAST: tl.constexpr = BIASED and SEQUENCES == NO_SEQUENCES and dentropy is None and not INVARIANT  # nor has ln p
    low_rows, d = load_low_delta(None if LOW_LAST else low_delta, delta, statistics + rows, row_ok)
    g = load_entropy_gradient(dentropy, statistics + rows, row_ok)
    bias_head, vector = bias_vector(bias, bias_strides, b, h, rows, shape, BIAS, 1)
    logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
    data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
    walk, start, inside, before, after = keys_of_queries(
        first, last, index, mask_strides, shape, MASK, LEFT, RIGHT, BLOCK_N
    )
    near = 0
    if FLAT:
        flat = flat_blocks(bias_head, bias_strides, first, start, inside, shape, extent, BLOCK_M, BLOCK_N, BIAS, 1)
        near = flat.near
    if INVARIANT and MASK == TILES:  # in one sorted list, as partial ones
        start, after, before = 0, before, 0
    ONE_LOOP: tl.constexpr = INVARIANT and (MASK == TILES or MASK == DENSE)
    FIRST_PHASE: tl.constexpr = EDGE if ONE_LOOP else NEAR if FLAT or (INVARIANT and LEFT) else INSIDE
    hidden = float("-inf")
    if INVARIANT and not (BIASED or SOFTCAP):  # products are masked, and get the sign of the scale
        hidden = tl.where(score_scale < 0.0, float("inf"), float("-inf"))
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(FIRST_PHASE, EDGE + 1 if EDGES else EDGE):
        begin = 0
        steps = near if phase == NEAR else inside - near if phase == INSIDE else before + after
        if INVARIANT:
            begin, steps = blocks_in_order(phase, 0, start + inside + after, start, inside, before, after)
        for step in range(begin, steps):
            IS_EDGE: tl.constexpr = phase == EDGE or (INVARIANT and phase == NEAR)
            IS_FLAT: tl.constexpr = FLAT and phase == INSIDE
            block = step
            if FLAT and phase != EDGE:
                block = block_of_run(step, flat, IS_FLAT)
            if INVARIANT and MASK != TILES:
                place = tl.multiple_of(step * BLOCK_N, BLOCK_N)
            else:
                place = block_at(block, walk, start, inside, before, phase == EDGE, MASK, BLOCK_N)
            keys = place + tl.arange(0, BLOCK_N)
            if MASK == KEYS:
                keys = tl.load(data + keys, mask=keys < shape.seqlen_k, other=shape.seqlen_k)
            if not IS_FLAT:
                window = values_of_tile(
                    bias_head, bias_strides, first, place, shape, extent, BLOCK_M, BLOCK_N, BIAS, MASK == KEYS
                )
            k_pieces = load_pieces(
                k, k_strides, shape.batch, at.b_k, h_k, place, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, BLOCK_D, TMA, WIDE, IS_EDGE, PAD_D, PRECISION,
            )  # fmt: skip
            s = product_of_rows(q_pieces, k_pieces, PRECISION)
            s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
            if not IS_FLAT and (BIASED or not INVARIANT):
                s = add_bias(
                    s, factor, bias, bias_head, vector, window, bias_strides, b, h, first + at.bias_row, place, rows,
                    keys, shape, extent, BLOCK_M, BLOCK_N, BIAS, 1, BIAS_TMA, WIDE, False, MASK == KEYS,
                )  # fmt: skip
            if IS_EDGE:
                s = masked_scores(
                    s, data, mask_strides, b, h, place, rows, keys, shape,
                    BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 1, False, hidden,
                )  # fmt: skip
            if INVARIANT and not BIASED:
                exponents = tl.fma(s, factor, -lse_rows[:, None])
                p = tl.math.exp2(exponents)
            elif IS_FLAT:
                value = flat_value(step, flat)
                less = (lse_rows - value) * LOG2E - low_rows
                p, exponents = probabilities(
                    s * (factor * LOG2E), less, low_rows, logits - value, 1, FEW_KEYS, HAS_SINK, False, False
                )
            else:
                p, exponents = probabilities(
                    s, lse_rows, low_rows, logits, 1, FEW_KEYS, HAS_SINK, BIASED, low_delta is not None
                )
            v_pieces = load_pieces(
                v, v_strides, shape.batch, at.b_k, h_k, place, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
                BLOCK_N, BLOCK_DV, TMA, WIDE, IS_EDGE, PAD_DV, PRECISION,
            )  # fmt: skip
            dp = product_of_rows(g_pieces, v_pieces, PRECISION)
            if DROPOUT:
                kept = is_kept(dropout_key, dropout, b, h, first, place, rows, keys, BLOCK_M, BLOCK_N, MASK == KEYS, 1)
                dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)
            ds, d = score_gradients(p, exponents, dp, d, g, at.few, 1, FEW_KEYS, SEQUENCES, dentropy is not None)
            if SOFTCAP:
                ds = ds * slope
            acc_dq = add_product(acc_dq, ds, k_pieces, PRECISION)
    if LOW_LAST and not FEW_KEYS:
        low_rows, _ = load_low_delta(low_delta, delta, statistics + rows, row_ok)
        acc_dq = acc_dq * tl.math.exp2(low_rows)[:, None]
    place = ((at.row_q + rows) * shape.num_heads + h)[:, None] * shape.head_dim + dims[None, :]
    stored = row_ok[:, None] & (dims < shape.head_dim)[None, :]
    tl.store(dq + place, (acc_dq * scale).to(dq.dtype.element_ty), mask=stored)
