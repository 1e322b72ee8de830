"""The query-stationary backward kernel of attention over lists: dq, delta and the gradient of values, of one row.

p = exp(s - lse); ds = p * (dout @ v^T - delta); dq += ds @ k; dvalue = sum of ds over the scores with the value

For dk and dv it also stores the contribution of a row of lists to each of its keys, as rows: see `list_rows.py`. Or it
stores p and ds, and another kernel computes the rows.
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
    dot_rows,
    keys_at,
    load_keys,
    load_members,
    lse_of_rows,
    members_of,
    members_see,
    places_in_rows,
    row_of_lists,
    slots_at,
    store_row,
    store_value_gradients,
    values_of,
)
from .scores import load_entropy_gradient, probabilities, scaled, score_gradients
from .sequences import NO_SEQUENCES

# A program stores for dk and dv: nothing, rows, or p and ds.
NOTHING: tl.constexpr = tl.constexpr(0)
ROWS: tl.constexpr = tl.constexpr(1)
PAIRS: tl.constexpr = tl.constexpr(2)


@triton.jit(do_not_specialize=["first_owner", "first_row"])
def list_queries_kernel(
    q,
    k,
    v,
    entries,
    counts,
    slots,
    values,
    bias,
    sink,
    dout,
    out,
    lse,
    dlse,
    dentropy,
    delta,
    dq,
    dvalues,
    masses,
    words,
    before,
    offsets,
    kept,
    kept_ds,
    first_owner,
    first_row,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    out_strides,
    dlse_strides,
    value_strides,
    bias_strides,
    shape,
    lists,
    chunk,
    score_scale,
    scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS_EACH: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    LATENT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    NEED_Q: tl.constexpr,
    NEED_VALUES: tl.constexpr,
    MASSES: tl.constexpr,
    KEEP: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Compute one part of the members of a row, among `chunk` rows from `first_row` on of owners from `first_owner` on.

    dq (B, Lq, Hq, D) and delta (B, Hq, Lq) are contiguous. dvalues has (PARTS, B, Hk, rows, slots), or (B, Hq, Lq,
    slots) if each member has its values. With MASSES it also has the latter shape, and masses gets the sum of p over
    the keys of each entry, for `true_sums` in `list_calls.py`. Without HAS_DOUT, dout is zeros.
    """
    score_scale = tl.cast(score_scale, tl.float32)
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    part = program % PARTS
    program = program // PARTS
    local = program % chunk
    row = first_row + chunk - 1 - local if KEEP == NOTHING else first_row + local
    owner = first_owner + program // chunk
    heads_k = shape.num_heads // GROUP
    if row >= lists.rows or owner >= shape.batch * heads_k:
        return
    b = (owner // heads_k).to(tl.int64)
    h_k = owner % heads_k
    rows, h, row_ok = members_of(part, row, h_k, shape, BLOCK_M, GROUP, QUERIES)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    dims_rest = BLOCK_D + tl.arange(0, REST if REST > 0 else 1)
    q_tile = load_members(q, q_strides, b, rows, h, row_ok, dims, shape.head_dim, PAD_D and REST == 0)
    q_rest = q_tile
    if REST > 0:
        q_rest = load_members(q, q_strides, b, rows, h, row_ok, dims_rest, shape.head_dim, PAD_D)
    if HAS_DOUT:
        g_tile = load_members(dout, dout_strides, b, rows, h, row_ok, dims_v, shape.head_dim_v, PAD_DV)

    statistics = (b * shape.num_heads + h) * shape.seqlen_q + rows
    natural = tl.load(lse + statistics, mask=row_ok, other=float("-inf"))
    BIASED: tl.constexpr = VALUES != NO_VALUES or BIAS != NO_BIAS
    lse_rows, low_rows = lse_of_rows(natural, BIASED)
    IS_WIDE: tl.constexpr = lse.dtype.element_ty == tl.float64
    logits = 0.0
    if HAS_SINK and FEW_KEYS:
        logits = tl.load(sink + h).to(tl.float32)
    g = load_entropy_gradient(dentropy, statistics, row_ok)
    d = tl.zeros([BLOCK_M], tl.float32)
    if HAS_DOUT and not FEW_KEYS:
        o_tile = load_members(out, out_strides, b, rows, h, row_ok, dims_v, shape.head_dim_v, PAD_DV)
        d = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
    if HAS_DLSE:
        e = dlse + b * dlse_strides[0] + h.to(tl.int64) * dlse_strides[1] + rows.to(tl.int64) * dlse_strides[2]
        d -= tl.where(natural == float("-inf"), 0.0, tl.load(e, mask=row_ok, other=0.0).to(tl.float32))

    k += b * k_strides.batch + h_k.to(tl.int64) * k_strides.head
    v += b * v_strides.batch + h_k.to(tl.int64) * v_strides.head
    number = row_of_lists(b, h_k, row, lists)
    entries += number * lists.most
    slots += number * lists.most
    end = tl.load(counts + number) * KEYS_EACH
    value_head = values_of(values, value_strides, b, h_k, row, rows, h, GROUP, VALUES)
    bias_head = bias_of_keys(bias, bias_strides, b, h_k, h, GROUP, BIAS)
    if VALUES == OF_ENTRIES and not MASSES:
        owners = shape.batch * heads_k
        dvalues += ((part * owners + owner).to(tl.int64) * lists.rows + row) * lists.most
        carried = 0.0
    else:
        value_rows = dvalues + statistics * lists.most
        mass_rows = masses + statistics * lists.most
        carried = tl.zeros([BLOCK_M], tl.float32)
        carried_mass = tl.zeros([BLOCK_M], tl.float32)

    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_rest = acc_dq
    if REST > 0:
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    for start in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        entry, keys, key_ok = keys_at(entries, start, end, row, shape, BLOCK_N, QUERIES, KEYS_EACH, LEFT, RIGHT)
        if KEEP == ROWS:
            place = places_in_rows(words, before, offsets, owner - first_owner, keys, key_ok, local, shape, WORDS)
        k_tile = load_keys(k, k_strides.row, keys, key_ok, dims, shape.head_dim, PAD_D and REST == 0, WIDE, KEYS_EACH)
        k_rest = k_tile
        if REST > 0:
            k_rest = load_keys(k, k_strides.row, keys, key_ok, dims_rest, shape.head_dim, PAD_D, WIDE, KEYS_EACH)
        s = dot_rows(q_tile, q_rest, k_tile, k_rest, REST, PRECISION)
        s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
        slot = entry
        if VALUES != NO_VALUES:
            slot = slots_at(slots, entry, key_ok, SLOTS, BLOCK_N, KEYS_EACH)
            s = add_values(s, factor, value_head, value_strides.key, slot, key_ok, row_ok, VALUES, BLOCK_N, KEYS_EACH)
            factor = 1.0
        s = add_key_bias(s, factor, bias_head, bias_strides.key, keys, key_ok, row_ok, BIAS)
        s = members_see(s, rows, keys, key_ok, shape, QUERIES, LEFT, RIGHT)
        p, exponents = probabilities(s, lse_rows, low_rows, logits, 1, FEW_KEYS, HAS_SINK, BIASED, IS_WIDE)
        if HAS_DOUT:
            if LATENT:
                v_tile = k_tile
            else:
                v_tile = load_keys(v, v_strides.row, keys, key_ok, dims_v, shape.head_dim_v, PAD_DV, WIDE, KEYS_EACH)
            dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        else:
            dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        ds, d = score_gradients(p, exponents, dp, d, g, False, 1, FEW_KEYS, NO_SEQUENCES, dentropy is not None)
        if NEED_VALUES:
            if VALUES == OF_ENTRIES and not MASSES:
                carried = store_value_gradients(
                    dvalues, tl.sum(ds, 0), carried, slots, slot, start, end, key_ok, row_ok, 0,
                    BLOCK_M, BLOCK_N, KEYS_EACH, SLOTS,
                )  # fmt: skip
            else:
                carried = store_value_gradients(
                    value_rows, ds, carried, slots, slot, start, end, key_ok, row_ok, 1,
                    BLOCK_M, BLOCK_N, KEYS_EACH, SLOTS,
                )  # fmt: skip
                if MASSES:
                    carried_mass = store_value_gradients(
                        mass_rows, p, carried_mass, slots, slot, start, end, key_ok, row_ok, 1,
                        BLOCK_M, BLOCK_N, KEYS_EACH, SLOTS,
                    )  # fmt: skip
        if SOFTCAP:
            ds = ds * slope
        ds_tile = ds.to(k_tile.dtype)
        if KEEP == PAIRS:
            member = part * BLOCK_M + tl.arange(0, BLOCK_M)
            line = program.to(tl.int64) * (GROUP * QUERIES) + member
            pitch, place = lists.most * KEYS_EACH, start + tl.arange(0, BLOCK_N)
            at = (line * pitch)[:, None] + place[None, :]
            # Zeros where there is no key, because later kernels do not mask.
            inside = (member < GROUP * QUERIES)[:, None] & (place < pitch)[None, :]
            tl.store(kept + at, p.to(kept.dtype.element_ty), mask=inside)
            tl.store(kept_ds + at, ds_tile, mask=inside)
        elif KEEP == ROWS:
            p_tile = tl.trans(p.to(k_tile.dtype))
            row_k = tl.dot(tl.trans(ds_tile), q_tile, input_precision=PRECISION) * scale
            at = kept + place * (shape.head_dim + (0 if LATENT else shape.head_dim_v))
            if LATENT:
                row_k = tl.dot(p_tile, g_tile, row_k, input_precision=PRECISION)
            store_row(at, row_k, dims, key_ok, shape.head_dim, PAD_D and REST == 0)
            if REST > 0:
                row_rest = tl.dot(tl.trans(ds_tile), q_rest, input_precision=PRECISION) * scale
                store_row(at, row_rest, dims_rest, key_ok, shape.head_dim, PAD_D)
            if not LATENT:
                row_v = tl.dot(p_tile, g_tile, input_precision=PRECISION)
                store_row(at + shape.head_dim, row_v, dims_v, key_ok, shape.head_dim_v, PAD_DV)
        if NEED_Q:
            acc_dq = tl.dot(ds_tile, k_tile, acc_dq, input_precision=PRECISION)
            if REST > 0:
                acc_rest = tl.dot(ds_tile, k_rest, acc_rest, input_precision=PRECISION)
    tl.store(delta + statistics, d, mask=row_ok)
    if NEED_Q:
        line = ((b * shape.seqlen_q + rows) * shape.num_heads + h) * shape.head_dim
        acc_dq = acc_dq * scale
        inside = row_ok[:, None] & (dims < shape.head_dim)[None, :]
        tl.store(dq + line[:, None] + dims[None, :], acc_dq.to(dq.dtype.element_ty), mask=inside)
        if REST > 0:
            acc_rest = acc_rest * scale
            inside = row_ok[:, None] & (dims_rest < shape.head_dim)[None, :]
            tl.store(dq + line[:, None] + dims_rest[None, :], acc_rest.to(dq.dtype.element_ty), mask=inside)
