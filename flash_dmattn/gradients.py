"""Allocates results, and computes in PyTorch the gradients that no kernel returns: empty calls, sinks, some biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .problem import AttentionProblem, Flags, Gradients, RowEntropy
from .problem.inputs import Inputs, Saved
from .reference.formula import sum_entries
from .reference.sinks import row_delta, sink_gradient, through_lse

Allocate = Callable[[Tensor], Tensor]
_Statistic = TypeVar("_Statistic", Tensor, "Tensor | None")


def empty_outputs(q: Tensor, v: Tensor, wide_lse: bool = False) -> tuple[Tensor, Tensor]:
    """Allocate (out, lse) as every backend returns them: contiguous, lse fp32 (fp64 for fp64, or if it is wide)."""
    batch, seqlen_q, num_heads, _ = q.shape
    dtype, device = q.dtype, q.device
    # Sizes as separate arguments: torch takes a third longer to read a tuple.
    out = torch.empty(batch, seqlen_q, num_heads, v.shape[3], dtype=dtype, device=device)
    lse_dtype = torch.float64 if wide_lse or dtype == torch.float64 else torch.float32
    return out, torch.empty(batch, num_heads, seqlen_q, dtype=lse_dtype, device=device)


def empty_statistic(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate the maximum scores, or the entropies, of rows: like lse, in fp32 (fp64 for fp64)."""
    return torch.empty(lse.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=lse.device)


def narrow(x: _Statistic, dtype: torch.dtype) -> _Statistic:
    """Convert a wide lse, or its gradient, to fp32, except for fp64 calls: see `Backend.wide_lse`."""
    return x if x is None or not x.dtype == torch.float64 != dtype else x.float()


def rows_without_keys(p: AttentionProblem) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return `lse -> (max_scores, entropy)`, as far as a class of calls asks for them: -inf and 0 in every row."""
    values = [*[-torch.inf] * p.flags.max_scores, *[0.0] * p.flags.entropy]
    return lambda lse: tuple([empty_statistic(lse, p.dtype).fill_(value) for value in values])


def allocate_outputs(p: AttentionProblem) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return `q -> (out, lse)`, followed by the maximum scores and the entropies that a class of calls asks for.

    It is `_allocate_outputs` of most calls, without another function around it.
    """
    allocate, number = _allocate_outputs(p), p.flags.max_scores + p.flags.entropy
    if number == 0:
        return allocate
    rows: Callable[[Tensor], tuple[Tensor, ...]]
    if p.sequences is None:
        rows = lambda lse: tuple([empty_statistic(lse, p.dtype) for _ in range(number)])
    else:  # no kernel writes rows of no sequence
        rows = rows_without_keys(p)

    def with_rows(q: Tensor) -> tuple[Tensor, ...]:
        out, lse = allocate(q)
        return out, lse, *rows(lse)

    return with_rows


def _allocate_outputs(p: AttentionProblem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return `q -> (out, lse)`, which allocates like `empty_outputs`, for a class of calls in at most 32 bits.

    out is (B, L, H, Dv), also for q in head-first layout; of tokens it is (T, H, Dv), and lse (H, T). With a bias
    lse is wide: see `Backend.wide_lse`.
    """
    entries, rows, strides = p.batch, p.seqlen_q, tuple(p.q_strides)
    if p.sequences is not None:
        entries, rows = (1 if p.sequences.packs_queries else p.batch), p.sequences.rows_q
    sizes: tuple[int, ...] = (entries, rows, p.num_heads, p.head_dim_v)
    stats: tuple[int, ...] = (entries, p.num_heads, rows)
    if p.arrival == "tokens":
        sizes, stats, strides = sizes[1:], stats[1:], strides[1:]
    empty, dtype = torch.empty, p.dtype
    lse_dtype = torch.float32 if p.bias_tensor is None else torch.float64
    if p.arrival != "heads_first" and p.head_dim == p.head_dim_v and strides == contiguous_strides(sizes):
        empty_like = torch.empty_like  # takes half as long as torch.empty with sizes
        return lambda q: (empty_like(q), empty(*stats, dtype=lse_dtype, device=q.device))
    return lambda q: (empty(*sizes, dtype=dtype, device=q.device), empty(*stats, dtype=lse_dtype, device=q.device))


def has_pairs(p: AttentionProblem) -> bool:
    """Return whether kernels run for a class of calls: there are a query and a key, or rows of sequences to write."""
    rows = (p.seqlen_q and p.seqlen_k) if p.sequences is None else p.sequences.rows_q
    return bool(p.batch and p.num_heads and rows)


def accepts_packed_layout(p: AttentionProblem, direction: str) -> bool:
    """Return whether a pass on kernels may take tokens (T, H, D) as they are.

    A pass without kernels may not, nor a backward pass that sums over rows (B, H, L) in PyTorch: for the gradient of a
    sink, or of a bias of one value per query.
    """
    sums_rows = p.needs_grad.sink or p.dbias_class == "query"
    return has_pairs(p) and (direction == "forward" or not sums_rows)


def fill_empty(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fill the results of rows without keys: out with zeros, lse with the sink of each head, or -inf without a sink."""
    return out.zero_(), lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[:, None])


def run_without_keys(p: AttentionProblem, wide_lse: bool = False) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """Return the forward pass of a class of calls for which no kernel runs: see `has_pairs`, and `Backend.wide_lse`."""
    rows = rows_without_keys(p)

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        out, lse = empty_outputs(x.q, x.v, wide_lse and p.bias_tensor is not None)
        if p.sequences is not None or p.seqlen_k == 0:
            fill_empty(out, lse, x.sink if p.sequences is None else None)  # rows of no sequence have no sink either
        return out, lse, *rows(lse)

    return forward


def differentiate_without_keys(p: AttentionProblem) -> Callable[..., Gradients]:
    """Return the backward pass of a class of calls for which no kernel runs: see `has_pairs`."""

    def backward(
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        *,
        dbias_out: Tensor | None = None,
        entropy: RowEntropy | None = None,  # 0 in every row, whatever the tensors are
    ) -> Gradients:
        if p.sequences is not None:
            dlse, saved = None, saved._replace(lse=torch.full_like(saved.lse, torch.inf))  # no row has a sink
        gradients = zero_gradients(saved, dout, dlse, p.needs_grad)
        return gradients if dbias_out is None else with_dbias(gradients, dbias_out)

    return backward


def empty_gradient(x: Tensor) -> Tensor:
    """Allocate a gradient as every backend returns it: contiguous, in the shape and dtype of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_gradients(tensors: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> list[Tensor]:
    """Allocate the requested gradients of q, k, v, bias and sink, as an operator returns them."""
    return [empty_gradient(x) for x, needed in zip(tensors, needs_grad, strict=True) if needed and x is not None]


def spread(gradients: Sequence[Tensor], needs_grad: Sequence[bool]) -> Gradients:
    """Return (dq, dk, dv, dbias, dsink) from the needed gradients, which an operator returned; None if not needed."""
    rest = iter(gradients)
    return tuple(next(rest) if needed else None for needed in needs_grad)


def with_dbias(gradients: Gradients, dbias_out: Tensor) -> Gradients:
    """Copy dbias into the tensor that was passed for it, unless it is that tensor."""
    dq, dk, dv, dbias, *rest = gradients
    if dbias is not None and dbias is not dbias_out:
        dbias = dbias_out.copy_(dbias)
    return (dq, dk, dv, dbias, *rest)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a new tensor. Another contiguous tensor may differ in dims of size 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def new_like(shape: Sequence[int], strides: Sequence[int], zeros: bool = False) -> Allocate:
    """Return a function that allocates a contiguous tensor like its argument, of this shape and these strides.

    It is `torch.empty_like` if that gives a contiguous tensor: it takes half as long as `torch.empty` with sizes.
    """
    if tuple(strides) == contiguous_strides(shape):
        return torch.zeros_like if zeros else torch.empty_like
    return _zero_gradient if zeros else empty_gradient


def _zero_gradient(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def zero_gradients(saved: Saved, dout: Tensor, dlse: Tensor | None, needs_grad: Sequence[bool]) -> Gradients:
    """Return the gradients of a call without any pair: zeros for q, k, v and bias, and dsink from dlse."""
    x, out, lse = saved
    gradients = tuple(
        _zero_gradient(t) if t is not None and needed else None
        for t, needed in zip((x.q, x.k, x.v, x.bias), needs_grad[:4], strict=True)
    )
    if x.sink is None:
        return gradients
    return *gradients, sink_gradient(x.sink, lse, row_delta(dout, out, dlse, lse)) if needs_grad[4] else None


def query_gradient(
    bias: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    num_heads_k: int,
    repeat: int,
    sink: Tensor | None = None,
    delta: Tensor | None = None,
) -> Tensor:
    """Return the gradient of a bias of one value per query, (Bb, Hb, Lq or 1, 1), with heads of q or of k.

    Without a sink such a bias shifts lse and does not change p, so its gradient is dlse. With a sink see
    `through_lse`.
    """
    finite = None if dlse is None else dlse.to(torch.float32).masked_fill(lse == -torch.inf, 0.0)
    rows = through_lse(finite, sink, lse, delta)
    if rows is None:
        return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    rows = sum_entries(_over_heads(rows, bias, num_heads_k), bias.shape[0], repeat)
    return rows.sum_to_size(bias.shape[:3]).view(bias.shape).to(bias.dtype)


def sequence_query_gradient(
    bias: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    num_heads_k: int,
    flags: Flags,
    sink: Tensor | None,
    delta: Tensor | None,
    bounds: Tensor,
) -> Tensor:
    """Return `query_gradient` of a call with sequences, whose rows of no sequence have an lse of -inf.

    dlse, lse and delta are (1, Hq, Tq) if queries are packed, else (S, Hq, Lq).
    """
    nowhere = lse == -torch.inf
    if dlse is not None:
        dlse = dlse.to(torch.float32).masked_fill(nowhere, 0.0)
    lse = lse.masked_fill(nowhere, torch.inf)  # +inf, so that sinks have probability 0 in these rows
    spec = flags.sequences
    if spec is not None and spec.packs_queries and flags.bias_packing == "none":
        most = spec.max_seqlen_q
        dlse, delta = (None if x is None else _by_position(x, bounds, most, 0.0) for x in (dlse, delta))
        lse = _by_position(lse, bounds, most, torch.inf)
    return query_gradient(bias, dlse, lse, num_heads_k, 1, sink, delta)


def _by_position(x: Tensor, bounds: Tensor, most: int, rest: float) -> Tensor:
    """Unpack rows (1, H, T) to (S, H, most), by position in their sequence; positions past its end get `rest`."""
    place = torch.arange(most, device=x.device)
    rows = (bounds[:, :1] + place).clamp(max=x.shape[2] - 1)
    return x[0][:, rows].transpose(0, 1).masked_fill((place >= bounds[:, 1:2])[:, None], rest)


def key_gradient(bias: Tensor, sums: Tensor, num_heads_k: int, repeat: int) -> Tensor:
    """Return the gradient of a bias (Bb, Hb, 1, Lk) from sums of ds over queries, fp32 (B, heads of q or k, Lk)."""
    shape, keys = bias.shape, sums
    if keys.shape[:2] != shape[:2]:  # most calls have a head of the bias for each query head: nothing to ask torch for
        keys = sum_entries(_over_heads(sums, bias, num_heads_k), shape[0], repeat)
        if keys.shape[:2] != shape[:2]:  # not `torch.Size.numel`, which is slower because it checks for symbols
            keys = keys.sum_to_size((*shape[:2], sums.shape[2]))
    keys = keys.view(shape)
    return keys if bias.dtype == torch.float32 else keys.to(bias.dtype)


def _over_heads(x: Tensor, bias: Tensor, num_heads_k: int) -> Tensor:
    """Add the sums (B, H, L) of query heads over each group, if the bias has one head for a group."""
    if bias.shape[1] == num_heads_k != x.shape[1]:
        return x.unflatten(1, (num_heads_k, -1)).sum(2)
    return x
