"""The forward kernel of attention over lists: out and lse of the members of one row of lists.

It loops over the list as `forward.py` loops over blocks of keys, with the same formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import KEY_BIAS, NO_BIAS
from .list_ops import (
    NO_VALUES,
    add_key_bias,
    add_values,
    bias_of_keys,
    dot_rows,
    keys_at,
    load_keys,
    load_members,
    members_of,
    members_see,
    row_of_lists,
    slots_at,
    values_of,
)
from .scores import add_spread, entropy_of, entropy_with_sink, exp_of, largest_of, log_sums, scaled
from .tile_ops import LOWEST, join_sink, store_lse


@triton.jit
def list_forward_kernel(
    q,
    k,
    v,
    entries,
    counts,
    slots,
    values,
    bias,
    sink,
    out,
    lse,
    largest,
    entropy,
    q_strides,
    k_strides,
    v_strides,
    value_strides,
    bias_strides,
    shape,
    lists,
    score_scale,
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
    SHARES: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_SINK: tl.constexpr,
    LATENT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one part of the members of a row; out (B, Lq, Hq, Dv) and lse (B, Hq, Lq) are contiguous.

    With SHARES above 1 a program has one split of the list. out and lse then have a first dim of splits, which
    `combine_kernel` combines. `largest` and `entropy` are like lse, and None if not needed.

    Head dims have BLOCK_D columns and REST more. With LATENT the values of keys are their first BLOCK_D columns.

    All rows of a key-value head are consecutive programs, so that its k and v stay in L2.
    """
    score_scale = tl.cast(score_scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    program = tl.program_id(0)
    part = program % PARTS
    program = program // PARTS
    share = program % SHARES
    program = program // SHARES
    row = lists.rows - 1 - program % lists.rows  # under a causal band the longest lists start first
    owner = program // lists.rows
    heads_k = shape.num_heads // GROUP
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
    k += b * k_strides.batch + h_k.to(tl.int64) * k_strides.head
    v += b * v_strides.batch + h_k.to(tl.int64) * v_strides.head
    number = row_of_lists(b, h_k, row, lists)
    entries += number * lists.most
    slots += number * lists.most
    end = tl.load(counts + number) * KEYS_EACH
    begin = 0
    if SHARES > 1:
        each = tl.cdiv(tl.cdiv(end, BLOCK_N), SHARES) * BLOCK_N
        begin = share * each
        end = tl.minimum(end, begin + each)
        out += share.to(tl.int64) * (shape.batch * shape.seqlen_q) * (shape.num_heads * shape.head_dim_v)
        before = share.to(tl.int64) * (shape.batch * shape.seqlen_q) * shape.num_heads
        lse += before
        if largest is not None:
            largest += before
        if entropy is not None:
            entropy += before
    value_head = values_of(values, value_strides, b, h_k, row, rows, h, GROUP, VALUES)
    bias_head = bias_of_keys(bias, bias_strides, b, h_k, h, GROUP, BIAS)

    BIASED: tl.constexpr = VALUES != NO_VALUES or BIAS != NO_BIAS
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    acc_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        entry, keys, key_ok = keys_at(entries, start, end, row, shape, BLOCK_N, QUERIES, KEYS_EACH, LEFT, RIGHT)
        k_tile = load_keys(k, k_strides.row, keys, key_ok, dims, shape.head_dim, PAD_D and REST == 0, WIDE, KEYS_EACH)
        k_rest = k_tile
        if REST > 0:
            k_rest = load_keys(k, k_strides.row, keys, key_ok, dims_rest, shape.head_dim, PAD_D, WIDE, KEYS_EACH)
        s = dot_rows(q_tile, q_rest, k_tile, k_rest, REST, PRECISION)
        s, factor, _slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
        if VALUES != NO_VALUES:
            slot = slots_at(slots, entry, key_ok, SLOTS, BLOCK_N, KEYS_EACH)
            s = add_values(s, factor, value_head, value_strides.key, slot, key_ok, row_ok, VALUES, BLOCK_N, KEYS_EACH)
            factor = 1.0
        s = add_key_bias(s, factor, bias_head, bias_strides.key, keys, key_ok, row_ok, BIAS)
        s = members_see(s, rows, keys, key_ok, shape, QUERIES, LEFT, RIGHT)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        exponent = s - new_max[:, None]
        p = exp_of(exponent, BIASED)
        rescale = exp_of(row_max - new_max, BIASED)
        if entropy is not None:
            spread = add_spread(spread, row_sum, row_max - new_max, rescale, p, exponent)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc_o = acc_o * rescale[:, None]
        if LATENT:
            v_tile = k_tile
        else:
            v_tile = load_keys(v, v_strides.row, keys, key_ok, dims_v, shape.head_dim_v, PAD_DV, WIDE, KEYS_EACH)
        acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o, input_precision=PRECISION)
        row_max = new_max

    ADDED: tl.constexpr = KEY_BIAS if BIASED else NO_BIAS
    great, small, total = log_sums(row_max, row_sum, 0.0, ADDED)
    if entropy is not None:
        own_entropy = entropy_of(row_sum, spread, 0.0, ADDED)
    if HAS_SINK:
        logits = tl.load(sink + h).to(tl.float32)
        great, small, share = join_sink(great, small, logits)
        acc_o = acc_o * share[:, None]
        if entropy is not None:
            own_entropy = entropy_with_sink(own_entropy, great, small, logits, share)
    line = (b * shape.seqlen_q + rows) * shape.num_heads + h
    stored = row_ok[:, None] & (dims_v < shape.head_dim_v)[None, :]
    at = out + line[:, None] * shape.head_dim_v + dims_v[None, :]
    tl.store(at, (acc_o / total[:, None]).to(out.dtype.element_ty), mask=stored)
    own_rows = (b * shape.num_heads + h) * shape.seqlen_q + rows
    if largest is not None:
        tl.store(largest + own_rows, largest_of(row_max, row_sum, 0.0, ADDED), mask=row_ok)
    if entropy is not None:
        tl.store(entropy + own_rows, own_entropy, mask=row_ok)
    store_lse(lse + own_rows, great, small, row_ok)
