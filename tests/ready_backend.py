"""A backend that has passes ready beside its operators."""

from __future__ import annotations

import functools
from typing import Any

from out_of_tree import Counting

from flash_dmattn.problem import AttentionProblem, MaskView


class Ready(Counting):
    """A pair that has passes ready beside its operators; `ways` says which ran."""

    PROVIDES = frozenset({"direct_forward", "direct_backward"})

    def __init__(self) -> None:
        super().__init__("ready")
        self.ways: list[str] = []

    def _forward(self, *arguments: Any, **others: Any) -> Any:
        self.ways.append("operator forward")
        return super()._forward(*arguments, **others)

    def _backward(self, *arguments: Any, **others: Any) -> Any:
        self.ways.append("operator backward")
        return super()._backward(*arguments, **others)

    def direct_forward(self, problem: AttentionProblem, mask: MaskView) -> Any:
        def run(q: Any, k: Any, v: Any, bias: Any, sink: Any, mask: Any, dropout: Any) -> Any:
            self.ways.append("forward")
            view = MaskView("dense", mask) if mask else MaskView()
            return super(Ready, self)._forward(q, k, v, view, bias, problem.flags)

        return run

    def direct_backward(self, problem: AttentionProblem, mask: MaskView) -> Any:
        def run(
            dout: Any, dlse: Any, q: Any, k: Any, v: Any, bias: Any, sink: Any, out: Any, lse: Any, mask: Any, _: Any
        ) -> Any:
            self.ways.append("backward")
            view = MaskView("dense", mask) if mask else MaskView()
            of_call = (dout, dlse, q, k, v, view, bias, out, lse, problem.flags, problem.needs_grad)
            return super(Ready, self)._backward(*of_call)

        return run


@functools.cache
def ready_pair() -> Ready:
    """Made once in a process: operators cannot be defined twice."""
    return Ready()
