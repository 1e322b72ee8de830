"""The backends of a context-parallel call: one pair for every slice of every rank, chosen before anything is sent."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends.protocol import Backend, Direction
from ..dispatch.config import BackendChoice, Decision, blocks, disabled
from ..dispatch.registry import BACKENDS, on_change, works
from ..dispatch.selection import Selection, choice_in_force, falls_back, report_fallback, select_pair
from ..problem import AttentionProblem
from ..remembered import Remembered
from .call import ParallelCall
from .layout import SequenceLayout
from .problems import head_groups, slice_problem
from .slices import plan


class _Key(NamedTuple):
    problem: AttentionProblem
    layout: SequenceLayout
    head_groups: int
    sends_parts: bool
    requested: BackendChoice
    disabled: tuple[str, ...]
    version: int  # of the registry


_remembered: Remembered[Selection] = Remembered(256)
on_change.append(_remembered.clear)


def choose_pair(call: ParallelCall, backend: BackendChoice) -> Selection:
    """The pair that serves every slice of every rank; backward is None where no gradient is needed.

    Raises:
        ValueError: `backend` names one that is no forward/backward pair, or is unknown.
        BackendUnsupportedError, BackendUnavailableError: the named backend refuses a slice.
    """
    requested = choice_in_force(backend)
    found = find_pair(call, requested)
    if torch.compiler.is_compiling():
        return found
    if falls_back(call.problem, requested, found):
        report_fallback(call.problem)
    records = blocks.now.records
    if records is not None:
        backward = None if found.backward is None else found.backward.name
        records.append(Decision(call.problem, requested, found.forward.name, backward))
    return found


def find_pair(call: ParallelCall, requested: BackendChoice) -> Selection:
    """The choice itself: no warning, no record."""
    if torch.compiler.is_compiling():  # sizes may be symbols there, which no key can hold
        return _choose(slices_of(call), requested)
    of_process = (requested, disabled(), BACKENDS.version)
    key = _Key(call.problem, call.layout, call.head_groups, call.sends_parts, *of_process)
    return _remembered.find(key, lambda: _choose(slices_of(call), requested))


def slices_of(call: ParallelCall) -> list[AttentionProblem]:
    """The different problems among the slices of all ranks, all of which the pair has to serve."""
    heads = head_groups(call.problem.num_heads_k, call.head_groups)[0]  # the others are like it
    # Dynamo of torch 2.11 sorts by numbers alone, not by tuples.
    parts = dict.fromkeys(
        (part._replace(row=0, row_stop=part.seqlen_q), call.keys_held(rank))
        for rank in range(call.members.size)
        for part in plan(call.layout, rank, call.layout_k.length, call.problem.window)
    )
    ordered = sorted(sorted(parts, key=lambda each: each[0].stop), key=lambda each: each[0].row_stop)
    return [slice_problem(call.problem, part, heads, held) for part, held in ordered]


def _choose(problems: list[AttentionProblem], requested: BackendChoice) -> Selection:
    names = () if requested == "auto" else (requested,) if isinstance(requested, str) else requested
    for name in names:
        if name in BACKENDS and BACKENDS[name].is_differentiable:
            pairs = ", ".join(repr(n) for n, b in BACKENDS.items() if not b.is_differentiable)
            raise ValueError(
                f"backend is {requested!r}, and {name!r} is one differentiable function; context parallelism needs a "
                f"forward/backward pair: one of {pairs}"
            )
    selections = list(dict.fromkeys(_Named.of(select_pair(problem, requested)) for problem in problems))
    if len(selections) == 1:
        return selections[0].selection
    # Sizes of slices differ, and so may what suits them; but all of them share one pair.
    forward = _first_for_all([s.forward for s in selections], problems, "forward")
    backward = (
        None
        if selections[0].backward is None
        else _first_for_all([s.backward or "" for s in selections], problems, "backward")
    )
    return Selection(forward, backward)


class _Named(NamedTuple):
    forward: str
    backward: str | None

    @classmethod
    def of(cls, selection: Selection) -> _Named:
        return cls(selection.forward.name, None if selection.backward is None else selection.backward.name)

    @property
    def selection(self) -> Selection:
        backward = None if self.backward is None else BACKENDS[self.backward]
        return Selection(BACKENDS[self.forward], backward)


def _first_for_all(preferred: list[str], problems: list[AttentionProblem], direction: Direction) -> Backend:
    """The first backend, of those that a slice prefers before others, that serves one pass of all slices."""
    for name in (*(n for n in BACKENDS if n in preferred), *BACKENDS):
        backend = BACKENDS[name]
        if backend.is_differentiable or name in disabled() or not works(name):
            continue
        if all(backend.accepts(problem, direction) for problem in problems):
            return backend
    raise AssertionError("eager serves every call")
