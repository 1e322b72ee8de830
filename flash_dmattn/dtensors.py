"""Where a call with DTensors goes: to `flash_dmattn.distributed.dtensor`, above `attention`, which it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_dtensor(x: object) -> bool:
    """Whether an argument is a DTensor, asked without importing them: whoever has one has done so."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def above() -> Any:
    """The module with `attention` and `explain` of DTensors, loaded with the first of them."""
    return _load()


def load_with(load: Callable[[], Any]) -> None:
    """Tell how that module is loaded: the package's own file does, which knows every layer."""
    global _load
    _load = load


def _load() -> Any:
    raise AssertionError("flash_dmattn has not been imported")
