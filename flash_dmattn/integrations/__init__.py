"""flash_dmattn inside other libraries: one module for each, imported by its full name, and the parts of adapters."""

from .heads_first import attend
from .patch import Patch

__all__ = ["Patch", "attend"]
