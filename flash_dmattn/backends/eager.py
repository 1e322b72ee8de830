"""The fallback of auto, plain PyTorch on any device: the chunked passes of `flash_dmattn.reference.eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import AttentionProblem, Gradients, RowEntropy
from ..problem.inputs import Inputs, Saved
from ..reference import eager as chunked
from ..reference import formula, query_blocks
from ..reference import sequences as loop
from ..reference import tangents as forward_mode
from ..reference.masks import AnyMask, Intervals, TileBits
from .protocol import Backend, Backward, BackwardTangents, Forward, ForwardTangents
from .reference import (
    asked_for,
    batch_of,
    bool_mask,
    chunk_bias_of,
    dropout_of,
    for_formula,
    for_sequences,
    formula_numbers,
    lists_of,
)

_chunk_bytes = chunked.DEFAULT_CHUNK_BYTES


def set_chunk_bytes(nbytes: int) -> None:
    """Bound the temporaries of one chunk, in bytes (256 MB by default); a call needs little more memory than that.

    >>> from flash_dmattn.backends import eager
    >>> eager.set_chunk_bytes(64 * 2**20)
    >>> eager.set_chunk_bytes(eager.chunked.DEFAULT_CHUNK_BYTES)
    """
    global _chunk_bytes
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"nbytes is {nbytes!r}; it needs to be a positive number of bytes")
    _chunk_bytes = nbytes


def _workspace_bytes(problem: AttentionProblem) -> int:
    """Return the peak memory of the temporaries of a call, in bytes, for the fallback warning."""
    width = 8 if problem.dtype == torch.float64 else 4
    batch = problem.batch if problem.sequences is None else 1  # one sequence after another
    scores = batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * width
    return min(_chunk_bytes, 3 * scores)


def _readable(problem: AttentionProblem, x: Inputs) -> AnyMask | None:
    mask = x.mask
    if mask.form == "lists":
        return lists_of(problem, x)
    if mask.form in ("tiles", "sequence_tiles"):
        return TileBits(mask.tensors[0])
    if mask.form == "intervals":
        return Intervals(*mask.tensors[:2])
    return bool_mask(mask)


def _chunked(
    p: AttentionProblem, dense: Callable[..., Any], packed: Callable[..., Any], **own: Any
) -> Callable[..., Any]:
    """Plan a chunked pass, the one of dense calls or the one of sequences: run(x, *tensors, **more).

    Both take q, k and v, the mask and the bias between the tensors in front of them and those behind.
    """
    numbers, repeats = {**formula_numbers(p), **own}, (p.flags.mask_repeat, p.flags.bias_repeat)

    def run(x: Inputs, *last: Any, first: tuple[Any, ...] = (), **more: Any) -> Any:
        tensors = (*first, x.q, x.k, x.v, _readable(p, x), chunk_bias_of(p, x), *last)
        sizes = {**numbers, **more, "chunk_bytes": _chunk_bytes, "dropout": dropout_of(p, x)}
        if x.sequences is not None:
            return packed(batch_of(p, x), *tensors, **sizes)
        return dense(*tensors, repeats=repeats, **sizes)

    return run


def _plan_forward(problem: AttentionProblem) -> Forward:
    run = _chunked(problem, query_blocks.forward, loop.forward, **asked_for(problem))
    return lambda x: run(x, sink=x.sink)


def _plan_backward(problem: AttentionProblem) -> Backward:
    run = _chunked(problem, query_blocks.backward, loop.backward, needs_grad=problem.needs_grad)

    def backward(
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        *,
        dbias_out: Tensor | None = None,
        entropy: RowEntropy | None = None,
    ) -> Gradients:
        x, out, lse = saved
        gradients: Gradients = run(x, out, lse, first=(dout, dlse), sink=x.sink, entropy=entropy)
        return gradients

    return backward


def _plan_tangents(problem: AttentionProblem) -> ForwardTangents:
    run = _chunked(problem, forward_mode.forward, loop.forward_tangents)
    return lambda x, own: run(x, x.sink, own)


def _plan_tangent_gradients(problem: AttentionProblem, needs_grad: tuple[bool, ...]) -> BackwardTangents:
    run = _chunked(problem, forward_mode.backward, loop.backward_tangents, needs_grad=needs_grad)
    return lambda x, own, lse, sent: run(x, x.sink, own, lse, first=(sent,))


def _differentiable_backward(
    problem: AttentionProblem, x: Inputs, dout: Tensor, dlse: Tensor | None, dentropy: Tensor | None = None
) -> Gradients:
    """Compute the gradients as differentiable PyTorch, whose gradient is the second derivative of attention."""
    numbers, dropout, tensors = formula_numbers(problem), dropout_of(problem, x), (dout, dlse, x.q, x.k, x.v)
    if x.sequences is not None:
        own = for_sequences(problem, x)
        return loop.gradients(batch_of(problem, x), *tensors, *own, x.sink, dropout, dentropy, **numbers)
    mask, bias, to_list_values = for_formula(problem, x)
    numbers |= {"sink": x.sink, "dropout": dropout, "dentropy": dentropy}
    dq, dk, dv, dbias, *dsink = formula.gradients(*tensors, mask, bias, **numbers)
    if dbias is not None and x.bias is not None:  # the sum has the shape and dtype of the bias of the call
        dbias = formula.sum_entries(to_list_values(dbias), x.bias.shape[0], problem.flags.bias_repeat).to(x.bias.dtype)
    return dq, dk, dv, dbias, *dsink


BACKEND = Backend(
    name="eager",
    plan_forward=_plan_forward,
    plan_backward=_plan_backward,
    features=frozenset({"mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse"})
    | {"sink", "sequences", "paged", "tree", "dropout_p", "relative_bias", "band_bias", "lists", "list_bias"}
    | {"max_scores", "entropy"},
    notes=lambda p: (
        ("returns only shapes, strides and dtypes: meta tensors hold no values",) if p.device == "meta" else ()
    ),
    mask_forms=frozenset({"dense", "tiles", "intervals", "sequence_tiles", "tree", "lists"}),
    reads_dense=lambda problem, direction: True,
    repeats_entries=True,
    sums_probabilities=True,
    differentiable_backward=_differentiable_backward,
    plan_tangents=_plan_tangents,
    plan_tangent_gradients=_plan_tangent_gradients,
    workspace_bytes=_workspace_bytes,
)
