"""Systems for the tests of the benchmarks: right, wrong, and broken ones, and a machine that measured nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.cases import CASES, Case
from benchmarks.floors import Rates
from benchmarks.inputs import Inputs
from benchmarks.systems import Attend, Bound, Mode, Needs, System, by_name, ours

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RATES = Rates(1e12, 1e11, "known")
MACHINE = {"device": "CPU", "kind": "cpu", "torch": "2", "commit": "abc", "rates": RATES._asdict()}


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def planted(name: str, change: Callable[[Tensor], Tensor], is_ours: bool = True) -> System:
    """The eager backend with its results changed; it takes every case."""

    def bind(inputs: Inputs, mode: Mode) -> Bound:
        call = ours.bind("eager", inputs, mode)
        return lambda: tuple(change(x) for x in call())

    def layers(case: Case, biases: Sequence[Tensor]) -> list[Attend]:
        return [
            lambda q, k, v, bias, right=right: change(right(q, k, v, bias))
            for right in ours.layers("eager", case, biases)
        ]

    needs = Needs(backends=("eager", "eager"))
    return System(name, bind, lambda case, device: needs, lambda device: "", is_ours, layers=layers)


def breaks(x: Tensor) -> Tensor:
    """A kernel that fails."""
    raise RuntimeError("no kernel for this call")


def breaks_later(inputs: Inputs, mode: Mode) -> Bound:
    """A kernel that fails in the call after the sixth."""
    calls, call = itertools.count(), ours.bind("eager", inputs, mode)

    def run() -> tuple[Tensor, ...]:
        if next(calls) >= 6:
            raise RuntimeError("a call too many")
        return call()

    return run


EAGER, MATH = by_name("eager"), by_name("sdpa-math")
WRONG, NAN = planted("wrong", lambda x: 1.05 * x), planted("nan", lambda x: float("nan") * x)
PEER, BROKEN = planted("peer", lambda x: 1.3 * x, is_ours=False), planted("broken", breaks)
LATE = planted("late", breaks)._replace(bind=breaks_later, ours=False)
REFUSES = System("no", EAGER.bind, lambda case, device: Needs("not for this"), lambda device: "")


def times(row: results.Record, system: str, mode: str = "call") -> results.Record:
    column: results.Record = next(line for line in row["systems"] if line["system"] == system)["columns"][mode]
    return column
