"""The first kernel of the backward pass of wide heads: p and ds of every (query, key) pair, stored in 16 bits.

    p = exp(s - lse);  ds = p * (dout @ v^T - delta)

The sums of dq, dk or dv of a tile of such heads leave no room for the products that make p and ds. So a program makes
one tile of pairs, in steps over the head dim, and stores it; pair_products.py multiplies what is stored. A launch makes
a chunk of the pairs: those of some heads, or some of the lines of one head.

A chunk has `members` query heads of each of its owners, from `first_member` on. An owner is a key-value head: of one
entry of the batch, numbered over all entries, or beside sequences of all of them. Its slots, one for each query head,
have `lines` rows of `pitch` values, from `first_line` on. A line is a query of the entry; beside sequences it is a row
of packed queries, or of all padded sequences in order. With a mask of kept keys columns are places in `kept`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_keys import KEY_SUM, NO_DBIAS, STORE, store_rows, store_tile
from .dropout import is_kept
from .scores import (
    add_bias,
    bias_vector,
    masked_scores,
    probabilities,
    scaled,
    score_gradients,
    sink_logits,
    values_of_tile,
)
from .tile_ops import (
    DENSE,
    KEYS,
    NO_BIAS,
    NO_SEQUENCES,
    PACKED,
    ROW_BIAS,
    TILE,
    TILES,
    band_of_queries,
    bounds_of,
    entry_of,
    load_low_delta,
    load_tile,
    mask_head,
    scores_from,
    sequence_at,
    tiles_of_rows,
)

# Programs that run together have this many tiles of queries in common, so that they read few tiles of q and of k.
BAND_OF_TILES: tl.constexpr = tl.constexpr(8)
# Numbers that differ from chunk to chunk; one compiled kernel serves all of them.
PLACE = ("first_owner", "end_owner", "first_member", "first_line")


@triton.jit
def head_at(slot, first_owner, end_owner, first_member, members, shape, SEQUENCES: tl.constexpr):
    """Return the entry, the query head of a slot, and whether there is one; the entry is 0 beside sequences."""
    owner = first_owner + slot // members
    member = first_member + slot % members
    exists = (owner < end_owner) & (member < shape.group)
    if SEQUENCES == NO_SEQUENCES:
        heads_k = shape.num_heads // shape.group
        return (owner // heads_k).to(tl.int64), owner % heads_k * shape.group + member, exists
    else:
        return (owner * 0).to(tl.int64), owner * shape.group + member, exists


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
    distances,
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
    """Store p, after dropout, and ds, behind the softcap, of one tile of pairs of a chunk.

    A tile where no query may see a key is not written, and pair_products.py does not read it. Values beyond the last
    query or key are zeros in every other tile, but lines of no sequence are not written.

    With STORE ds also goes to dbias as `backward_keys_kernel` stores it. Under KEY_SUM key_parts, fp32 (slots, parts,
    Lk), gets the sum over the queries of each tile. The caller zeroes both.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    if SEQUENCES == NO_SEQUENCES:
        tiles_m = lines // BLOCK_M
    else:
        tiles_m = tiles_of_rows(layout.rows_q, shape.seqlen_q, layout.number, SEARCH, BLOCK_M)
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
    if SEQUENCES == NO_SEQUENCES:
        b_row = b
        first = first_line + tile_m * BLOCK_M
        first_row = b * 0
        first_q = 0
        statistics = (b * shape.num_heads + h) * shape.seqlen_q
        few = False
        part = tile_m
    else:
        own, place = sequence_at(tile_m, bounds, shape.seqlen_q, layout.number, SEARCH, 0, BLOCK_M)
        first_q, first_k, shape = bounds_of(bounds, own, shape)
        b = own.to(tl.int64)
        b_row = b * (0 if SEQUENCES == PACKED else 1)
        first = place * BLOCK_M
        first_row = b_row * layout.rows_q + first_q
        visit &= (first_row + first + BLOCK_M > first_line) & (first_row + first < first_line + lines)
        visit &= first_place < shape.seqlen_k
        statistics = (b_row * shape.num_heads + h) * layout.rows_q + first_q
        few = shape.seqlen_k <= layout.few_keys
        part = (first_row // BLOCK_M).to(tl.int32) + own + place
        q += first_q.to(tl.int64) * q_strides.row
        dout += first_q.to(tl.int64) * dout_strides.row
        k += first_k.to(tl.int64) * k_strides.row
        v += first_k.to(tl.int64) * v_strides.row
        if BIAS != NO_BIAS:
            bias = scores_from(bias, bias_strides, layout.bias_rows, layout.bias_keys, first_q, first_k)
        if MASK == DENSE:
            mask_data = scores_from(mask_data, mask_strides, layout.mask_rows, layout.mask_keys, first_q, first_k)
        if MASK == TILES:
            mask_data += first_row * mask_strides.row
    visit &= first < shape.seqlen_q
    rows = first + tl.arange(0, BLOCK_M)
    row_ok = rows < shape.seqlen_q
    data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
    if visit:
        if MASK == TILES:
            h_m = (h // mask_strides.group).to(tl.int64)
            # A list is two counts and then the tiles of one row. A row of classes has as many values as tiles.
            tile = (first // TILE).to(tl.int64)
            if SEQUENCES != NO_SEQUENCES:
                tile += first_row // TILE + b
            line = entry_of(b, mask_strides) * mask_strides.list_batch + h_m * mask_strides.list_head
            line = (line + tile * mask_strides.list_row) // mask_strides.list_row * (mask_strides.list_row - 2)
            visit = tl.load(classes + line + first_place // TILE) != 0
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
        for at in range(0, shape.head_dim, DEPTH):
            dims = at + tl.arange(0, DEPTH)
            q_tile = load_tile(
                q, q_strides, b_row, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
                BLOCK_M, DEPTH, TMA, WIDE, True, PAD_D, at,
            )  # fmt: skip
            k_tile = load_tile(
                k, k_strides, b_row, h_k, first_place, keys, shape.seqlen_k, dims, shape.head_dim,
                BLOCK_N, DEPTH, TMA, WIDE, True, PAD_D, at,
            )  # fmt: skip
            s = tl.dot(q_tile, tl.trans(k_tile), s)
            if EQUAL_DIMS and MAKE_DS:
                g_tile = load_tile(
                    dout, dout_strides, b_row, h, first, rows, shape.seqlen_q, dims, shape.head_dim_v,
                    BLOCK_M, DEPTH, TMA, WIDE, True, PAD_DV, at,
                )  # fmt: skip
                v_tile = load_tile(
                    v, v_strides, b_row, h_k, first_place, keys, shape.seqlen_k, dims, shape.head_dim_v,
                    BLOCK_N, DEPTH, TMA, WIDE, True, PAD_DV, at,
                )  # fmt: skip
                dp = tl.dot(g_tile, tl.trans(v_tile), dp)
        if MAKE_DS and not EQUAL_DIMS:
            for at in range(0, shape.head_dim_v, DEPTH):
                dims = at + tl.arange(0, DEPTH)
                g_tile = load_tile(
                    dout, dout_strides, b_row, h, first, rows, shape.seqlen_q, dims, shape.head_dim_v,
                    BLOCK_M, DEPTH, TMA, WIDE, True, PAD_DV, at,
                )  # fmt: skip
                v_tile = load_tile(
                    v, v_strides, b_row, h_k, first_place, keys, shape.seqlen_k, dims, shape.head_dim_v,
                    BLOCK_N, DEPTH, TMA, WIDE, True, PAD_DV, at,
                )  # fmt: skip
                dp = tl.dot(g_tile, tl.trans(v_tile), dp)
        BIASED: tl.constexpr = BIAS > ROW_BIAS
        s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
        bias_head, vector = bias_vector(bias, bias_strides, b, h, rows, shape, BIAS, 1)
        window = values_of_tile(
            bias_head, bias_strides, first, first_place, shape, distances, BLOCK_M, BLOCK_N, BIAS, MASK == KEYS
        )
        s = add_bias(
            s, factor, bias, bias_head, vector, window, bias_strides, b, h, first, first_place, rows, keys, shape,
            distances, BLOCK_M, BLOCK_N, BIAS, 1, False, WIDE, False, MASK == KEYS,
        )  # fmt: skip
        if EDGES:
            s = masked_scores(
                s, data, mask_strides, b, h, first_place, rows, keys, shape,
                BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 1, False,
            )  # fmt: skip
        lse_rows = tl.load(row_lse + statistics + rows, mask=row_ok, other=float("inf"))
        low_rows, d = load_low_delta(low_delta, delta, statistics + rows, row_ok)
        logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
        p = probabilities(s, lse_rows, low_rows, logits, 1, FEW_KEYS, HAS_SINK, BIASED, low_delta is not None)
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
            ds, _ = score_gradients(p, dp, d, few, 1, FEW_KEYS, SEQUENCES)
            if DBIAS == KEY_SUM:
                sums = tl.sum(tl.where(is_line[:, None], ds, 0.0), 0)
                at_sums = key_parts + (slot.to(tl.int64) * parts + part) * most_keys
                tl.store(at_sums + keys, sums, mask=keys < shape.seqlen_k)
            elif DBIAS == STORE:
                if SEQUENCES == NO_SEQUENCES:
                    store_tile(dbias, ds, b, h, first, first_place, keys, shape, BLOCK_M, BLOCK_N, False)
                else:
                    store_rows(dbias, ds, b, h, first_q, rows, keys, shape, layout)
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
