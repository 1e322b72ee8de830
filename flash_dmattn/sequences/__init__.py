"""Sequences of many lengths in one call: their layout, the way there from a padded batch, and into a cache."""

from .cache_writes import append_to_cache
from .layout import Sequences
from .padding import Padding

__all__ = ["Padding", "Sequences", "append_to_cache"]
