"""The demo, `python -m flash_dmattn demo`: a small language model trained with dynamic-mask attention on real text."""

from .command import main

__all__ = ["main"]
