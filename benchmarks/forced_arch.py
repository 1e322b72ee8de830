"""Run on a Hopper GPU what Triton makes for another one: `TRITON_OVERRIDE_ARCH=sm80`, `sm86`, `sm89` or `sm120`.

    TRITON_OVERRIDE_ARCH=sm80 python -m pytest tests/test_gpu.py -k triton
    python -m benchmarks --as sm_80 performance --only bias short

With that variable Triton takes layouts and instructions, such as mma.sync, from the other GPU, and makes machine code
for the one that is there. `force` adds what plans ask for: the name of the other GPU, which decides tiles and
descriptors, and its shared memory. This shows results and room. It does not show the speed of the other GPU, whose
memory and clocks differ. So tables of times are called a proxy for the order of kernels. sm_100 and GPUs of AMD have
instructions of their own, which no Hopper GPU runs.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

VARIABLE = "TRITON_OVERRIDE_ARCH"
# Systems whose kernels another GPU would run, too. All others have kernels for Hopper.
SYSTEMS = ("triton", "auto", "sdpa-flash", "sdpa-mem", "flexattention")


def forced() -> str | None:
    """Return the architecture that Triton is told to compile for, such as "sm_80", or None."""
    name = os.environ.get(VARIABLE)
    return name.replace("sm", "sm_") if name else None


def names() -> list[str]:
    """Return the architectures that a Hopper GPU can stand for."""
    gpus = importlib.import_module("flash_dmattn.triton_kernels.gpus")
    return [gpu.arch for gpu in gpus.GPUS if gpu.standing == "forced"]


def force_from_environment() -> None:
    """Force the architecture that Triton is told to compile for, where there is a GPU to run it."""
    arch = forced()
    if arch is not None and torch.cuda.is_available():
        force(arch)


def force(arch: str) -> None:
    """Let plans of this process be made for another GPU, and Triton refuse what does not fit its shared memory."""
    if arch not in names():
        raise ValueError(f"{VARIABLE} names {arch}; it needs to name one of {', '.join(names())}")
    gpus = importlib.import_module("flash_dmattn.triton_kernels.gpus")
    description = importlib.import_module("flash_dmattn.problem.description")
    description._by_index.update(dict.fromkeys(range(torch.cuda.device_count()), arch))
    room = gpus.shared_bytes(arch)
    utils = importlib.import_module("triton.runtime").driver.active.utils
    read = utils.get_device_properties

    def properties(device: int) -> dict[str, Any]:
        known = read(device)
        return {**known, "max_shared_mem": min(room, known["max_shared_mem"])}

    utils.get_device_properties = properties
