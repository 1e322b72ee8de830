"""The backends in order of preference, and the choice of one for a call."""

from __future__ import annotations

import warnings
from typing import NamedTuple, NoReturn, cast

import torch

from .backends import cuda, eager, flex, reference, triton
from .backends.protocol import (
    AnyBackend,
    Availability,
    KernelBackend,
    Pass,
    Reason,
    accepts,
    broken_rules,
    is_differentiable,
)
from .errors import BackendUnavailableError, BackendUnsupportedError, FallbackWarning
from .problem import AttentionProblem
from .settings import BackendChoice, Decision, check_choice, check_environment, process, thread

# The registry: "auto" takes the first that accepts the call.
BACKENDS: dict[str, AnyBackend] = {
    module.NAME: cast(AnyBackend, module) for module in (cuda, triton, flex, eager, reference)
}


class Selection(NamedTuple):
    """The backend of each pass; `backward` is None where no gradient is needed or autograd goes through `forward`."""

    forward: AnyBackend
    backward: KernelBackend | None


def register_backend(backend: AnyBackend, *, before: str | None = None) -> None:
    """Add an out-of-tree backend: any module or object that satisfies `flash_dmattn.backends.protocol.Backend`.

    Args:
        backend: NAME, RULES, AUTO_RULES, probe(), and either forward() and backward(), or attention().
        before: the backend that "auto" shall prefer it to; by default it comes last.

    Raises:
        ValueError: the name is taken, or `before` is unknown.
        TypeError: something the protocol asks for is missing.
    """
    missing = [name for name in ("NAME", "RULES", "AUTO_RULES", "probe") if not hasattr(backend, name)]
    if not is_differentiable(backend):
        missing += [name for name in ("forward", "backward") if not hasattr(backend, name)]
    if missing:
        raise TypeError(f"backend {backend!r} has no {', '.join(missing)}; see flash_dmattn.backends.protocol.Backend")
    name = backend.NAME
    if name in BACKENDS or name == "auto":
        raise ValueError(f"backend name {name!r} is taken; it needs to be a new one")
    if before is not None and before not in BACKENDS:
        raise ValueError(f"before is {before!r}; it needs to be one of {', '.join(map(repr, BACKENDS))}")
    order = list(BACKENDS.items())
    position = len(order) if before is None else list(BACKENDS).index(before)
    order.insert(position, (name, backend))
    BACKENDS.clear()
    BACKENDS.update(order)
    from .call_classes import forget  # which imports this module

    forget()


def available_backends() -> tuple[str, ...]:
    """The backends that work on this machine and are not disabled, in the order "auto" prefers them.

    >>> import flash_dmattn
    >>> "eager" in flash_dmattn.available_backends()
    True
    """
    if process.environment_unchecked:
        check_environment()
    return tuple(name for name in BACKENDS if name not in process.disabled and _works(name))


def _works(name: str) -> bool:
    return BACKENDS[name].probe().usable


# A probe imports libraries, which torch.compile cannot trace. This is what torch.compiler.assume_constant_result sets,
# without the import of dynamo that calling it costs.
setattr(_works, "_dynamo_marked_constant", True)  # noqa: B010 (a function has no such attribute for mypy)


def passes_of(problem: AttentionProblem) -> tuple[Pass, ...]:
    """The passes a call will run."""
    return ("forward", "backward") if any(problem.need) else ("forward",)


def choice_in_force(backend: BackendChoice) -> BackendChoice:
    """The argument, else `use_backend`, else `set_default_backend`, else FLASH_DMATTN_BACKEND, else "auto"."""
    if process.environment_unchecked:
        check_environment()
    if backend != "auto":
        return backend
    return thread.backend if thread.backend is not None else process.default_backend


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
        _report_fallback(problem)
    if thread.records is not None and not torch.compiler.is_compiling():
        thread.records.append(Decision(problem, requested, *selected_names(problem, selection)))
    return selection


def choose(problem: AttentionProblem, requested: BackendChoice) -> Selection:
    """The choice itself: no warning, no record."""
    return _choose_auto(problem) if requested == "auto" else _choose_named(problem, check_choice(requested))


def falls_back(problem: AttentionProblem, requested: BackendChoice, selection: Selection) -> bool:
    """Whether "auto" found nothing better than eager PyTorch for some pass on an accelerator."""
    if requested != "auto" or problem.device == "cpu":
        return False
    return eager.NAME in selected_names(problem, selection)


def selected_names(problem: AttentionProblem, selection: Selection) -> tuple[str, str | None]:
    """The names of a selection; a differentiable backend is its own backward."""
    if not any(problem.need):
        return selection.forward.NAME, None
    return selection.forward.NAME, (selection.backward or selection.forward).NAME


def _choose_auto(problem: AttentionProblem) -> Selection:
    needs_backward = any(problem.need)
    for name, backend in BACKENDS.items():
        # The few rules of auto first: they turn most calls on a CPU away from the others at once.
        if not accepts(backend.AUTO_RULES, problem, "forward") or not _serves(name, problem, "forward"):
            continue
        if is_differentiable(backend):
            if needs_backward and not accepts(backend.RULES, problem, "backward"):
                continue
            return Selection(backend, None)
        if not needs_backward:
            return Selection(backend, None)
        # The same backend where it can; else any other pair, since all share the layout of lse.
        for other in (name, *BACKENDS):
            if (
                not is_differentiable(BACKENDS[other])
                and _serves(other, problem, "backward")
                and accepts(BACKENDS[other].AUTO_RULES, problem, "backward")
            ):
                return Selection(backend, cast(KernelBackend, BACKENDS[other]))
    _refuse_all(problem)


def _serves(name: str, problem: AttentionProblem, only: Pass) -> bool:
    # Rules before the probe: a rule costs nanoseconds, a first probe imports a library.
    if name in process.disabled or not accepts(BACKENDS[name].RULES, problem, only):
        return False
    return _works(name)


def _choose_named(problem: AttentionProblem, requested: BackendChoice) -> Selection:
    if isinstance(requested, str):
        forward_name = backward_name = requested
    else:
        forward_name, backward_name = requested
    needs_backward = any(problem.need)
    forward = BACKENDS[forward_name]
    if forward_name == backward_name:
        if not (
            _serves(forward_name, problem, "forward")
            and (not needs_backward or _serves(forward_name, problem, "backward"))
        ):
            _refuse(problem, forward_name, passes_of(problem))
        if is_differentiable(forward) or not needs_backward:
            return Selection(forward, None)
        return Selection(forward, forward)
    for name in (forward_name, backward_name):
        if is_differentiable(BACKENDS[name]):
            pairs = ", ".join(repr(n) for n, b in BACKENDS.items() if not is_differentiable(b))
            raise ValueError(
                f"backend is {requested!r}, but {name!r} is one differentiable function that cannot serve a single "
                f"pass; a pair needs two of {pairs}"
            )
    if not _serves(forward_name, problem, "forward"):
        _refuse(problem, forward_name, ("forward",))
    if not needs_backward:
        return Selection(forward, None)
    if not _serves(backward_name, problem, "backward"):
        _refuse(problem, backward_name, ("backward",))
    return Selection(forward, cast(KernelBackend, BACKENDS[backward_name]))


def reasons_against(
    name: str, problem: AttentionProblem, passes: tuple[Pass, ...], *, auto: bool = False
) -> tuple[Reason, ...]:
    """Every reason why a backend does not serve these passes of a call; with `auto`, its preferences too."""
    backend = BACKENDS[name]
    reasons: list[Reason] = []
    if name in process.disabled:
        hint = "leave disable_backends, or take it out of FLASH_DMATTN_DISABLE"
        reasons.append(Reason(name, "disabled", "it is switched off in this process", hint))
    reasons += broken_rules(backend, problem, passes)
    availability = probe(name)
    if not availability.usable:
        reasons.append(Reason(name, "unavailable", availability.reason, availability.hint))
    if auto:
        reasons += [
            Reason(name, rule.code, rule.says(problem), rule.hint)
            for rule in backend.AUTO_RULES
            if any(p in rule.passes for p in passes) and not rule.holds(problem)
        ]
    return tuple(reasons)


def probe(name: str) -> Availability:
    """The remembered result of a backend's probe."""
    return BACKENDS[name].probe()


def backends_accepting(problem: AttentionProblem) -> tuple[str, ...]:
    """The backends that would serve every pass of a call on this machine."""
    return tuple(name for name in BACKENDS if not reasons_against(name, problem, passes_of(problem)))


def _refuse(problem: AttentionProblem, name: str, passes: tuple[Pass, ...]) -> NoReturn:
    reasons = reasons_against(name, problem, passes)
    accepted_by = backends_accepting(problem)
    availability = probe(name)
    out_of_service = not availability.usable or name in process.disabled
    verdict = "is not available" if out_of_service else "does not support this call"
    lines = [f"backend {name!r} {verdict}: {problem}", *(f"  - {reason}" for reason in reasons)]
    lines += [f"    | {line}" for line in availability.details.splitlines()]
    if accepted_by:
        lines.append(f"  backends that accept it: {', '.join(map(repr, accepted_by))}")
    kind = BackendUnavailableError if out_of_service else BackendUnsupportedError
    raise kind("\n".join(lines), backend=name, reasons=reasons, accepted_by=accepted_by) from availability.exception


def _all_reasons(problem: AttentionProblem, skip: tuple[str, ...] = ()) -> tuple[Reason, ...]:
    return tuple(
        reason
        for name in BACKENDS
        if name not in skip
        for reason in reasons_against(name, problem, passes_of(problem), auto=True)
    )


def _refuse_all(problem: AttentionProblem) -> NoReturn:
    reasons = _all_reasons(problem)
    lines = [f"no backend accepts this call: {problem}", *(f"  - {reason.backend}: {reason}" for reason in reasons)]
    accepted_by = backends_accepting(problem)
    if accepted_by:
        lines.append(f"  by name it can run on: {', '.join(map(repr, accepted_by))}")
    raise BackendUnsupportedError("\n".join(lines), backend="auto", reasons=reasons, accepted_by=accepted_by)


_warned: set[tuple[tuple[str, str], ...]] = set()


def fallback_message(problem: AttentionProblem, reasons: tuple[Reason, ...]) -> str:
    """Why a call falls back to eager PyTorch, and the memory that costs."""
    megabytes = eager.workspace_bytes(problem) / 2**20
    lines = [f"attention runs on eager PyTorch, with up to {megabytes:.1f} MB of temporaries: {problem}"]
    return "\n".join([*lines, *(f"  - {reason.backend}: {reason}" for reason in reasons)])


def refuse_fallback(problem: AttentionProblem) -> NoReturn:
    """Raise what `set_fallback("error")` asks for."""
    reasons = _all_reasons(problem, skip=(eager.NAME, reference.NAME))
    hint = '\n  set_fallback("error") is in force; set_fallback("warn") would let the call run'
    message = fallback_message(problem, reasons) + hint
    raise BackendUnsupportedError(message, backend="auto", reasons=reasons, accepted_by=(eager.NAME,))


def _report_fallback(problem: AttentionProblem) -> None:
    if process.fallback == "error":
        refuse_fallback(problem)
    if process.fallback == "silent" or torch.compiler.is_compiling():
        return
    reasons = _all_reasons(problem, skip=(eager.NAME, reference.NAME))
    cause = tuple((reason.backend, reason.code) for reason in reasons)
    if cause in _warned:
        return
    _warned.add(cause)
    hint = '\n  set_fallback("error") turns this warning into an error, set_fallback("silent") hides it'
    warnings.warn(fallback_message(problem, reasons) + hint, FallbackWarning, stacklevel=4)
