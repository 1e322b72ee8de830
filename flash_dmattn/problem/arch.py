"""The architecture of a device."""

from __future__ import annotations

import torch

_CAPABILITIES: dict[int, tuple[int, int]] = {}


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, remembered by index; None for any other device."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    found = _CAPABILITIES.get(index)
    if found is None:
        properties = torch.cuda.get_device_properties(index)
        found = _CAPABILITIES[index] = (properties.major, properties.minor)
    return found
