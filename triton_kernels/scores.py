"""Scores of a tile, their bias and mask, and p and ds: device functions that the attention kernels share.

AXIS is the axis of the keys: 1 in a tile of (queries, keys), 0 in one of (keys, queries).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import ROW_BIAS, row_values
from .sequences import NO_SEQUENCES
from .tile_ops import (
    DENSE,
    LEAST_EXPONENT,
    LN2,
    LOG2E,
    TILES,
    TREE,
    bits_of,
    in_band,
    load_bools,
    load_rows_of_heads,
    renormalize,
    soft_cap,
)
from .tree_mask import tree_allows


@triton.jit
def scaled(products, score_scale, softcap, SOFTCAP: tl.constexpr, BIASED: tl.constexpr):
    """Return x and factor, whose product are the scores without a bias, and the derivative of their softcap.

    Scores are in base 2. With BIASED they are natural, so that a bias is added without a factor: see `add_bias`.
    """
    if SOFTCAP:
        t, slope = soft_cap(products * score_scale, SOFTCAP)
        if BIASED:
            return t, softcap, slope
        else:
            return t, softcap * LOG2E, slope
    else:
        return products, score_scale, 1.0


@triton.jit
def masked_scores(
    s, data, strides, b, h, first_key, rows, keys, shape,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    AXIS: tl.constexpr, GROUPED: tl.constexpr, hidden=float("-inf"),
):  # fmt: skip
    """Set scores of a tile to -inf, or to `hidden`, where its mask or its band hides them.

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
    return tl.where(allowed, s, hidden)


@triton.jit
def sum_in_any_order(p, largest):
    """Sum probabilities of each row with one result for every order of the terms, and so for every layout of the tile.

    Triton chooses the layout by what else is loaded, and a sum of floats depends on it. Here terms are integers: places
    of 2^-23 of the power of two above `largest`, the largest p of the row in this tile. At most 128 of them fit.
    Smaller p count as 0, which a sum of floats loses as well once it is as large.
    """
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000
    above = power.to(tl.float32, bitcast=True)
    bits = (p + tl.expand_dims(above, 1)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    terms = bits - tl.expand_dims(power, 1)
    total = tl.sum(terms, 1).to(tl.float32) * (above * 1.1920928955078125e-07)  # 2^-23
    return tl.where(tl.max(terms, 1) > 0x01000000, float("nan"), total)  # some p is NaN


@triton.jit
def fold(total_max, total_sum, total, row_max, row_sum, part, BIASED: tl.constexpr):
    """Add a span of the keys to the sums of rows: (maximum, sum, values), each rounded in the same way everywhere.

    The first span gives its own numbers, and one without keys changes nothing.
    """
    new_max = tl.maximum(total_max, row_max)
    own, others = exp_of(row_max - new_max, BIASED), exp_of(total_max - new_max, BIASED)
    total = tl.fma(part, tl.expand_dims(own, 1), total * tl.expand_dims(others, 1))
    return new_max, tl.fma(row_sum, own, total_sum * others), total


@triton.jit
def folded_log_sums(row_max, row_sum, BIASED: tl.constexpr):
    """Return the results of `log_sums` of rows without a bias of one value per query.

    No product is left that a compiler may join with a sum, or not, so that all kernels round alike.
    """
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    small = tl.fma(tl.math.log2(total), LN2, 0.0)
    if BIASED:
        return tl.where(empty, float("-inf"), row_max), tl.where(empty, 0.0, small), total
    else:
        lse = tl.where(empty, float("-inf"), tl.fma(row_max, LN2, small))
        return lse, tl.zeros_like(lse), total


@triton.jit
def log_sums(row_max, row_sum, values, BIAS: tl.constexpr):
    """Return lse of rows as a sum (great, small), in which `small` may be rounded away, and the divisor of out.

    Args:
        row_max: in base 2, or natural where the bias adds to scores.
        row_sum: of exp(score - row_max). It is 0 only in rows without keys, because the maximum of a row adds 1.
        values: of a bias of one value per query.
        BIAS: how the bias is read.
    """
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    great = row_max
    small = tl.math.log2(total) * LN2
    if BIAS <= ROW_BIAS:
        great = row_max * LN2
    if BIAS == ROW_BIAS:
        small += great
        # In the formula a row with maximum -inf has no keys, and one with +inf is NaN, as inf - inf is.
        great = tl.where(values == float("inf"), float("nan"), values)
        total = tl.where(values == float("-inf"), float("inf"), total + (great - great))
        total = tl.where(empty, 1.0, total)
    return tl.where(empty, float("-inf"), great), tl.where(empty, 0.0, small), total


@triton.jit
def largest_of(row_max, row_sum, values, BIAS: tl.constexpr):
    """Return the maximum score of each row, natural, without a sink; arguments are as for `log_sums`."""
    natural = row_max
    if BIAS <= ROW_BIAS:
        natural = row_max * LN2
    if BIAS == ROW_BIAS:
        natural += values
    return tl.where(row_sum == 0.0, float("-inf"), natural)


@triton.jit
def add_spread(spread, row_sum, step, rescale, p, exponent):
    """Return the sum of p * (score - row_max) of each row with one more tile.

    `step` is the old maximum minus the new one, and `rescale` its exponential; p is the exponential of `exponent`, in
    the base of the scores. Both are clamped where p is 0, because 0 * -inf is NaN.
    """
    moved = (spread + row_sum * tl.maximum(step, LEAST_EXPONENT)) * rescale
    return moved + tl.sum(p * tl.maximum(exponent, LEAST_EXPONENT), 1)


@triton.jit
def entropy_of(row_sum, spread, values, BIAS: tl.constexpr):
    """Return the entropy of the keys of each row, from sums of p and of p * (score - row_max); see `log_sums`."""
    empty = row_sum == 0.0
    if BIAS == ROW_BIAS:
        empty = empty | (values == float("-inf"))
    total = tl.where(empty, 1.0, row_sum)
    natural = spread
    if BIAS <= ROW_BIAS:
        natural = spread * LN2
    return tl.where(empty, 0.0, tl.math.log2(total) * LN2 - natural / total)


@triton.jit
def entropy_with_sink(entropy, great, small, logits, share):
    """Add sinks to the entropies of rows: the keys of a row have the probability `share`. lse includes the sinks."""
    others = tl.math.exp2(((logits - great) - small) * LOG2E)
    others = tl.where(logits == float("-inf"), 0.0, others)
    return share * entropy - times_log(share) - times_log(others)


@triton.jit
def times_log(p):
    """Return p * log(p), 0 where p is 0."""
    return p * tl.math.log2(tl.where(p > 0.0, p, 1.0)) * LN2


@triton.jit
def exp_of(difference, BIASED: tl.constexpr):
    """Compute exp of a difference of scores, which are in base 2, or natural if BIASED."""
    return tl.math.exp2(difference * LOG2E if BIASED else difference)


@triton.jit
def exponents_of_rows(s, lse_rows, low_rows, AXIS: tl.constexpr, BIASED: tl.constexpr, HAS_LOW: tl.constexpr):
    """Compute log2(p), scores minus lse of their rows, from both in base 2, or natural if BIASED.

    If BIASED, the large numbers are subtracted first, which is exact if they are nearly equal. Then `low_rows`, in base
    2, is added: the negative remainder of lse below the precision of fp32. With HAS_LOW the forward pass has stored it,
    and rounds scores as this kernel does, so that p is at most 1 up to the last bits. Another backend may round scores
    differently, near 1e30 by 1e23. So the exponent is clamped to 0.
    """
    exponent = s - tl.expand_dims(lse_rows, AXIS)
    if BIASED:
        low_rows = tl.expand_dims(low_rows, AXIS)
        if HAS_LOW:
            exponent = tl.fma(exponent, LOG2E, low_rows)
        else:
            exponent = tl.minimum(exponent * LOG2E, 0.0, propagate_nan=tl.PropagateNan.ALL) + low_rows
    return exponent


@triton.jit
def row_totals(p, lse_rows, low_rows, logits, AXIS: tl.constexpr, HAS_SINK: tl.constexpr, BIASED: tl.constexpr):
    """Sum p over all keys of each row, which are in this tile, and add the sink, whose logits are from `sink_logits`.

    The sum is 1 up to the rounding of lse, which matters if lse is large. It is 0 for an empty row.
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
    """Compute p of a tile of scores, and log2(p) where p is not 0.

    With FEW_KEYS the tile has all keys of a row, and p is normalised again. `lse_rows` of an empty row is inf.
    """
    exponents = exponents_of_rows(s, lse_rows, low_rows, AXIS, BIASED, HAS_LOW)
    p = tl.math.exp2(exponents)
    if FEW_KEYS:
        totals = row_totals(p, lse_rows, low_rows, logits, AXIS, HAS_SINK, BIASED)
        p, exponents = renormalize(p, totals, AXIS), less_totals(exponents, totals, AXIS)
    return p, exponents


@triton.jit
def less_totals(exponents, totals, AXIS: tl.constexpr):
    """Compute log2(p / total) from log2(p) and the total of each row, which is 0 where the row is empty."""
    return exponents - tl.expand_dims(tl.math.log2(tl.where(totals > 0.0, totals, 1.0)), AXIS)


@triton.jit
def sink_logits(sink, bias, strides, b, h, rows, shape, BIAS: tl.constexpr, HAS_SINK: tl.constexpr):
    """Load the sink of a head minus a bias of one value per query, as for lse of backward kernels; 0 without a sink."""
    if HAS_SINK:
        return tl.load(sink + h).to(tl.float32) - row_values(bias, strides, b, h, rows, shape, BIAS)
    else:
        return 0.0


@triton.jit
def load_entropy_gradient(dentropy, at, row_ok):
    """Load the gradient of the entropy of each row, in base 2, or 0 if the call has none.

    Kernels load it next to delta, early, because a load where it is used would wait in each step.
    """
    if dentropy is not None:
        return tl.load(dentropy + at, mask=row_ok, other=0.0) * LN2
    else:
        return 0.0


@triton.jit
def score_gradients(
    p, exponents, dp, d, g, few,
    AXIS: tl.constexpr, FEW_KEYS: tl.constexpr, SEQUENCES: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Compute ds = p * (dp - delta), and return delta as the second result.

    With HAS_ENTROPY `g` is from `load_entropy_gradient` and `exponents` are log2(p): ds loses g p log2(p).
    With FEW_KEYS, or with `few` for one sequence, the tile has all keys, and delta gets the sum of p * dp here.
    """
    if FEW_KEYS:
        d += tl.sum(p * dp, AXIS)
    elif SEQUENCES != NO_SEQUENCES:
        if few:  # a branch, because the sum takes a tenth of the time of a step
            d += tl.sum(p * dp, AXIS)
    dp -= tl.expand_dims(d, AXIS)
    if HAS_ENTROPY:
        dp -= tl.expand_dims(g, AXIS) * tl.where(p > 0.0, exponents, 0.0)
    return p * dp, d
