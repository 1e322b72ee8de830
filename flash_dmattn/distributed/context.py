"""`use_context_parallel`: the group and layout that integrations read in a `with` block; `attention` never does."""

from __future__ import annotations

from typing import NamedTuple, cast

from ..dispatch.checkpoints import follow_checkpoints
from ..dispatch.config import Block, Blocks, blocks
from .group import Group, check_layout, members_of
from .layout import SequenceLayout


class InContext(NamedTuple):
    """A group, who has which positions, and which rank of it this process is."""

    group: Group
    layout: SequenceLayout
    rank: int


class use_context_parallel(Block):
    """Let models in a `with` block attend over a group whose ranks hold parts of the sequence.

    Integrations, such as the one of transformers, read it and call `context_parallel_attention` in the place of
    `attention`. `flash_dmattn.attention` itself never reads it. It reaches what `flash_dmattn.config` reaches.

    Args:
        group: as in `context_parallel_attention`.
        layout: of the queries and keys of the model.

    Raises:
        TypeError, ValueError: `group` or `layout` is of another kind, or their sizes differ.
    """

    def __init__(self, group: Group, layout: SequenceLayout) -> None:
        members = members_of(group)
        check_layout(layout, members.size)
        super().__init__(Blocks(parallel=InContext(group, layout, members.rank)))
        self._layout = layout

    def __enter__(self) -> SequenceLayout:
        self.enter()
        return self._layout


def context_in_force() -> InContext | None:
    """The group and layout of the innermost `use_context_parallel` block around this place; None outside of any."""
    follow_checkpoints()
    return cast("InContext | None", blocks.now.parallel)
