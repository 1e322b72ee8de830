"""The choice of the backends of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..backends.protocol import Backend, Direction, all_hold
from ..problem import AttentionProblem, hinted
from .checkpoints import follow_checkpoints
from .config import BackendChoice, check_choice, choice, disabled
from .preferences import candidates
from .refusals import passes_of, refuse, refuse_all
from .registry import BACKENDS, check_name, works


class Selection(NamedTuple):
    """The backend of each pass; `backward` is None where no gradient is needed or autograd goes through `forward`."""

    forward: Backend
    backward: Backend | None


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


def select_pair(problem: AttentionProblem, backend: BackendChoice) -> Selection:
    """The same out of backends with a backward pass of their own: what is derived from a call has chosen one for it.

    Raises:
        BackendUnsupportedError, BackendUnavailableError: as for `choose`.
    """
    requested = choice_in_force(backend)
    return _choose_auto(problem, pairs_only=True) if requested == "auto" else choose(problem, requested)


def select_backward(problem: AttentionProblem, name: str) -> Backend:
    """The backend of a backward pass alone: the named one where it serves, else as "auto" prefers.

    Raises:
        BackendUnsupportedError: no pair of backends accepts the call.
    """
    sized = hinted(problem)
    asked = ((BACKENDS[name], ()), *candidates(sized)) if name in BACKENDS else candidates(sized)
    for backend, rules in asked:
        if (
            not backend.is_differentiable
            and all_hold(rules, sized, "backward")
            and _serves(backend, problem, "backward")
        ):
            return backend
    refuse_all(problem)


def choose(problem: AttentionProblem, requested: BackendChoice) -> Selection:
    """The backend of each pass of one call.

    Raises:
        ValueError: `requested` is unknown.
        BackendUnsupportedError: a backend was named and one of its rules refuses the call.
        BackendUnavailableError: a backend was named and does not work on this machine.
    """
    return _choose_auto(problem) if requested == "auto" else _choose_named(problem, check_choice(requested))


def falls_back(problem: AttentionProblem, requested: BackendChoice, selection: Selection) -> bool:
    """Whether "auto" found nothing better than its last resort for some pass on an accelerator."""
    if requested != "auto" or problem.device in ("cpu", "meta"):
        return False
    return any(backend is not None and backend.is_fallback for backend in selection)


def selected_names(problem: AttentionProblem, selection: Any) -> tuple[str, str | None]:
    """The names of a selection; a differentiable backend is its own backward."""
    if not any(problem.needs_grad):
        return selection.forward.name, None
    return selection.forward.name, (selection.backward or selection.forward).name


def _choose_auto(problem: AttentionProblem, pairs_only: bool = False) -> Selection:
    needs_backward = any(problem.needs_grad)
    sized = hinted(problem)  # what auto prefers decides speed alone
    asked = candidates(sized)
    for backend, rules in asked:
        if pairs_only and backend.is_differentiable:
            continue
        # The few rules of auto first: they turn most calls on a CPU away from the others at once.
        if not all_hold(rules, sized, "forward") or not _serves(backend, problem, "forward"):
            continue
        if backend.is_differentiable:
            if needs_backward and not backend.accepts(problem, "backward"):
                continue
            return Selection(backend, None)
        if not needs_backward:
            return Selection(backend, None)
        # The same backend where it can; else any other pair, since all share the layout of lse.
        for other, rules_of_other in ((backend, rules), *asked):
            if (
                not other.is_differentiable
                and all_hold(rules_of_other, sized, "backward")
                and _serves(other, problem, "backward")
            ):
                return Selection(backend, other)
    refuse_all(problem)


def _serves(backend: Backend, problem: AttentionProblem, direction: Direction) -> bool:
    if backend.name in disabled():
        return False
    # A rule that a compiler sees binds the sizes of its graph, which a backend that does not work must not.
    if torch.compiler.is_compiling() and not works(backend.name):
        return False
    # Rules before the probe: a rule costs nanoseconds, a first probe imports a library.
    if not backend.accepts(problem, direction):
        return False
    return problem.elsewhere or works(backend.name)


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
        if forward.is_differentiable or not needs_backward:
            return Selection(forward, None)
        return Selection(forward, forward)
    for backend in (forward, backward):
        if backend.is_differentiable:
            pairs = ", ".join(repr(n) for n, b in BACKENDS.items() if not b.is_differentiable)
            raise ValueError(
                f"backend is {requested!r}, but {backend.name!r} is one differentiable function that cannot serve a "
                f"single pass; a pair needs two of {pairs}"
            )
    if not _serves(forward, problem, "forward"):
        refuse(problem, forward, ("forward",))
    if not needs_backward:
        return Selection(forward, None)
    if not _serves(backward, problem, "backward"):
        refuse(problem, backward, ("backward",))
    return Selection(forward, backward)
