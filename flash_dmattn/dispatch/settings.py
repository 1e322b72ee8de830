"""What the user sets outside a call: default backend, disabled backends, fallback policy, decision records."""

from __future__ import annotations

import warnings
from types import TracebackType

from .checkpoints import follow_checkpoints
from .registry import check_name
from .state import (
    BackendChoice,
    Blocks,
    Decision,
    Fallback,
    blocks,
    check_fallback,
    disabled,
    enter,
    leave,
    parse_choice,
    process,
)

__all__ = [
    "BackendChoice",
    "Decision",
    "Fallback",
    "blocks",
    "check_choice",
    "disable_backends",
    "disabled",
    "parse_choice",
    "process",
    "record_decisions",
    "set_default_backend",
    "set_disabled_backends",
    "set_fallback",
    "use_backend",
]


class Block:
    """A setting for the length of a `with` block; one object may be entered any number of times, also in itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self)


class use_backend(Block):
    """Choose the backend of every call in a `with` block that does not name one itself.

    Threads and tasks of asyncio have their own blocks. One that starts in a copy of a context (`contextvars`), as every
    task does, inherits those around its start. A region of `torch.utils.checkpoint` with use_reentrant=False is
    recomputed on the backends of its forward pass, wherever `backward` is called.

    Args:
        backend: a name, a pair (forward, backward), or "auto".

    Raises:
        ValueError: the name is unknown.

    >>> import torch, flash_dmattn
    >>> x = torch.randn(1, 8, 2, 16)
    >>> with flash_dmattn.use_backend("reference"), flash_dmattn.record_decisions() as decisions:
    ...     _ = flash_dmattn.attention(x, x, x)
    >>> decisions[0].forward
    'reference'
    """

    def __init__(self, backend: BackendChoice) -> None:
        self.backend = check_choice(backend)

    def __enter__(self) -> None:
        follow_checkpoints()
        enter(self, Blocks(backend=self.backend))


def set_default_backend(backend: BackendChoice) -> None:
    """Choose the backend of every call in this process that neither names one nor stands in a `use_backend` block.

    Args:
        backend: a name, a pair (forward, backward), or "auto".

    Raises:
        ValueError: the name is unknown.

    >>> import flash_dmattn
    >>> flash_dmattn.set_default_backend("eager")
    >>> flash_dmattn.set_default_backend("auto")
    """
    process.default_backend = check_choice(backend)


class disable_backends(Block):
    """Switch backends off in a `with` block, even for calls that name them; it reaches what `use_backend` reaches.

    Args:
        *names: backends to switch off, in addition to those already off.

    Raises:
        ValueError: a name is unknown.

    >>> import flash_dmattn
    >>> with flash_dmattn.disable_backends("flex"):
    ...     "flex" in flash_dmattn.available_backends()
    False
    """

    _is_waiting = False  # of one whose names are refused

    def __init__(self, *names: str) -> None:
        for name in names:
            check_name(name)
        self.names = names
        self._is_waiting = True

    def __enter__(self) -> None:
        self._is_waiting = False
        follow_checkpoints()
        enter(self, Blocks(disabled=self.names))

    def __del__(self) -> None:
        if self._is_waiting:
            names = ", ".join(map(repr, self.names))
            warnings.warn(
                f"disable_backends({names}) was never entered and switches nothing off; it needs a `with` statement, "
                "and set_disabled_backends is for the whole process",
                RuntimeWarning,
                stacklevel=2,
            )


def set_disabled_backends(*names: str) -> None:
    """Switch backends off in this process, even for calls that name them, and all others on.

    Args:
        *names: all the backends that are to be off; none for none. They replace those of FLASH_DMATTN_DISABLE.

    Raises:
        ValueError: a name is unknown.

    >>> import flash_dmattn
    >>> flash_dmattn.set_disabled_backends("flex")
    >>> "flex" in flash_dmattn.available_backends()
    False
    >>> flash_dmattn.set_disabled_backends()
    """
    for name in names:
        check_name(name)
    process.disabled = tuple(dict.fromkeys(names))


def set_fallback(policy: Fallback) -> None:
    """Say what happens when "auto" finds only eager PyTorch for a call on an accelerator.

    Args:
        policy: "warn" (once per cause, the default), "silent", or "error" (raise `BackendUnsupportedError`).

    Raises:
        ValueError: the policy is none of the three.

    >>> import flash_dmattn
    >>> flash_dmattn.set_fallback("error")
    >>> flash_dmattn.set_fallback("warn")
    """
    process.fallback = check_fallback(policy)


class record_decisions(Block):
    """Collect a `Decision` for every call of `attention` in a `with` block; it reaches what `use_backend` reaches.

    Calls inside a compiled region are traced once and run without Python, so they are not recorded.

    >>> import torch, flash_dmattn
    >>> x = torch.randn(1, 8, 2, 16)
    >>> with flash_dmattn.record_decisions() as decisions:
    ...     _ = flash_dmattn.attention(x, x, x)
    >>> [(d.forward, d.backward) for d in decisions]
    [('eager', None)]
    """

    def __enter__(self) -> list[Decision]:
        records: list[Decision] = []
        enter(self, Blocks(records=records))
        return records


def check_choice(backend: BackendChoice) -> BackendChoice:
    """Refuse anything but "auto", a known name, or a pair of known names."""
    if isinstance(backend, tuple) and len(backend) == 2:
        for name in backend:
            check_name(name)
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}; it needs to be a name, a pair (forward, backward), or 'auto'")
    if backend != "auto":
        check_name(backend)
    return backend
