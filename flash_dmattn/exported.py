"""Derivatives of operators that stand alone, as in a program of `torch.export`, without an `autograd.Function` around.

A call of `attention` never comes here: its operators run below autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from . import operators
from .autograd import Attention, AttentionBackward, Passes
from .dispatch.registry import BACKENDS
from .dispatch.selection import select_backward
from .operators import spread, view_of
from .problem import (
    AttentionProblem,
    Flags,
    MaskForm,
    NeedsGrad,
    SequenceSpec,
    SequenceView,
    TensorSpec,
    device_arch,
    spec_of,
    unpacked_spec,
)

_INPUTS = 9  # of the schemas, from q to the key of dropout
_FLAGS = len(Flags._fields)


def described(inputs: Sequence[Any], flags: Flags, needs_grad: NeedsGrad, backward: str = "") -> AttentionProblem:
    """The problem of a call, from what its operator received.

    Args:
        inputs: q, k, v, mask, mask_form, bias, sink, sequences and dropout of the schema.
        flags: the others.
        needs_grad: the gradients that are wanted.
        backward: the backend that the call has for its backward pass.
    """
    q, k, v, mask, form, bias, sink, sequences, _ = inputs
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_k, head_dim_v = v.shape[1:]
    where = view_of(sequences)
    spec = None if where is None else _sequences(q, k, where, flags)
    if spec is not None:
        batch, seqlen_q, seqlen_k = spec.number, spec.max_seqlen_q, spec.max_seqlen_k
    left, right = flags.window
    is_causal = right == 0
    return AttentionProblem(
        q.device.type,
        device_arch(q.device),
        q.dtype,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_heads_k,
        int(head_dim),
        int(head_dim_v),
        q.stride(),
        k.stride(),
        v.stride(),
        _mask_spec(form, mask, seqlen_q, seqlen_k, spec),
        form,
        None if bias is None else spec_of(bias),
        is_causal,
        (left, -1 if is_causal else right),
        flags,
        False,
        False,
        needs_grad,
        None if sink is None else sink.dtype,
        spec,
        backward,
    )


def _sequences(q: Tensor, k: Tensor, where: SequenceView, flags: Flags) -> SequenceSpec:
    table, page_size, rows_k = where.block_table, 0, k.shape[1]
    if table is not None:
        page_size = k.shape[1]
        rows_k = table.shape[1] * page_size if k.shape[0] > 0 else 0
    number, bounds = where.bounds.shape[0], (flags.max_seqlen_q, flags.max_seqlen_k)
    return SequenceSpec(flags.layout, number, q.shape[1], rows_k, *bounds, page_size=page_size)


def _mask_spec(
    form: MaskForm, tensors: list[Tensor], seqlen_q: int, seqlen_k: int, spec: SequenceSpec | None
) -> TensorSpec | None:
    if form == "none":
        return None
    if form == "dense":
        return spec_of(tensors[0])
    if spec is None:
        from .masks.saved import restore  # importing flash_dmattn does not need it

        # The band of the problem applies to every form, so that this one need not know it.
        return unpacked_spec(restore(form, seqlen_q, seqlen_k, False, (-1, -1), *tensors).shape)  # type: ignore[arg-type]
    if form == "tree":
        number, tokens, _ = tensors[0].shape
        return unpacked_spec((number, 1, tokens, tokens))
    return unpacked_spec(spec.shape_of_tiles(tensors[0].shape[1]))


def _passes(name: str, problem: AttentionProblem, inputs: Sequence[Any], backward: str) -> Passes:
    """What the `autograd.Function` of a call would have had."""
    form, sequences, dropout = inputs[4], inputs[7], inputs[8]
    chosen = select_backward(problem, backward)
    # The operator is the forward pass; nothing here asks for another, and one may have been unregistered since.
    forward = cast(Any, BACKENDS.get(name, chosen))
    return Passes(problem, forward, chosen, form, "auto", len(sequences), dropout is not None)


def _tensors(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Those of a call that take no gradient, as `Passes.split` has them."""
    mask, sequences, dropout = inputs[3], inputs[7], inputs[8]
    return (*mask, *sequences, *(() if dropout is None else (dropout,)))


def _placed(numbers: tuple[int, int], gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients of q, k, v, bias and sink where the schema has these, and none of the other inputs.

    Args:
        numbers: of the tensors in the lists of the mask and of the sequences.
        gradients: the five.
    """
    dq, dk, dv, dbias, dsink = gradients
    mask, sequences = ([None] * number for number in numbers)
    return dq, dk, dv, mask, None, dbias, dsink, sequences, None


def save_forward(name: str, ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass of a forward operator reads, and choose its backend."""
    call, flags = inputs[:_INPUTS], Flags(*inputs[_INPUTS : _INPUTS + _FLAGS])
    q, k, v, mask, _, bias, sink, sequences, _ = call
    needs_grad = NeedsGrad(*(x is not None and x.requires_grad for x in (q, k, v, bias, sink)))
    problem = described(call, flags, needs_grad)
    passes = _passes(name, problem, call, inputs[-1] or name)
    Attention.setup_context(ctx, (q, k, v, bias, sink, passes, *_tensors(call)), output)
    ctx.numbers = len(mask), len(sequences)


def differentiate_forward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of what a forward operator received."""
    gradients = Attention.backward(ctx, dout, dlse)[: len(NeedsGrad._fields)]
    return (*_placed(ctx.numbers, gradients), *(None,) * (_FLAGS + 1))


def save_backward(name: str, ctx: Any, inputs: Sequence[Any], output: list[Tensor]) -> None:
    """Keep what the derivative of a backward operator reads."""
    dout, dlse, *rest = inputs
    call, (out, lse), (*flags, needs_grad) = rest[:_INPUTS], rest[_INPUTS : _INPUTS + 2], rest[_INPUTS + 2 :]
    q, k, v, mask, _, bias, sink, sequences, _ = call
    passes = _passes(name, described(call, Flags(*flags), NeedsGrad(*needs_grad)), call, name)
    arguments = (dout, dlse, q, k, v, bias, sink, out, lse, passes, *_tensors(call))
    AttentionBackward.setup_context(ctx, arguments, ())
    ctx.numbers = len(mask), len(sequences)


def differentiate_backward(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    """The gradients of what a backward operator received; refused where its backend has no second derivative."""
    needs_grad = ctx.passes.problem.needs_grad
    ddout, ddlse, *gradients = AttentionBackward.backward(ctx, *spread(cotangents, needs_grad))
    placed = _placed(ctx.numbers, gradients[: len(needs_grad)])
    return (ddout, ddlse, *placed, None, None, *(None,) * (_FLAGS + 1))


operators.derivatives.update(
    forward=(save_forward, differentiate_forward), backward=(save_backward, differentiate_backward)
)
