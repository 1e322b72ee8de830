"""Triangle attention of cuEquivariance, the package cuequivariance-torch: a bias that batch entries share.

Its tensors are (B, N, H, L, D): the batch of a case is N, the rows of one matrix of pairs. The bias is one for all of
them and has to be there; a mask has one row of keys for each entry.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from ..cases import Case
from ..inputs import Inputs
from .protocol import Bound, Mode, Needs, System

MODULE = "cuequivariance_torch"
KERNELS = "cuequivariance_ops_torch"  # imported by the first call, which does not say what it lacks


def module() -> ModuleType:
    return importlib.import_module(MODULE)


def missing(device: torch.device) -> str:
    if device.type != "cuda":
        return "its kernels run on GPUs"
    for name in (MODULE, KERNELS):
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation raises whatever it likes, and the report has to say what
            return f"{name} cannot be imported: {type(error).__name__}: {error} (its wheels: docs/benchmarks.md)"
    return ""


def needs(case: Case, device: torch.device) -> Needs:
    """Return what the system refuses of a case, by its documentation."""
    if case.is_causal or case.heads != case.heads_k:
        return Needs("it takes neither causality nor grouped heads")
    if case.bias != "hij":
        return Needs("it takes calls with a bias (1,Hq,L,L)")
    if case.mask is not None and case.mask.dims != "bj":
        return Needs("it takes masks (B,1,1,L)")
    return Needs(lse_refusal="it returns lse for special use only")


def bind(inputs: Inputs, mode: Mode) -> Bound:
    """Its call; it converts the bias to fp32, and returns its gradient in the dtype of the bias."""
    attend = module().triangle_attention
    q, k, v, _, mask, bias, _ = inputs[:7]
    assert bias is not None

    def call() -> tuple[Tensor]:
        heads_first = (x.transpose(1, 2).unsqueeze(0) for x in (q, k, v))
        key_mask = None if mask is None else mask.expand(q.shape[0], 1, 1, -1).unsqueeze(0)
        out: Tensor = attend(*heads_first, bias.unsqueeze(0), mask=key_mask)
        return (out.squeeze(0).transpose(1, 2),)

    return call


SYSTEMS = (System("cuequivariance", bind, needs, missing, prepares=False),)
