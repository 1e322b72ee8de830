"""The key-stationary backward kernel: dk, dv, and the gradient of a bias of one value per key or per score.

Scores are computed transposed, (keys, queries), so that p and ds feed dv and dk without a transpose::

    p = exp(s - lse);  dv += p @ dout;  ds = p * (v @ dout^T - delta);  dk += ds @ q;  dbias = ds or rowsum(ds)

With dropout, dv is computed from the dropped p, and v @ dout^T is dropped like p; ds is computed from p itself.

Under P_SUM it only adds p of each key, times a weight of each query: it reads neither v nor dout.

With ONE_PASS this kernel also computes dq = ds^T @ k of sequences that have all keys in one tile. It has all of ds for
them, so no product is computed twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import (
    ENDS,
    KEY_SUM,
    NO_DBIAS,
    P_SUM,
    ROW_BIAS,
    STORE,
    add_bias,
    add_gradient,
    bias_from,
    bias_vector,
    block_of_run,
    flat_blocks,
    flat_value,
    store_tile,
    values_of_tile,
)
from .dropout import is_kept
from .pieces import add_product, load_pieces, product_of_rows
from .scores import load_entropy_gradient, masked_scores, probabilities, scaled, score_gradients, sink_logits
from .sequences import NO_SEQUENCES, bounds_of, mask_from, place_of, rows_from, sequence_at
from .tile_ops import (
    DENSE,
    EDGE,
    INSIDE,
    KEYS,
    LOG2E,
    NEAR,
    TILE,
    TILES,
    block_at,
    load_low_delta,
    mask_head,
    queries_of_keys,
)


@triton.jit
def store_dq(dq, tile, first_row, rows, h, shape, dims):
    """Store rows of a head of one sequence, from `first_row` on, in a contiguous (B, L, Hq, D) gradient."""
    at = dq + ((first_row + rows) * shape.num_heads + h)[:, None] * shape.head_dim + dims[None, :]
    stored = (rows < shape.seqlen_q)[:, None] & (dims < shape.head_dim)[None, :]
    tl.store(at, tile.to(dq.dtype.element_ty), mask=stored)


@triton.jit
def backward_keys_kernel(
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
    dk,
    dv,
    dbias,
    sink,
    bounds,
    dropout_key,
    dq,
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
    owners,
    grid_tiles,
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
    DOUT_TMA: tl.constexpr,
    BIAS_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    NEED_K: tl.constexpr,
    NEED_V: tl.constexpr,
    DBIAS: tl.constexpr,
    PARTS: tl.constexpr,
    DBIAS_TMA: tl.constexpr,
    EDGES: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
    DROPOUT: tl.constexpr,
    ONE_PASS: tl.constexpr,
    FLAT: tl.constexpr,
    INVARIANT: tl.constexpr,
):
    """Compute the gradients of one block of keys of one owner, visiting its queries block by block.

    An owner is a key-value head, or a query head if the query heads of a group cannot be added to one sum.

    dk, dv (B, Lk, Hk, D) and dbias (B, Hq, Lq, Lk) are contiguous. With PARTS, dk and dv are fp32 (B, owners,
    grid_tiles, BLOCK_N, D), and dbias under KEY_SUM has the same shape without D. The key blocks of an owner are then
    split over `grid_tiles` programs, the same number for each block, by queries. Under ENDS dbias is fp32 (2, B,
    owners, grid_tiles, BLOCK_N), under BY_QUERY (B, Hq, Lq, n). The caller zeroes both.

    With SEQUENCES each owner has `grid_tiles` tiles, each with keys of one sequence; `bounds` has the first row and the
    length of each. dk and dv are shaped as k and v, and the caller zeroes dbias. With ONE_PASS the kernel also writes
    the rows of dq, shaped as q, of all sequences with at most BLOCK_N keys.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    if DBIAS == P_SUM:  # the longest programs of all heads start first
        heads = tl.num_programs(0) // grid_tiles
        slot = program // heads
        head = program % heads
    else:
        slot = program % grid_tiles
        head = program // grid_tiles
    owner = head % owners
    entry = head // owners
    if SEQUENCES != NO_SEQUENCES:
        entry, slot = sequence_at(slot, bounds, shape.seqlen_k, layout.number, SEARCH, 2, BLOCK_N)
    first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
    at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b
    q = rows_from(q, q_strides, at.first_q, SEQUENCES)
    dout = rows_from(dout, dout_strides, at.first_q, SEQUENCES)
    k = rows_from(k, k_strides, at.first_k, SEQUENCES)
    v = rows_from(v, v_strides, at.first_k, SEQUENCES)
    bias = bias_from(bias, bias_strides, at, layout, SEQUENCES, BIAS, BIAS_TMA)
    mask_data, mask_index = mask_from(mask_data, mask_index, mask_strides, at, at.row_k, layout, SEQUENCES, MASK)
    is_one_tile = shape.seqlen_k <= BLOCK_N
    members = shape.num_heads // owners
    h_k = owner * members // shape.group
    data, index = mask_head(mask_data, mask_index, mask_strides, b, owner * members, MASK)
    count = shape.seqlen_k
    if MASK == KEYS:
        count = tl.load(index + shape.seqlen_k)
    tiles_n = tl.maximum(tl.cdiv(count, BLOCK_N), 1)
    tile_n = slot  # the longest programs start first: under a causal band the first keys have the most queries
    parts = 1
    part = 0
    if PARTS:
        tile_n = slot % tiles_n
        parts = grid_tiles // tiles_n
        part = slot // tiles_n
    if tile_n * BLOCK_N < count and part < parts:
        first_place = tile_n * BLOCK_N
        places = first_place + tl.arange(0, BLOCK_N)
        dims = tl.arange(0, BLOCK_D)
        dims_v = tl.arange(0, BLOCK_DV)
        first_key = first_place
        last_key = tl.minimum(first_place + BLOCK_N, count) - 1
        keys = places
        if MASK == KEYS:
            keys = tl.load(data + places, mask=places < shape.seqlen_k, other=shape.seqlen_k)
            first_key = tl.load(data + first_key)
            last_key = tl.load(data + last_key)
        key_ok = keys < shape.seqlen_k
        k_pieces = load_pieces(
            k, k_strides, shape.batch, at.b_k, h_k, first_key, keys, shape.seqlen_k, dims, shape.head_dim,
            BLOCK_N, BLOCK_D, False, True, True, PAD_D, PRECISION,
        )  # fmt: skip
        if DBIAS != P_SUM:
            v_pieces = load_pieces(
                v, v_strides, shape.batch, at.b_k, h_k, first_key, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
                BLOCK_N, BLOCK_DV, False, True, True, PAD_DV, PRECISION,
            )  # fmt: skip
        acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        acc_bias = tl.zeros([BLOCK_N], tl.float32)
        acc_last = tl.zeros([BLOCK_N], tl.float32)
        BIASED: tl.constexpr = BIAS > ROW_BIAS
        for member in range(0, members):
            h = owner * members + member
            statistics = (at.b_q * shape.num_heads + h) * at.entry_rows + at.first_q
            bias_head, key_bias = bias_vector(bias, bias_strides, b, h, keys, shape, BIAS, 0)
            if MASK == TILES or MASK == DENSE:
                data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
            walk, start, inside, before, after = queries_of_keys(
                first_key, last_key, first_place // TILE, first_place + BLOCK_N <= count, index, mask_strides, shape,
                MASK, LEFT, RIGHT, BLOCK_M,
            )  # fmt: skip
            near = 0
            flat = None
            if FLAT:
                flat = flat_blocks(
                    bias_head, bias_strides, first_key, start, inside, shape, extent, BLOCK_M, BLOCK_N, BIAS, 0
                )
                near = flat.near
            for phase in tl.static_range(NEAR if FLAT else INSIDE, EDGE + 1 if EDGES else EDGE):
                steps = near if phase == NEAR else inside - near if phase == INSIDE else before + after
                begin = 0
                if PARTS:
                    begin = steps * part // parts
                    steps = steps * (part + 1) // parts
                for step in range(begin, steps):
                    IS_FLAT: tl.constexpr = FLAT and phase == INSIDE
                    block = step
                    if FLAT and phase != EDGE:
                        block = block_of_run(step, flat, IS_FLAT)
                    first = block_at(block, walk, start, inside, before, phase == EDGE, MASK, BLOCK_M)
                    if not IS_FLAT:
                        window = values_of_tile(
                            bias_head, bias_strides, first, first_key, shape, extent,
                            BLOCK_M, BLOCK_N, BIAS, MASK == KEYS,
                        )  # fmt: skip
                    rows = first + tl.arange(0, BLOCK_M)
                    row_ok = rows < shape.seqlen_q
                    q_pieces = load_pieces(
                        q, q_strides, shape.batch, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
                        BLOCK_M, BLOCK_D, TMA, WIDE, True, PAD_D, PRECISION,
                    )  # fmt: skip
                    lse_rows = tl.load(row_lse + statistics + rows, mask=row_ok, other=float("inf"))
                    # delta is loaded early, to have arrived when ds needs it. Loading pairs takes no more instructions
                    # than delta.
                    low_rows, d = load_low_delta(low_delta, delta, statistics + rows, row_ok)
                    g = load_entropy_gradient(dentropy, statistics + rows, row_ok)
                    s = product_of_rows(k_pieces, q_pieces, PRECISION)
                    s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
                    if not IS_FLAT:
                        s = add_bias(
                            s, factor, bias, bias_head, key_bias, window, bias_strides, b, h, first + at.bias_row,
                            first_key, rows, keys, shape, extent,
                            BLOCK_M, BLOCK_N, BIAS, 0, BIAS_TMA, WIDE, False, MASK == KEYS,
                        )  # fmt: skip
                    if phase == EDGE:
                        s = masked_scores(
                            s, data, mask_strides, b, h, first_place, rows, keys, shape,
                            BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 0, False,
                        )  # fmt: skip
                    logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
                    if IS_FLAT:
                        value = flat_value(step, flat)
                        less = (lse_rows - value) * LOG2E - low_rows
                        p, exponents = probabilities(
                            s * (factor * LOG2E), less, low_rows, logits - value, 0, FEW_KEYS, HAS_SINK, False, False
                        )
                    else:
                        p, exponents = probabilities(
                            s, lse_rows, low_rows, logits, 0, FEW_KEYS, HAS_SINK, BIASED, low_delta is not None
                        )
                    if DBIAS == P_SUM:
                        acc_bias += tl.sum(p if delta is None else p * -d[None, :], 1)
                    weights = p
                    if DROPOUT:
                        kept = is_kept(
                            dropout_key, dropout, b, h, first, first_place, rows, keys,
                            BLOCK_M, BLOCK_N, MASK == KEYS, 0,
                        )  # fmt: skip
                        weights = tl.where(kept, p, 0.0)
                    if DBIAS != P_SUM:
                        g_pieces = load_pieces(
                            dout, dout_strides, shape.batch, at.b_q, h, first, rows, shape.seqlen_q,
                            dims_v, shape.head_dim_v,
                            BLOCK_M, BLOCK_DV, DOUT_TMA, WIDE, True, PAD_DV, PRECISION,
                        )  # fmt: skip
                    if NEED_V:
                        acc_dv = add_product(acc_dv, weights, g_pieces, PRECISION)
                    if NEED_K or (DBIAS != NO_DBIAS and DBIAS != P_SUM) or ONE_PASS:
                        dp = product_of_rows(v_pieces, g_pieces, PRECISION)
                        if DROPOUT:
                            dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)
                        ds, _ = score_gradients(
                            p, exponents, dp, d, g, at.few, 0, FEW_KEYS, SEQUENCES, dentropy is not None
                        )
                        if DBIAS == STORE and INVARIANT:
                            ds = ds + 0.0  # a block that is not visited has no -0 either
                        if DBIAS != NO_DBIAS:
                            acc_bias, acc_last = add_gradient(
                                acc_bias, acc_last, dbias, ds, flat, step, at, b, h, first, first_key,
                                rows, keys, shape, layout, extent,
                                BLOCK_M, BLOCK_N, DBIAS, DBIAS_TMA, SEQUENCES, IS_FLAT, MASK == KEYS,
                            )  # fmt: skip
                        if NEED_K or ONE_PASS:
                            if SOFTCAP:
                                ds = ds * slope
                            if NEED_K:
                                acc_dk = add_product(acc_dk, ds, q_pieces, PRECISION)
                            if ONE_PASS:  # only in 16 bits
                                if is_one_tile:
                                    ds_rows = tl.trans(ds.to(k_pieces[0].dtype))
                                    dq_tile = tl.dot(ds_rows, k_pieces[0], input_precision=PRECISION) * scale
                                    store_dq(dq, dq_tile, at.row_q, rows, h, shape, dims)
            if ONE_PASS:
                if is_one_tile:  # zeros for rows without a key
                    visited = inside + before + after
                    for step in range(0, tl.cdiv(shape.seqlen_q, BLOCK_M) - visited):
                        first = tl.where(step < start - before, step, step + visited) * BLOCK_M
                        nothing = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                        store_dq(dq, nothing, at.row_q, first + tl.arange(0, BLOCK_M), h, shape, dims)
            if DBIAS == STORE and EDGES and MASK != KEYS and SEQUENCES == NO_SEQUENCES:
                if part == 0:
                    visited = inside + before + after
                    if MASK == TILES:
                        blocks = tl.cdiv(shape.seqlen_q, TILE) * (TILE // BLOCK_M)
                    else:
                        blocks = tl.cdiv(shape.seqlen_q, BLOCK_M)
                    nothing = tl.zeros([BLOCK_M, BLOCK_N], dbias.dtype if DBIAS_TMA else dbias.dtype.element_ty)
                    for step in range(0, blocks - visited):
                        if MASK == TILES:  # a list names its empty tiles last
                            first = block_at(visited + step, walk, start, inside, before, False, MASK, BLOCK_M)
                        else:
                            first = tl.where(step < start - before, step, step + visited) * BLOCK_M
                        store_tile(dbias, nothing, b, h, first, first_key, keys, shape, BLOCK_M, BLOCK_N, DBIAS_TMA)
        if PARTS:
            place = (head.to(tl.int64) * grid_tiles + slot) * BLOCK_N + tl.arange(0, BLOCK_N)
            stored_keys = places < count
        else:
            place = (at.row_k + keys) * owners + owner
            stored_keys = key_ok
        if NEED_K:
            stored = stored_keys[:, None] & (dims < shape.head_dim)[None, :]
            rows_k = dk + place[:, None] * shape.head_dim + dims[None, :]
            tl.store(rows_k, (acc_dk * scale).to(dk.dtype.element_ty), mask=stored)
        if NEED_V:
            stored = stored_keys[:, None] & (dims_v < shape.head_dim_v)[None, :]
            if DROPOUT:
                acc_dv = acc_dv * tl.cast(dropout.scale, tl.float32)
            rows_v = dv + place[:, None] * shape.head_dim_v + dims_v[None, :]
            tl.store(rows_v, acc_dv.to(dv.dtype.element_ty), mask=stored)
        if DBIAS == ENDS:
            ends = dbias + (head.to(tl.int64) * grid_tiles + slot) * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(ends, acc_bias)
            tl.store(ends + tl.num_programs(0).to(tl.int64) * BLOCK_N, acc_last)
        if DBIAS == KEY_SUM or DBIAS == P_SUM:
            if PARTS:
                tl.store(dbias + place, acc_bias, mask=stored_keys)
            else:
                if SEQUENCES == NO_SEQUENCES:
                    sums = dbias + (b * owners + owner) * shape.seqlen_k
                elif DBIAS == P_SUM:
                    sums = dbias + (at.b_k * owners + owner) * layout.rows_k + at.first_k
                else:
                    sums = dbias + (b * (1 - layout.bias_keys) * owners + owner) * layout.dbias_keys
                    sums += at.first_k * layout.bias_keys
                tl.store(sums + keys, acc_bias, mask=key_ok)
    elif ONE_PASS:
        if count == 0 and slot == 0:
            dims = tl.arange(0, BLOCK_D)
            nothing = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for member in range(0, members):
                for first in range(0, shape.seqlen_q, BLOCK_M):
                    rows = first + tl.arange(0, BLOCK_M)
                    store_dq(dq, nothing, at.row_q, rows, owner * members + member, shape, dims)
