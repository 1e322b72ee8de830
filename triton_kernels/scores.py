"""Scores of a tile, their bias and mask, and p and ds: device functions that the attention kernels share.

AXIS is the axis of the keys: 1 in a tile of (queries, keys), 0 in one of (keys, queries).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    BANDED,
    CLAMPED,
    DENSE,
    DISTANCES,
    KEY_BIAS,
    LOG2E,
    NO_SEQUENCES,
    ROW_BIAS,
    TILE_BIAS,
    TILES,
    TREE,
    bits_of,
    in_band,
    load_bias,
    load_bools,
    load_rows_of_heads,
    load_vector,
    renormalize,
    row_values,
    shared_head,
    soft_cap,
)
from .tree_mask import tree_allows


@triton.jit
def scaled(products, score_scale, softcap, SOFTCAP: tl.constexpr, BIASED: tl.constexpr):
    """Return what scores without a bias are multiples of, this factor, and the derivative of their softcap.

    Scores are in base 2. With BIASED they are natural, so that a bias is added as it is: see `add_bias`.
    """
    if SOFTCAP:
        t, slope = soft_cap(products * score_scale)
        if BIASED:
            return t, softcap, slope
        else:
            return t, softcap * LOG2E, slope
    else:
        return products, score_scale, 1.0


@triton.jit
def bias_vector(bias, strides, b, h, keys, shape, BIAS: tl.constexpr, AXIS: tl.constexpr):
    """Prepare a bias for `add_bias`: (pointer to its head, its values of keys that all tiles share if AXIS is 0)."""
    if BIAS > ROW_BIAS and BIAS != TILE_BIAS:
        head = shared_head(bias, strides, b, h)
        if BIAS == KEY_BIAS and AXIS == 0:
            return head, load_vector(head, keys, shape.seqlen_k, strides.key)
        else:
            return head, 0.0
    else:
        return 0, 0.0


@triton.jit
def add_bias(
    x, factor, bias, head, vector, window, strides, b, h, first, first_key, rows, keys, shape, distances,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, AXIS: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, GROUPED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Make a tile of scores out of what `scaled` returned: x * factor plus the bias.

    There is one rounding, the same in every kernel. Next to a bias of 1e9 it is up to 32, and p = exp(s - lse) is right
    because both passes have the same s.

    `vector` is from `bias_vector`, `window` from `values_of_tile`. With GROUPED the rows belong to several heads. With
    GATHERED the keys of the tile are no run.
    """
    if BIAS == TILE_BIAS:
        if GROUPED:
            tile = load_rows_of_heads(bias, strides, b, h, rows, keys, shape)
        else:
            tile = load_bias(bias, strides, b, h, first, first_key, rows, keys, shape, BLOCK_M, BLOCK_N, TMA, WIDE)
        if AXIS == 0:
            tile = tl.trans(tile)
        return tl.fma(x, factor, tile.to(tl.float32))
    elif BIAS == KEY_BIAS:
        if AXIS == 1:
            vector = load_vector(head, keys, shape.seqlen_k, strides.key)
        return tl.fma(x, factor, tl.expand_dims(vector, 1 - AXIS))
    elif BIAS == DISTANCES or BIAS == CLAMPED:
        if GATHERED:
            values = values_at(head, strides, places_of(rows, keys, shape, distances, AXIS), distances, BIAS)
        else:
            values = spread(window, BLOCK_M, BLOCK_N, AXIS)
        return tl.fma(x, factor, values)
    elif BIAS == BANDED:
        line = rows.to(tl.int64) * strides.row
        at, inside = in_values(line, strides.key, rows, keys, shape, distances, AXIS)
        return tl.fma(x, factor, tl.load(head + at, mask=inside, other=0.0).to(tl.float32))
    else:
        return x * factor


@triton.jit
def in_values(line, stride, rows, keys, shape, distances, AXIS: tl.constexpr):
    """Return where the values of a tile lie that has a bias of one per query and distance, and which scores have one.

    `line` says where the values of each query begin, `stride` how far they lie apart.
    """
    places = places_of(rows, keys, shape, distances, AXIS)
    inside = (places >= 0) & (places < distances.number)
    inside &= tl.expand_dims(rows < shape.seqlen_q, AXIS) & tl.expand_dims(keys < shape.seqlen_k, 1 - AXIS)
    return tl.expand_dims(line, AXIS) + places * stride, inside


@triton.jit
def spread(window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AXIS: tl.constexpr):
    """Make the tile of a window of values: every score gets the value of its distance.

    It goes through shared memory and into the layout of the scores. A tile of loads would take another layout, the
    registers of its addresses, and shared memory of its own size.
    """
    steps = tl.expand_dims(tl.arange(0, BLOCK_N), 1 - AXIS) - tl.expand_dims(tl.arange(0, BLOCK_M), AXIS)
    places = tl.reshape(steps + (BLOCK_M - 1), (BLOCK_M * BLOCK_N,))
    return tl.reshape(tl.gather(window, places, 0), steps.shape)


@triton.jit
def values_at(head, strides, places, distances, BIAS: tl.constexpr):
    """Load the values at places of a bias by distance; places beyond them get its ends, or 0."""
    inside = tl.minimum(tl.maximum(places, 0), distances.number - 1)
    values = tl.load(head + inside * strides.key).to(tl.float32)
    if BIAS == DISTANCES:
        values = tl.where(inside == places, values, 0.0)
    return values


@triton.jit
def values_of_tile(
    head, strides, first, first_key, shape, distances,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Load the values of a bias by distance for a tile: value t is for key - query = t - (BLOCK_M - 1) from its corner.

    Loaded before the products of the tile, they have arrived when `add_bias` needs them. Zero for other biases.
    """
    if (BIAS == DISTANCES or BIAS == CLAMPED) and not GATHERED:
        corner = distances.zero + first_key - first - (shape.seqlen_k - shape.seqlen_q)
        places = corner - (BLOCK_M - 1) + tl.arange(0, triton.next_power_of_2(BLOCK_M + BLOCK_N))
        return values_at(head, strides, places, distances, BIAS)
    else:
        return 0


@triton.jit
def end_values(head, strides, distances, BIAS: tl.constexpr):
    """Return what scores before and beyond the values of a bias by distance get."""
    if BIAS == CLAMPED:
        last = tl.load(head + (distances.number - 1) * strides.key)
        return tl.load(head).to(tl.float32), last.to(tl.float32)
    else:
        return 0.0, 0.0


@triton.jit
def near_blocks(
    first, start, inside, before_values, beyond_values, shape, distances,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Count the blocks of a run that a bias by distance has values for: (blocks before these, these).

    All scores of another block are beyond one end of the values. The run has `inside` blocks from block `start` on: of
    keys, beside a tile whose first query is `first`, or with AXIS 0 of queries, beside a first key.

    Loops over other blocks take the value of their end from the maximum or lse of a row, and never round its sum with
    a score. Beside a great end, from `end_values`, that would be another score than in a pass whose blocks lie
    otherwise, so all blocks then count.
    """
    zero = distances.zero - (shape.seqlen_k - shape.seqlen_q)
    if AXIS == 1:
        low = first - zero - (BLOCK_N - 1)
        high = first - zero + distances.number + (BLOCK_M - 1)
        BLOCK: tl.constexpr = BLOCK_N
    else:
        low = first + zero - distances.number - (BLOCK_M - 2)
        high = first + zero + BLOCK_N
        BLOCK: tl.constexpr = BLOCK_M
    if BIAS == CLAMPED:  # what is at an end gets the same as what is beyond
        low += 1
        high -= 1
    begin = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(low, 0), BLOCK), start), start + inside)
    end = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(high, 0), BLOCK), begin), start + inside)
    if BIAS == CLAMPED:
        great = is_great(before_values) | is_great(beyond_values)
        begin = tl.where(great, start, begin)
        end = tl.where(great, start + inside, end)
    return (begin - start).to(tl.int32), (end - begin).to(tl.int32)


@triton.jit
def is_great(value):
    """Return whether the sum of a finite value and a score may be rounded by more than 1e-5."""
    return (tl.abs(value) > 256.0) & (tl.abs(value) < float("inf"))


@triton.jit
def block_by_distance(step, nearest, near, IS_NEAR: tl.constexpr):
    """Return the block of a run at a step of the blocks with values, or of all others; see `near_blocks`."""
    if IS_NEAR:
        return step + nearest
    else:
        return tl.where(step < nearest, step, step + near)


@triton.jit
def places_of(rows, keys, shape, distances, AXIS: tl.constexpr):
    """Return the place of each score of a tile among the values of a bias by distance."""
    steps = tl.expand_dims(keys, 1 - AXIS) - tl.expand_dims(rows, AXIS)
    return steps + (distances.zero - (shape.seqlen_k - shape.seqlen_q))


@triton.jit
def masked_scores(
    s, data, strides, b, h, first_key, rows, keys, shape,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    AXIS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Set scores of a tile to -inf where its mask or its band leaves them out.

    With GROUPED the rows belong to several heads, and `data` points to the first head of the mask.
    """
    if MASK == TILES:
        allowed = bits_of(data, first_key, rows, shape.seqlen_q, strides.row, BLOCK_M, BLOCK_N, AXIS)
    else:
        allowed = in_band(tl.expand_dims(rows, AXIS), tl.expand_dims(keys, 1 - AXIS), shape, LEFT, RIGHT)
        if MASK == DENSE and GROUPED:
            allowed &= load_rows_of_heads(data, strides, b, h, rows, keys, shape) != 0
        elif MASK == DENSE:
            allowed &= load_bools(data, strides, tl.expand_dims(rows, AXIS), tl.expand_dims(keys, 1 - AXIS), shape)
        elif MASK == TREE:
            allowed &= tree_allows(data, first_key, rows, keys, strides.row, shape, BLOCK_N)
    return tl.where(allowed, s, float("-inf"))


@triton.jit
def exp_of(difference, BIASED: tl.constexpr):
    """Compute exp of a difference of scores, which are in base 2, or if BIASED natural."""
    return tl.math.exp2(difference * LOG2E if BIASED else difference)


@triton.jit
def exp_of_rows(s, lse_rows, low_rows, AXIS: tl.constexpr, BIASED: tl.constexpr, HAS_LOW: tl.constexpr):
    """Compute exp of scores less lse of their rows, both in base 2, or if BIASED natural.

    If BIASED, great numbers are subtracted first, which is exact where they are nearly equal. Then `low_rows`, in base
    2, is added: minus what lse has below the steps of fp32. With HAS_LOW the forward pass has told it, and has rounded
    its scores as this kernel does, so that p is at most 1 but for the last bits. Another backend may round otherwise:
    near 1e30 to a number 1e23 away. So the exponent is cut at 0.
    """
    exponent = s - tl.expand_dims(lse_rows, AXIS)
    if BIASED:
        low_rows = tl.expand_dims(low_rows, AXIS)
        if HAS_LOW:
            exponent = tl.fma(exponent, LOG2E, low_rows)
        else:
            exponent = tl.minimum(exponent * LOG2E, 0.0, propagate_nan=tl.PropagateNan.ALL) + low_rows
    return tl.math.exp2(exponent)


@triton.jit
def row_totals(p, lse_rows, low_rows, logits, AXIS: tl.constexpr, HAS_SINK: tl.constexpr, BIASED: tl.constexpr):
    """Sum p over all keys of each row, which this tile holds, and add the sink, whose logits are from `sink_logits`.

    The sum is 1 but for the rounding of lse, which matters where lse is large; of an empty row it is 0.
    """
    total = tl.sum(p, AXIS)
    if HAS_SINK:
        if BIASED:
            total += tl.math.exp2((logits - lse_rows) * LOG2E + low_rows)
        else:
            total += tl.math.exp2(logits * LOG2E - lse_rows)
    return total


@triton.jit
def probabilities(
    s, lse_rows, low_rows, logits, AXIS: tl.constexpr,
    FEW_KEYS: tl.constexpr, HAS_SINK: tl.constexpr, BIASED: tl.constexpr, HAS_LOW: tl.constexpr,
):  # fmt: skip
    """Compute p of a tile of scores; with FEW_KEYS the tile has all keys of a row, and p is normalised again.

    `lse_rows` of an empty row is inf.
    """
    p = exp_of_rows(s, lse_rows, low_rows, AXIS, BIASED, HAS_LOW)
    if FEW_KEYS:
        p = renormalize(p, row_totals(p, lse_rows, low_rows, logits, AXIS, HAS_SINK, BIASED), AXIS)
    return p


@triton.jit
def sink_logits(sink, bias, strides, b, h, rows, shape, BIAS: tl.constexpr, HAS_SINK: tl.constexpr):
    """Load the sink of a head less a bias of one value per query, as lse of backward kernels is; 0 without a sink."""
    if HAS_SINK:
        return tl.load(sink + h).to(tl.float32) - row_values(bias, strides, b, h, rows, shape, BIAS)
    else:
        return 0.0


@triton.jit
def score_gradients(p, dp, d, few, AXIS: tl.constexpr, FEW_KEYS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Compute ds = p * (dp - delta), and return delta as the second result.

    With FEW_KEYS, or with `few` for one sequence, the tile has all keys, and delta gets the sum of p * dp here.
    """
    if FEW_KEYS:
        d += tl.sum(p * dp, AXIS)
    elif SEQUENCES != NO_SEQUENCES:
        if few:  # a branch: the sum costs each step a tenth of its time
            d += tl.sum(p * dp, AXIS)
    return p * (dp - tl.expand_dims(d, AXIS)), d
