"""Calls that `torch.vmap` maps as one call: the mapped dim stands in front of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .description import AttentionProblem, MaskForm, NeedsGrad, spec_of, unpacked_spec
from .leading import FoldedTensor, fold_shared, merge

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


class MappedCall:
    """The calls that one of `torch.vmap` stands for, with the mapped dim folded into their batch.

    What is not mapped is shared: k and v are expanded over the mapped dim, a mask or a bias keeps its entries. A bias
    whose gradient is to be found has one in each of the calls, so there it is expanded, too.

    Attributes:
        problem: the description of the one call.
        inputs: its q, k, v and bias.
        mask: the tensors of its mask.
    """

    def __init__(
        self,
        size: int,
        in_dims: Sequence[int | None],
        mask_dims: Sequence[int | None],
        problem: AttentionProblem,
        inputs: Inputs,
        mask: Sequence[Tensor],
        mask_form: MaskForm,
        *,
        repeats: bool = True,
        needs_grad: NeedsGrad | None = None,
        needs_dsink: bool = False,
    ) -> None:
        """Fold the inputs.

        Args:
            size: of the mapped dim.
            in_dims, mask_dims: the mapped dim of each input and of each tensor of the mask; None where there is none.
            problem: the description of one call out of those that are mapped.
            inputs, mask: with their mapped dims.
            mask_form: what the tensors of the mask are of: a dense mask of the problem may have been prepared.
            repeats: whether a part of the batch may share an entry of a mask or a bias; else these are expanded.
            needs_grad: the gradients that are to be found; None for a forward pass, after which the inputs tell.
            needs_dsink: whether the sink, which all the calls share, requires a gradient; of a forward pass.
        """
        self._size, self._repeats = size, repeats
        self._batch = problem.batch
        q, k, v, bias = inputs
        q, k, v = (self.fold(x, dim) for x, dim in zip((q, k, v), in_dims[:3], strict=True))
        flags = problem.flags
        bias_spec = mask_spec = None
        if bias is not None:
            own = torch.is_grad_enabled() and bias.requires_grad if needs_grad is None else needs_grad.bias
            dim = in_dims[3]
            self._bias_dtype, self._bias_batch = bias.dtype, bias.shape[0 if dim is None or dim > 0 else 1]
            self._folded_bias = self._shared("bias", bias, dim, flags.bias_repeat, own, own and needs_grad is not None)
            bias = self._folded_bias.x
            bias_spec = spec_of(bias)
            flags = flags._replace(bias_repeat=self._folded_bias.repeat)
        if problem.mask is not None:
            is_mapped = any(dim is not None for dim in mask_dims)
            is_dense = mask_form == "dense"
            folded = [
                self._shared("mask", x, dim, flags.mask_repeat, not is_dense, is_mapped)
                for x, dim in zip(mask, mask_dims, strict=True)
            ]
            mask, flags = [x for x, *_ in folded], flags._replace(mask_repeat=folded[0].repeat)
            shape = (mask[0].shape[0], *problem.mask.shape[1:])
            mask_spec = spec_of(mask[0]) if is_dense else unpacked_spec(shape)
        self.inputs: Inputs = (q, k, v, bias)
        self.mask = tuple(mask)
        if needs_grad is None:
            needs_grad = NeedsGrad(*(x is not None and x.requires_grad for x in self.inputs))
            needs_grad = needs_grad._replace(sink=needs_dsink)
            needs_grad = needs_grad if torch.is_grad_enabled() else NeedsGrad()
        self.problem = problem._replace(
            batch=size * problem.batch,
            q_strides=spec_of(q).strides,
            k_strides=spec_of(k).strides,
            v_strides=spec_of(v).strides,
            mask=mask_spec,
            bias=bias_spec,
            flags=flags,
            needs_grad=needs_grad,
        )

    def fold(self, x: Tensor, dim: int | None) -> Tensor:
        """A tensor with one entry for each of the batch, (B, ...) without its mapped dim, as (size * B, ...)."""
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        return merge(x, 2)

    def split(self, x: Tensor) -> Tensor:
        """A result of the one call (size * B, ...) as (size, B, ...)."""
        return x.view(self._size, self._batch, *x.shape[1:])

    def split_bias(self, dbias: Tensor) -> Tensor:
        """The gradient of the folded bias as (size, Bb, ...), summed over what was expanded."""
        dims, shape = self._folded_bias.dims, dbias.shape[1:]
        own = (self._size, 1, self._bias_batch, 1)
        summed = dbias.view(*dims, *shape).sum_to_size((*own, *shape))
        return summed.view(self._size, self._bias_batch, *shape).to(self._bias_dtype)

    def _shared(
        self, name: str, x: Tensor, dim: int | None, repeat: int, keeps_shape: bool, expand: bool
    ) -> FoldedTensor:
        """A mask or a bias; with `expand` also one that is not mapped gets an entry for each of the calls."""
        x = x[None] if dim is None else x.movedim(dim, 0)
        if expand:
            x = x.expand(self._size, *x.shape[1:])
        entries = x.shape[1]
        batch = (self._size, self._batch // max(entries * repeat, 1), entries, repeat)
        if math.prod(batch) != self._size * self._batch:
            batch = (self._size, 1, self._batch, 1)  # no entries beside an empty batch
        return fold_shared(name, x[:, None, :, None], batch, keeps_shape=keeps_shape, repeats=self._repeats)
