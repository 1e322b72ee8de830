"""One dense FlexAttention call as differentiable PyTorch: how mask and bias go in, and gradients come out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...problem import AttentionProblem, BiasClass, Packing, bias_class
from ...problem.inputs import Inputs
from ...reference import formula
from .blocks import BLOCK, Blocks


def graph_module() -> ModuleType:
    """`graph.py`, imported on its first use: it imports FlexAttention."""
    # An import statement, not importlib: under torch.compile dynamo runs the former and refuses the latter.
    from . import graph

    return graph


def ready_inputs(problem: AttentionProblem, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Drop gradients that nobody needs and expanded dims, and bring a bias into the dtype that is read."""
    q, k, v, mask, bias = x.q, x.k, x.v, x.mask.dense, x.bias
    if not any(problem.needs_grad):
        # On CPU FlexAttention refuses what requires a gradient, also where none is recorded.
        q, k, v = _detached(q), _detached(k), _detached(v)
        bias = None if bias is None else _detached(bias)
    mask = None if mask is None else _narrow(mask)
    if bias is not None:
        if not problem.needs_grad.bias:
            bias = _narrow(bias)  # with a gradient it keeps its shape, which each place has its own derivative in
        if widens(bias.dtype, problem.needs_grad.bias, bias_class(bias.shape)):
            bias = _ToFloat32.apply(bias)
    return q, k, v, mask, bias


def attend(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    blocks: Blocks,
    packing: tuple[Packing | None, Packing | None] = (None, None),
) -> tuple[Tensor, ...]:
    """(out, lse), or (out,) where the problem does not return lse.

    Args:
        problem: a dense call: of sequences, that of the rows that they are laid out in.
        q, k, v: (B, L, H, D).
        mask, bias: 4-D, as `ready_inputs` has them.
        blocks: the tile lists and limits of the call.
        packing: how mask and bias are read through the places of `blocks`; None is as dense ones.
    """
    row_bias = None
    if bias is not None:
        if problem.needs_grad.bias and bias.shape[3] == 1:
            row_bias, bias = bias, bias.detach()
        elif problem.needs_grad.bias and bias.shape[2] == 1:
            bias = _partial_sums(problem, bias)
    if mask is not None and mask.shape[2] == 1:
        mask = mask.to(torch.int32)  # a byte for a key is as slow to read as 16 bits: see `widens`
    graph = graph_module()
    flags, of_mask, of_bias = problem.flags, packing[0], packing[1]
    form = graph.Form(
        problem.softmax_scale,
        problem.softcap,
        problem.num_heads != problem.num_heads_k,
        problem.return_lse,
        None if mask is None else graph.shared(mask, problem.num_heads, problem.batch, flags.mask_repeat, of_mask),
        None if bias is None else graph.shared(bias, problem.num_heads, problem.batch, flags.bias_repeat, of_bias),
        _num_stages(problem, mask, bias),
        # Torch chooses its decoding kernel below 128 queries, and then finds no configuration of it where the queries
        # of a group of heads fill more than one block (H200, torch 2.11).
        problem.seqlen_q < BLOCK < problem.seqlen_q * (problem.num_heads // problem.num_heads_k),
    )
    if torch.compiler.is_compiling():
        results = graph.run(form, q, k, v, _realise(mask), _realise(bias), *blocks)
        return results if row_bias is None else _through_lse(problem, results, row_bias)
    specialised = _specialised(problem, blocks, bias)
    # With symbolic lengths Inductor's CPU kernel does not always compile (an undeclared name in its C++, torch 2.13).
    static = problem.device == "cpu" and graph.compiler == "inductor"
    if static:
        specialised += (problem.batch, problem.seqlen_q, problem.seqlen_k, None if mask is None else mask.shape)
        specialised += (None if bias is None or blocks.places is None else bias.shape,)
    function = graph.compiled(form, specialised, dynamic=False if static else None)
    results = function(q, k, v, mask, bias, *blocks)
    return results if row_bias is None else _through_lse(problem, results, row_bias)


def nothing(problem: AttentionProblem, q: Tensor, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The results of a call without a pair of a query and a key; `inputs` are those that get a gradient of zeros."""
    # FlexAttention refuses length 0. The sum is of no elements, and gives each input a gradient of zeros.
    zero = sum(x.flatten()[:0].sum(dtype=torch.float32) for x in inputs if x is not None)
    batch, seqlen_q, num_heads, _ = q.shape
    out = (q.new_zeros((batch, seqlen_q, num_heads, problem.head_dim_v)) + zero).to(q.dtype)
    if not problem.return_lse:
        return (out,)
    return out, torch.full((batch, num_heads, seqlen_q), -torch.inf, dtype=torch.float32, device=q.device) + zero


def _specialised(problem: AttentionProblem, blocks: Blocks, bias: Tensor | None) -> tuple[object, ...]:
    # What torch compiles anew for, whatever the sizes are called: it takes every length of 1 for a constant.
    p = problem
    return (
        p.device,
        p.dtype,
        None if bias is None else bias.dtype,
        (p.num_heads, p.num_heads_k, p.head_dim, p.head_dim_v),
        p.needs_grad,
        torch.is_grad_enabled(),
        tuple(None if x is None else x.dim() for x in (blocks.lower, blocks.upper)),
        (p.batch == 1, p.seqlen_q == 1, p.seqlen_k == 1, p.seqlen_q <= BLOCK, p.seqlen_k <= BLOCK),
        tuple((s[1] >= s[2], s[3] == 1) for s in (p.q_strides, p.k_strides, p.v_strides)),
    )


def _num_stages(problem: AttentionProblem, mask: Tensor | None, bias: Tensor | None) -> int | None:
    # Torch's three stages leave no shared memory for pipelined tiles of a captured tensor, and the compilation fails:
    # 272 of 227 KB for the backward at head dim 128 with a mask and a bias of one value per score, 240 KB for the
    # forward at head dim 64 with a bias in fp32 (H200, torch 2.11).
    tiles = any(x is not None and x.shape[2] > 1 and x.shape[3] > 1 for x in (mask, bias))
    if not tiles or problem.device != "cuda":
        return None
    return 2 if problem.arch == "sm_90" and max(problem.head_dim, problem.head_dim_v) <= 128 else 1


def _detached(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def widens(dtype: torch.dtype, needs_grad: bool, held: BiasClass) -> bool:
    # A gradient is added up in the dtype of what it is the gradient of, so in fp32; fp64 would slow the kernel down.
    # With 16 bits for a key the forward kernel takes 6 ms in the place of 0.1 (H200, torch 2.11, 2 x 2048 x 16 x 64).
    return dtype == torch.float64 or (dtype != torch.float32 and (needs_grad or held == "key"))


def _partial_sums(problem: AttentionProblem, bias: Tensor) -> Tensor:
    """Repeat a bias of one number per key to (B, Hq, 1, Lk), so that its gradient is many short sums.

    Autograd adds those up in pairs. One sum of a million terms, each added by an atomic, loses 5e-5 in fp32, and the
    atomics wait for one another.
    """
    bias = formula.spread_entries(_per_query_head(bias, problem.num_heads), problem.batch, problem.flags.bias_repeat)
    return bias.expand(problem.batch, -1, -1, -1).contiguous()


def _per_query_head(x: Tensor, num_heads: int) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, num_heads // x.shape[1], -1, -1).flatten(1, 2)


def _through_lse(problem: AttentionProblem, results: tuple[Tensor, ...], bias: Tensor) -> tuple[Tensor, ...]:
    """Add the gradient of a bias of one number per query: out does not depend on it, and lse as on a summand.

    Summing ds over the keys would give the same but for the rounding of delta, which is then all that is left of it.
    """
    nothing = bias.flatten()[:0].sum()
    out = results[0] + nothing.to(results[0].dtype)
    if len(results) == 1:
        return (out,)
    lse = results[1]
    rows = formula.spread_entries(
        _per_query_head(bias, lse.shape[1]).squeeze(3), problem.batch, problem.flags.bias_repeat
    )
    return out, lse + torch.where(lse == -torch.inf, 0.0, rows - rows.detach())


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of keys alone with the sinks of heads.

    Not as a score_mod of one more key, which would be a row of k and v. Through logsigmoid and logaddexp the gradient
    of a sink that takes little, or nearly everything, is as exact as that of any other.
    """
    logits = sink.to(lse.dtype)[:, None]
    has_none = logits == -torch.inf
    gap = torch.where(has_none, torch.inf, lse - logits)  # of an empty row too, where that is NaN
    share = torch.nn.functional.logsigmoid(gap).exp().mT.unsqueeze(3)
    lse = torch.where(has_none, lse, torch.logaddexp(lse, logits.masked_fill(has_none, 0.0)))
    return (out.to(lse.dtype) * share).to(out.dtype), lse


def _narrow(x: Tensor) -> Tensor:
    """View dims expanded with stride 0 at size 1, where they hold one number."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(dim, 0, 1)
    return x


class _ToFloat32(torch.autograd.Function):
    """x.float() that leaves dims of stride 0 expanded: the conversion of a tensor would fill them with copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return _narrow(x).float().expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


def _realise(x: Tensor | None) -> Tensor | None:
    # In a caller's graph x may be an expression. Inductor's CPU kernel fails on one that is captured (NoValidChoices,
    # torch 2.13); as_strided makes it a buffer first. On CUDA the lowering does so itself.
    return x if x is None or x.device.type != "cpu" else x.as_strided(x.shape, x.stride())
