"""The kernel that combines the forward pass of shares of the keys.

    lse = logsumexp_i lse_i;  out = sum_i exp(lse_i - lse) out_i

and the sink of a head where it has one, in the order of i, so that the result is the same from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import LN2, LOG2E, join_sink


@triton.jit
def combine_kernel(
    parts,
    parts_lse,
    out,
    lse,
    sink,
    shape,
    splits,
    num_rows,
    sink_of_head,
    sink_of_row,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """One block of the `num_rows` rows of (B, Hq, Lq); parts (splits, B, Lq, Hq, Dv) and all else are contiguous."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < num_rows
    dims = tl.arange(0, BLOCK_DV)
    b = rows // (shape.num_heads * shape.seqlen_q)
    h = rows // shape.seqlen_q % shape.num_heads
    line = (b * shape.seqlen_q + rows % shape.seqlen_q) * shape.num_heads + h
    stored = row_ok[:, None] & (dims < shape.head_dim_v)[None, :]
    place = line[:, None] * shape.head_dim_v + dims[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for part in range(0, splits):
        top = tl.maximum(top, tl.load(parts_lse + part * num_rows + rows, mask=row_ok, other=float("-inf")))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for part in range(0, splits):
        weight = tl.math.exp2(
            (tl.load(parts_lse + part * num_rows + rows, mask=row_ok, other=float("-inf")) - shift) * LOG2E
        )
        total += weight
        acc += weight[:, None] * tl.load(parts + part * num_rows * shape.head_dim_v + place, mask=stored, other=0.0)
    total_or_1 = tl.where(total > 0, total, 1.0)
    natural = tl.where(total > 0, shift + tl.math.log2(total_or_1) * LN2, float("-inf"))
    if HAS_SINK:
        at = sink + h * sink_of_head + rows % shape.seqlen_q * sink_of_row
        natural, share = join_sink(natural, tl.load(at, mask=row_ok, other=float("-inf")).to(tl.float32))
        acc = acc * share[:, None]
    tl.store(out + place, (acc / total_or_1[:, None]).to(out.dtype.element_ty), mask=stored)
    tl.store(lse + rows, natural, mask=row_ok)
