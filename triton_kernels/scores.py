"""Scores of a tile, their bias and mask, and p and ds: device functions that the attention kernels share.

AXIS is the axis of the keys: 1 in a tile of (queries, keys), 0 in one of (keys, queries).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    CLAMPED,
    DENSE,
    DISTANCES,
    KEY_BIAS,
    LOG2E,
    NO_BIAS,
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
    row_totals,
    shared_head,
    soft_cap,
)
from .tree_mask import tree_allows


@triton.jit
def scaled(products, scale_log2, softcap, SOFTCAP: tl.constexpr):
    """Turn products of q and k into scores in base 2; the second result is the derivative of their softcap."""
    if SOFTCAP:
        t, slope = soft_cap(products * scale_log2)
        return t * (softcap * LOG2E), slope
    else:
        return products * scale_log2, 1.0


@triton.jit
def bias_vector(bias, strides, b, h, places, shape, BIAS: tl.constexpr, AXIS: tl.constexpr):
    """Prepare a bias of one value per query or key for `add_bias`: (pointer to its head, values that all tiles share).

    `places` are the rows of the tile if AXIS is 1, else its keys.
    """
    if BIAS != NO_BIAS and BIAS != TILE_BIAS:
        head = shared_head(bias, strides, b, h)
        if BIAS == ROW_BIAS and AXIS == 1:
            return head, load_vector(head, places, shape.seqlen_q, strides.row) * LOG2E
        elif BIAS == KEY_BIAS and AXIS == 0:
            return head, load_vector(head, places, shape.seqlen_k, strides.key) * LOG2E
        else:
            return head, 0.0
    else:
        return 0, 0.0


@triton.jit
def add_bias(
    s, bias, head, vector, strides, b, h, first, first_key, rows, keys, shape, distances,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, AXIS: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, GROUPED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Add the bias to a tile of scores, in base 2.

    With GROUPED the rows belong to several heads. With GATHERED the keys of the tile are no run.
    """
    if BIAS == TILE_BIAS:
        if GROUPED:
            tile = load_rows_of_heads(bias, strides, b, h, rows, keys, shape)
        else:
            tile = load_bias(bias, strides, b, h, first, first_key, rows, keys, shape, BLOCK_M, BLOCK_N, TMA, WIDE)
        if AXIS == 0:
            tile = tl.trans(tile)
        s += tile.to(tl.float32) * LOG2E
    elif BIAS == KEY_BIAS:
        if AXIS == 1:
            vector = load_vector(head, keys, shape.seqlen_k, strides.key) * LOG2E
        s += tl.expand_dims(vector, 1 - AXIS)
    elif BIAS == ROW_BIAS:
        if AXIS == 0:
            vector = load_vector(head, rows, shape.seqlen_q, strides.row) * LOG2E
        s += tl.expand_dims(vector, AXIS)
    elif BIAS == DISTANCES or BIAS == CLAMPED:
        s = add_distances(
            s, head, strides, first, first_key, rows, keys, shape, distances, BLOCK_M, BLOCK_N, BIAS, AXIS, GATHERED
        )
    return s


@triton.jit
def add_distances(
    s, head, strides, first, first_key, rows, keys, shape, distances,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, AXIS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Add a bias by distance; a run of keys beyond its values has one number, or none."""
    is_before, is_beyond = ends_of(first, first_key, shape, distances, BLOCK_M, BLOCK_N, BIAS == CLAMPED, GATHERED)
    if is_before | is_beyond:
        if BIAS == CLAMPED:
            value = tl.load(head + tl.where(is_before, 0, distances.number - 1) * strides.key)
            s += value.to(tl.float32) * LOG2E
    else:
        place = places_of(rows, keys, shape, distances, AXIS)
        inside = tl.minimum(tl.maximum(place, 0), distances.number - 1)
        tile = tl.load(head + inside * strides.key).to(tl.float32)
        if BIAS == DISTANCES:
            tile = tl.where(inside == place, tile, 0.0)
        s += tile * LOG2E
    return s


@triton.jit
def ends_of(
    first, first_key, shape, distances,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLAMPS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Tell whether all scores of a tile are at the first value or before it, and whether all are at the last or beyond.

    If the bias does not clamp, those at the first and the last value are neither.
    """
    if GATHERED:
        return False, False
    else:
        least = distances.zero + first_key - first - (shape.seqlen_k - shape.seqlen_q) - (BLOCK_M - 1)
        most = least + (BLOCK_M - 1) + (BLOCK_N - 1)
        if CLAMPS:
            return most <= 0, least >= distances.number - 1
        else:
            return most < 0, least >= distances.number


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
def probabilities(
    s, lse_rows, sink, h, AXIS: tl.constexpr, FEW_KEYS: tl.constexpr, HAS_SINK: tl.constexpr
):  # fmt: skip
    """Compute p of a tile of scores; with FEW_KEYS the tile has all keys of a row, and p is normalised again."""
    p = tl.math.exp2(s - tl.expand_dims(lse_rows, AXIS))
    if FEW_KEYS:
        p = renormalize(p, row_totals(p, sink, h, lse_rows, AXIS, HAS_SINK), AXIS)
    return p


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
