"""The word of a call, which says how its kernels multiply: `PRECISION` of a kernel. This does not import Triton.

| word | what a kernel multiplies | error |
| --- | --- | --- |
| "ieee" | numbers of fp32, outside the tensor cores; or numbers of 16 bits | that of the dtype |
| "tf32" | numbers of fp32, rounded to TF32 | 1e-3 |
| "bf16x3" | two pieces of each number, in bfloat16, by three products | 1e-5 |
| "fp16x3" | two pieces in float16, by three products, with a power of two for each row | that of fp32 |

`pieces.py` makes the pieces and the products.
"""

from __future__ import annotations

import torch

from flash_dmattn.problem import AttentionProblem

# So many queries of a head fit in one tile of the least size, and reading k and v is the bound: decoding.
MOST_FEW_ROWS = 16
PIECES = ("bf16x3", "fp16x3")
# GPUs whose tensor cores multiply numbers of 16 bits 13 times or more as fast as their other cores multiply fp32, and
# the largest head dim whose tiles of pieces fit in their registers. On others, where it is 2 to 4 times, pieces gain
# little or nothing.
MOST_HEAD_DIM = {"sm_80": 64, "sm_90": 128, "sm_100": 64}
# Where three products of bfloat16 take no longer than one of TF32, which is 100 times less accurate.
_HIGH = ("sm_90",)


def whole_precision(dtype: torch.dtype, arch: str, tf32: bool) -> str:
    """Return the word of kernels that make no pieces, "tf32" or "ieee".

    Triton has no TF32 for gfx950, whose hardware lacks it.

    Args:
        dtype: of q, k and v.
        arch: of the GPU.
        tf32: whether torch allows TF32: `Flags.allows_tf32`.
    """
    return "tf32" if tf32 and dtype == torch.float32 and arch != "gfx950" else "ieee"


def precision_of(dtype: torch.dtype, arch: str, head_dim: int, few_rows: bool, tf32: bool) -> str:
    """Return the word of the dense kernels of a call.

    Args:
        dtype, arch, tf32: as of `whole_precision`.
        head_dim: the larger of the head dims of q and v.
        few_rows: whether a head has so few queries that reading k and v bounds the time.
    """
    whole = whole_precision(dtype, arch, tf32)
    if dtype != torch.float32 or head_dim > MOST_HEAD_DIM.get(arch, 0) or few_rows:
        return whole
    if whole == "tf32":
        return "bf16x3" if arch in _HIGH else whole
    return "fp16x3"


def word_of(p: AttentionProblem) -> str:
    """Return the word of a described call."""
    allowed = p.flags.allows_tf32
    if p.mask_form == "lists":
        return whole_precision(p.dtype, p.arch, allowed)
    few_rows = p.sequences is None and p.seqlen_q <= MOST_FEW_ROWS  # kernels of sequences have no tile of few rows
    return precision_of(p.dtype, p.arch, max(p.head_dim, p.head_dim_v), few_rows, allowed)


def runs_on_pieces(word: str) -> bool:
    """Return whether kernels with this word multiply pieces of the numbers of fp32, on tensor cores."""
    return word in PIECES
