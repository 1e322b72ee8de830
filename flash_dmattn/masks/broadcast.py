"""How masks of different broadcast shapes meet: the smallest common shape, and `combine`."""

from __future__ import annotations

from functools import reduce
from typing import Literal

import torch

from .arguments import bool_mask

DIMS = ("batch", "heads", "seqlen_q", "seqlen_k")


def collapse(tensor: torch.Tensor, dims: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
    """`tensor` with every dim that was expanded (stride 0) cut back to size 1."""
    for dim in dims:
        if tensor.size(dim) > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def align_heads(tensors: list[torch.Tensor], names: list[str]) -> list[torch.Tensor]:
    """Repeats key-value heads so that all head dims are 1 or the largest: head h reads h // G."""
    num_heads = max(t.size(1) for t in tensors)
    aligned = []
    for tensor, name in zip(tensors, names, strict=True):
        heads = tensor.size(1)
        if heads in (1, num_heads):
            aligned.append(tensor)
        elif heads and num_heads % heads == 0:
            aligned.append(tensor.repeat_interleave(num_heads // heads, dim=1))
        else:
            raise ValueError(
                f"{name} has {heads} heads (shape {tuple(tensor.shape)}) beside {num_heads} heads elsewhere; "
                f"it needs 1, {num_heads}, or a divisor of {num_heads}."
            )
    return aligned


def common_shape(tensors: list[torch.Tensor], names: list[str]) -> tuple[int, int, int, int]:
    """The smallest 4-D shape that all 4-D `tensors` broadcast to."""
    shape = [1, 1, 1, 1]
    owner = ["", "", "", ""]
    for tensor, name in zip(tensors, names, strict=True):
        for dim, size in enumerate(tensor.shape):
            if size == 1:
                continue
            if shape[dim] not in (1, size):
                raise ValueError(
                    f"{name} has {DIMS[dim]} = {size} (shape {tuple(tensor.shape)}) and {owner[dim]} has {shape[dim]}; "
                    f"each dim must be 1 or the same everywhere."
                )
            shape[dim], owner[dim] = size, name
    return shape[0], shape[1], shape[2], shape[3]


def combine(*masks: torch.Tensor | None, op: Literal["and", "or"] = "and") -> torch.Tensor | None:
    """One mask from several: attend where all of them do (`"and"`) or where any does (`"or"`).

    Equivalent to `masks[0] & masks[1] & ...` on 4-D tensors, except that expanded (stride 0) dims count as
    size 1, so that the result is as small as it can be, and that masks over key-value heads meet masks over
    query heads: with Hq = G * Hk, query head h takes key-value head h // G.

    Args:
        masks: bool tensors of 0 to 4 dims, each broadcastable to (B, H, Lq, Lk) from the right, or None, which
            means "attend everywhere": it changes nothing in `"and"` and decides `"or"`.
        op: `"and"` or `"or"`.

    Returns:
        A 4-D bool tensor, or None where nothing is masked (no mask at all, or None under `"or"`).

    Raises:
        TypeError: a mask is not a bool tensor.
        ValueError: shapes that do not broadcast, heads that do not divide, two devices, or an unknown `op`.

    Example:
        >>> import torch
        >>> from flash_dmattn.masks import causal_mask, combine, padding_mask
        >>> combine(causal_mask(4, 4), padding_mask([3, 4], 4)).shape
        torch.Size([2, 1, 4, 4])
        >>> combine(torch.tensor([True, False]), None).shape
        torch.Size([1, 1, 1, 2])
    """
    if op not in ("and", "or"):
        raise ValueError(f"op is {op!r} and must be 'and' or 'or'.")
    given = [(f"masks[{i}]", mask) for i, mask in enumerate(masks) if mask is not None]
    if not given or (op == "or" and len(given) < len(masks)):
        return None
    names = [name for name, _ in given]
    tensors = [collapse(bool_mask(name, mask)) for name, mask in given]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{name} is on {tensor.device} and {names[0]} on {tensors[0].device}; all masks must be on one device."
            )
    tensors = align_heads(tensors, names)
    common_shape(tensors, names)
    # Small masks first: the full-size product then happens once, at the end. A compiler, which fuses it, need not bind
    # sizes by comparing them.
    if not torch.compiler.is_compiling():
        tensors.sort(key=torch.numel)
    return reduce(torch.logical_and if op == "and" else torch.logical_or, tensors)
