"""The diagonal-stationary backward kernel: the gradient of a bias of one value per distance.

The tiles of a diagonal of tiles all have the same distances. So each program adds up ds of the tiles of one diagonal in
place. In the end it sums once along the diagonals of that sum. It visits heads, batch entries and tiles one after the
other; if there are fewer programs than SMs, several compute one diagonal. Every sum is in fp32 and has a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import spread, values_of_tile
from .dropout import is_kept
from .pieces import load_pieces, product_of_rows
from .scores import load_entropy_gradient, probabilities, scaled, score_gradients, sink_logits
from .tile_ops import (
    DENSE,
    KEYS,
    TILE,
    TILES,
    bits_of,
    entry_of,
    in_band,
    load_bools,
    load_low_delta,
    mask_head,
    reader_of,
)


@triton.jit
def backward_diagonals_kernel(
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
    sums,
    sink,
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
    first_diagonal,
    diagonals,
    parts,
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
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    DROPOUT: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Compute the sums of one diagonal of tiles, a row of (parts, bias_batch, bias_heads, diagonals, 2 * BLOCK_N).

    Column y of a row has the scores of key - query = y - (BLOCK_M - 1), counted from the corner of each tile. BLOCK_M
    and BLOCK_N are equal. `classes` is 0 for tiles of the mask that allow no pair.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    diagonal = first_diagonal + program % diagonals
    owner = program // diagonals % bias_heads
    owner_b = program // diagonals // bias_heads % bias_batch
    part = program // diagonals // bias_heads // bias_batch
    first_tile = tl.maximum(-diagonal, 0)
    last_tile = tl.minimum(tl.cdiv(shape.seqlen_q, BLOCK_M), tl.cdiv(shape.seqlen_k, BLOCK_N) - diagonal)
    tiles = tl.maximum(last_tile - first_tile, 0)
    members = shape.num_heads // bias_heads
    steps = tiles.to(tl.int64) * (shape.batch // bias_batch * members)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    head = bias + owner_b.to(tl.int64) * bias_strides.batch + owner.to(tl.int64) * bias_strides.head
    first_key = diagonal * BLOCK_N
    window = values_of_tile(head, bias_strides, 0, first_key, shape, extent, BLOCK_M, BLOCK_N, BIAS, False)
    values = spread(window, BLOCK_M, BLOCK_N, 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range((steps * part // parts).to(tl.int32), (steps * (part + 1) // parts).to(tl.int32)):
        member = step // tiles
        tile_m = first_tile + step % tiles
        b = reader_of(owner_b, member // members, bias_strides.repeat, bias_batch).to(tl.int64)
        h = owner * members + member % members
        h_k = h // shape.group
        first = tile_m * BLOCK_M
        first_key = (tile_m + diagonal) * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        keys = first_key + tl.arange(0, BLOCK_N)
        visit = True
        if MASK == TILES:
            h_m = (h // mask_strides.group).to(tl.int64)
            # A list has two counts, and then the tiles of one row. A row of classes has one value for each tile.
            place = entry_of(b, mask_strides) * mask_strides.list_batch + h_m * mask_strides.list_head
            line = (place // mask_strides.list_row + first // TILE) * (mask_strides.list_row - 2)
            visit = tl.load(classes + line + first_key // TILE) != 0
        if MASK == KEYS:
            index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)[1]
            before = tl.load(index + keys, mask=keys < shape.seqlen_k, other=0)
            kept = tl.load(index + keys + 1, mask=keys < shape.seqlen_k, other=0) > before
            visit = tl.max(kept.to(tl.int32)) > 0
        if visit:
            statistics = (b * shape.num_heads + h) * shape.seqlen_q
            row_ok = rows < shape.seqlen_q
            lse_rows = tl.load(row_lse + statistics + rows, mask=row_ok, other=float("inf"))
            low_rows, d = load_low_delta(low_delta, delta, statistics + rows, row_ok)
            g = load_entropy_gradient(dentropy, statistics + rows, row_ok)
            q_pieces = load_pieces(
                q, q_strides, shape.batch, b, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
                BLOCK_M, BLOCK_D, TMA, WIDE, True, PAD_D, PRECISION,
            )  # fmt: skip
            k_pieces = load_pieces(
                k, k_strides, shape.batch, b, h_k, first_key, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, BLOCK_D, TMA, WIDE, True, PAD_D, PRECISION,
            )  # fmt: skip
            s = product_of_rows(q_pieces, k_pieces, PRECISION)
            s, factor, _slope = scaled(s, score_scale, softcap, SOFTCAP, True)
            s = tl.fma(s, factor, values)
            if EDGES:
                allowed = in_band(rows[:, None], keys[None, :], shape, LEFT, RIGHT)
                if MASK == TILES:
                    data = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)[0]
                    allowed &= bits_of(data, first_key, rows, shape.seqlen_q, mask_strides.row, BLOCK_M, BLOCK_N, 1)
                elif MASK == DENSE:
                    data = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)[0]
                    allowed &= load_bools(data, mask_strides, rows[:, None], keys[None, :], shape)
                elif MASK == KEYS:
                    allowed &= kept[None, :]
                s = tl.where(allowed, s, float("-inf"))
            logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
            p, exponents = probabilities(
                s, lse_rows, low_rows, logits, 1, FEW_KEYS, HAS_SINK, True, low_delta is not None
            )
            v_pieces = load_pieces(
                v, v_strides, shape.batch, b, h_k, first_key, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
                BLOCK_N, BLOCK_DV, TMA, WIDE, True, PAD_DV, PRECISION,
            )  # fmt: skip
            g_pieces = load_pieces(
                dout, dout_strides, shape.batch, b, h, first, rows, shape.seqlen_q, dims_v, shape.head_dim_v,
                BLOCK_M, BLOCK_DV, TMA, WIDE, True, PAD_DV, PRECISION,
            )  # fmt: skip
            dp = product_of_rows(g_pieces, v_pieces, PRECISION)
            if DROPOUT:
                stays = is_kept(dropout_key, dropout, b, h, first, first_key, rows, keys, BLOCK_M, BLOCK_N, False, 1)
                dp = tl.where(stays, dp * tl.cast(dropout.scale, tl.float32), 0.0)
            acc += score_gradients(p, exponents, dp, d, g, False, 1, FEW_KEYS, 0, dentropy is not None)[0]
    steps_right = tl.arange(0, 2 * BLOCK_N)[None, :] + tl.arange(0, BLOCK_M)[:, None] - (BLOCK_M - 1)
    inside = (steps_right >= 0) & (steps_right < BLOCK_N)
    moved = tl.gather(acc, tl.minimum(tl.maximum(steps_right, 0), BLOCK_N - 1), 1)
    row = tl.sum(tl.where(inside, moved, 0.0), 0)
    tl.store(sums + program.to(tl.int64) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N), row)
