"""Both passes of torch's FlashAttention-2 on GPUs: no mask, no bias; sequences where they are packed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...gradients import differentiate_without_keys, empty_outputs, fill_empty, has_pairs, run_without_keys
from ...problem import AttentionProblem, Gradients, make_band
from ...problem.inputs import Inputs, Saved
from ..protocol import Backward, Forward

_FORWARD = torch.ops.aten._flash_attention_forward.default
_BACKWARD = torch.ops.aten._flash_attention_backward.default


def visible_band(p: AttentionProblem) -> tuple[int, int]:
    """Return the window of a call, with -1 for a side that hides no pair."""
    left, right = p.window
    return (-1 if left >= p.seqlen_k - 1 else left), (-1 if right >= p.seqlen_q - 1 else right)


def is_right_for(p: AttentionProblem) -> bool:
    """Return whether the kernel is right for the window: it treats an unlimited side as one of Lk keys.

    Any sequence of a packed call may have more queries than keys.
    """
    left, right = visible_band(p)
    return (left < 0 and right <= 0) or (p.sequences is None and p.seqlen_q <= p.seqlen_k)


def _band(p: AttentionProblem) -> tuple[bool, dict[str, int | float]]:
    """Return whether the kernel is causal, and the window that it has; both are aligned at the last key."""
    left, right = visible_band(p)
    numbers: dict[str, int | float] = {"scale": p.softmax_scale}
    if left < 0 and right <= 0:
        return right == 0, numbers
    return False, {**numbers, "window_size_left": left, "window_size_right": right}


def _has_empty_rows(p: AttentionProblem) -> bool:
    band = make_band(p.seqlen_q, p.seqlen_k, p.window)
    return band is not None and (band.high < 0 or p.seqlen_q - 1 + band.low >= p.seqlen_k)


def plan_forward(p: AttentionProblem) -> Forward:
    """Plan the forward pass of a class of calls."""
    if p.sequences is not None:
        return _plan_packed_forward(p)
    if not has_pairs(p):
        return run_without_keys(p)
    (is_causal, numbers), has_empty_rows = _band(p), _has_empty_rows(p)
    lengths = (p.seqlen_q, p.seqlen_k)

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v = rows(x.q), rows(x.k), rows(x.v)
        out, lse, *_ = _FORWARD(q, k, v, None, None, *lengths, 0.0, is_causal, False, **numbers)
        if has_empty_rows:  # FlashAttention-2 writes +inf to them, FlashAttention-4 -inf
            lse = lse.masked_fill_(lse.isinf(), -torch.inf)
        return out, lse

    return forward


def _plan_packed_forward(p: AttentionProblem) -> Forward:
    if not _has_packed_pairs(p):
        return lambda x: fill_empty(*empty_outputs(x.q, x.v), None)
    # With one query per sequence, and groups of query heads, the kernel assumes that row i is sequence i.
    (is_causal, numbers), longest = _band(p), (max(p.seqlen_q, 2), p.seqlen_k)

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        edges_q, edges_k = _edges(x)
        q, k, v = (rows(t)[0] for t in (x.q, x.k, x.v))
        out, lse, *_ = _FORWARD(q, k, v, edges_q, edges_k, *longest, 0.0, is_causal, False, **numbers)
        is_unused = _is_unused(edges_q, len(q))
        out, lse = (
            out.masked_fill_(is_unused[:, None, None], 0.0),
            lse.masked_fill_(lse.isinf() | is_unused, -torch.inf),
        )
        return out.unsqueeze_(0), lse.unsqueeze_(0)  # in place, as in `mask_choice.forward_of`

    return forward


def _has_packed_pairs(p: AttentionProblem) -> bool:
    """Return whether a class of packed calls may have a pair of a query and a key."""
    assert p.sequences is not None
    return has_pairs(p) and p.sequences.rows_k > 0 and p.seqlen_q > 0 and p.seqlen_k > 0


def _edges(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return the first row, and the row after the last, of queries and of keys of each sequence, int32 (2 S,).

    The kernel takes them for 2 S - 1 sequences. Sequences with odd numbers are gaps between two sequences, mostly of
    length 0; their results are unused.
    """
    assert x.sequences is not None
    first_q, number_q, first_k, number_k = x.sequences.bounds.unbind(1)
    edges = (torch.stack((first, first + number), 1) for first, number in ((first_q, number_q), (first_k, number_k)))
    edges_q, edges_k = (each.flatten() for each in edges)
    return edges_q, edges_k


def _is_unused(edges: Tensor, number: int) -> Tensor:
    """Return a mask of packed rows that belong to no sequence; the kernel leaves some of them unwritten."""
    row = torch.arange(number, dtype=torch.int32, device=edges.device)
    return torch.searchsorted(edges, row, right=True) % 2 == 0


def plan_backward(p: AttentionProblem) -> Backward:
    """Plan the backward pass of a class of calls."""
    if p.sequences is not None:
        return _plan_packed_backward(p)
    if not has_pairs(p):
        return differentiate_without_keys(p)
    is_causal, numbers = _band(p)
    lengths, needs_grad = (p.seqlen_q, p.seqlen_k), p.needs_grad

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        assert dlse is None, "a rule refuses calls that return lse"
        x, out, lse = saved
        q, k, v = rows(x.q), rows(x.k), rows(x.v)
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of a generator, for dropout
        tensors = (rows(dout), q, k, v, out.contiguous(), lse.contiguous())
        gradients = _BACKWARD(*tensors, None, None, *lengths, 0.0, is_causal, unused, unused, **numbers)
        each = zip(gradients, needs_grad[:3], strict=True)
        return *(g.contiguous() if needed else None for g, needed in each), None

    return backward


def _plan_packed_backward(p: AttentionProblem) -> Backward:
    if not _has_packed_pairs(p):
        return differentiate_without_keys(p)
    (is_causal, numbers), longest, needs_grad = _band(p), (p.seqlen_q, p.seqlen_k), p.needs_grad

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        assert dlse is None, "a rule refuses calls that return lse"
        x, out, lse = saved
        edges_q, edges_k = _edges(x)
        unused = torch.empty(0, dtype=torch.int64, device=out.device)  # the state of a generator, for dropout
        tensors = [t[0] for t in (rows(dout), rows(x.q), rows(x.k), rows(x.v), out.contiguous(), lse.contiguous())]
        gradients = _BACKWARD(*tensors, edges_q, edges_k, *longest, 0.0, is_causal, unused, unused, **numbers)
        for gradient, edges in zip(gradients, (edges_q, edges_k, edges_k), strict=True):
            gradient.masked_fill_(_is_unused(edges, len(gradient))[:, None, None], 0.0)
        each = zip(gradients, needs_grad[:3], strict=True)
        return *(g[None].contiguous() if needed else None for g, needed in each), None

    return backward


def rows(x: Tensor) -> Tensor:
    """Copy x if kernels do not support it: rows without unit stride or alignment to 16 bytes, or expanded rows."""
    unit = 16 // x.element_size()
    others = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    is_read = x.stride(3) == 1 and all(stride > 0 and stride % unit == 0 for stride in others)
    if is_read and x.data_ptr() % 16 == 0 and max(x.stride()) < 2**31:
        return x
    return x.clone(memory_format=torch.contiguous_format)
