"""The split-KV combine kernel: combines the results that programs computed for splits of the keys.

    lse = logsumexp_i lse_i;  out = sum_i exp(lse_i - lse) out_i
    largest = max_i largest_i;  entropy = sum_i exp(lse_i - lse) (entropy_i + lse - lse_i)

lse_i and lse are in fp64 where there is a bias: see `store_lse`.

It then adds the sink of the head, if there is one. The order of the sums depends only on sizes, so results are
reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import entropy_with_sink, fold, folded_log_sums
from .tile_ops import LEAST_EXPONENT, LN2, LOG2E, LOWEST, join_sink, split_lse, store_lse, unit_of


@triton.jit
def combine_kernel(
    parts,
    parts_lse,
    parts_largest,
    parts_entropy,
    out,
    lse,
    largest,
    entropy,
    sink,
    shape,
    splits,
    num_rows,
    sink_of_head,
    sink_of_row,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combine one of the `num_rows` rows of (B, Hq, Lq).

    parts (splits, B, Lq, Hq, Dv), or (splits, B, Hq, Lq, Dv) with HEADS_FIRST, and all other tensors are contiguous.
    AT_ONCE of the at most SPLITS splits are loaded together, because a loop over single splits would wait for each
    load. With OVERLAP the kernel may start before the forward kernel has ended, and waits for it (programmatic
    dependent launch).
    """
    row = tl.program_id(0)
    h = row // shape.seqlen_q % shape.num_heads
    line = row
    if not HEADS_FIRST:
        b = row // (shape.num_heads * shape.seqlen_q)
        line = (b * shape.seqlen_q + row % shape.seqlen_q) * shape.num_heads + h
    dims = tl.arange(0, BLOCK_DV)
    is_value = dims < shape.head_dim_v
    size = tl.cast(num_rows, tl.int64)
    every = tl.arange(0, SPLITS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    all_lse = tl.load(parts_lse + every * size + row, mask=every < splits, other=float("-inf"))
    some = tl.arange(0, AT_ONCE)
    logits = tl.load(parts_lse + some * size + row, mask=some < splits, other=float("-inf"))
    at = parts + ((some * size + line) * shape.head_dim_v)[:, None] + dims[None, :]
    values = tl.load(at, mask=(some < splits)[:, None] & is_value[None, :], other=0.0)
    top = tl.max(all_lse, 0)
    great = top
    small = 0.0
    factor = LOG2E
    if parts_lse.dtype.element_ty == tl.float64:
        great, small = split_lse(top)
        factor = LOG2E / unit_of(great)
    shift = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    total = tl.sum(tl.math.exp2((all_lse - shift).to(tl.float32) * factor), 0)
    acc = tl.sum(tl.math.exp2((logits - shift).to(tl.float32) * factor)[:, None] * values, 0)
    for first in tl.static_range(AT_ONCE, SPLITS, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        logits = tl.load(parts_lse + some * size + row, mask=some < splits, other=float("-inf"))
        at = parts + ((some * size + line) * shape.head_dim_v)[:, None] + dims[None, :]
        values = tl.load(at, mask=(some < splits)[:, None] & is_value[None, :], other=0.0)
        acc += tl.sum(tl.math.exp2((logits - shift).to(tl.float32) * factor)[:, None] * values, 0)
    total = tl.where(total == 0.0, 1.0, total)  # a row without keys
    if largest is not None:
        tops = tl.load(parts_largest + every * size + row, mask=every < splits, other=float("-inf"))
        tl.store(largest + row, tl.max(tops, 0))
    if entropy is not None:
        entropies = tl.load(parts_entropy + every * size + row, mask=every < splits, other=0.0)
        less = tl.maximum((all_lse - shift).to(tl.float32) * factor, LEAST_EXPONENT)
        own_entropy = tl.sum(tl.math.exp2(less) * (entropies - less * LN2), 0) / total + tl.math.log2(total) * LN2
    small += tl.math.log2(total) * LN2
    if HAS_SINK:
        logit = tl.load(sink + h * sink_of_head + row % shape.seqlen_q * sink_of_row)
        great, small, share = join_sink(great, small, logit.to(tl.float32))
        acc = acc * share
        if entropy is not None:
            own_entropy = entropy_with_sink(own_entropy, great, small, logit.to(tl.float32), share)
    if entropy is not None:
        tl.store(entropy + row, own_entropy)
    tl.store(out + tl.cast(line, tl.int64) * shape.head_dim_v + dims, (acc / total).to(out.dtype.element_ty), is_value)
    store_lse(lse + row, great, small, None)


@triton.jit
def span_at(parts, tops, sums, part, splits, size, row, line, dims, width):
    """Load the sums of one row in a span of its keys: (maximum, sum, values), as of no keys beyond the last span."""
    there = part < splits
    at = tl.cast(part, tl.int64) * size
    is_value = there & (dims < width)[None, :]
    values = tl.load(parts + ((at + line) * width)[:, None] + dims[None, :], mask=is_value, other=0.0)
    top = tl.load(tops + at + row, mask=there, other=LOWEST)
    return top, tl.load(sums + at + row, mask=there, other=0.0), values


@triton.jit
def fold_kernel(
    parts,
    tops,
    sums,
    out,
    lse,
    sink,
    shape,
    splits,
    num_rows,
    sink_of_head,
    sink_of_row,
    BLOCK_DV: tl.constexpr,
    BIASED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Fold the spans of one row of (B, Hq, Lq), in their order and as the forward kernel does, bit by bit.

    parts is as for the combine kernel; tops and sums (splits, B, Hq, Lq) are in fp32. Four spans are loaded together,
    because a loop over single ones would wait for each load.
    """
    row = tl.program_id(0) + tl.arange(0, 1)
    h = row // shape.seqlen_q % shape.num_heads
    line = row
    if not HEADS_FIRST:
        line = (row // (shape.num_heads * shape.seqlen_q) * shape.seqlen_q + row % shape.seqlen_q) * shape.num_heads + h
    dims = tl.arange(0, BLOCK_DV)
    width = shape.head_dim_v
    size = tl.cast(num_rows, tl.int64)
    total_max = tl.full([1], LOWEST, tl.float32)
    total_sum = tl.zeros([1], tl.float32)
    total = tl.zeros([1, BLOCK_DV], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for first in range(0, splits, 4):
        a = span_at(parts, tops, sums, first, splits, size, row, line, dims, width)
        b = span_at(parts, tops, sums, first + 1, splits, size, row, line, dims, width)
        c = span_at(parts, tops, sums, first + 2, splits, size, row, line, dims, width)
        d = span_at(parts, tops, sums, first + 3, splits, size, row, line, dims, width)
        total_max, total_sum, total = fold(total_max, total_sum, total, a[0], a[1], a[2], BIASED)
        total_max, total_sum, total = fold(total_max, total_sum, total, b[0], b[1], b[2], BIASED)
        total_max, total_sum, total = fold(total_max, total_sum, total, c[0], c[1], c[2], BIASED)
        total_max, total_sum, total = fold(total_max, total_sum, total, d[0], d[1], d[2], BIASED)
    great, small, divisor = folded_log_sums(total_max, total_sum, BIASED)
    if HAS_SINK:
        logits = tl.load(sink + h * sink_of_head + row % shape.seqlen_q * sink_of_row)
        great, small, share = join_sink(great, small, logits.to(tl.float32))
        total = total * share[:, None]
    total = total / divisor[:, None]
    at = out + (tl.cast(line, tl.int64) * width)[:, None] + dims[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(dims < width)[None, :])
    store_lse(lse + row, great, small, None)
