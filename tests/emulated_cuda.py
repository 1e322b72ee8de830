"""The CUDA kernels on the emulated GPU of `emulation/`, for CPU tensors, as `backend="cuda"` of this process."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import torch

from flash_dmattn.backends import cuda, cuda_rules
from flash_dmattn.backends.protocol import Availability

_loaded: ctypes.CDLL | None = None


def admit_cpu(path: Path) -> None:
    """Have the backend run the operators of an extension that `emulation/build.py` has written.

    Of its rules the one on the device is lifted; all others stand.
    """
    global _loaded
    torch.ops.load_library(path)
    _loaded = ctypes.CDLL(str(path))
    _loaded.emulation_configure.argtypes = (ctypes.c_int, ctypes.c_uint64)
    units = frozenset(json.loads(path.with_suffix(".json").read_text()))
    cuda_rules.installed_units = lambda: units
    cuda._found = Availability(True)
    cuda.RULES = tuple(rule for rule in cuda.RULES if rule.code != "device")


def configure(multiprocessors: int = 3, seed: int = 0) -> None:
    """Set how many multiprocessors the GPU has, and in which order its next kernel runs; each later one has another."""
    assert _loaded is not None
    _loaded.emulation_configure(multiprocessors, seed)
