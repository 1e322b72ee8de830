"""Attention sinks in the backward pass, computed from delta of each row, and lse with the sink."""

from __future__ import annotations

import torch
from torch import Tensor

# The approximate number of elements that `row_delta` multiplies at a time.
MOST_PRODUCTS = 2**24


def sink_probability(sink: Tensor, lse: Tensor) -> Tensor:
    """Return exp(sink - lse), the probability of the sink in each row; 0 if a head has no sink.

    Args:
        sink: (Hq,), any float dtype.
        lse: (B, Hq, Lq), with the sink. It is -inf only in rows that have neither keys nor a sink.

    Returns:
        (B, Hq, Lq) in lse's dtype.
    """
    logit = sink.to(lse.dtype)[:, None]
    return torch.exp((logit - lse).masked_fill(logit == -torch.inf, -torch.inf))  # -inf - -inf is NaN


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Return delta = rowsum(dout * out) - dlse, (B, Hq, Lq) in lse's dtype.

    It computes some entries of the batch at a time, because products in lse's dtype may need more memory than out.
    """
    delta = torch.empty_like(lse)
    at_once = max(1, MOST_PRODUCTS * len(out) // max(out.numel(), 1))
    for into, x, y in zip(delta.split(at_once), dout.split(at_once), out.split(at_once), strict=True):
        into.copy_((x.to(lse.dtype) * y.to(lse.dtype)).sum(-1).mT)
    if dlse is not None:
        delta -= dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    return delta


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return dsink = -sum of exp(sink - lse) * delta over entries and rows, rounded once to sink's dtype.

    The order of the sum is fixed.

    Args:
        sink: (Hq,), any float dtype.
        lse, delta: (B, Hq, Lq), of one dtype.
    """
    share = sink_probability(sink, lse)
    terms = torch.where(share == 0, 0.0, -share * delta)  # a row without a sink adds 0, even if its delta is inf
    return terms.sum((0, 2)).to(sink.dtype)


def through_lse(dlse: Tensor | None, sink: Tensor | None, lse: Tensor, delta: Tensor | None) -> Tensor | None:
    """Return the gradient of a number that is added to all scores of a row, (B, Hq, Lq); None for zeros.

    This gradient is the sum of ds over the row. Without a sink the number shifts lse and does not change p, so the
    gradient is dlse. With a sink it also moves weight between the sink and the keys, and the gradient is
    dlse + exp(sink - lse) * delta, which is 0 in a row without keys.

    Args:
        dlse: (B, Hq, Lq) in lse's dtype, 0 where lse is -inf; or None.
        sink: (Hq,) or None.
        lse, delta: (B, Hq, Lq); delta is unused without a sink.
    """
    if sink is None or delta is None:
        return dlse
    share = sink_probability(sink, lse)
    moved = torch.where(share == 0, 0.0, share * delta)
    return moved if dlse is None else dlse + moved
