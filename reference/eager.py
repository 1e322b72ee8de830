"""The explicit forward and backward of attention in chunks, which the eager backend runs on any device.

No (Lq, Lk) matrix exists. One chunk of scores at a time is computed, used and overwritten, within `chunk_bytes`.
Per chunk, in fp32 (fp64 for fp64), with the G query heads of a group folded into the rows::

    forward    s = softmax_scale * q @ k^T + bias;  online softmax over the chunks of a row, and its sink
    backward   p = exp(s - lse);  ds = p * (dout @ v^T - delta);  delta = rowsum(dout * out) - dlse
               dq += softmax_scale * ds @ k;  dk += softmax_scale * ds^T @ q;  dv += p^T @ dout;  dbias += ds reduced

With dropout, p @ v and p^T @ dout take the dropped p, and dout @ v^T is dropped like p.

The entropy of a row is H = ln l - t / l with l = sum exp(z - m), t = sum exp(z - m) (z - m): z are its scores and its
sink, m is their maximum. Both terms are small for any scores, unlike sum p z and lse, whose difference is H. With the
gradient g of H, ds loses g p ln p, and delta gets g H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import formula
from .blocks import Block
from .chunks import DEFAULT_CHUNK_BYTES, Chunks, is_capturing
from .distances import ChunkBias, Distances, values_of
from .dropout import Dropout
from .entropy import delta_of_sink, joined_gradients
from .lists import ListValues
from .masks import AnyMask, read_mask
from .sinks import row_delta, sink_gradient, sink_probability, through_lse
from .tiles import (
    BiasGradient,
    DistanceGradient,
    Keys,
    KeySums,
    ListValuesGradient,
    Rows,
    Scores,
    exponential,
    multiply,
    softmax_backward,
)

# (dq, dk, dv, dbias), and dsink where there is a sink.
Gradients = tuple[Tensor | None, ...]

# exp of it is 0 in fp64, too. Differences of scores are clamped to it, so that p = 0 times them is 0, and not NaN.
LEAST_EXPONENT = -1000.0

# For a larger lse, its rounding error in fp32 (8e-6) is no longer small compared with the rounding of the scores, so p
# is normalised again. At finfo.min, where log(n) is rounded away, p would otherwise be n times too large.
LARGE_LSE = 128.0


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None = None,
    bias: ChunkBias | None = None,
    *,
    is_causal: bool = False,
    softmax_scale: float,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    repeats: tuple[int, int] = (1, 1),
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    max_scores: bool = False,
    entropy: bool = False,
) -> tuple[Tensor, ...]:
    """Attend chunk by chunk; the result is the same as from :func:`formula.attention`.

    Args:
        q: (B, Lq, Hq, D), fp16 to fp64, any strides.
        k: (B, Lk, Hk, D), q's dtype.
        v: (B, Lk, Hk, Dv), q's dtype.
        mask: bool, True = attend; 4-D, each dim 1 or full (or Hk, or expanded with stride 0). Or bits or intervals.
        bias: any float dtype, shaped as mask; or a bias by distance.
        is_causal, softmax_scale, softcap, window_size: as for :func:`formula.attention`.
        chunk_bytes: the memory limit of all temporaries of one chunk, in bytes.
        repeats: of mask and bias, for a batch dim that is neither 1 nor B: entry b has entry b // repeat % Bm.
        sink: (Hq,) or None, as for :func:`formula.attention`.
        dropout: which probabilities are dropped; None for none.
        max_scores, entropy: also return these, as :func:`formula.attention` does.

    Returns:
        out (B, Lq, Hq, Dv), contiguous, in q's dtype; lse (B, Hq, Lq) in fp32 (fp64 for fp64), and so all else.

    Raises:
        RuntimeError: from PyTorch, for shapes that do not match; the caller validates arguments.

    Source: the online softmax of Milakov and Gimelshein (arXiv:1805.02867), tiled as in FlashAttention.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8, dtype=torch.float64)
    >>> out, lse = forward(q, k, v, is_causal=True, softmax_scale=8**-0.5, chunk_bytes=1000)
    >>> torch.allclose(out, formula.attention(q, k, v, is_causal=True)[0])
    True
    """
    out = q.new_zeros(q.shape[:3] + v.shape[3:])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=formula.softmax_dtype(q))
    largest = torch.full_like(lse, -math.inf) if max_scores else None
    entropies = torch.zeros_like(lse) if entropy else None
    results: tuple[Tensor, ...] = (out, lse)
    if largest is not None:
        results += (largest,)
    if entropies is not None:
        results += (entropies,)
    if sink is not None:
        lse.copy_(sink[:, None])  # for rows that no chunk visits
    if out.numel() == 0 or k.shape[1] == 0:
        return results
    band = (is_causal, window_size)
    chunks = cut(q, k, v, mask, bias, band, softcap, dropout, repeats, chunk_bytes, buffers=1 + entropy)
    scores = Scores(chunks, bias, softmax_scale, softcap, bias_repeat=repeats[1])
    q_rows, out_rows, lse_rows = Rows(q, chunks), Rows(out, chunks), Rows(lse.mT.unsqueeze(3), chunks)
    largest_rows = None if largest is None else Rows(largest.mT.unsqueeze(3), chunks)
    entropy_rows = None if entropies is None else Rows(entropies.mT.unsqueeze(3), chunks)
    k_keys, v_keys = Keys(k, chunks), Keys(v, chunks)
    sink_rows = None if sink is None else Rows(sink[:, None].expand(*q.shape[:3], 1), chunks)
    lowest = torch.finfo(chunks.dtype).min
    for batch, heads in chunks.pairs():
        for block, spans in chunks.blocks(batch, heads):
            q_block = q_rows.get(block)
            acc_o = q_block.new_empty(q_block.shape[:2] + v.shape[3:])
            # A sink is one more score, of a value of zeros.
            row_max = None if sink_rows is None else sink_rows.get(block).clamp(min=lowest)
            row_sum = None if row_max is None else (row_max > lowest).to(chunks.dtype)
            spread = top = None  # t of the entropy, and the maximum score without the sink
            for number, span in enumerate(spans):
                keys = span.keys
                s = scores.compute(block, span, q_block, k_keys.get(block, keys))
                new_max = s.amax(-1, keepdim=True)
                if largest_rows is not None:
                    top = new_max.clone() if top is None else torch.maximum(top, new_max)
                # Not -inf in a row without keys, because -inf - -inf is NaN.
                new_max.clamp_(min=lowest)
                if row_max is not None:
                    new_max = torch.maximum(row_max, new_max)
                s.sub_(new_max)
                if entropy_rows is not None:
                    exponents = torch.clamp(s, min=LEAST_EXPONENT, out=chunks.buffer(1, s.shape))
                    spread = _moved(spread, row_sum, row_max, new_max)
                p = exponential(s)
                if spread is not None:
                    spread += exponents.mul_(p).sum(-1, keepdim=True)
                own_sum = p.sum(-1, keepdim=True)
                if row_max is None or row_sum is None:
                    row_sum = own_sum
                else:
                    rescale = exponential(row_max.sub_(new_max))
                    row_sum = own_sum.addcmul_(row_sum, rescale)
                    if number > 0:
                        acc_o.mul_(rescale)
                if dropout is not None:
                    p.mul_(kept_in(dropout, chunks, block, keys))
                multiply(p, v_keys.get(block, keys), acc_o, keep=number > 0)
                row_max = new_max
            assert row_max is not None and row_sum is not None
            log_sum = row_sum.log()
            if largest_rows is not None and top is not None:
                largest_rows.put(block, top)
            if entropy_rows is not None and spread is not None:
                # The maximum score adds 1 to the sum, so only empty rows have a sum below 1, and they have no entropy.
                entropy_rows.put(block, log_sum.clamp(min=0.0).sub_(spread.div_(row_sum.clamp(min=1.0))))
            lse_rows.put(block, row_max.add_(log_sum))
            # The maximum score of a row adds 1 to its sum, which is 0 only in a row without keys.
            acc_o.div_(row_sum.clamp_(min=1.0))
            out_rows.put(block, acc_o if dropout is None else acc_o.mul_(dropout.scale))
    return results


def _moved(spread: Tensor | None, row_sum: Tensor | None, row_max: Tensor | None, new_max: Tensor) -> Tensor:
    """Return t of the entropy, the sum over the scores so far, for a new maximum."""
    if row_max is None or row_sum is None:
        return torch.zeros_like(new_max)
    step = (row_max - new_max).clamp_(min=LEAST_EXPONENT)
    moved = step * row_sum
    return (moved if spread is None else moved.add_(spread)).mul_(step.exp())


@torch.no_grad()
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    needs_grad: tuple[bool, ...] = (True, True, True, True, True),
    repeats: tuple[int, int] = (1, 1),
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """Return the requested gradients, computed chunk by chunk; each is summed in fp32 (fp64 for fp64) and rounded once.

    In addition to one chunk it holds fp32 sums of dk and dv for the heads of that chunk. If bias is broadcast and has
    another dtype, it also holds an fp32 sum of dbias in the shape of bias. The order of sums is fixed, so results are
    deterministic.

    Args:
        dout: (B, Lq, Hq, Dv), any strides.
        dlse: (B, Hq, Lq), or None for zero.
        q, k, v, mask, bias, is_causal, softmax_scale, softcap, window_size, chunk_bytes: as given to :func:`forward`.
        out, lse: as returned by :func:`forward`, or by any other backend.
        needs_grad: whether dq, dk, dv, dbias and dsink are computed.
        repeats, sink, dropout: as given to :func:`forward`.
        entropy: as returned by :func:`forward`, and its gradient; None where it has none.

    Returns:
        ``(dq, dk, dv, dbias)`` in the shapes and dtypes of q, k, v, bias, contiguous; None where not needed. With a
        sink ``(dq, dk, dv, dbias, dsink)``.

    Raises:
        RuntimeError: from PyTorch, for shapes that do not match.

    Source: FlashAttention-2 (arXiv:2307.08691, algorithm 2), with dlse joined to delta, and dbias = ds.

    >>> import torch
    >>> q, k, v, dout = torch.randn(4, 1, 6, 2, 8, dtype=torch.float64)
    >>> out, lse = forward(q, k, v, softmax_scale=1.0)
    >>> needs_grad = (True, False, True, False)
    >>> grads = backward(dout, None, q, k, v, None, None, out, lse, softmax_scale=1.0, needs_grad=needs_grad)
    >>> [None if x is None else tuple(x.shape) for x in grads]
    [(1, 6, 2, 8), None, (1, 6, 2, 8), None]
    """
    need_q, need_k, need_v, need_bias, *need_sink = needs_grad
    dq, dk, dv = (x.new_zeros(x.shape) if needed else None for x, needed in zip((q, k, v), needs_grad))
    sums_per_key = need_k * q.shape[3] + need_v * v.shape[3]
    band = (is_causal, window_size)
    buffers = 2 if entropy is None else 3
    chunks = cut(
        q, k, v, mask, bias, band, softcap, dropout, repeats, chunk_bytes, buffers=buffers, sums_per_key=sums_per_key
    )
    scale = 1.0 if dropout is None else dropout.scale
    empty = lse == -math.inf
    finite_lse = lse.masked_fill(empty, 0.0)  # exp(-inf - 0) is 0, but exp(-inf - -inf) is NaN
    finite_dlse = None if dlse is None else dlse.to(lse.dtype).masked_fill(empty, 0.0)
    per_row, dsink, dentropy = finite_dlse, None, None
    if entropy is not None:
        finite_dlse, dentropy = joined_gradients(entropy, dlse, lse)
    sink_gradients: tuple[Tensor | None, ...] = ()
    if sink is not None:
        is_row_bias = need_bias and isinstance(bias, Tensor) and bias.shape[3] == 1
        if any(need_sink) or is_row_bias:
            delta_rows = delta_of_sink(row_delta(dout, out, finite_dlse, lse), dentropy, sink, lse)
            dsink = sink_gradient(sink, lse, delta_rows) if any(need_sink) else None
            per_row = through_lse(per_row, sink, lse, delta_rows)
        sink_gradients = (dsink,)
    dbias: BiasGradient | None = None
    if bias is not None and need_bias:
        if isinstance(bias, Distances):
            dbias = DistanceGradient(bias, chunks, repeats[1])
        elif isinstance(bias, ListValues):
            dbias = ListValuesGradient(bias, chunks, repeats[1])
        else:
            dbias = BiasGradient(bias, per_row, chunks, repeats[1])
    need_ds = need_q or need_k or (dbias is not None and dbias.needs_scores)
    if out.numel() == 0 or k.shape[1] == 0 or not (need_ds or need_v):
        return dq, dk, dv, None if dbias is None else dbias.result(), *sink_gradients

    # Rows within one chunk are always normalised again, by one more pass. Other rows need their scores twice.
    splits_rows = chunks.extent.keys < chunks.seqlen_k
    renormalise = splits_rows and (is_capturing(q.device) or bool(finite_lse.abs().amax() > LARGE_LSE))
    scores = Scores(chunks, bias, softmax_scale, softcap, keep_slope=need_q or need_k, bias_repeat=repeats[1])
    # A half-precision out is rounded, and delta = rowsum(dout * out) would have its error. So it is summed from p * dp
    # instead.
    sum_delta = need_ds and out.dtype != chunks.dtype
    q_rows, dout_rows, out_rows = (Rows(x, chunks) for x in (q, dout, out))
    lse_rows = Rows(finite_lse.mT.unsqueeze(3), chunks)
    dlse_rows, dentropy_rows = (None if x is None else Rows(x.mT.unsqueeze(3), chunks) for x in (finite_dlse, dentropy))
    k_keys, v_keys = Keys(k, chunks), Keys(v, chunks)
    dq_rows = None if dq is None else Rows(dq, chunks)
    share_rows = None if sink is None else Rows(sink_probability(sink, lse).mT.unsqueeze(3), chunks)
    for batch, heads in chunks.pairs():
        dk_sum, dv_sum = (None if x is None else KeySums(x, batch, heads, chunks.dtype) for x in (dk, dv))
        for block, spans in chunks.blocks(batch, heads):
            q_block, dout_block, lse_block = q_rows.get(block), dout_rows.get(block), lse_rows.get(block)
            dq_sum = torch.zeros_like(q_block) if need_q else None
            dlse_block = None if dlse_rows is None else dlse_rows.get(block)
            share = None if share_rows is None else share_rows.get(block)
            row_sum, delta, logs = None, None, None
            if len(spans) > 1:
                if need_ds and not sum_delta:
                    delta = (dout_block * out_rows.get(block)).sum(-1, keepdim=True)
                if renormalise or sum_delta:
                    row_sum, products = torch.zeros_like(lse_block), torch.zeros_like(lse_block)
                    for span in spans:
                        keys = span.keys
                        s = scores.compute(block, span, q_block, k_keys.get(block, keys))
                        p = exponential(s.sub_(lse_block))
                        row_sum += p.sum(-1, keepdim=True)
                        if sum_delta:
                            dp = multiply(dout_block, v_keys.get(block, keys).mT, chunks.buffer(1, p.shape), scale)
                            if dropout is not None:
                                dp.mul_(kept_in(dropout, chunks, block, keys))
                            products += dp.mul_(p).sum(-1, keepdim=True)
                    if share is not None:
                        row_sum += share
                    row_sum.masked_fill_(row_sum == 0, 1.0)
                    if sum_delta:
                        delta = products.div_(row_sum)
            for span in spans:
                keys = span.keys
                k_block = k_keys.get(block, keys)
                s = scores.compute(block, span, q_block, k_block).sub_(lse_block)
                if dentropy_rows is not None and need_ds:
                    logs = torch.clamp(s, min=LEAST_EXPONENT, out=chunks.buffer(4, s.shape))
                p = exponential(s)
                total = row_sum
                if len(spans) == 1:
                    total = p.sum(-1, keepdim=True)
                    if share is not None:
                        total += share
                    total.masked_fill_(total == 0, 1.0)
                if total is not None:
                    p.div_(total)
                kept = None if dropout is None else kept_in(dropout, chunks, block, keys)
                if dv_sum is not None:
                    weights = p if kept is None else torch.mul(p, kept, out=chunks.buffer(3, p.shape))
                    dv_sum.add_product(keys, weights.mT, dout_block, scale)
                if not need_ds:
                    continue
                ds = multiply(dout_block, v_keys.get(block, keys).mT, chunks.buffer(1, p.shape), scale)
                if kept is not None:
                    ds.mul_(kept)
                softmax_backward(ds, p, delta)
                if dlse_block is not None:
                    ds.addcmul_(p, dlse_block)
                if logs is not None and dentropy_rows is not None:
                    logs = logs if total is None else logs.sub_(total.log())
                    ds.addcmul_(logs.mul_(p), dentropy_rows.get(block), value=-1.0)
                if dbias is not None:
                    dbias.add(block, keys, ds)
                if scores.slope is not None:
                    ds.mul_(scores.slope)
                if dq_sum is not None:
                    multiply(ds, k_block, dq_sum, softmax_scale, keep=True)
                if dk_sum is not None:
                    dk_sum.add_product(keys, ds.mT, q_block, softmax_scale)
            if dq_rows is not None and dq_sum is not None:
                dq_rows.put(block, dq_sum)
        for key_sum in (dk_sum, dv_sum):
            if key_sum is not None:
                key_sum.put()
    return dq, dk, dv, None if dbias is None else dbias.result(), *sink_gradients


def cut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    band: tuple[bool, tuple[int, int] | None],
    softcap: float,
    dropout: Dropout | None,
    repeats: tuple[int, int],
    chunk_bytes: int,
    *,
    buffers: int,
    sums_per_key: int = 0,
) -> Chunks:
    """Split a call into chunks with `buffers` tensors of the size of their scores, and the buffers that the call adds.

    Args:
        band: is_causal and window_size.
        sums_per_key: see `Chunks`.
    """
    # Shifted rows of a bias by distance, or slots.
    has_places = not (bias is None or isinstance(bias, Tensor))
    # Dropout needs random numbers, and p in addition to dropped p.
    buffers += (softcap > 0) + (0 if dropout is None else 4) + 2 * has_places
    values = values_of(bias)
    entries = (1 if values is None else values.shape[0], repeats[1])
    reader = None if mask is None else read_mask(mask, k.shape[2], q.shape[2], repeats[0])
    scatters = dropout is None and not has_places
    return Chunks(q, k, v, reader, *band, chunk_bytes, buffers, sums_per_key, entries, scatters)


def kept_in(dropout: Dropout, chunks: Chunks, block: Block, keys: slice | Tensor) -> Tensor:
    """Return whether each probability of a chunk is kept, bool in the shape of its scores."""
    heads = slice(block.heads.start * chunks.group, block.heads.stop * chunks.group)
    if isinstance(keys, slice):
        kept = dropout.kept(block.batch, heads, block.rows, keys)
    else:
        first, last = int(keys[0]), int(keys[-1])
        kept = dropout.kept(block.batch, heads, block.rows, slice(first, last + 1))[..., keys - first]
    return kept.reshape(-1, chunks.group * kept.shape[2], kept.shape[3])
