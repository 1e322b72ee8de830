"""Masks from positions, lengths, document ids and scores: causal, window, documents, padding; and `combine`."""

from __future__ import annotations

from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from ..problem import bounded, check_device, collapse, values_can_be_read
from .arguments import (
    INTEGER_DTYPES,
    IntsLike,
    align_heads,
    as_tensor,
    bool_mask,
    common_shape,
    float_scores,
    integer,
    integer_tensor,
    lengths_within,
    pair,
)

Device = torch.device | str | None


def _positions(seqlen_q: int, seqlen_k: int, device: Device) -> tuple[Tensor, Tensor]:
    """Return the index of the key that each query is aligned with, (Lq, 1), and of each key, (Lk,)."""
    integer("seqlen_q", seqlen_q)
    integer("seqlen_k", seqlen_k)
    rows = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=device)
    return rows[:, None], torch.arange(seqlen_k, device=device)


def causal_mask(seqlen_q: int, seqlen_k: int, device: Device = None) -> Tensor:
    """Let each query see the keys up to its position, the last query all of them (bottom-right aligned).

    Equivalent to `torch.ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q).bool()`. `attention(..., is_causal=True)`
    does the same without memory; this tensor is for `combine`, and to look at.

    Args:
        seqlen_q, seqlen_k: number of queries and keys. With more queries than keys the first rows are empty.
        device: where to put the mask.

    Returns:
        Bool tensor (1, 1, seqlen_q, seqlen_k).

    Raises:
        TypeError, ValueError: a length is not an int >= 0.

    Example:
        >>> causal_mask(2, 3).int()
        tensor([[[[1, 1, 0],
                  [1, 1, 1]]]], dtype=torch.int32)
    """
    return sliding_window_mask(seqlen_q, seqlen_k, (-1, 0), device)


def sliding_window_mask(seqlen_q: int, seqlen_k: int, window_size: tuple[int, int], device: Device = None) -> Tensor:
    """Let each query see the key at its position, `left` keys before it and `right` keys after it.

    Query i is at position p = i + seqlen_k - seqlen_q; key j is visible if p - left <= j <= p + right. `(-1, 0)` is
    the causal mask. `attention(..., window_size=(left, right))` does the same without memory.

    Args:
        seqlen_q, seqlen_k: number of queries and keys.
        window_size: `(left, right)`, in keys; -1 is unlimited on that side.
        device: where to put the mask.

    Returns:
        Bool tensor (1, 1, seqlen_q, seqlen_k).

    Raises:
        TypeError, ValueError: a length is not an int >= 0, or `window_size` is not a pair of ints >= -1.

    Source: Beltagy et al., "Longformer: The Long-Document Transformer", 2020.

    Example:
        >>> sliding_window_mask(3, 3, (1, 0)).int()
        tensor([[[[1, 0, 0],
                  [1, 1, 0],
                  [0, 1, 1]]]], dtype=torch.int32)
    """
    if isinstance(window_size, int):
        raise TypeError(f"window_size is {window_size}; it needs to be a pair (left, right), -1 for no limit")
    left, right = (bounded(side) for side in pair("window_size", window_size, -1))
    rows, keys = _positions(seqlen_q, seqlen_k, device)
    if left < 0 and right < 0:
        return torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=rows.device)
    mask = keys <= rows + right if right >= 0 else keys >= rows - left
    if left >= 0 and right >= 0:
        mask &= keys >= rows - left
    return mask[None, None]


def document_ids(lengths: IntsLike, total_length: int | None = None) -> Tensor:
    """Number the document of each position of a packed sequence, from the lengths of the documents.

    Equivalent to `torch.repeat_interleave(torch.arange(n), lengths)`, padded to `total_length` with -1, the id of
    padding.

    Args:
        lengths: integer tensor or list, (n,), or (B, n) for a batch with different documents. A length of 0 is a
            document without tokens, so shorter rows of a batch can be filled with zeros.
        total_length: length of the packed sequence. By default it is the (longest) sum, for which the device is waited
            for; pass it to avoid that on a GPU.

    Returns:
        int64 tensor (total_length,) or (B, total_length): 0 to n - 1, and -1 after the last document.

    Raises:
        TypeError: `lengths` is not integer.
        ValueError: `lengths` has another rank or a negative length, or sums to more than `total_length`. On an
            accelerator values are not checked: a negative length counts as 0, and ids end at `total_length`.

    Example:
        >>> document_ids([2, 0, 3], total_length=6)
        tensor([ 0,  0,  2,  2,  2, -1])
    """
    lengths = integer_tensor("lengths", lengths, (1, 2))
    lengths_within("lengths", lengths)
    ends = lengths.clamp(min=0).cumsum(-1, dtype=torch.int64)
    longest = int(ends[..., -1].max()) if (total_length is None or values_can_be_read(ends)) and ends.numel() else 0
    if total_length is None:
        total_length = longest
    elif longest > integer("total_length", total_length):
        raise ValueError(f"lengths sum to {longest}, more than total_length = {total_length}")
    positions = torch.arange(total_length, device=ends.device).expand(*ends.shape[:-1], total_length).contiguous()
    # right=True skips documents of length 0, which end where the one before ends.
    ids = torch.searchsorted(ends, positions, right=True)
    return ids.masked_fill(ids == ends.size(-1), -1)


def document_mask(ids: IntsLike, ids_k: IntsLike | None = None) -> Tensor:
    """Let each query see the keys of its document.

    Equivalent to `(ids[:, :, None] == ids_k[:, None, :]) & (ids >= 0)[:, :, None]`. Combine it with a causal
    mask, or call `attention(..., is_causal=True)`, for packed language modelling.

    Args:
        ids: integer tensor or list, (Lq,) or (B, Lq): the document of each query, for instance from
            `document_ids(lengths)`. Negative ids are padding: the mask is False for such queries, and for such keys.
        ids_k: the document of each key, (Lk,) or (B, Lk); `ids` by default.

    Returns:
        Bool tensor (1, 1, Lq, Lk), or (B, 1, Lq, Lk) if ids or ids_k have a batch dim.

    Raises:
        TypeError: ids are not integer.
        ValueError: ids have another rank, or two different batch sizes.

    Example:
        >>> document_mask([0, 0, 1, -1]).int()
        tensor([[[[1, 1, 0, 0],
                  [1, 1, 0, 0],
                  [0, 0, 1, 0],
                  [0, 0, 0, 0]]]], dtype=torch.int32)
    """
    ids_q, keys = document_pair(ids, ids_k)
    return same_document(ids_q, keys)


def same_document(ids_q: Tensor, ids_k: Tensor) -> Tensor:
    """Compare the ids (B, Lq) of queries and (B, Lk) of keys, where negative ones match none: bool (B, 1, Lq, Lk)."""
    mask = ids_q[:, :, None] == ids_k[:, None, :]
    mask &= (ids_q >= 0)[:, :, None]
    return mask[:, None]


def document_pair(ids: IntsLike, ids_k: IntsLike | None) -> tuple[Tensor, Tensor]:
    """Check the documents of queries and of keys, and return both 2-D."""
    ids_q = torch.atleast_2d(integer_tensor("ids", ids, (1, 2)))
    keys = ids_q if ids_k is None else torch.atleast_2d(integer_tensor("ids_k", ids_k, (1, 2)).to(ids_q.device))
    if ids_q.size(0) != keys.size(0) and 1 not in (ids_q.size(0), keys.size(0)):
        raise ValueError(
            f"ids_k has batch size {keys.size(0)} (shape {tuple(keys.shape)}) and ids has {ids_q.size(0)} "
            f"(shape {tuple(ids_q.shape)}); they need to be equal, or one of them 1"
        )
    return ids_q, keys


def padding_mask(
    lengths_or_mask: IntsLike,
    seqlen: int | None = None,
    *,
    side: Literal["right", "left"] = "right",
    device: Device = None,
) -> Tensor:
    """Hide the keys of padding, which are passed as lengths or as a 0/1 mask of a tokenizer.

    Equivalent to `(torch.arange(seqlen) < lengths[:, None])[:, None, None]`, or to `mask.bool()[:, None, None]`.

    Args:
        lengths_or_mask: (B,) integer lengths, or a (B, seqlen) bool or integer mask, nonzero = keep.
        seqlen: padded length; needed with lengths, checked with a mask.
        side: with lengths, the side the padding is on; generation pads on the `"left"`.
        device: where to put the mask; by default where the argument is.

    Returns:
        Bool tensor (B, 1, 1, seqlen).

    Raises:
        TypeError: neither bool nor integer.
        ValueError: another rank, a mask of another length, lengths without `seqlen`, a length below 0 or above
            `seqlen` (checked on CPU only; on an accelerator it counts as 0 or `seqlen`), an unknown `side`.

    Example:
        >>> padding_mask([1, 3], 3)[:, 0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 1]], dtype=torch.int32)
        >>> padding_mask([[1, 1, 0]]).shape
        torch.Size([1, 1, 1, 3])
    """
    if side not in ("right", "left"):
        raise ValueError(f"side is {side!r}; it needs to be 'right' or 'left'")
    values = as_tensor("lengths_or_mask", lengths_or_mask, device)
    if values.dim() == 2:
        if values.dtype != torch.bool and values.dtype not in INTEGER_DTYPES:
            raise TypeError(
                f"lengths_or_mask has dtype {values.dtype}; it needs bool or integer; pass mask > 0.5 of 1 and 0, "
                "mask == 0 of 0 and -inf"
            )
        if seqlen is not None and values.size(1) != integer("seqlen", seqlen):
            raise ValueError(f"lengths_or_mask has shape {tuple(values.shape)}; it needs seqlen = {seqlen} keys")
        return (values != 0)[:, None, None]
    if values.dim() == 4:
        raise ValueError(
            f"lengths_or_mask has shape {tuple(values.shape)}; it needs to be (B,) or (B, seqlen); what has heads and "
            "queries is no padding: pass it as mask, mask.bool() of 1 and 0, mask == 0 of 0 and -inf"
        )
    is_list = not isinstance(lengths_or_mask, Tensor)
    values = values.long() if is_list and values.numel() == 0 else values  # torch calls an empty list float
    lengths = integer_tensor("lengths_or_mask", values, (1, 2))
    if seqlen is None:
        raise ValueError("seqlen is None; it needs to be the padded length, because lengths_or_mask holds lengths")
    lengths_within("lengths_or_mask", lengths, integer("seqlen", seqlen))
    keys = torch.arange(seqlen, device=lengths.device)
    if side == "left":
        keys = keys.flip(0)
    return (keys < lengths[:, None])[:, None, None]


def prefix_lm_mask(prefix_lengths: int | IntsLike, seqlen_q: int, seqlen_k: int, device: Device = None) -> Tensor:
    """Let every query see the whole prefix; after the prefix the mask is causal (bottom-right aligned).

    Equivalent to `causal_mask(seqlen_q, seqlen_k) | padding_mask(prefix_lengths, seqlen_k)`.

    Args:
        prefix_lengths: number of keys in the prefix, one int or (B,) integers.
        seqlen_q, seqlen_k: number of queries and keys.
        device: where to put the mask; by default where `prefix_lengths` is.

    Returns:
        Bool tensor (1, 1, seqlen_q, seqlen_k) for one int, (B, 1, seqlen_q, seqlen_k) otherwise.

    Raises:
        TypeError, ValueError: lengths that are not integers >= 0, or a prefix longer than `seqlen_k` (not checked for
            tensors on an accelerator).

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 3.2.1.

    Example:
        >>> prefix_lm_mask(2, 3, 3).int()
        tensor([[[[1, 1, 0],
                  [1, 1, 0],
                  [1, 1, 1]]]], dtype=torch.int32)
    """
    if isinstance(prefix_lengths, (int, torch.SymInt)):
        prefix_lengths = torch.full((1,), integer("prefix_lengths", prefix_lengths), dtype=torch.int64, device=device)
    prefix = integer_tensor("prefix_lengths", prefix_lengths, (1,))
    prefix = prefix if device is None else prefix.to(device)
    rows, keys = _positions(seqlen_q, seqlen_k, prefix.device)
    lengths_within("prefix_lengths", prefix, seqlen_k)
    # One comparison: a key is visible if it is below the causal limit of the row or below the prefix.
    limit = torch.maximum(rows + 1, prefix[:, None, None])
    return (keys < limit)[:, None]


def threshold_mask(scores: Tensor, threshold: float = 0.0) -> Tensor:
    """Let each query see the keys with a score above a threshold (the "relu" mask with threshold 0).

    Equivalent to `scores > threshold`; NaN is never above. Rows may be empty; their output is 0.

    Args:
        scores: float tensor of 0 to 4 dims, broadcastable to (B, H, Lq, Lk) from the right.
        threshold: the score that a key must exceed.

    Returns:
        4-D bool tensor of the shape of `scores`.

    Raises:
        TypeError: `scores` is not a float tensor.
        ValueError: `scores` has more than 4 dims.

    Example:
        >>> threshold_mask(torch.tensor([-1.0, 0.0, 2.0])).int()
        tensor([[[[0, 0, 1]]]], dtype=torch.int32)
    """
    return float_scores(scores) > threshold


def combine(*masks: Tensor | None, op: Literal["and", "or"] = "and") -> Tensor | None:
    """Combine masks into one: attend where all of them do (`"and"`) or where any does (`"or"`).

    Equivalent to `masks[0] & masks[1] & ...` on 4-D tensors, with two exceptions. Expanded (stride 0) dims count as
    size 1, so that the result is as small as possible. Masks per key-value head can be combined with masks per query
    head: with Hq = G * Hk, query head h gets the mask of key-value head h // G.

    Args:
        masks: bool tensors of 0 to 4 dims, each broadcastable to (B, H, Lq, Lk) from the right. None means "attend
            everywhere": it has no effect with `"and"`, and is the result of `"or"`.
        op: `"and"` or `"or"`.

    Returns:
        A 4-D bool tensor. None if all masks are None, or with `"or"` if one is.

    Raises:
        TypeError: a mask is not a bool tensor, or none is passed.
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
        raise ValueError(f"op is {op!r}; it needs to be 'and' or 'or'")
    if not masks:
        raise TypeError("combine() has no masks; it needs one or more, of which each may be None")
    named = [(f"masks[{i}]", mask) for i, mask in enumerate(masks) if mask is not None]
    if not named or (op == "or" and len(named) < len(masks)):
        return None
    names = [name for name, _ in named]
    tensors = [collapse(bool_mask(name, mask)) for name, mask in named]
    for name, tensor in zip(names, tensors, strict=True):
        check_device(name, tensor.device, tensors[0].device, names[0])
    tensors = align_heads(tensors, names)
    common_shape(tensors, names)
    # Small masks first, so that only the last operation has the full size. Not in a compiler, which fuses them: the
    # comparison would specialise the graph on sizes.
    if not torch.compiler.is_compiling():
        tensors.sort(key=torch.numel)
    return reduce(torch.logical_and if op == "and" else torch.logical_or, tensors)
