"""FlexAttention as a backend: its rules, and a call of the contract as differentiable PyTorch on it."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

from ...problem import AttentionProblem, SequenceSpec, TensorSpec, bias_class, dtype_name
from ..protocol import Availability, Backend, Forward, Probe, Rule
from .blocks import BLOCK
from .call import attend_dense, graph_module, widens
from .sequences import attend_sequences, side_sizes

_INT32_MAX = 2**31 - 1


def _largest_row_span(p: AttentionProblem) -> int:
    if p.sequences is not None:  # in consecutive rows
        return max(side.rows for side in side_sizes(p.sequences)) * max(p.head_dim, p.head_dim_v)
    # The kernels add batch and head to the pointer in 64 bits, then row and column in 32.
    return max(1 + max(rows - 1, 0) * strides[1] + (dim - 1) * strides[3] for (_, rows, _, dim), strides in p.rows)


def _listed_tiles(p: AttentionProblem) -> int:
    """Count the elements of a tile list of a call with sequences."""
    if p.sequences is None:
        return 0
    queries, keys = side_sizes(p.sequences)
    return queries.tiles * keys.tiles * (1 if p.mask is None or p.mask.broadcast()[1] else p.num_heads)


def _span_rule(name: str, code: str, spec: Callable[[AttentionProblem], TensorSpec | None]) -> Rule:
    def span(p: AttentionProblem) -> int:
        tensor = spec(p)
        return 0 if tensor is None else tensor.span()

    return Rule(
        code,
        lambda p: span(p) <= _INT32_MAX,
        lambda p: (
            f"{name} spans {span(p)} elements; compiled FlexAttention indexes a captured tensor with 32 bits, "
            f"so at most {_INT32_MAX}"
        ),
        "broadcast a dimension, or split the call over batch or heads",
        example={"q": (1, 1 << 16, 1, 64), name: (1, 1, 1 << 16, 1 << 16)},
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda p: p.device in ("cuda", "cpu"),
        lambda p: f"device is {p.device}; this backend compiles FlexAttention for cuda and cpu",
        'use backend="eager"',
        example={"device": "mps"},
    ),
    Rule(
        "dtype",
        lambda p: p.dtype in (torch.float16, torch.bfloat16, torch.float32),
        lambda p: f"dtype is {dtype_name(p.dtype)}; FlexAttention takes float16, bfloat16 or float32",
        'use backend="eager" for float64',
        example={"dtype": "fp64"},
    ),
    Rule(
        "head_dim",
        lambda p: p.device != "cuda" or (16 <= p.head_dim <= 256 and 16 <= p.head_dim_v <= 256),
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); FlexAttention's kernels take 16 to 256",
        "pad q, k and v with zeros and give softmax_scale, or split the head",
        example={"q": (2, 4096, 16, 8)},
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
        example={"device": "cpu", "grad": True},
    ),
    Rule(
        "cpu_lse",
        lambda p: p.device != "cpu" or not (p.return_lse or p.sink is not None or p.flags.max_scores),
        lambda p: (
            f"{'return_lse' if p.return_lse else 'sink' if p.sink is not None else 'max_scores'} is set on CPU; "
            "FlexAttention's CPU kernel writes neither lse nor maximum scores"
        ),
        'use backend="eager"',
        example={"device": "cpu", "return_lse": True},
    ),
    _span_rule("mask", "mask_span", lambda p: p.mask),
    _span_rule("bias", "bias_span", lambda p: p.bias),
    Rule(
        "row_span",
        lambda p: _largest_row_span(p) <= _INT32_MAX,
        lambda p: (
            f"one head of q, k or v spans {_largest_row_span(p)} elements; FlexAttention's kernels add up row offsets "
            f"in 32 bits, so at most {_INT32_MAX}"
        ),
        "pass tensors whose heads are contiguous: x.transpose(1, 2).contiguous().transpose(1, 2); or split the batch",
        example={"k_strides": (0, 1 << 30, 0, 1)},
    ),
    Rule(
        "tile_lists",
        lambda p: _listed_tiles(p) <= _INT32_MAX,
        lambda p: (
            f"a list of the tiles of all sequences has {_listed_tiles(p)} elements; FlexAttention's kernels find their "
            f"places in it with 32 bits, so at most {_INT32_MAX}"
        ),
        "split the batch: the lists have a row for each tile of queries and a column for each tile of keys",
        example={
            "q": (1, 400000, 16, 64),
            "sequences": SequenceSpec("packed", 60000, 400000, 400000, 400000, 400000),
        },
    ),
    Rule(
        "relative_sequences",
        lambda p: p.relative is None or p.sequences is None,
        lambda p: f"bias is by distance with {p.batch} sequences; the graph has one distance for a row and a column",
        'use backend="eager"',
        example={
            "q": (1, 8192, 16, 64),
            "sequences": SequenceSpec("packed", 8, 8192, 8192, 2048, 2048),
            "bias": (16, 257),
            "by_distance": (128, "clamp", False),
        },
    ),
    Rule(
        "deterministic",
        lambda p: not (p.deterministic and p.needs_grad.bias),
        lambda p: "deterministic is True and the gradient of bias is needed; FlexAttention adds it up with atomics",
        'use backend="eager", or deterministic=False',
        ("backward",),
        example={"bias": (1, 16, 4096, 4096), "bias_grad": True, "deterministic": True},
    ),
)

AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "cpu_compile_time",
        lambda p: p.device != "cpu",
        lambda p: "device is cpu; compiling costs 10 to 30 s per class of call, and eager PyTorch is as fast there",
        'backend="flex" runs it all the same',
        example={"device": "cpu"},
    ),
)


def _missing_for_cpu() -> list[str]:
    """Return the tools that Inductor needs for a CPU and this machine lacks; on Windows it searches itself."""
    if sys.platform == "win32":
        return []
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if shutil.which(compiler) else [compiler]
    return missing if header.is_file() else [*missing, header.name]


def _load() -> Availability:
    try:
        graph_module()
    except Exception as error:
        reason = f"FlexAttention cannot be imported: {type(error).__name__}: {error}"
        return Availability(False, reason, "install torch >= 2.9 whole, with triton on a GPU machine", error)
    try:
        # Without a function, torch.compile only checks the version of Python; a default backend would import Dynamo.
        torch.compile(backend="eager")
    except RuntimeError as error:
        return Availability(False, str(error), "install a newer torch, or use another backend", error)
    capability = torch.backends.cpu.get_cpu_capability()
    if not torch.cuda.is_available() and not capability.startswith("AVX"):
        reason = f"no GPU, and torch serves this CPU as {capability}; FlexAttention compiles for AVX2, AVX512"
        return Availability(False, reason, "unset ATEN_CPU_CAPABILITY if it is set, or use another backend")
    missing = [] if torch.cuda.is_available() else _missing_for_cpu()
    if missing:
        reason = f"no GPU, and a CPU needs FlexAttention compiled with {' and '.join(missing)}, which are not here"
        return Availability(False, reason, "install them (Debian: apt-get install g++ python3-dev)")
    return Availability(True)


probe = Probe(_load)


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """Return notes on the costs of a call besides its kernels, for `explain`."""
    costs = []
    bias, needs = problem.bias, problem.needs_grad
    if bias is not None and widens(bias.dtype, needs.bias, bias_class(bias.shape, bias.strides)):
        why = (
            "to accumulate its gradient"
            if needs.bias
            else "FlexAttention's kernels have no use for its width"
            if bias.dtype == torch.float64
            else "FlexAttention's forward kernel is slow to read 16 bits for a key"
        )
        costs.append(f"copies bias to float32, {4 * bias.span() / 2**20:.1f} MB: {why}")
    if problem.relative is not None:
        costs.append("lays out the values of bias in float32, one for each distance of the call")
    if problem.sequences is not None:
        queries, keys = side_sizes(problem.sequences)
        dims = problem.head_dim + problem.head_dim_v
        # Queries: q and out; keys: k and v.
        copied = (queries.rows * problem.num_heads + keys.rows * problem.num_heads_k) * dims * problem.dtype.itemsize
        lists = 4 * 4 * _listed_tiles(problem)
        costs.append(
            f"copies q, k, v and out into rows of {BLOCK}, none of which two sequences share, {copied / 2**20:.1f} MB, "
            f"with {lists / 2**20:.1f} MB of lists"
        )
    if needs.bias and (problem.relative is not None or (bias is not None and not bias.broadcast()[3])):
        costs.append("the gradient of bias is added up with atomics: not bitwise repeatable")
        if bias is None or bias.broadcast()[2]:
            costs.append("repeats bias over batch and heads, and its gradient until it is summed")
    if any(needs) and not (needs.q and needs.k and needs.v):
        costs.append("computes dq, dk and dv together, also where only some of them are needed")
    if problem.sink is not None:
        costs.append("scales out by the share of probability that the sink leaves, which rounds it once more")
    for name, strides in (("q", problem.q_strides), ("k", problem.k_strides), ("v", problem.v_strides)):
        if problem.device == "cpu" and problem.sequences is None and strides[3] != 1:
            costs.append(f"copies {name}: FlexAttention's CPU kernel needs the head dim contiguous")
    return tuple(costs)


def plan_forward(problem: AttentionProblem) -> Forward:
    """Plan (out,), (out, lse) or (out, lse, max_scores), as the problem asks; differentiable in the inputs of
    `needs_grad`.

    Equivalent PyTorch: `flash_dmattn.reference.formula.attention`, with sequences for each of them.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: one class of calls was compiled more often than torch allows; torch's
            fallback, the dense formula, is never used.

    Source: FlexAttention, arXiv:2412.05496.
    """
    run = attend_dense if problem.sequences is None else attend_sequences
    return lambda inputs: run(problem, inputs)


BACKEND = Backend(
    name="flex",
    plan_forward=plan_forward,
    features=frozenset({"mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse"})
    | {"sink", "sequences", "relative_bias", "max_scores"},
    rules=RULES,
    auto_rules=AUTO_RULES,
    probe=probe,
    notes=notes,
    repeats_entries=True,
)
