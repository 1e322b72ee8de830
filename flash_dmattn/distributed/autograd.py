"""The `autograd.Function` of the strategy "gather"; it saves what the rank has, and nothing that was gathered."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gradients import spread
from ..problem import Gradients, NeedsGrad
from .operators import Numbers, gather_backward, gather_forward


class GatherCall(NamedTuple):
    """What both passes of a call share and is no tensor."""

    numbers: Numbers
    mask_forms: tuple[str, ...]


class GatherAttention(torch.autograd.Function):
    """(out, lse) of a rank's rows, with the gradients of its own tensors."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        call: GatherCall,
        *mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass."""
        out, lse = gather_forward(q, k, v, list(mask), list(call.mask_forms), bias, sink, *call.numbers)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward pass reads."""
        q, k, v, bias, sink, call, *mask = inputs
        ctx.save_for_backward(q, k, v, bias, sink, *output, *mask)
        ctx.set_materialize_grads(False)  # an unused lse must not cost a dlse of zeros
        ctx.call = call

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass; a second derivative is refused."""
        q, k, v, bias, sink, out, lse, *mask = ctx.saved_tensors
        rest = (None,) * (1 + len(mask))
        # Ranks that send nothing back would keep the others waiting, so a gradient of nothing is one of zeros.
        dout = torch.zeros_like(out) if dout is None else dout
        arguments = (dout, dlse, q, k, v, bias, sink, out, lse, ctx.call, *mask)
        if torch.is_grad_enabled():
            return *GatherGradients.apply(*arguments), *rest
        return *_gradients(*arguments), *rest


class GatherGradients(torch.autograd.Function):
    """The backward pass as a function of its own, so that it can refuse to have a derivative."""

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        """Run the backward pass."""
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Refuse."""
        raise NotImplementedError(
            "context_parallel_attention has no second derivative; "
            'flash_dmattn.attention(..., backend="eager") has one on one device'
        )


def _gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    call: GatherCall,
    *mask: Tensor,
) -> Gradients:
    inputs = (q, k, v, list(mask), list(call.mask_forms), bias, sink)
    found = gather_backward(dout, dlse, *inputs, out, lse, *call.numbers)
    return spread(found, NeedsGrad(*call.numbers.needs_grad))
