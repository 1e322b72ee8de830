"""`Plan`: everything that is decided once for a class of calls that are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..backends.mask_choice import (
    backward_of,
    choose_form,
    forward_of,
    plan_packing,
    tangent_gradients_of,
    tangents_of,
)
from ..backends.protocol import Backend, Backward, BackwardTangents, Forward, ForwardTangents
from ..problem import Arrival, AttentionProblem, MaskChoice, MaskView, NeedsGrad, SequenceView, spec_of
from ..problem.inputs import Parts, Saved, in_rows
from ..remembered import Remembered
from . import packers as packers  # registers the fast packers with flash_dmattn.masks
from .config import BackendChoice
from .registry import on_change

Strides = tuple[tuple[int, ...] | None, ...]

# Planned passes, by backend, direction and problem. Plans with different keys share them, and so do operators that a
# compiler calls.
_passes: Remembered[Any] = Remembered(4096)
on_change.append(_passes.clear)


@dataclass(frozen=True, eq=False)
class Plan:
    """How the calls of a class run; no tuple, which `torch.func` would take apart field by field in every call.

    Attributes:
        described: the problem as validation describes it.
        problem: the problem as passes receive it: its mask has the form that they read, and its q, k and v lie as they
            arrive.
        forward, backward: the backend of each pass. backward is None if no gradient is needed, or if PyTorch
            differentiates the forward pass.
        requested: the choice in force: "auto", a name or a pair.
        choice: the form of the mask that both passes read.
        parts: how the tensors of a call become `Inputs`.
        is_differentiable: whether PyTorch differentiates the forward pass.
        falls_back: whether "auto" falls back to eager PyTorch on an accelerator.
        run_forward, run_backward: the passes. They are None if sizes may be symbols or tensors have no values; calls
            then go through the operators.
        pack: packs the bool mask of an unwatched call; None if it is not packed, or if an operator has to pack it.
        strides: the strides that the backward pass is planned for: of q, k, v and bias as they arrive, and of a dense
            mask.
    """

    described: AttentionProblem
    problem: AttentionProblem
    forward: Backend
    backward: Backend | None
    requested: BackendChoice
    choice: MaskChoice
    parts: Parts
    is_differentiable: bool = False
    falls_back: bool = False
    run_forward: Forward | None = None
    run_backward: Backward | None = None
    pack: Callable[[Tensor], MaskView] | None = None
    strides: Strides = ()

    def _replace(self, **changes: Any) -> Plan:
        return replace(self, **changes)

    def lies_as_planned(self, saved: Saved) -> bool:
        """Return whether saved tensors have the planned strides; hooks on saved tensors may return copies."""
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
    problem: AttentionProblem,
    forward: Backend,
    backward: Backend | None,
    requested: BackendChoice,
    *,
    arrival: Arrival = "rows",
    sequences: SequenceView | None = None,
    has_dropout: bool = False,
    falls_back: bool = False,
    with_passes: bool = True,
) -> Plan:
    """Plan the calls of a class.

    Args:
        problem: the problem as validation describes it.
        forward, backward, requested, falls_back: see `Plan`.
        arrival: how q, k and v arrive.
        sequences: the sequences of one of the calls.
        has_dropout: whether the calls have a dropout key.
        with_passes: whether to plan the passes, too.
    """
    choice = choose_form(problem, forward, backward)
    parts = Parts(choice.form, 0 if sequences is None else len(sequences.tensors), has_dropout)
    read = problem._replace(mask_form=choice.form, arrival=arrival)
    plan = Plan(problem, read, forward, backward, requested, choice, parts, forward.is_differentiable, falls_back)
    return planned(plan) if with_passes else plan


def planned(plan: Plan) -> Plan:
    """Plan the passes of a plan."""
    p = plan.problem
    strides: list[tuple[int, ...]] = [p.q_strides, p.k_strides, p.v_strides]
    if p.arrival == "heads_first":
        strides = [(x[0], x[2], x[1], x[3]) for x in strides]
    elif p.arrival == "tokens":
        strides = [x[1:] for x in strides]
    dense = p.mask.strides if p.mask_form == "dense" and p.mask is not None else None
    return plan._replace(
        run_forward=forward_pass(plan.forward, p),
        run_backward=None if plan.backward is None else backward_pass(plan.backward, p),
        pack=plan_packing(plan.described, plan.choice),
        strides=(*strides, None if p.bias_tensor is None else p.bias_tensor.strides, dense),
    )


def forward_pass(backend: Backend, problem: AttentionProblem) -> Forward:
    """Return the forward pass of a backend for a class of calls, planned once."""
    if not backend.is_differentiable:
        problem = _as_operands_tell(problem)._replace(needs_grad=NeedsGrad())
    run: Forward = _passes.find((backend, "forward", problem), lambda: forward_of(backend, problem))
    return run


def backward_pass(backend: Backend, problem: AttentionProblem) -> Backward:
    """Return the backward pass of a backend for a class of calls, planned once."""
    problem = _as_operands_tell(problem)
    run: Backward = _passes.find((backend, "backward", problem), lambda: backward_of(backend, problem))
    return run


def tangents_pass(backend: Backend, problem: AttentionProblem) -> ForwardTangents:
    """Return the forward pass of a backend in forward mode for a class of calls, planned once."""
    problem = _as_operands_tell(problem)._replace(needs_grad=NeedsGrad())
    run: ForwardTangents = _passes.find((backend, "tangents", problem), lambda: tangents_of(backend, problem))
    return run


def tangent_gradients_pass(
    backend: Backend, problem: AttentionProblem, needs_grad: tuple[bool, ...]
) -> BackwardTangents:
    """Return the gradients of a call in forward mode for a class of calls, planned once."""
    problem = _as_operands_tell(problem)._replace(needs_grad=NeedsGrad())
    run: BackwardTangents = _passes.find(
        (backend, needs_grad, problem), lambda: tangent_gradients_of(backend, problem, needs_grad)
    )
    return run


def _as_operands_tell(problem: AttentionProblem) -> AttentionProblem:
    """Drop from a problem everything that an operator does not receive, so that watched calls run the same passes."""
    left, right = problem.window
    spec = problem.sequences
    return problem._replace(
        is_causal=right == 0,
        window_size=(left, -1 if right == 0 else right),
        return_lse=False,
        sequences=None if spec is None else spec._replace(names_max=(True, True)),
    )


def laid_anew(problem: AttentionProblem, saved: Saved) -> tuple[AttentionProblem, Saved]:
    """Describe saved tensors whose strides are not the planned ones; return also these, with a mask made contiguous."""
    x = saved.inputs
    q, k, v = (in_rows(t, problem.arrival).stride() for t in x[:3])
    mask, bias, relative = problem.mask, problem.bias, problem.relative
    if problem.mask_form == "dense":
        mask = spec_of(x.mask.tensors[0])
    elif x.mask.tensors:
        x = x._replace(mask=x.mask._replace(tensors=tuple(t.contiguous() for t in x.mask.tensors)))
    if bias is not None and x.bias is not None:
        bias = spec_of(x.bias)
    if relative is not None and x.bias is not None:
        relative = spec_of(x.bias)
    strides: dict[str, Any] = {"q_strides": q, "k_strides": k, "v_strides": v}
    anew = problem._replace(**strides, mask=mask, bias=bias, relative=relative)
    return anew, saved._replace(inputs=x)
