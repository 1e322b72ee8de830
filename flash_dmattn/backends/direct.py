"""Passes of a class of calls that is described, where nothing watches: what they are, and what makers of them share.

A backend that has `direct_forward` and `direct_backward` decides once what all calls of a class have in common: see
`backends.protocol.Backend`. `flash_dmattn.direct` runs what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..problem import AttentionProblem, Gradients

# run(q, k, v, bias, sink, mask, dropout) -> (out, lse), with the tensors of the mask view, and the key of dropout.
DirectForward = Callable[..., tuple[Tensor, Tensor]]
# run(dout, dlse, q, k, v, bias, sink, out, lse, mask, dropout) -> gradients. All but dout and dlse have the strides of
# the class, out and lse are contiguous.
DirectBackward = Callable[..., Gradients]
Allocate = Callable[[Tensor], Tensor]
Outputs = Callable[[Tensor], tuple[Tensor, Tensor]]


def has_pairs(p: AttentionProblem) -> bool:
    """Whether a class of calls without sequences has a pair of a query and a key, so that kernels run."""
    return bool(p.batch and p.seqlen_q and p.num_heads and p.seqlen_k)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those that torch gives a new tensor; one that is contiguous may have others where its size is 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def new_like(shape: Sequence[int], strides: Sequence[int]) -> Allocate:
    """What makes an uninitialised tensor, contiguous, of the shape and dtype of one of these strides.

    torch takes half as long to copy what a tensor is as to read it from arguments.
    """
    if tuple(strides) == contiguous_strides(shape):
        return torch.empty_like
    sizes, empty = tuple(shape), torch.empty
    return lambda x: empty(sizes, dtype=x.dtype, device=x.device)


def outputs_of(p: AttentionProblem) -> Outputs:
    """What makes uninitialised (out, lse) beside q, as `operators.empty_outputs` does; of 32 bits at most."""
    sizes, rows = (p.batch, p.seqlen_q, p.num_heads, p.head_dim_v), (p.batch, p.num_heads, p.seqlen_q)
    empty, float32 = torch.empty, torch.float32
    if p.head_dim == p.head_dim_v and tuple(p.q_strides) == contiguous_strides(sizes):
        empty_like = torch.empty_like
        return lambda q: (empty_like(q), empty(*rows, dtype=float32, device=q.device))
    dtype = p.dtype
    return lambda q: (empty(*sizes, dtype=dtype, device=q.device), empty(*rows, dtype=float32, device=q.device))
