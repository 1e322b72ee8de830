"""The precision of the matrix products of a call: `PRECISION` of a kernel. This module does not import Triton.

| precision | operands of a product | error |
| --- | --- | --- |
| "ieee" | fp32 outside the tensor cores; or fp16 and bf16 | the rounding error of the dtype |
| "tf32" | fp32, rounded to TF32 | 1e-3 |
| "bf16x3" | fp32, split into two parts in bfloat16, by three products | 1e-5 |
| "fp16x3" | fp32, split into two parts in float16, by three products, with a power of two for each row | as fp32 |

`pieces.py` splits the operands and multiplies them.
"""

from __future__ import annotations

import torch

from flash_dmattn.problem import AttentionProblem

# With at most this number of queries, a head fits in one tile of the smallest size. Reading k and v is the bound.
MOST_FEW_ROWS = 16
PIECES = ("bf16x3", "fp16x3")
# The largest head dim whose split tiles fit in registers, on GPUs that multiply 16-bit numbers at least 13 times as
# fast as fp32. Other GPUs gain little or nothing: the factor is 2 to 4.
MOST_HEAD_DIM = {"sm_80": 64, "sm_90": 128, "sm_100": 64}
# Where three products of bfloat16 take no longer than one of TF32, which is 100 times less accurate.
_HIGH = ("sm_90",)


def unsplit_precision(dtype: torch.dtype, arch: str, tf32: bool) -> str:
    """Return the precision of kernels that do not split fp32 operands, "tf32" or "ieee".

    Triton has no TF32 for gfx950, whose hardware lacks it.

    Args:
        dtype: of q, k and v.
        arch: of the GPU.
        tf32: whether torch allows TF32: `Flags.allows_tf32`.
    """
    return "tf32" if tf32 and dtype == torch.float32 and arch != "gfx950" else "ieee"


def select_precision(dtype: torch.dtype, arch: str, head_dim: int, few_rows: bool, tf32: bool) -> str:
    """Return the precision of the dense kernels of a call.

    Args:
        dtype, arch, tf32: as in `unsplit_precision`.
        head_dim: the larger of the head dims of q and v.
        few_rows: whether a head has so few queries that reading k and v bounds the time.
    """
    unsplit = unsplit_precision(dtype, arch, tf32)
    if dtype != torch.float32 or head_dim > MOST_HEAD_DIM.get(arch, 0) or few_rows:
        return unsplit
    if unsplit == "tf32":
        return "bf16x3" if arch in _HIGH else unsplit
    return "fp16x3"


def problem_precision(p: AttentionProblem) -> str:
    """Return the precision of a call that is described by a problem."""
    allowed = p.flags.allows_tf32
    if p.mask_form == "lists":
        return unsplit_precision(p.dtype, p.arch, allowed)
    few_rows = (
        p.sequences is None and p.seqlen_q <= MOST_FEW_ROWS and not p.flags.invariant
    )  # kernels of sequences have no such tile
    return select_precision(p.dtype, p.arch, max(p.head_dim, p.head_dim_v), few_rows, allowed)


def runs_on_pieces(precision: str) -> bool:
    """Return whether kernels of this precision split fp32 operands into two parts, for tensor cores."""
    return precision in PIECES
