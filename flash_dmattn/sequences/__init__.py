"""Sequences of many lengths in one call: where they lie."""

from .layout import Sequences, lay_out

__all__ = ["Sequences", "lay_out"]
