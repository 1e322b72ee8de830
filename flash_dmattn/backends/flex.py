"""FlexAttention as a backend: its rules, and a call of the contract as differentiable PyTorch on it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..problem import AttentionProblem, TensorSpec, dtype_name
from .flex_blocks import BLOCK, Band, band_of, block_lists
from .protocol import Availability, Rule

NAME = "flex"

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
        lambda p: p.device != "cpu" or not any(p.need),
        lambda p: (
            "gradients of "
            + ", ".join(name for name, needed in zip(p.need._fields, p.need, strict=True) if needed)
            + " are needed on CPU; FlexAttention has no compiled backward pass there, and no lse to start one from"
        ),
        'use backend="eager", or call under torch.no_grad()',
    ),
    Rule(
        "cpu_lse",
        lambda p: p.device != "cpu" or not p.return_lse,
        lambda p: "return_lse is set on CPU; FlexAttention's CPU kernel does not write lse",
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
        lambda p: not (p.deterministic and p.need.bias),
        lambda p: "deterministic is True and the gradient of bias is needed; FlexAttention adds it up with atomics",
        'use backend="eager", or deterministic=False',
        ("backward",),
    ),
    Rule(
        "return_probs",
        lambda p: not p.return_probs,
        lambda p: "return_probs is set; this backend never holds the probabilities of a whole call",
        'use backend="reference"',
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
    from . import flex_graph

    return flex_graph


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """What a call costs beyond its kernels, for `explain`."""
    found = []
    bias = problem.bias
    if bias is not None and _widens(bias.dtype, problem.need.bias):
        why = "to accumulate its gradient" if problem.need.bias else "FlexAttention's kernels have no use for its width"
        found.append(f"copies bias to float32, {4 * _span(bias) / 2**20:.1f} MB: {why}")
    if problem.need.bias:
        found.append("the gradient of bias is added up with atomics: not bitwise repeatable")
    if any(problem.need) and not (problem.need.q and problem.need.k and problem.need.v):
        found.append("computes dq, dk and dv together, also where only some of them are needed")
    for name, strides in (("q", problem.q_strides), ("k", problem.k_strides), ("v", problem.v_strides)):
        if problem.device == "cpu" and strides[3] != 1:
            found.append(f"copies {name}: FlexAttention's CPU kernel needs the head dim contiguous")
    return tuple(found)


def attention(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """(out, lse), or (out,) where the problem does not return lse; differentiable as the problem's `need` asks.

    Equivalent PyTorch: `flash_dmattn.reference.formula.attention`.

    Args:
        problem: the call, one that `RULES` accept.
        q, k, v: (B, L, H, D), any strides.
        mask, bias: 4-D as in the contract, or None.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: one class of calls was compiled more often than torch allows; torch's
            own fallback, the dense formula, is never taken.

    Source: FlexAttention, arXiv:2412.05496.
    """
    if problem.batch == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return _nothing(problem, q, k, v, bias)
    graph = _graph()
    band = band_of(problem)
    mask = None if mask is None else _narrow(mask)
    if bias is not None:
        bias = _narrow(bias)
        if _widens(bias.dtype, problem.need.bias):
            bias = bias.float()
    lists = block_lists(
        mask,
        band,
        num_heads=problem.num_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        device=q.device,
    )
    form = graph.Form(
        problem.softmax_scale,
        problem.softcap,
        problem.num_heads != problem.num_heads_k,
        problem.return_lse,
        _shared(mask, problem.num_heads),
        _shared(bias, problem.num_heads),
    )
    mask, bias = _without_shared_dims(mask), _without_shared_dims(bias)
    if torch.compiler.is_compiling():
        return graph.run(form, q, k, v, _realise(mask), _realise(bias), *band, lists)
    # 0-dim tensors filled on the device: a Python int would be compiled in, a copied tensor would wait for the host.
    lower, upper = (
        None if limit is None else torch.full((), limit, dtype=torch.int32, device=q.device) for limit in band
    )
    function = graph.compiled(form, _specialised(problem, band, bias))
    return function(q, k, v, mask, bias, lower, upper, lists)


def _specialised(problem: AttentionProblem, band: Band, bias: Tensor | None) -> tuple[object, ...]:
    # What torch compiles anew for, whatever the sizes are called: it takes every length of 1 for a constant.
    p = problem
    return (
        p.device,
        p.dtype,
        None if bias is None else bias.dtype,
        (p.num_heads, p.num_heads_k, p.head_dim, p.head_dim_v),
        p.need,
        torch.is_grad_enabled(),
        (band.lower is None, band.upper is None),
        (p.batch == 1, p.seqlen_q == 1, p.seqlen_k == 1, p.seqlen_q <= BLOCK, p.seqlen_k <= BLOCK),
        tuple((s[1] >= s[2], s[3] == 1) for s in (p.q_strides, p.k_strides, p.v_strides)),
    )


def _nothing(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    # FlexAttention refuses length 0. The sum is of no elements, and gives each input a gradient of zeros.
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    zero = sum(x.flatten()[:0].sum(dtype=torch.float32) for x in inputs)
    out = q.new_zeros((problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)) + zero
    if not problem.return_lse:
        return (out.to(q.dtype),)
    rows = (problem.batch, problem.num_heads, problem.seqlen_q)
    return out.to(q.dtype), torch.full(rows, -torch.inf, dtype=torch.float32, device=q.device) + zero


def _widens(dtype: torch.dtype, needs_grad: bool) -> bool:
    # A gradient is added up in the dtype of what it is the gradient of, so in fp32; fp64 would slow the kernel down.
    return dtype == torch.float64 or (needs_grad and dtype != torch.float32)


def _narrow(x: Tensor) -> Tensor:
    """View dims expanded with stride 0 at size 1, where they hold one number; its gradient is spread evenly."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = _Narrow.apply(x, dim) if x.requires_grad else x.narrow(dim, 0, 1)  # type: ignore[no-untyped-call]
    return x


class _Narrow(torch.autograd.Function):
    """x.narrow(dim, 0, 1) of an expanded dim, whose own derivative would be a dense tensor of the expanded shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.size = dim, x.shape[dim]
        return x.narrow(dim, 0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        shape = list(gradient.shape)
        shape[ctx.dim] = ctx.size
        return (gradient / ctx.size).expand(shape), None


def _shared(x: Tensor | None, num_heads: int) -> tuple[tuple[bool, ...], int] | None:
    """Which dims a narrowed mask or bias has, and how many query heads share one of its heads."""
    if x is None:
        return None
    dims = tuple(size > 1 for size in x.shape)
    return dims, num_heads // x.shape[1] if dims[1] else 1


def _without_shared_dims(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape([size for size in x.shape if size > 1] or [1])


def _realise(x: Tensor | None) -> Tensor | None:
    # In a caller's graph x may be an expression. Inductor's CPU kernel fails on one that is captured (NoValidChoices,
    # torch 2.13); as_strided makes it a buffer first. On CUDA the lowering does so itself.
    return x if x is None or x.device.type != "cpu" else x.as_strided(x.shape, x.stride())
