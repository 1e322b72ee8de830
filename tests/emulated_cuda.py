"""The CUDA kernels on the emulated GPU of `emulation/`, for CPU tensors; it changes the backend of its process.

`run_calls.py` runs random calls there. Each call draws a number of SMs, an order of warps, and how many blocks share
keys.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import torch
from cases import Case
from cuda_forms import described
from out_of_tree import replace_backend, rules_without

from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch import packers
from flash_dmattn.masks.prepared import operators

# An H200 has 132; with fewer, blocks take several pieces of work each. The threads of more than some 60 blocks at once
# are more stacks than Linux maps for a process.
NUM_SMS = (1, 2, 3, 5, 40)
NUM_KV_SPLITS = (1, 1, 0, 2, 3, 7)
NUM_DBIAS_CHUNKS = (0, 1, 2, 3, 7)
_loaded: ctypes.CDLL | None = None


def admit_cpu(path: Path) -> None:
    """Have the backend run the operators of an emulated extension; of its rules that on the device is lifted."""
    global _loaded
    torch.ops.load_library(path)
    _loaded = ctypes.CDLL(str(path))
    _loaded.emulation_configure.argtypes = (ctypes.c_int, ctypes.c_uint64)
    units = frozenset(json.loads(path.with_suffix(".json").read_text()))
    cuda_rules.installed_instances = lambda: units
    # The tensors are of a CPU, for which PyTorch packs. Masks of keys and lists of blocks have kernels, as on a GPU.
    made = packers.around_extension(torch.ops.flash_dmattn)
    packer = operators.PYTORCH._replace(row_intervals=made.row_intervals, tiles_of_lists=made.tiles_of_lists)
    operators.register(lambda tensor: packer)
    replace_backend("cuda", probe=lambda: Availability(True), rules=rules_without("cuda", "device"))


def configure(num_sms: int = 3, seed: int = 0) -> None:
    """Set how many SMs the GPU has, and in which order its next kernel runs; each later one has another."""
    assert _loaded is not None
    _loaded.emulation_configure(num_sms, seed)


def launches(leaves_out: bool = False) -> int:
    """Count the kernels and memsets so far. With `leaves_out` no kernel runs from now on: only the host works."""
    assert _loaded is not None
    return _loaded.emulation_launches(leaves_out)


def is_built(case: Case) -> bool:
    """Whether there are kernels for its head dims and dtype, so that it is worth building."""
    return cuda_rules._instance(described(case)) is not None
