"""The backends, in the order in which "auto" prefers them."""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping

from ..backends import eager, reference
from ..backends.cuda import backend as cuda
from ..backends.flex import backend as flex
from ..backends.protocol import Backend
from ..backends.sdpa import backend as sdpa
from ..backends.triton import backend as triton
from ..definition import assume_constant
from ..problem import FEATURES
from . import config
from .config import RegisteredBackend, needed


class _Registry(Mapping[str, Backend]):
    """The backends by name, in the order in which "auto" prefers them.

    Attributes:
        table: all of them. A change replaces the dict instead of editing it, so that other threads get the table from
            before or after the change.
        version: the number of changes. It is part of the key of cached choices, so that a choice from before a change
            is not used afterwards, even if it is stored later.
    """

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self.table: Mapping[str, Backend] = dict(backends)
        self.version = 0

    def __getitem__(self, name: str) -> Backend:
        return self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, name: object) -> bool:
        return name in self.table

    def items(self) -> ItemsView[str, Backend]:
        """Return the names and backends of the current table, which later changes do not affect."""
        return self.table.items()


# "auto" takes the first that accepts the call.
BACKENDS = _Registry({each.BACKEND.name: each.BACKEND for each in (cuda, triton, flex, sdpa, eager, reference)})

# Caches of choices append their `clear` here; it is called after every change of the registry or of a profile.
on_change: list[Callable[[], None]] = []

_changing = threading.Lock()


def register_backend(backend: Backend, *, before: str | None = None) -> RegisteredBackend:
    """Add an out-of-tree backend; docs/adding_a_backend.md has examples.

    Args:
        backend: a `flash_dmattn.Backend`.
        before: "auto" asks the new backend before this one; by default it asks it last.

    Returns:
        The name of the backend, of a type that type checkers accept as `attention(backend=)`, unlike other strings.

    Raises:
        TypeError: it is no `Backend`.
        ValueError: the name is taken, `before` is unknown, or `features` names no argument of `attention`.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"backend is a {type(backend).__name__}; it needs to be a flash_dmattn.Backend")
    unknown = sorted(backend.features - FEATURES.keys())
    if unknown:
        names = ", ".join(FEATURES)
        raise ValueError(
            f"features of backend {backend.name!r} names {', '.join(unknown)}; it needs names out of {names}"
        )
    name = backend.name
    with _changing:
        if name in BACKENDS or name == "auto":
            raise ValueError(f"backend name {name!r} is taken; it needs to be a new one")
        if before is not None and before not in BACKENDS:
            raise ValueError(f"before is {before!r}; {needed(before, BACKENDS)}")
        order = list(BACKENDS.items())
        order.insert(len(order) if before is None else list(BACKENDS).index(before), (name, backend))
        BACKENDS.table = dict(order)
        choices_changed()
    return RegisteredBackend(name)


def unregister_backend(name: str) -> None:
    """Remove a backend from the registry; calls that ran on it choose another one.

    Args:
        name: of a registered backend.

    Raises:
        ValueError: the name is not registered, or it is the only last resort of "auto".
    """
    with _changing:
        check_name(name)
        order = dict(BACKENDS.items())
        del order[name]
        if not any(each.is_fallback for each in order.values()):
            raise ValueError(f'backend {name!r} is what "auto" falls back to; it cannot be unregistered')
        BACKENDS.table = order
        choices_changed()


def choices_changed() -> None:
    """Drop all cached choices, because backends or rules have changed."""
    BACKENDS.version += 1
    for notify in on_change:
        notify()


def last_resort() -> Backend:
    """Return the backend that "auto" falls back to, which supports every call."""
    return next(backend for backend in BACKENDS.table.values() if backend.is_fallback)


@assume_constant  # a probe imports libraries
def works(name: str) -> bool:
    backend = BACKENDS.table.get(name)  # None if it has just been unregistered
    return backend is not None and backend.probe().usable


def check_name(name: str) -> Backend:
    """Return the backend of a name; refuse a name that is not registered."""
    backend = BACKENDS.table.get(name)
    if backend is None:
        raise ValueError(f"backend {name!r} is unknown; {needed(name, BACKENDS)}")
    return backend


config.check_name = check_name
