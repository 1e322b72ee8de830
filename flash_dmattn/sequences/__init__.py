"""Sequences of many lengths in one call: where they lie, and the way there from a padded batch."""

from .layout import Sequences
from .padding import Padding

__all__ = ["Padding", "Sequences"]
