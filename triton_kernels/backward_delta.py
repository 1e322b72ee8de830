"""The kernel that runs before the backward kernels: delta = rowsum(dout * out) - dlse, and lse as they read it.

The backward kernels have lse in base 2, like their scores. If a bias is added to the scores, lse is natural and stored
as two numbers, as `exponents_of_rows` explains. The second number and delta are then pairs in a tensor of 64 bits. This
kernel subtracts a bias of one value per query, so that no other kernel needs it.

With `FEW_KEYS` the kernel omits the sum. The backward kernels then compute it from p and dp, because they have all keys
of a row in one tile. In so short a row the rounding of out to 16 bits does not average out.

An empty row has lse -inf. The kernel writes +inf, so that p = exp(s - lse) is 0 and not NaN, and ignores its dlse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import ROW_BIAS, row_values
from .sequences import NO_SEQUENCES, bounds_of, entry_of_tile, place_of, scores_from, tiles_of_queries
from .tile_ops import LOG2E, lse_less, split_lse


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
    tiles = tiles_of_queries(shape.seqlen_q, layout, SEQUENCES, SEARCH, BLOCK_M)
    entry, tile, h = entry_of_tile(
        program % tiles, program // tiles, bounds, shape.seqlen_q, shape, layout, SEQUENCES, SEARCH, BLOCK_M
    )
    first_q, first_k, shape = bounds_of(entry, bounds, shape, SEQUENCES)
    at = place_of(entry, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b_q
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < shape.seqlen_q
    if SEQUENCES != NO_SEQUENCES and BIAS == ROW_BIAS:
        bias = scores_from(bias, bias_strides, layout.bias_rows, 0, at.first_q, at.first_q)
    values = row_values(bias, bias_strides, at.b, h, rows, shape, BIAS)
    rows += at.first_q
    place = (b * shape.num_heads + h) * at.entry_rows + rows
    dims = tl.arange(0, BLOCK_DV)
    d = tl.zeros([BLOCK_M], tl.float32)
    if not FEW_KEYS:
        ok = row_ok[:, None] & (dims < shape.head_dim_v)[None, :]
        o_rows = out + ((b * at.entry_rows + rows) * shape.num_heads + h)[:, None] * shape.head_dim_v
        o = tl.load(o_rows + dims[None, :], mask=ok, other=0.0)
        g_head = dout + b * dout_strides.batch + h.to(tl.int64) * dout_strides.head
        g = tl.load(g_head + rows.to(tl.int64)[:, None] * dout_strides.row + dims[None, :], mask=ok, other=0.0)
        d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
        if SEQUENCES != NO_SEQUENCES:
            d = tl.where(at.few, 0.0, d)
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
