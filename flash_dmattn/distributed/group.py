"""The ranks that share a sequence: a process group by its name, its size, and this process's place in it."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .layout import SequenceLayout

Group = ProcessGroup | DeviceMesh


class Members(NamedTuple):
    """A process group as operators know it.

    Attributes:
        name: which `process_group` finds it by.
        size: number of ranks.
        rank: this process among them.
    """

    name: str
    size: int
    rank: int


def members_of(group: Group) -> Members:
    """Return the members of a group.

    Raises:
        TypeError: `group` is no process group or mesh.
        ValueError: a mesh of several dims.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of {group.ndim} dims; it needs one or two: take them by name, mesh['cp']"
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; it needs to be a torch.distributed ProcessGroup "
            "(torch.distributed.group.WORLD is that of all ranks) or a DeviceMesh of one dim"
        )
    return Members(group.group_name, group.size(), group.rank())


def groups_of(group: Group) -> tuple[Members, ...]:
    """Return the members of a group, or of the inner and of the outer dim of a mesh of two dims.

    Raises:
        TypeError, ValueError: as `members_of`, on this rank alone: without a group no other rank can be told.
    """
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return tuple([members_of(group.get_group(dim)) for dim in (1, 0)])
    return (members_of(group),)


def check_layout(layout: SequenceLayout, size: int, of: str = "group") -> None:
    """Refuse what is no layout of as many ranks.

    Raises:
        TypeError: it is no layout.
        ValueError: it is for another number of ranks.
    """
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout is a {type(layout).__name__}; it needs to be a SequenceLayout")
    if layout.world_size != size:
        raise ValueError(f"layout is for {layout.world_size} ranks; it needs the {size} of the {of}")


def process_group(name: str) -> ProcessGroup:
    """The group of a name, as operators receive it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
