"""The two entry points of dense calls, forward and backward, and the table of launch plans for calls that are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_dmattn.masks.prepared.operators import prepared_view
from flash_dmattn.problem import Flags, Gradients, MaskChoice, MaskView, NeedsGrad, heads_as_rows, keys_of_query
from flash_dmattn.remembered import Remembered

from .kernel_launch import is_current_device as is_current_device
from .kernel_launch import on_device as on_device
from .plan import MOST_FEW_KEYS, Call, takes_tf32
from .plan_backward import plan_backward
from .plan_forward import plan_forward
from .plan_short import plan_short_backward, plan_short_forward
from .preferred_tiles import on_change
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
    """Write out (B, Lq, Hq, Dv) and lse (B, Hq, Lq), both contiguous.

    `sink` is (Hq,). `dropout` is the dropout key, None without dropout.
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
    """Plan out and lse of one class of calls: run(q, k, v, mask, bias, sink, out, lse, dropout)."""
    is_short = not call.flags.outside and ShortCall.of(call.q, call.k, call.v, call.mask, call.arch).serves_forward()
    return (plan_short_forward if is_short else plan_forward)(call)


def backward_plan(call: Call, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad) -> Callable[..., Gradients]:
    """Plan the gradients of one class of calls: run(dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout)."""
    if not call.flags.outside and ShortCall.of(call.q, call.k, call.v, call.mask, call.arch).serves_backward():
        return plan_short_backward(call, dout, dlse, needs_grad)
    plan, flags = plan_backward(call, dout, dlse, needs_grad), call.flags
    if not needs_fp32_delta(call.q.dtype, call.shape.seqlen_k, flags.window, needs_grad):
        return plan
    return lambda dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout: plan(
        dout, dlse, q, k, v, mask, bias, sink, _out_in_fp32(q, k, v, mask, bias, flags, sink, dropout), lse, dropout
    )


def is_short_forward(q: Tensor, k: Tensor, v: Tensor, mask: MaskView) -> bool:
    """Return whether the forward pass takes the kernel of short rows, which reads a bool mask as it is."""
    return ShortCall.of(q, k, v, mask).serves_forward()


def is_short_backward(q: Tensor, k: Tensor, v: Tensor, mask: MaskView) -> bool:
    """Return whether the backward pass takes the kernel of short rows."""
    return ShortCall.of(q, k, v, mask).serves_backward()


# From this many keys on, reading k and v once for a whole group pays.
GROUP_ROWS_FROM = 512


def takes_group_rows(q: Tensor, k: Tensor, mask: MaskView, flags: Flags) -> bool:
    """Return whether the heads of a group, with one query each, become rows of one tile, which reads k and v once.

    Dropout forbids it, because its random numbers go by tiles of queries of one head. A bias by distance forbids it,
    because rows of one query have one distance to a key. A mask that is already packed for one query forbids it too, so
    this is decided before a bool mask is packed.
    """
    if q.shape[1] != 1 or q.shape[2] == k.shape[2] or k.shape[1] < GROUP_ROWS_FROM:
        return False
    if flags.left >= 0 or flags.dropout_p > 0 or flags.outside:
        return False
    if mask.form == "keys":
        return mask.tensors[0].shape[1] != q.shape[2]  # rows of one tile share one set of keys
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
    """Describe the call to its forward kernels; with `groups` the G heads of a group are G queries of one head.

    The one query is the last, which causality and the right side of a window do not limit, so these are dropped. The
    plan itself runs on the tensors as the caller has them.
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
    """Pack a bool mask for a forward pass; with `groups` the heads of a group are its rows."""
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
    """Compute the requested gradients; every sum is taken in fp32, in a fixed order, and rounded once."""
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
    """Return whether delta, which all gradients but dv read, has to be computed from out in fp32.

    A row of few keys does not average out the rounding of out to 16 bits. If a call has few keys, its kernels take
    delta from p and dp. If only a window leaves few keys to each query, these lie in several tiles, and out is computed
    again in fp32.
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


# Plans of calls with and without sequences, keyed by everything that decides a launch. A plan must not keep references
# to the tensors of the call that it was made for.
plans: Remembered[Callable[..., Any]] = Remembered(4096)
on_change.append(plans.clear)


def signature(q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return all that decides a launch: device, precision, and shape, strides, dtype and alignment of every tensor."""
    parts = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in (q, *others)]
    return (q.get_device(), takes_tf32(q.dtype), *parts)


def _has_unit_rows(x: Tensor) -> bool:
    return x.stride()[3] == 1 or x.shape[3] == 1  # stride(3) would take twice as long


def unit_rows(x: Tensor) -> Tensor:
    # The kernels read rows of unit stride. Only a tensor without them is copied.
    return x if _has_unit_rows(x) else x.contiguous()


def _packed(mask: Tensor, seqlen_q: int, seqlen_k: int, flags: Flags) -> MaskView:
    return prepared_view(mask, seqlen_q, seqlen_k, flags.window, MaskChoice("keys"))
