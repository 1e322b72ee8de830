"""Passes of a class of calls that is described, where nothing watches: what they are, and what makers of them share.

A backend that has `direct_forward` and `direct_backward` decides once what all calls of a class have in common: see
`backends.protocol.Backend`. `flash_dmattn.direct` runs what they return.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..gradients import contiguous_strides
from ..problem import AttentionProblem, Gradients

# run(q, k, v, bias, sink, mask, dropout) -> (out, lse), with the tensors of the mask view, and the key of dropout.
DirectForward = Callable[..., tuple[Tensor, Tensor]]
# run(dout, dlse, q, k, v, bias, sink, out, lse, mask, dropout) -> gradients. All but dout and dlse have the strides of
# the class, out and lse are contiguous. Where heads come first, that is q, k, v and their gradients; dlse is None.
DirectBackward = Callable[..., Gradients]
Outputs = Callable[[Tensor], tuple[Tensor, Tensor]]


def has_pairs(p: AttentionProblem) -> bool:
    """Whether a class of calls without sequences has a pair of a query and a key, so that kernels run."""
    return bool(p.batch and p.seqlen_q and p.num_heads and p.seqlen_k)


def outputs_of(p: AttentionProblem, heads_first: bool = False) -> Outputs:
    """What makes uninitialised (out, lse) beside q, as `operators.empty_outputs` does; of 32 bits at most.

    Args:
        p: of the class.
        heads_first: whether q arrives as (B, H, L, D); out is (B, L, H, Dv) all the same.
    """
    sizes, rows = (p.batch, p.seqlen_q, p.num_heads, p.head_dim_v), (p.batch, p.num_heads, p.seqlen_q)
    empty, float32 = torch.empty, torch.float32
    if not heads_first and p.head_dim == p.head_dim_v and tuple(p.q_strides) == contiguous_strides(sizes):
        empty_like = torch.empty_like
        return lambda q: (empty_like(q), empty(*rows, dtype=float32, device=q.device))
    dtype = p.dtype
    return lambda q: (empty(*sizes, dtype=dtype, device=q.device), empty(*rows, dtype=float32, device=q.device))
