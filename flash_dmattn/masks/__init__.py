"""Masks for `attention`: builders, top-k selection, combination, block forms, statistics and pictures."""

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
from .topk import topk_mask

__all__ = [
    "MaskStats",
    "causal_mask",
    "combine",
    "document_ids",
    "document_mask",
    "expand_blocks",
    "mask_stats",
    "padding_mask",
    "prefix_lm_mask",
    "show",
    "sliding_window_mask",
    "smooth_blocks",
    "threshold_mask",
    "topk_mask",
]
