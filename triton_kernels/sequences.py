"""The two entry points of calls with sequences; launch plans share the table of `launch.py`."""

from __future__ import annotations

from torch import Tensor

from flash_dmattn.problem import Flags, Gradients, MaskView, NeedsGrad, SequenceView

from . import launch
from .kernel_launch import on_device
from .plan_sequences import SequenceCall, plan_backward, plan_forward


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    sink: Tensor | None,
    sequences: SequenceView,
    dropout: Tensor | None = None,
) -> None:
    """Write out and lse of all rows; there is at least one sequence and one row."""
    q, k, v = (launch.unit_rows(x) for x in (q, k, v))
    sink = None if sink is None else sink.contiguous()
    with on_device(q):
        inputs = (q, k, v, bias, sink, dropout, *sequences, *mask.tensors)
        key = ("forward sequences", mask.form, flags, *launch.signature(*inputs))
        plan = launch.plans.find(
            key, lambda: plan_forward(SequenceCall(q, k, v, mask, bias, flags, sink, sequences), out)
        )
        plan(q, k, v, mask, bias, sink, out, lse, sequences, dropout)


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
    sink: Tensor | None,
    sequences: SequenceView,
    dropout: Tensor | None = None,
) -> Gradients:
    """Compute the requested gradients; every sum is taken in fp32, in a fixed order, and rounded once."""
    sink = None if sink is None else sink.contiguous()
    q, k, v, dout = (launch.unit_rows(x) for x in (q, k, v, dout))
    out, lse = out.contiguous(), lse.contiguous()
    if launch.needs_fp32_delta(q.dtype, flags.max_seqlen_k, flags.window, needs_grad):
        out = _out_in_fp32(q, k, v, mask, bias, lse, flags, sink, sequences, dropout)
    with on_device(q):
        inputs = (q, k, v, bias, sink, dropout, dout, dlse, out, lse, *sequences, *mask.tensors)
        key = ("backward sequences", mask.form, needs_grad, flags, *launch.signature(*inputs))
        plan = launch.plans.find(
            key,
            lambda: plan_backward(SequenceCall(q, k, v, mask, bias, flags, sink, sequences), dout, dlse, needs_grad),
        )
        return plan(dout, dlse, q, k, v, mask, bias, sink, out, lse, sequences, dropout)


def _out_in_fp32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    lse: Tensor,
    flags: Flags,
    sink: Tensor | None,
    sequences: SequenceView,
    dropout: Tensor | None,
) -> Tensor:
    q, k, v = q.float(), k.float(), v.float()
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    forward(q, k, v, mask, bias, out, lse.new_empty(lse.shape), flags, sink, sequences, dropout)
    return out
