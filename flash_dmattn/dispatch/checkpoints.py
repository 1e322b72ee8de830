"""Checkpointed regions are recomputed under the settings of their forward pass.

`torch.utils.checkpoint` with use_reentrant=False runs a region again in the backward pass. On CUDA that pass runs in
another thread, possibly after the `with` blocks of the forward pass have ended. Torch sets hooks for saved tensors
while it runs a region. A hook refers to a `_CheckpointFrame` of torch, and the frame has the function of the region;
this module replaces that function by one that restores the settings.

All private names of torch for it are in this module. If a release of torch lacks one, regions are recomputed under the
settings of the thread that recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from ..definition import assume_constant
from . import config
from .config import Block, blocks, choice, invariant

Hooks = tuple[Callable[..., Any], Callable[..., Any]]

_autograd = torch._C._autograd
_Frame: type | None = getattr(checkpoint, "_CheckpointFrame", None)
_top: Callable[[bool], Hooks | None] = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)
_is_enabled: Callable[[], bool] = getattr(_autograd, "_saved_tensors_hooks_is_enabled", lambda: False)


@assume_constant  # Dynamo runs it with the hooks around the trace
def follow_checkpoints() -> None:
    """Make checkpointed regions that are running now use the active config when they are recomputed.

    It has to run before settings are used or changed inside a region, so every call and every `with` block runs it.
    """
    hooks = _top(True)
    if hooks is not None and _Frame is not None:
        _follow(hooks)


config.follow_checkpoints = follow_checkpoints


class _Recomputation:
    """The function of a region, run under the settings of its forward pass, except for the list of decisions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.settings = blocks.now._replace(backend=choice(), entered=(), invariant=invariant())

    def __call__(self, *args: Any) -> Any:
        before = blocks.now
        change = self.settings._replace(records=before.records)
        blocks.now = change._replace(entered=(Block(change),))
        try:
            return self.function(*args)
        finally:
            blocks.now = before


def _follow(hooks: Hooks) -> None:
    frame = _frame_of(hooks)
    if (frame is not None and type(frame.recompute_fn) is _Recomputation) or not _is_enabled():
        return  # outer regions are marked, too, because marking a region marks all regions around it
    lifted = []
    try:
        while True:
            if frame is not None and type(frame.recompute_fn) is not _Recomputation:
                frame.recompute_fn = _Recomputation(frame.recompute_fn)
            _autograd._pop_saved_tensors_default_hooks()
            lifted.append(hooks)
            below = _top(True)
            if below is None:
                return
            hooks, frame = below, _frame_of(below)
    finally:
        for pack, unpack in reversed(lifted):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _frame_of(hooks: Hooks) -> Any:
    """Return the frame of the region to which these hooks belong; None for other hooks."""
    for cell in getattr(hooks[0], "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if type(held) is _Frame and hasattr(held, "recompute_fn"):
            return held
    return None
