"""The key-stationary backward kernel: dk, dv, and the gradient of a bias of one value per key or per score.

Scores are computed transposed, (keys, queries), so that p and ds feed dv and dk without a transpose::

    p = exp(s - lse);  dv += p @ dout;  ds = p * (v @ dout^T - delta);  dk += ds @ q;  dbias = ds or rowsum(ds)

With dropout, dv is computed from the dropped p, and v @ dout^T is dropped like p; ds is computed from p itself.

With ONE_PASS this kernel also makes dq = ds^T @ k of sequences whose keys fit in one tile: it has all of ds for them,
so that nothing is computed twice.
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
    in_values,
    masked_scores,
    near_blocks,
    places_of,
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
    TILE,
    TILES,
    block_at,
    bounds_of,
    load_low_delta,
    load_tile,
    mask_head,
    queries_of_keys,
    scores_from,
    sequence_at,
    tiles_from,
)

# Which gradient of a bias this kernel makes: none, sums over the queries of each key, or ds of every head. With ENDS it
# sums the scores at either end of the values of a clamped bias by distance, and beyond that end. With BY_QUERY it
# stores ds of the distances that a bias has values for.
NO_DBIAS: tl.constexpr = tl.constexpr(0)
KEY_SUM: tl.constexpr = tl.constexpr(1)
STORE: tl.constexpr = tl.constexpr(2)
ENDS: tl.constexpr = tl.constexpr(3)
BY_QUERY: tl.constexpr = tl.constexpr(4)


@triton.jit
def store_tile(
    dbias, tile, b, h, first, first_key, keys, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr
):
    """Store the (queries, keys) tile of a contiguous (B, Hq, Lq, Lk) gradient."""
    if TMA:
        tile = tile.to(dbias.dtype).reshape(1, 1, BLOCK_M, BLOCK_N)
        dbias.store([b.to(tl.int32), h, first, first_key], tile)
    else:
        rows = first + tl.arange(0, BLOCK_M)
        place = ((b * shape.num_heads + h) * shape.seqlen_q + rows)[:, None] * shape.seqlen_k + keys[None, :]
        inside = (rows < shape.seqlen_q)[:, None] & (keys < shape.seqlen_k)[None, :]
        tl.store(dbias + place, tile.to(dbias.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(dbias, tile, b, h, first_q, rows, keys, shape, layout):
    """Store the tile of one sequence: dbias is (S, Hq, max_q, max_k), or (1, Hq, Tq, max_k) with packed queries."""
    first = (b * (1 - layout.bias_rows) * shape.num_heads + h) * layout.dbias_rows + first_q * layout.bias_rows
    place = (first + rows)[:, None] * layout.dbias_keys + keys[None, :]
    inside = (rows < shape.seqlen_q)[:, None] & (keys < shape.seqlen_k)[None, :]
    tl.store(dbias + place, tile.to(dbias.dtype.element_ty), mask=inside)


@triton.jit
def store_dq(dq, tile, first_row, rows, h, shape, dims):
    """Store rows of a head of one sequence, from `first_row` on, in a contiguous (B, L, Hq, D) gradient."""
    at = dq + ((first_row + rows) * shape.num_heads + h)[:, None] * shape.head_dim + dims[None, :]
    stored = (rows < shape.seqlen_q)[:, None] & (dims < shape.head_dim)[None, :]
    tl.store(at, tile.to(dq.dtype.element_ty), mask=stored)


@triton.jit
def add_ends(
    first_sums, last_sums, ds, first, first_key, rows, keys, shape, distances,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Add ds of a (keys, queries) tile to the sums of the scores at either end of the values, or beyond it."""
    least = distances.zero + first_key - first - (shape.seqlen_k - shape.seqlen_q) - (BLOCK_M - 1)
    if GATHERED or least <= 0:
        place = places_of(rows, keys, shape, distances, 0)
        first_sums += tl.sum(tl.where(place <= 0, ds, 0.0), 1)
    if GATHERED or least + (BLOCK_M - 1) + (BLOCK_N - 1) >= distances.number - 1:
        place = places_of(rows, keys, shape, distances, 0)
        last_sums += tl.sum(tl.where((place > 0) & (place >= distances.number - 1), ds, 0.0), 1)
    return first_sums, last_sums


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
):
    """Compute the gradients of one block of keys of one owner, visiting its queries block by block.

    An owner is a key-value head, or a query head where query heads of a group cannot share their sums.

    dk, dv (B, Lk, Hk, D) and dbias (B, Hq, Lq, Lk) are contiguous. With PARTS, dk and dv are fp32
    (B, owners, grid_tiles, BLOCK_N, D), and dbias under KEY_SUM has the same shape without D. `grid_tiles` programs
    then share the key blocks of an owner, equally many programs to a block, and each takes a share of its queries.
    Under ENDS dbias is fp32 (2, B, owners, grid_tiles, BLOCK_N), under BY_QUERY (B, Hq, Lq, n). The caller zeroes both.

    With SEQUENCES each owner has `grid_tiles` tiles, each with keys of one sequence; `bounds` says where sequences lie.
    dk and dv are shaped as k and v, and the caller zeroes dbias. With ONE_PASS the kernel also writes the rows of dq,
    shaped as q, of all sequences with at most BLOCK_N keys.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    slot = program % grid_tiles
    head = program // grid_tiles
    owner = head % owners
    if SEQUENCES == NO_SEQUENCES:
        b = (head // owners).to(tl.int64)
        b_row = b
        first_row = b * shape.seqlen_k
        row_pitch = shape.seqlen_q
        first_q = 0
        few = False
        is_one_tile = False
        bias_row = 0
    else:
        own, slot = sequence_at(slot, bounds, shape.seqlen_k, layout.number, SEARCH, 2, BLOCK_N)
        first_q, first_k, shape = bounds_of(bounds, own, shape)
        b = own.to(tl.int64)
        b_row = b * (0 if SEQUENCES == PACKED else 1)
        first_row = b_row * layout.rows_k + first_k
        row_pitch = layout.rows_q
        q += first_q.to(tl.int64) * q_strides.row
        dout += first_q.to(tl.int64) * dout_strides.row
        k += first_k.to(tl.int64) * k_strides.row
        v += first_k.to(tl.int64) * v_strides.row
        queries_before = b_row * layout.rows_q + first_q
        if BIAS != NO_BIAS and not BIAS_TMA:
            bias = scores_from(bias, bias_strides, layout.bias_rows, layout.bias_keys, first_q, first_k)
        if MASK == DENSE:
            mask_data = scores_from(mask_data, mask_strides, layout.mask_rows, layout.mask_keys, first_q, first_k)
        if MASK == TILES:
            mask_data, mask_index = tiles_from(mask_data, mask_index, mask_strides, queries_before, first_row, own)
        few = shape.seqlen_k <= layout.few_keys
        is_one_tile = shape.seqlen_k <= BLOCK_N
        bias_row = layout.bias_rows * first_q
    members = shape.num_heads // owners
    h_k = owner * members // shape.group
    data, index = mask_head(mask_data, mask_index, mask_strides, b, owner * members, MASK)
    count = shape.seqlen_k
    if MASK == KEYS:
        count = tl.load(index + shape.seqlen_k)
    tiles_n = tl.maximum(tl.cdiv(count, BLOCK_N), 1)
    tile_n = (
        slot  # in this order the longest programs start first: under a causal band the first keys have most queries
    )
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
        k_tile = load_tile(
            k, k_strides, b_row, h_k, first_key, keys, shape.seqlen_k, dims, shape.head_dim,
            BLOCK_N, BLOCK_D, False, True, True, PAD_D,
        )  # fmt: skip
        v_tile = load_tile(
            v, v_strides, b_row, h_k, first_key, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
            BLOCK_N, BLOCK_DV, False, True, True, PAD_DV,
        )  # fmt: skip
        acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        acc_bias = tl.zeros([BLOCK_N], tl.float32)
        acc_last = tl.zeros([BLOCK_N], tl.float32)
        BIASED: tl.constexpr = BIAS > ROW_BIAS
        for member in range(0, members):
            h = owner * members + member
            statistics = (b_row * shape.num_heads + h) * row_pitch + first_q
            bias_head, key_bias = bias_vector(bias, bias_strides, b, h, keys, shape, BIAS, 0)
            if MASK == TILES or MASK == DENSE:
                data, index = mask_head(mask_data, mask_index, mask_strides, b, h, MASK)
            walk, start, inside, before, after = queries_of_keys(
                first_key, last_key, first_place // TILE, first_place + BLOCK_N <= count, index, mask_strides, shape,
                MASK, LEFT, RIGHT, BLOCK_M,
            )  # fmt: skip
            # Blocks go by the distances that they have values for, as in the forward kernel.
            NEAR: tl.constexpr = (BIAS == DISTANCES or BIAS == CLAMPED or BIAS == BANDED) and MASK == BAND
            near = 0
            if NEAR:
                before_values, beyond_values = end_values(bias_head, bias_strides, distances, BIAS)
                nearest, near = near_blocks(
                    first_key, start, inside, before_values, beyond_values, shape, distances,
                    BLOCK_M, BLOCK_N, BIAS, 0,
                )  # fmt: skip
            for phase in tl.static_range(-1 if NEAR else 0, 2 if EDGES else 1):
                steps = near if phase == -1 else inside - near if phase == 0 else before + after
                begin = 0
                if PARTS:
                    begin = steps * part // parts
                    steps = steps * (part + 1) // parts
                for step in range(begin, steps):
                    IS_FAR: tl.constexpr = NEAR and phase == 0
                    block = step
                    if NEAR and phase != 1:
                        block = block_by_distance(step, nearest, near, phase == -1)
                    first = block_at(block, walk, start, inside, before, phase == 1, MASK, BLOCK_M)
                    if not IS_FAR:
                        window = values_of_tile(
                            bias_head, bias_strides, first, first_key, shape, distances,
                            BLOCK_M, BLOCK_N, BIAS, MASK == KEYS,
                        )  # fmt: skip
                    rows = first + tl.arange(0, BLOCK_M)
                    row_ok = rows < shape.seqlen_q
                    q_tile = load_tile(
                        q, q_strides, b_row, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
                        BLOCK_M, BLOCK_D, TMA, WIDE, True, PAD_D,
                    )  # fmt: skip
                    lse_rows = tl.load(row_lse + statistics + rows, mask=row_ok, other=float("inf"))
                    # delta is loaded early, to have arrived when ds needs it. Pairs take as many loads as delta alone.
                    low_rows, d = load_low_delta(low_delta, delta, statistics + rows, row_ok)
                    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                    s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
                    if not IS_FAR:
                        s = add_bias(
                            s, factor, bias, bias_head, key_bias, window, bias_strides, b, h, first + bias_row,
                            first_key, rows, keys, shape, distances,
                            BLOCK_M, BLOCK_N, BIAS, 0, BIAS_TMA, WIDE, False, MASK == KEYS,
                        )  # fmt: skip
                    if phase == 1:
                        s = masked_scores(
                            s, data, mask_strides, b, h, first_place, rows, keys, shape,
                            BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 0, False,
                        )  # fmt: skip
                    logits = sink_logits(sink, bias, bias_strides, b, h, rows, shape, BIAS, HAS_SINK)
                    if IS_FAR:  # later queries are farther to the right of a key
                        value = tl.where(step < nearest, beyond_values, before_values)
                        less = (lse_rows - value) * LOG2E - low_rows
                        p = probabilities(
                            s * (factor * LOG2E), less, low_rows, logits - value, 0, FEW_KEYS, HAS_SINK, False, False
                        )
                    else:
                        p = probabilities(
                            s, lse_rows, low_rows, logits, 0, FEW_KEYS, HAS_SINK, BIASED, low_delta is not None
                        )
                    weights = p
                    if DROPOUT:
                        kept = is_kept(
                            dropout_key, dropout, b, h, first, first_place, rows, keys,
                            BLOCK_M, BLOCK_N, MASK == KEYS, 0,
                        )  # fmt: skip
                        weights = tl.where(kept, p, 0.0)
                    g_tile = load_tile(
                        dout, dout_strides, b_row, h, first, rows, shape.seqlen_q, dims_v, shape.head_dim_v,
                        BLOCK_M, BLOCK_DV, TMA, WIDE, True, PAD_DV,
                    )  # fmt: skip
                    if NEED_V:
                        acc_dv = tl.dot(weights.to(g_tile.dtype), g_tile, acc_dv, input_precision=PRECISION)
                    if NEED_K or DBIAS != NO_DBIAS or ONE_PASS:
                        dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
                        if DROPOUT:
                            dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)
                        ds, _ = score_gradients(p, dp, d, few, 0, FEW_KEYS, SEQUENCES)
                        if DBIAS == KEY_SUM:
                            acc_bias += tl.sum(ds, 1)
                        elif DBIAS == ENDS and IS_FAR:
                            end = tl.sum(ds, 1)
                            acc_last += tl.where(step < nearest, end, 0.0)
                            acc_bias += tl.where(step < nearest, 0.0, end)
                        elif DBIAS == ENDS:
                            acc_bias, acc_last = add_ends(
                                acc_bias, acc_last, ds, first, first_key, rows, keys, shape, distances,
                                BLOCK_M, BLOCK_N, MASK == KEYS,
                            )  # fmt: skip
                        elif DBIAS == BY_QUERY and not IS_FAR:
                            line = ((b * shape.num_heads + h) * shape.seqlen_q + rows) * distances.number
                            at, has_value = in_values(line, 1, rows, keys, shape, distances, 0)
                            tl.store(dbias + at, ds.to(dbias.dtype.element_ty), mask=has_value)
                        elif DBIAS == STORE:
                            if SEQUENCES == NO_SEQUENCES:
                                store_tile(
                                    dbias, tl.trans(ds), b, h, first, first_key, keys, shape,
                                    BLOCK_M, BLOCK_N, DBIAS_TMA,
                                )  # fmt: skip
                            else:
                                store_rows(dbias, tl.trans(ds), b, h, first_q, rows, keys, shape, layout)
                        if NEED_K or ONE_PASS:
                            if SOFTCAP:
                                ds = ds * slope
                            if NEED_K:
                                acc_dk = tl.dot(ds.to(q_tile.dtype), q_tile, acc_dk, input_precision=PRECISION)
                            if ONE_PASS:
                                if is_one_tile:
                                    ds_rows = tl.trans(ds.to(k_tile.dtype))
                                    dq_tile = tl.dot(ds_rows, k_tile, input_precision=PRECISION) * scale
                                    store_dq(dq, dq_tile, queries_before, rows, h, shape, dims)
            if ONE_PASS:
                if is_one_tile:  # zeros for rows that see no key
                    visited = inside + before + after
                    for step in range(0, tl.cdiv(shape.seqlen_q, BLOCK_M) - visited):
                        first = tl.where(step < start - before, step, step + visited) * BLOCK_M
                        nothing = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                        store_dq(dq, nothing, queries_before, first + tl.arange(0, BLOCK_M), h, shape, dims)
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
            place = (first_row + keys) * owners + owner
            stored_keys = key_ok
        if NEED_K:
            stored = stored_keys[:, None] & (dims < shape.head_dim)[None, :]
            at = dk + place[:, None] * shape.head_dim + dims[None, :]
            tl.store(at, (acc_dk * scale).to(dk.dtype.element_ty), mask=stored)
        if NEED_V:
            stored = stored_keys[:, None] & (dims_v < shape.head_dim_v)[None, :]
            if DROPOUT:
                acc_dv = acc_dv * tl.cast(dropout.scale, tl.float32)
            at = dv + place[:, None] * shape.head_dim_v + dims_v[None, :]
            tl.store(at, acc_dv.to(dv.dtype.element_ty), mask=stored)
        if DBIAS == ENDS:
            at = dbias + (head.to(tl.int64) * grid_tiles + slot) * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(at, acc_bias)
            tl.store(at + tl.num_programs(0).to(tl.int64) * BLOCK_N, acc_last)
        if DBIAS == KEY_SUM:
            if PARTS:
                tl.store(dbias + place, acc_bias, mask=stored_keys)
            else:
                if SEQUENCES == NO_SEQUENCES:
                    sums = dbias + (b * owners + owner) * shape.seqlen_k
                else:
                    sums = dbias + (b * (1 - layout.bias_keys) * owners + owner) * layout.dbias_keys
                    sums += first_k * layout.bias_keys
                tl.store(sums + keys, acc_bias, mask=key_ok)
    elif ONE_PASS:
        if count == 0 and slot == 0:
            dims = tl.arange(0, BLOCK_D)
            nothing = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for member in range(0, members):
                for first in range(0, shape.seqlen_q, BLOCK_M):
                    rows = first + tl.arange(0, BLOCK_M)
                    store_dq(dq, nothing, queries_before, rows, owner * members + member, shape, dims)
