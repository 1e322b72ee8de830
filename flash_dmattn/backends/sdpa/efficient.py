"""Both passes of torch's memory-efficient attention on NVIDIA GPUs, which adds a bias to the scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...gradients import differentiate_without_keys, has_pairs, run_without_keys
from ...problem import AttentionProblem, Gradients
from ...problem.inputs import Inputs, Saved
from ...reference.lists import repeat_heads
from ..protocol import Backward, Forward
from .cuda import rows

_FORWARD = torch.ops.aten._efficient_attention_forward.default
_BACKWARD = torch.ops.aten._efficient_attention_backward.default

_CAUSAL_AT_LAST_KEY = 2
# The kernel needs rows of a bias, and writes rows of lse, of a multiple of this number of values.
_BIAS_UNIT, _LSE_UNIT = 8, 32
# The kernel multiplies scores by log2(e): a bias below this becomes -inf, as in triton and flex (docs/backends.md).
_LOWEST = -torch.finfo(torch.float32).max * math.log(2)


def padded_keys(p: AttentionProblem) -> int:
    """Return the length of a row of the bias for the kernel."""
    return -(-p.seqlen_k // _BIAS_UNIT) * _BIAS_UNIT


def _mask_type(p: AttentionProblem) -> int:
    return _CAUSAL_AT_LAST_KEY if p.window[1] == 0 else 0


def _plan_added(p: AttentionProblem) -> Callable[[Tensor], Tensor]:
    """Return bias -> the tensor that the kernel adds, of the shape of the scores and with rows that it supports."""
    shape, width = (p.batch, p.num_heads, p.seqlen_q, p.seqlen_k), padded_keys(p)

    def added(bias: Tensor) -> Tensor:
        bias = repeat_heads(bias, p.num_heads)
        is_aligned = bias.stride(3) == 1 and all(stride % _BIAS_UNIT == 0 for stride in bias.stride()[:3])
        is_aligned = is_aligned and bias.data_ptr() % 16 == 0
        if bias.shape[3] != p.seqlen_k or not is_aligned:
            row = bias.new_zeros(*bias.shape[:3], width)
            row[..., : p.seqlen_k] = bias
            bias = row[..., : p.seqlen_k]
        return bias.expand(shape)

    return added


def plan_forward(p: AttentionProblem) -> Forward:
    """Plan the forward pass of a class of calls."""
    if not has_pairs(p):
        return run_without_keys(p)
    added, mask_type, scale = _plan_added(p), _mask_type(p), p.softmax_scale

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        bias = None if x.bias is None else added(x.bias)
        q, k, v = rows(x.q), rows(x.k), rows(x.v)
        # Without lse some versions of torch use a kernel that accesses wrong addresses.
        out, lse, *_ = _FORWARD(q, k, v, bias, None, None, None, None, 0.0, mask_type, True, scale=scale)
        lse = lse[..., : p.seqlen_q].contiguous()
        if x.bias is not None:
            # The kernel writes 0 for rows without a visible key.
            sees_key = ~(x.bias <= _LOWEST)  # NaN is seen
            if mask_type:
                shape = (*sees_key.shape[:2], p.seqlen_q, p.seqlen_k)
                sees_key = sees_key.expand(shape).tril(p.seqlen_k - p.seqlen_q)
            is_empty = ~sees_key.any(-1)
            lse = lse.masked_fill_(repeat_heads(is_empty, p.num_heads), -torch.inf)
        return out.contiguous(), lse

    return forward


def plan_backward(p: AttentionProblem) -> Backward:
    """Plan the backward pass of a class of calls."""
    if not has_pairs(p):
        return differentiate_without_keys(p)
    added, mask_type, scale, needs_grad = _plan_added(p), _mask_type(p), p.softmax_scale, p.needs_grad
    lengths = (p.seqlen_q, p.seqlen_k)

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        assert dlse is None, "a rule refuses calls that return lse"
        x, out, lse = saved
        bias = None if x.bias is None else added(x.bias)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # exp(-inf - 0) is the 0 that exp(-inf - -inf) is not
        lse = F.pad(lse, (0, -p.seqlen_q % _LSE_UNIT), value=torch.inf)
        unused = torch.empty((), dtype=torch.int64, device=out.device)  # the state of a generator, for dropout
        tensors = (rows(dout), rows(x.q), rows(x.k), rows(x.v), bias, out)
        tail = (lse, 0.0, unused, unused, mask_type, needs_grad.bias)
        dq, dk, dv, dbias = _BACKWARD(*tensors, None, None, *lengths, *tail, scale=scale)
        each = zip((dq, dk, dv), needs_grad[:3], strict=True)
        shared = _sum_to(dbias, x.bias) if needs_grad.bias and x.bias is not None else None
        return *(g.contiguous() if needed else None for g, needed in each), shared

    return backward


def _sum_to(dbias: Tensor, bias: Tensor) -> Tensor:
    """Sum the gradients of all scores with the same value of the bias, in fp32."""
    if dbias.shape[1] != bias.shape[1] > 1:
        dbias = dbias.unflatten(1, (bias.shape[1], -1)).sum(2, dtype=torch.float32)
    dims = [dim for dim in range(4) if bias.shape[dim] == 1 < dbias.shape[dim]]
    summed = dbias.sum(dims, keepdim=True, dtype=torch.float32) if dims else dbias
    return summed.to(bias.dtype).contiguous()
