"""Fold dims into the 4 that kernels have: leading dims and the dim of `torch.vmap` into the batch, heads into rows.

q, k and v (*batch, L, H, D) become (B, L, H, D), B the product of batch. A mask or a bias keeps a batch of its own, of
Bm entries: entry b of the call has entry `b // repeat % Bm` of it. In a call with a batch of (B1, B2), a mask of (B1,
1) has repeat B2, a mask of (1, B2) has repeat 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import batch_names, check_broadcast, check_strided, check_values
from .description import AttentionProblem, NeedsGrad, replaced, tensor_spec, unpacked_spec

Dims = tuple[int, ...]


class Repeats(NamedTuple):
    """The number of consecutive entries of a folded batch with the same entry of the mask, and of the bias."""

    mask: int = 1
    bias: int = 1


class _Folded(NamedTuple):
    """A mask or a bias with one batch dim."""

    x: Any
    repeat: int
    dims: Dims  # the leading dims before they were folded, each 1 or full
    note: str | None = None  # why it was copied


def fold_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, by_distance: bool | None = None, is_list_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor, Any, Any, Dims, Repeats, tuple[str, ...]]:
    """Fold the leading dims of a call: q, k, v, mask, bias, these dims, the repeats, and notes on copied tensors.

    A mask or a bias of a wrong type passes, for validation to refuse. `by_distance` and `is_list_bias` tell what kind
    of bias has these values, and whether each query has its own.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias)):
        check_strided(name, x)
    for name, x in (("k", k), ("v", v)):
        check_leading(name, x, q)
    batch = tuple(q.shape[:-3])
    leading = len(batch)
    notes = [_copying(name, x, leading) for name, x in zip("qkv", (q, k, v)) if not has_one_stride(x, leading)]
    sizes = (*batch, q.shape[-2], q.shape[-3], k.shape[-3])
    mask = _fold_checked("mask", mask, sizes, k.shape[-2])
    if is_list_bias:
        values_fit = mask.x.sizes_of_values
        bias = _fold_values(bias, sizes, lambda shape: check_values(shape, sizes[:-2], k.shape[-2], *values_fit))
    elif by_distance is None:
        bias = _fold_checked("bias", bias, sizes, k.shape[-2])
    else:
        rows = (sizes[-2],) if by_distance else ()
        bias = _fold_values(bias, sizes, lambda shape: check_values(shape, sizes[:-2], k.shape[-2], rows))
    notes += [folded.note for folded in (mask, bias) if folded.note is not None]
    q, k, v = (merge(x, leading) for x in (q, k, v))
    return q, k, v, mask.x, bias.x, batch, Repeats(mask.repeat, bias.repeat), tuple(notes)


def check_leading(name: str, x: Tensor, q: Tensor) -> None:
    """Refuse k or v if its batch dims differ from the batch dims of q."""
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


def _fold_checked(name: str, x: Any, sizes: Dims, num_heads_k: int) -> _Folded:
    """Check and fold a mask or a bias of a call of `sizes`, (*batch, heads, seqlen_q, seqlen_k)."""
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
        return _fold_shared(name, x, batch, keeps_shape=x.requires_grad and torch.is_grad_enabled())
    if not hasattr(x, "batch_dims"):
        return _Folded(x, 1, ())
    if len(x.batch_dims) > len(batch):
        raise ValueError(f"{name} was prepared with leading dims {x.batch_dims}; those of q are {batch}")
    dims: Dims = (*(1,) * (len(batch) - len(x.batch_dims)), *x.batch_dims)
    check_broadcast(name, (*dims, *x.shape[1:]), sizes, num_heads_k)
    expanded, repeat = _sharing(dims, batch)
    if expanded == dims:
        return _Folded(x, repeat, dims)
    return _Folded(x.expand_batch(expanded), repeat, expanded, _expanding(name, dims, expanded))


def _fold_values(x: Tensor, sizes: Dims, check: Callable[[Dims], None]) -> _Folded:
    """Check and fold the values of a bias by distance, or of lists."""
    if x.dim() > len(sizes):
        raise ValueError(f"bias.values has more leading dims than q, whose batch dims are {sizes[:-3]}")
    x = x[(None,) * (len(sizes) - x.dim())]
    check(x.shape)
    return _fold_shared("bias", x, sizes[:-3], keeps_shape=x.requires_grad and torch.is_grad_enabled())


def _fold_shared(name: str, x: Tensor, batch: Dims, *, keeps_shape: bool, repeats: bool = True) -> _Folded:
    """Fold a tensor (*dims, ...) of a mask or a bias that broadcasts over the leading dims `batch`.

    A broadcast dim between two full ones has to be expanded, because no number of repeats is right. Without `repeats`
    each entry of the batch needs its own entry, or all the same one. With `keeps_shape` each element has its own
    gradient; else dims of stride 0 count as size 1, so that none of them is copied.
    """
    leading = len(batch)
    if not keeps_shape:
        x = collapse(x, range(leading))
    dims = tuple(x.shape[:leading])
    expanded, repeat = _sharing(dims, batch)
    if not repeats and math.prod(expanded) != 1:
        expanded, repeat = batch, 1
    if expanded == dims and has_one_stride(x, leading):
        return _Folded(merge(x, leading), repeat, dims)
    note = _copying(name, x, leading) if expanded == dims else _expanding(name, dims, expanded)
    if expanded != dims and keeps_shape and x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()  # the gradient is summed over the expanded dims, and rounded once
    shape = x.shape[leading:]
    if not keeps_shape:
        x = collapse(x, range(leading, x.dim()))
    x = merge(x.expand(*expanded, *x.shape[leading:]), leading)
    return _Folded(x.expand(x.shape[0], *shape), repeat, expanded, note)


def collapse(x: Tensor, dims: Iterable[int] = range(4)) -> Tensor:
    """Reduce every dim that was expanded (stride 0) to size 1."""
    for dim in dims:
        if x.shape[dim] > 1 and x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    return x


def _sharing(dims: Dims, batch: Dims) -> tuple[Dims, int]:
    """Expand the leading dims between full ones; return the dims and the number of repeats.

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


def merge(x: Tensor, leading: int) -> Tensor:
    """Merge this number of leading dims into one; a view if they have one stride."""
    return x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:])


def has_one_stride(x: Tensor, leading: int) -> bool:
    """Return whether this number of leading dims has one stride, so that `merge` is a view.

    >>> import torch
    >>> x = torch.zeros(2, 3, 5)
    >>> has_one_stride(x, 2), has_one_stride(x.transpose(0, 1), 2), has_one_stride(x[:1].expand(2, -1, -1), 2)
    (True, False, False)
    """
    if 0 in x.shape:
        return True
    kept = [(x.shape[dim], x.stride(dim)) for dim in range(leading) if x.shape[dim] != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(kept))


def heads_as_rows(x: Tensor, num_heads: int, num_heads_k: int) -> Tensor:
    """View a mask or a bias (B, heads, 1, keys) with the heads of a group as rows of their key-value head.

    Kernels then load the keys once for all heads of a group. A tensor with fewer heads than q is the same for every
    row.

    >>> import torch
    >>> heads_as_rows(torch.arange(4).view(1, 4, 1, 1), 4, 2).squeeze(3)
    tensor([[[0, 1],
             [2, 3]]])
    """
    return x.unflatten(1, (num_heads_k, num_heads // num_heads_k)).squeeze(3) if x.shape[1] == num_heads else x


class MappedCall:
    """Fold the calls that `torch.vmap` maps into one call, with the mapped dim in front of their batch.

    Tensors that are not mapped are broadcast: k and v are expanded over the mapped dim, a mask or a bias keeps its
    entries. A bias that needs a gradient has one in each of the calls, so it is expanded, too.

    Without `repeats` each entry of the batch needs its own entry of a mask or a bias, or all the same one.

    Args:
        size: the number of calls.
        in_dims, mask_dims: the mapped dim of q, k, v and bias, and of each tensor of the mask.
        mapped_problem, mapped_inputs, mapped_mask: of each of the calls.
        needs_grad: of the one call.

    Attributes:
        problem, inputs, mask: of the one call.
    """

    def __init__(
        self,
        size: int,
        in_dims: Sequence[int | None],
        mask_dims: Sequence[int | None],
        mapped_problem: AttentionProblem,
        mapped_inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        mapped_mask: Sequence[Tensor],
        needs_grad: NeedsGrad,
        repeats: bool,
        *,
        is_backward: bool = False,
    ) -> None:
        self._size, self._repeats = size, repeats
        self._batch = mapped_problem.batch
        q, k, v, bias = mapped_inputs
        q, k, v = (self.fold(x, dim) for x, dim in zip((q, k, v), in_dims[:3], strict=True))
        flags, mask, mask_spec = mapped_problem.flags, list(mapped_mask), None
        if bias is not None:
            own, dim = needs_grad.bias, in_dims[3]
            self._bias_dtype, self._bias_batch = bias.dtype, bias.shape[0 if dim is None or dim > 0 else 1]
            self._folded_bias = self._shared("bias", bias, dim, flags.bias_repeat, own, own and is_backward)
            bias = self._folded_bias.x
            flags = replaced(flags, bias_repeat=self._folded_bias.repeat)
        if mapped_problem.mask is not None:
            is_mapped = any(dim is not None for dim in mask_dims)
            is_dense = mapped_problem.mask_form == "dense"
            folded = [
                self._shared("mask", x, dim, flags.mask_repeat, not is_dense, is_mapped)
                for x, dim in zip(mapped_mask, mask_dims, strict=True)
            ]
            mask, flags = [x for x, *_ in folded], replaced(flags, mask_repeat=folded[0].repeat)
            shape = (mask[0].shape[0], *mapped_problem.mask.shape[1:])
            mask_spec = tensor_spec(mask[0]) if is_dense else unpacked_spec(shape)
        self.inputs = (q, k, v, bias)
        self.mask = tuple(mask)
        folded_problem: AttentionProblem = replaced(
            mapped_problem,
            batch=size * mapped_problem.batch,
            q_strides=tensor_spec(q).strides,
            k_strides=tensor_spec(k).strides,
            v_strides=tensor_spec(v).strides,
            mask=mask_spec,
            flags=flags,
            needs_grad=needs_grad,
        )
        self.problem = folded_problem.with_bias(bias)

    def fold(self, x: Tensor, dim: int | None) -> Tensor:
        """Fold a tensor with one entry for each of the batch, (B, ...) without its mapped dim, to (size * B, ...)."""
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        return merge(x, 2)

    def split(self, x: Tensor) -> Tensor:
        """Split a result of the one call, (size * B, ...), to (size, B, ...)."""
        return x.view(self._size, self._batch, *x.shape[1:])

    def split_bias(self, dbias: Tensor) -> Tensor:
        """Split the gradient of the folded bias to (size, Bb, ...), summed over expanded dims."""
        dims, shape = self._folded_bias.dims, dbias.shape[1:]
        own = (self._size, 1, self._bias_batch, 1)
        summed = dbias.view(*dims, *shape).sum_to_size((*own, *shape))
        return summed.view(self._size, self._bias_batch, *shape).to(self._bias_dtype)

    def _shared(self, name: str, x: Tensor, dim: int | None, repeat: int, keeps_shape: bool, expand: bool) -> _Folded:
        """Fold a mask or a bias; with `expand` one that is not mapped also gets an entry for each of the calls."""
        x = x[None] if dim is None else x.movedim(dim, 0)
        if expand:
            x = x.expand(self._size, *x.shape[1:])
        entries = x.shape[1]
        batch = (self._size, self._batch // max(entries * repeat, 1), entries, repeat)
        if math.prod(batch) != self._size * self._batch:
            batch = (self._size, 1, self._batch, 1)  # no entries for an empty batch
        return _fold_shared(name, x[:, None, :, None], batch, keeps_shape=keeps_shape, repeats=self._repeats)
