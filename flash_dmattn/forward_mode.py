"""Calls in forward mode: which backend runs them, how, and the gradients of a loss that contains tangents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from . import operators
from .definition import each_call, is_batched, is_watched, stacked
from .dispatch.plan import Plan, tangent_gradients_pass, tangents_pass
from .dispatch.selection import select_tangent_gradients, select_tangents
from .problem import NeedsGrad
from .problem.inputs import Inputs
from .reference.tangents import Cotangents, Tangents

NUM_INPUTS = len(NeedsGrad._fields)


def take_apart(x: Inputs) -> tuple[Inputs, Tangents]:
    """Return the inputs of a call without their tangents, and the tangents."""
    duals: list[Any] = [None if t is None else forward_ad.unpack_dual(t) for t in (x.q, x.k, x.v, x.bias, x.sink)]
    primals: list[Any] = [None if dual is None else dual.primal for dual in duals]
    tangents = Tangents(*(None if dual is None else dual.tangent for dual in duals))
    return x._replace(**dict(zip(NeedsGrad._fields, primals, strict=True))), tangents


def run_tangents(plan: Plan, x: Inputs, tangents: Tangents) -> tuple[Tensor, ...]:
    problem = plan.problem
    backend = select_tangents(problem, plan.forward)
    is_shown = problem.device == "meta" or profiler._is_profiler_enabled or is_batched(*tangents)
    if is_shown or is_watched(*x[:3], *tangents):
        return operators.tangents(problem, backend.name, x, tangents)
    return tangents_pass(backend, problem)(x, tangents)


class TangentGradients(torch.autograd.Function):
    """Compute the gradients of out, lse and their tangents; they have no derivatives in turn.

    Its arguments after the plan and the needed gradients, ten flags, are the gradients of the results, lse, the inputs,
    their tangents, and the other tensors of the call.
    """

    @staticmethod
    def forward(plan: Plan, needs_grad: tuple[bool, ...], *tensors: Any) -> tuple[Tensor | None, ...]:
        if is_batched(*tensors):
            raise NotImplementedError(
                "attention has no gradients of tangents in a batch (is_grads_batched=True, vectorize=True); "
                "ask for one after the other, or take torch.func.hessian, or torch.func.vmap of torch.func.vjp"
            )
        sent, lse, own = Cotangents(*tensors[:4]), tensors[4], Tangents(*tensors[5 + NUM_INPUTS : 5 + 2 * NUM_INPUTS])
        x = plan.parts.inputs(*tensors[5 : 5 + NUM_INPUTS], *tensors[5 + 2 * NUM_INPUTS :])
        problem = plan.problem
        backend = select_tangent_gradients(problem, select_tangents(problem, plan.forward), plan.requested)
        if is_watched(*x[:3], *own, *sent) or profiler._is_profiler_enabled:
            return operators.tangent_gradients(problem, backend.name, x, own, lse, sent, needs_grad)
        both = tangent_gradients_pass(backend, problem, needs_grad)(x, own, lse, sent)
        return (*both[0], *both[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(_NO_THIRD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(_NO_THIRD)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, needs_grad: tuple[bool, ...], *tensors: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        each = [
            TangentGradients.apply(plan, needs_grad, *own) for own in each_call(info.batch_size, in_dims[2:], tensors)
        ]
        return stacked(each)


_NO_THIRD = (
    "a gradient of attention that contains tangents has no derivative; "
    'call attention(..., backend="reference"), which has derivatives of every order'
)
