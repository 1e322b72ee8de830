"""The operators of the extension, and copies of tensors whose rows TMA cannot read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import AttentionProblem, Shape4, fits_tma
from ...problem.inputs import Inputs

Attend = Callable[[Inputs, Tensor, Tensor], None]  # writes out and lse


class Kernels(NamedTuple):
    """The operators of the extension that a dense call launches."""

    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    gather_keys: Callable[..., list[Tensor]]
    gather_bias: Callable[..., Tensor]
    interval_bits: Callable[..., Tensor]


@cache
def kernels() -> Kernels:
    """Look up the operators once: torch.ops takes a microsecond for each. The probe has loaded the extension."""
    operators = torch.ops.flash_dmattn
    return Kernels(
        operators.cuda_forward_kernel.default,
        operators.cuda_backward_kernel.default,
        operators.cuda_gather_keys.default,
        operators.cuda_gather_bias.default,
        operators.cuda_interval_bits.default,
    )


def shapes_of(p: AttentionProblem) -> tuple[tuple[Shape4, Shape4], ...]:
    """Return shape and strides of q, k and v."""
    return (
        ((p.batch, p.seqlen_q, p.num_heads, p.head_dim), p.q_strides),
        ((p.batch, p.seqlen_k, p.num_heads_k, p.head_dim), p.k_strides),
        ((p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v), p.v_strides),
    )


def readable_rows(x: Tensor) -> Tensor:
    """Return a tensor (B, L, H, D) that TMA can read: x itself, or a contiguous copy."""
    is_readable = x.data_ptr() % 16 == 0 and fits_tma(x.shape, x.stride(), x.element_size())
    return x if is_readable else x.clone(memory_format=torch.contiguous_format)


def reader(
    shapes: Sequence[tuple[Sequence[int], Sequence[int]]], itemsize: int
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return a function that makes q, k and v of these shapes and strides readable for TMA, by copies if needed."""
    fits = all(fits_tma(shape, strides, itemsize) for shape, strides in shapes)

    def read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if fits and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0:
            return q, k, v
        return readable_rows(q), readable_rows(k), readable_rows(v)

    return read
