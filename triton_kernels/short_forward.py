"""The forward kernel of short rows: all keys of a head are in one tile.

p = exp(s - rowmax(s));  l = rowsum(p);  out = p @ v / l;  lse = rowmax(s) + log(l), and then the sink
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import ROW_BIAS, row_values
from .dropout import is_kept
from .scores import entropy_of, entropy_with_sink, exp_of, largest_of, log_sums, scaled
from .short_rows import base_scores, head_of, load_dense, masked, walk_of
from .tile_ops import LEAST_EXPONENT, LOWEST, join_sink, load_tile, store_lse


@triton.jit
def short_forward_kernel(
    q,
    k,
    v,
    bias,
    mask,
    stop,
    out,
    lse,
    sink,
    dropout_key,
    largest,
    entropy,
    q_strides,
    k_strides,
    v_strides,
    bias_strides,
    access,
    shape,
    walk,
    score_scale,
    softcap,
    sink_of_head,
    sink_of_row,
    dropout,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SINK: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute one tile of queries for each head of a walk; out (B, Lq, Hq, Dv) and lse (B, Hq, Lq) are contiguous.

    `largest` and `entropy` are as for `forward_kernel`.
    """
    score_scale = tl.cast(score_scale, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    owner_b, _, tile, begin, end, first_head, members_h = walk_of(walk, shape, tl.program_id(0))
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    row_ok = rows < shape.seqlen_q
    stored = row_ok[:, None] & (dims_v < shape.head_dim_v)[None, :]
    b, h = head_of(begin, owner_b, first_head, members_h, walk)
    base = base_scores(
        bias, bias_strides, b, first_head, first, 0, rows, keys, shape,
        BLOCK_M, BLOCK_N, BIAS, WIDE,
    )  # fmt: skip
    BIASED: tl.constexpr = BIAS > ROW_BIAS
    row_bias = row_values(bias, bias_strides, b, first_head, rows, shape, BIAS)
    next_dense = load_dense(mask, access, b, h, rows, keys, shape, MASK, WIDE)
    for member in tl.range(begin, end, num_stages=STAGES):
        dense = next_dense
        b, h = head_of(tl.minimum(member + 1, end - 1), owner_b, first_head, members_h, walk)
        next_dense = load_dense(mask, access, b, h, rows, keys, shape, MASK, WIDE)
        b, h = head_of(member, owner_b, first_head, members_h, walk)
        h_k = h // shape.group
        q_tile = load_tile(
            q, q_strides, b, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
            BLOCK_M, BLOCK_D, False, WIDE, True, PAD_D,
        )  # fmt: skip
        k_tile = load_tile(
            k, k_strides, b, h_k, 0, keys, shape.seqlen_k, dims, shape.head_dim,
            BLOCK_N, BLOCK_D, False, WIDE, True, PAD_D,
        )  # fmt: skip
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s, factor, _slope = scaled(s, score_scale, softcap, SOFTCAP, BIASED)
        s = tl.fma(s, factor, base)
        s = masked(s, dense, mask, stop, access, b, h, 0, rows, keys, shape, MASK, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        row_max = tl.maximum(tl.max(s, 1), LOWEST)
        exponent = s - row_max[:, None]
        p = exp_of(exponent, BIASED)
        row_sum = tl.sum(p, 1)
        if entropy is not None:
            spread = tl.sum(p * tl.maximum(exponent, LEAST_EXPONENT), 1)
            own_entropy = entropy_of(row_sum, spread, row_bias, BIAS)
        if DROPOUT:
            kept = is_kept(dropout_key, dropout, b, h, first, 0, rows, keys, BLOCK_M, BLOCK_N, False, 1)
            p = tl.where(kept, p * tl.cast(dropout.scale, tl.float32), 0.0)
        v_tile = load_tile(
            v, v_strides, b, h_k, 0, keys, shape.seqlen_k, dims_v, shape.head_dim_v,
            BLOCK_N, BLOCK_DV, False, WIDE, True, PAD_DV,
        )  # fmt: skip
        o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        great, small, total = log_sums(row_max, row_sum, row_bias, BIAS)
        at = out + ((b * shape.seqlen_q + rows) * shape.num_heads + h)[:, None] * shape.head_dim_v + dims_v[None, :]
        if HAS_SINK:
            logits = tl.load(sink + h * sink_of_head + rows * sink_of_row, mask=row_ok, other=float("-inf"))
            great, small, share = join_sink(great, small, logits.to(tl.float32))
            o = o * share[:, None]
            if entropy is not None:
                own_entropy = entropy_with_sink(own_entropy, great, small, logits.to(tl.float32), share)
        tl.store(at, (o / total[:, None]).to(out.dtype.element_ty), mask=stored)
        line = (b * shape.num_heads + h) * shape.seqlen_q + rows
        if largest is not None:
            tl.store(largest + line, largest_of(row_max, row_sum, row_bias, BIAS), mask=row_ok)
        if entropy is not None:
            tl.store(entropy + line, own_entropy, mask=row_ok)
        store_lse(lse + line, great, small, row_ok)
