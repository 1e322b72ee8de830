"""A backend that records its passes, and whether each ran as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from out_of_tree import KernelPair, registered
from torch import Tensor

from flash_dmattn import operators
from flash_dmattn.backends.protocol import Backward, Forward
from flash_dmattn.problem import AttentionProblem, Gradients
from flash_dmattn.problem.inputs import Inputs, Saved


class Ready(KernelPair):
    """`ways` says which passes ran, `shown` which operators were called for them.

    `planned` has the direction and the problem of each pass that was planned, `runs` of each that ran.
    """

    def __init__(self) -> None:
        super().__init__("ready")
        self.ways: list[str] = []
        self.shown: list[str] = []
        self.planned: list[tuple[str, AttentionProblem]] = []
        self.runs: list[tuple[str, AttentionProblem]] = []

    def plan_forward(self, problem: AttentionProblem) -> Forward:
        run = super().plan_forward(problem)
        self.planned.append(("forward", problem))

        def forward(x: Inputs) -> tuple[Tensor, ...]:
            assert lies(problem, x)
            self.ways.append("forward")
            self.runs.append(("forward", problem))
            return run(x)

        return forward

    def plan_backward(self, problem: AttentionProblem) -> Backward:
        run = super().plan_backward(problem)
        self.planned.append(("backward", problem))

        def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
            assert lies(problem, saved.inputs)
            self.ways.append("backward")
            self.runs.append(("backward", problem))
            return run(saved, dout, dlse)

        return backward

    def clear(self) -> None:
        self.ways.clear()
        self.shown.clear()
        self.runs.clear()


def lies(problem: AttentionProblem, x: Inputs) -> bool:
    """Whether tensors lie as the problem says that a pass was planned for."""
    specs = ((x.mask.dense, problem.mask), (x.bias, problem.bias))
    return (x.q.stride(), x.k.stride(), x.v.stride()) == (
        problem.q_strides,
        problem.k_strides,
        problem.v_strides,
    ) and all(tensor is None or (spec is not None and tensor.stride() == spec.strides) for tensor, spec in specs)


@contextmanager
def ready_pair(listens: bool = True) -> Iterator[Ready]:
    """Register it, and listen to the operators; Dynamo cannot trace what listens."""
    pair = Ready()
    with registered(pair), pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward") if listens else ():
            patch.setattr(operators, name, _heard(pair.shown, name, getattr(operators, name)))
        yield pair


def _heard(shown: list[str], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def listen(*arguments: Any) -> Any:
        shown.append(name)
        return run(*arguments)

    return listen
