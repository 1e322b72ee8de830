"""The passes of `triton` for a class of calls that is described: plans are found by the problem and tensors' places.

What the problem says is looked up in a third of the time that every tensor takes to say it. Masks that are packed or
put in an order first have no pass here, nor have gradients of rows of no unit stride.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...problem import AttentionProblem, Flags, Gradients, MaskForm, MaskView
from ..direct import DirectBackward, DirectForward, Outputs, has_pairs, outputs_of
from ..protocol import Direction


def forward_pass(p: AttentionProblem, mask: MaskView, launch: ModuleType) -> DirectForward | None:
    """The forward pass of a class of calls.

    Args:
        p: of the class.
        mask: of one of its calls; of its tensors, sizes alone count.
        launch: `triton_kernels.launch`.
    """
    if not _is_read(p, mask, launch, "forward"):
        return None
    form, flags, outputs, dtype = mask.form, p.flags, outputs_of(p), p.dtype
    if not _has_unit_rows(p):
        return _forward_of_others(form, flags, outputs, launch)
    takes_tf32, is_current_device = launch.takes_tf32, launch.is_current_device

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
        sink = None if sink is None else sink.contiguous()
        view = MaskView(form, mask)
        key = ("forward", p, form, q.get_device(), takes_tf32(dtype), *_places(q, k, v, bias, sink, dropout, *mask))
        plan = launch.plans.get(key)
        if plan is None:
            with launch.on_device(q):
                made = launch.forward_plan(launch.planned_call(q, k, v, view, bias, flags, sink))
            plan = launch.remembered(launch.plans, key, lambda: made)
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


def backward_pass(p: AttentionProblem, mask: MaskView, launch: ModuleType) -> DirectBackward | None:
    """The backward pass of a class of calls; arguments as of `forward_pass`."""
    if not (_has_unit_rows(p) and _is_read(p, mask, launch, "backward")):
        return None
    form, flags, needs_grad, dtype, is_column = mask.form, p.flags, p.needs_grad, p.dtype, p.head_dim_v == 1
    takes_tf32, is_current_device = launch.takes_tf32, launch.is_current_device

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
        sink = None if sink is None else sink.contiguous()
        strides = dout.stride()
        if not (strides[3] == 1 or is_column):
            dout = dout.contiguous()
            strides = dout.stride()
        view = MaskView(form, mask)
        places = _places(q, k, v, bias, sink, dropout, *mask, dout, dlse, out, lse)
        of_dlse = None if dlse is None else dlse.stride()
        key = ("backward", p, form, q.get_device(), takes_tf32(dtype), strides, of_dlse, *places)
        plan = launch.plans.get(key)
        if plan is None:
            with launch.on_device(q):
                made = launch.backward_plan(launch.Call(q, k, v, view, bias, flags, sink), dout, dlse, needs_grad)
            plan = launch.remembered(launch.plans, key, lambda: made)
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
    call = launch.ShortCall.described(p)._replace(mask_form=mask.form)
    serves: bool = call.serves_forward() if direction == "forward" else call.serves_backward()
    return serves


def _has_unit_rows(p: AttentionProblem) -> bool:
    rows = ((p.q_strides, p.head_dim), (p.k_strides, p.head_dim), (p.v_strides, p.head_dim_v))
    return all(strides[3] == 1 or dim == 1 for strides, dim in rows)


def _places(*tensors: Tensor | None) -> tuple[int | None, ...]:
    return tuple([None if x is None else x.data_ptr() % 16 for x in tensors])
