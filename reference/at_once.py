"""The forward pass of a small call on a CPU: all scores at once, by the few operations that this takes.

The passes of `eager.py` prepare blocks of queries and keys, which takes longer than the products of a small call.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor

from . import formula
from .blocks import grouped_own
from .chunks import CPU_CHUNK_BYTES, FEW_SCORES
from .masks import AnyMask

# Buffers of the size of the scores: the scores, the probabilities, and what is added to them.
_BUFFERS = 3
# Without a mask no key can be left out, and longer calls gain nothing from this path.
_MOST_SCORES = 2**18
# The share of the keys that a mask has to keep to be read whole.
_LEAST_SHARE = 0.5


def fits_at_once(
    mask: AnyMask | None, bias: Tensor | None, q: Tensor, k: Tensor, chunk_bytes: int
) -> TypeGuard[Tensor | None]:
    """Return whether a call is small enough, and mask and bias are tensors that the whole batch or no entries share."""
    if q.device.type != "cpu" or not (mask is None or isinstance(mask, Tensor)):
        return False
    if any(x is not None and x.shape[0] not in (1, q.shape[0]) for x in (mask, bias)):
        return False
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    if not 0 < scores <= _MOST_SCORES or _BUFFERS * 8 * scores > min(chunk_bytes, CPU_CHUNK_BYTES):
        return False
    return mask is None or scores <= FEW_SCORES or (mask.shape[2] == 1 and _keeps_most(mask))


def _keeps_most(mask: Tensor) -> bool:
    """Return whether a mask of keys keeps so many that leaving out the others does not pay."""
    return int(mask.sum()) > _LEAST_SHARE * mask.numel()


def attend_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    window: tuple[int, int],
    softmax_scale: float,
) -> tuple[Tensor, Tensor] | None:
    """Return out and lse; None if a score is NaN or inf beside a mask, which the chunked pass is right for.

    Args:
        q, k, v, mask, bias, softmax_scale: as for `eager.forward`.
        window: as for `eager.forward`, with causality as a right side of 0.
    """
    batch, seqlen_q, num_heads, dim = q.shape
    seqlen_k, num_heads_k = k.shape[1:3]
    pairs, rows = batch * num_heads_k, num_heads // num_heads_k * seqlen_q
    dtype = formula.softmax_dtype(q)
    by_group = (batch, num_heads_k, num_heads // num_heads_k, seqlen_q)
    q_rows, k_keys, v_keys = q * softmax_scale, k.transpose(1, 2), v.transpose(1, 2)
    if q.dtype != dtype:
        q_rows, k_keys, v_keys = q.to(dtype) * softmax_scale, k_keys.to(dtype), v_keys.to(dtype)
    if seqlen_q > 1:
        q_rows = q_rows.view(batch, seqlen_q, *by_group[1:3], dim).permute(0, 2, 3, 1, 4)
    q_rows = q_rows.reshape(pairs, rows, dim)
    s = torch.bmm(q_rows, k_keys.flatten(0, 1).mT)
    added = _added(mask, bias, window, (seqlen_q, seqlen_k), (num_heads_k, num_heads), dtype)
    if added is not None:
        s.view(*by_group, seqlen_k).add_(added)
    row_max = s.amax(-1, keepdim=True)
    bound = 0.0 if added is None else float(row_max.sum())
    if math.isnan(bound) or bound == math.inf:
        return None
    p = s.softmax(-1)
    # The largest probability of a row is one over its sum.
    share = p.amax(-1, keepdim=True).log_()
    if bound == -math.inf:
        is_empty = row_max == -math.inf
        p.masked_fill_(is_empty, 0.0)
        share.masked_fill_(is_empty, 0.0)
    lse = row_max.sub_(share).view(batch, num_heads, seqlen_q)
    out = torch.bmm(p, v_keys.flatten(0, 1))
    if seqlen_q > 1:
        out = out.view(*by_group, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, seqlen_q, num_heads, v.shape[3]).to(q.dtype), lse


def _added(
    mask: Tensor | None,
    bias: Tensor | None,
    window: tuple[int, int],
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """Return what is added to the scores, broadcast to (B, Hk, G, Lq, Lk): bias, and -inf where a score is hidden."""
    added = None if bias is None else grouped_own(bias, *heads).to(dtype)
    if mask is not None:
        # Where 1 stands for True, log(1) is 0, and log(0) -inf.
        hidden = grouped_own(mask, *heads).to(dtype).log_()
        added = hidden if added is None else added + hidden
    shift = lengths[1] - lengths[0]
    if 0 <= window[1] < lengths[0] - 1:
        hidden = torch.full(lengths, -math.inf, dtype=dtype).triu_(shift + window[1] + 1)
        added = hidden if added is None else added + hidden
    if 0 <= window[0] < lengths[1] - 1:
        hidden = torch.full(lengths, -math.inf, dtype=dtype).tril_(shift - window[0] - 1)
        added = hidden if added is None else added + hidden
    return added
