"""How the cuda backend sees a call on a Hopper GPU, said without one: its description, and the kernel it takes."""

from __future__ import annotations

import torch
from cases import Case
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends import cuda
from flash_dmattn.problem import AttentionProblem

ALL_UNITS = tuple((*dims, dtype) for dims in cuda.UNITS for dtype in (torch.float16, torch.bfloat16))
# A unit has a kernel for each of these with a mask and one without. A bias per query is "none": it moves lse alone.
BIAS_FORMS = ("none", "vector", "tile", "strided")


def described(case: Case, prepared: bool = False) -> AttentionProblem:
    """The forward pass of a case, contiguous and on sm_90."""
    q = (case.batch, case.seqlen_q, case.num_heads, case.head_dim)
    mask, bias = (None if letters is None else case.sizes(letters) for letters in (case.mask, case.bias))
    return flash_dmattn.explain_problem(
        q,
        kv_heads=case.num_heads_k,
        seqlen_k=case.seqlen_k,
        head_dim_v=case.head_dim_v or None,
        dtype=case.dtype,
        mask=mask,
        mask_prepared=prepared and mask is not None,
        bias=bias,
        bias_dtype=case.bias_dtype,
        return_lse=True,
        **case.flags(),
    ).problem


def unit_of(case: Case) -> tuple[int, int, torch.dtype]:
    """The head dims and the dtype of the unit that serves a case where all are built."""
    dims = case.head_dim, case.head_dim_v or case.head_dim
    d, d_v = next(unit for unit in cuda.UNITS if dims[0] <= unit[0] and dims[1] <= unit[1])
    return d, d_v, case.dtype


def bias_form(bias: Tensor | None, dtype: torch.dtype) -> str:
    """How the kernel reads a bias beside a q of that dtype, as `describe_bias` of csrc/api/forward.cpp decides it."""
    if bias is None or _is_broadcast(bias, 3):
        return "none"
    if _is_broadcast(bias, 2):
        return "vector"
    # The allocator's storages start on 512 bytes.
    aligned = bias.storage_offset() * bias.element_size() % 16 == 0
    rows = bias.stride(3) == 1 and all(_is_broadcast(bias, dim) or bias.stride(dim) % 8 == 0 for dim in range(3))
    return "tile" if bias.dtype == dtype and aligned and rows else "strided"


def _is_broadcast(x: Tensor, dim: int) -> bool:
    return x.shape[dim] == 1 or x.stride(dim) == 0
