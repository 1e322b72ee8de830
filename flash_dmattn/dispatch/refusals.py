"""Say why a call is refused or falls back: the reasons of every backend, and the errors and warnings made of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import NoReturn

import torch

from ..backends.protocol import Backend, Direction, Reason
from ..problem import AttentionProblem
from .config import disabled, fallback
from .preferences import auto_rules, judgement
from .registry import BACKENDS, last_resort


class BackendError(RuntimeError):
    """A backend that was asked for cannot serve a valid call.

    Attributes:
        backend: the one that was asked for.
        reasons: each with a backend, a code, the values of the call and a hint.
        accepted_by: backends that would accept the same call here.
    """

    def __init__(
        self, message: str, *, backend: str, reasons: tuple[Reason, ...] = (), accepted_by: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.reasons = reasons
        self.accepted_by = accepted_by


class BackendUnsupportedError(BackendError):
    """The backend works on this machine but not for this call; `reasons` lists every rule the call breaks."""


class BackendUnavailableError(BackendError):
    """The backend does not work on this machine at all; `__cause__` is the exception met when it was probed."""


class FallbackWarning(UserWarning):
    """`backend="auto"` computes on eager PyTorch on an accelerator, because no kernel backend accepts the call."""


def passes_of(problem: AttentionProblem) -> tuple[Direction, ...]:
    """Return the passes that a call runs."""
    return ("forward", "backward") if any(problem.needs_grad) else ("forward",)


def reasons_against(
    backend: Backend, problem: AttentionProblem, passes: tuple[Direction, ...], *, auto: bool = False
) -> tuple[Reason, ...]:
    """Return every reason why a backend does not serve these passes of a call; with `auto`, its preferences too."""
    name = backend.name
    reasons: list[Reason] = []
    if name in disabled():
        hint = "leave config(disabled=...), or take it out of config.set(disabled=...) or FLASH_DMATTN_DISABLE"
        reasons.append(Reason(name, "disabled", "it is switched off", hint))
    reasons += backend.broken_rules(problem, passes)
    if not problem.elsewhere and not (availability := backend.probe()).usable:
        reasons.append(Reason(name, "unavailable", availability.reason, availability.hint))
    if auto:
        reasons += backend.unmet(auto_rules(backend, problem, judgement(problem)), problem, passes)
    return tuple(reasons)


def _backends_accepting(problem: AttentionProblem) -> tuple[str, ...]:
    """Name the backends that would serve every pass of a call on its machine."""
    passes = passes_of(problem)
    return tuple(name for name, backend in BACKENDS.items() if not reasons_against(backend, problem, passes))


def refuse(problem: AttentionProblem, backend: Backend, passes: tuple[Direction, ...]) -> NoReturn:
    reasons = reasons_against(backend, problem, passes)
    accepted_by = _backends_accepting(problem)
    is_missing = any(reason.code == "unavailable" for reason in reasons)
    cause, details = backend.probe()[3:] if is_missing else (None, "")
    out_of_service = is_missing or any(reason.code == "disabled" for reason in reasons)
    verdict = "is not available" if out_of_service else "does not support this call"
    lines = [f"backend {backend.name!r} {verdict}: {problem}"]
    if accepted_by:
        lines.append(f"  backends that accept it: {', '.join(map(repr, accepted_by))}")
    lines += [f"  - {reason}" for reason in reasons]
    lines += [f"    | {line}" for line in details.splitlines()]
    kind = BackendUnavailableError if out_of_service else BackendUnsupportedError
    raise kind("\n".join(lines), backend=backend.name, reasons=reasons, accepted_by=accepted_by) from cause


def _all_reasons(problem: AttentionProblem, backends: Iterable[Backend]) -> tuple[Reason, ...]:
    passes = passes_of(problem)
    return tuple(reason for each in backends for reason in reasons_against(each, problem, passes, auto=True))


def refuse_all(problem: AttentionProblem) -> NoReturn:
    reasons = _all_reasons(problem, BACKENDS.table.values())
    accepted_by = _backends_accepting(problem)
    lines = [f"no backend accepts this call: {problem}"]
    if accepted_by:  # first, since it is what to do
        names = " or ".join(f"backend={name!r}" for name in accepted_by)
        lines = [f"no backend accepts this call unasked; pass {names}: {problem}"]
    lines += [f"  - {reason.backend}: {reason}" for reason in reasons]
    raise BackendUnsupportedError("\n".join(lines), backend="auto", reasons=reasons, accepted_by=accepted_by)


_warned: set[tuple[tuple[str, str], ...]] = set()


def _describe_fallback(problem: AttentionProblem) -> tuple[tuple[Reason, ...], str]:
    """Return the reasons against the backends before eager PyTorch, and the message with the memory that it takes."""
    better = itertools.takewhile(lambda backend: not backend.is_fallback, BACKENDS.table.values())
    reasons = _all_reasons(problem, better)
    backend = last_resort()
    assert backend.workspace_bytes is not None
    megabytes = backend.workspace_bytes(problem) / 2**20
    lines = [f"attention runs on {backend.name} PyTorch, with up to {megabytes:.1f} MB of temporaries: {problem}"]
    return reasons, "\n".join([*lines, *(f"  - {reason.backend}: {reason}" for reason in reasons)])


def refuse_fallback(problem: AttentionProblem) -> NoReturn:
    """Raise the error that `fallback="error"` asks for."""
    reasons, message = _describe_fallback(problem)
    message += '\n  fallback="error" is in force; with config(fallback="warn") the call would run'
    raise BackendUnsupportedError(message, backend="auto", reasons=reasons, accepted_by=(last_resort().name,))


def report_fallback(problem: AttentionProblem) -> None:
    """Raise or warn, once for each cause, that a call runs on eager PyTorch, as `config(fallback=...)` says."""
    if fallback() == "error":
        refuse_fallback(problem)
    if fallback() == "silent" or torch.compiler.is_compiling():
        return
    reasons, message = _describe_fallback(problem)
    cause = tuple((reason.backend, reason.code) for reason in reasons)
    if cause not in _warned:
        _warned.add(cause)
        hint = (
            '\n  config.set(fallback="error") turns this warning into an error, config.set(fallback="silent") hides it'
        )
        warnings.warn(message + hint, FallbackWarning, stacklevel=4)
