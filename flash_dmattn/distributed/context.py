"""`use_context_parallel`: the group and layout that integrations read, thread by thread; `attention` never does."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NamedTuple

from .group import Group, check_layout, members_of
from .layout import SequenceLayout


class InContext(NamedTuple):
    """What a `use_context_parallel` block says: the group, who has which positions, and which rank this process is."""

    group: Group
    layout: SequenceLayout
    rank: int


class _Thread(threading.local):
    current: InContext | None = None


_thread = _Thread()


class use_context_parallel:
    """Let models in a `with` block of this thread attend over a group whose ranks hold parts of the sequence.

    What reads it is an integration, such as that of transformers, which then calls `context_parallel_attention` in the
    place of `attention`. `flash_dmattn.attention` itself never does.

    Args:
        group: as in `context_parallel_attention`.
        layout: of the queries and keys of the model.

    Raises:
        TypeError, ValueError: `group` or `layout` is of another kind, or their sizes differ.
    """

    def __init__(self, group: Group, layout: SequenceLayout) -> None:
        members = members_of(group)
        check_layout(layout, members.size)
        self._entered = InContext(group, layout, members.rank)

    def __enter__(self) -> SequenceLayout:
        self._previous = _thread.current
        _thread.current = self._entered
        return self._entered.layout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.current = self._previous


def context_in_force() -> InContext | None:
    """What the innermost `use_context_parallel` block of this thread says; None outside of any."""
    return _thread.current
