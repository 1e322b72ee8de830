"""What the user sets outside a call: default backend, disabled backends, fallback policy, decision records."""

from __future__ import annotations

import os
from types import TracebackType

from .registry import BACKENDS, check_name
from .state import BackendChoice, Decision, Fallback, check_fallback, parse_choice, process, thread

__all__ = [
    "BackendChoice",
    "Decision",
    "Fallback",
    "check_choice",
    "check_environment",
    "disable_backends",
    "parse_choice",
    "process",
    "record_decisions",
    "set_default_backend",
    "set_fallback",
    "thread",
    "use_backend",
]


def check_environment() -> None:
    """Refuse environment variables that cannot be read or name unknown backends; done once, at the first call."""
    if process.environment_error is not None:
        raise ValueError(process.environment_error)
    for variable, text in (
        ("FLASH_DMATTN_BACKEND", os.environ.get("FLASH_DMATTN_BACKEND") or "auto"),
        ("FLASH_DMATTN_DISABLE", os.environ.get("FLASH_DMATTN_DISABLE", "")),
    ):
        for name in filter(None, (part.strip() for part in text.split(","))):
            if name not in BACKENDS and name != "auto":
                raise ValueError(f"{variable} names {name!r}; it needs names out of {', '.join(map(repr, BACKENDS))}")
    process.environment_unchecked = False


class use_backend:
    """Choose the backend of every call in a `with` block of this thread that does not name one itself.

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
        self.previous = thread.backend
        thread.backend = self.backend

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread.backend = self.previous


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


class disable_backends:
    """Switch backends off in this process, even for calls that name them; as a `with` block, only inside it.

    Args:
        *names: backends to switch off, in addition to those already off.

    Raises:
        ValueError: a name is unknown.

    >>> import flash_dmattn
    >>> with flash_dmattn.disable_backends("flex"):
    ...     "flex" in flash_dmattn.available_backends()
    False
    """

    def __init__(self, *names: str) -> None:
        for name in names:
            check_name(name)
        self.previous = process.disabled
        process.disabled = tuple(dict.fromkeys(process.disabled + names))

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process.disabled = self.previous


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


class record_decisions:
    """Collect a `Decision` for every call of `attention` this thread makes in a `with` block.

    Calls inside a compiled region are traced once and run without Python, so they are not recorded.

    >>> import torch, flash_dmattn
    >>> x = torch.randn(1, 8, 2, 16)
    >>> with flash_dmattn.record_decisions() as decisions:
    ...     _ = flash_dmattn.attention(x, x, x)
    >>> [(d.forward, d.backward) for d in decisions]
    [('eager', None)]
    """

    def __enter__(self) -> list[Decision]:
        self.previous = thread.records
        records: list[Decision] = []
        thread.records = records
        return records

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread.records = self.previous


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
