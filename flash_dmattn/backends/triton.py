"""The Triton kernels: what they will accept, and why they cannot be used yet."""

from __future__ import annotations

import importlib

import torch

from .protocol import Availability, Rule

NAME = "triton"

RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda p: p.device == "cuda",
        lambda p: f"device is {p.device}; the kernels run on GPUs",
        "move the tensors to a GPU",
    ),
    Rule(
        "dtype",
        lambda p: p.dtype != torch.float64,
        lambda p: "dtype is float64; the kernels compute in at most float32",
        'cast q, k and v, or use backend="eager"',
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
    """Whether Triton and the kernels can be imported; the first result is remembered."""
    global _found
    if _found is None:
        _found = _load()
    return _found


def _load() -> Availability:
    kernels = "flash_dmattn.triton_kernels.forward"
    try:
        importlib.import_module(kernels)
    except Exception as error:  # a broken installation raises anything; a probe reports it
        if isinstance(error, ModuleNotFoundError) and error.name in (kernels, "flash_dmattn.triton_kernels"):
            reason = f"{kernels} is not in this installation: this version ships no Triton kernels"
            return Availability(False, reason, "use a version that ships them", error)
        return Availability(False, f"Triton cannot be imported: {error}", "pip install triton", error)
    return Availability(True)
