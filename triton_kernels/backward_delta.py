"""The kernel before the backward ones: delta = rowsum(dout * out) - dlse, and lse in base 2.

An empty row has lse -inf; it is written as +inf, with which p = exp2(s - lse) is 0 and not NaN, and its dlse counts for
nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import LOG2E


@triton.jit
def delta_kernel(
    dout,
    out,
    dlse,
    lse,
    delta,
    lse_log2,
    stride_gb,
    stride_gl,
    stride_gh,
    stride_eb,
    stride_eh,
    stride_el,
    seqlen_q,
    num_heads,
    head_dim_v,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """One tile of rows of one head per program; out and lse are contiguous."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    b = (program // tiles_m // num_heads).to(tl.int64)
    h = program // tiles_m % num_heads
    rows = program % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_DV)
    row_ok = rows < seqlen_q
    ok = row_ok[:, None] & (dims < head_dim_v)[None, :]
    o = tl.load(out + ((b * seqlen_q + rows) * num_heads + h)[:, None] * head_dim_v + dims[None, :], mask=ok, other=0.0)
    g_rows = dout + b * stride_gb + h.to(tl.int64) * stride_gh + rows.to(tl.int64)[:, None] * stride_gl
    g = tl.load(g_rows + dims[None, :], mask=ok, other=0.0)
    d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    place = (b * num_heads + h) * seqlen_q + rows
    natural = tl.load(lse + place, mask=row_ok, other=float("-inf"))
    empty = natural == float("-inf")
    if HAS_DLSE:
        e_rows = dlse + b * stride_eb + h.to(tl.int64) * stride_eh + rows.to(tl.int64) * stride_el
        d -= tl.where(empty, 0.0, tl.load(e_rows, mask=row_ok, other=0.0).to(tl.float32))
    tl.store(delta + place, d, mask=row_ok)
    tl.store(lse_log2 + place, tl.where(empty, float("inf"), natural * LOG2E), mask=row_ok)
