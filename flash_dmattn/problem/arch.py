"""The architecture of a device, by the name that its vendor's compiler has for it, and what its copy engine reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

_FOUND: dict[int, str] = {}


def device_arch(device: torch.device) -> str:
    """ "sm_90" for an NVIDIA GPU, "gfx942" for one of AMD, else the type of the device: "cpu", "mps".

    Both vendors' GPUs are of the type "cuda" in torch, and ROCm gives some of them the number (9, 0) too.
    """
    if device.type != "cuda":
        return device.type
    index = device.index or 0
    arch = _FOUND.get(index)
    if arch is None:
        gpu = torch.cuda.get_device_properties(index)
        name = str(getattr(gpu, "gcnArchName", ""))  # such as "gfx942:sramecc+:xnack-"
        is_amd = torch.version.hip is not None and name
        arch = _FOUND[index] = name.partition(":")[0] if is_amd else f"sm_{gpu.major}{gpu.minor}"
    return arch


def parse_arch(name: str) -> str:
    """An architecture as people write it, as `device_arch` has it.

    >>> parse_arch("sm90a"), parse_arch("gfx942"), parse_arch("cpu")
    ('sm_90', 'gfx942', 'cpu')

    Raises:
        ValueError: it is neither "cpu" nor the name of a GPU's architecture.
    """
    if name == "cpu" or re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
        return name
    match = re.fullmatch(r"sm_?(\d{2,3})[af]?", name)
    if match is None:
        raise ValueError(
            f"device is {name!r}; it needs to be 'cpu' or the architecture of a GPU such as 'sm_90' or 'gfx942'"
        )
    return f"sm_{match[1]}"


def sm_number(arch: str) -> int | None:
    """90 of "sm_90"; None for what is no NVIDIA GPU."""
    return int(arch[3:]) if arch.startswith("sm_") else None


def fits_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Tell whether Hopper's copy engine, the TMA, reads a 4-D tensor that starts on 16 bytes: rows of unit stride.

    Args:
        shape: of the tensor.
        strides: in elements; a dim of size 1 among the first three never takes its stride.
        itemsize: bytes of an element.
    """
    units = [stride * itemsize for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return strides[3] == 1 and all(0 < unit < 2**40 and unit % 16 == 0 for unit in units)
