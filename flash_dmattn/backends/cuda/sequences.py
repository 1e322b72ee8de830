"""Plans both passes of calls with sequences, by two operators of the extension."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...gradients import allocate_outputs, key_gradient, new_like, sequence_query_gradient, zero_gradients
from ...problem import AttentionProblem, Gradients, Packing, SequenceSpec, fits_tma
from ...problem.inputs import Inputs, Saved
from ...reference.sinks import sink_gradient
from ..protocol import Backward, Forward

# Codes of csrc/api/sequences.h.
_PACKING: dict[Packing, int] = {"none": 0, "queries": 1, "keys": 2}
_NO_LIMIT = 2**30


def plan_forward(p: AttentionProblem) -> Forward:
    return _plan_group_rows(p) if _has_group_rows(p) else _plan_forward(p)


def _has_group_rows(p: AttentionProblem) -> bool:
    """Return whether the heads of a group become rows of one tile: where an invariant call decodes one query each.

    The one query sees all keys then, so the rows need no band. With a window or a sink keys are loaded for each head.
    """
    is_plain = p.bias_tensor is None and p.sink is None
    return p.flags.invariant and is_plain and p.seqlen_q == 1 and p.window[0] < 0 and p.num_heads > p.num_heads_k


def _plan_group_rows(p: AttentionProblem) -> Forward:
    """Plan a call of one query for each sequence as one of G queries on the key-value heads, by copies of q and out."""
    spec, heads_k = p.sequences, p.num_heads_k
    assert spec is not None
    group, rows_q = p.num_heads // heads_k, spec.rows_q
    rows = spec._replace(rows_q=rows_q * group, max_seqlen_q=group)
    row, head = heads_k * p.head_dim, p.head_dim
    attend = _plan_forward(
        p._replace(
            seqlen_q=group,
            num_heads=heads_k,
            q_strides=(rows.rows_q * row, row, head, 1),
            is_causal=False,
            window_size=(-1, -1),
            flags=p.flags._replace(left=-1, right=-1, sequences=rows),
        )
    )

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        assert x.sequences is not None
        # Bounds are first and number of queries, then of keys.
        bounds = torch.cat((x.sequences.bounds[:, :2] * group, x.sequences.bounds[:, 2:]), 1)
        q = x.q.unflatten(-2, (heads_k, group)).transpose(-3, -2).flatten(-4, -3).contiguous()
        out, lse = attend(x._replace(q=q, sequences=x.sequences._replace(bounds=bounds)))
        out = out.unflatten(-3, (rows_q, group)).transpose(-3, -2).flatten(-3, -2)
        lse = lse.unflatten(-1, (rows_q, group)).transpose(-2, -1).flatten(-3, -2)
        return out.contiguous(), lse.contiguous()

    return forward


def _plan_forward(p: AttentionProblem) -> Forward:
    spec, softcap, (read_q, read_k, read_v) = p.sequences, p.softcap, _readers(p)
    assert spec is not None
    numbers = _numbers(p, spec)
    outputs, attend = allocate_outputs(p), torch.ops.flash_dmattn.cuda_forward_sequences.default

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        q, k, v, _, bias, sink, sequences, _ = x
        assert sequences is not None
        out, lse, *largest = outputs(q)
        if sink is not None:
            sink = (sink.float() if sink.dtype == torch.float64 else sink).contiguous()
        bounds, table = sequences
        if table is not None and table.shape[1] == 0:
            table = table.new_zeros((len(table), 1))
        attend(read_q(q), read_k(k), read_v(v), bounds, table, bias, sink, out, lse, *numbers, softcap, *largest)
        return out, lse, *largest

    return forward


def plan_backward(p: AttentionProblem, num_dbias_chunks: Callable[[], int]) -> Backward:
    """Plan the backward pass; `num_dbias_chunks` returns the chunks of a shared dbias, 0 if the operator chooses."""
    spec, flags, needs, dbias_class = p.sequences, p.flags, p.needs_grad, p.dbias_class
    assert spec is not None
    numbers = _numbers(p, spec)
    read_q, read_k, read_v = _readers(p)
    sides = zip(_sides(p), needs, strict=False)
    new_q, new_k, new_v = (new_like(*side[1:]) if needed else lambda x: None for side, needed in sides)
    needs_delta = needs.sink or (dbias_class == "query" and p.sink is not None)
    runs_kernel = any(needs[:3]) or dbias_class in ("key", "score") or needs_delta
    most_k = spec.rows_k if flags.bias_packing == "keys" else min(p.seqlen_k, spec.rows_k)
    sums_shape = (1 if flags.bias_packing == "keys" else spec.number, p.num_heads, most_k)
    has_keys, num_heads_k = spec.rows_k > 0, p.num_heads_k
    differentiate = torch.ops.flash_dmattn.cuda_backward_sequences.default

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        (q, k, v, _, bias, sink, sequences, _), out, lse = saved
        assert sequences is not None
        # Rows of no sequence have no sink. Their lse of -inf would look like a row that has a sink and no keys, so it
        # becomes +inf, and they do not contribute to the gradient.
        in_sequences = lse.masked_fill(lse == -torch.inf, torch.inf) if needs.sink else lse
        if not has_keys:
            return zero_gradients(saved._replace(lse=in_sequences), dout, dlse, needs)
        dq, dk, dv = new_q(q), new_k(k), new_v(v)
        delta = torch.empty_like(lse, dtype=torch.float32) if needs_delta else None
        stored = sums = None
        if dbias_class == "key":
            sums = torch.zeros(sums_shape, dtype=torch.float32, device=q.device)
        elif dbias_class == "score" and bias is not None:
            stored = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        if runs_kernel:
            rows = (read_q(q), read_k(k), read_v(v))
            results = (out.contiguous(), lse.contiguous(), dq, dk, dv, stored, sums, delta)
            dout = _aligned(dout) if dout.is_contiguous() else _rows(dout)
            chunks = num_dbias_chunks()
            differentiate(dout, dlse, *rows, sequences.bounds, bias, *results, *numbers, chunks, flags.invariant)
        if delta is not None:
            delta = delta.masked_fill(lse == -torch.inf, 0.0)  # the kernel leaves rows of no sequence unwritten
        dbias = stored
        if bias is not None and sums is not None:
            if sums.shape[2] != bias.shape[3]:  # max_seqlen_k may be larger than the number of keys
                sums = torch.nn.functional.pad(sums, (0, bias.shape[3] - sums.shape[2]))
            dbias = key_gradient(bias, sums, num_heads_k, 1)
        elif bias is not None and dbias_class == "query":
            dbias = sequence_query_gradient(bias, dlse, lse, num_heads_k, flags, sink, delta, sequences.bounds)
        dsink = None
        if needs.sink and sink is not None and delta is not None:
            dsink = sink_gradient(sink, in_sequences, delta)
        return dq, dk, dv, dbias, dsink

    return backward


def _numbers(p: AttentionProblem, spec: SequenceSpec) -> tuple[bool, int, int, int, int, int, float]:
    left, right = (_NO_LIMIT if side < 0 else side for side in p.window)
    packing, most_q, most_k = _PACKING[p.flags.bias_packing], max(1, p.seqlen_q), max(1, p.seqlen_k)
    return spec.packs_queries, packing, most_q, most_k, left, right, p.softmax_scale


def _readers(p: AttentionProblem) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return functions that prepare q, k and v for TMA, by copies if needed."""
    spec = p.sequences
    assert spec is not None
    ready = []
    for _, shape, strides in _sides(p):
        is_read = shape[1] > 0 and _fits(shape, strides, p.dtype.itemsize)
        ready.append(_aligned if is_read else _rows)
    return (ready[0], _pages, _pages) if spec.has_pages else tuple(ready)


def _sides(p: AttentionProblem) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return name, shape and strides of q, k and v; k and v in pages count as packed tokens."""
    spec = p.sequences
    assert spec is not None
    sides = (
        ("q", spec.packs_queries, spec.rows_q, p.num_heads, p.head_dim, p.q_strides),
        ("k", spec.packs_keys, spec.rows_k, p.num_heads_k, p.head_dim, p.k_strides),
        ("v", spec.packs_keys, spec.rows_k, p.num_heads_k, p.head_dim_v, p.v_strides),
    )
    return [
        (name, (1 if packed else spec.number, rows, heads, dim), strides)
        for name, packed, rows, heads, dim, strides in sides
    ]


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _pages(x: Tensor) -> Tensor:
    """Return aligned pages (pages, page_size, H, D), at least one; a rule has checked their strides."""
    return _aligned(x if x.shape[0] else x.new_zeros((1, *x.shape[1:])))


def _rows(x: Tensor) -> Tensor:
    """Return rows (B, L, H, D) or tokens that TMA can load, with consecutive entries; at least one row."""
    if x.shape[-3] == 0:
        return x.new_zeros((*x.shape[:-3], 1, *x.shape[-2:]))
    is_read = x.data_ptr() % 16 == 0 and _fits(x.shape, x.stride(), x.element_size())
    return x if is_read else x.clone(memory_format=torch.contiguous_format)


def _fits(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether TMA can load q, k or v if they start on 16 bytes: unit stride, and consecutive entries."""
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    follow = shape[0] == 1 or shape[1] == 1 or strides[0] == shape[1] * strides[1]
    return follow and fits_tma(shape, strides, itemsize)


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    spec = problem.sequences
    assert spec is not None
    return tuple(
        f"copies {name}, of strides {tuple(strides)}: TMA reads entries one after the other, rows of unit stride that "
        "start on 16 bytes"
        for name, shape, strides in _sides(problem)[: 1 if spec.has_pages else 3]
        if not _fits(shape, strides, problem.dtype.itemsize)
    )
