"""Systems for the tests of the benchmarks: right, wrong, and broken ones, and a machine that measured nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks import results
from benchmarks.cases import CASES, Case
from benchmarks.floors import Rates
from benchmarks.inputs import Inputs
from benchmarks.systems import Bound, Mode, Needs, System, ours, sdpa

CPU = torch.device("cpu")
RATES = Rates(1e12, 1e11, "known")
MACHINE = {"device": "CPU", "kind": "cpu", "torch": "2", "commit": "abc", "rates": RATES._asdict()}


def small(name: str) -> Case:
    """A case with at most 128 keys."""
    return next(case for case in CASES if case.name == name).reduced(128)


def plain(name: str, bind: Callable[[Inputs, Mode], Bound], is_ours: bool = False) -> System:
    """A system that takes everything."""
    return System(name, bind, lambda case, device: Needs(backends=(name, name)), lambda device: "", ours=is_ours)


def spoiled(inputs: Inputs, mode: Mode) -> Bound:
    """5 % off."""
    call = ours.bind("eager", inputs, mode)
    return lambda: tuple(x * 1.05 for x in call())


def nan(inputs: Inputs, mode: Mode) -> Bound:
    call = ours.bind("eager", inputs, mode)
    return lambda: tuple(x * float("nan") for x in call())


def broken(inputs: Inputs, mode: Mode) -> Bound:
    raise RuntimeError("no kernel for this call")


def breaks_later(inputs: Inputs, mode: Mode) -> Bound:
    calls = iter(range(6))
    call = ours.bind("eager", inputs, mode)

    def run() -> tuple[torch.Tensor, ...]:
        if next(calls, None) is None:
            raise RuntimeError("a call too many")
        return call()

    return run


EAGER = plain("eager", partial(ours.bind, "eager"), is_ours=True)
MATH = plain("sdpa-math", partial(sdpa.bind, sdpa.KERNELS["sdpa-math"]))
SPOILED, NAN, BROKEN = plain("spoiled", spoiled), plain("nan", nan, is_ours=True), plain("broken", broken)


def times(row: results.Record, system: str, mode: str = "call") -> results.Record:
    """The column of a system in a row of performance."""
    found: results.Record = next(line for line in row["systems"] if line["system"] == system)["columns"][mode]
    return found
