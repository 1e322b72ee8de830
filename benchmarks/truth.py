"""The results of a call in fp64, and the largest error that a result in bf16 or fp32 may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.reference import formula, yardstick
from flash_dmattn.reference.distances import Distances

from .inputs import Inputs

Results = dict[str, Tensor]

# Beyond this the time of a peer is not used. Ours has to meet the accuracy rule instead, which is some ten times
# stricter: a peer may round what we do not, for instance sum the gradient of a bias in bf16.
PEER_LIMIT = 3e-2
# In fp32 a peer that rounds its products to TF32 is no peer, unless torch allows that: then limits are wider than this.
PEER_LIMIT_FP32 = 1e-5


def truth(inputs: Inputs, gradients: bool = True) -> Results:
    """out, lse and, if asked for, dq, dk, dv and dbias in fp64, chunk by chunk by the eager backend."""
    leaves = {name: x.detach().double().requires_grad_(gradients) for name, x in inputs.leaves.items()}
    q, k, v = (leaves[name] for name in ("dq", "dk", "dv"))
    out, lse = flash_dmattn.attention(
        q,
        k,
        v,
        inputs.mask,
        inputs._replace(bias=leaves.get("dbias")).passed_bias,
        is_causal=inputs.is_causal,
        return_lse=True,
        backend="eager",
    )
    results = {"out": out.detach(), "lse": lse.detach()}
    if gradients:
        taken = torch.autograd.grad(out, list(leaves.values()), inputs.dout.double())
        results |= dict(zip(leaves, taken, strict=True))
    return results


class Yardstick:
    """Plain PyTorch in the dtype of the call, whose error gives the largest error that the accuracy rule permits.

    It needs (B, H, Lq, Lk) matrices. For all heads these would not fit in memory at 16k, so it computes only the first
    key-value head and its group, in every batch element. It computes all heads if they share one bias.
    """

    @torch.no_grad()
    def __init__(self, inputs: Inputs, exact: Results) -> None:
        shared = inputs.bias is not None and inputs.bias.shape[1] == 1
        self.parts = 1 if shared else inputs.k.shape[2]
        q, k, v, dout = (self.part("dq", x) for x in inputs[:4])
        mask, bias = (x if x is None else self.part("dbias", x) for x in (inputs.mask, inputs.bias))
        if bias is not None and bias.dim() == 3:  # values by distance
            bias = Distances(bias[:, :, None], bias.shape[2] // 2, True)
        out, lse = formula.attention(q, k, v, mask, bias, is_causal=inputs.is_causal)[:2]
        plain: Results = {"out": out, "lse": lse}
        if "dq" in exact:
            gradients = yardstick.gradients(dout, None, q, k, v, mask, bias, is_causal=inputs.is_causal)
            named = zip(("dq", "dk", "dv", "dbias"), gradients, strict=True)
            plain |= {name: x for name, x in named if x is not None}
            if isinstance(bias, Distances):
                plain["dbias"] = plain["dbias"].squeeze(2)
        self.plain = plain
        self.errors = {name: error(plain[name], self.part(name, x)) for name, x in exact.items()}
        ratio, floor = yardstick.limits_of(q.dtype)
        self.limits = {name: ratio * x + floor for name, x in self.errors.items()}
        if q.dtype == torch.float32:  # p = exp(s - lse) has the rounding of lse in it
            lse = exact["lse"]
            rounding = yardstick.LSE_ROUNDING * lse[lse > -math.inf].abs().max().item()
            for name in set(self.limits) & set(inputs.leaves):
                self.limits[name] += max(rounding - floor, 0.0)

    def part(self, name: str, x: Tensor) -> Tensor:
        """Return the heads of a tensor that plain PyTorch computes."""
        dim = 1 if name in ("dbias", "lse") else 2
        return x if x.shape[dim] == 1 else x.narrow(dim, 0, x.shape[dim] // self.parts)

    def distances(self, results: Results) -> dict[str, float]:
        """||x - plain|| / ||plain|| of every result, over the heads that plain PyTorch computes."""
        return {name: error(self.part(name, x), self.plain[name]) for name, x in results.items()}


def plain_attention(mask: Tensor, is_causal: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return plain PyTorch's attention in the dtype of q, a function of q, k, v and bias, for a mask (B | 1, Hk, L, L).

    It computes one key-value head and its group at a time. Its backward pass computes everything again, by the formulas
    of the yardstick. The score matrices of a whole call, or of several layers, would not fit in memory.
    """

    def per_head(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        group = q.shape[2] // k.shape[2]
        for head in range(k.shape[2]):
            yield slice(head * group, (head + 1) * group), slice(head, head + 1)

    class Plain(torch.autograd.Function):
        """out, and the gradients of q, k, v and bias."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v, bias)
            out = [
                formula.attention(q[:, :, g], k[:, :, h], v[:, :, h], mask[:, h], bias[:, h], is_causal=is_causal)[0]
                for g, h in per_head(q, k)
            ]
            return torch.cat(out, 2)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            q, k, v, bias = ctx.saved_tensors
            parts = [
                yardstick.gradients(
                    *(dout[:, :, g], None, q[:, :, g], k[:, :, h], v[:, :, h], mask[:, h], bias[:, h]),
                    is_causal=is_causal,
                )
                for g, h in per_head(q, k)
            ]
            dq, dk, dv, dbias = zip(*parts, strict=True)
            return torch.cat(dq, 2), torch.cat(dk, 2), torch.cat(dv, 2), torch.cat(dbias, 1)

    return Plain.apply


def error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact|| over finite elements; infinite where x has -inf in another place, NaN with a NaN."""
    if x.shape != exact.shape:
        raise ValueError(f"a result has shape {tuple(x.shape)} and needs {tuple(exact.shape)}")
    x, exact = x.detach().double(), exact.detach().double()
    empty = exact == -math.inf
    if bool(empty.any()):
        if not torch.equal(x == -math.inf, empty):
            return math.inf
        x, exact = x[~empty], exact[~empty]
    return float((x - exact).norm() / exact.norm())


def errors(results: Results, exact: Results) -> dict[str, float]:
    """Return the error of every result, in the order of `exact`."""
    return {name: error(results[name], x) for name, x in exact.items() if name in results}


def wrong(
    measured: dict[str, float], limits: dict[str, float], ours: bool, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Return the tensors whose error is above the limit; a peer may have the error of its dtype."""
    least = 0.0 if ours else PEER_LIMIT_FP32 if dtype == torch.float32 else PEER_LIMIT
    return [name for name, x in measured.items() if not x <= max(limits[name], least)]
