"""Calls with sequences on the CUDA extension: what its two operators get, and what is made of their sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import operators
from ...gradients import empty_gradients, key_gradient, sequence_query_gradient, sink_gradient
from ...problem import (
    AttentionProblem,
    Flags,
    Gradients,
    NeedsGrad,
    Packing,
    SequenceView,
    bias_class,
    fits_tma,
)

# As csrc/api/sequences.h has them.
_PACKING: dict[Packing, int] = {"none": 0, "queries": 1, "keys": 2}
_NO_LIMIT = 2**30


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None,
    sequences: SequenceView,
) -> tuple[Tensor, Tensor]:
    """out and lse, of all rows; arguments as of `KernelBackend`."""
    out, lse = operators.empty_outputs(q, v)
    if len(sequences.bounds) == 0 or out.numel() == 0:
        return operators.fill_empty(out, lse, None)
    if sink is not None:
        sink = (sink.float() if sink.dtype == torch.float64 else sink).contiguous()
    table = sequences.block_table
    if table is None:
        q, k, v = _readable(q, k, v)
    else:
        q, k, v, table = *_readable(q), *_pool(k, v), table if table.shape[1] else table.new_zeros((len(table), 1))
    attend = torch.ops.flash_dmattn.cuda_forward_sequences.default
    attend(q, k, v, sequences.bounds, table, bias, sink, out, lse, *_numbers(flags), flags.softcap)
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    needs_grad: NeedsGrad,
    sink: Tensor | None,
    sequences: SequenceView,
    num_dbias_chunks: int,
) -> Gradients:
    """The gradients asked for; arguments as of `KernelBackend`, and the chunks of a shared dbias, 0 for a choice."""
    number = len(sequences.bounds)
    # Rows of no sequence have no sink: their lse is not that of a row which has nothing else.
    in_sequences = lse if sink is None else lse.masked_fill(lse == -torch.inf, torch.inf)
    if number == 0 or out.numel() == 0 or k.shape[1] == 0:
        return empty_gradients((q, k, v, bias), dout, dlse, out, in_sequences, sink, needs_grad)
    dq, dk, dv = (
        operators.empty_gradient(x) if needed else None for x, needed in zip((q, k, v), needs_grad[:3], strict=True)
    )
    of_queries = bias is not None and needs_grad.bias and bias_class(bias.shape) == "query"
    delta = torch.empty_like(lse) if needs_grad.sink or (of_queries and sink is not None) else None
    dbias = stored = sums = None
    if bias is not None and needs_grad.bias and not of_queries:
        if bias_class(bias.shape) == "key":
            columns = (1, k.shape[1]) if flags.bias_packing == "keys" else (number, min(flags.max_seqlen_k, k.shape[1]))
            sums = torch.zeros((columns[0], q.shape[2], columns[1]), dtype=torch.float32, device=q.device)
        else:
            dbias = stored = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    if any(x is not None for x in (dq, dk, dv, stored, sums, delta)):
        rows = _readable(dout, q, k, v)
        results = (out.contiguous(), lse.contiguous(), dq, dk, dv, stored, sums, delta)
        differentiate = torch.ops.flash_dmattn.cuda_backward_sequences.default
        numbers = (*_numbers(flags), num_dbias_chunks)
        differentiate(rows[0], dlse, *rows[1:], sequences.bounds, bias, *results, *numbers)
    if delta is not None:
        delta = delta.masked_fill(lse == -torch.inf, 0.0)  # in rows of no sequence there is none
    if bias is not None and sums is not None:
        if sums.shape[2] != bias.shape[3]:  # more keys of a sequence are named than there are
            sums = torch.nn.functional.pad(sums, (0, bias.shape[3] - sums.shape[2]))
        dbias = key_gradient(bias, sums, k.shape[2], 1)
    elif bias is not None and of_queries:
        dbias = sequence_query_gradient(bias, dlse, lse, k.shape[2], flags, sink, delta, sequences.bounds)
    if sink is None:
        return dq, dk, dv, dbias
    dsink = sink_gradient(sink, in_sequences, delta) if needs_grad.sink and delta is not None else None
    return dq, dk, dv, dbias, dsink


def _numbers(flags: Flags) -> tuple[bool, int, int, int, int, int, float]:
    left, right = (_NO_LIMIT if side < 0 else side for side in flags.window)
    of_lengths = max(1, flags.max_seqlen_q), max(1, flags.max_seqlen_k)
    return flags.packs_queries, _PACKING[flags.bias_packing], *of_lengths, left, right, flags.softmax_scale


def _readable(*tensors: Tensor) -> list[Tensor]:
    """Tensors (B, L, H, D) as TMA reads them: one row of tokens, whose entries follow each other, and never empty."""
    return [_rows(x) if x.shape[1] else x.new_zeros((x.shape[0], 1, *x.shape[2:])) for x in tensors]


def _pool(*tensors: Tensor) -> list[Tensor]:
    """Pages (pages, page_size, H, D) as TMA reads them; of a pool of none, one of zeros."""
    present = [x if x.shape[0] else x.new_zeros((1, *x.shape[1:])) for x in tensors]
    return [x if x.data_ptr() % 16 == 0 else x.clone() for x in present]


def _rows(x: Tensor) -> Tensor:
    readable = x.data_ptr() % 16 == 0 and _fits(x.shape, x.stride(), x.element_size())
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def _fits(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA reads q, k or v that start on 16 bytes: of unit stride, entries one after the other."""
    follow = shape[0] == 1 or shape[1] == 1 or strides[0] == shape[1] * strides[1]
    return follow and fits_tma(shape, strides, itemsize)


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """Copies that a call makes."""
    p, of = problem, problem.sequences
    assert of is not None
    tensors = [("q", of.packs_queries, of.rows_q, p.num_heads, p.head_dim, p.q_strides)]
    if not of.has_pages:  # whose strides a rule has checked
        tensors += [
            ("k", of.packs_keys, of.rows_k, p.num_heads_k, p.head_dim, p.k_strides),
            ("v", of.packs_keys, of.rows_k, p.num_heads_k, p.head_dim_v, p.v_strides),
        ]
    return tuple(
        f"copies {name}, of strides {tuple(strides)}: TMA reads entries one after the other, rows of unit stride that "
        "start on 16 bytes"
        for name, is_packed, rows, heads, dim, strides in tensors
        if not _fits((1 if is_packed else of.number, rows, heads, dim), strides, p.dtype.itemsize)
    )
