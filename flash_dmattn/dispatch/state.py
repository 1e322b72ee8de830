"""The state of what the user has set outside a call; read from the environment, and without torch.

Two parts: `process`, which setters and environment variables write, and `blocks`, what the `with` blocks around a call
have set. Each change of `blocks` replaces one immutable `Blocks` in one context variable, so that threads and tasks of
asyncio have their own, and one that starts in a copy of a context inherits what is in force there.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, NamedTuple

BackendChoice = str | tuple[str, str]
Fallback = Literal["warn", "silent", "error"]

Rules = Literal["built-in", "profile"]

# In the order in which "auto" prefers them.
BUILT_IN = ("cuda", "triton", "flex", "eager", "reference")
_FALLBACKS = ("warn", "silent", "error")
_RULES = ("built-in", "profile")


class Decision(NamedTuple):
    """What one call of `attention` ran on; `backward` is None where no gradient is needed."""

    problem: object
    requested: BackendChoice
    forward: str
    backward: str | None


class _ProcessSettings:
    """Settings of the whole process. torch.compile guards on these attributes, so a change recompiles."""

    def __init__(self) -> None:
        self.default_backend: BackendChoice = "auto"
        self.disabled: tuple[str, ...] = ()
        self.fallback: Fallback = "warn"
        # The file of the profile, "" for that in the user's folder of caches, "off" for none.
        self.profile: str = os.environ.get("FLASH_DMATTN_PROFILE", "").strip()
        # Whether auto goes by what was measured on Hopper GPUs beforehand, or there too by the profile alone.
        self.rules: Rules = "built-in"
        # The import of flash_dmattn raises it; `python -m flash_dmattn info` shows it.
        self.environment_error: str | None = None
        try:
            self.default_backend = parse_choice(
                os.environ.get("FLASH_DMATTN_BACKEND") or "auto", "FLASH_DMATTN_BACKEND"
            )
            disabled = os.environ.get("FLASH_DMATTN_DISABLE", "")
            self.disabled = tuple(name.strip() for name in disabled.split(",") if name.strip())
            self.fallback = check_fallback(os.environ.get("FLASH_DMATTN_FALLBACK") or "warn", "FLASH_DMATTN_FALLBACK")
            self.rules = check_rules(os.environ.get("FLASH_DMATTN_RULES") or "built-in", "FLASH_DMATTN_RULES")
            if self.default_backend != "auto":
                default = self.default_backend
                _check_built_in("FLASH_DMATTN_BACKEND", (default,) if isinstance(default, str) else default)
            _check_built_in("FLASH_DMATTN_DISABLE", self.disabled)
        except ValueError as error:
            self.environment_error = str(error)


def _check_built_in(variable: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in BUILT_IN:
            raise ValueError(
                f"{variable} names {name!r}; {needed(name, BUILT_IN)} (a backend that a program registers itself is "
                "chosen by set_default_backend and switched off by set_disabled_backends)"
            )


def similar(name: str, names: Iterable[str]) -> str | None:
    """The name that a wrong one is most like; None where it is like none."""
    return next(iter(difflib.get_close_matches(name, tuple(names), n=1)), None)


def needed(name: str, names: Iterable[str]) -> str:
    """Say which names there are, and which of them a wrong one resembles."""
    names = tuple(names)
    meant = similar(name, names)
    question = "" if meant is None else f"; did you mean {meant!r}?"
    return f"it needs to be one of {', '.join(map(repr, names))}{question}"


class Blocks(NamedTuple):
    """What the `with` blocks around a call have set, or what one of them sets.

    Attributes:
        backend: the choice of the innermost block that makes one; None without one.
        disabled: the backends that any block has switched off.
        records: the list of the innermost block that records decisions; None without one.
        parallel: the group and layout of the innermost `use_context_parallel`, for integrations; None without one.
        entered: the blocks with what each sets, the innermost one last.
    """

    backend: BackendChoice | None = None
    disabled: tuple[str, ...] = ()
    records: list[Decision] | None = None
    parallel: object | None = None
    entered: tuple[tuple[object, Blocks], ...] = ()


_NO_BLOCKS = Blocks()
_blocks: ContextVar[Blocks] = ContextVar("flash_dmattn.blocks", default=_NO_BLOCKS)


class _InContext(ModuleType):
    """The context variable as an attribute, which torch.compile reads, writes and guards on.

    Dynamo cannot trace `ContextVar.get`. It reads attributes of modules with `getattr` while it traces, does so again
    in its guards before each run, and replays what a traced function sets. `torch.backends.cudnn` is such a module too.
    """

    @property
    def now(self) -> Blocks:
        """The blocks in force in this context."""
        return _blocks.get()

    @now.setter
    def now(self, value: Blocks) -> None:
        _blocks.set(value)


def enter(block: object, change: Blocks) -> None:
    """Put one more block into force in this context."""
    blocks.now = _in_force((*blocks.now.entered, (block, change)))


def leave(block: object) -> None:
    """End the innermost entry of a block; all others stay in force, also those that began later."""
    entered = blocks.now.entered
    for index in range(len(entered) - 1, -1, -1):
        if entered[index][0] is block:
            blocks.now = _in_force((*entered[:index], *entered[index + 1 :]))
            return


def _in_force(entered: tuple[tuple[object, Blocks], ...]) -> Blocks:
    backend: BackendChoice | None = None
    disabled: tuple[str, ...] = ()
    records: list[Decision] | None = None
    parallel: object | None = None
    for _, change in entered:
        backend = backend if change.backend is None else change.backend
        disabled = tuple(dict.fromkeys(disabled + change.disabled))
        records = records if change.records is None else change.records
        parallel = parallel if change.parallel is None else change.parallel
    return Blocks(backend, disabled, records, parallel, entered)


def choice() -> BackendChoice:
    """The backend of a call made here that names none."""
    backend = blocks.now.backend
    return process.default_backend if backend is None else backend


def disabled() -> tuple[str, ...]:
    """The backends that are switched off for a call made here: in the process, or by a block around it."""
    return process.disabled + blocks.now.disabled


def parse_choice(text: str, source: str = "backend") -> BackendChoice:
    """Read "name" or "forward,backward", as environment variables and the command line give it."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) == 1:
        return names[0]
    if len(names) == 2:
        return names[0], names[1]
    raise ValueError(f"{source} is {text!r}; it needs to be one name, or forward and backward as 'name,name'")


def check_fallback(value: str, source: str = "fallback") -> Fallback:
    """Refuse anything but the three policies."""
    if value not in _FALLBACKS:
        raise ValueError(f"{source} is {value!r}; it needs to be one of {', '.join(map(repr, _FALLBACKS))}")
    return value  # type: ignore[return-value]


def check_rules(value: str, source: str = "rules") -> Rules:
    """Refuse anything but the two sets of rules."""
    if value not in _RULES:
        raise ValueError(f"{source} is {value!r}; it needs to be one of {', '.join(map(repr, _RULES))}")
    return value  # type: ignore[return-value]


process = _ProcessSettings()
blocks = _InContext("flash_dmattn.dispatch.state.blocks")
