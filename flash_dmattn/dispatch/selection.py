"""The choice of the backends of a call, and the messages if no backend, or only eager PyTorch, accepts it."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch

from ..backends.cuda.backend import BACKEND as cuda
from ..backends.cuda.rules import has_invariant_class
from ..backends.protocol import Backend, Direction, Reason, Rule, all_hold
from ..backends.sdpa.backend import BACKEND as sdpa
from ..backends.sdpa.backend import leads_in_fp32
from ..backends.triton.backend import BACKEND as triton
from ..problem import AttentionProblem, hinted
from .checkpoints import follow_checkpoints
from .config import BackendChoice, Decision, Fallback, blocks, check_choice, choice, disabled, fallback, process
from .profiles import COMMAND, Judgement, goes_by_profile, judgement, usual_order, why_unjudged
from .registry import BACKENDS, check_name, last_resort, works

ATTENTION, FORWARD_MODE, SECOND_DERIVATIVE = "attention", "a call in forward mode", "a second derivative"
TANGENT_GRADIENT = "the gradient of a tangent"
_NO_ACCELERATORS = ("cpu", "meta")
_NO_CALLERS = ("flash_dmattn", "torch")  # packages that are skipped to find the line of the user for a warning
_MEASURED_RULE = "measured_gpu"  # the rule of triton that a profile replaces


class BackendError(RuntimeError):
    """A backend that was named does not accept a valid call.

    Attributes:
        backend: the backend that was named.
        reasons: why it does not accept the call, each with a backend, a code, a text and a hint.
        accepted_by: backends that would accept the same call here.
        details: a text with the call and every reason, which `explain` shows, too.
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str = "",
        reasons: tuple[Reason, ...] = (),
        accepted_by: tuple[str, ...] = (),
        details: str = "",
    ) -> None:
        super().__init__(message)  # pickle calls the class with the message only, and sets the attributes afterwards
        self.backend = backend
        self.reasons = reasons
        self.accepted_by = accepted_by
        self.details = details or message


class BackendUnsupportedError(BackendError):
    """The backend works on this machine but not for this call; `reasons` has every rule that the call breaks."""


class BackendUnavailableError(BackendError):
    """The backend is disabled, or does not work on this machine; `__cause__` is then the exception of its probe."""


class FallbackWarning(UserWarning):
    """`backend="auto"` uses eager PyTorch on an accelerator, because no kernel backend accepts the call."""


class Selection(NamedTuple):
    """The backend of each pass; `backward` is None if no gradient is needed or autograd differentiates `forward`."""

    forward: Backend
    backward: Backend | None


def available_backends() -> tuple[str, ...]:
    """List the backends that work on this machine and are not disabled, in the order "auto" prefers them.

    >>> import flash_dmattn
    >>> "eager" in flash_dmattn.available_backends()
    True
    """
    off = disabled()
    return tuple(name for name in BACKENDS if name not in off and works(name))


def choice_in_force(backend: BackendChoice) -> BackendChoice:
    """Return the argument, else `config`, else `config.set`, else FLASH_DMATTN_BACKEND, else "auto"."""
    follow_checkpoints()
    return choice() if backend == "auto" else backend


def select_pair(problem: AttentionProblem, backend: BackendChoice) -> Selection:
    """Choose a pair of backends for operators that call each pass separately, so autograd differentiates neither."""
    requested = choice_in_force(backend)
    return _choose_auto(problem, pairs_only=True) if requested == "auto" else choose(problem, requested)


def select_backward(problem: AttentionProblem, name: str) -> Backend:
    """Choose the backend of a single backward pass: the named one if it accepts the call, else as "auto" does."""
    sized = hinted(problem)
    named = [(BACKENDS[name], ())] if name in BACKENDS else []
    for backend, rules in (*named, *candidates(sized)):
        if _serves_backward(backend, rules, problem, sized):
            return backend
    refuse_all(problem)


def select_tangents(problem: AttentionProblem, forward: Backend) -> Backend:
    """Choose the backend of a call in forward mode, which computes out and lse with their tangents.

    It is the first of these that supports tangents of the call: `forward`, triton, the last resort of auto.
    """
    pairs_with = BACKENDS.table.get(triton.name)
    for backend in (forward, pairs_with):
        if backend is not None and backend.serves_tangents(problem) and _serves(backend, problem, "forward"):
            return backend
    return _last_resort_with("plan_tangents", FORWARD_MODE, problem)


def select_tangent_gradients(problem: AttentionProblem, tangents: Backend, requested: BackendChoice) -> Backend:
    """Choose the backend that differentiates tangents: the one that computes them, or for auto the last resort."""
    if tangents.plan_tangent_gradients is not None:
        return tangents
    if choice_in_force(requested) != "auto" and not problem.flags.invariant:
        raise NotImplementedError(
            f"backend {tangents.name!r}, which computed the tangents, has no gradients of them; detach the tangents of "
            'out and lse, or call attention(..., backend="eager"), which has them'
        )
    return _last_resort_with("plan_tangent_gradients", TANGENT_GRADIENT, problem)


def select_second_derivative(problem: AttentionProblem, backward: Backend, requested: BackendChoice) -> Backend:
    """Choose the backend of a second derivative: the one that computed the gradients, or for auto the last resort."""
    if backward.differentiable_backward is not None:
        return backward
    if requested != "auto" and not problem.flags.invariant:
        raise NotImplementedError(
            f'backend {backward.name!r} has no second derivative of attention; backend="eager" has one'
        )
    return _last_resort_with("differentiable_backward", SECOND_DERIVATIVE, problem)


def _last_resort_with(ability: str, what: str, problem: AttentionProblem) -> Backend:
    """Return the last resort of auto, for a feature that other backends lack; refuse if it is switched off."""
    if problem.flags.invariant:
        text = f"config(invariant=True) is in force, and the mode has no kernel for {what}; leave the mode"
        raise BackendUnsupportedError(f"{text}: {problem}", backend=triton.name)
    backend = last_resort()
    if backend.name in disabled() or getattr(backend, ability) is None:
        reasons = reasons_against(backend, problem, ())
        lines = [f"{what} needs backend {backend.name!r}, which does not serve it here: {problem}"]
        lines += [f"  - {reason}" for reason in reasons]
        raise BackendUnavailableError("\n".join(lines), backend=backend.name, reasons=reasons)
    return backend


def record(plan: Any) -> None:
    """Append the backends of a plan to the list of the `with` block around a call; not in compiled regions."""
    if torch.compiler.is_compiling():
        return
    records = blocks.now.records
    if records is not None:
        problem = plan.described
        records.append(Decision(problem, plan.requested, *selected_names(problem, plan)))


def choose(problem: AttentionProblem, requested: BackendChoice) -> Selection:
    """Choose the backend of each pass of one call.

    Raises:
        ValueError: `requested` is unknown.
        BackendUnsupportedError: a backend was named and one of its rules refuses the call.
        BackendUnavailableError: a backend was named and does not work on this machine.
    """
    return _choose_auto(problem) if requested == "auto" else _choose_named(problem, check_choice(requested))


def without_order(problem: AttentionProblem, requested: BackendChoice, *, warn: bool = True) -> AttentionProblem:
    """Handle torch's warn-only mode: return the problem with `deterministic` False if a named backend requires that.

    With `warn` it then warns, as torch does. The problem is unchanged for "auto", which finds a deterministic backend.
    """
    if requested == "auto":
        return problem
    names = check_choice(requested)
    forward, backward = (names, names) if isinstance(names, str) else names
    named = tuple(zip((forward, backward), passes_of(problem)))
    free = problem._replace(flags=problem.flags._replace(deterministic=False))
    serve_ordered, serve_free = (
        all([check_name(name).accepts(p, direction) for name, direction in named]) for p in (problem, free)
    )
    if serve_ordered or not serve_free:
        return problem
    if warn:
        _warn_caller(
            f"backend {requested!r} adds sums of this call in any order, although "
            "torch.use_deterministic_algorithms(True, warn_only=True) is in force; deterministic=True refuses it, and "
            f"backend='auto' takes one with a fixed order: {problem}"
        )
    return free


def falls_back(problem: AttentionProblem, requested: BackendChoice, selection: Selection) -> bool:
    """Return whether "auto" uses its last resort for some pass on an accelerator."""
    if requested != "auto" or problem.device in _NO_ACCELERATORS:
        return False
    return any(backend is not None and backend.is_fallback for backend in selection)


def selected_names(problem: AttentionProblem, selection: Any) -> tuple[str, str | None]:
    """Return the names of the backends of a selection or a plan: forward, and backward or None without gradients."""
    if not any(problem.needs_grad):
        return selection.forward.name, None
    return selection.forward.name, (selection.backward or selection.forward).name


def _choose_auto(problem: AttentionProblem, pairs_only: bool = False) -> Selection:
    needs_backward = any(problem.needs_grad)
    sized = hinted(problem)  # preferences of auto only affect speed
    in_order = candidates(sized)
    for backend, rules in in_order:
        if pairs_only and backend.is_differentiable:
            continue
        # The rules of auto first, because there are only some, and most calls on a CPU break them for GPU backends.
        if not all_hold(rules, sized, "forward") or not _serves(backend, problem, "forward"):
            continue
        if backend.is_differentiable:
            if needs_backward and not (all_hold(rules, sized, "backward") and backend.accepts(problem, "backward")):
                continue
            return Selection(backend, None)
        if not needs_backward:
            return Selection(backend, None)
        # The same backend if it can; else any other one: backends can be paired, because lse has one layout for all.
        others = ((backend, rules), *in_order)
        if problem.flags.max_scores:  # they have no gradient: the backward pass of a call without them comes first
            plain = _choose_auto(problem._replace(flags=problem.flags._replace(max_scores=False)), pairs_only).backward
            others = (*[one for one in in_order if one[0] is plain], *others)
        for other, other_rules in others:
            if _serves_backward(other, other_rules, problem, sized):
                return Selection(backend, other)
    refuse_all(problem)


def _serves(backend: Backend, problem: AttentionProblem, direction: Direction) -> bool:
    if backend.name in disabled():
        return False
    # Under a compiler, rules specialise the graph on sizes; skip them for a backend that does not work.
    if torch.compiler.is_compiling() and not works(backend.name):
        return False
    # Rules before the probe: a rule takes nanoseconds, the first probe imports a library.
    if not backend.accepts(problem, direction):
        return False
    return problem.is_hypothetical or works(backend.name)


def _serves_backward(
    backend: Backend, rules: tuple[Rule, ...], problem: AttentionProblem, sized: AttentionProblem
) -> bool:
    """Return whether a backend has a separate backward pass for a call, and the rules of auto allow it."""
    is_preferred = not backend.is_differentiable and all_hold(rules, sized, "backward")
    return is_preferred and _serves(backend, problem, "backward")


def _choose_named(problem: AttentionProblem, requested: BackendChoice) -> Selection:
    names = (requested, requested) if isinstance(requested, str) else requested
    forward, backward = [check_name(name) for name in names]
    passes = passes_of(problem)
    shares: tuple[tuple[Backend, tuple[Direction, ...]], ...] = ((forward, passes),)
    if forward is not backward:
        shares = ((forward, passes[:1]), (backward, passes[1:]))
        for backend in (forward, backward):
            if backend.is_differentiable:
                pairs = ", ".join(repr(n) for n, b in BACKENDS.items() if not b.is_differentiable)
                raise ValueError(
                    f"backend is {requested!r}, but {backend.name!r} is one differentiable function that cannot serve "
                    f"a single pass; a pair needs two of {pairs}"
                )
    for backend, share in shares:
        if not all([_serves(backend, problem, direction) for direction in share]):
            refuse(problem, backend, share)
    return Selection(forward, None if forward.is_differentiable or len(passes) == 1 else backward)


def candidates(problem: AttentionProblem) -> list[tuple[Backend, tuple[Rule, ...]]]:
    """Return the backends in the order in which auto tries them, each with the rules of auto for it.

    * On other GPUs than Hopper, with a profile: the profile orders triton, flex and sdpa.
    * On GPUs other than Hopper, without a profile: they have the usual order. triton was not measured there, but its
      kernels are compiled for the GPU. So it gets calls that the backends before it refuse (with dropout or pages),
      which is faster than eager PyTorch.
    * On Hopper: cuda is tried a second time, without its speed rules, before sdpa or the last resort. Most speed rules
      leave a call to triton, which is faster, but triton may be disabled or not work.
    * In fp32 sdpa may come before triton on all GPUs: see `leads_in_fp32`.
    """
    table = BACKENDS.table  # once, because another thread may replace it
    judged = judgement(problem)
    names = list(table)
    is_built_in = problem.arch == "sm_90" and not goes_by_profile(problem)
    is_unmeasured = problem.device == "cuda" and not is_built_in and judged is None
    order: tuple[str, ...] = ()
    if problem.device == "cuda" and not is_built_in:
        order = usual_order(problem) if judged is None else judged.order
    elif leads_in_fp32(problem):
        order = (sdpa.name, *(name for name in names if name in (triton.name, "flex")))
    reordered = (name for name in order if name in table)
    names = [next(reordered) if name in order else name for name in names]
    tries_cuda_again = is_built_in and cuda.name in table
    in_order: list[tuple[Backend, tuple[Rule, ...]]] = []
    for name in names:
        backend = table[name]
        if tries_cuda_again and (backend.is_fallback or name == sdpa.name):
            in_order.append((table[cuda.name], ()))
            tries_cuda_again = False
        ignores_measured_rule = is_unmeasured and name == triton.name
        rules = _preferences_but_measured(backend) if ignores_measured_rule else auto_rules(backend, problem, judged)
        in_order.append((backend, rules))
    return in_order


def _preferences_but_measured(backend: Backend) -> tuple[Rule, ...]:
    return tuple(rule for rule in backend.auto_rules if rule.code != _MEASURED_RULE)


def auto_rules(backend: Backend, problem: AttentionProblem, judged: Judgement | None) -> tuple[Rule, ...]:
    """Return the rules of auto for a backend: its built-in ones, or with a profile also the refusals of the profile."""
    name, rules = backend.name, backend.auto_rules
    # In the mode the class of a call decides, and speed nothing.
    if problem.flags.invariant and backend.is_invariant and (judged is None or name not in judged.wrong):
        return (_CLASS_OF_CUDA,) if name == triton.name and _leaves_class(problem) else ()
    if not goes_by_profile(problem):
        return rules
    if name == triton.name:
        rules = _preferences_but_measured(backend)
        if judged is None and problem.device == "cuda":
            return (*rules, _UNMEASURED)
    if name == cuda.name and process.rules == "profile":
        return (*rules, _NO_FIGURES)
    refused = () if judged is None else judged.refused
    return (*rules, *(_refusal(name, why, passes) for refused_name, why, passes in refused if refused_name == name))


def _leaves_class(problem: AttentionProblem) -> bool:
    """Return whether cuda has the class of a call in the invariant mode.

    If cuda refuses the layout of one such call, triton may not run it either: it would have other bits than the others.
    """
    if not has_invariant_class(problem) or cuda.name not in BACKENDS or cuda.name in disabled():
        return False
    return problem.is_hypothetical or works(cuda.name)


def _refusal(name: str, why: str, passes: tuple[Direction, ...] = ("forward", "backward")) -> Rule:
    return Rule("profile", lambda p: False, lambda p: why, f'backend="{name}" runs it all the same', passes)


_UNMEASURED = Rule(
    _MEASURED_RULE,
    lambda p: False,
    lambda p: f"the GPU is {p.arch}, where nobody has compared the kernels with others; {why_unjudged(p)}",
    f'{COMMAND} does, for auto to take them where they are faster; backend="triton" runs it now',
)
_CLASS_OF_CUDA = Rule(
    "class",
    lambda p: False,
    lambda p: "config(invariant=True) is in force, and calls of this class have the bits of cuda",
    'backend="triton" for all calls that have to agree, or config(disabled="cuda")',
)
_NO_FIGURES = _refusal(
    cuda.name, "FLASH_DMATTN_RULES=profile leaves the choice to a profile, and those have no figures of this backend"
)


def passes_of(problem: AttentionProblem) -> tuple[Direction, ...]:
    return ("forward", "backward") if any(problem.needs_grad) else ("forward",)


def reasons_against(
    backend: Backend, problem: AttentionProblem, passes: tuple[Direction, ...], *, auto: bool = False
) -> tuple[Reason, ...]:
    """Return every reason why a backend does not support these passes of a call; with `auto`, rules of auto, too."""
    name = backend.name
    reasons: list[Reason] = []
    if name in disabled():
        hint = "leave config(disabled=...), or take it out of config.set(disabled=...) or FLASH_DMATTN_DISABLE"
        reasons.append(Reason(name, "disabled", "it is switched off", hint))
    reasons += backend.broken_rules(problem, passes)
    if not problem.is_hypothetical and not (availability := backend.probe()).usable:
        reasons.append(Reason(name, "unavailable", availability.reason, availability.hint))
    if auto:
        reasons += backend.unmet(auto_rules(backend, problem, judgement(problem)), problem, passes)
    return tuple(reasons)


def _backends_accepting(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the names of the backends that would support every pass of a call on its machine."""
    passes = passes_of(problem)
    return tuple(name for name, backend in BACKENDS.items() if not reasons_against(backend, problem, passes))


def refuse(problem: AttentionProblem, backend: Backend, passes: tuple[Direction, ...]) -> NoReturn:
    _refuse_in_graph(f"backend {backend.name!r} does not serve this call")
    reasons = reasons_against(backend, problem, passes)
    accepted_by = _backends_accepting(problem)
    out_of_service = [reason for reason in reasons if reason.code in ("disabled", "unavailable")]
    # Probe only if a reason needs it: a probe imports libraries, and the call may be described for another machine.
    probed = backend.probe() if any(reason.code == "unavailable" for reason in out_of_service) else None
    cause, details = (None, "") if probed is None else (probed.exception, probed.details)
    verdict = "is not available" if out_of_service else "does not support this call"
    lines = [f"backend {backend.name!r} {verdict}: {problem}"]
    instead = "no other accepts it"
    if accepted_by:
        names = ", ".join(map(repr, accepted_by))
        lines.append(f"  backends that accept it: {names}")
        by_name_only = accepted_by == ("reference",)
        instead = f"pass backend={names}" if by_name_only else f"pass backend='auto', or one that accepts it: {names}"
    details = "".join(f"\n    | {line}" for line in details.splitlines())  # the output of a compiler
    full_text = "\n".join([*lines, *(f"  - {reason}" for reason in reasons)]) + details
    # All reasons may be a page of text, which would hide the advice: show one of the backend, and one of the call.
    shown = [*out_of_service[:1], *[reason for reason in reasons if reason not in out_of_service][:1]]
    summary = "".join(f"\n  - {reason}" for reason in shown)
    message = f"backend {backend.name!r} {verdict}; {instead}{summary}{details}"
    if len(reasons) > len(shown):
        others = f"{len(reasons) - len(shown)} more"
        message += f"\n  {others}: print(flash_dmattn.explain(...).error) with the arguments of the call"
    kind = BackendUnavailableError if out_of_service else BackendUnsupportedError
    raise kind(message, backend=backend.name, reasons=reasons, accepted_by=accepted_by, details=full_text) from cause


def _refuse_in_graph(verdict: str) -> None:
    """Refuse a call that Dynamo traces, without reasons, because Dynamo cannot trace their list.

    If the graph may break, the call runs again outside of the graph, and is refused with reasons.
    """
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(f"{verdict}; flash_dmattn.explain of the same arguments says why")


def _all_reasons(problem: AttentionProblem, backends: Iterable[Backend]) -> tuple[Reason, ...]:
    passes = passes_of(problem)
    return tuple(reason for each in backends for reason in reasons_against(each, problem, passes, auto=True))


def refuse_all(problem: AttentionProblem) -> NoReturn:
    _refuse_in_graph("no backend accepts this call")
    reasons = _all_reasons(problem, BACKENDS.table.values())
    accepted_by = _backends_accepting(problem)
    lines = [f"no backend accepts this call: {problem}"]
    if accepted_by:  # first, because it is the advice
        names = " or ".join(f"backend={name!r}" for name in accepted_by)
        lines = [f"no backend accepts this call unasked; pass {names}: {problem}"]
    lines += [f"  - {reason.backend}: {reason}" for reason in reasons]
    raise BackendUnsupportedError("\n".join(lines), backend="auto", reasons=reasons, accepted_by=accepted_by)


_warned: set[tuple[object, ...]] = set()


def report_last_resort(plan: Any, what: str, backend: Backend, planned: Backend) -> None:
    """Report that a part of a call, `what`, runs on eager PyTorch on an accelerator, unlike the planned pass."""
    if backend.is_fallback and not planned.is_fallback and plan.problem.device not in _NO_ACCELERATORS:
        report_fallback(plan.problem, what, plan.fallback)


def _describe_fallback(problem: AttentionProblem, what: str) -> tuple[tuple[Reason, ...], str]:
    """Return the reasons against the backends before eager PyTorch, and a message with the memory that it needs."""
    better = itertools.takewhile(lambda backend: not backend.is_fallback, BACKENDS.table.values())
    reasons = _all_reasons(problem, better) if what == ATTENTION else ()
    backend = last_resort()
    assert backend.workspace_bytes is not None
    megabytes = backend.workspace_bytes(problem) / 2**20
    lines = [f"{what} runs on {backend.name} PyTorch, with up to {megabytes:.1f} MB of temporaries: {problem}"]
    return reasons, "\n".join([*lines, *(f"  - {reason.backend}: {reason}" for reason in reasons)])


def refuse_fallback(problem: AttentionProblem, what: str = ATTENTION) -> NoReturn:
    reasons, message = _describe_fallback(problem, what)
    message += '\n  fallback="error" is in force; with config(fallback="warn") the call would run'
    raise BackendUnsupportedError(message, backend="auto", reasons=reasons, accepted_by=(last_resort().name,))


def report_fallback(problem: AttentionProblem, what: str = ATTENTION, policy: Fallback | None = None) -> None:
    """Raise, or warn once for each cause, that a call runs on eager PyTorch, by the policy `config(fallback=...)`."""
    policy = fallback() if policy is None else policy
    if policy == "error":
        refuse_fallback(problem, what)
    if policy == "silent" or torch.compiler.is_compiling():
        return
    reasons, message = _describe_fallback(problem, what)
    cause = (what, *((reason.backend, reason.code) for reason in reasons))
    if cause not in _warned:
        _warned.add(cause)
        hint = (
            '\n  config.set(fallback="error") turns this warning into an error, config.set(fallback="silent") hides it'
        )
        _warn_caller(message + hint, FallbackWarning)


def _warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first caller outside of this library and of torch, which before 2.11 has frames around `run_call`."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NO_CALLERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
