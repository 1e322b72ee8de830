"""Backends that are not part of the package: the formula behind each of the interfaces, counting the passes it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from flash_dmattn import operators, register_backend
from flash_dmattn.backends.protocol import Availability, Rule
from flash_dmattn.dispatch.call_cache import forget
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import KeyMask, TileMask
from flash_dmattn.problem import AttentionProblem, Gradients, MaskTensors
from flash_dmattn.reference import formula


@contextmanager
def registered(*backends: object, before: str | None = None) -> Iterator[None]:
    """Register backends for the length of a `with` block."""
    order = dict(BACKENDS)
    try:
        for backend in backends:
            register_backend(backend, before=before)
        yield
    finally:
        BACKENDS.clear()
        BACKENDS.update(order)
        forget()


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
        self.availability = Availability(True) if availability is None else availability
        self.ran: list[str] = []

    def probe(self) -> Availability:
        return self.availability


class KernelPair(OutOfTree):
    """A kernel backend without a differentiable backward."""

    def forward(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, mask: MaskTensors, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.ran.append("forward")
        out, lse = formula.attention(q, k, v, mask[0] if mask else None, bias, **flags_of(problem))
        return out.contiguous(), lse.contiguous()

    def backward(
        self,
        problem: AttentionProblem,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskTensors,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        self.ran.append("backward")
        gradients = formula.gradients(dout, dlse, q, k, v, mask[0] if mask else None, bias, **flags_of(problem))
        dq, dk, dv, dbias = (g if needed else None for g, needed in zip(gradients, problem.need))
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


def unpacked(mask: Sequence[Tensor], seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """The bool mask of what a pair receives, of any form."""
    if len(mask) < 2:
        return mask[0] if mask else None
    kind = TileMask if len(mask) == 4 else KeyMask
    return kind(seqlen_q, seqlen_k, False, (-1, -1), *mask).unpacked()


class Counting(OutOfTree):
    """A kernel backend behind operators, which count also where torch.compile has left no Python of it.

    `received` holds the number of tensors that each pass received for its mask.
    """

    def __init__(self, name: str, *, mask_form: str = "dense") -> None:
        super().__init__(name)
        self.MASK_FORM = mask_form
        self.count: Counter[str] = Counter()
        self.received: list[int] = []
        self.forward, self.backward = operators.define_pair(name, self._forward, self._backward)

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: list[Tensor],
        bias: Tensor | None,
        is_causal: bool,
        window_size: list[int],
        softmax_scale: float,
        softcap: float,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        self.count["forward"] += 1
        self.received.append(len(mask))
        flags = {"is_causal": is_causal, "softmax_scale": softmax_scale, "softcap": softcap}
        out, lse = formula.attention(
            q, k, v, unpacked(mask, q.shape[1], k.shape[1]), bias, **flags, window_size=tuple(window_size)
        )
        return out.contiguous(), lse.contiguous()

    def _backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: list[Tensor],
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        window_size: list[int],
        softmax_scale: float,
        softcap: float,
        deterministic: bool,
        need: list[bool],
    ) -> Gradients:
        self.count["backward"] += 1
        self.received.append(len(mask))
        flags = {"is_causal": is_causal, "softmax_scale": softmax_scale, "softcap": softcap}
        gradients = formula.gradients(
            dout, dlse, q, k, v, unpacked(mask, q.shape[1], k.shape[1]), bias, **flags, window_size=tuple(window_size)
        )
        dq, dk, dv, dbias = (
            torch.empty(g.shape, dtype=g.dtype).copy_(g) if needed and g is not None else None
            for g, needed in zip(gradients, need)
        )
        return dq, dk, dv, dbias
