"""The first kernel of the backward pass of wide heads: p and ds of every (query, key) pair, stored in 16 bits.

    p = exp(s - lse);  ds = p * (dout @ v^T - delta)

The sums of dq, dk or dv of a tile of such heads leave no registers for the products that compute p and ds. So a program
computes one tile of pairs, in steps over the head dim, and stores it; pair_products.py multiplies the stored pairs. A
launch computes a chunk of the pairs: all pairs of some heads, or of some lines of one head.

A chunk has `members` query heads of each of its owners, from `first_member` on. An owner is a key-value head of one
entry of the batch, numbered over all entries; with sequences, of all entries. Its slots, one for each query head, have
`lines` rows of `pitch` values, from `first_line` on. A line is a query of the entry; with sequences it is a row of
packed queries, or of all padded sequences in order. With a mask of kept keys, columns are indices into `kept`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import (
    KEY_SUM,
    NO_DBIAS,
    ROW_BIAS,
    STORE,
    add_bias,
    bias_from,
    bias_vector,
    store_rows,
    store_tile,
    values_of_tile,
)
from .dropout import is_kept
from .scores import load_entropy_gradient, masked_scores, probabilities, scaled, score_gradients, sink_logits
from .sequences import NO_SEQUENCES, bounds_of, mask_from, place_of, rows_from, sequence_at, tiles_of_rows
from .tile_ops import KEYS, TILE, TILES, band_of_queries, class_at, load_low_delta, load_tile, mask_head

# Programs that run at the same time have this number of tiles of queries in common, to load fewer tiles of q and k.
BAND_OF_TILES: tl.constexpr = tl.constexpr(8)
# Numbers that differ from chunk to chunk; one compiled kernel serves all of them.
PLACE = ("first_owner", "end_owner", "first_member", "first_line")


@triton.jit
def head_at(slot, first_owner, end_owner, first_member, members, shape, SEQUENCES: tl.constexpr):
    """Return the entry, the query head of a slot, and whether there is one; with sequences the entry is 0."""
    owner = first_owner + slot // members
    member = first_member + slot % members
    exists = (owner < end_owner) & (member < shape.group)
    if SEQUENCES == NO_SEQUENCES:
        heads_k = shape.num_heads // shape.group
        return (owner // heads_k).to(tl.int64), owner % heads_k * shape.group + member, exists
    else:
        return tl.zeros_like(owner).to(tl.int64), owner * shape.group + member, exists


@triton.jit
def tiles_of_chunk(lines, shape, layout, SEQUENCES: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of tiles of queries of a slot: tiles of its lines, or with sequences of all queries."""
    if SEQUENCES == NO_SEQUENCES:
        return lines // BLOCK
    else:
        return tiles_of_rows(layout.rows_q, shape.seqlen_q, layout.number, SEARCH, BLOCK)


@triton.jit
def line_of(at, SEQUENCES: tl.constexpr):
    """Return the line of the first query of an entry or of a sequence."""
    if SEQUENCES == NO_SEQUENCES:
        return tl.zeros_like(at.b)
    else:
        return at.row_q


@triton.jit(do_not_specialize=PLACE)
def pairs_kernel(
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
    p_pairs,
    ds_pairs,
    dbias,
    key_parts,
    sink,
    bounds,
    dropout_key,
    first_owner,
    end_owner,
    first_member,
    first_line,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    bias_strides,
    mask_strides,
    shape,
    score_scale,
    softcap,
    extent,
    layout,
    dropout,
    members,
    lines,
    pitch,
    parts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
    DROPOUT: tl.constexpr,
    EQUAL_DIMS: tl.constexpr,
    STORE_P: tl.constexpr,
    STORE_DS: tl.constexpr,
    DBIAS: tl.constexpr,
):
    """Store p after dropout, and ds with respect to scores before the softcap, of one tile of pairs of a chunk.

    A tile in which no query may attend to a key is not written, and pair_products.py does not load it. Values beyond
    the last query or key are zeros in every other tile, but lines of no sequence are not written.

    With STORE ds also goes to dbias as `backward_keys_kernel` stores it. Under KEY_SUM key_parts, fp32 (slots, parts,
    Lk), gets the sum over the queries of each tile. The caller zeroes both.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    tiles_m = tiles_of_chunk(lines, shape, layout, SEQUENCES, SEARCH, BLOCK_M)
    tiles_n = tl.cdiv(shape.seqlen_k, BLOCK_N)
    most_keys = shape.seqlen_k
    slot = program // (tiles_m * tiles_n)
    band = program % (tiles_m * tiles_n) // (BAND_OF_TILES * tiles_n)
    rows_of_band = tl.minimum(tiles_m - band * BAND_OF_TILES, BAND_OF_TILES)
    in_band = program % (tiles_m * tiles_n) % (BAND_OF_TILES * tiles_n)
    tile_m = band * BAND_OF_TILES + in_band % rows_of_band
    first_place = in_band // rows_of_band * BLOCK_N
    b, h, visit = head_at(slot, first_owner, end_owner, first_member, members, shape, SEQUENCES)
    h_k = h // shape.group
    first = first_line + tile_m * BLOCK_M
    part = tile_m
    entry = b
    if SEQUENCES != NO_SEQUENCES:
        entry, place = sequence_at(tile_m, bounds, shape.seqlen_q, layout.number, SEARCH, 0, BLOCK_M)
        first = place * BLOCK_M
    first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
    at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b
    first_row = line_of(at, SEQUENCES)
    if SEQUENCES != NO_SEQUENCES:
        visit &= (first_row + first + BLOCK_M > first_line) & (first_row + first < first_line + lines)
        visit &= first_place < shape.seqlen_k
        part = (first_row // BLOCK_M).to(tl.int32) + entry + place
    statistics = (at.b_q * shape.num_heads + h) * at.entry_rows + at.first_q
    q = rows_from(q, q_strides, at.first_q, SEQUENCES)
    dout = rows_from(dout, dout_strides, at.first_q, SEQUENCES)
    k = rows_from(k, k_strides, at.first_k, SEQUENCES)
    v = rows_from(v, v_strides, at.first_k, SEQUENCES)
    bias = bias_from(bias, bias_strides, at, layout, SEQUENCES, BIAS, False)
    mask_data, mask_index = mask_from(mask_data, mask_index, mask_strides, at, at.row_q, layout, SEQUENCES, MASK)
    visit &= first < shape.seqlen_q
    rows = first + tl.arange(0, BLOCK_M)
    row_ok = rows < shape.seqlen_q
    data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
    if visit:
        if MASK == TILES:
            tile = (first // TILE).to(tl.int64)
            if SEQUENCES != NO_SEQUENCES:
                tile += first_row // TILE + b
            visit = tl.load(class_at(classes, mask_strides, b, h, tile, first_place)) != 0
        else:
            last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
            lo, _, _, hi = band_of_queries(first, last, shape, LEFT, RIGHT)
            if MASK == KEYS:
                lo, hi = tl.load(index + lo), tl.load(index + hi)
            visit = (first_place < hi) & (first_place + BLOCK_N > lo)
    if visit:
        places = first_place + tl.arange(0, BLOCK_N)
        keys = places
        if MASK == KEYS:
            keys = tl.load(data + places, mask=places < shape.seqlen_k, other=shape.seqlen_k)
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        MAKE_DS: tl.constexpr = STORE_DS or DBIAS != NO_DBIAS
        for column in range(0, shape.head_dim, DEPTH):
            dims = column + tl.arange(0, DEPTH)
            q_tile = load_tile(
                q, q_strides, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
                BLOCK_M, DEPTH, TMA, WIDE, True, PAD_D, column,
            )  # fmt: skip
            k_tile = load_tile(
                k, k_strides, at.b_k, h_k, first_place, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, DEPTH, TMA, WIDE, True, PAD_D, column,
            )  # fmt: skip
            s = tl.dot(q_tile, tl.trans(k_tile), s)
            if EQUAL_DIMS and MAKE_DS:
                g_tile = load_tile(
                    dout, dout_strides, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim_v,
                    BLOCK_M, DEPTH, TMA, WIDE, True, PAD_DV, column,
                )  # fmt: skip
                v_tile = load_tile(
                    v, v_strides, at.b_k, h_k, first_place, keys, shape.seqlen_k, dims, shape.head_dim_v,
                    BLOCK_N, DEPTH, TMA, WIDE, True, PAD_DV, column,
                )  # fmt: skip
                dp = tl.dot(g_tile, tl.trans(v_tile), dp)
        if MAKE_DS and not EQUAL_DIMS:
            for column in range(0, shape.head_dim_v, DEPTH):
                dims = column + tl.arange(0, DEPTH)
                g_tile = load_tile(
                    dout, dout_strides, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim_v,
                    BLOCK_M, DEPTH, TMA, WIDE, True, PAD_DV, column,
                )  # fmt: skip
                v_tile = load_tile(
                    v, v_strides, at.b_k, h_k, first_place, keys, shape.seqlen_k, dims, shape.head_dim_v,
                    BLOCK_N, DEPTH, TMA, WIDE, True, PAD_DV, column,
                )  # fmt: skip
                dp = tl.dot(g_tile, tl.trans(v_tile), dp)
        BIASED: tl.constexpr = BIAS > ROW_BIAS
        s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
        bias_head, vector = bias_vector(bias, bias_strides, b, h, rows, shape, BIAS, 1)
        window = values_of_tile(
            bias_head, bias_strides, first, first_place, shape, extent, BLOCK_M, BLOCK_N, BIAS, MASK == KEYS
        )
        s = add_bias(
            s, factor, bias, bias_head, vector, window, bias_strides, b, h, first, first_place, rows, keys, shape,
            extent, BLOCK_M, BLOCK_N, BIAS, 1, False, WIDE, False, MASK == KEYS,
        )  # fmt: skip
        if EDGES:
            s = masked_scores(
                s, data, mask_strides, b, h, first_place, rows, keys, shape,
                BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 1, False,
            )  # fmt: skip
        lse_rows = tl.load(row_lse + statistics + rows, mask=row_ok, other=float("inf"))
        low_rows, d = load_low_delta(low_delta, delta, statistics + rows, row_ok)
        g = load_entropy_gradient(dentropy, statistics + rows, row_ok)
        logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
        p, exponents = probabilities(
            s, lse_rows, low_rows, logits, 1, FEW_KEYS, HAS_SINK, BIASED, low_delta is not None
        )
        weights = p
        if DROPOUT:
            kept = is_kept(
                dropout_key, dropout, b, h, first, first_place, rows, keys, BLOCK_M, BLOCK_N, MASK == KEYS, 1
            )
            weights = tl.where(kept, p, 0.0)
            dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)
        row = first_row + rows - first_line
        is_line = (row >= 0) & (row < lines) & row_ok
        at_pairs = (slot.to(tl.int64) * lines + row)[:, None] * pitch + places[None, :]
        if STORE_P:
            if TMA:
                tile_p = weights.to(p_pairs.dtype).reshape(1, BLOCK_M, BLOCK_N)
                p_pairs.store([slot, first - first_line, first_place], tile_p)
            elif SEQUENCES == NO_SEQUENCES:
                tl.store(p_pairs + at_pairs, weights.to(p_pairs.dtype.element_ty))
            else:
                tl.store(p_pairs + at_pairs, weights.to(p_pairs.dtype.element_ty), mask=is_line[:, None])
        if MAKE_DS:
            ds, _ = score_gradients(p, exponents, dp, d, g, at.few, 1, FEW_KEYS, SEQUENCES, dentropy is not None)
            if DBIAS == KEY_SUM:
                sums = tl.sum(tl.where(is_line[:, None], ds, 0.0), 0)
                at_sums = key_parts + (slot.to(tl.int64) * parts + part) * most_keys
                tl.store(at_sums + keys, sums, mask=keys < shape.seqlen_k)
            elif DBIAS == STORE:
                if SEQUENCES == NO_SEQUENCES:
                    store_tile(dbias, ds, b, h, first, first_place, keys, shape, BLOCK_M, BLOCK_N, False)
                else:
                    store_rows(dbias, ds, b, h, at.first_q, rows, keys, shape, layout)
            if STORE_DS:
                if SOFTCAP:
                    ds = ds * slope
                if TMA:
                    tile_ds = ds.to(ds_pairs.dtype).reshape(1, BLOCK_M, BLOCK_N)
                    ds_pairs.store([slot, first - first_line, first_place], tile_ds)
                elif SEQUENCES == NO_SEQUENCES:
                    tl.store(ds_pairs + at_pairs, ds.to(ds_pairs.dtype.element_ty))
                else:
                    tl.store(ds_pairs + at_pairs, ds.to(ds_pairs.dtype.element_ty), mask=is_line[:, None])
