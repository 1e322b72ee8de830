"""Layers built on `flash_dmattn.attention`, and the biases of well-known models to hand to it."""

from .dynamic_mask_attention import AttentionArguments, DynamicMaskAttention
from .kv_cache import KVCache
from .paged_cache import PagedKVCache
from .pair_bias_attention import PairBiasAttention
from .position_bias import RelativePositionBias, WindowPositionBias, alibi_slopes
from .rotary import apply_rotary, rotary_angles

__all__ = [
    "AttentionArguments",
    "DynamicMaskAttention",
    "KVCache",
    "PagedKVCache",
    "PairBiasAttention",
    "RelativePositionBias",
    "WindowPositionBias",
    "alibi_slopes",
    "apply_rotary",
    "rotary_angles",
]
