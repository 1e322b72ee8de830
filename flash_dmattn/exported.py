"""Gradients of operators that stand alone, as in a program of `torch.export`, without an `autograd.Function` around.

A call of `attention` never comes here: its operators run below autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import operators
from .autograd import Attention, Passes
from .dispatch.mask_view import readable_view
from .dispatch.selection import select_backward
from .operators import view_of
from .problem import (
    AttentionProblem,
    Flags,
    MaskForm,
    MaskView,
    NeedsGrad,
    SequenceSpec,
    SequenceView,
    TensorSpec,
    device_arch,
    spec_of,
    unpacked_spec,
)

_INPUTS = 9  # of the schemas, from q to the key of dropout


def described(inputs: Sequence[Any], flags: Flags, needs_grad: NeedsGrad) -> AttentionProblem:
    """The problem of a call, from what its operator received.

    Args:
        inputs: q, k, v, mask, mask_form, bias, sink, sequences and dropout of the schema.
        flags: the others.
        needs_grad: the gradients that are wanted.
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
    )


def _sequences(q: Tensor, k: Tensor, where: SequenceView, flags: Flags) -> SequenceSpec:
    table, page_size, rows_k = where.block_table, 0, k.shape[1]
    if table is not None:
        page_size = k.shape[1]
        rows_k = table.shape[1] * page_size if k.shape[0] > 0 else 0
    number, bounds = where.bounds.shape[0], (flags.max_seqlen_q, flags.max_seqlen_k)
    return SequenceSpec(flags.layout, number, q.shape[1], rows_k, *bounds, page_size=page_size)


def _mask_spec(
    form: MaskForm, tensors: list[Tensor] | None, seqlen_q: int, seqlen_k: int, spec: SequenceSpec | None
) -> TensorSpec | None:
    if tensors is None or form == "none":
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


def save(name: str, ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    """Choose the backend of the backward pass, and keep what it reads.

    Args:
        name: of the backend whose forward operator ran.
        ctx, inputs, output: as of a `setup_context`.
    """
    call, flags, backward = inputs[:_INPUTS], Flags(*inputs[_INPUTS:-1]), inputs[-1]
    q, k, v, mask, form, bias, sink, sequences, dropout = call
    tables = sequences or ()
    needs_grad = NeedsGrad(*(x is not None and x.requires_grad for x in (q, k, v, bias, sink)))
    problem = described(call, flags, needs_grad)
    chosen = select_backward(problem, backward or name)
    view = readable_view(problem, MaskView(form, tuple(mask or ())), chosen)
    # Nobody asks for the backend of the forward pass, which has run.
    passes = Passes(problem, chosen, chosen, view.form, "auto", len(tables), dropout is not None)
    keys = () if dropout is None else (dropout,)
    Attention.setup_context(ctx, (q, k, v, bias, sink, passes, *view.tensors, *tables, *keys), output)
    ctx.lists = [None if x is None else [None] * len(x) for x in (mask, sequences)]


def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of all that a forward operator received, in the order and the lists of its schema."""
    dq, dk, dv, dbias, dsink, *_ = Attention.backward(ctx, dout, dlse)
    mask, sequences = ctx.lists
    return dq, dk, dv, mask, None, dbias, dsink, sequences, None, *(None,) * (len(Flags._fields) + 1)


operators.derivative.update(save=save, differentiate=differentiate)
