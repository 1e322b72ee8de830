"""Masks for `attention`: builders, top-k selection, combination, block forms, prepared masks, statistics."""

from typing import TYPE_CHECKING, Any

import torch as _torch

from ..problem import SequenceSpec as _SequenceSpec
from .blocks import expand_blocks, mask_stats, smooth_blocks
from .builders import (
    causal_mask,
    combine,
    document_ids,
    document_mask,
    padding_mask,
    prefix_lm_mask,
    sliding_window_mask,
    threshold_mask,
)
from .index_scores import IndexScores
from .split import split_additive
from .topk import topk_mask

if TYPE_CHECKING:
    from .prepared.storage import PreparedMask

__all__ = [
    "IndexScores",
    "PreparedMask",
    "causal_mask",
    "combine",
    "document_ids",
    "document_mask",
    "expand_blocks",
    "mask_stats",
    "padding_mask",
    "prefix_lm_mask",
    "sliding_window_mask",
    "smooth_blocks",
    "split_additive",
    "threshold_mask",
    "topk_mask",
]


def __getattr__(name: str) -> object:
    # At first use: it takes a tenth of the time that importing flash_dmattn may take, and not every program needs it.
    if name == "PreparedMask":
        from .prepared import storage

        return globals().setdefault(name, storage.PreparedMask)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _restore(form: str, values: dict[str, Any]) -> "PreparedMask":
    """Make a prepared mask from its fields, for `torch.load` and pickle.

    It is defined here, so that a program that has only imported `flash_dmattn` can load a mask.
    """
    from .prepared.storage import PreparedMask

    if form not in PreparedMask._classes:
        raise ValueError(f"form is {form!r}; it needs to be one of {sorted(PreparedMask._classes)}")
    return PreparedMask._classes[form](**values)


_torch.serialization.add_safe_globals([_restore, _SequenceSpec])
