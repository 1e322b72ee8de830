"""The CUDA extension for Hopper: what it will accept, and why it cannot be used yet."""

from __future__ import annotations

import torch

from .. import extension
from ..problem import dtype_name
from .protocol import Availability, Rule

NAME = "cuda"

RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda p: p.device == "cuda",
        lambda p: f"device is {p.device}; the extension runs on NVIDIA GPUs",
        "move the tensors to a Hopper GPU",
    ),
    Rule(
        "capability",
        lambda p: p.device != "cuda" or p.capability == (9, 0),
        lambda p: f"the GPU is {p.architecture}; the kernels are written for sm_90a",
        "other GPUs are served by the other backends",
    ),
    Rule(
        "dtype",
        lambda p: p.dtype in (torch.float16, torch.bfloat16),
        lambda p: f"dtype is {dtype_name(p.dtype)}; the tensor cores take float16 or bfloat16",
        "cast q, k and v",
    ),
    Rule(
        "return_probs",
        lambda p: not p.return_probs,
        lambda p: "return_probs is set; this backend never holds the probabilities of a whole call",
        'use backend="reference"',
    ),
)
AUTO_RULES: tuple[Rule, ...] = ()

_found: Availability | None = None


def probe() -> Availability:
    """Whether the compiled extension can be loaded; the first result is remembered."""
    global _found
    if _found is None:
        _found = _load()
    return _found


def _load() -> Availability:
    try:
        extension.load()
    except extension.ExtensionMismatchError as error:
        return Availability(False, str(error), "rebuild it, or install what it needs: docs/building.md", error)
    except Exception as error:  # a broken installation raises anything; a probe reports it
        if isinstance(error, ModuleNotFoundError) and error.name == extension.NAME:
            return Availability(
                False, f"{error}; in this version it has no attention kernels", "use another backend", error
            )
        return Availability(False, f"the CUDA extension cannot be loaded: {error}", "rebuild it", error)
    missing = NotImplementedError("the extension has no attention kernels yet")
    return Availability(False, str(missing), "use another backend", missing)
