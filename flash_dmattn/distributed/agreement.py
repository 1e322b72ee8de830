"""Ranks tell each other what they are about to do before they do it, so that a mistake on one of them hangs none."""

from __future__ import annotations

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
_agreed: dict[tuple[str, int], set[Shared]] = {}
_MOST_AGREED = 1024


class _Said(NamedTuple):
    shared: Shared
    kind: str = ""
    message: str = ""


def agree(members: Members, shared: Shared, failure: Exception | None, *, always: bool = False) -> None:
    """Compare a call with those of the other ranks: once for each class of calls, on all of them at once.

    A rank whose own arguments are bad tells the others, and all raise its error. That they wait for it is sure where
    the class is new to all, as a first call is; `always` compares every call.

    Args:
        members: of the group.
        shared: what decides how much is sent; empty where `failure` came before it was known.
        failure: what this rank would have raised.
        always: whether to compare calls of a class that was compared before.

    Raises:
        ValueError: ranks differ in a value.
        The kind of a failure: with the message of the lowest rank that has one.
    """
    agreed = _agreed.setdefault((members.name, members.size), set())
    if failure is None and shared in agreed and not always:
        return
    own = _Said(shared) if failure is None else _Said(shared, type(failure).__name__, str(failure))
    said: list[Any] = [own] * members.size
    if members.size > 1:
        dist.all_gather_object(said, own, group=process_group(members.name))
    for rank, other in enumerate(said):
        if other.kind:
            raise _error(other.kind, f"rank {rank}: {other.message}") from (failure if rank == members.rank else None)
    for rank, other in enumerate(said):
        if other.shared != said[0].shared:
            raise ValueError(_difference(said[0].shared, other.shared, rank))
    if len(agreed) >= _MOST_AGREED:
        agreed.clear()
    agreed.add(shared)


def _difference(first: Shared, other: Shared, rank: int) -> str:
    values = dict(first)
    name = next(name for name, value in other if values.get(name) != value)
    return (
        f"{name} is {values.get(name)} on rank 0 and {dict(other)[name]} on rank {rank}; "
        "context_parallel_attention needs the same on every rank"
    )


def _error(kind: str, message: str) -> Exception:
    found = _KINDS.get(kind)
    if found is None:
        return RuntimeError(f"{kind}, {message}")
    return found(message, backend="") if issubclass(found, BackendError) else found(message)
