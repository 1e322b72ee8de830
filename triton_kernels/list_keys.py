"""The key-stationary backward kernel of attention over lists: dk and dv of a block of keys by its inverse list.

The inverse list of a block of keys has the entries of all rows of lists that contain the block, in the order of the
rows. A program has a segment of it, because a block in every list would keep one program busy for long. It stores fp32
sums. `list_segments_kernel` adds the sums of a block, in the order of its segments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import KEY_BIAS, NO_BIAS
from .list_ops import NO_VALUES, OF_ENTRIES, OF_HEADS, lse_of_rows
from .scores import exponents_of_rows, load_entropy_gradient, scaled, score_gradients
from .sequences import NO_SEQUENCES
from .tile_ops import entry_of, in_band, shared_head


@triton.jit(do_not_specialize=["first_owner"])
def list_keys_kernel(
    q,
    k,
    v,
    slots,
    values,
    bias,
    dout,
    lse,
    delta,
    dentropy,
    inverse,
    offsets,
    segments,
    parts_k,
    parts_v,
    first_owner,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    value_strides,
    bias_strides,
    shape,
    lists,
    blocks,
    most_segments,
    cut,
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
    MOST: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    WIDE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dk and dv of one segment of an owner, a key-value head of an entry; owners begin with `first_owner`.

    inverse (lists, rows * most) has the sorted entries, offsets (lists, blocks + 1) the first entry of each block, and
    segments (lists, blocks + 1) its first segment. A segment has `cut` entries; the last one of a block may be shorter.
    parts are (owners, most_segments, KEYS_EACH, head dim) in fp32, contiguous.
    """
    score_scale = tl.cast(score_scale, tl.float32)
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    segment = tl.program_id(0) % most_segments
    local = tl.program_id(0) // most_segments
    owner = first_owner + local
    heads_k = shape.num_heads // GROUP
    if owner >= shape.batch * heads_k:
        return
    b = (owner // heads_k).to(tl.int64)
    h_k = owner % heads_k
    first_row = entry_of(b, lists) * lists.batch + h_k.to(tl.int64) * lists.head
    head_of_lists = first_row // lists.rows
    segments += head_of_lists * (blocks + 1)
    if segment >= tl.load(segments + blocks):
        return
    low = 0
    high = blocks
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(segments + middle) > segment
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle, high)
    offsets += head_of_lists * (blocks + 1) + low
    MEMBERS: tl.constexpr = GROUP * QUERIES
    begin = tl.load(offsets) + (segment - tl.load(segments + low)) * cut
    end = tl.minimum(begin + cut, tl.load(offsets + 1))
    inverse += head_of_lists * lists.rows * lists.most
    slots += first_row * lists.most

    inside = tl.arange(0, BLOCK_N)
    keys = low * KEYS_EACH + inside
    key_ok = keys < shape.seqlen_k
    if KEYS_EACH < BLOCK_N:
        key_ok = key_ok & (inside < KEYS_EACH)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    dims_rest = BLOCK_D + tl.arange(0, REST if REST > 0 else 1)
    k_rows = k + b * k_strides.batch + h_k.to(tl.int64) * k_strides.head + keys.to(tl.int64) * k_strides.row
    v_rows = v + b * v_strides.batch + h_k.to(tl.int64) * v_strides.head + keys.to(tl.int64) * v_strides.row
    ok_d = (dims < shape.head_dim)[None, :]
    ok_dv = (dims_v < shape.head_dim_v)[None, :]
    ok_rest = (dims_rest < shape.head_dim)[None, :]
    k_tile = tl.load(k_rows[:, None] + dims[None, :], mask=key_ok[:, None] & ok_d, other=0.0)
    v_tile = tl.load(v_rows[:, None] + dims_v[None, :], mask=key_ok[:, None] & ok_dv, other=0.0)
    k_rest = k_tile
    if REST > 0:
        k_rest = tl.load(k_rows[:, None] + dims_rest[None, :], mask=key_ok[:, None] & ok_rest, other=0.0)
    if BIAS == KEY_BIAS:
        bias_head = shared_head(bias, bias_strides, b, h_k * GROUP)
        key_bias = tl.load(bias_head + keys.to(tl.int64) * bias_strides.key, mask=key_ok, other=0.0).to(tl.float32)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    acc_rest = acc_k
    if REST > 0:
        acc_rest = tl.zeros([BLOCK_N, REST], tl.float32)
    members = tl.arange(0, BLOCK_M)
    q += b * q_strides.batch
    dout += b * dout_strides.batch
    lse += b * shape.num_heads * shape.seqlen_q
    delta += b * shape.num_heads * shape.seqlen_q
    if dentropy is not None:
        dentropy += b * shape.num_heads * shape.seqlen_q
    BIASED: tl.constexpr = VALUES != NO_VALUES or BIAS != NO_BIAS
    IS_WIDE: tl.constexpr = lse.dtype.element_ty == tl.float64
    for start in tl.range(0, (end - begin) * MEMBERS, BLOCK_M, num_stages=STAGES):
        place = start + members
        place_ok = place < (end - begin) * MEMBERS
        entry = tl.load(inverse + begin + place // MEMBERS, mask=place_ok, other=0)
        row = (entry // MOST).to(tl.int32)
        member = place % MEMBERS
        rows = row * QUERIES + member // GROUP
        h = h_k * GROUP + member % GROUP
        row_ok = place_ok
        if QUERIES > 1:
            row_ok = row_ok & (rows < shape.seqlen_q)
        if WIDE_ROWS:
            h, rows = h.to(tl.int64), rows.to(tl.int64)
        at_q = q + (h * q_strides.head + rows * q_strides.row)
        if PAD_D and REST == 0:
            q_tile = tl.load(at_q[:, None] + dims[None, :], mask=row_ok[:, None] & ok_d, other=0.0)
        else:
            q_tile = tl.load(at_q[:, None] + dims[None, :], mask=row_ok[:, None], other=0.0)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        q_rest = q_tile
        if REST > 0:
            q_rest = tl.load(at_q[:, None] + dims_rest[None, :], mask=row_ok[:, None] & ok_rest, other=0.0)
            s = tl.dot(k_rest, tl.trans(q_rest), s, input_precision=PRECISION)
        s, factor, slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
        if VALUES != NO_VALUES:
            slot = (entry % MOST).to(tl.int32)
            if SLOTS:
                slot = tl.load(slots + entry, mask=row_ok, other=0)
            at_value = rows
            if VALUES == OF_ENTRIES or VALUES == OF_HEADS:
                at_value = row
            head = shared_head(values, value_strides, b, h) + at_value.to(tl.int64) * value_strides.row
            value = tl.load(head + slot * value_strides.key, mask=row_ok, other=0.0)
            s = tl.fma(s, factor, value.to(tl.float32)[None, :])
            factor = 1.0
        if BIAS == KEY_BIAS:
            s = tl.fma(s, factor, key_bias[:, None])
        elif BIAS != NO_BIAS:
            at_bias = shared_head(bias, bias_strides, b, h)[None, :] + (keys.to(tl.int64) * bias_strides.key)[:, None]
            tile = tl.load(at_bias, mask=row_ok[None, :] & key_ok[:, None], other=0.0)
            s = tl.fma(s, factor, tile.to(tl.float32))
        elif VALUES == NO_VALUES:
            s = s * factor
        if LEFT or RIGHT:
            allowed = in_band(rows[None, :], keys[:, None], shape, LEFT, RIGHT)
        else:
            allowed = key_ok[:, None]
        statistics = h * shape.seqlen_q + rows
        natural = tl.load(lse + statistics, mask=row_ok, other=float("-inf"))  # p is 0 without a row
        lse_rows, low_rows = lse_of_rows(natural, BIASED)
        d = tl.load(delta + statistics, mask=row_ok, other=0.0)
        g = load_entropy_gradient(dentropy, statistics, row_ok)
        exponents = exponents_of_rows(s, lse_rows, low_rows, 0, BIASED, IS_WIDE)
        p = tl.where(allowed, tl.math.exp2(exponents), 0.0)
        at_g = dout + (h * dout_strides.head + rows * dout_strides.row)
        if PAD_DV:
            g_tile = tl.load(at_g[:, None] + dims_v[None, :], mask=row_ok[:, None] & ok_dv, other=0.0)
        else:
            g_tile = tl.load(at_g[:, None] + dims_v[None, :], mask=row_ok[:, None], other=0.0)
        acc_v = tl.dot(p.to(g_tile.dtype), g_tile, acc_v, input_precision=PRECISION)
        dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
        ds, _ = score_gradients(p, exponents, dp, d, g, False, 0, False, NO_SEQUENCES, dentropy is not None)
        if SOFTCAP:
            ds = ds * slope
        ds_tile = ds.to(q_tile.dtype)
        acc_k = tl.dot(ds_tile, q_tile, acc_k, input_precision=PRECISION)
        if REST > 0:
            acc_rest = tl.dot(ds_tile, q_rest, acc_rest, input_precision=PRECISION)
    line = (local.to(tl.int64) * most_segments + segment) * KEYS_EACH + inside
    stored = (inside < KEYS_EACH)[:, None]
    at_k = parts_k + (line * shape.head_dim)[:, None]
    tl.store(at_k + dims[None, :], acc_k * scale, mask=stored & ok_d)
    if REST > 0:
        tl.store(at_k + dims_rest[None, :], acc_rest * scale, mask=stored & ok_rest)
    tl.store(parts_v + (line * shape.head_dim_v)[:, None] + dims_v[None, :], acc_v, mask=stored & ok_dv)


@triton.jit(do_not_specialize=["first_owner"])
def list_segments_kernel(
    parts,
    segments,
    sums,
    first_owner,
    shape,
    lists,
    blocks,
    most_segments,
    heads_k,
    DIM: tl.constexpr,
    KEYS_EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Add the segments of a block of keys, BLOCK of its values; sums (B, Lk, Hk, DIM) is contiguous."""
    tile = tl.program_id(0) % TILES
    program = tl.program_id(0) // TILES
    block = program % blocks
    local = program // blocks
    owner = first_owner + local
    if owner >= shape.batch * heads_k:
        return
    b = (owner // heads_k).to(tl.int64)
    h_k = owner % heads_k
    head_of_lists = (entry_of(b, lists) * lists.batch + h_k.to(tl.int64) * lists.head) // lists.rows
    segments += head_of_lists * (blocks + 1) + block
    value = tile * BLOCK + tl.arange(0, BLOCK)
    keys = block * KEYS_EACH + value // DIM
    inside = (value < KEYS_EACH * DIM) & (keys < shape.seqlen_k)
    acc = tl.zeros([BLOCK], tl.float32)
    for segment in range(tl.load(segments), tl.load(segments + 1)):
        at = (local.to(tl.int64) * most_segments + segment) * (KEYS_EACH * DIM) + value
        acc += tl.load(parts + at, mask=inside, other=0.0)
    to = ((b * shape.seqlen_k + keys) * heads_k + h_k) * DIM + value % DIM
    tl.store(sums + to, acc.to(sums.dtype.element_ty), mask=inside)
