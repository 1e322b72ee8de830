"""Decide what auto prefers: backends state preferences, and a profile of the GPU stands in for some of them.

On Hopper the built-in rules are measurements already, and stay in force unless FLASH_DMATTN_RULES=profile says that
a profile is to decide there as on every other GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from ..backends.cuda.backend import BACKEND as cuda
from ..backends.flex.backend import BACKEND as flex
from ..backends.protocol import Backend, Rule
from ..backends.triton.backend import BACKEND as triton
from ..problem import AttentionProblem
from .config import process
from .profiles import COMMAND, Profile, find, is_profiled, rows_of
from .registry import BACKENDS

MEASURED = (triton.name, flex.name, "eager")  # what `calibrate` times
_BUILT_IN = "measured_gpu"  # the rule of triton that a profile stands in for


class Judgement(NamedTuple):
    """Verdict of a profile on a class of calls."""

    takes_triton: bool  # it was right, and faster than eager at least
    before_flex: bool  # it was also faster than flex, or flex failed
    flex_failed: str  # why flex is passed over; "" where it is not
    why: str  # the figures


def judge(profile: Profile, rows: tuple[str, ...], with_gradients: bool) -> Judgement | None:
    """Return the judgement of a profile on a call that belongs to these rows; None where it lacks a figure for that.

    Triton has to win in every row of the call. A backend that failed is beaten.
    """
    if not rows or not all(set(MEASURED) <= profile.rows.get(row, {}).keys() for row in rows):
        return None
    faster = {flex.name: True, "eager": True}
    failed = {name: profile.wrong.get(name, "") for name in MEASURED}
    parts = []
    for row in rows:
        times = {name: profile.rows[row][name].of(with_gradients) for name in MEASURED}
        for name in MEASURED:
            if error := profile.rows[row][name].error:
                failed[name] = failed[name] or f"{error} ({row})"
            elif times[name] is None:
                return None
        ours = times[triton.name]
        for other in faster:
            theirs = times[other]
            if theirs is not None and not profile.wrong.get(other):
                faster[other] = faster[other] and ours is not None and ours < theirs
        words = [f"{name} {time:.3g} ms" if time is not None else f"{name} failed" for name, time in times.items()]
        parts.append(f"{row}: {', '.join(words)}")
    why = "; ".join(parts) + ("; forward and backward" if with_gradients else "; forward")
    if failed[triton.name]:
        return Judgement(False, False, failed[flex.name], f"triton is not right there: {failed[triton.name]}; {why}")
    return Judgement(faster["eager"], faster[flex.name], failed[flex.name], why)


def judgement(problem: AttentionProblem) -> Judgement | None:
    """Return what the profile of this GPU says of a call; None where the built-in rules decide."""
    if not goes_by_profile(problem) or not _has_profile(problem.arch):
        return None
    judged = _judged(problem.arch, rows_of(problem), any(problem.needs_grad))
    return None if judged is None else Judgement(*judged)


def goes_by_profile(problem: AttentionProblem) -> bool:
    """Tell whether a profile, if any, decides about a call: on NVIDIA GPUs but Hopper, whose rules are built in."""
    if problem.device != "cuda" or not is_profiled(problem.arch):
        return False
    return problem.arch != "sm_90" or process.rules == "profile"


def _has_profile(arch: str) -> bool:
    return find(arch).profile is not None


def _judged(arch: str, rows: tuple[str, ...], with_gradients: bool) -> tuple[bool, bool, str, str] | None:
    profile = find(arch).profile
    judged = None if profile is None else judge(profile, rows, with_gradients)
    return None if judged is None else (judged.takes_triton, judged.before_flex, judged.flex_failed, judged.why)


# A file is read, which torch.compile cannot trace; see `registry.works`.
setattr(_has_profile, "_dynamo_marked_constant", True)  # noqa: B010
setattr(_judged, "_dynamo_marked_constant", True)  # noqa: B010


def candidates(problem: AttentionProblem) -> list[tuple[Backend, tuple[Rule, ...]]]:
    """Return the backends in the order in which auto asks them, each with the preferences that bind it there.

    Triton comes after flex where a profile found flex faster. Two backends come a second time, before the last resort.
    Cuda on Hopper, without preferences: most leave a call to triton because that is faster, and it may be disabled or
    not work. Triton on GPUs where nobody has measured it: kernels that were compiled and checked for that GPU serve
    better than eager PyTorch. So calls run that flex refuses, with dropout or pages. With sequences triton comes before
    flex, which copies them into rows of its own.
    """
    table = BACKENDS.table  # once: it may be replaced meanwhile
    judged = judgement(problem)
    by_profile = goes_by_profile(problem)
    is_waiting = judged is None and triton.name in table and by_profile
    names = list(table)
    if judged is not None and not judged.before_flex and triton.name in table and flex.name in table:
        names.remove(triton.name)
        names.insert(names.index(flex.name) + 1, triton.name)
    asked: list[tuple[Backend, tuple[Rule, ...]]] = []
    for name in names:
        backend = table[name]
        if backend.is_fallback and problem.arch == "sm_90" and not by_profile and cuda.name in table:
            asked.append((table[cuda.name], ()))
        if is_waiting and (backend.is_fallback or (name == flex.name and problem.sequences is not None)):
            asked.append((table[triton.name], _preferences_but_measured(table[triton.name])))
            is_waiting = False
        asked.append((backend, auto_rules(backend, problem, judged)))
    return asked


def _preferences_but_measured(backend: Backend) -> tuple[Rule, ...]:
    return tuple(rule for rule in backend.auto_rules if rule.code != _BUILT_IN)


def auto_rules(backend: Backend, problem: AttentionProblem, judged: Judgement | None) -> tuple[Rule, ...]:
    """Return the preferences that bind auto for one backend and call."""
    name, stated = backend.name, backend.auto_rules
    if not goes_by_profile(problem):
        return stated
    if name == triton.name:
        others = _preferences_but_measured(backend)
        if judged is None:
            return (*others, _UNMEASURED)
        return others if judged.takes_triton else (*others, _refusal(name, f"measured on this GPU: {judged.why}"))
    if name == flex.name and judged is not None and judged.flex_failed:
        return (*stated, _refusal(name, f"on this GPU it failed: {judged.flex_failed}"))
    if name == cuda.name and process.rules == "profile":
        return (*stated, _NO_FIGURES)
    return stated


def _refusal(name: str, why: str) -> Rule:
    return Rule("profile", lambda p: False, lambda p: why, f'backend="{name}" runs it all the same')


_UNMEASURED = Rule(
    _BUILT_IN,
    lambda p: False,
    lambda p: f"the GPU is {p.arch}, where nobody has compared the kernels with others; {_missing(p)}",
    f'{COMMAND} does, for auto to take them where they are faster; backend="triton" runs it now',
)
_NO_FIGURES = _refusal(
    cuda.name, "FLASH_DMATTN_RULES=profile leaves the choice to a profile, and those have no figures of this backend"
)


def _missing(problem: AttentionProblem) -> str:
    """Say why no profile speaks of a call."""
    path, profile, reason = find(problem.arch)
    if profile is None:
        return f"no profile is in force: {reason}"
    rows = rows_of(problem)
    if not rows:
        return f"the profile {path} is of bf16 and fp16"
    return f"the profile {path} lacks figures of {', '.join(map(repr, rows))}"


def cite(problem: AttentionProblem) -> str | None:
    """Say which figures of a profile decided, or why none did; None where no profile would be asked."""
    if not goes_by_profile(problem):
        return None
    judged = judgement(problem)
    if judged is None:
        return f"{_missing(problem)}; {COMMAND} makes one"
    return f"{find(problem.arch).path} decided: {judged.why}"
