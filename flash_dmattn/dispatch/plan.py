"""`Plan`: the decisions that are made once for a class of calls with the same key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from ..backends.mask_choice import backward_of, choose_form, forward_of, plan_view, tangent_gradients_of, tangents_of
from ..backends.protocol import Backend, Backward, BackwardTangents, Forward, ForwardTangents
from ..caches import ClockCache
from ..problem import Arrival, AttentionProblem, MaskChoice, MaskView, NeedsGrad, tensor_spec
from ..problem.inputs import Saved, SavedLayout, in_rows, make_saved_layout
from . import packers as packers  # registers the fast packers with flash_dmattn.masks
from .config import BackendChoice, Fallback
from .registry import on_change

T = TypeVar("T")
Strides = tuple[tuple[int, ...] | None, ...]

# Planned passes, by the function that plans them, backend and problem. Several plans, and operators that a compiler
# calls, may use the same one.
_passes: ClockCache[Any] = ClockCache(4096)
on_change.append(_passes.clear)


@dataclass(frozen=True, eq=False)
class Plan:
    """The decisions for a class of calls. It is no tuple, because `torch.func` would flatten one in every call.

    Attributes:
        described: the problem as validation describes it.
        problem: the problem for the passes: it has the chosen form of the mask, and the layout of the caller's q, k
            and v.
        forward, backward: the backend of each pass. backward is None if no gradient is needed, or if PyTorch
            differentiates the forward pass.
        requested: the requested backend: "auto", a name or a pair.
        choice: the form of the mask for both passes.
        saved_layout: how the tensors of a call become `Inputs`.
        is_differentiable: whether PyTorch differentiates the forward pass.
        falls_back: whether "auto" falls back to eager PyTorch on an accelerator.
        fallback: the policy of the `with` block around the call, because derivatives may run in another thread; None
            without one.
        run_forward, run_backward: the passes. If sizes may be symbols or tensors have no values they are None, and
            calls go through the operators.
        view: converts the mask of an unwatched call to the chosen form, (mask, k, v, bias) -> view; None if `view_of`
            has to do it.
        strides: the strides for which the backward pass is planned: of the caller's q, k, v and bias, and of a dense
            mask.
    """

    described: AttentionProblem
    problem: AttentionProblem
    forward: Backend
    backward: Backend | None
    requested: BackendChoice
    choice: MaskChoice
    saved_layout: SavedLayout
    is_differentiable: bool = False
    falls_back: bool = False
    fallback: Fallback | None = None
    run_forward: Forward | None = None
    run_backward: Backward | None = None
    view: Callable[[Any, Tensor, Tensor, Tensor | None], MaskView] | None = None
    strides: Strides = ()

    def lies_as_planned(self, saved: Saved) -> bool:
        """Return whether saved tensors have the planned strides; hooks on saved tensors may have changed them."""
        q, k, v, mask, bias, *_ = saved.inputs
        strides = self.strides
        if (
            q.stride() != strides[0]
            or k.stride() != strides[1]
            or v.stride() != strides[2]
            or not (bias is None or bias.stride() == strides[3])
        ):
            return False
        if strides[4] is not None:
            return mask.tensors[0].stride() == strides[4]
        for x in mask.tensors:
            if not x.is_contiguous():
                return False
        return True


def make_plan(
    described: AttentionProblem,
    forward: Backend,
    backward: Backend | None,
    requested: BackendChoice,
    arrival: Arrival,
    falls_back: bool,
    with_passes: bool,
) -> Plan:
    """Plan a class of calls; see `Plan` for the arguments. Without `with_passes`, calls go through the operators."""
    choice = choose_form(described, forward, backward)
    p = described._replace(mask_form=choice.form, arrival=arrival)
    is_differentiable = forward.is_differentiable
    plan = Plan(described, p, forward, backward, requested, choice, make_saved_layout(p), is_differentiable, falls_back)
    if not with_passes:
        return plan
    strides: list[tuple[int, ...]] = [p.q_strides, p.k_strides, p.v_strides]
    if arrival == "heads_first":
        strides = [(x[0], x[2], x[1], x[3]) for x in strides]
    elif arrival == "tokens":
        strides = [x[1:] for x in strides]
    dense = p.mask.strides if p.mask_form == "dense" and p.mask is not None else None
    return replace(
        plan,
        run_forward=forward_pass(forward, p),
        run_backward=None if backward is None else backward_pass(backward, p),
        view=plan_view(described, choice, forward, arrival),
        strides=(*strides, None if p.bias_tensor is None else p.bias_tensor.strides, dense),
    )


def forward_pass(backend: Backend, problem: AttentionProblem) -> Forward:
    """Return the forward pass of a backend for a class of calls, planned once."""
    return _planned(forward_of, backend, problem if backend.is_differentiable else _without_gradients(problem))


def backward_pass(backend: Backend, problem: AttentionProblem) -> Backward:
    """Return the backward pass of a backend for a class of calls, planned once."""
    return _planned(backward_of, backend, _as_operands_tell(problem))


def tangents_pass(backend: Backend, problem: AttentionProblem) -> ForwardTangents:
    """Return the forward pass with tangents (forward mode) of a backend for a class of calls, planned once."""
    return _planned(tangents_of, backend, _without_gradients(problem))


def tangent_gradients_pass(
    backend: Backend, problem: AttentionProblem, needs_grad: tuple[bool, ...]
) -> BackwardTangents:
    """Return the pass of a backend that differentiates tangents, for a class of calls, planned once."""
    return _planned(tangent_gradients_of, backend, _without_gradients(problem), needs_grad)


def _planned(plan: Callable[..., T], *arguments: Any) -> T:
    planned: T = _passes.get_or_make((plan, *arguments), lambda: plan(*arguments))
    return planned


def _without_gradients(problem: AttentionProblem) -> AttentionProblem:
    return _as_operands_tell(problem)._replace(needs_grad=NeedsGrad())


def _as_operands_tell(problem: AttentionProblem) -> AttentionProblem:
    """Reset the fields of a problem that an operator does not receive, so that watched calls run the same passes."""
    flags = problem.flags
    if flags.sequences is not None:
        flags = flags._replace(sequences=flags.sequences._replace(names_max=(True, True)))
    is_causal, window = flags.right == 0, (flags.left, -1 if flags.right == 0 else flags.right)
    return problem._replace(is_causal=is_causal, window_size=window, return_lse=False, flags=flags)


def with_strides(problem: AttentionProblem, saved: Saved) -> tuple[AttentionProblem, Saved]:
    """Return the problem with the strides of the saved tensors, and these, with a prepared mask made contiguous."""
    x = saved.inputs
    q, k, v = (in_rows(t, problem.arrival).stride() for t in x[:3])
    mask = problem.mask
    if problem.mask_form == "dense":
        mask = tensor_spec(x.mask.tensors[0])
    elif x.mask.tensors:
        x = x._replace(mask=x.mask._replace(tensors=tuple(t.contiguous() for t in x.mask.tensors)))
    strides: dict[str, Any] = {"q_strides": q, "k_strides": k, "v_strides": v}
    anew = problem._replace(**strides, mask=mask).with_bias(x.bias)
    return anew, saved._replace(inputs=x)
