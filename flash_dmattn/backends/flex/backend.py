"""FlexAttention as a backend: its rules, and a call of the contract as differentiable PyTorch on it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...problem import AttentionProblem, BiasClass, TensorSpec, bias_class, dtype_name
from ...reference import formula
from ..protocol import Availability, Rule
from .blocks import BLOCK, Limits, limits_of, prepare_blocks, prepare_in_graph

NAME = "flex"
REPEATS_ENTRIES = True
FEATURES = frozenset({"mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse", "sink"})

_INT32_MAX = 2**31 - 1


def _row_span(strides: tuple[int, ...], length: int, head_dim: int) -> int:
    # The kernels add batch and head to the pointer in 64 bits, then row and column in 32.
    return 1 + max(length - 1, 0) * strides[1] + (head_dim - 1) * strides[3]


def _largest_row_span(p: AttentionProblem) -> int:
    return max(
        _row_span(p.q_strides, p.seqlen_q, p.head_dim),
        _row_span(p.k_strides, p.seqlen_k, p.head_dim),
        _row_span(p.v_strides, p.seqlen_k, p.head_dim_v),
    )


def _span(spec: TensorSpec | None) -> int:
    return 0 if spec is None else spec.span()


RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda p: p.device in ("cuda", "cpu"),
        lambda p: f"device is {p.device}; this backend compiles FlexAttention for cuda and cpu",
        'use backend="eager"',
    ),
    Rule(
        "dtype",
        lambda p: p.dtype in (torch.float16, torch.bfloat16, torch.float32),
        lambda p: f"dtype is {dtype_name(p.dtype)}; FlexAttention takes float16, bfloat16 or float32",
        'use backend="eager" for float64',
    ),
    Rule(
        "head_dim",
        lambda p: p.device != "cuda" or (16 <= p.head_dim <= 256 and 16 <= p.head_dim_v <= 256),
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); FlexAttention's kernels take 16 to 256",
        "pad q, k and v with zeros and give softmax_scale, or split the head",
    ),
    Rule(
        "cpu_backward",
        lambda p: p.device != "cpu" or not any(p.needs_grad),
        lambda p: (
            "gradients of "
            + ", ".join(name for name, needed in zip(p.needs_grad._fields, p.needs_grad, strict=True) if needed)
            + " are needed on CPU; FlexAttention has no compiled backward pass there, and no lse to start one from"
        ),
        'use backend="eager", or call under torch.no_grad()',
    ),
    Rule(
        "cpu_lse",
        lambda p: p.device != "cpu" or not (p.return_lse or p.sink is not None),
        lambda p: (
            f"{'return_lse' if p.return_lse else 'sink'} is set on CPU; FlexAttention's CPU kernel does not write lse"
        ),
        'use backend="eager"',
    ),
    Rule(
        "mask_span",
        lambda p: _span(p.mask) <= _INT32_MAX,
        lambda p: (
            f"mask spans {_span(p.mask)} elements; compiled FlexAttention indexes a captured tensor with 32 bits, "
            f"so at most {_INT32_MAX}"
        ),
        "broadcast a dimension, or split the call over batch or heads",
    ),
    Rule(
        "bias_span",
        lambda p: _span(p.bias) <= _INT32_MAX,
        lambda p: (
            f"bias spans {_span(p.bias)} elements; compiled FlexAttention indexes a captured tensor with 32 bits, "
            f"so at most {_INT32_MAX}"
        ),
        "broadcast a dimension, or split the call over batch or heads",
    ),
    Rule(
        "row_span",
        lambda p: _largest_row_span(p) <= _INT32_MAX,
        lambda p: (
            f"one head of q, k or v spans {_largest_row_span(p)} elements; FlexAttention's kernels add up row offsets "
            f"in 32 bits, so at most {_INT32_MAX}"
        ),
        "pass tensors whose heads are contiguous: x.transpose(1, 2).contiguous().transpose(1, 2)",
    ),
    Rule(
        "deterministic",
        lambda p: not (p.deterministic and p.needs_grad.bias),
        lambda p: "deterministic is True and the gradient of bias is needed; FlexAttention adds it up with atomics",
        'use backend="eager", or deterministic=False',
        ("backward",),
    ),
)

AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "cpu_compile_time",
        lambda p: p.device != "cpu",
        lambda p: "device is cpu; compiling costs 10 to 30 s per class of call, and eager PyTorch is as fast there",
        'backend="flex" runs it all the same',
    ),
)

_found: Availability | None = None


def probe() -> Availability:
    """Whether FlexAttention can be imported and compiled; the first result is remembered."""
    global _found
    if _found is None:
        _found = _load()
    return _found


def _load() -> Availability:
    try:
        _graph()
    except Exception as error:
        reason = f"FlexAttention cannot be imported: {type(error).__name__}: {error}"
        return Availability(False, reason, "install torch >= 2.9 whole, with triton on a GPU machine", error)
    return Availability(True)


def _graph() -> ModuleType:
    # An import statement, not importlib: under torch.compile dynamo runs the former and refuses the latter.
    from . import graph as flex_graph

    return flex_graph


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """What a call costs beyond its kernels, for `explain`."""
    found = []
    bias = problem.bias
    if bias is not None and _widens(bias.dtype, problem.needs_grad.bias, bias_class(bias.shape, bias.strides)):
        why = (
            "to accumulate its gradient"
            if problem.needs_grad.bias
            else "FlexAttention's kernels have no use for its width"
            if bias.dtype == torch.float64
            else "FlexAttention's forward kernel is slow to read 16 bits for a key"
        )
        found.append(f"copies bias to float32, {4 * _span(bias) / 2**20:.1f} MB: {why}")
    if problem.needs_grad.bias and bias is not None and not bias.broadcast()[3]:
        found.append("the gradient of bias is added up with atomics: not bitwise repeatable")
        if bias.broadcast()[2]:
            found.append("repeats bias over batch and heads, and its gradient until it is summed")
    if any(problem.needs_grad) and not (problem.needs_grad.q and problem.needs_grad.k and problem.needs_grad.v):
        found.append("computes dq, dk and dv together, also where only some of them are needed")
    if problem.sink is not None:
        found.append("scales out by the share of the keys beside the sink, once more rounded")
    for name, strides in (("q", problem.q_strides), ("k", problem.k_strides), ("v", problem.v_strides)):
        if problem.device == "cpu" and strides[3] != 1:
            found.append(f"copies {name}: FlexAttention's CPU kernel needs the head dim contiguous")
    return tuple(found)


def attention(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(out, lse), or (out,) where the problem does not return lse; differentiable as the problem's `needs_grad` asks.

    Equivalent PyTorch: `flash_dmattn.reference.formula.attention`.

    Args:
        problem: the call, one that `RULES` accept.
        q, k, v: (B, L, H, D), any strides.
        mask, bias: 4-D as in the contract, or None.
        sink: (Hq,) or None.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: one class of calls was compiled more often than torch allows; torch's
            own fallback, the dense formula, is never taken.

    Source: FlexAttention, arXiv:2412.05496.
    """
    if sink is not None:
        of_keys = problem._replace(return_lse=True, sink=None, needs_grad=problem.needs_grad._replace(sink=False))
        out, lse = attention(of_keys, q, k, v, mask, bias)
        return _with_sink(out, lse, sink)[: 1 + problem.return_lse]
    if problem.batch == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return _nothing(problem, q, k, v, bias)
    if not any(problem.needs_grad):
        # On CPU FlexAttention refuses what requires a gradient, also where none is recorded.
        q, k, v = _detached(q), _detached(k), _detached(v)
        bias = None if bias is None else _detached(bias)
    graph = _graph()
    limits = limits_of(problem)
    mask = None if mask is None else _narrow(mask)
    row_bias = None
    if bias is not None:
        if not problem.needs_grad.bias:
            bias = _narrow(bias)  # with a gradient it keeps its shape, which each place has its own derivative in
        if _widens(bias.dtype, problem.needs_grad.bias, bias_class(bias.shape)):
            bias = _ToFloat32.apply(bias)
        if problem.needs_grad.bias and bias.shape[3] == 1:
            row_bias, bias = bias, bias.detach()
        elif problem.needs_grad.bias and bias.shape[2] == 1:
            bias = _partial_sums(problem, bias)
    compiling = torch.compiler.is_compiling()
    prepare = prepare_in_graph if compiling else prepare_blocks
    lists, lower, upper = prepare(mask, limits, problem, q.device)
    if mask is not None and mask.shape[2] == 1:
        mask = mask.to(torch.int32)  # a byte for a key is as slow to read as 16 bits: see _widens
    form = graph.Form(
        problem.softmax_scale,
        problem.softcap,
        problem.num_heads != problem.num_heads_k,
        problem.return_lse,
        None if mask is None else graph.shared(mask, problem.num_heads, problem.batch, problem.flags.mask_repeat),
        None if bias is None else graph.shared(bias, problem.num_heads, problem.batch, problem.flags.bias_repeat),
        _num_stages(problem, mask, bias),
        # Torch chooses its decoding kernel below 128 queries, and then finds no configuration of it where the queries
        # of a group of heads fill more than one block (H200, torch 2.11).
        problem.seqlen_q < BLOCK < problem.seqlen_q * (problem.num_heads // problem.num_heads_k),
    )
    if compiling:
        results = graph.run(form, q, k, v, _realise(mask), _realise(bias), lower, upper, lists)
        return results if row_bias is None else _through_lse(problem, results, row_bias)
    specialised = _specialised(problem, limits, bias)
    # With symbolic lengths Inductor's CPU kernel does not always compile (an undeclared name in its C++, torch 2.13).
    static = problem.device == "cpu" and graph.compiler == "inductor"
    if static:
        specialised += (problem.batch, problem.seqlen_q, problem.seqlen_k, None if mask is None else mask.shape)
    function = graph.compiled(form, specialised, dynamic=False if static else None)
    results = function(q, k, v, mask, bias, lower, upper, lists)
    return results if row_bias is None else _through_lse(problem, results, row_bias)


def _specialised(problem: AttentionProblem, limits: Limits, bias: Tensor | None) -> tuple[object, ...]:
    # What torch compiles anew for, whatever the sizes are called: it takes every length of 1 for a constant.
    p = problem
    return (
        p.device,
        p.dtype,
        None if bias is None else bias.dtype,
        (p.num_heads, p.num_heads_k, p.head_dim, p.head_dim_v),
        p.needs_grad,
        torch.is_grad_enabled(),
        (limits.lower is None, limits.upper is None),
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


def _nothing(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    # FlexAttention refuses length 0. The sum is of no elements, and gives each input a gradient of zeros.
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    zero = sum(x.flatten()[:0].sum(dtype=torch.float32) for x in inputs)
    out = q.new_zeros((problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)) + zero
    if not problem.return_lse:
        return (out.to(q.dtype),)
    rows = (problem.batch, problem.num_heads, problem.seqlen_q)
    return out.to(q.dtype), torch.full(rows, -torch.inf, dtype=torch.float32, device=q.device) + zero


def _widens(dtype: torch.dtype, needs_grad: bool, held: BiasClass) -> bool:
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


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
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
