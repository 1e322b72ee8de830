"""Ranks tell each other what they are about to do before they do it, so that a mistake on one of them hangs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ..dispatch.errors import BackendError, BackendUnavailableError, BackendUnsupportedError
from .group import Members, process_group

# What has to be the same on every rank, by name: ((name, value in words), ...).
Shared = tuple[tuple[str, str], ...]

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, NotImplementedError, BackendUnsupportedError, BackendUnavailableError)
}
# Of each group, by its name and size. A group's classes are counted and forgotten on all of its ranks alike.
_agreed: dict[tuple[tuple[str, int], ...], set[Shared]] = {}
_MOST_AGREED = 1024


class _Said(NamedTuple):
    shared: Shared
    kind: str = ""
    message: str = ""


def agree(groups: Sequence[Members], shared: Shared, failure: Exception | None, *, always: bool = False) -> None:
    """Compare a call with those of the other ranks: once for each class of calls, on all of them at once.

    A rank whose own arguments are bad tells the others, and all raise its error. That they wait for it is sure where
    the class is new to all, as a first call is; `always` compares every call.

    Args:
        groups: one, or several that are the dims of a mesh: what is said in one of them is passed on in the next.
        shared: what decides how much is sent; empty where `failure` came before it was known.
        failure: what this rank would have raised.
        always: whether to compare calls of a class that was compared before.

    Raises:
        ValueError: ranks differ in a value.
        The kind of a failure: with the message of the lowest rank that has one.
    """
    agreed = _agreed.setdefault(tuple((members.name, members.size) for members in groups), set())
    if failure is None and shared in agreed and not always:
        return
    said = _Said(shared)
    if failure is not None:
        said = _Said(shared, type(failure).__name__, f"rank {dist.get_rank()}: {failure}")
    for members in groups:
        said = _of_all(said, members)
    if said.kind:
        raise _error(said.kind, said.message) from failure
    if len(agreed) >= _MOST_AGREED:
        agreed.clear()
    agreed.add(shared)


def _of_all(own: _Said, members: Members) -> _Said:
    """What the ranks of a group say together: the first failure, the first difference, or what all of them say."""
    if members.size == 1:
        return own
    said: list[Any] = [own] * members.size
    dist.all_gather_object(said, own, group=process_group(members.name))
    for other in said:
        if other.kind:
            return other
    for rank, other in enumerate(said):
        if other.shared != said[0].shared:
            ranks = [dist.get_global_rank(process_group(members.name), r) for r in (0, rank)]
            return _Said(own.shared, "ValueError", _difference(said[0].shared, other.shared, *ranks))
    return own


def _difference(first: Shared, other: Shared, first_rank: int, rank: int) -> str:
    values = dict(first)
    name = next(name for name, value in other if values.get(name) != value)
    return (
        f"{name} is {values.get(name)} on rank {first_rank} and {dict(other)[name]} on rank {rank}; "
        "context_parallel_attention needs the same on every rank"
    )


def _error(kind: str, message: str) -> Exception:
    found = _KINDS.get(kind)
    if found is None:
        return RuntimeError(f"{kind}, {message}")
    return found(message, backend="") if issubclass(found, BackendError) else found(message)
