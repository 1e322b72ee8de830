"""The passes of `triton` for a class of calls that is described: plans are found by the problem and tensors' places.

What the problem says is looked up in a third of the time that every tensor takes to say it. Masks that are packed or
put in an order first have no pass here, nor have gradients of rows of no unit stride.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...gradients import contiguous_strides
from ...problem import AttentionProblem, Flags, Gradients, MaskForm, MaskView
from ...remembered import Remembered
from ..direct import DirectBackward, DirectForward, Outputs, has_pairs, outputs_of
from ..protocol import Direction

# What stands for a class in the keys of its plans: the problem has some 80 numbers to hash.
_names: Remembered[object] = Remembered(4096)


def forward_pass(
    p: AttentionProblem, mask: MaskView, launch: ModuleType, heads_first: bool = False
) -> DirectForward | None:
    """The forward pass of a class of calls.

    Args:
        p: of the class.
        mask: of one of its calls; of its tensors, sizes alone count.
        launch: `triton_kernels.launch`.
        heads_first: of q, k and v that arrive as (B, H, L, D). Plans of short rows read addresses alone, so that they
            need not be turned around; there is no such pass of others.
    """
    if not _is_read(p, mask, launch, "forward") or (heads_first and not _is_short(p, mask, launch, "forward")):
        return None
    form, flags, outputs, dtype = mask.form, p.flags, outputs_of(p, heads_first), p.dtype
    if not _has_unit_rows(p) or (heads_first and p.seqlen_q == 1 and p.num_heads != p.num_heads_k):
        return None if heads_first else _forward_of_others(form, flags, outputs, launch)
    takes_tf32, is_current_device = launch.takes_tf32, launch.is_current_device
    this = _names.find(("forward", p, form), object)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: tuple[Tensor, ...],
        dropout: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = outputs(q)
        if sink is not None:
            sink = sink.contiguous()
        view = MaskView(form, mask)
        key = (this, q.get_device(), takes_tf32(dtype), _places(q, k, v, bias, sink, dropout, *mask))
        plan = launch.plans.get(key)
        if plan is None:
            if heads_first:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            groups = launch.takes_group_rows(q, k, view, flags)
            with launch.on_device(q):
                made = launch.forward_plan(launch.planned_call(q, k, v, view, bias, flags, sink, groups))
            plan = launch.plans.keep(key, made)
        if is_current_device(q):
            plan(q, k, v, view, bias, sink, out, lse, dropout)
        else:
            with torch.cuda.device(q.device):
                plan(q, k, v, view, bias, sink, out, lse, dropout)
        return out, lse

    return run


def _forward_of_others(form: MaskForm, flags: Flags, outputs: Outputs, launch: ModuleType) -> DirectForward:
    """That of a class whose tensors the host may first copy."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: tuple[Tensor, ...],
        dropout: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = outputs(q)
        launch.forward(q, k, v, MaskView(form, mask), bias, out, lse, flags, sink, dropout)
        return out, lse

    return run


def backward_pass(
    p: AttentionProblem, mask: MaskView, launch: ModuleType, heads_first: bool = False
) -> DirectBackward | None:
    """The backward pass of a class of calls; arguments as of `forward_pass`, gradients lie as q, k and v."""
    if not (_has_unit_rows(p) and _is_read(p, mask, launch, "backward")):
        return None
    if heads_first and not (_is_short(p, mask, launch, "backward") and _are_contiguous(p)):
        return None
    form, flags, needs_grad, dtype, is_column = mask.form, p.flags, p.needs_grad, p.dtype, p.head_dim_v == 1
    takes_tf32, is_current_device = launch.takes_tf32, launch.is_current_device
    this = _names.find(("backward", p, form), object)

    def run(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        mask: tuple[Tensor, ...],
        dropout: Tensor | None,
    ) -> Gradients:
        if sink is not None:
            sink = sink.contiguous()
        strides = dout.stride()
        if not (strides[3] == 1 or is_column):
            dout = dout.contiguous()
            strides = dout.stride()
        view = MaskView(form, mask)
        places = _places(q, k, v, bias, sink, dropout, *mask, dout, dlse, out, lse)
        of_dlse = None if dlse is None else dlse.stride()
        key = (this, q.get_device(), takes_tf32(dtype), strides, of_dlse, places)
        plan = launch.plans.get(key)
        if plan is None:
            rows = (q, k, v) if not heads_first else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            with launch.on_device(q):
                made = launch.backward_plan(launch.Call(*rows, view, bias, flags, sink), dout, dlse, needs_grad)
            plan = launch.plans.keep(key, made)
        if is_current_device(q):
            found: Gradients = plan(dout, dlse, q, k, v, view, bias, sink, out, lse, dropout)
            return found
        with torch.cuda.device(q.device):
            found = plan(dout, dlse, q, k, v, view, bias, sink, out, lse, dropout)
        return found

    return run


def _is_read(p: AttentionProblem, mask: MaskView, launch: ModuleType, direction: Direction) -> bool:
    """Whether the kernels of a pass read the mask of a class as it is."""
    if p.sequences is not None or not has_pairs(p):
        return False
    if mask.form in ("none", "tiles", "keys"):
        return True
    return _is_short(p, mask, launch, direction)


def _is_short(p: AttentionProblem, mask: MaskView, launch: ModuleType, direction: Direction) -> bool:
    """Whether a pass of a class runs the kernel of short rows."""
    call = launch.ShortCall.described(p)._replace(mask_form=mask.form)
    serves: bool = call.serves_forward() if direction == "forward" else call.serves_backward()
    return serves


def _has_unit_rows(p: AttentionProblem) -> bool:
    rows = ((p.q_strides, p.head_dim), (p.k_strides, p.head_dim), (p.v_strides, p.head_dim_v))
    return all(strides[3] == 1 or dim == 1 for strides, dim in rows)


def _are_contiguous(p: AttentionProblem) -> bool:
    """Whether q, k and v are, as (B, L, H, D): then a tensor like one of them is a gradient in either order of dims."""
    shapes = (
        (p.batch, p.seqlen_q, p.num_heads, p.head_dim),
        (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim),
        (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v),
    )
    strides = (p.q_strides, p.k_strides, p.v_strides)
    return all(tuple(lies) == contiguous_strides(shape) for lies, shape in zip(strides, shapes, strict=True))


def _places(*tensors: Tensor | None) -> tuple[int | None, ...] | None:
    """Where each tensor starts, in bytes behind a multiple of 16; None of tensors that all start on one, as most do."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    return None if bits % 16 == 0 else tuple([None if x is None else x.data_ptr() % 16 for x in tensors])
