"""flash_dmattn inside other libraries: a module for each, imported by its whole name, and what adapters are made of."""

from .heads_first import attend
from .patch import Patch

__all__ = ["Patch", "attend"]
