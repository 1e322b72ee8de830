"""The bias-stationary backward kernel: the gradient of a bias of one value per score, shared by batch or heads.

Each program owns one tile of dbias. It visits the heads of all batch entries that read this tile, one after the other,
and recomputes ds for each. The sum stays in fp32 registers, has a fixed order, and is rounded once. If the tiles do not
fill the GPU, several programs own a tile. Each has a chunk of the heads and stores its sum in a slot, and sum_slots.py
adds the slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import ROW_BIAS, load_bias
from .dropout import is_kept
from .pieces import load_pieces, product_of_rows
from .scores import load_entropy_gradient, probabilities, scaled, score_gradients, sink_logits
from .sequences import (
    NO_SEQUENCES,
    bounds_of,
    mask_from,
    place_of,
    rows_from,
    scores_from,
    sequence_at,
    shape_of,
    tiles_of_rows,
)
from .tile_ops import (
    DENSE,
    KEYS,
    TILE,
    TILES,
    band_of_queries,
    bits_of,
    class_at,
    in_band,
    load_bools,
    load_low_delta,
    mask_head,
    reader_of,
)


@triton.jit
def backward_bias_kernel(
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
    classes,
    dbias,
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
    softcap,
    bias_batch,
    bias_heads,
    chunk,
    layout,
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
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
    SEARCH: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute one tile of dbias (chunks, bias_batch, bias_heads, Lq, Lk), which is contiguous.

    `classes` is 0 for tiles of the mask that allow no pair. A chunk has `chunk` heads, counted over batch entries.

    With SEQUENCES each sequence counts as a batch entry, and rows and columns of the tile are positions in every
    sequence. With PACKED_ROWS the bias has packed queries, so the rows of a tile belong to one sequence; the caller
    zeroes dbias first, because no program stores the rows between sequences.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    if PACKED_ROWS:
        tiles_m = tiles_of_rows(layout.rows_q, shape.seqlen_q, layout.number, SEARCH, BLOCK_M)
    else:
        tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
    tiles_n = tl.cdiv(shape.seqlen_k, BLOCK_N)
    first_key = program % tiles_n * BLOCK_N
    first = program // tiles_n % tiles_m * BLOCK_M
    owner = program // tiles_n // tiles_m % bias_heads
    slot = program // tiles_n // tiles_m // bias_heads
    owner_b = slot % bias_batch
    begin = slot // bias_batch * chunk
    entries = shape.batch // bias_batch
    first_stored = 0
    sequence = 0
    if PACKED_ROWS:
        entries = 1
        sequence, sequence_tile = sequence_at(
            first // BLOCK_M, bounds, shape.seqlen_q, layout.number, SEARCH, 0, BLOCK_M
        )
        first = sequence_tile * BLOCK_M
        first_stored = tl.load(bounds + sequence * 4)
        shape = shape_of(shape, tl.load(bounds + sequence * 4 + 1), shape.seqlen_k)
        bias = scores_from(bias, bias_strides, 1, 0, first_stored, first_stored)
    rows = first + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < shape.seqlen_q
    members = shape.num_heads // bias_heads
    first_reader = reader_of(owner_b, 0, bias_strides.repeat, bias_batch).to(tl.int64)
    bias_tile = load_bias(
        bias, bias_strides, first_reader, owner * members, first, first_key, rows, keys, shape,
        BLOCK_M, BLOCK_N, False, WIDE,
    )  # fmt: skip
    last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
    last_key = tl.minimum(first_key + BLOCK_N, shape.seqlen_k) - 1
    shift = shape.seqlen_k - shape.seqlen_q
    end = tl.minimum(begin + chunk, entries * members)
    if RIGHT and SEQUENCES == NO_SEQUENCES:
        end = tl.where(first_key > last + shift + shape.right, 0, end)
    if LEFT and SEQUENCES == NO_SEQUENCES:
        end = tl.where(last_key < first + shift - shape.left, 0, end)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    BIASED: tl.constexpr = BIAS > ROW_BIAS
    for entry in range(begin, end):
        b = reader_of(owner_b, entry // members, bias_strides.repeat, bias_batch).to(tl.int64)
        h = owner * members + entry % members
        h_k = h // shape.group
        visit = True
        if PACKED_ROWS:
            b = sequence.to(tl.int64)
        first_q, first_k, entry_shape = bounds_of(b, bounds, shape, SEQUENCES)
        at = place_of(b, first_q, first_k, entry_shape, layout, SEQUENCES)
        if SEQUENCES != NO_SEQUENCES:
            lo, _, _, hi = band_of_queries(
                first, tl.minimum(first + BLOCK_M, entry_shape.seqlen_q) - 1, entry_shape, LEFT, RIGHT
            )
            visit = (first < entry_shape.seqlen_q) & (first_key < hi) & (first_key + BLOCK_N > lo)
        if MASK == TILES:
            tile = first // TILE
            if SEQUENCES != NO_SEQUENCES:
                tile += (at.row_q // TILE).to(tl.int32) + b.to(tl.int32)
            tile_class = class_at(classes, mask_strides, b, h, tile, first_key)
            if SEQUENCES == NO_SEQUENCES:
                visit = tl.load(tile_class) != 0
            else:
                visit = visit & (tl.load(tile_class, mask=visit, other=0) != 0)
        if MASK == KEYS:
            data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
            before = tl.load(index + keys, mask=keys < shape.seqlen_k, other=0)
            kept = tl.load(index + keys + 1, mask=keys < shape.seqlen_k, other=0) > before
            visit = tl.max(kept.to(tl.int32)) > 0
        if visit:
            statistics = (at.b_q * shape.num_heads + h) * at.entry_rows + at.first_q
            is_row = rows < entry_shape.seqlen_q
            q_at = rows_from(q, q_strides, at.first_q, SEQUENCES)
            k_at = rows_from(k, k_strides, at.first_k, SEQUENCES)
            v_at = rows_from(v, v_strides, at.first_k, SEQUENCES)
            dout_at = rows_from(dout, dout_strides, at.first_q, SEQUENCES)
            lse_rows = tl.load(row_lse + statistics + rows, mask=is_row, other=float("inf"))
            low_rows, d = load_low_delta(low_delta, delta, statistics + rows, is_row)
            g = load_entropy_gradient(dentropy, statistics + rows, is_row)
            q_pieces = load_pieces(
                q_at, q_strides, shape.batch, at.b_q, h, first, rows, entry_shape.seqlen_q, dims, shape.head_dim,
                BLOCK_M, BLOCK_D, TMA, WIDE, True, PAD_D, PRECISION,
            )  # fmt: skip
            k_pieces = load_pieces(
                k_at, k_strides, shape.batch, at.b_k, h_k, first_key, keys, entry_shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, BLOCK_D, TMA, WIDE, True, PAD_D, PRECISION,
            )  # fmt: skip
            s = product_of_rows(q_pieces, k_pieces, PRECISION)
            s, factor, _slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
            s = tl.fma(s, factor, bias_tile.to(tl.float32)) if BIASED else s * factor
            allowed = in_band(rows[:, None], keys[None, :], entry_shape, LEFT, RIGHT)
            if MASK == TILES or MASK == DENSE:
                data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
                data = mask_from(data, index, mask_strides, at, at.row_q, layout, SEQUENCES, MASK)[0]
            if MASK == TILES:
                allowed &= bits_of(data, first_key, rows, entry_shape.seqlen_q, mask_strides.row, BLOCK_M, BLOCK_N, 1)
            elif MASK == DENSE:
                allowed &= load_bools(data, mask_strides, rows[:, None], keys[None, :], entry_shape)
            elif MASK == KEYS:
                allowed &= kept[None, :]
            s = tl.where(allowed, s, float("-inf"))
            logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
            p, exponents = probabilities(
                s, lse_rows, low_rows, logits, 1, FEW_KEYS, HAS_SINK, BIASED, low_delta is not None
            )
            v_pieces = load_pieces(
                v_at, v_strides, shape.batch, at.b_k, h_k, first_key, keys, entry_shape.seqlen_k,
                dims_v, shape.head_dim_v,
                BLOCK_N, BLOCK_DV, TMA, WIDE, True, PAD_DV, PRECISION,
            )  # fmt: skip
            g_pieces = load_pieces(
                dout_at, dout_strides, shape.batch, at.b_q, h, first, rows, entry_shape.seqlen_q,
                dims_v, shape.head_dim_v,
                BLOCK_M, BLOCK_DV, TMA, WIDE, True, PAD_DV, PRECISION,
            )  # fmt: skip
            dp = product_of_rows(g_pieces, v_pieces, PRECISION)
            if DROPOUT:
                stays = is_kept(dropout_key, dropout, b, h, first, first_key, rows, keys, BLOCK_M, BLOCK_N, False, 1)
                dp = tl.where(stays, dp * tl.cast(dropout.scale, tl.float32), 0.0)
            acc += score_gradients(p, exponents, dp, d, g, at.few, 1, FEW_KEYS, SEQUENCES, dentropy is not None)[0]
    if PACKED_ROWS:
        line = ((slot * bias_heads + owner).to(tl.int64) * layout.rows_q + first_stored + rows)[
            :, None
        ] * shape.seqlen_k
    else:
        line = ((slot * bias_heads + owner).to(tl.int64) * shape.seqlen_q + rows)[:, None] * shape.seqlen_k
    inside = row_ok[:, None] & (keys < shape.seqlen_k)[None, :]
    tl.store(dbias + line + keys[None, :], acc.to(dbias.dtype.element_ty), mask=inside)
