"""Layers built on `flash_dmattn.attention`, and the biases of well-known models."""

from .dynamic_mask_attention import DynamicMaskAttention, KVCache
from .pair_bias_attention import PairBiasAttention
from .positions import RelativePositionBias, WindowPositionBias, alibi_slopes

__all__ = [
    "DynamicMaskAttention",
    "KVCache",
    "PairBiasAttention",
    "RelativePositionBias",
    "WindowPositionBias",
    "alibi_slopes",
]
