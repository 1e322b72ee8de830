"""Awkward memory layouts of the same values: NaN margins, transposes, expanded and absurd strides, odd offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from cases import Inputs
from torch import Tensor


def nan_margins(x: Tensor) -> Tensor:
    """The same values inside a larger buffer, NaN (True for a mask) on every side and between the rows."""
    poison = True if x.dtype == torch.bool else torch.nan
    frame = torch.full([size + 2 for size in x.shape], poison, dtype=x.dtype, device=x.device)
    inner = frame[tuple(slice(1, 1 + size) for size in x.shape)]
    return inner.copy_(x)


def transposed(x: Tensor) -> Tensor:
    """The same values with the dimensions stored in reverse order."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def heads_first(x: Tensor) -> Tensor:
    """The same values stored as (B, H, L, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x


def offset_by_one(x: Tensor) -> Tensor:
    """The same values one element into their storage, so that no row is aligned."""
    buffer = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


def absurd_strides(x: Tensor) -> Tensor:
    """The same values, with a huge odd stride on every dimension of size 1: no address is ever computed from it."""
    strides = [987654321 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides, x.storage_offset()) if x.numel() else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan_margins": nan_margins,
    "transposed": transposed,
    "heads_first": heads_first,
    "offset_by_one": offset_by_one,
    "absurd_strides": absurd_strides,
}


def rearranged(inputs: Inputs, layout: Callable[[Tensor], Tensor]) -> Inputs:
    """All tensors of a call in another layout."""
    changed = {f.name: x if x is None else layout(x) for f in fields(inputs) for x in [getattr(inputs, f.name)]}
    return replace(inputs, **changed)
