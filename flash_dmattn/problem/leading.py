"""Leading batch dims: any number of them folded into the one batch dim of kernels, and out of it again.

q, k and v (*batch, L, H, D) become (B, L, H, D), B the product of batch. A mask or a bias keeps a batch of its own, of
Bm entries: entry b of the call reads entry `b // repeat % Bm` of it. Beside a batch of (B1, B2), one of (B1, 1) is read
with repeat B2, one of (1, B2) with repeat 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import batch_names, check_broadcast, check_strided

Dims = tuple[int, ...]


class Repeats(NamedTuple):
    """How many consecutive entries of a folded batch share one entry of the mask, and of the bias."""

    mask: int = 1
    bias: int = 1


class FoldedCall(NamedTuple):
    """A call with one batch dim.

    Attributes:
        q, k, v: (B, L, H, D); views, or copies where leading dims have no one stride.
        mask: 4-D bool (Bm, Hm, Lq or 1, Lk or 1), a prepared mask, or what was given in their place.
        bias: 4-D, or what was given in its place.
        batch: the leading dims.
        repeats: of mask and bias.
        notes: what `explain` says of it: the tensors that were copied.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    bias: Any
    batch: Dims
    repeats: Repeats
    notes: tuple[str, ...]


class FoldedTensor(NamedTuple):
    """A mask or a bias with one batch dim, and its repeat.

    Attributes:
        x: what was folded.
        repeat: consecutive entries of the call that share one of its own.
        dims: its leading dims before they were folded, each 1 or full.
        note: of the copy that was made, or None.
    """

    x: Any
    repeat: int
    dims: Dims
    note: str | None


def fold_call(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any) -> FoldedCall:
    """Fold the leading dims of a call.

    Args:
        q: (*batch, Lq, Hq, D).
        k, v, mask, bias: as given to `attention`; what has another type than it takes is left to the validation.

    Raises:
        TypeError: k or v is no tensor.
        ValueError: leading dims that differ, or a mask or bias that does not broadcast; the message names the dim.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias)):
        check_strided(name, x)
    for name, x in (("k", k), ("v", v)):
        _check_leading(name, x, q)
    batch = tuple(q.shape[:-3])
    sizes = (*batch, q.shape[-2], q.shape[-3], k.shape[-3])
    notes = [
        _copying(name, x, len(batch)) for name, x in (("q", q), ("k", k), ("v", v)) if not has_one_stride(x, len(batch))
    ]
    of_mask, of_bias = (
        _fold_checked(name, x, sizes, k.shape[-2])
        if isinstance(x, Tensor) or hasattr(x, "batch_dims")
        else FoldedTensor(x, 1, (), None)
        for name, x in (("mask", mask), ("bias", bias))
    )
    notes += [note for note in (of_mask.note, of_bias.note) if note is not None]
    q, k, v = (merge(x, len(batch)) for x in (q, k, v))
    return FoldedCall(q, k, v, of_mask.x, of_bias.x, batch, Repeats(of_mask.repeat, of_bias.repeat), tuple(notes))


def unfold(x: Tensor, batch: Dims) -> Tensor:
    """A result of a folded call, its batch dim split into the leading dims again."""
    return x.view(*batch, *x.shape[1:])


def merge(x: Tensor, leading: int) -> Tensor:
    """So many leading dims as one: a view where they have one stride."""
    return x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:])


def has_one_stride(x: Tensor, leading: int) -> bool:
    """Whether so many leading dims are one dim of one stride, so that `merge` is a view.

    >>> import torch
    >>> x = torch.zeros(2, 3, 5)
    >>> has_one_stride(x, 2), has_one_stride(x.transpose(0, 1), 2), has_one_stride(x[:1].expand(2, -1, -1), 2)
    (True, False, False)
    """
    if 0 in x.shape:
        return True
    kept = [(x.shape[dim], x.stride(dim)) for dim in range(leading) if x.shape[dim] != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(kept))


def fold_shared(name: str, x: Tensor, batch: Dims, *, keeps_shape: bool, repeats: bool = True) -> FoldedTensor:
    """Fold a tensor of a mask or a bias that broadcasts over the leading dims `batch`.

    A dim that is shared between two that are not has to be expanded: no repeat is like it.

    Args:
        name: of the argument.
        x: (*dims, ...), as many dims as `batch`, each 1 or full.
        batch: the leading dims of the call.
        keeps_shape: whether each element has a gradient of its own. Else dims of stride 0 count as size 1, so that
            nothing of them is copied.
        repeats: whether a part of the batch may share an entry; else it is expanded.
    """
    leading = len(batch)
    if not keeps_shape:
        x = _collapse(x, range(leading))
    dims = tuple(x.shape[:leading])
    expanded, repeat = _sharing(dims, batch)
    if not repeats and math.prod(expanded) != 1:
        expanded, repeat = batch, 1
    if expanded == dims and has_one_stride(x, leading):
        return FoldedTensor(merge(x, leading), repeat, dims, None)
    note = _copying(name, x, leading) if expanded == dims else _expanding(name, dims, expanded)
    if expanded != dims and keeps_shape and x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()  # the gradient is summed over what is expanded, and rounded once
    shape = x.shape[leading:]
    if not keeps_shape:
        x = _collapse(x, range(leading, x.dim()))
    x = merge(x.expand(*expanded, *x.shape[leading:]), leading)
    return FoldedTensor(x.expand(x.shape[0], *shape), repeat, expanded, note)


def _fold_prepared(name: str, mask: Any, batch: Dims) -> FoldedTensor:
    dims: Dims = (*(1,) * (len(batch) - len(mask.batch_dims)), *mask.batch_dims)
    expanded, repeat = _sharing(dims, batch)
    if expanded == dims:
        return FoldedTensor(mask, repeat, dims, None)
    return FoldedTensor(mask.expand_batch(expanded), repeat, expanded, _expanding(name, dims, expanded))


def _collapse(x: Tensor, dims: Iterable[int]) -> Tensor:
    for dim in dims:
        if x.shape[dim] > 1 and x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    return x


def _fold_checked(name: str, x: Any, sizes: Dims, num_heads_k: int) -> FoldedTensor:
    batch = sizes[:-3]
    if isinstance(x, Tensor):
        if not 2 <= x.dim() <= len(sizes):
            names = ", ".join(batch_names(len(batch)))
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; it needs 2 to {len(sizes)}, "
                f"read from the right as ({names}, heads, seqlen_q, seqlen_k)"
            )
        x = x[(None,) * (len(sizes) - x.dim())]
        check_broadcast(name, x.shape, sizes, num_heads_k)
        return fold_shared(name, x, batch, keeps_shape=x.requires_grad and torch.is_grad_enabled())
    dims = x.batch_dims
    if len(dims) > len(batch):
        raise ValueError(f"{name} was prepared with leading dims {dims}; those of q are {batch}")
    check_broadcast(name, (*(1,) * (len(batch) - len(dims)), *dims, *x.shape[1:]), sizes, num_heads_k)
    return _fold_prepared(name, x, batch)


def _sharing(dims: Dims, batch: Dims) -> tuple[Dims, int]:
    """Leading dims with those expanded that lie between full ones, and the repeat of these.

    >>> _sharing((2, 1), (2, 5)), _sharing((1, 5), (2, 5)), _sharing((2, 1, 3, 1), (2, 5, 3, 4))
    (((2, 1), 5), ((1, 5), 1), ((2, 5, 3, 1), 4))
    """
    full = [dim for dim, (size, wanted) in enumerate(zip(dims, batch, strict=True)) if size == wanted != 1]
    if not full:
        return dims, 1
    first, end = full[0], full[-1] + 1
    return (*dims[:first], *batch[first:end], *dims[end:]), math.prod(batch[end:])


def _copying(name: str, x: Tensor, leading: int) -> str:
    dims, strides = tuple(x.shape[:leading]), x.stride()[:leading]
    return f"copies {name}: its leading dims {dims}, of strides {strides}, have no one stride"


def _expanding(name: str, dims: Dims, expanded: Dims) -> str:
    return f"copies {name}: of its leading dims {dims} a shared one lies between others, so it expands to {expanded}"


def _check_leading(name: str, x: Tensor, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor of {q.dim()} dimensions")
    if x.dim() != q.dim():
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; it needs {q.dim()}, as q of shape "
            f"{tuple(q.shape)}: (*batch, seqlen, num_heads, head_dim)"
        )
    for dim, (size, wanted) in enumerate(zip(x.shape[:-3], q.shape[:-3], strict=True)):
        if size != wanted:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, whose batch dim {dim} is {size}; it needs that of q, {wanted}"
            )
