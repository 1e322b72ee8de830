"""Launch plans of classes of calls, the cache of plans, and calls that have no planned pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_dmattn.caches import ClockCache
from flash_dmattn.masks.prepared.operators import prepared_view
from flash_dmattn.problem import Flags, Gradients, MaskChoice, MaskView, NeedsGrad, heads_as_rows, keys_of_query
from flash_dmattn.problem.inputs import Inputs, Saved, in_rows
from flash_dmattn.reference.entropy import NOTHING_SENT, SentEntropy

from . import plan_sequences
from .kernel_launch import on_device
from .kernel_launch import run_on as run_on
from .plan import MOST_FEW_KEYS, Call
from .plan_backward import plan_backward, plan_key_sums
from .plan_forward import SPAN as SPAN
from .plan_forward import plan_forward
from .plan_sequences import SequenceCall
from .plan_short import plan_short_backward, plan_short_forward
from .preferred_tiles import on_change
from .short_calls import ShortCall

# More keys than any call has.
EVERY_LENGTH = 2**31


def forward(x: Inputs, out: Tensor, lse: Tensor, *rows: Tensor, flags: Flags) -> None:
    """Write out (B, Lq, Hq, Dv) and lse (B, Hq, Lq), both contiguous, of a call whose pass is not planned.

    `rows` are like lse: the largest scores and the entropies, where the flags ask for them.
    """
    x = readable(x)
    with on_device(x.q):
        if x.mask.dense is not None and x.sequences is None and not _short(x).serves_forward():
            x = x._replace(mask=_packed(x.mask.dense, x.q.shape[1], x.k.shape[1], flags))
        key = ("forward", x.mask.form, flags, *signature(*tensors_of(x)))
        plans.get_or_make(key, lambda: forward_plan(planned_call(x, flags)))(x, out, lse, *rows)


def forward_plan(call: Call) -> Callable[..., None]:
    """Plan the results of one class of calls: run(x, out, lse, *rows), `rows` as for `forward`."""
    if isinstance(call, plan_sequences.SequenceCall):
        return plan_sequences.plan_forward(call)
    is_short = _may_be_short(call) and ShortCall.of(call.q, call.k, call.v, call.mask, call.arch).serves_forward()
    return (plan_short_forward if is_short else plan_forward)(call)


def _may_be_short(call: Call) -> bool:
    return not (call.flags.outside or call.invariant)


def backward_plan(call: Call, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad) -> Callable[..., Gradients]:
    """Plan the gradients of one class of calls: run(saved, dout, dlse, sent), `sent` as for `backward`."""
    flags = call.flags
    if flags.sums:
        return plan_key_sums(call, dout)
    if isinstance(call, plan_sequences.SequenceCall):
        plan = plan_sequences.plan_backward(call, dout, dlse, needs_grad)
    elif _may_be_short(call) and ShortCall.of(call.q, call.k, call.v, call.mask, call.arch).serves_backward():
        return plan_short_backward(call, dout, dlse, needs_grad)
    else:
        plan = plan_backward(call, dout, dlse, needs_grad)
    # By the window alone where a row must not depend on the number of keys.
    seqlen_k = EVERY_LENGTH if call.invariant else call.shape.seqlen_k
    if not needs_fp32_delta(call.q.dtype, seqlen_k, flags.window, needs_grad):
        return plan
    return lambda saved, *sent: plan(_with_out_in_fp32(saved, flags), *sent)


def _short(x: Inputs) -> ShortCall:
    return ShortCall.of(x.q, x.k, x.v, x.mask)


def planned_call(x: Inputs, flags: Flags, groups: bool = False) -> Call:
    """Describe a call to its kernels; with `groups` the G heads of a group are G queries of one head.

    Causality and the right side of a window do not limit the one query, because it is the last, so these are dropped.
    The plan itself runs on the tensors as the caller has them.
    """
    q, k, v, mask, bias, sink, sequences, _ = x
    if sequences is not None:
        rows = [in_rows(t, "tokens") for t in (q, k, v)]
        return SequenceCall(*rows, mask, bias, flags, sink, sequences)
    if not groups:
        return Call(q, k, v, mask, bias, flags, sink)
    rows = q.unflatten(2, (k.shape[2], -1)).squeeze(1).transpose(1, 2)
    bias = None if bias is None else heads_as_rows(bias, q.shape[2], k.shape[2])
    sink = None if sink is None else sink.view(k.shape[2], -1)
    call = Call(rows, k, v, mask, bias, flags._replace(left=-1, right=-1), sink)
    call.heads_first = True
    return call


def packed_for_group_rows(bools: Tensor, q: Tensor, k: Tensor, flags: Flags) -> MaskView:
    """Pack a bool mask for a forward pass whose heads of a group are rows."""
    heads, heads_k = q.shape[2], k.shape[2]
    rows = heads_as_rows(bools, heads, heads_k)
    return _packed(rows, heads // heads_k, k.shape[1], flags._replace(left=-1, right=-1))


def backward(
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    flags: Flags,
    needs_grad: NeedsGrad,
    sent: SentEntropy = NOTHING_SENT,
) -> Gradients:
    """Compute the requested gradients of a call whose pass is not planned.

    With the gradient of entropies in `sent`, dlse is the one that `joined_gradients` makes.
    """
    x, out, lse = saved
    x, dout, out, lse = readable(x), unit_rows(dout), out.contiguous(), lse.contiguous()
    with on_device(x.q):
        if x.mask.dense is not None and x.sequences is None and not _short(x).serves_backward():
            x = x._replace(mask=_packed(x.mask.dense, x.q.shape[1], x.k.shape[1], flags))
        tensors = (*tensors_of(x), dout, dlse, out, lse, sent.gradient)
        key = ("backward", x.mask.form, needs_grad, flags, *signature(*tensors))
        plan = plans.get_or_make(key, lambda: backward_plan(planned_call(x, flags), dout, dlse, needs_grad))
        return plan(Saved(x, out, lse), dout, dlse, sent)


def needs_fp32_delta(dtype: torch.dtype, seqlen_k: int, window: tuple[int, int], needs_grad: NeedsGrad) -> bool:
    """Return whether delta, which all gradients but dv need, has to be computed from out in fp32.

    In a short row the rounding of out to 16 bits does not average out. If all rows of a call are short, its kernels
    compute delta from p and dp. If rows are short because of a window, their keys are in several tiles, and out is
    computed again in fp32.
    """
    few = keys_of_query(seqlen_k, window) <= MOST_FEW_KEYS < seqlen_k
    return few and dtype != torch.float32 and (needs_grad.q or needs_grad.k or needs_grad.bias)


def _with_out_in_fp32(saved: Saved, flags: Flags) -> Saved:
    x = saved.inputs
    q, k, v = x.q.float(), x.k.float(), x.v.float()
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    flags = flags._replace(max_scores=False, entropy=False)
    forward(x._replace(q=q, k=k, v=v), out, torch.empty_like(saved.lse), flags=flags)
    return saved._replace(out=out)


# Plans of calls with and without sequences, by all properties that decide a launch. A plan must not keep references to
# the tensors of the call that it was made for.
plans: ClockCache[Callable[..., Any]] = ClockCache(4096)
on_change.append(plans.clear)


def signature(q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return what decides a launch: the device, and shape, strides, dtype and alignment of each tensor."""
    parts = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in (q, *others)]
    return (q.get_device(), *parts)


def tensors_of(x: Inputs) -> tuple[Any, ...]:
    q, k, v, mask, bias, sink, sequences, dropout = x
    return (q, k, v, bias, sink, dropout, *mask.tensors, *(sequences or ()))


def unit_rows(x: Tensor) -> Tensor:
    """Return a tensor with rows of unit stride, which the kernels read: itself, or a copy."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()  # stride(-1) would take twice as long


def readable(x: Inputs) -> Inputs:
    """Return a call with rows of unit stride and a contiguous sink."""
    q, k, v, mask, bias, sink, *rest = x
    sink = None if sink is None else sink.contiguous()
    return Inputs(unit_rows(q), unit_rows(k), unit_rows(v), mask, bias, sink, *rest)


def _packed(mask: Tensor, seqlen_q: int, seqlen_k: int, flags: Flags) -> MaskView:
    return prepared_view(mask, seqlen_q, seqlen_k, flags.window, MaskChoice("keys"))
