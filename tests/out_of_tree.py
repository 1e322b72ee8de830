"""Backends that are not part of the package: the formula behind each of the interfaces, counting the passes it ran."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes

from flash_dmattn import Backend, register_backend, unregister_backend
from flash_dmattn.backends.protocol import Availability, Backward, Forward, Rule
from flash_dmattn.dispatch import registry
from flash_dmattn.masks.prepared.storage import unpack_view
from flash_dmattn.problem import FEATURES, AttentionProblem, Gradients, MaskView
from flash_dmattn.problem.inputs import Inputs, Saved
from flash_dmattn.reference import formula

# Features that the passes below lack unless a test says otherwise; they never have sequences.
LACKING = {"sink", "sequences", "paged", "tree", "max_scores", "entropy"}
USABLE = Availability(True)


def replace_backend(name: str, **changes: Any) -> None:
    """Put a changed copy of a backend into its place in the registry."""
    table = registry.BACKENDS.table
    registry.BACKENDS.table = {**table, name: dataclasses.replace(table[name], **changes)}
    registry.choices_changed()


@contextmanager
def replaced(name: str, **changes: Any) -> Iterator[None]:
    """The same for the length of a `with` block."""
    before = registry.BACKENDS.table[name]
    replace_backend(name, **changes)
    try:
        yield
    finally:
        registry.BACKENDS.table = {**registry.BACKENDS.table, name: before}
        registry.choices_changed()


def rules_without(name: str, *codes: str) -> tuple[Rule, ...]:
    """The rules of a backend but for some: "device" is the rule that admits no CPU."""
    return tuple(rule for rule in registry.BACKENDS[name].rules if rule.code not in codes)


@contextmanager
def registered(*backends: OutOfTree | Backend, before: str | None = None) -> Iterator[None]:
    """Register backends for the length of a `with` block."""
    names: list[str] = []
    try:
        for each in backends:
            backend = each if isinstance(each, Backend) else each.backend
            register_backend(backend, before=before)
            names.append(backend.name)
        yield
    finally:
        for name in names:
            unregister_backend(name)


class OutOfTree:
    """A backend, and the passes that it ran."""

    def __init__(
        self,
        name: str,
        *,
        rules: tuple[Rule, ...] = (),
        auto_rules: tuple[Rule, ...] = (),
        availability: Availability = USABLE,
        lacks: Collection[str] = LACKING,
        **more: Any,
    ) -> None:
        self.ran: list[str] = []
        self.backend = Backend(
            name=name,
            plan_forward=self.plan_forward,
            plan_backward=self.plan_backward,
            features=frozenset(FEATURES).difference(lacks),
            rules=rules,
            auto_rules=auto_rules,
            probe=lambda: availability,
            **more,
        )

    def plan_forward(self, problem: AttentionProblem) -> Forward:
        raise NotImplementedError

    # None of a backend whose forward pass PyTorch differentiates.
    plan_backward: Any = None


class KernelPair(OutOfTree):
    """A backend with a backward pass of its own, without a second derivative.

    It counts its passes in `count`, and `received` has the form of the mask of each.
    """

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(name, **more)
        self.count: Counter[str] = Counter()
        self.received: list[str] = []

    def _received(self, direction: str, x: Inputs) -> tuple[Tensor | None, ...]:
        """The tensors of a pass, which has begun."""
        self.ran.append(direction)
        self.count[direction] += 1
        self.received.append(x.mask.form)
        return x.q, x.k, x.v, unpacked(x.mask, x.q.shape[1], x.k.shape[1]), x.bias

    def plan_forward(self, problem: AttentionProblem) -> Forward:
        def forward(x: Inputs) -> tuple[Tensor, Tensor]:
            out, lse = formula.attention(*self._received("forward", x), **flags_of(problem), sink=x.sink)
            return out.contiguous(), lse.contiguous()

        return forward

    def plan_backward(self, problem: AttentionProblem) -> Backward:
        def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
            x = saved.inputs
            gradients = formula.gradients(dout, dlse, *self._received("backward", x), **flags_of(problem), sink=x.sink)
            dq, dk, dv, dbias, dsink = (
                torch.empty(g.shape, dtype=g.dtype, device=g.device).copy_(g) if needed and g is not None else None
                for g, needed in zip((*gradients, None)[:5], problem.needs_grad, strict=True)
            )
            return dq, dk, dv, dbias, dsink

        return backward


class Differentiable(OutOfTree):
    """A backend of one differentiable function."""

    def plan_forward(self, problem: AttentionProblem) -> Forward:
        def forward(x: Inputs) -> tuple[Tensor, ...]:
            self.ran.append("forward")
            return formula.attention(x.q, x.k, x.v, x.mask.dense, x.bias, **flags_of(problem))

        return forward


def flags_of(problem: AttentionProblem) -> dict[str, Any]:
    return {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap, "window_size": problem.window}


def unpacked(mask: MaskView, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """The bool mask that a pass receives in any form."""
    if mask.form in ("none", "dense"):
        return mask.dense
    return unpack_view(mask, seqlen_q, seqlen_k)


# docs/compile_and_export.md says what holds there.
needs_hints = pytest.mark.skipif(
    not hasattr(symbolic_shapes, "optimization_hint"),
    reason="this torch has no optimization_hint: conditions of speed bind lengths",
)
