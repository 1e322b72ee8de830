"""What a call has to give, in fp64, and how far from it a bf16 result may be."""

from __future__ import annotations

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.reference import formula, yardstick

from .workloads import Inputs

# Beyond this a peer is wrong. Ours has to meet the accuracy rule instead, which is some ten times stricter: a peer may
# round what we do not, for instance sum the gradient of a bias in bf16.
PEER_LIMIT = 3e-2


def truth(inputs: Inputs) -> dict[str, Tensor]:
    """out, dq, dk, dv and dbias in fp64, chunk by chunk by the eager backend."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.leaves.items()}
    q, k, v = (leaves[name] for name in ("dq", "dk", "dv"))
    out = flash_dmattn.attention(q, k, v, inputs.mask, leaves.get("dbias"), is_causal=inputs.is_causal, backend="eager")
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout.double())
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@torch.no_grad()
def allowances(inputs: Inputs, exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest error that the accuracy rule permits, by tensor: 1.5 times that of plain PyTorch, plus 1e-5.

    The error of plain PyTorch is measured on the first key-value head and its group, in every batch element: the whole
    (B, Hq, L, L) matrices, which it needs, would not fit the memory at 16k.
    """
    heads_k = inputs.k.shape[2]

    def first(x: Tensor | None, dim: int) -> Tensor | None:
        return x if x is None or x.shape[dim] == 1 else x.narrow(dim, 0, x.shape[dim] // heads_k)

    q, k, v, dout = (first(x, 2) for x in inputs[:4])
    mask, bias = first(inputs.mask, 1), first(inputs.bias, 1)
    out = formula.attention(q, k, v, mask, bias, is_causal=inputs.is_causal)[0]
    gradients = yardstick.gradients(dout, None, q, k, v, mask, bias, is_causal=inputs.is_causal)
    plain = {"out": out, **dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=True))}
    limits = {}
    for name, x in exact.items():
        part = first(x, 1 if name == "dbias" else 2)
        limits[name] = yardstick.RATIO * error(plain[name], part) + yardstick.FLOOR
    return limits


def error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact||; NaN where x has one."""
    if x.shape != exact.shape:
        raise ValueError(f"a result has shape {tuple(x.shape)} and needs {tuple(exact.shape)}")
    return float((x.detach().double() - exact).norm() / exact.norm())


def errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The error of every tensor of `exact`, in its order."""
    return {name: error(results[name], x) for name, x in exact.items()}


def wrong(found: dict[str, float], limits: dict[str, float], ours: bool) -> list[str]:
    """The tensors whose error is above the limit, which for peers is at least 3e-2."""
    return [name for name, x in found.items() if not x <= (limits[name] if ours else max(limits[name], PEER_LIMIT))]
