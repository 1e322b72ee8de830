"""`torch.library` operators of the kernel backends: one forward/backward pair each, one schema, one fake.

Operators are declared with `Library.define` and `impl`, and differentiated by the one `autograd.Function` in
`flash_dmattn.autograd` around them: measured at less than half the cost of `custom_op` + `register_autograd`. Programs
of `torch.export` have the operators alone, which are differentiated by `register_autograd`: see `exported.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from . import flops
from .definition import is_watched
from .problem import AttentionProblem, Flags, Gradients, MaskForm, MaskView, NeedsGrad, SequenceView

_LIBRARY = torch.library.Library("flash_dmattn", "DEF")

# `Flags`, one by one; `mask` and `mask_form` are the fields of a `MaskView`.
_FLAGS = (
    "int left, int right, float softmax_scale, float softcap, bool deterministic, "
    "SymInt mask_repeat, SymInt bias_repeat, str layout, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "str mask_packing, str bias_packing, float dropout_p, bool one_mask_row"
)
# `sequences` are the tensors of a `SequenceView`; none of a dense call. `dropout` is the key of dropout, int64 (2,).
# A list without tensors is None: AOTInductor has none to pass that is empty.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor[]? mask, str mask_form, Tensor? bias, Tensor? sink, Tensor[]? sequences, "
    "Tensor? dropout"
)
# `backward` is the backend of the backward pass where that is another, else "": see `AttentionProblem`.
FORWARD_SCHEMA = f"({_INPUTS}, {_FLAGS}, str backward) -> (Tensor out, Tensor lse)"
# A list holds the gradients asked for and no others: an operator cannot return None under torch.compile.
BACKWARD_SCHEMA = (
    f"(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_FLAGS}, bool[5] needs_grad) -> Tensor[]"
)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised (out, lse) as every backend returns them: contiguous, lse fp32 (fp64 for fp64)."""
    batch, seqlen_q, num_heads, _ = q.shape
    dtype, device = q.dtype, q.device
    # Sizes one by one: torch takes a third longer to read them from a tuple.
    out = torch.empty(batch, seqlen_q, num_heads, v.shape[3], dtype=dtype, device=device)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return out, torch.empty(batch, num_heads, seqlen_q, dtype=lse_dtype, device=device)


def empty_gradient(x: Tensor) -> Tensor:
    """An uninitialised gradient as every backend returns it: x's shape and dtype, contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_gradients(tensors: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> list[Tensor]:
    """Those of q, k, v, bias and sink that are asked for, as an operator returns them."""
    return [empty_gradient(x) for x, needed in zip(tensors, needs_grad, strict=True) if needed and x is not None]


def fill_empty(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and lse of rows without keys: zeros, and the sink of each head, -inf without one."""
    return out.zero_(), lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[:, None])


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor] | None,
    mask_form: MaskForm,
    bias: Tensor | None,
    sink: Tensor | None,
    sequences: list[Tensor] | None,
    dropout: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *flags_and_need: Any,
) -> list[Tensor]:
    return empty_gradients((q, k, v, bias, sink), flags_and_need[-1])


def _one_by_one(operator: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Any, Any]]:
    """The rule of `torch.func.vmap` in a graph, where autograd's, which maps both passes at once, is not asked."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        def at(x: Any, dim: Any, index: int) -> Any:
            if isinstance(dim, (list, tuple)):
                return [at(one, d, index) for one, d in zip(x, dim, strict=True)]
            return x if dim is None else x.select(dim, index)

        each = [
            operator(*(at(x, dim, index) for x, dim in zip(arguments, in_dims, strict=True)))
            for index in range(info.batch_size)
        ]
        return tuple(torch.stack(x) for x in zip(*each, strict=True)), (0, 0)

    return rule


# What runs a pass: forward(q, k, v, mask, bias, flags) -> (out, lse), and
# backward(dout, dlse, q, k, v, mask, bias, out, lse, flags, needs_grad) -> gradients.
# Calls with a sink, and only those, pass it on as one more argument, sink=; so those with sequences, sequences=, and
# those with dropout its key, dropout=.
Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients]


# How a forward operator is differentiated that stands alone: `save`, called with the name of its backend before the
# arguments of a `setup_context`, and `differentiate`. `flash_dmattn.exported`, which knows all backends, sets both.
derivative: dict[str, Callable[..., Any]] = {}


def _differentiate(name: str) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        derivative["save"](name, ctx, inputs, output)

    def differentiate(ctx: Any, *gradients: Tensor | None) -> Any:
        return derivative["differentiate"](ctx, *gradients)

    torch.library.register_autograd(f"flash_dmattn::{name}_forward", differentiate, setup_context=save, lib=_LIBRARY)


def define_pair(
    name: str, forward: Forward, backward: Backward
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Gradients]]:
    """Register `<name>_forward` and `<name>_backward`; return the pair as `KernelBackend` methods that call them.

    Args:
        name: of the backend.
        forward: run by the operator, called as forward(q, k, v, mask, bias, flags) with a `MaskView` and `Flags`.
        backward: called as backward(dout, dlse, q, k, v, mask, bias, out, lse, flags, needs_grad) with a `NeedsGrad`.

    A pair that lists "sink" in its FEATURES is called with one more argument, sink (Hq,), where a call has one; its
    backward returns dsink as a fifth gradient then. One that lists "sequences" is called with sequences=, a
    `SequenceView`, where a call has them, and one that lists "dropout_p" with dropout=, the key of a call with dropout.
    The backward of one with `STORES_DBIAS` is called with dbias_out= where dbias has a place; where it does not write
    there, what it returns is copied.
    """
    return define_forward(name, forward), define_backward(name, backward)


def define_forward(name: str, forward: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register `<name>_forward` alone; return the `KernelBackend` method that calls it."""

    def operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: list[Tensor] | None,
        mask_form: MaskForm,
        bias: Tensor | None,
        sink: Tensor | None,
        sequences: list[Tensor] | None,
        dropout: Tensor | None,
        *flags_and_backward: Any,
    ) -> tuple[Tensor, Tensor]:
        *flags, _ = flags_and_backward  # the backend of the backward pass concerns the derivative alone
        rest = extra_arguments(sink, view_of(sequences), dropout)
        return forward(q, k, v, MaskView(mask_form, tuple(mask or ())), bias, Flags(*flags), **rest)

    _LIBRARY.define(f"{name}_forward{FORWARD_SCHEMA}")
    _LIBRARY.impl(f"{name}_forward", operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_dmattn::{name}_forward", _forward_fake, lib=_LIBRARY)
    forward_op = flops.register(getattr(torch.ops.flash_dmattn, f"{name}_forward"), flops.forward_flop)
    _differentiate(name)
    torch.library.register_vmap(f"flash_dmattn::{name}_forward", _one_by_one(forward_op), lib=_LIBRARY)

    def run_forward(
        problem: AttentionProblem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        sink: Tensor | None = None,
        sequences: SequenceView | None = None,
        dropout: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # On meta tensors the operator runs its fake implementation: shapes without values. A profiler shows what goes
        # through the dispatcher; asked here and not by `is_watched`, so that what is remembered of a call stays so.
        where = () if sequences is None else sequences.tensors
        watched = is_watched(q, k, v, bias, sink, dropout, *mask.tensors, *where)
        if watched or problem.device == "meta" or profiler._is_profiler_enabled:
            inputs = (q, k, v, list(mask.tensors) or None, mask.form, bias, sink, list(where) or None, dropout)
            out, lse = forward_op(*inputs, *problem.flags, problem.backward)
            return out, lse
        if sequences is not None or dropout is not None:
            rest = extra_arguments(sink, sequences, dropout)
            return forward(q, k, v, mask, bias, problem.flags, **rest)
        if sink is not None:
            return forward(q, k, v, mask, bias, problem.flags, sink=sink)
        return forward(q, k, v, mask, bias, problem.flags)

    return run_forward


def define_backward(name: str, backward: Backward) -> Callable[..., Gradients]:
    """Register `<name>_backward` alone; return the `KernelBackend` method that calls it."""

    def operator(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: list[Tensor] | None,
        mask_form: MaskForm,
        bias: Tensor | None,
        sink: Tensor | None,
        sequences: list[Tensor] | None,
        dropout: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *flags_and_need: Any,
    ) -> list[Tensor]:
        *flags, needs_grad = flags_and_need
        view = MaskView(mask_form, tuple(mask or ()))
        numbers = (Flags(*flags), NeedsGrad(*needs_grad))
        rest = extra_arguments(sink, view_of(sequences), dropout)
        gradients = backward(dout, dlse, q, k, v, view, bias, out, lse, *numbers, **rest)
        return [gradient for gradient in gradients if gradient is not None]

    _LIBRARY.define(f"{name}_backward{BACKWARD_SCHEMA}")
    _LIBRARY.impl(f"{name}_backward", operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_dmattn::{name}_backward", _backward_fake, lib=_LIBRARY)
    backward_op = flops.register(getattr(torch.ops.flash_dmattn, f"{name}_backward"), flops.backward_flop)

    def run_backward(
        problem: AttentionProblem,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sink: Tensor | None = None,
        sequences: SequenceView | None = None,
        dropout: Tensor | None = None,
        dbias_out: Tensor | None = None,
    ) -> Gradients:
        flags, needs_grad = problem.flags, problem.needs_grad
        where = () if sequences is None else sequences.tensors
        watched = is_watched(dout, dlse, q, k, v, bias, sink, dropout, out, lse, *mask.tensors, *where)
        # The operator returns a dbias of its own: a profiler is shown kernels alone, and not a copy besides.
        profiled = profiler._is_profiler_enabled and dbias_out is None
        if watched or problem.device == "meta" or profiled:
            inputs = (q, k, v, list(mask.tensors) or None, mask.form, bias, sink, list(where) or None, dropout)
            gradients = spread(backward_op(dout, dlse, *inputs, out, lse, *flags, list(needs_grad)), needs_grad)
            return gradients if dbias_out is None else with_dbias(gradients, dbias_out)
        rest = extra_arguments(sink, sequences, dropout)
        if dbias_out is not None:
            found = backward(dout, dlse, q, k, v, mask, bias, out, lse, flags, needs_grad, dbias_out=dbias_out, **rest)
            return with_dbias(found, dbias_out)
        return backward(dout, dlse, q, k, v, mask, bias, out, lse, flags, needs_grad, **rest)

    return run_backward


def extra_arguments(
    sink: Tensor | None, sequences: SequenceView | None, dropout: Tensor | None = None
) -> dict[str, Any]:
    """What passes a sink, sequences and the key of dropout on: a backend without them is never called with them."""
    arguments: dict[str, Any] = {} if sink is None else {"sink": sink}
    if sequences is not None:
        arguments["sequences"] = sequences
    if dropout is not None:
        arguments["dropout"] = dropout
    return arguments


def with_dbias(gradients: Gradients, dbias_out: Tensor) -> Gradients:
    """The same gradients with dbias in the tensor that was given for it, where it may be already."""
    dq, dk, dv, dbias, *rest = gradients
    if dbias is not None and dbias is not dbias_out:
        dbias = dbias_out.copy_(dbias)
    return (dq, dk, dv, dbias, *rest)


def view_of(sequences: Sequence[Tensor] | None) -> SequenceView | None:
    """A `SequenceView` of its tensors, or None of none."""
    return SequenceView(*sequences) if sequences else None


def spread(gradients: list[Tensor], needs_grad: NeedsGrad) -> Gradients:
    """Put the gradients asked for in their places among (dq, dk, dv, dbias, dsink)."""
    rest = iter(gradients)
    return tuple(next(rest) if needed else None for needed in needs_grad)
