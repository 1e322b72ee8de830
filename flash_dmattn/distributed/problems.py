"""One call of a rank described without tensors, and the problems of its slices, on which backends are chosen."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..problem import (
    AttentionProblem,
    Flags,
    MaskView,
    NeedsGrad,
    TensorSpec,
    device_arch,
    spec_of,
    unpacked_spec,
)
from .slices import Slice


class HeadGroup(NamedTuple):
    """Key-value heads that are gathered together, and the query heads that read them.

    Attributes:
        first, number: of key-value heads.
        total: key-value heads of the call.
    """

    first: int
    number: int
    total: int

    def of(self, heads: int) -> slice:
        """Its part of a head dim of 1, of all key-value heads or of all query heads."""
        if heads == 1:
            return slice(0, 1)
        width = heads // self.total
        return slice(self.first * width, (self.first + self.number) * width)


def head_groups(num_heads_k: int, number: int) -> tuple[HeadGroup, ...]:
    """The key-value heads in `number` groups of equal size."""
    size = num_heads_k // number
    return tuple(HeadGroup(i * size, size, num_heads_k) for i in range(number))


def rank_problem(
    q: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    seqlen_k: int,
    num_heads_k: int,
    window: tuple[int, int],
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    needs_grad: NeedsGrad,
) -> AttentionProblem:
    """The rows of one rank over all keys, without a mask: what `slice_problem` cuts.

    Args:
        q, v: of the rank; v gives its head dim alone.
        bias: 4-D, with all keys or one.
        seqlen_k: number of all keys.
        window: of the whole call, with causality folded in; a slice has its own.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    head_dim_v = v.shape[3]
    flags = Flags(*window, softmax_scale, softcap, deterministic)
    return AttentionProblem(
        q.device.type,
        device_arch(q.device),
        q.dtype,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_heads_k,
        head_dim,
        head_dim_v,
        q.stride(),  # type: ignore[arg-type]
        unpacked_spec((batch, seqlen_k, num_heads_k, head_dim)).strides,
        unpacked_spec((batch, seqlen_k, num_heads_k, head_dim_v)).strides,
        None,
        "none",
        None if bias is None else spec_of(bias),
        False,
        window,
        flags,
        True,
        False,
        needs_grad,
        None if sink is None else sink.dtype,
    )


def slice_problem(
    whole: AttentionProblem, part: Slice, heads: HeadGroup, held: int, mask: MaskView | None = None
) -> AttentionProblem:
    """The problem of one slice and one group of heads.

    Args:
        whole: of the rank's rows over all keys.
        part: which rows and keys, and their window.
        heads: which heads.
        held: number of keys in the tensors of which its keys are a run.
        mask: of the slice and the group; that of `whole` is cut where it is None.
    """
    left, right = part.window
    causal = right == 0
    if mask is None:
        form, spec = whole.mask_form, _cut_spec(whole.mask, part, heads)
    else:
        form, spec = mask.form, _spec_of_view(mask, part)
    return whole._replace(
        seqlen_q=part.seqlen_q,
        seqlen_k=part.seqlen_k,
        num_heads=heads.number * (whole.num_heads // heads.total),
        num_heads_k=heads.number,
        # Of what has arrived, all keys of the group: a slice of them is a view.
        k_strides=unpacked_spec((whole.batch, held, heads.number, whole.head_dim)).strides,
        v_strides=unpacked_spec((whole.batch, held, heads.number, whole.head_dim_v)).strides,
        mask=spec,
        mask_form=form,
        bias=_cut_spec(whole.bias, part, heads),
        is_causal=causal,
        window_size=(left, -1 if causal else right),
        flags=whole.flags._replace(left=left, right=right),
    )


def _cut_spec(spec: TensorSpec | None, part: Slice, heads: HeadGroup) -> TensorSpec | None:
    if spec is None:
        return None
    b, h, i, j = spec.shape
    of_group = heads.of(h)
    shape = (b, of_group.stop - of_group.start, part.seqlen_q if i > 1 else i, part.seqlen_k if j > 1 else j)
    return TensorSpec(shape, spec.strides, spec.dtype)


def _spec_of_view(mask: MaskView, part: Slice) -> TensorSpec | None:
    if mask.form == "none":
        return None
    if mask.dense is not None:
        return spec_of(mask.dense)
    batch, heads = mask.tensors[0].shape[:2]
    return unpacked_spec((batch, heads, 1 if mask.form == "keys" else part.seqlen_q, part.seqlen_k))


def views_of(forms: list[str] | tuple[str, ...], tensors: list[Tensor] | tuple[Tensor, ...]) -> list[MaskView]:
    """The masks of a rank's slices, from their forms and all their tensors in a row."""
    views, place = [], 0
    for form in forms:
        number = NUMBER_OF_TENSORS[form]
        views.append(MaskView(form, tuple(tensors[place : place + number])))  # type: ignore[arg-type]
        place += number
    return views


NUMBER_OF_TENSORS = {"none": 0, "dense": 1, "tiles": 4, "keys": 3, "intervals": 6}


def view_of_heads(view: MaskView, heads: HeadGroup) -> MaskView:
    """The part of a mask that a group of heads reads; its head dim is 1, that of key-value or that of query heads."""
    if heads.number == heads.total or not view.tensors or view.tensors[0].shape[1] == 1:
        return view
    # Kernels read prepared masks as contiguous tensors.
    parts = [x[:, heads.of(x.shape[1])] for x in view.tensors]
    return MaskView(view.form, tuple(parts if view.form == "dense" else [x.contiguous() for x in parts]))
