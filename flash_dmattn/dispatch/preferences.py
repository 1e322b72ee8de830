"""What auto prefers: the preferences that backends state themselves, and in their place what a profile measured.

On Hopper the built-in rules are measurements already, and stay in force unless FLASH_DMATTN_RULES=profile says that
a profile is to decide there as on every other GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from ..backends.cuda.backend import BACKEND as cuda
from ..backends.flex.backend import BACKEND as flex
from ..backends.protocol import Backend, Rule
from ..backends.triton.backend import BACKEND as triton
from ..problem import AttentionProblem, sm_number
from . import profile_store
from .config import process
from .profile import Profile
from .profile_rows import rows_of
from .registry import BACKENDS

MEASURED = (triton.name, flex.name, "eager")  # what `calibrate` times
_BUILT_IN = "measured_gpu"  # the rule of triton that a profile stands in for


class Judgement(NamedTuple):
    """What a profile says of a class of calls: of triton whether it is right and faster than what is left without it.

    Attributes:
        takes_triton: it was right, and faster than eager at least.
        before_flex: it was also faster than flex, or flex failed.
        flex_failed: why flex is passed over; "" where it is not.
        why: the figures, in words.
    """

    takes_triton: bool
    before_flex: bool
    flex_failed: str
    why: str


def judge(profile: Profile, rows: tuple[str, ...], with_gradients: bool) -> Judgement | None:
    """The judgement of a profile on a call that belongs to these rows; None where it lacks a figure for that.

    Triton has to win in every row of the call. What failed is beaten.
    """
    if not rows or not all(set(MEASURED) <= profile.rows.get(row, {}).keys() for row in rows):
        return None
    faster = {flex.name: True, "eager": True}
    failed = {name: profile.wrong.get(name, "") for name in MEASURED}
    parts = []
    for row in rows:
        found = {name: profile.rows[row][name] for name in MEASURED}
        times = {name: figures.of(with_gradients) for name, figures in found.items()}
        for name, figures in found.items():
            if figures.error:
                failed[name] = failed[name] or f"{figures.error} ({row})"
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
    """What the profile of this GPU says of a call; None where the built-in rules decide."""
    if not goes_by_profile(problem) or not _has_profile(problem.arch):
        return None
    found = _judged(problem.arch, rows_of(problem), any(problem.needs_grad))
    return None if found is None else Judgement(*found)


def goes_by_profile(problem: AttentionProblem) -> bool:
    """Whether a profile, if there is one, decides about a call: on NVIDIA GPUs but Hopper, whose rules are built in."""
    if problem.device != "cuda" or (sm_number(problem.arch) or 0) < profile_store.LEAST_ARCH:
        return False
    return problem.arch != "sm_90" or process.rules == "profile"


def _has_profile(arch: str) -> bool:
    return profile_store.find(arch).profile is not None


def _judged(arch: str, rows: tuple[str, ...], with_gradients: bool) -> tuple[bool, bool, str, str] | None:
    profile = profile_store.find(arch).profile
    found = None if profile is None else judge(profile, rows, with_gradients)
    return None if found is None else (found.takes_triton, found.before_flex, found.flex_failed, found.why)


# A file is read, which torch.compile cannot trace; see `registry.works`.
setattr(_has_profile, "_dynamo_marked_constant", True)  # noqa: B010
setattr(_judged, "_dynamo_marked_constant", True)  # noqa: B010


def order(judged: Judgement | None, names: list[str]) -> list[str]:
    """The backends in the order in which auto asks them: triton behind flex where that was faster."""
    if judged is None or judged.before_flex or triton.name not in names or flex.name not in names:
        return names
    names.remove(triton.name)
    names.insert(names.index(flex.name) + 1, triton.name)
    return names


def candidates(problem: AttentionProblem) -> list[tuple[Backend, tuple[Rule, ...]]]:
    """The backends in the order in which auto asks them, each with the preferences that bind it there.

    Two stand there a second time, before the last resort. Cuda on Hopper, without preferences: most leave a call to
    triton because that is faster, which may be disabled or not work. Triton on GPUs where nobody has measured it:
    kernels that were compiled and checked for such a GPU serve better than eager PyTorch. So calls run that flex
    refuses, with dropout or pages. Those with sequences it has before flex, which copies them into rows of its own.
    """
    table = BACKENDS.table  # once: it may be replaced meanwhile
    judged = judgement(problem)
    by_profile = goes_by_profile(problem)
    is_waiting = judged is None and triton.name in table and by_profile
    found: list[tuple[Backend, tuple[Rule, ...]]] = []
    for name in order(judged, list(table)):
        backend = table[name]
        if backend.is_fallback and problem.arch == "sm_90" and not by_profile and cuda.name in table:
            found.append((table[cuda.name], ()))
        if is_waiting and (backend.is_fallback or (name == flex.name and problem.sequences is not None)):
            found.append((table[triton.name], _preferences_but_measured(table[triton.name])))
            is_waiting = False
        found.append((backend, auto_rules(backend, problem, judged)))
    return found


def _preferences_but_measured(backend: Backend) -> tuple[Rule, ...]:
    return tuple(rule for rule in backend.auto_rules if rule.code != _BUILT_IN)


def auto_rules(backend: Backend, problem: AttentionProblem, judged: Judgement | None) -> tuple[Rule, ...]:
    """The preferences that bind auto for one backend and call."""
    name, stated = backend.name, backend.auto_rules
    if not goes_by_profile(problem):
        return stated
    if name == triton.name:
        others = _preferences_but_measured(backend)
        if judged is None:
            return (*others, _unmeasured(problem))
        return others if judged.takes_triton else (*others, _refusal(name, judged.why))
    if name == flex.name and judged is not None and judged.flex_failed:
        return (*stated, _refusal(name, judged.flex_failed))
    if name == cuda.name and process.rules == "profile":
        return (*stated, _NO_FIGURES)
    return stated


def _refusal(name: str, why: str) -> Rule:
    return Rule(
        "profile",
        lambda p: False,
        lambda p: f"{'measured on this GPU' if name == triton.name else 'on this GPU it failed'}: {why}",
        f'backend="{name}" runs it all the same',
    )


def _unmeasured(problem: AttentionProblem) -> Rule:
    return Rule(
        _BUILT_IN,
        lambda p: False,
        lambda p: f"the GPU is {p.arch}, where nobody has compared the kernels with others; {_missing(p)}",
        f'{profile_store.COMMAND} does, for auto to take them where they are faster; backend="triton" runs it now',
    )


_NO_FIGURES = Rule(
    "profile",
    lambda p: False,
    lambda p: "FLASH_DMATTN_RULES=profile leaves the choice to a profile, and those have no figures of this backend",
    'backend="cuda" runs it all the same',
)


def _missing(problem: AttentionProblem) -> str:
    """Why no profile speaks of a call."""
    found = profile_store.find(problem.arch)
    if found.profile is None:
        return f"no profile is in force: {found.reason}"
    rows = rows_of(problem)
    if not rows:
        return f"the profile {found.path} is of bf16 and fp16"
    return f"the profile {found.path} lacks figures of {', '.join(map(repr, rows))}"


def cite(problem: AttentionProblem) -> str | None:
    """What `explain` says of profiles: the figures that decided, or why none did; None where none would be asked."""
    if not goes_by_profile(problem):
        return None
    judged = judgement(problem)
    if judged is None:
        return f"{_missing(problem)}; {profile_store.COMMAND} makes one"
    return f"{profile_store.find(problem.arch).path} decided: {judged.why}"
