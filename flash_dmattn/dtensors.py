"""Where a call with DTensors goes: to `flash_dmattn.distributed.dtensor`, above `attention`, which it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_dtensor(x: object) -> bool:
    """Tell whether an argument is a DTensor, without importing them: whoever has one has done so."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def above() -> Any:
    """Load the module with `attention` and `explain` of DTensors, once the first of them comes."""
    return _load()


def load_with(load: Callable[[], Any]) -> None:
    """Set how that module is loaded: the package's own file, which knows every layer, does."""
    global _load
    _load = load


def _load() -> Any:
    raise AssertionError("flash_dmattn has not been imported")
