"""The architecture of a device, by the name that its vendor's compiler has for it, and what its copy engine reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_by_index: dict[int, str] = {}


def device_arch(device: torch.device) -> str:
    """Return "sm_90" for an NVIDIA GPU, "gfx942" for one of AMD, else the type of the device: "cpu", "mps".

    Both vendors' GPUs are of the type "cuda" in torch, and ROCm gives some of them the number (9, 0) too.
    """
    if device.type != "cuda":
        return device.type
    index = device.index or 0
    arch = _by_index.get(index)
    if arch is None:
        gpu = torch.cuda.get_device_properties(index)
        name = str(getattr(gpu, "gcnArchName", ""))  # such as "gfx942:sramecc+:xnack-"
        is_amd = torch.version.hip is not None and name
        arch = _by_index[index] = name.partition(":")[0] if is_amd else f"sm_{gpu.major}{gpu.minor}"
    return arch


def sm_number(arch: str) -> int | None:
    """Return 90 for "sm_90"; None for anything but an NVIDIA GPU."""
    return int(arch[3:]) if arch.startswith("sm_") else None


def fits_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Tell whether Hopper's copy engine, the TMA, reads a 4-D tensor that starts on 16 bytes: rows of unit stride.

    A dim of size 1 among the first three never takes its stride.
    """
    units = [stride * itemsize for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return strides[3] == 1 and all(0 < unit < 2**40 and unit % 16 == 0 for unit in units)
