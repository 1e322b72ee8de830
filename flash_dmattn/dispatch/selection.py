"""The choice of the backends of a call."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from ..backends.protocol import (
    AnyBackend,
    Direction,
    KernelBackend,
    accepts,
    all_hold,
    is_composite,
    is_fallback,
)
from ..problem import AttentionProblem, hinted
from .checkpoints import follow_checkpoints
from .config import BackendChoice, Decision, blocks, check_choice, choice, disabled
from .preferences import candidates
from .refusals import passes_of, refuse, refuse_all, report_fallback
from .registry import BACKENDS, check_name, works


class Selection(NamedTuple):
    """The backend of each pass; `backward` is None where no gradient is needed or autograd goes through `forward`."""

    forward: AnyBackend
    backward: KernelBackend | None


def available_backends() -> tuple[str, ...]:
    """The backends that work on this machine and are not disabled, in the order "auto" prefers them.

    >>> import flash_dmattn
    >>> "eager" in flash_dmattn.available_backends()
    True
    """
    off = disabled()
    return tuple(name for name in BACKENDS if name not in off and works(name))


def choice_in_force(backend: BackendChoice) -> BackendChoice:
    """The argument, else `config`, else `config.set`, else FLASH_DMATTN_BACKEND, else "auto"."""
    follow_checkpoints()
    return choice() if backend == "auto" else backend


def select(problem: AttentionProblem, backend: BackendChoice) -> Selection:
    """The backend of each pass of one call.

    Raises:
        ValueError: `backend` is unknown.
        BackendUnsupportedError: a backend was named and one of its rules refuses the call.
        BackendUnavailableError: a backend was named and does not work on this machine.
    """
    requested = choice_in_force(backend)
    selection = choose(problem, requested)
    if falls_back(problem, requested, selection):
        report_fallback(problem)
    records = blocks.now.records
    if records is not None and not torch.compiler.is_compiling():
        records.append(Decision(problem, requested, *selected_names(problem, selection)))
    return selection


def select_pair(problem: AttentionProblem, backend: BackendChoice) -> Selection:
    """The same out of backends that are a forward/backward pair: what is derived from a call has chosen one for it.

    Raises:
        BackendUnsupportedError, BackendUnavailableError: as for `select`.
    """
    requested = choice_in_force(backend)
    return _choose_auto(problem, pairs_only=True) if requested == "auto" else choose(problem, requested)


def select_backward(problem: AttentionProblem, name: str) -> KernelBackend:
    """The backend of a backward pass alone: the named one where it serves, else as "auto" prefers.

    Raises:
        BackendUnsupportedError: no pair of backends accepts the call.
    """
    sized = hinted(problem)
    asked = ((BACKENDS[name], ()), *candidates(sized)) if name in BACKENDS else candidates(sized)
    for backend, rules in asked:
        if not is_composite(backend) and all_hold(rules, sized, "backward") and _serves(backend, problem, "backward"):
            return backend
    refuse_all(problem)


def choose(problem: AttentionProblem, requested: BackendChoice) -> Selection:
    """The choice itself: no warning, no record."""
    return _choose_auto(problem) if requested == "auto" else _choose_named(problem, check_choice(requested))


def falls_back(problem: AttentionProblem, requested: BackendChoice, selection: Selection) -> bool:
    """Whether "auto" found nothing better than its last resort for some pass on an accelerator."""
    if requested != "auto" or problem.device in ("cpu", "meta"):
        return False
    return any(backend is not None and is_fallback(backend) for backend in selection)


def selected_names(problem: AttentionProblem, selection: Selection) -> tuple[str, str | None]:
    """The names of a selection; a differentiable backend is its own backward."""
    if not any(problem.needs_grad):
        return selection.forward.NAME, None
    return selection.forward.NAME, (selection.backward or selection.forward).NAME


def _choose_auto(problem: AttentionProblem, pairs_only: bool = False) -> Selection:
    needs_backward = any(problem.needs_grad)
    sized = hinted(problem)  # what auto prefers decides speed alone
    asked = candidates(sized)
    for backend, rules in asked:
        if pairs_only and is_composite(backend):
            continue
        # The few rules of auto first: they turn most calls on a CPU away from the others at once.
        if not all_hold(rules, sized, "forward") or not _serves(backend, problem, "forward"):
            continue
        if is_composite(backend):
            if needs_backward and not accepts(backend, problem, "backward"):
                continue
            return Selection(backend, None)
        if not needs_backward:
            return Selection(backend, None)
        # The same backend where it can; else any other pair, since all share the layout of lse.
        for other, rules_of_other in ((backend, rules), *asked):
            if (
                not is_composite(other)
                and all_hold(rules_of_other, sized, "backward")
                and _serves(other, problem, "backward")
            ):
                return Selection(backend, other)
    refuse_all(problem)


def _serves(backend: AnyBackend, problem: AttentionProblem, direction: Direction) -> bool:
    if backend.NAME in disabled():
        return False
    # A rule that a compiler sees binds the sizes of its graph, which a backend that does not work must not.
    if torch.compiler.is_compiling() and not works(backend.NAME):
        return False
    # Rules before the probe: a rule costs nanoseconds, a first probe imports a library.
    if not accepts(backend, problem, direction):
        return False
    return problem.elsewhere or works(backend.NAME)


def _choose_named(problem: AttentionProblem, requested: BackendChoice) -> Selection:
    if isinstance(requested, str):
        forward_name = backward_name = requested
    else:
        forward_name, backward_name = requested
    needs_backward = any(problem.needs_grad)
    forward, backward = check_name(forward_name), check_name(backward_name)
    if forward_name == backward_name:
        if not (_serves(forward, problem, "forward") and (not needs_backward or _serves(forward, problem, "backward"))):
            refuse(problem, forward, passes_of(problem))
        if is_composite(forward) or not needs_backward:
            return Selection(forward, None)
        return Selection(forward, forward)
    for backend in (forward, backward):
        if is_composite(backend):
            pairs = ", ".join(repr(n) for n, b in BACKENDS.items() if not is_composite(b))
            raise ValueError(
                f"backend is {requested!r}, but {backend.NAME!r} is one differentiable function that cannot serve a "
                f"single pass; a pair needs two of {pairs}"
            )
    if not _serves(forward, problem, "forward"):
        refuse(problem, forward, ("forward",))
    if not needs_backward:
        return Selection(forward, None)
    if not _serves(backward, problem, "backward"):
        refuse(problem, backward, ("backward",))
    return Selection(forward, cast(KernelBackend, backward))
