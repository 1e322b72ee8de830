"""Eager PyTorch on any device: the chunked pair of `flash_dmattn.reference.eager`, and the fallback of auto."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import operators
from ..problem import AttentionProblem, Flags, Gradients, MaskView, NeedsGrad, SequenceView
from ..reference import eager as chunked
from ..reference import formula
from ..reference import sequences as loop
from .entries import batch_of, bools_of, dropout_of, formula_numbers, whole_batch
from .protocol import Availability, Rule

NAME = "eager"
REPEATS_ENTRIES = True
IS_FALLBACK = True
PROVIDES = frozenset({"notes", "differentiable_backward"})

FEATURES = frozenset(
    {
        *("mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse"),
        *("sink", "sequences", "paged", "tree", "dropout_p"),
    }
)
RULES: tuple[Rule, ...] = ()
AUTO_RULES: tuple[Rule, ...] = ()


def probe() -> Availability:
    """Always usable: it needs nothing but torch."""
    return Availability(True)


_chunk_bytes = chunked.DEFAULT_CHUNK_BYTES


def set_chunk_bytes(nbytes: int) -> None:
    """Bound the temporaries of one chunk, in bytes (256 MB unless set); the whole call uses little more than that.

    >>> from flash_dmattn.backends import eager
    >>> eager.set_chunk_bytes(64 * 2**20)
    >>> eager.set_chunk_bytes(eager.chunked.DEFAULT_CHUNK_BYTES)
    """
    global _chunk_bytes
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"nbytes is {nbytes!r}; it needs to be a positive number of bytes")
    _chunk_bytes = nbytes


def workspace_bytes(problem: AttentionProblem) -> int:
    """Bytes of temporaries a call can hold at once: what the fallback warning names."""
    width = 8 if problem.dtype == torch.float64 else 4
    batch = problem.batch if problem.sequences is None else 1  # one sequence after another
    scores = batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * width
    unpacked = 0 if problem.mask is None or problem.mask_form == "dense" else problem.mask.span()
    return unpacked + min(_chunk_bytes, 3 * scores)


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """What a call on meta tensors does not do."""
    return ("gives shapes, strides and dtypes alone: meta tensors hold no values",) if problem.device == "meta" else ()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None = None,
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if sequences is not None:
        inputs = (batch_of(sequences, flags, mask.form), q, k, v, bools_of(mask), bias, sink)
        return loop.forward(*inputs, dropout_of(dropout, flags), **_numbers(flags))
    return chunked.forward(
        q,
        k,
        v,
        mask.dense,
        bias,
        repeats=(flags.mask_repeat, flags.bias_repeat),
        sink=sink,
        dropout=dropout_of(dropout, flags),
        **_numbers(flags),
    )


def _backward(
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
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> Gradients:
    if sequences is not None:
        batch, inputs = batch_of(sequences, flags, mask.form), (q, k, v, bools_of(mask), bias)
        shared = (sink, dropout_of(dropout, flags))
        return loop.backward(batch, dout, dlse, *inputs, out, lse, *shared, needs_grad=needs_grad, **_numbers(flags))
    return chunked.backward(
        dout,
        dlse,
        q,
        k,
        v,
        mask.dense,
        bias,
        out,
        lse,
        repeats=(flags.mask_repeat, flags.bias_repeat),
        needs_grad=needs_grad,
        sink=sink,
        dropout=dropout_of(dropout, flags),
        **_numbers(flags),
    )


def _numbers(flags: Flags) -> dict[str, Any]:
    return {
        "softmax_scale": flags.softmax_scale,
        "softcap": flags.softcap,
        "window_size": flags.window,
        "chunk_bytes": _chunk_bytes,
    }


forward, backward = operators.define_pair(NAME, _forward, _backward)


def differentiable_backward(
    problem: AttentionProblem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    sink: Tensor | None = None,
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> Gradients:
    """The gradients as differentiable PyTorch, whose own derivative is the second derivative of attention."""
    dropped = dropout_of(dropout, problem.flags)
    if sequences is not None:
        batch = batch_of(sequences, problem.flags, mask.form)
        given = (dout, dlse, q, k, v, bools_of(mask), bias, sink, dropped)
        return loop.gradients(batch, *given, **formula_numbers(problem))
    dense, whole_bias = whole_batch(problem, mask.dense, bias)
    dq, dk, dv, dbias, *of_sink = formula.gradients(
        dout,
        dlse,
        q,
        k,
        v,
        dense,
        whole_bias,
        sink=sink,
        dropout=dropped,
        **formula_numbers(problem),
    )
    if dbias is not None and bias is not None:
        dbias = formula.sum_entries(dbias, bias.shape[0], problem.flags.bias_repeat).to(bias.dtype)
    return dq, dk, dv, dbias, *of_sink
