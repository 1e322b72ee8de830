"""The architecture of a device, by the name that its vendor's compiler has for it."""

from __future__ import annotations

import re

import torch

_FOUND: dict[int, str] = {}


def device_arch(device: torch.device) -> str:
    """ "sm_90" for an NVIDIA GPU, "gfx942" for one of AMD, else the type of the device: "cpu", "mps".

    Both vendors' GPUs are of the type "cuda" in torch, and ROCm gives some of them the number (9, 0) too.
    """
    if device.type != "cuda":
        return device.type
    index = device.index or 0
    found = _FOUND.get(index)
    if found is None:
        found = _FOUND[index] = _arch_of_gpu(torch.cuda.get_device_properties(index))
    return found


def _arch_of_gpu(properties: object) -> str:
    name = getattr(properties, "gcnArchName", "")  # such as "gfx942:sramecc+:xnack-"
    if torch.version.hip is not None and name:
        return str(name).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"  # type: ignore[attr-defined]


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
