"""Ranks tell each other what they are about to do before they do it, so that a mistake on one of them hangs none.

Every call, and every operator of its backward pass, begins with one collective of 16 bytes for each rank: a hash of all
that has to be the same. Where it differs, or a rank has refused its own arguments, all ranks send each other the words
behind the hash, and raise the same error. As many collectives then went through on each, so the group is of use after.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..dispatch.selection import BackendError, BackendUnavailableError, BackendUnsupportedError
from ..problem import dtype_name
from .group import Members, process_group

# Values that have to be the same on every rank: ((name, value in words), ...).
Shared = tuple[tuple[str, str], ...]

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, NotImplementedError, BackendUnsupportedError, BackendUnavailableError)
}
_REFUSED = (0, 0)  # in the place of a hash: a rank refuses its arguments, or ranks differ
# Entries end with the group that is their key.
_carriers: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
_calls: WeakKeyDictionary[ProcessGroup, Counter[tuple[str, ...]]] = WeakKeyDictionary()


class _Said(NamedTuple):
    rank: int
    shared: Shared
    kind: str = ""
    message: str = ""


def next_number(groups: tuple[Members, ...]) -> int:
    """Count the calls over groups, the next one included: every rank has the same number.

    Args:
        groups: one, or the dims of a mesh.
    """
    return _numbers(groups)[_names(groups)] + 1


def agree(groups: tuple[Members, ...], shared: Shared) -> None:
    """Compare the call of this rank with the calls of all others, and count the call.

    Args:
        groups: one, or the dims of a mesh: the result of a comparison over one dim is compared over the next.
        shared: values that have to be the same on every rank.

    Raises:
        ValueError: ranks differ in a value; the message names the argument and the value of each rank.
        TypeError, NotImplementedError, BackendError, RuntimeError: a rank refuses its own arguments.
    """
    _compare(groups, (("step", "forward"), *shared), None)
    _numbers(groups)[_names(groups)] += 1


def agree_within(group: str, direction: str, number: int, values: Mapping[str, object]) -> None:
    """Compare one operator, in a backward pass or in a compiled graph, with the operators of all other ranks.

    Args:
        group: name of the process group.
        direction: "forward" or "backward".
        number: of the call, 0 in a compiled graph.
        values: numbers that have to be the same on every rank, and tensors whose dtype and shape have to be.

    Raises:
        ValueError: ranks differ in a value.
    """
    ranks = process_group(group)
    step = f"{direction} of call {number}" if number else f"{direction} of a compiled call"
    shared = (("step", step), *((name, _in_words(value)) for name, value in values.items()))
    _compare((Members(group, ranks.size(), ranks.rank()),), shared, None)


def refuse_together(groups: tuple[Members, ...], failure: Exception) -> NoReturn:
    """Raise the error of this rank on all ranks, which compare their calls meanwhile.

    While a graph is traced nothing can be sent, so the error is raised on this rank alone.
    """
    if not torch.compiler.is_compiling():
        _compare(groups, (), failure)
    raise failure


@torch._disable_dynamo  # where a frame that calls it is not compiled, it must not be compiled for itself
def _compare(groups: tuple[Members, ...], shared: Shared, failure: Exception | None) -> None:
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        groups = ()  # nothing is sent under it
    header = _REFUSED if failure is not None else _hash(shared)
    for members in groups:
        header = _header_of_all(header, members)
    if header != _REFUSED:
        return
    rank = dist.get_rank()
    own = _Said(rank, shared)
    if failure is not None:
        own = _Said(rank, (), type(failure).__name__, f"rank {rank}: {failure}")
    said = [own]
    for members in groups:
        said = _all_that_is_said(said, members)
    refused = [one for one in said if one.kind]
    raise _error(min(refused)) if refused else ValueError(_difference(sorted(said))) from failure


def _hash(shared: Shared) -> tuple[int, ...]:
    return struct.unpack("qq", hashlib.sha256(repr(shared).encode()).digest()[:16])


def _header_of_all(own: tuple[int, ...], members: Members) -> tuple[int, ...]:
    """Return the header where all ranks of a group have the same one, else `_REFUSED`."""
    if members.size == 1:
        return own
    received = torch.empty((members.size, len(own)), dtype=torch.int64, device="cpu")
    sent = torch.tensor(own, dtype=torch.int64, device="cpu")
    _carrier(process_group(members.name)).allgather([list(received.unbind())], [sent]).wait()
    return own if all(tuple(header) == own for header in received.tolist()) else _REFUSED


def _all_that_is_said(said: list[_Said], members: Members) -> list[_Said]:
    if members.size == 1:
        return said
    lists: list[Any] = [None] * members.size
    dist.all_gather_object(lists, said, group=_carrier(process_group(members.name)))
    return [one for each in lists for one in each]


def _carrier(group: ProcessGroup) -> ProcessGroup:
    """Return a group of the same ranks for tensors on the host: a header on the device would wait for its kernels."""
    if torch.device("cpu") in group._device_types:
        return group
    if group not in _carriers:
        timeout = group._get_backend(group._device_types[0]).options._timeout
        ranks = dist.get_process_group_ranks(group)
        _carriers[group] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return _carriers[group]


def _names(groups: tuple[Members, ...]) -> tuple[str, ...]:
    return tuple(members.name for members in groups)


def _numbers(groups: tuple[Members, ...]) -> Counter[tuple[str, ...]]:
    return _calls.setdefault(process_group(groups[-1].name), Counter())


def _in_words(value: object) -> str:
    return f"{dtype_name(value.dtype)} {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)


def _difference(said: list[_Said]) -> str:
    """Name the first value that differs, and the ranks that have each."""
    values = [dict(one.shared) for one in said]
    name = next(name for names in values for name in names if len({other.get(name) for other in values}) > 1)
    ranks: dict[str | None, list[str]] = {}
    for one, words in zip(said, values, strict=True):
        ranks.setdefault(words.get(name), []).append(str(one.rank))
    have = [f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in ranks.items()]
    return f"{name} is {' and '.join(have)}; context_parallel_attention needs the same on every rank"


def _error(said: _Said) -> Exception:
    kind = _KINDS.get(said.kind)
    if kind is None:
        return RuntimeError(f"{said.kind}, {said.message}")
    return kind(said.message, backend="") if issubclass(kind, BackendError) else kind(said.message)
