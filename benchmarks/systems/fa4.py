"""FlashAttention-4, the package flash-attn-4: dense and causal calls, grouped heads included.

The first call compiles its kernels, which stay on disk. It is never timed: every system runs once before its result is
checked.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from flash_dmattn.problem import device_arch, sm_number

from ..cases import Case
from ..inputs import Inputs
from .protocol import Bound, Mode, Needs, System

MODULE = "flash_attn.cute.interface"
# Set before the import, it keeps compiled kernels on disk, so that kernels compiled in advance are reused.
KEEP_COMPILED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def interface() -> ModuleType:
    os.environ.setdefault(KEEP_COMPILED, "1")
    return importlib.import_module(MODULE)


def missing(device: torch.device) -> str:
    if device.type != "cuda":
        return "its kernels run on GPUs"
    try:
        interface()
    except Exception as error:  # a broken installation raises whatever it likes, and the report has to say what
        return f"{MODULE} cannot be imported: {type(error).__name__}: {error} (its wheels: docs/benchmarks.md)"
    return ""


def needs(case: Case, device: torch.device) -> Needs:
    """Return what the system refuses of a case, as of version 4.0.0b36."""
    if case.dtype == "fp32":
        return Needs("its kernels take 16 bits")
    if case.mask is not None or case.bias is not None:
        return Needs("its kernels take neither a mask tensor nor a bias with a gradient")
    if any(dim % 8 or not 8 <= dim <= 256 for dim in (case.head_dim, case.value_dim)):
        return Needs(f"head dims are {case.head_dim} and {case.value_dim}; its kernels take multiples of 8 up to 256")
    arch = device_arch(device)
    if case.takes_gradients and (sm_number(arch) or 90) < 90:
        return Needs(backward_refusal=f"the GPU is {arch}; its backward kernels need sm_90 or later")
    return Needs()


def bind(inputs: Inputs, mode: Mode) -> Bound:
    """Its call, whose layout is ours, as is the alignment of causality at the last query and key.

    It returns (out, lse), and lse is None where it was not asked for and no gradient needs it.
    """
    attend = interface().flash_attn_func
    q, k, v, _, _, _, is_causal = inputs[:7]

    def call() -> tuple[Tensor, ...]:
        out, lse = attend(q, k, v, causal=is_causal, return_lse=mode.with_lse)
        return (out, lse) if mode.with_lse else (out,)

    return call


SYSTEMS = (System("fa4", bind, needs, missing, prepares=False, compiles=True),)
