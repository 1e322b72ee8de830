"""One dense FlexAttention call as differentiable PyTorch, with its conversions of mask, bias and gradients."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...problem import AttentionProblem, BiasClass, MaskView, Packing, bias_class, collapse
from ...problem.inputs import Inputs
from ...reference import formula
from ...reference.distances import Distances, by_distance
from ..reference import bias_of
from .blocks import BLOCK, Blocks, dense_blocks


def graph_module() -> ModuleType:
    """Import `graph.py` on its first use, and FlexAttention with it."""
    # An import statement, not importlib: under torch.compile dynamo runs the former and refuses the latter.
    from . import graph

    return graph


def attend_dense(problem: AttentionProblem, x: Inputs) -> tuple[Tensor, ...]:
    """Return (out,), (out, lse) or (out, lse, max_scores), as the problem asks."""
    if problem.batch == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
        results = nothing(problem, x)
        return results if x.sink is None else _with_sink(problem, results, x.sink)
    origin = None
    if problem.relative is not None:
        x, origin = _with_each_distance(problem, x)
    x = ready(problem, x)
    blocks = dense_blocks(problem, x.mask.dense, x.q.device)
    return attend(problem, x, blocks._replace(origin=origin))


def _with_each_distance(problem: AttentionProblem, x: Inputs) -> tuple[Inputs, Tensor]:
    """Return the values of a bias by distance for each distance of the call, and the index of distance 0.

    So the graph does not clamp distances: most pairs of a long call would add their gradient to one clamped value.
    """
    bias = bias_of(problem, x)
    assert isinstance(bias, Distances)
    bias = bias._replace(values=bias.values.float())  # its gradient is summed in fp32, and rounded once
    values = by_distance(bias, problem.seqlen_q, problem.seqlen_k)
    origin = torch.full((), problem.seqlen_q - 1, dtype=torch.int32, device=values.device)
    return x._replace(bias=values), origin


def nothing(problem: AttentionProblem, x: Inputs) -> tuple[Tensor, ...]:
    """Return the results of a call without a pair of a query and a key; FlexAttention refuses length 0."""
    # A sum of no elements, so that each input has a gradient of zeros.
    inputs = (x.q, x.k, x.v, x.bias, x.sink)
    zero = sum(tensor.flatten()[:0].sum(dtype=torch.float32) for tensor in inputs if tensor is not None)
    batch, seqlen_q, num_heads, _ = x.q.shape
    out = (x.q.new_zeros((batch, seqlen_q, num_heads, problem.head_dim_v)) + zero).to(x.q.dtype)
    if not _makes_lse(problem, x):
        return (out,)
    rows = torch.full((batch, num_heads, seqlen_q), -torch.inf, dtype=torch.float32, device=out.device)
    return (out, rows + zero, *([rows] * problem.flags.max_scores))


def _makes_lse(problem: AttentionProblem, x: Inputs) -> bool:
    """Return whether the graph returns lse: for the caller, a sink, or a result behind it."""
    return problem.return_lse or x.sink is not None or problem.flags.max_scores


def ready(problem: AttentionProblem, x: Inputs) -> Inputs:
    """Detach inputs whose gradient is not needed, drop expanded dims, and convert a bias to the dtype of the graph."""
    if not any(problem.needs_grad):
        # On CPU FlexAttention refuses inputs that require a gradient, also under no_grad.
        if any(tensor is not None and tensor.requires_grad for tensor in (x.q, x.k, x.v, x.bias)):
            bias = None if x.bias is None else x.bias.detach()
            x = x._replace(q=x.q.detach(), k=x.k.detach(), v=x.v.detach(), bias=bias)
    mask, bias = x.mask.dense, x.bias
    if mask is not None:
        x = x._replace(mask=MaskView("dense", (collapse(mask),)))
    if bias is not None:
        if not problem.needs_grad.bias:
            bias = collapse(bias)  # with a gradient its shape is kept, because each element has its own derivative
        if widens(bias.dtype, problem.needs_grad.bias, bias_class(bias.shape)):
            bias = _ToFloat32.apply(bias)
        x = x._replace(bias=bias)
    return x


def attend(
    problem: AttentionProblem, x: Inputs, blocks: Blocks, packing: tuple[Packing | None, Packing | None] = (None, None)
) -> tuple[Tensor, ...]:
    """Run FlexAttention on a dense call, or on padded sequences, and add the features that it lacks.

    `packing` is how mask and bias are indexed through `Places` of `blocks`; None means by row and column.
    """
    mask, bias, row_bias = x.mask.dense, x.bias, None
    batch, seqlen_q, num_heads, _ = x.q.shape
    flags = problem.flags
    if bias is not None and problem.needs_grad.bias:
        if bias.shape[3] == 1:
            row_bias, bias = bias, bias.detach()
        elif bias.shape[2] == 1:
            # With a value per key for each of (B, Hq, 1, Lk), the gradient is many short sums, which autograd adds in
            # pairs. One sum of a million terms by atomics would have an error of 5e-5 in fp32, and the atomics would
            # serialise.
            bias = formula.spread_entries(_per_query_head(bias, num_heads), batch, flags.bias_repeat)
            bias = bias.expand(batch, -1, -1, -1).contiguous()
    if mask is not None and mask.shape[2] == 1:
        mask = mask.to(torch.int32)  # a byte per key is as slow to load as 16 bits: see `widens`
    graph = graph_module()
    form = graph.Form(
        problem.softmax_scale,
        problem.softcap,
        problem.num_heads != problem.num_heads_k,
        _makes_lse(problem, x),
        flags.max_scores,
        None if mask is None else graph.shared(mask, num_heads, batch, flags.mask_repeat, packing[0]),
        None if bias is None else graph.shared(bias, num_heads, batch, flags.bias_repeat, packing[1]),
        _num_stages(problem, mask, bias),
        # Torch chooses its decoding kernel below 128 queries, and has no configuration of it if the queries of a group
        # of heads need more than one block (H200, torch 2.11).
        seqlen_q < BLOCK < seqlen_q * (problem.num_heads // problem.num_heads_k),
    )
    if torch.compiler.is_compiling():
        results = graph.run(form, x.q, x.k, x.v, _realise(mask), _realise(bias), blocks)
    else:
        # With symbolic lengths Inductor's CPU kernel does not always compile (an undeclared name, torch 2.13).
        is_static = problem.device == "cpu" and graph.compiler == "inductor"
        specialised = specialisation(problem, x, bias, blocks, is_static)
        function = graph.compiled(form, specialised, dynamic=False if is_static else None)
        results = function(x.q, x.k, x.v, mask, bias, blocks)
    if row_bias is not None:
        results = _through_lse(problem, results, row_bias)
    return results if x.sink is None else _with_sink(problem, results, x.sink)


def specialisation(
    problem: AttentionProblem, x: Inputs, bias: Tensor | None, blocks: Blocks, is_static: bool
) -> tuple[object, ...]:
    """Return the properties, in addition to its form, that recompile a graph; torch treats a length of 1 as a constant.

    A static graph is compiled for all of its sizes. `bias` is as the graph receives it.
    """
    p = problem
    batch, seqlen_q, seqlen_k = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    specialised = (
        p.device,
        p.dtype,
        None if bias is None else bias.dtype,
        (p.num_heads, p.num_heads_k, p.head_dim, p.head_dim_v),
        p.needs_grad[:4],
        torch.is_grad_enabled(),
        tuple(None if limit is None else limit.dim() for limit in (blocks.lower, blocks.upper, blocks.origin)),
        (batch == 1, seqlen_q == 1, seqlen_k == 1, seqlen_q <= BLOCK, seqlen_k <= BLOCK),
        tuple((s[1] >= s[2], s[3] == 1) for s in (x.q.stride(), x.k.stride(), x.v.stride())),
    )
    if not is_static:
        return specialised
    sizes = (x.mask.dense, None if blocks.places is None else bias)
    shapes = (None if tensor is None else tensor.shape for tensor in sizes)
    return (*specialised, batch, seqlen_q, seqlen_k, *shapes)


def _num_stages(problem: AttentionProblem, mask: Tensor | None, bias: Tensor | None) -> int | None:
    # Torch's three stages leave no shared memory for pipelined tiles of a captured tensor, and the compilation fails. A
    # backward pass at head dim 128 with a mask and a bias of one value per score needs 272 of 227 KB, a forward pass at
    # head dim 64 with a bias in fp32 needs 240 KB (H200, torch 2.11).
    tiles = any(x is not None and x.shape[2] > 1 and x.shape[3] > 1 for x in (mask, bias))
    if not tiles or problem.device != "cuda":
        return None
    return 2 if problem.arch == "sm_90" and max(problem.head_dim, problem.head_dim_v) <= 128 else 1


def widens(dtype: torch.dtype, needs_grad: bool, held: BiasClass) -> bool:
    """Return whether a bias of this dtype and class is copied to fp32."""
    # A gradient is summed in the dtype of its input, so in fp32; fp64 would slow the kernel down. With 16 bits per key
    # the forward kernel takes 6 ms instead of 0.1 (H200, torch 2.11, 2 x 2048 x 16 x 64).
    return dtype == torch.float64 or (dtype != torch.float32 and (needs_grad or held == "key"))


def _per_query_head(x: Tensor, num_heads: int) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, num_heads // x.shape[1], -1, -1).flatten(1, 2)


def _through_lse(problem: AttentionProblem, results: tuple[Tensor, ...], bias: Tensor) -> tuple[Tensor, ...]:
    """Add the gradient of a bias of one value per query: out does not depend on it, and it is a summand of lse.

    In exact arithmetic it is the sum of ds over the keys, but in 16 bits that sum would be mostly the rounding error of
    delta.
    """
    out = results[0] + bias.flatten()[:0].sum().to(results[0].dtype)
    if len(results) == 1:
        return (out,)
    _, lse, *largest = results
    rows = formula.spread_entries(
        _per_query_head(bias, lse.shape[1]).squeeze(3), lse.shape[0], problem.flags.bias_repeat
    )
    return out, lse + torch.where(lse == -torch.inf, 0.0, rows - rows.detach()), *largest


def _with_sink(problem: AttentionProblem, results: tuple[Tensor, ...], sink: Tensor) -> tuple[Tensor, ...]:
    """Add the sinks of heads to results that were computed from keys only.

    A score_mod would need one more row of k and v for the sink. With logsigmoid and logaddexp the gradient of a sink is
    accurate, also if its probability is near 0 or 1.
    """
    out, lse, *largest = results
    logits = sink.to(lse.dtype)[:, None]
    has_none = logits == -torch.inf
    logits = logits.masked_fill(has_none, 0.0)
    logits = logits + 0 * logits  # a sink of +inf is NaN in the softmax
    gap = torch.where(has_none, torch.inf, lse - logits)
    share = torch.nn.functional.logsigmoid(gap).exp().mT.unsqueeze(3)
    lse = torch.where(has_none, lse, torch.logaddexp(lse, logits))
    out = (out.to(lse.dtype) * share).to(out.dtype)
    return (out, lse, *largest) if problem.return_lse or largest else (out,)


class _ToFloat32(torch.autograd.Function):
    """x.float() that leaves dims of stride 0 expanded: the conversion of a tensor would fill them with copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return collapse(x).float().expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


def _realise(x: Tensor | None) -> Tensor | None:
    # In a caller's graph x may be an expression. Inductor's CPU kernel fails on a captured expression (NoValidChoices,
    # torch 2.13); as_strided makes it a buffer first. On CUDA the lowering does this.
    return x if x is None or x.device.type != "cpu" else x.as_strided(x.shape, x.stride())
