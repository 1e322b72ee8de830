"""Forward-mode derivatives of attention in chunks, and the gradients of their results, which eager runs on any device.

With ts the tangent of the scores, m its mean under p, and e, f the products of v and tv with a gradient u of tout::

    ts    = slope * softmax_scale * (tq @ k^T + q @ tk^T) + tbias
    tlse  = m = rowsum(p * ts)
    tout  = p @ tv + (p * (ts - m)) @ v

    L     = rowsum(u * tout) + w * tlse = rowsum(p * ((ts - m) * e + f)) + w * m
    dts   = p * (e - E + w),  E = rowsum(p * e)
    ds    = p * (g - rowsum(p * g)),  g = ts * (e - E + w) - m * e + f

No (Lq, Lk) matrix exists, as in `eager.py`. Large means do not cancel: the sums of tout have the differences of ts from
the mean over the keys so far, and a new mean changes them by its step times the sum of p @ v.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import formula
from .blocks import Block
from .chunks import DEFAULT_CHUNK_BYTES, Chunks, Span
from .distances import ChunkBias, Distances, values_of, with_values
from .dropout import Dropout
from .eager import cut, kept_in
from .lists import ListValues
from .masks import AnyMask
from .sinks import sink_probability
from .tiles import (
    BiasGradient,
    DistanceGradient,
    Keys,
    KeySums,
    ListValuesGradient,
    Rows,
    Scores,
    bias_reader,
    exponential,
    multiply,
)

# Two more score buffers of a chunk, after the buffers of `eager.py`: one holds ts, one p * ts.
_TANGENTS, _PRODUCTS = 4, 5


class Tangents(NamedTuple):
    """The tangent of each input of a call, in its shape, None for zeros; or the gradient of each."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None


class Cotangents(NamedTuple):
    """The gradients of out, lse, tout and tlse; None for zeros."""

    out: Tensor | None = None
    lse: Tensor | None = None
    tout: Tensor | None = None
    tlse: Tensor | None = None


class _Call:
    """The common part of both passes: the chunks of a call, its tensors by block, and scores with their tangents."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AnyMask | None,
        bias: ChunkBias | None,
        sink: Tensor | None,
        tangents: Tangents,
        *,
        is_causal: bool = False,
        softmax_scale: float,
        softcap: float = 0.0,
        window_size: tuple[int, int] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        repeats: tuple[int, int] = (1, 1),
        dropout: Dropout | None = None,
        buffers: int,
        sums_per_key: int = 0,
    ) -> None:
        band, sizes = (is_causal, window_size), {"buffers": buffers, "sums_per_key": sums_per_key}
        chunks = cut(q, k, v, mask, bias, band, softcap, dropout, repeats, chunk_bytes, **sizes)
        self.chunks, self.dropout, self.bias, self.repeat = chunks, dropout, bias, repeats[1]
        self.scale, self.softcap = softmax_scale, softcap
        self.scores = Scores(chunks, bias, softmax_scale, softcap, keep_slope=True, bias_repeat=repeats[1])
        self.q, self.tq = Rows(q, chunks), None if tangents.q is None else Rows(tangents.q, chunks)
        self.k, self.v = Keys(k, chunks), Keys(v, chunks)
        self.tk, self.tv = (None if x is None else Keys(x, chunks) for x in (tangents.k, tangents.v))
        tbias = with_values(bias, tangents.bias) if tangents.bias is not None else None
        self._tbias = None if tbias is None else bias_reader(tbias, chunks, repeats[1])
        shape = (*q.shape[:3], 1)
        self.sink = None if sink is None else Rows(sink[:, None].expand(shape), chunks)
        self.tsink = None
        if sink is not None and tangents.sink is not None:  # a sink of -inf is none, whatever its tangent is
            self.tsink = Rows(tangents.sink.masked_fill(sink == -math.inf, 0.0)[:, None].expand(shape), chunks)

    def pairs(self, block: Block, span: Span) -> tuple[Tensor, Tensor]:
        """Return the scores of a chunk and their tangents, 0 where the scores are -inf."""
        chunks, keys = self.chunks, span.keys
        q, k = self.q.get(block), self.k.get(block, keys)
        s = self.scores.compute(block, span, q, k)
        ts = self.products(block, keys, q, k)
        if self.scores.slope is not None:
            ts.mul_(self.scores.slope)
        if self._tbias is not None:
            block.by_group(ts, chunks.group).add_(self._tbias.part(block, keys))
        return s, ts.masked_fill_(s == -math.inf, 0.0)  # a hidden key may have NaN

    def products(self, block: Block, keys: slice | Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the tangents of the scaled products of a chunk."""
        ts = self.chunks.buffer(_TANGENTS, (*q.shape[:2], k.shape[1]))
        if self.tq is not None:
            multiply(self.tq.get(block), k.mT, ts, self.scale)
        if self.tk is not None:
            multiply(q, self.tk.get(block, keys).mT, ts, self.scale, keep=self.tq is not None)
        return ts.zero_() if self.tq is None and self.tk is None else ts

    def kept(self, block: Block, keys: slice | Tensor) -> Tensor | None:
        """Return which probabilities of a chunk dropout keeps."""
        return None if self.dropout is None else kept_in(self.dropout, self.chunks, block, keys)


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    sink: Tensor | None,
    tangents: Tangents,
    **flags: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out and lse, and their tangents, in the same shapes and dtypes.

    Args:
        q, k, v, mask, bias, sink: as for :func:`eager.forward`.
        tangents: of q, k, v, the bias or its values, and the sink.
        flags: the other arguments of :func:`eager.forward`.

    >>> import torch
    >>> q, k, v, t = torch.randn(4, 1, 6, 2, 8, dtype=torch.float64)
    >>> out, _, tout, _ = forward(q, k, v, None, None, None, Tangents(v=t), softmax_scale=1.0)
    >>> torch.allclose(tout, formula.attention(q, k, t, softmax_scale=1.0)[0])  # out is linear in v
    True
    """
    out, tout = (q.new_zeros(q.shape[:3] + v.shape[3:]) for _ in range(2))
    shape, dtype = (q.shape[0], q.shape[2], q.shape[1]), formula.softmax_dtype(q)
    lse, tlse = q.new_full(shape, -math.inf, dtype=dtype), q.new_zeros(shape, dtype=dtype)
    if sink is not None:  # for rows that no chunk visits
        lse.copy_(sink[:, None])
        if tangents.sink is not None:
            tlse.copy_(tangents.sink.masked_fill(sink == -math.inf, 0.0)[:, None])
    if out.numel() == 0 or k.shape[1] == 0:
        return out, lse, tout, tlse
    call = _Call(q, k, v, mask, bias, sink, tangents, buffers=3, **flags)
    chunks, lowest = call.chunks, torch.finfo(dtype).min
    out_rows, tout_rows = Rows(out, chunks), Rows(tout, chunks)
    lse_rows, tlse_rows = (Rows(x.mT.unsqueeze(3), chunks) for x in (lse, tlse))
    for batch, heads in chunks.pairs():
        for block, spans in chunks.blocks(batch, heads):
            column = lse_rows.get(block)
            acc_o, acc_t = (column.new_zeros((*column.shape[:2], v.shape[3])) for _ in range(2))
            row_max, row_sum, total, mean = (
                torch.full_like(column, lowest),
                *(torch.zeros_like(column) for _ in range(3)),
            )
            if call.sink is not None:
                row_max = call.sink.get(block).clamp(min=lowest)
                row_sum = (row_max > lowest).to(dtype)
                if call.tsink is not None:
                    mean = total = call.tsink.get(block)
            for span in spans:
                s, ts = call.pairs(block, span)
                new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
                p = exponential(s.sub_(new_max))
                rescale = exponential(row_max.sub_(new_max))
                row_sum = p.sum(-1, keepdim=True).addcmul_(row_sum, rescale)
                weights = torch.mul(p, ts, out=chunks.buffer(_PRODUCTS, p.shape))
                total = weights.sum(-1, keepdim=True).addcmul_(total, rescale)
                new_mean = total / row_sum.clamp(min=1.0)
                acc_o.mul_(rescale)
                acc_t.mul_(rescale).addcmul_(acc_o, mean - new_mean)
                kept = call.kept(block, span.keys)
                if kept is not None:
                    p.mul_(kept)
                torch.mul(ts.sub_(new_mean), p, out=weights)
                v_block = call.v.get(block, span.keys)
                multiply(p, v_block, acc_o, keep=True)
                multiply(weights, v_block, acc_t, keep=True)
                if call.tv is not None:
                    multiply(p, call.tv.get(block, span.keys), acc_t, keep=True)
                row_max, mean = new_max, new_mean
            lse_rows.put(block, row_max.add_(row_sum.log()))
            tlse_rows.put(block, mean)
            row_sum.clamp_(min=1.0).div_(1.0 if call.dropout is None else call.dropout.scale)
            out_rows.put(block, acc_o.div_(row_sum))
            tout_rows.put(block, acc_t.div_(row_sum))
    return out, lse, tout, tlse


class _Needs(NamedTuple):
    q: bool
    k: bool
    v: bool
    bias: bool
    sink: bool


class _Statistics(NamedTuple):
    """The sums of rows for the gradients of a block: normalised sums over all keys, columns (pairs, G * rows, 1).

    `total` divides p; `mean`, `dot` and `dot_out` are m, E and rowsum(p * dp); `inner` is rowsum(p * g).
    """

    total: Tensor
    mean: Tensor
    dot: Tensor
    dot_out: Tensor
    inner: Tensor


@torch.no_grad()
def backward(
    cotangents: Cotangents,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    sink: Tensor | None,
    tangents: Tangents,
    lse: Tensor,
    *,
    needs_grad: tuple[bool, ...],
    **flags: Any,
) -> tuple[Tangents, Tangents]:
    """Return the gradients of the inputs of :func:`forward`, and of their tangents, chunk by chunk.

    Args:
        cotangents: the gradients of the results of :func:`forward`.
        q, k, v, mask, bias, sink, tangents, flags: as passed to :func:`forward`.
        lse: as :func:`forward` returned it.
        needs_grad: which gradients are computed, of q, k, v, bias and sink, and in the same order of their tangents;
            others are None.

    Returns:
        Two `Tangents`. Each gradient is summed in fp32 (fp64 for fp64), has the shape and dtype of its input, and is
        rounded once.
    """
    inputs = (q, k, v, values_of(bias), sink)
    needed = tuple(n and x is not None for n, x in zip(needs_grad, (*inputs, *inputs), strict=True))
    need, need_t = _Needs(*needed[:5]), _Needs(*needed[5:])
    per_key = (need.k + need_t.k) * q.shape[3] + (need.v + need_t.v) * v.shape[3]
    call = _Call(q, k, v, mask, bias, sink, tangents, buffers=6, sums_per_key=per_key, **flags)
    chunks = call.chunks
    empty = lse == -math.inf

    def rows_of(x: Tensor | None, fill: float = 0.0) -> Tensor:
        column = torch.zeros_like(lse) if x is None else x.to(lse.dtype).masked_fill(empty, fill)
        return column

    finite_lse, dlse, w = rows_of(lse), rows_of(cotangents.lse), rows_of(cotangents.tlse)
    share = torch.zeros_like(lse) if sink is None else sink_probability(sink, lse)
    zeros = q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
    dout, u = (zeros if x is None else x for x in (cotangents.out, cotangents.tout))
    dout_rows, u_rows = Rows(dout, chunks), Rows(u, chunks)
    lse_rows, dlse_rows, w_rows, share_rows = (Rows(x.mT.unsqueeze(3), chunks) for x in (finite_lse, dlse, w, share))
    # The terms of each row, initialised for rows that no chunk visits, in which the sink has probability 1.
    dsinks, dtsinks = ((share * x).mT.unsqueeze(3).contiguous() for x in (dlse, w))
    dsink_rows, dtsink_rows = Rows(dsinks, chunks), Rows(dtsinks, chunks)

    dq, dtq = (q.new_zeros(q.shape) if n else None for n in (need.q, need_t.q))
    dk, dtk = (k.new_zeros(k.shape) if n else None for n in (need.k, need_t.k))
    dv, dtv = (v.new_zeros(v.shape) if n else None for n in (need.v, need_t.v))
    dbias, dtbias = (_bias_gradient(bias, chunks, call.repeat) if n else None for n in (need.bias, need_t.bias))
    dq_rows, dtq_rows = (None if x is None else Rows(x, chunks) for x in (dq, dtq))

    if q.numel() and v.numel() and k.shape[1]:
        for batch, heads in chunks.pairs():
            sums = [None if x is None else KeySums(x, batch, heads, chunks.dtype) for x in (dk, dtk, dv, dtv)]
            dk_sum, dtk_sum, dv_sum, dtv_sum = sums
            for block, spans in chunks.blocks(batch, heads):
                columns = tuple(x.get(block) for x in (lse_rows, dlse_rows, w_rows, share_rows))
                lse_block, dlse_block, w_block, share_block = columns
                dout_block, u_block, q_block = dout_rows.get(block), u_rows.get(block), call.q.get(block)
                t_block = None if call.tq is None else call.tq.get(block)
                row = _statistics(call, block, spans, dout_block, u_block, columns)
                tsink = 0.0 if call.tsink is None else call.tsink.get(block)
                lift = w_block - row.dot
                own = share_block / row.total
                dtsink_rows.put(block, own * lift)
                dsink_rows.put(block, own * (tsink * lift - row.inner - row.dot_out + dlse_block))
                dq_sum, dtq_sum = (torch.zeros_like(q_block) if x is not None else None for x in (dq, dtq))
                for span in spans:
                    keys = span.keys
                    s, ts = call.pairs(block, span)
                    p = exponential(s.sub_(lse_block)).div_(row.total)
                    kept, k_block = call.kept(block, keys), call.k.get(block, keys)
                    scale = 1.0 if call.dropout is None else call.dropout.scale
                    e, f, dp = _row_products(call, block, keys, dout_block, u_block, kept)
                    weights = p if kept is None else p * kept
                    if dtv_sum is not None:
                        dtv_sum.add_product(keys, weights.mT, u_block, scale)
                    if dv_sum is not None:
                        dv_sum.add_product(keys, weights.mT, dout_block, scale)
                        dv_sum.add_product(keys, (weights * (ts - row.mean)).mT, u_block, scale)
                    lifted = e + lift
                    ds = ts.mul_(lifted).sub_(row.mean * e).add_(f).add_(dp)
                    ds = ds.add_(dlse_block - row.dot_out - row.inner).mul_(p)
                    dts = lifted.mul_(p)
                    if dbias is not None:
                        dbias.add(block, keys, ds)
                    if dtbias is not None:
                        dtbias.add(block, keys, dts)
                    if call.softcap > 0:
                        ds, dts = _through_softcap(call, block, keys, q_block, k_block, ds, dts)
                    tk_block = None if call.tk is None else call.tk.get(block, keys)
                    for total, by_s, by_ts in ((dq_sum, k_block, tk_block), (dtq_sum, None, k_block)):
                        if total is not None:
                            if by_s is not None:
                                multiply(ds, by_s, total, call.scale, keep=True)
                            if by_ts is not None:
                                multiply(dts, by_ts, total, call.scale, keep=True)
                    for key_sum, by_s, by_ts in ((dk_sum, q_block, t_block), (dtk_sum, None, q_block)):
                        if key_sum is not None:
                            if by_s is not None:
                                key_sum.add_product(keys, ds.mT, by_s, call.scale)
                            if by_ts is not None:
                                key_sum.add_product(keys, dts.mT, by_ts, call.scale)
                for rows, total in ((dq_rows, dq_sum), (dtq_rows, dtq_sum)):
                    if rows is not None and total is not None:
                        rows.put(block, total)
            for key_sum in sums:
                if key_sum is not None:
                    key_sum.put()

    def sink_sum(terms: Tensor, is_needed: Any) -> Tensor | None:
        return terms.sum((0, 1, 3)).to(sink.dtype) if sink is not None and is_needed else None

    return (
        Tangents(dq, dk, dv, None if dbias is None else dbias.result(), sink_sum(dsinks, need.sink)),
        Tangents(dtq, dtk, dtv, None if dtbias is None else dtbias.result(), sink_sum(dtsinks, need_t.sink)),
    )


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b, a.new_empty((*a.shape[:2], b.shape[2])), scale)


def _row_products(
    call: _Call, block: Block, keys: slice | Tensor, dout: Tensor, u: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return e, f and dp of a chunk: the products of u with v and tv, and of dout with v, dropped as p is."""
    scale = 1.0 if call.dropout is None else call.dropout.scale
    v = call.v.get(block, keys).mT
    e, dp = _product(u, v, scale), _product(dout, v, scale)
    f = torch.zeros_like(e) if call.tv is None else _product(u, call.tv.get(block, keys).mT, scale)
    return (e, f, dp) if kept is None else (e.mul_(kept), f.mul_(kept), dp.mul_(kept))


def _statistics(
    call: _Call, block: Block, spans: list[Span], dout: Tensor, u: Tensor, columns: tuple[Tensor, ...]
) -> _Statistics:
    """Sum over all keys of each row of a block, with the sink."""
    lse, _, w, share = columns
    total, means, dots, dots_out, inner = (torch.zeros_like(lse) for _ in range(5))
    for span in spans:
        s, ts = call.pairs(block, span)
        p = exponential(s.sub_(lse))
        e, f, dp = _row_products(call, block, span.keys, dout, u, call.kept(block, span.keys))
        total += p.sum(-1, keepdim=True)
        for sums, x in ((dots_out, dp), (dots, e), (means, ts), (inner, e.mul(ts).add_(f))):
            sums += (p * x).sum(-1, keepdim=True)
    total += share
    total.masked_fill_(total == 0, 1.0)
    if call.tsink is not None:
        means += share * call.tsink.get(block)
    for sums in (means, dots, dots_out, inner):
        sums.div_(total)
    return _Statistics(total, means, dots, dots_out, inner - 2 * means * dots + w * means)


def _through_softcap(
    call: _Call, block: Block, keys: slice | Tensor, q: Tensor, k: Tensor, ds: Tensor, dts: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn gradients of scores and their tangents into gradients of the scaled products and of their tangents."""
    slope = call.scores.slope
    assert slope is not None
    t = _product(q, k.mT, call.scale / call.softcap).tanh_()
    curve = t.mul_(slope).mul_(-2.0 / call.softcap)  # the derivative of the slope
    return ds.mul(slope).addcmul_(dts.mul(curve), call.products(block, keys, q, k)), dts * slope


def _bias_gradient(bias: ChunkBias | None, chunks: Chunks, repeat: int) -> BiasGradient:
    """Return the object that sums the gradient of a bias from the gradients of scores, also for one value per query."""
    assert bias is not None
    if isinstance(bias, Distances):
        return DistanceGradient(bias, chunks, repeat)
    if isinstance(bias, ListValues):
        return ListValuesGradient(bias, chunks, repeat)
    return BiasGradient(bias, None, chunks, repeat, by_score=True)
