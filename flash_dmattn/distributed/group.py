"""The ranks of a sharded sequence: their group, the block for integrations, and how ranks compare their calls.

Ranks compare calls before they run them, so that a mistake on one rank does not make all ranks hang. Every call, and
every operator of its backward pass, begins with one collective of 16 bytes for each rank: a hash of all values that
have to be the same. If hashes differ, or a rank has refused its own arguments, all ranks send each other the text that
was hashed, and raise the same error. All ranks have then run the same number of collectives, so the group can be used
again.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..definition import listed
from ..dispatch.checkpoints import follow_checkpoints
from ..dispatch.config import Block, Blocks, blocks
from ..dispatch.selection import BackendError, BackendUnavailableError, BackendUnsupportedError
from ..problem import dtype_name
from .layout import SequenceLayout

Group = ProcessGroup | DeviceMesh

# Values that have to be the same on every rank: ((name, value as text), ...).
Shared = tuple[tuple[str, str], ...]

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, NotImplementedError, BackendUnsupportedError, BackendUnavailableError)
}
_REFUSED = (0, 0)  # instead of a hash: a rank refuses its arguments, or ranks differ
# Entries are dropped with the group that is their key.
_carriers: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
_calls: WeakKeyDictionary[ProcessGroup, Counter[tuple[str, ...]]] = WeakKeyDictionary()


class Members(NamedTuple):
    """A process group in the form for operators: its name, its number of ranks, and the rank of this process."""

    name: str
    size: int
    rank: int


def _members_of(group: Group) -> Members:
    """Return the members of a group, or of a mesh of one dim."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of {group.ndim} dims; it needs one or two: take them by name, mesh['cp']"
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; it needs to be a torch.distributed ProcessGroup "
            "(torch.distributed.group.WORLD is that of all ranks) or a DeviceMesh of one or two dims"
        )
    return Members(group.group_name, group.size(), group.rank())


def groups_of(group: Group) -> tuple[Members, ...]:
    """Return the members of a group, or of the inner and of the outer dim of a mesh of two dims.

    It raises only on this rank, because without a group ranks cannot communicate.
    """
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return tuple([_members_of(group.get_group(dim)) for dim in (1, 0)])
    return (_members_of(group),)


def size_and_rank(groups: tuple[Members, ...]) -> tuple[int, int]:
    """Return the number of ranks, and this rank in the layout; the inner dim of a mesh comes first."""
    size, rank = 1, 0
    for members in groups:
        size, rank = size * members.size, rank + size * members.rank
    return size, rank


def check_layout(layout: SequenceLayout, size: int, name: str = "layout") -> None:
    """Refuse anything but a layout of the same number of ranks."""
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"{name} is a {type(layout).__name__}; it needs to be a SequenceLayout")
    if layout.world_size != size:
        raise ValueError(f"{name} is for {layout.world_size} ranks; it needs the {size} of the group")


def process_group(name: str) -> ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


class InContext(NamedTuple):
    """A group or mesh, the layout of the positions, and the rank of this process in the layout."""

    group: Group
    layout: SequenceLayout
    rank: int


class use_context_parallel(Block):
    """Let models in a `with` block attend over a group, over which the sequence is sharded.

    In the block, integrations, such as the one for transformers, call `context_parallel_attention` instead of
    `attention`. It does not change `flash_dmattn.attention` itself. It has the scope of a block of
    `flash_dmattn.config`.

    Args:
        group: as in `context_parallel_attention`.
        layout: of the queries and keys of the model.

    Raises:
        TypeError, ValueError: `group` or `layout` is of another kind, or their sizes differ.
    """

    def __init__(self, group: Group, layout: SequenceLayout) -> None:
        size, rank = size_and_rank(groups_of(group))
        check_layout(layout, size)
        super().__init__(Blocks(parallel=InContext(group, layout, rank)))
        self._layout = layout

    def __enter__(self) -> SequenceLayout:
        self.enter()
        return self._layout


def context_in_force() -> InContext | None:
    """Return the group and layout of the innermost `use_context_parallel` block around the caller; None without one."""
    follow_checkpoints()
    return cast("InContext | None", blocks.now.parallel)


def next_number(groups: tuple[Members, ...]) -> int:
    """Count the calls over a group or the dims of a mesh, the next one included: every rank has the same number."""
    counts, names = _counts(groups)
    return counts[names] + 1


def _counts(groups: tuple[Members, ...]) -> tuple[Counter[tuple[str, ...]], tuple[str, ...]]:
    """Return the numbers of calls, and the key of the calls over these groups."""
    counts = _calls.setdefault(process_group(groups[-1].name), Counter())
    return counts, tuple(members.name for members in groups)


def agree(groups: tuple[Members, ...], shared: Shared) -> None:
    """Compare the call of this rank with the calls of all other ranks, and count the call.

    The result of a comparison over one dim of a mesh is compared over the next.
    """
    _compare(groups, (("step", "forward"), *shared), None)
    counts, names = _counts(groups)
    counts[names] += 1


def agree_within(group: str, direction: str, number: int, values: Mapping[str, object]) -> None:
    """Compare one operator, in a backward pass or in a compiled graph, with the operators of all other ranks.

    `number` counts the calls; it is 0 in a compiled graph. `values` are numbers, and tensors for their dtype and shape.
    """
    ranks = process_group(group)
    step = f"{direction} of call {number}" if number else f"{direction} of a compiled call"
    words = [
        (name, f"{dtype_name(x.dtype)} {tuple(x.shape)}" if isinstance(x, Tensor) else str(x))
        for name, x in values.items()
    ]
    _compare((Members(group, ranks.size(), ranks.rank()),), (("step", step), *words), None)


def refuse_together(groups: tuple[Members, ...], failure: Exception) -> NoReturn:
    """Raise the error of this rank on all ranks, which compare their calls.

    While a graph is traced, ranks cannot communicate, so the error is raised only on this rank.
    """
    if not torch.compiler.is_compiling():
        _compare(groups, (), failure)
    raise failure


class _Statement(NamedTuple):
    """The values of one rank, or its error, which ranks send each other if they differ."""

    rank: int
    shared: Shared
    kind: str = ""
    message: str = ""


@torch._disable_dynamo  # if the frame that calls it is not compiled, it must not be compiled separately
def _compare(groups: tuple[Members, ...], shared: Shared, failure: Exception | None) -> None:
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    sizes = {_carrier(process_group(one.name)): one.size for one in groups if one.size > 1 and not is_fake}
    digest = hashlib.sha256(repr(shared).encode()).digest()
    header: tuple[int, ...] = _REFUSED if failure is not None else struct.unpack("qq", digest[:16])
    for carrier, size in sizes.items():
        received = torch.empty((size, len(header)), dtype=torch.int64, device="cpu")
        # An all_to_all, because the all_gather of gloo sends headers around a ring, from rank to rank.
        sent = torch.tensor([header] * size, dtype=torch.int64, device="cpu")
        carrier.alltoall_base(received, sent, [], []).wait()
        if any(tuple(other) != header for other in listed(received)):
            header = _REFUSED
    if header != _REFUSED:
        return
    rank = dist.get_rank()
    statements = [_Statement(rank, shared)]
    if failure is not None:
        statements = [_Statement(rank, (), type(failure).__name__, f"rank {rank}: {failure}")]
    for carrier, size in sizes.items():
        lists: list[Any] = [None] * size
        dist.all_gather_object(lists, statements, group=carrier)
        statements = [one for each in lists for one in each]
    refused = [one for one in statements if one.kind]
    raise _error(min(refused)) if refused else ValueError(_difference(sorted(statements))) from failure


def _carrier(group: ProcessGroup) -> ProcessGroup:
    """Return a group of the same ranks for tensors on the host, where a header does not wait for kernels."""
    if torch.device("cpu") in group._device_types:
        return group
    if group not in _carriers:
        timeout = group._get_backend(group._device_types[0]).options._timeout
        ranks = dist.get_process_group_ranks(group)
        _carriers[group] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return _carriers[group]


def _difference(statements: list[_Statement]) -> str:
    """Describe the first value that differs, and the ranks that have each variant."""
    values = [dict(one.shared) for one in statements]
    name = next(name for names in values for name in names if len({other.get(name) for other in values}) > 1)
    ranks: dict[str | None, list[str]] = {}
    for one, words in zip(statements, values, strict=True):
        ranks.setdefault(words.get(name), []).append(str(one.rank))
    have = [f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in ranks.items()]
    return f"{name} is {' and '.join(have)}; it needs to be the same on every rank"


def _error(statement: _Statement) -> Exception:
    kind = _KINDS.get(statement.kind)
    if kind is None:
        return RuntimeError(f"{statement.kind}, {statement.message}")
    return kind(statement.message, backend="") if issubclass(kind, BackendError) else kind(statement.message)
