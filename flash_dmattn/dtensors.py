"""Sends calls with DTensors to `flash_dmattn.distributed.dtensor`, a layer above `attention`, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_dtensor(x: object) -> bool:
    """Return whether an argument is a DTensor, without importing DTensors: a caller that has one has done so."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def above() -> Any:
    """Return the module with `attention` and `explain` for DTensors; the first use imports it."""
    return _load()


def load_with(load: Callable[[], Any]) -> None:
    """Set how that module is loaded; `flash_dmattn/__init__.py` calls this, because it may import every layer."""
    global _load
    _load = load


def _load() -> Any:
    raise AssertionError("flash_dmattn has not been imported")
