"""Sequences of different lengths in one call: their layout, conversion from a padded batch, writes to a cache."""

from .cache_writes import append_to_cache
from .layout import Sequences
from .padding import Padding

__all__ = ["Padding", "Sequences", "append_to_cache"]
