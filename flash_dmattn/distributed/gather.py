"""The strategy "gather": masks of a rank's slices made ready, and the operators called."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.mask_choice import choose_form, view_of
from ..definition import distinct, is_transformed
from ..dispatch.selection import Selection
from ..problem import MaskView
from .autograd import GatherAttention, GatherCall
from .call import ParallelCall
from .mask import ShardedMask, cut
from .operators import Numbers, gather_forward
from .problems import HeadGroup, slice_problem
from .slices import plan


def attend_gathered(
    call: ParallelCall,
    pair: Selection,
    exchange_dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None,
    bias: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows.

    Args:
        call: as it was described.
        pair: the backends of all slices.
        exchange_dtype: in which gradients of k and v are sent.
        q, k, v: of this rank.
        mask, bias: with all keys, or one.
    """
    problem, flags = call.problem, call.problem.flags
    views = _views(call, pair, mask)
    numbers = Numbers(
        call.members.name,
        call.members.rank,
        call.layout.flat,
        call.layout_k.flat,
        *problem.window,
        flags.softmax_scale,
        flags.softcap,
        flags.deterministic,
        pair.forward.name,
        "" if pair.backward is None else pair.backward.name,
        call.head_groups,
        call.sends_parts,
        exchange_dtype,
        call.number,
        tuple(problem.needs_grad),
    )
    shared = GatherCall(numbers, tuple(view.form for view in views))
    tensors = [x for view in views for x in view.tensors]
    if pair.backward is None and not is_transformed():
        out, lse = gather_forward(q, k, v, tensors, list(shared.mask_forms), bias, sink, *numbers)
        return out, lse
    results: tuple[Tensor, Tensor] = GatherAttention.apply(*distinct(q, k, v, bias, sink, shared, *tensors))
    return results


def _views(call: ParallelCall, pair: Selection, mask: Tensor | ShardedMask | None) -> list[MaskView]:
    """The mask of each slice as both passes receive it, all heads together."""
    parts = plan(call.layout, call.members.rank, call.layout_k.length, call.problem.window)
    if mask is None:
        return [MaskView()] * len(parts)
    heads = HeadGroup(0, call.problem.num_heads_k, call.problem.num_heads_k)
    views, held = [], call.keys_held(call.members.rank)
    for index, part in enumerate(parts):
        own = mask.masks[index] if isinstance(mask, ShardedMask) else cut(mask, part)
        problem = slice_problem(call.problem, part, heads, held)
        views.append(view_of(problem, choose_form(problem, *pair), own))
    return views
