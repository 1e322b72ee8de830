"""Torch's fused kernels behind `F.scaled_dot_product_attention`, called as operators under this contract.

On CPUs they are torch's flash kernel, on NVIDIA GPUs FlashAttention-2.
"""

from __future__ import annotations

import torch

from ...problem import AttentionProblem, allowed_pairs, dtype_name, sm_number
from ..protocol import Availability, Backend, Backward, Forward, Rule
from . import cpu, cuda

# Below this part of all pairs eager is faster: it visits no block of keys outside of the band, the kernel visits all.
_LEAST_PART = 0.25
# The most bytes of the mask that stands for a band; eager needs none.
_MOST_MASK_BYTES = 2**26
# A call of so few pairs takes eager's many small operations longer than the kernel.
_FEW_PAIRS = 2**18
_MOST_DIM = 256
_PAIR = 'backend=("sdpa", "eager") runs its forward pass and the backward pass of eager'
_BY_NAME = 'backend="sdpa" runs it all the same'


def _plan_forward(p: AttentionProblem) -> Forward:
    return (cpu if p.device == "cpu" else cuda).plan_forward(p)


def _plan_backward(p: AttentionProblem) -> Backward:
    return (cpu if p.device == "cpu" else cuda).plan_backward(p)


def _notes(p: AttentionProblem) -> tuple[str, ...]:
    """Name the mask that a call makes."""
    if p.device != "cpu" or not (cpu.needs_band(p) or p.mask is not None):
        return ()
    dtype = cpu.added_dtype(p)
    values = p.seqlen_q * p.seqlen_k if cpu.needs_band(p) or p.mask is None else p.mask.span()
    return (f"adds the mask to the scores, as {values * dtype.itemsize / 2**20:.1f} MB of {dtype_name(dtype)}",)


BACKEND = Backend(
    name="sdpa",
    plan_forward=_plan_forward,
    plan_backward=_plan_backward,
    features=frozenset({"mask", "bias", "is_causal", "window_size", "deterministic", "return_lse"}),
    rules=(
        Rule(
            "device",
            lambda p: p.device == "cpu" or (p.device == "cuda" and (sm_number(p.arch) or 0) >= 80),
            lambda p: f"device is {p.device} {p.arch}; it runs on CPUs and on NVIDIA GPUs from sm_80 on",
            'use backend="auto"',
        ),
        Rule(
            "gpu_scores",
            lambda p: p.device == "cpu" or (p.mask is None and p.bias is None),
            lambda p: "a mask or a bias is set; FlashAttention-2 has none",
            'use backend="triton"',
        ),
        Rule(
            "gpu_dtype",
            lambda p: p.device == "cpu" or p.dtype in (torch.float16, torch.bfloat16),
            lambda p: f"dtype is {dtype_name(p.dtype)}; FlashAttention-2 takes float16 and bfloat16",
            'use backend="triton"',
        ),
        Rule(
            "gpu_head_dim",
            lambda p: p.device == "cpu" or (p.head_dim % 8 == 0 and p.head_dim <= _MOST_DIM),
            lambda p: f"head dim is {p.head_dim}; FlashAttention-2 takes multiples of 8 up to {_MOST_DIM}",
            'use backend="triton"',
        ),
        Rule(
            "gpu_scale",
            lambda p: p.device == "cpu" or p.softmax_scale > 0,
            lambda p: f"softmax_scale is {p.softmax_scale}; FlashAttention-2 returns NaN for one that is not above 0",
            'use backend="triton"',
        ),
        Rule(
            "gpu_lse",
            lambda p: p.device == "cpu" or not p.return_lse,
            lambda p: "lse is returned, and FlashAttention-2 takes no gradient of it",
            'backend=("sdpa", "triton") runs its forward pass and the backward pass of triton',
            passes=("backward",),
        ),
        Rule(
            "gpu_order",
            lambda p: p.device == "cpu" or not p.deterministic,
            lambda p: "deterministic is True; FlashAttention-2 adds to dq in any order",
            'backend=("sdpa", "triton") runs its forward pass and the backward pass of triton',
            passes=("backward",),
        ),
        Rule(
            "sequences",
            lambda p: p.sequences is None,
            lambda p: "sequences are set; the kernel has none",
            'use backend="eager"',
        ),
        Rule(
            "head_dim",
            lambda p: p.head_dim == p.head_dim_v,
            lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); the kernel takes equal ones",
            'use backend="eager"',
        ),
        Rule(
            "dbias",
            lambda p: not p.needs_grad.bias,
            lambda p: "the gradient of bias is needed; the kernel has none",
            _PAIR,
            passes=("backward",),
        ),
        Rule(
            "half_precision",
            lambda p: p.device != "cpu" or p.dtype in (torch.float32, torch.float64),
            lambda p: f"dtype is {dtype_name(p.dtype)}; the backward kernel takes delta from an out rounded to it",
            _PAIR,
            passes=("backward",),
        ),
    ),
    auto_rules=(
        Rule(
            "unpacked_mask",
            lambda p: p.mask_form in ("none", "dense"),
            lambda p: f"the mask has the form {p.mask_form!r}, and would be unpacked",
            _BY_NAME,
            passes=("forward",),
        ),
        Rule(
            "narrow_band",
            lambda p: allowed_pairs(p.seqlen_q, p.seqlen_k, p.window) >= _LEAST_PART * p.seqlen_q * p.seqlen_k,
            lambda p: "the band leaves less than a quarter of all pairs, and the kernel visits all",
            _BY_NAME,
            passes=("forward",),
        ),
        Rule(
            "band_mask",
            lambda p: not cpu.needs_band(p) or p.seqlen_q * p.seqlen_k * p.dtype.itemsize <= _MOST_MASK_BYTES,
            lambda p: f"the band is added as a mask of {p.seqlen_q} x {p.seqlen_k} values of {dtype_name(p.dtype)}",
            _BY_NAME,
            passes=("forward",),
        ),
        Rule(
            "causal_backward",
            lambda p: p.window == (-1, -1) or p.batch * p.num_heads * p.seqlen_q * p.seqlen_k <= _FEW_PAIRS,
            lambda p: "the backward kernel visits every pair, also those outside of the band",
            _BY_NAME,
            passes=("backward",),
        ),
    ),
    probe=lambda: Availability(True),
    notes=_notes,
)
