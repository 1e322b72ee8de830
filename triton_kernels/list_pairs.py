"""p, ds and the gradients of values of attention over lists, for head dims whose rows exceed shared memory.

A program has a tile of members and places. It loops over the head dim, in narrow columns of q, dout and keys.
`list_product.py` and `list_rows.py` multiply the p and ds that it stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import NO_BIAS
from .list_ops import (
    NO_VALUES,
    OF_ENTRIES,
    add_key_bias,
    add_values,
    bias_of_keys,
    keys_at,
    load_keys,
    load_members,
    lse_of_rows,
    members_of,
    members_see,
    row_of_lists,
    slots_at,
    store_value_gradients,
    values_of,
)
from .list_queries import PAIRS
from .scores import exponents_of_rows, load_entropy_gradient, scaled, score_gradients
from .sequences import NO_SEQUENCES


@triton.jit(do_not_specialize=["first_owner", "first_row"])
def list_pairs_kernel(
    q,
    k,
    v,
    entries,
    counts,
    slots,
    values,
    bias,
    dout,
    lse,
    delta,
    dentropy,
    dvalues,
    masses,
    kept_p,
    kept_ds,
    first_owner,
    first_row,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    value_strides,
    bias_strides,
    shape,
    lists,
    chunk,
    score_scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS_EACH: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LATENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    NEED_VALUES: tl.constexpr,
    MASSES: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Compute BLOCK_N places of one part of the members of a row; see `list_queries_kernel` for what is stored.

    A DIM_V of 0 stands for a dout of zeros.
    """
    score_scale = tl.cast(score_scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    start = program % TILES * BLOCK_N
    program = program // TILES
    part = program % PARTS
    program = program // PARTS
    row = first_row + program % chunk
    owner = first_owner + program // chunk
    heads_k = shape.num_heads // GROUP
    if row >= lists.rows or owner >= shape.batch * heads_k:
        return
    b = (owner // heads_k).to(tl.int64)
    h_k = owner % heads_k
    number = row_of_lists(b, h_k, row, lists)
    end = tl.load(counts + number) * KEYS_EACH
    if start >= end:
        return
    rows, h, row_ok = members_of(part, row, h_k, shape, BLOCK_M, GROUP, QUERIES)
    entries += number * lists.most
    slots += number * lists.most
    k += b * k_strides.batch + h_k.to(tl.int64) * k_strides.head
    v += b * v_strides.batch + h_k.to(tl.int64) * v_strides.head
    entry, keys, key_ok = keys_at(entries, start, end, row, shape, BLOCK_N, QUERIES, KEYS_EACH, LEFT, RIGHT)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for column in tl.range(0, DIM, COLUMNS, num_stages=STAGES):
        dims = column + tl.arange(0, COLUMNS)
        q_tile = load_members(q, q_strides, b, rows, h, row_ok, dims, DIM, DIM % COLUMNS != 0)
        k_tile = load_keys(k, k_strides.row, keys, key_ok, dims, DIM, DIM % COLUMNS != 0, WIDE, KEYS_EACH)
        s = tl.dot(q_tile, tl.trans(k_tile), s, input_precision=PRECISION)
        if LATENT:
            g_tile = load_members(dout, dout_strides, b, rows, h, row_ok, dims, DIM_V, DIM != DIM_V)
            dp = tl.dot(g_tile, tl.trans(k_tile), dp, input_precision=PRECISION)
    if not LATENT:
        for column in tl.range(0, DIM_V, COLUMNS, num_stages=STAGES):
            dims = column + tl.arange(0, COLUMNS)
            g_tile = load_members(dout, dout_strides, b, rows, h, row_ok, dims, DIM_V, DIM_V % COLUMNS != 0)
            v_tile = load_keys(v, v_strides.row, keys, key_ok, dims, DIM_V, DIM_V % COLUMNS != 0, WIDE, KEYS_EACH)
            dp = tl.dot(g_tile, tl.trans(v_tile), dp, input_precision=PRECISION)

    BIASED: tl.constexpr = VALUES != NO_VALUES or BIAS != NO_BIAS
    s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
    slot = entry
    if VALUES != NO_VALUES:
        value_head = values_of(values, value_strides, b, h_k, row, rows, h, GROUP, VALUES)
        slot = slots_at(slots, entry, key_ok, SLOTS, BLOCK_N, KEYS_EACH)
        s = add_values(s, factor, value_head, value_strides.key, slot, key_ok, row_ok, VALUES, BLOCK_N, KEYS_EACH)
        factor = 1.0
    bias_head = bias_of_keys(bias, bias_strides, b, h_k, h, GROUP, BIAS)
    s = add_key_bias(s, factor, bias_head, bias_strides.key, keys, key_ok, row_ok, BIAS)
    s = members_see(s, rows, keys, key_ok, shape, QUERIES, LEFT, RIGHT)
    statistics = (b * shape.num_heads + h) * shape.seqlen_q + rows
    lse_rows, low_rows = lse_of_rows(tl.load(lse + statistics, mask=row_ok, other=float("-inf")), BIASED)
    d = tl.load(delta + statistics, mask=row_ok, other=0.0)
    g = load_entropy_gradient(dentropy, statistics, row_ok)
    exponents = exponents_of_rows(s, lse_rows, low_rows, 1, BIASED, lse.dtype.element_ty == tl.float64)
    p = tl.math.exp2(exponents)
    ds, _ = score_gradients(p, exponents, dp, d, g, False, 1, False, NO_SEQUENCES, dentropy is not None)
    if NEED_VALUES:
        tl.static_assert(KEYS_EACH <= BLOCK_N, "an entry has its places in one program")
        if VALUES == OF_ENTRIES and not MASSES:
            at_values = dvalues + (
                (part * shape.batch * heads_k + owner).to(tl.int64) * lists.rows + row
            ) * lists.most  # fmt: skip
            store_value_gradients(
                at_values, tl.sum(ds, 0), 0.0, slots, slot, start, end, key_ok, row_ok, 0,
                BLOCK_M, BLOCK_N, KEYS_EACH, SLOTS,
            )  # fmt: skip
        else:
            carried = tl.zeros([BLOCK_M], tl.float32)
            store_value_gradients(
                dvalues + statistics * lists.most, ds, carried, slots, slot, start, end, key_ok, row_ok, 1,
                BLOCK_M, BLOCK_N, KEYS_EACH, SLOTS,
            )  # fmt: skip
            if MASSES:
                store_value_gradients(
                    masses + statistics * lists.most, p, carried, slots, slot, start, end, key_ok, row_ok, 1,
                    BLOCK_M, BLOCK_N, KEYS_EACH, SLOTS,
                )  # fmt: skip
    if SOFTCAP:
        ds = ds * slope
    if KEEP == PAIRS:
        member = part * BLOCK_M + tl.arange(0, BLOCK_M)
        line = program.to(tl.int64) * (GROUP * QUERIES) + member
        pitch, place = lists.most * KEYS_EACH, start + tl.arange(0, BLOCK_N)
        at = (line * pitch)[:, None] + place[None, :]
        # Zeros where there is no key, because later kernels do not mask.
        inside = (member < GROUP * QUERIES)[:, None] & (place < pitch)[None, :]
        tl.store(kept_p + at, p.to(kept_p.dtype.element_ty), mask=inside)
        tl.store(kept_ds + at, ds.to(kept_ds.dtype.element_ty), mask=inside)
