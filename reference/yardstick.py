"""The yardstick of accuracy: the error of plain PyTorch for the formulas in a low precision.

A result x of any backend passes if err(x) <= RATIO * err(yardstick) + FLOOR, with err(x) = ||x - x64|| / ||x64||.
The yardstick of out and lse is :func:`formula.attention` in that dtype. fp32 has limits of its own, see `limits_of`.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from . import formula
from .distances import AnyBias
from .dropout import Dropout

RATIO, FLOOR = 1.5, 1e-5
# Products of fp32 numbers that are split in two in bfloat16 have an error of 6e-6, which FLOOR would accept; split in
# three they have the error of fp32. Tensor cores sum in another order, so the ratio is larger.
RATIO_FP32, FLOOR_FP32 = 2.0, 2e-7
# A backward pass recomputes p = exp(s - lse) from the fp32 lse of the contract, so p is off by lse's own rounding.
LSE_ROUNDING = 2.0**-23


def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    """Return RATIO and FLOOR for calls whose q has this dtype."""
    return (RATIO_FP32, FLOOR_FP32) if dtype == torch.float32 else (RATIO, FLOOR)


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: AnyBias | None,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    dentropy: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute the gradient formulas with products and stored tensors in q's dtype, and the rest in fp32.

    `formula.gradients` keeps everything in fp32. Here out, p and ds are rounded where an implementation that saves
    memory has to round them; delta = rowsum(dout * out) is computed from the rounded out.
    """
    heads_k, dtype = k.shape[2], q.dtype
    scale = formula.default_scale(q, softmax_scale)
    s, slope = formula.scores(q, k, mask, bias, is_causal, scale, softcap, window_size)
    p, lse = formula.softmax(s, sink)
    qg, dout = (rearrange(x, "b i (h g) d -> b i h g d", h=heads_k) for x in (q, dout))
    weights = p if dropout is None else dropout.apply(p)
    out = torch.einsum("bhgij,bjhd->bihgd", weights.to(dtype), v)
    delta = rearrange((dout.to(p.dtype) * out.to(p.dtype)).sum(-1), "b i h g -> b h g i")
    if dlse is not None:
        delta = delta - rearrange(dlse, "b (h g) i -> b h g i", h=heads_k).masked_fill(lse == -torch.inf, 0.0)
    dp = torch.einsum("bihgd,bjhd->bhgij", dout, v).to(p.dtype)
    dp = dp if dropout is None else dropout.apply(dp)
    # In a row with neither keys nor a sink -inf - -inf is NaN; the probability of the sink is 0.
    share = None
    if sink is not None:
        share = torch.exp((sink.to(lse.dtype).view(*lse.shape[1:3], 1) - lse).nan_to_num(nan=-torch.inf))
    sink_delta = delta
    if dentropy is not None:
        g = rearrange(dentropy, "b (h g) i -> b h g i", h=heads_k).masked_fill(lse == -torch.inf, 0.0)
        delta = delta + g * formula.row_entropy(p, share)
        sink_delta = delta if share is None else delta + g * formula.log_of(share)
        dp = dp - g.unsqueeze(-1) * formula.log_of(p)
    ds = p * (dp - delta.unsqueeze(-1))
    ds_product = (ds if slope is None else ds * slope).to(dtype)
    dq = torch.einsum("bhgij,bjhd->bihgd", ds_product, k).flatten(2, 3).to(p.dtype) * scale
    dk = torch.einsum("bhgij,bihgd->bjhd", ds_product, qg).to(p.dtype) * scale
    dv = torch.einsum("bhgij,bihgd->bjhd", weights.to(dtype), dout)
    dbias = None if bias is None else formula.bias_gradient(ds, bias, q.shape[2])
    gradients = dq.to(dtype), dk.to(dtype), dv, dbias
    if sink is None or share is None:
        return gradients
    return *gradients, -(share * sink_delta).sum((0, 3)).flatten().to(sink.dtype)
