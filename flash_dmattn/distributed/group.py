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


def members_of(group: Group, layout: SequenceLayout) -> Members:
    """The members of a group, which need to be as many as a layout has ranks.

    Raises:
        TypeError: `group` is no process group or mesh, or `layout` no layout.
        ValueError: a mesh of several dims, or another number of ranks.
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
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout is a {type(layout).__name__}; it needs to be a SequenceLayout")
    members = Members(group.group_name, group.size(), group.rank())
    if members.size != layout.world_size:
        raise ValueError(f"layout is for {layout.world_size} ranks; it needs the {members.size} of the group")
    return members


def process_group(name: str) -> ProcessGroup:
    """The group of a name, as operators receive it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
