"""Modules of Triton kernels beside those of a backend: imported where Triton is installed."""

from __future__ import annotations

import importlib
from types import ModuleType


def triton_module(name: str) -> ModuleType | None:
    """A module by its whole name; None where Triton is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None
