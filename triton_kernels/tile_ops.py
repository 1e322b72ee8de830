"""Device functions that the attention kernels share: tiles of rows, of scores, and of what is allowed."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

# How a bias is read: not at all, one value per key, one per query, or one per score.
NO_BIAS: tl.constexpr = tl.constexpr(0)
KEY_BIAS: tl.constexpr = tl.constexpr(1)
ROW_BIAS: tl.constexpr = tl.constexpr(2)
TILE_BIAS: tl.constexpr = tl.constexpr(3)


@triton.jit
def load_rows(base, rows, num_rows, stride, dims, num_dims, CHECK_ROWS: tl.constexpr, CHECK_DIMS: tl.constexpr):
    """A (rows, dims) tile of a matrix with unit last stride; zero beyond its edges."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    if CHECK_ROWS and CHECK_DIMS:
        return tl.load(pointers, mask=(rows < num_rows)[:, None] & (dims < num_dims)[None, :], other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
    elif CHECK_DIMS:
        return tl.load(pointers, mask=(dims < num_dims)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_vector(base, index, length, stride):
    """Values of a strided vector in fp32; zero beyond its end."""
    return tl.load(base + index.to(tl.int64) * stride, mask=index < length, other=0.0).to(tl.float32)


@triton.jit
def soft_cap(x):
    """tanh(x), and its derivative 1 - tanh(x)^2 without cancellation."""
    e = tl.math.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|), which cannot overflow
    t = (1.0 - e) / (1.0 + e)
    slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
    return tl.where(x < 0, -t, t), slope


@triton.jit
def band_of_queries(first, last, seqlen_q, seqlen_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Keys [lo, hi) that some query of first..last sees, and [lo_full, hi_full) that all of them see."""
    shift = seqlen_k - seqlen_q
    lo = 0
    lo_full = 0
    hi = seqlen_k
    hi_full = seqlen_k
    if LEFT:
        lo = tl.maximum(0, first + shift - left)
        lo_full = tl.maximum(0, last + shift - left)
    if RIGHT:
        hi = tl.maximum(0, tl.minimum(seqlen_k, last + shift + right + 1))
        hi_full = tl.maximum(0, tl.minimum(seqlen_k, first + shift + right + 1))
    return tl.minimum(lo, hi), lo_full, hi_full, hi


@triton.jit
def band_of_keys(first, last, seqlen_q, seqlen_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Queries [lo, hi) that see some key of first..last, and [lo_full, hi_full) that see all of them."""
    shift = seqlen_k - seqlen_q
    lo = 0
    lo_full = 0
    hi = seqlen_q
    hi_full = seqlen_q
    if RIGHT:
        lo = tl.maximum(0, first - shift - right)
        lo_full = tl.maximum(0, last - shift - right)
    if LEFT:
        hi = tl.maximum(0, tl.minimum(seqlen_q, last - shift + left + 1))
        hi_full = tl.maximum(0, tl.minimum(seqlen_q, first - shift + left + 1))
    return tl.minimum(lo, hi), lo_full, hi_full, hi


@triton.jit
def blocks_of(lo, lo_full, hi_full, hi, BLOCK: tl.constexpr):
    """A band in blocks: [start, full) and [end, stop) touch an edge of it, [full, end) lie inside."""
    start = lo // BLOCK
    stop = tl.cdiv(hi, BLOCK)
    full = tl.minimum(tl.maximum(tl.cdiv(lo_full, BLOCK), start), stop)
    end = tl.minimum(tl.maximum(hi_full // BLOCK, full), stop)
    return start, full, end, stop


@triton.jit
def in_band(rows, keys, seqlen_q, seqlen_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether keys are inside the tensors and the band of rows; the two broadcast against each other."""
    shift = seqlen_k - seqlen_q
    allowed = (keys < seqlen_k) & (rows < seqlen_q)
    if LEFT:
        allowed = allowed & (keys >= rows + (shift - left))
    if RIGHT:
        allowed = allowed & (keys <= rows + (shift + right))
    return allowed


@triton.jit
def bits_by_row(base, rows, first_key, seqlen_q, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The (queries, keys) tile of a packed mask, bit j % 32 of word j // 32; `first_key` is a multiple of 32."""
    # Words are spread by a shift and a reshape. A word load per score costs six times as much as the whole attention.
    words_at = base + rows.to(tl.int64)[:, None] * stride + (first_key // 32 + tl.arange(0, BLOCK_N // 32))[None, :]
    words = tl.load(words_at, mask=(rows < seqlen_q)[:, None], other=0)
    bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(bits.to(tl.int8), (BLOCK_M, BLOCK_N)) != 0


@triton.jit
def bits_by_key(base, rows, first_key, seqlen_q, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same tile as (keys, queries)."""
    words_at = base + rows.to(tl.int64)[None, :] * stride + (first_key // 32 + tl.arange(0, BLOCK_N // 32))[:, None]
    words = tl.load(words_at, mask=(rows < seqlen_q)[None, :], other=0)
    bits = (words[:, None, :] >> tl.arange(0, 32)[None, :, None]) & 1
    return tl.reshape(bits.to(tl.int8), (BLOCK_N, BLOCK_M)) != 0
