"""flash-dmattn 1.x, which this project re-implements."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from ..cases import Case
from ..inputs import Inputs
from .protocol import Bound, Mode, Needs, System

# The predecessor's package has the name of ours, so it is not imported by name: this is the folder it is in.
PREDECESSOR = "FLASH_DMATTN_PREDECESSOR"
INTERFACE = "flash_dmattn_interface"


def missing(device: torch.device) -> str:
    if device.type != "cuda":
        return "its kernels run on GPUs"
    if PREDECESSOR not in os.environ:
        return f"{PREDECESSOR} does not name the folder that has its package flash_dmattn"
    try:
        _predecessor()
    except Exception as error:  # a broken installation raises whatever it likes, and the report has to say what
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


def bind(inputs: Inputs, mode: Mode) -> Bound:
    """`flash_dmattn_func` of flash-dmattn 1.x; what it calls lse is only returned with all probabilities."""
    attend = _predecessor().flash_dmattn_func
    q, k, v, _, mask, bias, is_causal = inputs[:7]
    return lambda: (attend(q, k, v, mask, bias, is_causal=is_causal),)


def needs(case: Case, device: torch.device) -> Needs:
    """It takes every tensor of a bias; what it gets wrong shows when it is checked."""
    if case.dtype == "fp32":
        return Needs("its kernels take 16 bits")
    if case.bias == "hd":
        return Needs("a bias by distance would be a tensor of all scores")
    return Needs(lse_refusal="it is not returned")


SYSTEMS = (System("flash-dmattn-1", bind, needs, missing, prepares=False),)
