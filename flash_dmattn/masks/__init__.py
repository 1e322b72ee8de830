"""Masks for `attention`: builders, top-k selection, combination, block forms, prepared masks, statistics, pictures."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .blocks import MaskStats, expand_blocks, mask_stats, smooth_blocks
from .broadcast import combine
from .builders import (
    causal_mask,
    document_ids,
    document_mask,
    padding_mask,
    prefix_lm_mask,
    sliding_window_mask,
    threshold_mask,
)
from .drawing import show
from .saved import restore as _restore  # noqa: F401 (torch.load has to know it)
from .topk import topk_mask

if TYPE_CHECKING:
    from .prepared.builders import prepare_blocks, prepare_documents, prepare_lengths, prepare_window
    from .prepared.interval_builders import prepare_intervals, prepare_topk
    from .prepared.intervals import IntervalMask
    from .prepared.prepare import prepare_mask
    from .prepared.sequence_tiles import SequenceTileMask, prepare_ragged
    from .prepared.tree import TreeMask, prepare_tree
    from .prepared.types import KeyMask, PreparedMask, TileMask

__all__ = [
    "IntervalMask",
    "KeyMask",
    "MaskStats",
    "PreparedMask",
    "SequenceTileMask",
    "TileMask",
    "TreeMask",
    "causal_mask",
    "combine",
    "document_ids",
    "document_mask",
    "expand_blocks",
    "mask_stats",
    "padding_mask",
    "prefix_lm_mask",
    "prepare_blocks",
    "prepare_documents",
    "prepare_intervals",
    "prepare_lengths",
    "prepare_mask",
    "prepare_ragged",
    "prepare_topk",
    "prepare_tree",
    "prepare_window",
    "show",
    "sliding_window_mask",
    "smooth_blocks",
    "threshold_mask",
    "topk_mask",
]

_LAZY = {
    **dict.fromkeys(("KeyMask", "PreparedMask", "TileMask"), ".prepared.types"),
    **dict.fromkeys(("prepare_blocks", "prepare_documents", "prepare_lengths", "prepare_window"), ".prepared.builders"),
    **dict.fromkeys(("prepare_intervals", "prepare_topk"), ".prepared.interval_builders"),
    **dict.fromkeys(("SequenceTileMask", "prepare_ragged"), ".prepared.sequence_tiles"),
    **dict.fromkeys(("TreeMask", "prepare_tree"), ".prepared.tree"),
    "IntervalMask": ".prepared.intervals",
    "prepare_mask": ".prepared.prepare",
}


def __getattr__(name: str) -> object:
    # On first use: a tenth of the time that importing flash_dmattn may take, for what not every program uses.
    if name in _LAZY:
        return globals().setdefault(name, getattr(_import_module(_LAZY[name], __name__), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
