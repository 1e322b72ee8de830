"""Peers that other packages bring: FlashAttention-4, and flash-dmattn 1.x, which this project re-implements."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..cases import Case
from ..inputs import Inputs
from .protocol import Bound, Mode, Needs, System

# The predecessor's package has the name of ours, so it is not imported by name: this is the folder it is in.
PREDECESSOR = "FLASH_DMATTN_PREDECESSOR"
INTERFACE = "flash_dmattn_interface"


def _not_importable(name: str, device: torch.device) -> str:
    if device.type != "cuda":
        return "its kernels run on GPUs"
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation raises whatever it likes, and the report has to say what
        return f"{name} cannot be imported: {type(error).__name__}: {error}"
    return ""


def fa4_needs(case: Case, device: torch.device) -> Needs:
    """It is made for dense and causal attention."""
    if case.mask is not None or case.bias is not None:
        return Needs("its kernels take neither a mask tensor nor a bias with a gradient")
    return Needs()


def bind_fa4(inputs: Inputs, mode: Mode) -> Bound:
    """`flash_attn.cute`, whose layout is ours."""
    attend = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v, _, _, _, is_causal = inputs

    def call() -> tuple[Tensor, ...]:
        found = attend(q, k, v, causal=is_causal, return_lse=mode.with_lse)
        results = found if isinstance(found, tuple) else (found,)
        return results[: 2 if mode.with_lse else 1]

    return call


def predecessor_missing(device: torch.device) -> str:
    """Why flash-dmattn 1.x is not here."""
    if device.type != "cuda":
        return "its kernels run on GPUs"
    if PREDECESSOR not in os.environ:
        return f"{PREDECESSOR} does not name the folder that has its package flash_dmattn"
    try:
        _predecessor()
    except Exception as error:  # as in _not_importable
        return f"it cannot be imported: {type(error).__name__}: {error}"
    return ""


def _predecessor() -> ModuleType:
    """Its interface by path, under a name of its own; its compiled module has a name that nobody else uses."""
    name = f"predecessor_{INTERFACE}"
    if name not in sys.modules:
        folder = Path(os.environ[PREDECESSOR])
        spec = importlib.util.spec_from_file_location(name, folder / "flash_dmattn" / f"{INTERFACE}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder} has no flash_dmattn/{INTERFACE}.py")
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def bind_predecessor(inputs: Inputs, mode: Mode) -> Bound:
    """`flash_dmattn_func` of flash-dmattn 1.x; what it calls lse is only returned with all probabilities."""
    attend = _predecessor().flash_dmattn_func
    q, k, v, _, mask, bias, is_causal = inputs
    return lambda: (attend(q, k, v, mask, bias, is_causal=is_causal),)


def fa4_missing(device: torch.device) -> str:
    """Why FlashAttention-4 is not here."""
    return _not_importable("flash_attn.cute", device)


def predecessor_needs(case: Case, device: torch.device) -> Needs:
    """It takes every case; what it gets wrong shows when it is checked."""
    return Needs(lse_refusal="it is not returned")


SYSTEMS = (
    System("fa4", bind_fa4, fa4_needs, fa4_missing, prepares=False),
    System("flash-dmattn-1", bind_predecessor, predecessor_needs, predecessor_missing, prepares=False),
)
