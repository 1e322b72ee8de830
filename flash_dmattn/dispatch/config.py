"""Settings outside of a call: `config` and environment variables. This module must not import torch.

`process` has the settings of `config.set` and of environment variables, `blocks` the settings of the `with` blocks
around a call. Each change of `blocks` replaces one immutable `Blocks` in one context variable. So blocks are separate
for each thread and asyncio task; one that starts in a copy of the context inherits its blocks.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, NamedTuple, NewType, cast, get_args

BuiltInBackend = Literal["cuda", "triton", "flex", "sdpa", "eager", "reference"]
# The type that `register_backend` returns, so that type checkers accept the name of a backend that a program adds.
RegisteredBackend = NewType("RegisteredBackend", str)
BackendName = BuiltInBackend | RegisteredBackend
BackendChoice = Literal["auto"] | BackendName | tuple[BackendName, BackendName]
Fallback = Literal["warn", "silent", "error"]
Rules = Literal["built-in", "profile"]

# In the order in which "auto" prefers them.
BUILT_IN: tuple[str, ...] = get_args(BuiltInBackend)
_FALLBACKS = ("warn", "silent", "error")
_RULES = ("built-in", "profile")
_SWITCHES = {"": False, "0": False, "1": True}

# The default of an argument that may be left out. It is not None, because passing None is an error.
_UNSET: Any = ...

# Hooks: `registry` and `checkpoints`, which import torch, replace these two functions when they are imported.
check_name: Callable[[str], object] = lambda name: None
follow_checkpoints: Callable[[], None] = lambda: None


class Decision(NamedTuple):
    """The backends that one call of `attention` ran on.

    `backward` is None if no gradient is needed, or under a transform of `torch.func`, which chooses it in the backward
    pass.
    """

    problem: object
    requested: BackendChoice
    forward: str
    backward: str | None

    def __str__(self) -> str:
        passes = self.forward if self.backward is None else f"{self.forward} forward, {self.backward} backward"
        return f"backend={self.requested!r} ran {passes}: {self.problem}"

    def __repr__(self) -> str:
        return str(self)


def similar(name: object, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to a wrong name, ignoring case, or None."""
    known = {one.lower(): one for one in names}
    close = difflib.get_close_matches(str(name).lower(), tuple(known), n=1)
    return known[close[0]] if close else None


def needed(name: object, names: Iterable[str]) -> str:
    """Make the end of an error message: the valid names, and "did you mean ...?" if a name is similar."""
    names = tuple(names)
    meant = similar(name, names)
    question = "" if meant is None else f"; did you mean {meant!r}?"
    return f"it needs to be one of {', '.join(map(repr, names))}{question}"


def check_choice(backend: BackendChoice) -> BackendChoice:
    """Refuse anything but "auto", a known name, or a pair of known names."""
    pair = backend if isinstance(backend, tuple) else (backend, backend)
    if len(pair) != 2 or not all(isinstance(name, str) for name in pair):
        raise TypeError(f"backend is {backend!r}; it needs to be a name, a pair (forward, backward), or 'auto'")
    if isinstance(backend, tuple) and "auto" in backend:
        raise ValueError(f"backend is {backend!r}; a pair names a backend for each pass: pass 'auto' alone for both")
    if backend != "auto":
        for name in pair:
            check_name(name)
    return backend


def parse_choice(text: str, source: str = "backend") -> BackendChoice:
    """Parse "name" or "forward,backward", the form of environment variables and the command line."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) == 1:
        return cast(BackendName, names[0])
    if len(names) == 2:
        return cast(BackendName, names[0]), cast(BackendName, names[1])
    raise ValueError(f"{source} is {text!r}; it needs to be one name, or forward and backward as 'name,name'")


def _check_names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"disabled is {names!r}; it needs to be a name or a tuple of names")
    for name in names:
        check_name(name)
    return tuple(dict.fromkeys(names))


def _refuse_unknown(call: str, unknown: Mapping[str, object]) -> None:
    for name in unknown:
        raise TypeError(
            f"{call}() got an unexpected keyword argument {name!r}; "
            + needed(name, ("backend", "disabled", "fallback", "record", "invariant"))
        )


def _check_switch(value: Any, source: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{source} is {value!r}; it needs to be True or False")
    return value


def _check_one_of(values: tuple[str, ...], value: Any, source: str) -> Any:
    if value not in values:
        raise ValueError(f"{source} is {value!r}; {needed(value, values)}")
    return value


class _Process:
    """Settings of the whole process. torch.compile guards on these attributes, so a change recompiles."""

    def __init__(self) -> None:
        self.default_backend: BackendChoice = "auto"
        self.disabled: tuple[str, ...] = ()
        self.fallback: Fallback = "warn"
        # The file of the profile. "" is the file in the user's cache folder, "off" means no profile.
        self.profile: str = os.environ.get("FLASH_DMATTN_PROFILE", "").strip()
        # "built-in": on Hopper GPUs auto uses the speed rules of the backends. "profile": auto uses only the profile.
        self.rules: Rules = "built-in"
        self.invariant: bool = False
        # The error of a variable: the import of flash_dmattn raises it; `python -m flash_dmattn info` shows it.
        self.environment_error: str | None = None
        try:
            backend = parse_choice(os.environ.get("FLASH_DMATTN_BACKEND") or "auto", "FLASH_DMATTN_BACKEND")
            self.default_backend = backend
            disabled = os.environ.get("FLASH_DMATTN_DISABLE", "")
            self.disabled = tuple(name.strip() for name in disabled.split(",") if name.strip())
            for name, values in (("FALLBACK", _FALLBACKS), ("RULES", _RULES)):
                value = os.environ.get(f"FLASH_DMATTN_{name}") or values[0]
                setattr(self, name.lower(), _check_one_of(values, value, f"FLASH_DMATTN_{name}"))
            invariant = os.environ.get("FLASH_DMATTN_INVARIANT", "").strip()
            if invariant not in _SWITCHES:
                raise ValueError(f"FLASH_DMATTN_INVARIANT is {invariant!r}; it needs to be '1' or '0'")
            self.invariant = _SWITCHES[invariant]
            chosen = () if backend == "auto" else (backend,) if isinstance(backend, str) else backend
            for variable, names in (("FLASH_DMATTN_BACKEND", chosen), ("FLASH_DMATTN_DISABLE", self.disabled)):
                for name in names:
                    if name not in BUILT_IN:
                        raise ValueError(
                            f"{variable} names {name!r}; {needed(name, BUILT_IN)} (a backend that a program registers "
                            "itself is chosen and switched off by config.set)"
                        )
        except ValueError as error:
            self.environment_error = str(error)


class Blocks(NamedTuple):
    """The settings of the `with` blocks around a call, or of one of them. The innermost block that has one counts.

    Attributes:
        backend: the choice of backends; None without one.
        disabled: the backends that any block has switched off.
        fallback: the policy; None without one.
        records: the list to which decisions are appended; None without one.
        parallel: the group and layout of `use_context_parallel`, for integrations; None without one.
        entered: the blocks, the innermost one last.
        invariant: whether a row's bits depend on the row alone; None without a block that says so.
    """

    backend: BackendChoice | None = None
    disabled: tuple[str, ...] = ()
    fallback: Fallback | None = None
    records: list[Decision] | None = None
    parallel: object | None = None
    entered: tuple[Block, ...] = ()
    invariant: bool | None = None


_NO_BLOCKS = Blocks()
_blocks: ContextVar[Blocks] = ContextVar("flash_dmattn.blocks", default=_NO_BLOCKS)


class _InContext(ModuleType):
    """The context variable as an attribute of a module, which torch.compile can get, set and guard on.

    Dynamo cannot trace `ContextVar.get`. It gets attributes of modules by `getattr`, while it traces and in its guards
    before each run, and replays assignments of a traced function. `torch.backends.cudnn` is such a module, too.
    """

    @property
    def now(self) -> Blocks:
        return _blocks.get()

    @now.setter
    def now(self, value: Blocks) -> None:
        _blocks.set(value)


process = _Process()
blocks = _InContext("flash_dmattn.dispatch.config.blocks")


def choice() -> BackendChoice:
    """Return the backend, or pair, of calls here that pass no `backend`."""
    backend = blocks.now.backend
    return process.default_backend if backend is None else backend


def disabled() -> tuple[str, ...]:
    """Return the backends that are switched off here: in the process, or by a block."""
    return process.disabled + blocks.now.disabled


def fallback() -> Fallback:
    """Return the policy here for calls in which "auto" falls back to eager PyTorch on an accelerator."""
    policy = blocks.now.fallback
    return process.fallback if policy is None else policy


def invariant() -> bool:
    """Return whether a row's bits have to depend on the row alone: see `config`."""
    setting = blocks.now.invariant
    return process.invariant if setting is None else setting


class Block:
    """Settings for a `with` block. One object may be entered repeatedly, also inside of itself.

    As a decorator it is entered at each call of the function.
    """

    def __init__(self, change: Blocks) -> None:
        self.change = change

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function: its calls run inside of this block."""
        name = type(self).__name__
        if not callable(func):
            raise TypeError(f"{name} decorates a {type(func).__name__}; it needs a function, or a `with` statement")
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"{name} decorates {func.__name__!r}, whose body runs after its call has returned; write `with {name}"
                "(...):` inside of it"
            )

        @functools.wraps(func)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._anew():
                return func(*args, **kwargs)

        return inside

    def _anew(self) -> Any:
        return self

    def enter(self) -> None:
        """Add this block, as the innermost one, to the blocks of this context."""
        follow_checkpoints()
        blocks.now = _in_force((*blocks.now.entered, self))

    def __exit__(self, *error: object) -> None:
        """Remove the innermost entry of this block; other entries stay, also later ones."""
        entered = blocks.now.entered
        for index in range(len(entered) - 1, -1, -1):
            if entered[index] is self:
                blocks.now = _in_force((*entered[:index], *entered[index + 1 :]))
                return


def _in_force(entered: tuple[Block, ...]) -> Blocks:
    now = Blocks()
    for block in entered:
        change = block.change
        now = Blocks(  # not `_replace`: Dynamo of torch 2.11 cannot rebuild its result outside of a graph
            now.backend if change.backend is None else change.backend,
            tuple(dict.fromkeys(now.disabled + change.disabled)),
            now.fallback if change.fallback is None else change.fallback,
            now.records if change.records is None else change.records,
            now.parallel if change.parallel is None else change.parallel,
            entered,
            now.invariant if change.invariant is None else change.invariant,
        )
    return now


class config(Block):
    """Choose or switch off backends, set the policy for fallbacks and record decisions, in a `with` block.

    It is also a decorator of functions. `config.set` changes settings of the whole process.

    * Blocks are separate for each thread and asyncio task. One that starts in a copy of a context (`contextvars`), as
      every task does, inherits the blocks around its start.
    * A region of `torch.utils.checkpoint` with use_reentrant=False is recomputed on the backends of its forward pass,
      wherever `backward` is called.
    * Calls inside a compiled region are not recorded, because it runs without Python.

    Args:
        backend: the backend of calls that pass none: a name, a pair (forward, backward), or "auto".
        disabled: a name or a tuple of names to switch off, even for calls that name them. Backends that are already off
            stay off.
        fallback: the policy if on an accelerator "auto" has only eager PyTorch for a call, its tangents or its second
            derivative. "warn", the default, warns once per cause; "silent" does not report it; "error" raises
            `BackendUnsupportedError`.
        invariant: True asks that out, lse and gradients of a row, or of a sequence, are the same bits whatever else is
            in the batch: docs/invariance.md. It includes `deterministic=True`. Calls that no backend computes in this
            way are refused.
        record: a list. Every call of `attention` appends a `Decision` to it. Under transforms of `torch.func` there may
            be another number: one for all calls that `torch.vmap` maps, or two if tangents are computed after out.

    Raises:
        ValueError: a name is unknown.
        TypeError: an argument is of another type, or unknown.

    >>> import torch, flash_dmattn
    >>> x = torch.randn(1, 8, 2, 16)
    >>> decisions = []
    >>> with flash_dmattn.config(backend="reference", disabled="flex", record=decisions):
    ...     _ = flash_dmattn.attention(x, x, x)
    ...     "flex" in flash_dmattn.available_backends()
    False
    >>> [(decision.forward, decision.backward) for decision in decisions]
    [('reference', None)]
    """

    _is_waiting = False  # the value if __init__ raises, so that __del__ does not warn

    def __init__(
        self,
        *,
        backend: BackendChoice = _UNSET,
        disabled: str | tuple[str, ...] = (),
        fallback: Fallback = _UNSET,
        record: list[Decision] = _UNSET,
        invariant: bool = _UNSET,
        **unknown: object,
    ) -> None:
        _refuse_unknown("config", unknown)
        if record is not _UNSET and not isinstance(record, list):
            raise TypeError(f"record is {record!r}; it needs to be a list, to which decisions are appended")
        super().__init__(
            Blocks(
                None if backend is _UNSET else check_choice(backend),
                _check_names(disabled),
                None if fallback is _UNSET else _check_one_of(_FALLBACKS, fallback, "fallback"),
                None if record is _UNSET else record,
                invariant=None if invariant is _UNSET else _check_switch(invariant, "invariant"),
            )
        )
        self._arguments: dict[str, Any] = dict(
            backend=backend, disabled=disabled, fallback=fallback, record=record, invariant=invariant
        )
        self._is_waiting = True

    @staticmethod
    def set(
        *,
        backend: BackendChoice = _UNSET,
        disabled: str | tuple[str, ...] = _UNSET,
        fallback: Fallback = _UNSET,
        record: list[Decision] = _UNSET,
        invariant: bool = _UNSET,
        **unknown: object,
    ) -> None:
        """Change the settings of the process. Settings of a `with` block take precedence.

        Settings of arguments that are left out are not changed.

        Args:
            backend: the backend of calls that pass none: a name, a pair (forward, backward), or "auto".
            disabled: all backends to switch off, a name or a tuple, () for none. It replaces FLASH_DMATTN_DISABLE.
            fallback: "warn", "silent" or "error", see `config`.
            record: refused with a TypeError, because only blocks record decisions.
            invariant: as in `config`. It replaces FLASH_DMATTN_INVARIANT.

        >>> import flash_dmattn
        >>> flash_dmattn.config.set(backend="eager", disabled="flex")
        >>> flash_dmattn.config.set(backend="auto", disabled=())
        """
        _refuse_unknown("config.set", unknown)
        if record is not _UNSET:
            raise TypeError("config.set takes no record; it needs a block: with flash_dmattn.config(record=decisions)")
        checked = config(
            backend=backend, disabled=() if disabled is _UNSET else disabled, fallback=fallback, invariant=invariant
        )
        checked._is_waiting = False
        if backend is not _UNSET:
            process.default_backend = backend
        if disabled is not _UNSET:
            process.disabled = checked.change.disabled
        if fallback is not _UNSET:
            process.fallback = fallback
        if invariant is not _UNSET:
            process.invariant = invariant

    def __enter__(self) -> None:
        self._is_waiting = False
        self.enter()

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function: its calls run inside of this block."""
        decorated = super().__call__(func)
        self._is_waiting = False
        return decorated

    def _anew(self) -> config:
        return config(**self._arguments)  # torch.compile cannot enter a block that was made outside of the graph

    def __del__(self) -> None:
        if self._is_waiting:
            names = ("backend", "disabled", "fallback", "records", "invariant")
            arguments = [(name.removesuffix("s"), getattr(self.change, name)) for name in names]
            shown = ", ".join(f"{name}={value!r}" for name, value in arguments if value not in (None, ()))
            warnings.warn(
                f"config({shown}) was never entered and changes nothing; it needs a `with` statement, and config.set "
                "is for the whole process",
                RuntimeWarning,
                stacklevel=2,
            )
