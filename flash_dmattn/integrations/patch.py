"""Replaces functions of an installed package by name, after a check of their sources, and restores them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..masks.split import Empty
from .projects import PROJECTS

__all__ = ["Patch"]

_ABSENT = object()  # the original of an entry of a dict, or of an attribute, that its owner did not have


class Patch:
    """Replaces functions of another package while it is enabled.

    A name is "module:attribute", "module:Class.method", or "module:table[key]" for an entry of a dict.

    Args:
        project: a row of `flash_dmattn.integrations.projects.PROJECTS`, which has the digests of known sources.
        make: make(originals, empty) -> replacements; both are dicts by name.

    >>> from flash_dmattn.integrations import Patch, attend
    >>> from flash_dmattn.integrations.projects import PROJECTS
    >>> PROJECTS["openfold"].package
    'openfold3'
    """

    def __init__(self, project: str, make: Callable[[dict[str, Any], Empty], dict[str, Any]]) -> None:
        self._project, self._make = PROJECTS[project], make
        self._lock = threading.RLock()
        self._holders: set[_Holder] = set()  # enabled while it is not empty
        self._empty: Empty = "softmax"
        self._replaced: list[tuple[str, Any, Any]] = []  # name, original, replacement

    def enable(self, *, empty: Empty = "softmax", unchecked: bool = False) -> _Holder:
        """Replace the functions in this process; in a `with` statement, until its end. It may be called repeatedly.

        Args:
            empty: the result for a row of a float mask without a visible key: see `flash_dmattn.masks.split_additive`.
            unchecked: replace functions also if their sources are unknown.

        Returns:
            A context manager. After a `with` statement the functions are restored, unless another caller has enabled
            them, too.

        Raises:
            ModuleNotFoundError: the package is not installed.
            RuntimeError: a source differs from the tested one, or the adapter is enabled with another `empty`.
        """
        if empty not in ("softmax", "zero"):
            raise ValueError(f"empty is {empty!r}; it needs to be 'softmax' or 'zero'")
        with self._lock:
            if self._holders:
                if empty != self._empty:
                    raise RuntimeError(
                        f"empty is {empty!r}, and the adapter is enabled with {self._empty!r}; disable it first"
                    )
            else:
                self._replace(empty, unchecked)
            holder = _Holder(self)
            self._holders.add(holder)
            return holder

    def disable(self) -> None:
        """Restore the originals, whoever has enabled the adapter; without effect if it is not enabled."""
        with self._lock:
            self._holders.clear()
            self._restore()

    def _release(self, holder: _Holder) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._restore()

    def _replace(self, empty: Empty, unchecked: bool) -> None:
        project = self._project
        try:
            importlib.import_module(project.module)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the adapter needs {project.package}, and there is no {error.name}: pip install {project.package}",
                name=error.name,
            ) from error
        originals = {name: _get(name) for name in project.digests}
        unknown = [name for name, known in project.digests.items() if digest(originals[name]) != known]
        if unknown and not unchecked:
            raise RuntimeError(
                f"{', '.join(unknown)} is not the source of {project.package} {project.version}, which this adapter "
                "was tested with; compare results without and with it, and pass unchecked=True if they agree"
            )
        self._empty = empty
        try:
            for name, new in self._make(originals, empty).items():
                self._replaced.append((name, _get(name), new))
                _set(name, new)
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        ours = ((name, (original, new), _get(name)) for name, original, new in self._replaced)
        foreign = [name for name, values, now in ours if all(now is not value for value in values)]
        if foreign:
            raise RuntimeError(f"{', '.join(foreign)} was replaced by somebody else meanwhile; restore that first")
        while self._replaced:
            name, original, _ = self._replaced.pop()
            _set(name, original)


class _Holder:
    """The context manager that one call of `Patch.enable` returns."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def __enter__(self) -> Patch:
        return self._patch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch._release(self)


@functools.lru_cache(maxsize=64)  # for a `with` statement around each step
def digest(function: Any) -> str:
    """Return the first 12 digits of the SHA-256 of a function's source; "absent" if there is no such function."""
    if function is _ABSENT:
        return "absent"
    try:
        source = inspect.getsource(function)
    except TypeError:  # of TorchScript, as functions of transformers were before 5.24
        return "no source"
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _place(name: str) -> tuple[Any, Any]:
    """Split a name into the object that has the attribute or entry, and the attribute's name or the entry's key."""
    module, _, path = name.partition(":")
    path, _, key = path.partition("[")
    *owners, last = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    if not key:
        return owner, last
    table = getattr(owner, last)
    key = key.removesuffix("]")
    return table, next((k for k in table if k == key), key)  # by ==: a key may be an enum's member with another hash


def _get(name: str) -> Any:
    owner, last = _place(name)
    if isinstance(owner, dict):
        return owner.get(last, _ABSENT)
    return vars(owner).get(last, _ABSENT)  # not `getattr`, which binds methods and returns inherited ones


def _set(name: str, value: Any) -> None:
    owner, last = _place(name)
    if isinstance(owner, dict):
        if value is _ABSENT:
            del owner[last]
        else:
            owner[last] = value
    elif value is _ABSENT:
        delattr(owner, last)
    else:
        setattr(owner, last, value)
