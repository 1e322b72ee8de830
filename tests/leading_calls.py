"""Calls with leading batch dims, against the formula of a call with one batch dim, all expanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accuracy import Results, failures_of
from torch import Tensor

from flash_dmattn.reference import formula

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
LQ, LK, H, HK, D, DV = 5, 7, 4, 2, 16, 16


@dataclass(frozen=True)
class LeadingCall:
    """A call with leading dims `batch`; `mask` and `bias` are whole shapes, or None."""

    batch: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    seqlen_q: int = LQ
    seqlen_k: int = LK
    num_heads: int = H
    num_heads_k: int = HK
    dtype: torch.dtype = torch.float64
    is_causal: bool = False
    seed: int = 0

    def build(self) -> dict[str, Any]:
        """Its tensors, and gradients that arrive at out and lse."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64).to(self.dtype)

        queries = (*self.batch, self.seqlen_q, self.num_heads)
        q, dout = normal(*queries, D), normal(*queries, DV)
        keys = (*self.batch, self.seqlen_k, self.num_heads_k)
        k, v = normal(*keys, D), normal(*keys, DV)
        mask = None if self.mask is None else torch.rand(self.mask, generator=random) < 0.6
        bias = None if self.bias is None else normal(*self.bias)
        dlse = torch.randn((*self.batch, self.num_heads, self.seqlen_q), generator=random, dtype=torch.float64)
        return {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "dout": dout, "dlse": dlse}


def over_batches(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of one batch dim as one of any, with mask and bias expanded to all of them."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, **flags: Any) -> Any:
        batch = q.shape[:-3]

        def flat(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])

        def own(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[(None,) * max(0, 3 - x.dim())]

        out, lse = function(flat(q), flat(k), flat(v), flat(own(mask)), flat(own(bias)), **flags)[:2]
        return out.reshape(*batch, *out.shape[1:]), lse.reshape(*batch, *lse.shape[1:])

    return run


def results(function: Callable[..., Any], call: LeadingCall, arguments: dict[str, Any], mask: Any = None) -> list[Any]:
    """out, lse and the gradients of a function; `mask` replaces the mask of the call."""
    leaves = [None if arguments[n] is None else arguments[n].detach().requires_grad_() for n in ("q", "k", "v", "bias")]
    q, k, v, bias = leaves
    mask = arguments["mask"] if mask is None else mask
    out, lse = function(q, k, v, mask, bias, is_causal=call.is_causal)[:2]
    loss = (out.double() * arguments["dout"].double()).sum()
    loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0).double() * arguments["dlse"]).sum()
    gradients = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
    return [out.detach(), lse.detach(), *(None if x is None else next(gradients) for x in leaves)]


def assert_accurate(actual: list[Any], call: LeadingCall, arguments: dict[str, Any]) -> None:
    """The rule of `accuracy.assert_accurate` for a call with leading dims."""

    def named(results: list[Any]) -> Results:
        return dict(zip(NAMES, results, strict=True))

    wide = {n: x.double() if x is not None and x.is_floating_point() else x for n, x in arguments.items()}
    exact = named(results(over_batches(formula.attention), replace(call, dtype=torch.float64), wide))
    plain = exact
    if call.dtype != torch.float64:
        plain = named(results(over_batches(formula.attention), call, arguments))
    like = {"out": arguments["q"], **{f"d{n}": arguments[n] for n in ("q", "k", "v", "bias")}}
    sizes = {name: torch.ones_like(x) for name, x in exact.items() if x is not None and not x.any()}
    failures = failures_of(named(actual), exact, plain, like, str(call), sizes=sizes)
    assert not failures, f"{call}\n  " + "\n  ".join(failures.values())
