"""Attention for tensors with heads before tokens, the layout of most other code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import reduce

import torch
from torch import Tensor

from .. import attention
from ..masks.split import Empty, Rest, separate
from ..reference.positions import AUTOCAST_DEVICES

__all__ = ["attend"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Iterable[Tensor] = (),
    *,
    masks: Iterable[Tensor] = (),
    scale: float | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    below: float = -1e3,
    empty: Empty = "softmax",
    rest: Rest = "auto",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute attention of tensors with heads before tokens, (..., H, L, D), with any number of masks and biases.

    Other projects often pass float masks and biases as one list. Here biases are added to one another, but masks are
    not added to them, which would make a tensor of the size of all scores. Inputs are not copied, and the result is a
    transposed view.

    Equivalent to `F.scaled_dot_product_attention(query, key, value, sum(biases) + sum(masks))`, except for rows without
    a visible key, see `empty`.

    Args:
        query: (*batch, H, Lq, D); without batch dims (H, Lq, D).
        key, value: (*batch, Hk, Lk, D) and (*batch, Hk, Lk, Dv), where H is a multiple of Hk. The batch dims of all
            three broadcast.
        biases: float tensors that broadcast to (*batch, H, Lq, Lk), added to the scores.
        masks: tensors of such shapes, bool, True = attend, or float. Each float tensor without a gradient is split by
            `flash_dmattn.masks.split_additive`; one with a gradient is a bias.
        scale: of the scores; None means D ** -0.5.
        is_causal: key j is visible to query i if j <= i + Lk - Lq.
        dropout_p: as in `flash_dmattn.attention`.
        below, empty, rest: as in `split_additive`, for float masks.
        dtype: the dtype to compute in: all tensors are cast to it, and autocast is off inside. By default tensors keep
            their dtypes, and autocast casts query, key, value and biases.

    Returns:
        (*batch, H, Lq, Dv), with `dtype` cast back to the dtype of `query`.

    Raises:
        TypeError: an argument has the wrong type, as in `flash_dmattn.attention` and `split_additive`.
        ValueError: shapes do not broadcast, or `below`, `empty` or `rest` has a wrong value.

    >>> import torch
    >>> from flash_dmattn.integrations import attend
    >>> q = torch.randn(2, 4, 6, 16)
    >>> pairs, padding = torch.randn(1, 4, 6, 6), torch.tensor([0.0, 0.0, 0.0, 0.0, -1e9, -1e9])
    >>> out = attend(q, q, q, [pairs], masks=[padding])
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, pairs + padding), atol=1e-6)
    True
    """
    parts: list[tuple[Tensor | None, Tensor | None]] = []  # for each mask: (bool mask, bias)
    for x in map(torch.atleast_2d, (masks,) if isinstance(masks, Tensor) else masks):
        if not x.is_floating_point():
            parts.append((x, None))
        elif x.requires_grad and torch.is_grad_enabled():
            parts.append((None, x))
        else:
            parts.append(separate(x, below, empty=empty, rest=rest))
    summands = [left for _, left in parts if left is not None]
    summands += [biases] if isinstance(biases, Tensor) else biases
    visible = _joined(torch.bitwise_and, [mask for mask, _ in parts if mask is not None])
    added = _joined(torch.add, summands)
    if added is not None:
        added = torch.atleast_2d(added.to(autocast_dtype(added) if dtype is None else dtype))
    out_dtype = query.dtype
    if dtype is not None:
        query, key, value = (x.to(dtype) for x in (query, key, value))
    batch = batch_dims(query, key, value) or (1,)  # (heads, L, D) has no batch dims
    q, k, v = (x.expand(*batch, *x.shape[-3:]).transpose(-3, -2) for x in (query, key, value))
    with nullcontext() if dtype is None else torch.autocast(query.device.type, enabled=False):
        out = attention(
            q,
            k,
            v,
            visible,
            added,
            is_causal=is_causal,
            softmax_scale=scale,
            dropout_p=dropout_p,
        )
    assert isinstance(out, Tensor)
    out = out.transpose(-3, -2)
    if query.dim() == 3 and len(batch) == 1:
        out = out.squeeze(0)
    return out if dtype is None else out.to(out_dtype)


def _joined(join: Callable[[Tensor, Tensor], Tensor], tensors: list[Tensor]) -> Tensor | None:
    return reduce(join, tensors) if tensors else None


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which autocast casts a tensor. `attention` casts only q, k and v; torch also casts masks."""
    kind = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64 or kind not in AUTOCAST_DEVICES:
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def batch_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the batch dims of the result, to which torch broadcasts q, k and v."""
    if q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return tuple(q.shape[:-3])
    return tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
