"""Layers built on `flash_dmattn.attention`: dynamic-mask attention, rotary positions, the decoding cache."""

from .dynamic_mask_attention import AttentionArguments, DynamicMaskAttention
from .kv_cache import KVCache
from .rotary import apply_rotary, rotary_angles

__all__ = ["AttentionArguments", "DynamicMaskAttention", "KVCache", "apply_rotary", "rotary_angles"]
