"""The launch of the attention kernels: the two entry points, and plans remembered for calls that are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_dmattn.masks.prepared.operators import KeyForm, prepared_view
from flash_dmattn.problem import Flags, Gradients, MaskView, NeedsGrad, heads_as_rows, keys_of_query
from flash_dmattn.remembered import Remembered

from .kernel_launch import is_current_device as is_current_device
from .kernel_launch import on_device as on_device
from .plan import MOST_FEW_KEYS, Call, takes_tf32
from .plan_backward import plan_backward
from .plan_forward import plan_forward
from .plan_short import plan_short_backward, plan_short_forward
from .short_calls import ShortCall


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    sink: Tensor | None = None,
    dropout: Tensor | None = None,
) -> None:
    """Write out (B, Lq, Hq, Dv) and lse (B, Hq, Lq), both contiguous; `mask` as `KernelBackend` has it.

    `sink` is (Hq,); `dropout` the key of a call with dropout.
    """
    q, k, v = unit_rows(q), unit_rows(k), unit_rows(v)
    sink = None if sink is None else sink.contiguous()
    with on_device(q):
        groups = takes_group_rows(q, k, mask, flags)
        if mask.dense is not None and not is_short_forward(q, k, v, mask):
            mask = packed_for_forward(mask.dense, q, k, flags, groups)
        key = ("forward", groups, mask.form, flags, *signature(q, k, v, bias, sink, dropout, *mask.tensors))
        plan = plans.find(key, lambda: forward_plan(planned_call(q, k, v, mask, bias, flags, sink, groups)))
        plan(q, k, v, mask, bias, sink, out, lse, dropout)


def forward_plan(call: Call) -> Callable[..., None]:
    """How a class of calls makes out and lse: run(q, k, v, mask, bias, sink, out, lse, dropout)."""
    is_short = ShortCall.of(call.q, call.k, call.v, call.mask, call.arch).serves_forward()
    return (plan_short_forward if is_short else plan_forward)(call)


def backward_plan(call: Call, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad) -> Callable[..., Gradients]:
    """How a class of calls makes its gradients: run(dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout)."""
    if ShortCall.of(call.q, call.k, call.v, call.mask, call.arch).serves_backward():
        return plan_short_backward(call, dout, dlse, needs_grad)
    plan, flags = plan_backward(call, dout, dlse, needs_grad), call.flags
    if not needs_fp32_delta(call.q.dtype, call.shape.seqlen_k, flags.window, needs_grad):
        return plan
    return lambda dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout: plan(
        dout, dlse, q, k, v, mask, bias, sink, _out_in_fp32(q, k, v, mask, bias, flags, sink, dropout), lse, dropout
    )


def is_short_forward(q: Tensor, k: Tensor, v: Tensor, mask: MaskView) -> bool:
    """Whether the forward pass of a call reads its mask as it is, having rows of one tile."""
    return ShortCall.of(q, k, v, mask).serves_forward()


def is_short_backward(q: Tensor, k: Tensor, v: Tensor, mask: MaskView) -> bool:
    """The same of its backward pass."""
    return ShortCall.of(q, k, v, mask).serves_backward()


# From this many keys on, reading k and v once for a whole group pays.
GROUP_ROWS_FROM = 512


def takes_group_rows(q: Tensor, k: Tensor, mask: MaskView, flags: Flags) -> bool:
    """Whether the one query of each head of a group can be a row of one tile: then k and v are read once for all.

    Not with dropout, which goes by tiles of queries of one head, nor with tiles that were made before: their bits, or
    bounds of keys, know of one query. So it is asked before a bool mask is packed.
    """
    if q.shape[1] != 1 or q.shape[2] == k.shape[2] or k.shape[1] < GROUP_ROWS_FROM:
        return False
    if flags.left >= 0 or flags.dropout_p > 0:
        return False
    if mask.form == "keys":
        return mask.tensors[0].shape[1] != q.shape[2]  # a key set for each query head is not one for each row
    return mask.form != "tiles"


def planned_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None,
    groups: bool,
) -> Call:
    """The call as its forward kernels have it: with `groups` the G heads of a group are G queries of one head.

    Causality says nothing to the last query, nor does a window's right side. A plan is given the tensors as they are.
    """
    if not groups:
        return Call(q, k, v, mask, bias, flags, sink)
    rows = q.unflatten(2, (k.shape[2], -1)).squeeze(1).transpose(1, 2)
    bias = None if bias is None else heads_as_rows(bias, q.shape[2], k.shape[2])
    sink = None if sink is None else sink.view(k.shape[2], -1)
    call = Call(rows, k, v, mask, bias, flags._replace(left=-1, right=-1), sink)
    call.heads_first = True
    return call


def packed_for_forward(bools: Tensor, q: Tensor, k: Tensor, flags: Flags, groups: bool) -> MaskView:
    """A bool mask in the form that a forward pass reads, in which heads of groups may be rows."""
    if not groups:
        return _packed(bools, q.shape[1], k.shape[1], flags)
    heads, heads_k = q.shape[2], k.shape[2]
    rows = heads_as_rows(bools, heads, heads_k)
    return _packed(rows, heads // heads_k, k.shape[1], flags._replace(left=-1, right=-1))


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    needs_grad: NeedsGrad,
    sink: Tensor | None = None,
    dropout: Tensor | None = None,
) -> Gradients:
    """The gradients asked for; every sum is taken in fp32, in a fixed order, and rounded once."""
    sink = None if sink is None else sink.contiguous()
    q, k, v, dout, out, lse = (*(unit_rows(x) for x in (q, k, v, dout)), out.contiguous(), lse.contiguous())
    with on_device(q):
        if mask.dense is not None and not is_short_backward(q, k, v, mask):
            mask = _packed(mask.dense, q.shape[1], k.shape[1], flags)
        key = (
            "backward",
            mask.form,
            needs_grad,
            flags,
            *signature(q, k, v, bias, sink, dropout, dout, dlse, out, lse, *mask.tensors),
        )
        plan = plans.find(key, lambda: backward_plan(Call(q, k, v, mask, bias, flags, sink), dout, dlse, needs_grad))
        return plan(dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout)


def needs_fp32_delta(dtype: torch.dtype, seqlen_k: int, window: tuple[int, int], needs_grad: NeedsGrad) -> bool:
    """Whether delta, which all gradients but dv take, must not come from out in 16 bits.

    A row of few keys does not average out its rounding. Where all keys are few the kernels take delta from p and dp;
    behind a window those lie in several tiles.
    """
    few = keys_of_query(seqlen_k, window) <= MOST_FEW_KEYS < seqlen_k
    return few and dtype != torch.float32 and (needs_grad.q or needs_grad.k or needs_grad.bias)


def _out_in_fp32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None,
    dropout: Tensor | None,
) -> Tensor:
    q, k, v = q.float(), k.float(), v.float()
    batch, seqlen_q, num_heads, _ = q.shape
    out = torch.empty(batch, seqlen_q, num_heads, v.shape[3], device=q.device)
    lse = torch.empty(batch, num_heads, seqlen_q, device=q.device)
    forward(q, k, v, mask, bias, out, lse, flags, sink, dropout)
    return out


# By what decides a launch, of calls with sequences too. A plan must not hold on to the tensors of the call it was made
# for.
plans: Remembered[Callable[..., Any]] = Remembered(4096)


def signature(q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """What decides a launch: device, precision, and shape, strides, dtype and alignment of every tensor."""
    parts = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in (q, *others)]
    return (q.get_device(), takes_tf32(q.dtype), *parts)


def _has_unit_rows(x: Tensor) -> bool:
    return x.stride()[3] == 1 or x.shape[3] == 1  # stride(3) would take twice as long


def unit_rows(x: Tensor) -> Tensor:
    # The kernels read rows of unit stride; the smallest copy that gives them is that of the one tensor.
    return x if _has_unit_rows(x) else x.contiguous()


def _packed(mask: Tensor, seqlen_q: int, seqlen_k: int, flags: Flags) -> MaskView:
    return prepared_view(mask, seqlen_q, seqlen_k, flags.window, KeyForm("keys"))
