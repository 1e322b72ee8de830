"""The backends, in the order in which "auto" prefers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ..backends import eager, reference
from ..backends.cuda import backend as cuda
from ..backends.flex import backend as flex
from ..backends.protocol import AnyBackend, Availability, is_composite, is_fallback
from ..backends.triton import backend as triton
from ..problem import FEATURES

# "auto" takes the first that accepts the call.
BACKENDS: dict[str, AnyBackend] = {
    module.NAME: cast(AnyBackend, module) for module in (cuda, triton, flex, eager, reference)
}


# Called after every change of the registry, by what remembers a choice.
on_change: list[Callable[[], None]] = []


def register_backend(backend: AnyBackend, *, before: str | None = None) -> None:
    """Add an out-of-tree backend: any module or object that satisfies `flash_dmattn.backends.protocol.Backend`.

    Args:
        backend: NAME, FEATURES, RULES, AUTO_RULES, probe(), and either forward() and backward(), or attention().
        before: the backend that "auto" shall prefer it to; by default it comes last.

    Raises:
        ValueError: the name is taken, `before` is unknown, or FEATURES names no argument of `attention`.
        TypeError: something the protocol asks for is missing.
    """
    missing = [name for name in ("NAME", "FEATURES", "RULES", "AUTO_RULES", "probe") if not hasattr(backend, name)]
    if not is_composite(backend):
        missing += [name for name in ("forward", "backward") if not hasattr(backend, name)]
    if missing:
        raise TypeError(f"backend {backend!r} has no {', '.join(missing)}; see flash_dmattn.backends.protocol.Backend")
    unknown = sorted(backend.FEATURES - FEATURES.keys())
    if unknown:
        raise ValueError(
            f"FEATURES of {backend!r} names {', '.join(unknown)}; it needs names out of {', '.join(FEATURES)}"
        )
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
    _changed()


def unregister_backend(name: str) -> None:
    """Take a backend out of the registry: calls that ran on it choose anew.

    Args:
        name: the `NAME` of a registered backend.

    Raises:
        ValueError: nobody registered the name, or it is the last resort of "auto".
    """
    check_name(name)
    if is_fallback(BACKENDS[name]):
        raise ValueError(f'backend {name!r} is what "auto" falls back to; it cannot be unregistered')
    del BACKENDS[name]
    _changed()


def fallback() -> Any:
    """The backend that takes every call: what "auto" falls back to."""
    return next(backend for backend in BACKENDS.values() if is_fallback(backend))


def _changed() -> None:
    for notify in on_change:
        notify()


def probe(name: str) -> Availability:
    """The remembered result of a backend's probe."""
    return BACKENDS[name].probe()


def works(name: str) -> bool:
    """Whether a backend works on this machine."""
    return BACKENDS[name].probe().usable


# A probe imports libraries, which torch.compile cannot trace. This is what torch.compiler.assume_constant_result sets,
# without the import of dynamo that calling it costs.
setattr(works, "_dynamo_marked_constant", True)  # noqa: B010 (a function has no such attribute for mypy)


def check_name(name: str) -> None:
    """Refuse a backend name that nobody registered."""
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; it needs to be one of {', '.join(map(repr, BACKENDS))}")
