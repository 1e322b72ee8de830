"""Run on a Hopper GPU what Triton makes for another one: `TRITON_OVERRIDE_ARCH=sm80`, `sm86`, `sm89` or `sm120`.

    TRITON_OVERRIDE_ARCH=sm80 python -m pytest tests/test_gpu.py -k triton
    python tests/forced_arch.py sm_80 -m benchmarks sweep tiles --small    # any module, under the same conditions

With that variable Triton takes layouts and instructions, such as mma.sync, from the other GPU, and makes machine code
for the one that is there. `force` adds what plans ask for: the name of the other GPU, which decides tiles and
descriptors, and its shared memory. This shows results and room, not speed. sm_100 and GPUs of AMD have instructions of
their own, which no Hopper GPU runs.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

VARIABLE = "TRITON_OVERRIDE_ARCH"


def force_from_environment() -> None:
    """Force the architecture that Triton is told to compile for, where there is a GPU to run it."""
    name = os.environ.get(VARIABLE)
    if name and torch.cuda.is_available():
        force(name.replace("sm", "sm_"))


def force(arch: str) -> None:
    """Let plans of this process be made for another GPU, and Triton refuse what does not fit its shared memory."""
    gpus = importlib.import_module("flash_dmattn.triton_kernels.gpus")
    names = [gpu.arch for gpu in gpus.GPUS if gpu.standing == "forced"]
    if arch not in names:
        raise ValueError(f"{VARIABLE} names {arch}; it needs to name one of {', '.join(names)}")
    description = importlib.import_module("flash_dmattn.problem.description")
    description._by_index.update(dict.fromkeys(range(torch.cuda.device_count()), arch))
    room = gpus.shared_bytes(arch)
    utils = importlib.import_module("triton.runtime").driver.active.utils
    read = utils.get_device_properties

    def properties(device: int) -> dict[str, Any]:
        known = read(device)
        return {**known, "max_shared_mem": min(room, known["max_shared_mem"])}

    utils.get_device_properties = properties


def main(arch: str, flag: str, module: str, *arguments: str) -> None:
    """Run a module as `python -m` does."""
    if flag != "-m":
        sys.exit(__doc__)
    os.environ[VARIABLE] = arch.replace("_", "")
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    force_from_environment()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
