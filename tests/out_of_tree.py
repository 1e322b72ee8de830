"""Backends that are not part of the package: the formula behind each of the interfaces, counting the passes it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes

from flash_dmattn import operators, register_backend, unregister_backend
from flash_dmattn.backends.protocol import Availability, Rule
from flash_dmattn.masks import IntervalMask, KeyMask, TileMask
from flash_dmattn.problem import FEATURES, AttentionProblem, Flags, Gradients, MaskView, NeedsGrad
from flash_dmattn.reference import formula


@contextmanager
def registered(*backends: object, before: str | None = None) -> Iterator[None]:
    """Register backends for the length of a `with` block."""
    names: list[str] = []
    try:
        for backend in backends:
            register_backend(backend, before=before)  # type: ignore[arg-type]
            names.append(backend.NAME)  # type: ignore[attr-defined]
        yield
    finally:
        for name in names:
            unregister_backend(name)


class OutOfTree:
    """What every backend has beside its passes: a name, rules and a probe."""

    def __init__(
        self,
        name: str,
        *,
        rules: tuple[Rule, ...] = (),
        auto_rules: tuple[Rule, ...] = (),
        availability: Availability | None = None,
    ) -> None:
        self.NAME, self.RULES, self.AUTO_RULES = name, rules, auto_rules
        self.FEATURES = frozenset(FEATURES) - {
            "sink",
            "sequences",
            "paged",
            "tree",
        }  # their passes have no such arguments
        self.availability = Availability(True) if availability is None else availability
        self.ran: list[str] = []

    def probe(self) -> Availability:
        return self.availability


class KernelPair(OutOfTree):
    """A kernel backend without a differentiable backward."""

    def forward(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, mask: MaskView, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.ran.append("forward")
        out, lse = formula.attention(q, k, v, mask.dense, bias, **flags_of(problem))
        return out.contiguous(), lse.contiguous()

    def backward(
        self,
        problem: AttentionProblem,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        self.ran.append("backward")
        gradients = formula.gradients(dout, dlse, q, k, v, mask.dense, bias, **flags_of(problem))
        dq, dk, dv, dbias = (g if needed else None for g, needed in zip(gradients, problem.needs_grad))
        return dq, dk, dv, dbias


class Differentiable(OutOfTree):
    """A backend of one differentiable function."""

    def attention(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        self.ran.append("attention")
        return formula.attention(q, k, v, mask, bias, **flags_of(problem))


def flags_of(problem: AttentionProblem) -> dict[str, object]:
    """The keyword arguments of the formula."""
    return {
        "is_causal": problem.is_causal,
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "window_size": problem.window_size,
    }


def unpacked(mask: MaskView, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """The bool mask of what a pair receives, of any form."""
    if mask.form in ("none", "dense"):
        return mask.dense
    kinds = {"tiles": TileMask, "keys": KeyMask, "intervals": IntervalMask}
    return kinds[mask.form](seqlen_q, seqlen_k, False, (-1, -1), *mask.tensors).unpacked()


class Counting(OutOfTree):
    """A kernel backend behind operators, which count also where torch.compile has left no Python of it.

    `received` holds the form of the mask that each pass received.
    """

    def __init__(self, name: str, *, mask_form: str = "dense") -> None:
        super().__init__(name)
        self.MASK_FORM = mask_form
        self.count: Counter[str] = Counter()
        self.received: list[str] = []
        self.forward, self.backward = operators.define_pair(name, self._forward, self._backward)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskView, bias: Tensor | None, flags: Flags
    ) -> tuple[Tensor, Tensor]:
        self.count["forward"] += 1
        self.received.append(mask.form)
        dense = unpacked(mask, q.shape[1], k.shape[1])
        out, lse = formula.attention(q, k, v, dense, bias, **numbers_of(flags))
        return out.contiguous(), lse.contiguous()

    def _backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        flags: Flags,
        needs_grad: NeedsGrad,
    ) -> Gradients:
        self.count["backward"] += 1
        self.received.append(mask.form)
        dense = unpacked(mask, q.shape[1], k.shape[1])
        gradients = formula.gradients(dout, dlse, q, k, v, dense, bias, **numbers_of(flags))
        dq, dk, dv, dbias = (
            torch.empty(g.shape, dtype=g.dtype, device=g.device).copy_(g) if needed and g is not None else None
            for g, needed in zip(gradients, needs_grad)
        )
        return dq, dk, dv, dbias


def numbers_of(flags: Flags) -> dict[str, Any]:
    """Flags as the keyword arguments of the formula."""
    return {"softmax_scale": flags.softmax_scale, "softcap": flags.softcap, "window_size": flags.window}


# docs/compile_and_export.md says what holds there.
needs_hints = pytest.mark.skipif(
    not hasattr(symbolic_shapes, "optimization_hint"),
    reason="this torch has no optimization_hint: conditions of speed bind lengths",
)
