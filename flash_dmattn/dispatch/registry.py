"""The backends, in the order in which "auto" prefers them."""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any, cast

from ..backends import eager, reference
from ..backends.cuda import backend as cuda
from ..backends.flex import backend as flex
from ..backends.protocol import OPTIONAL, AnyBackend, Availability, is_composite, is_fallback
from ..backends.triton import backend as triton
from ..problem import FEATURES
from . import config
from .config import needed


class _Registry(Mapping[str, AnyBackend]):
    """The backends by name, in the order in which "auto" prefers them.

    Attributes:
        table: all of them; replaced as a whole and never edited, so what reads it once sees no change halfway through.
        version: another number after each change. What remembers a choice has it in its key: a choice that was made
            before a change is not found after it, whenever it is stored.
    """

    def __init__(self, backends: Mapping[str, AnyBackend]) -> None:
        self.table: Mapping[str, AnyBackend] = dict(backends)
        self.version = 0

    def __getitem__(self, name: str) -> AnyBackend:
        return self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, name: object) -> bool:
        return name in self.table

    def items(self) -> ItemsView[str, AnyBackend]:
        """The names and backends of one moment."""
        return self.table.items()


# "auto" takes the first that accepts the call.
BACKENDS = _Registry({module.NAME: cast(AnyBackend, module) for module in (cuda, triton, flex, eager, reference)})

# Called after every change of the registry or of a profile, by what remembers a choice and wants the memory back.
on_change: list[Callable[[], None]] = []

_changing = threading.Lock()


def register_backend(backend: AnyBackend, *, before: str | None = None) -> None:
    """Add an out-of-tree backend: any module or object that satisfies `flash_dmattn.backends.protocol.Backend`.

    Args:
        backend: NAME, FEATURES, RULES, AUTO_RULES, probe(), and either forward() and backward(), or attention().
        before: the backend that "auto" shall prefer it to; by default it comes last.

    Raises:
        ValueError: the name is taken, `before` is unknown, FEATURES names no argument of `attention`, or PROVIDES no
            optional function.
        TypeError: something the protocol asks for is missing, or the backend is both a pair and one function.
    """
    if is_composite(backend) and hasattr(backend, "forward") and hasattr(backend, "backward"):
        raise TypeError(
            f"backend {backend!r} has forward, backward and attention; it needs to be a pair, or one differentiable "
            "function: give the others names of their own"
        )
    provides: frozenset[str] = getattr(backend, "PROVIDES", frozenset())
    unknown = sorted(set(provides) - set(OPTIONAL))
    if unknown:
        raise ValueError(
            f"PROVIDES of {backend!r} names {', '.join(unknown)}; it needs names out of {', '.join(OPTIONAL)}"
        )
    missing = [name for name in ("NAME", "FEATURES", "RULES", "AUTO_RULES", "probe") if not hasattr(backend, name)]
    if not is_composite(backend):
        missing += [name for name in ("forward", "backward") if not hasattr(backend, name)]
    missing += [name for name in sorted(provides) if not hasattr(backend, name)]
    if is_fallback(backend) and not hasattr(backend, "workspace_bytes"):
        missing.append("workspace_bytes")
    if missing:
        raise TypeError(f"backend {backend!r} has no {', '.join(missing)}; see flash_dmattn.backends.protocol.Backend")
    unknown = sorted(backend.FEATURES - FEATURES.keys())
    if unknown:
        raise ValueError(
            f"FEATURES of {backend!r} names {', '.join(unknown)}; it needs names out of {', '.join(FEATURES)}"
        )
    name = backend.NAME
    with _changing:
        if name in BACKENDS or name == "auto":
            raise ValueError(f"backend name {name!r} is taken; it needs to be a new one")
        if before is not None and before not in BACKENDS:
            raise ValueError(f"before is {before!r}; {needed(before, BACKENDS)}")
        order = list(BACKENDS.items())
        order.insert(len(order) if before is None else list(BACKENDS).index(before), (name, backend))
        BACKENDS.table = dict(order)
        choices_changed()


def unregister_backend(name: str) -> None:
    """Take a backend out of the registry: calls that ran on it choose anew.

    Args:
        name: the `NAME` of a registered backend.

    Raises:
        ValueError: nobody registered the name, or it is the one last resort of "auto".
    """
    with _changing:
        check_name(name)
        order = dict(BACKENDS.items())
        del order[name]
        if not any(map(is_fallback, order.values())):
            raise ValueError(f'backend {name!r} is what "auto" falls back to; it cannot be unregistered')
        BACKENDS.table = order
        choices_changed()


def choices_changed() -> None:
    """Let every call choose anew: there are other backends now, or other rules."""
    BACKENDS.version += 1
    for notify in on_change:
        notify()


def last_resort() -> Any:
    """The backend that takes every call: what "auto" falls back to."""
    return next(backend for backend in BACKENDS.table.values() if is_fallback(backend))


def probe(name: str) -> Availability:
    """The remembered result of a backend's probe."""
    return BACKENDS[name].probe()


def works(name: str) -> bool:
    """Whether a backend works on this machine."""
    backend = BACKENDS.table.get(name)  # None if it has just been unregistered
    return backend is not None and backend.probe().usable


# A probe imports libraries, which torch.compile cannot trace. This is what torch.compiler.assume_constant_result sets,
# without the import of dynamo that calling it costs.
setattr(works, "_dynamo_marked_constant", True)  # noqa: B010 (a function has no such attribute for mypy)


def check_name(name: str) -> AnyBackend:
    """The backend of a name; refuse one that nobody registered."""
    backend = BACKENDS.table.get(name)
    if backend is None:
        raise ValueError(f"backend {name!r} is unknown; {needed(name, BACKENDS)}")
    return backend


config.check_name = check_name
