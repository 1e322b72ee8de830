"""The kernel that runs before the backward kernels: delta = rowsum(dout * out) - dlse, and lse as they read it.

lse is in base 2 like their scores, or natural beside a bias that adds to these, and then two numbers: `exp_of_rows`
says why. The second and delta are pairs in a tensor of 64 bits. A bias of one value per query is taken off here, so
that no other kernel reads it.

With `FEW_KEYS` it leaves out the sum. The backward kernels then hold all keys of a row in one tile, and compute the sum
from p and dp, because a row of few keys does not average out the rounding of out to 16 bits.

An empty row has lse -inf. The kernel writes +inf, so that p = exp(s - lse) is 0 and not NaN, and ignores its dlse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    LOG2E,
    NO_SEQUENCES,
    PACKED,
    ROW_BIAS,
    lse_less,
    row_values,
    scores_from,
    sequence_at,
    shape_of,
    split_lse,
    tiles_of_rows,
)


@triton.jit
def delta_kernel(
    dout,
    out,
    dlse,
    lse,
    bias,
    row_lse,
    low_delta,
    delta,
    bounds,
    dout_strides,
    dlse_strides,
    bias_strides,
    shape,
    layout,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FEW_KEYS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Compute one tile of rows of one head per program; out and lse are contiguous."""
    program = tl.program_id(0)
    if SEQUENCES == NO_SEQUENCES:
        tiles_m = tl.cdiv(shape.seqlen_q, BLOCK_M)
        b = (program // tiles_m // shape.num_heads).to(tl.int64)
        h = program // tiles_m % shape.num_heads
        rows = program % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
        row_ok = rows < shape.seqlen_q
        values = row_values(bias, bias_strides, b, h, rows, shape, BIAS)
        first_row = b * shape.seqlen_q
        place = (b * shape.num_heads + h) * shape.seqlen_q + rows
    else:
        tiles = tiles_of_rows(layout.rows_q, shape.seqlen_q, layout.number, SEARCH, BLOCK_M)
        h = program // tiles
        own, tile = sequence_at(program % tiles, bounds, shape.seqlen_q, layout.number, SEARCH, 0, BLOCK_M)
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        queries = tl.load(bounds + own * 4 + 1)
        row_ok = rows < queries
        takes_sum = tl.load(bounds + own * 4 + 3) > layout.few_keys
        b = own.to(tl.int64)
        first_q = tl.load(bounds + own * 4)
        if BIAS == ROW_BIAS:
            bias = scores_from(bias, bias_strides, layout.bias_rows, 0, first_q, first_q)
        values = row_values(bias, bias_strides, b, h, rows, shape_of(shape, queries, 0), BIAS)
        b = b * (0 if SEQUENCES == PACKED else 1)
        first_row = b * layout.rows_q
        rows += first_q
        place = (b * shape.num_heads + h) * layout.rows_q + rows
    dims = tl.arange(0, BLOCK_DV)
    d = tl.zeros([BLOCK_M], tl.float32)
    if not FEW_KEYS:
        ok = row_ok[:, None] & (dims < shape.head_dim_v)[None, :]
        o_rows = out + ((first_row + rows) * shape.num_heads + h)[:, None] * shape.head_dim_v
        o = tl.load(o_rows + dims[None, :], mask=ok, other=0.0)
        g_head = dout + b * dout_strides.batch + h.to(tl.int64) * dout_strides.head
        g = tl.load(g_head + rows.to(tl.int64)[:, None] * dout_strides.row + dims[None, :], mask=ok, other=0.0)
        d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
        if SEQUENCES != NO_SEQUENCES:
            d = tl.where(takes_sum, d, 0.0)
    natural = tl.load(lse + place, mask=row_ok, other=float("-inf"))
    empty = natural == float("-inf")
    if HAS_DLSE:
        e_rows = dlse + b * dlse_strides[0] + h.to(tl.int64) * dlse_strides[1] + rows.to(tl.int64) * dlse_strides[2]
        d -= tl.where(empty, 0.0, tl.load(e_rows, mask=row_ok, other=0.0).to(tl.float32))
    tl.store(delta + place, d, mask=row_ok)
    if BIAS == ROW_BIAS:
        natural = lse_less(natural, values)
    if low_delta is not None:
        natural, low = split_lse(natural)
        low = (low * -LOG2E).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(low_delta + place, low | (d.to(tl.int32, bitcast=True).to(tl.int64) << 32), mask=row_ok)
    if BIAS <= ROW_BIAS:
        natural = natural * LOG2E
    tl.store(row_lse + place, tl.where(empty, float("inf"), natural), mask=row_ok)
