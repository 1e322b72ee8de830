"""Time what `attention()` adds to its backend on the smallest calls, (1, 8, 2, 16), on the host alone.

The bare backend is its two passes, planned beforehand. Rounds of both alternate and the best of each counts: rounds are
short, so that some of them find a busy machine idle.

`--kinds` times other calls, of (2, 256, 4, 64): with masks, biases and sequences. It times a forward pass without
gradients, and a step, which is forward and backward. SDPA and an `autograd.Function` that does nothing stand beside
them; the latter is the floor of a step in Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

import flash_dmattn
from flash_dmattn.dispatch.config import parse_choice
from flash_dmattn.dispatch.plan import backward_pass, forward_pass
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.problem.inputs import Inputs, Saved

GOAL_US = 15.0
SHAPE = (1, 8, 2, 16)
CANDIDATES = ("cuda", "triton", "eager")
BATCH, LENGTH, HEADS, HEAD_DIM = OF_KINDS = (2, 256, 4, 64)


def best_us(functions: Sequence[Callable[[], object]], rounds: int, calls: int) -> list[float]:
    """Return the least time of one call of each function, in microseconds, over alternating rounds."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / calls * 1e6)
    return best


def pairs(name: str, device: torch.device) -> dict[str, list[Callable[[], object]]]:
    """By pass, the call and the bare backend; a pass that the backend refuses is missing."""
    backend, choice = BACKENDS[name], parse_choice(name)
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    q, k, v, dout = torch.randn(4, *SHAPE, device=device, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    alone = flash_dmattn.explain(q, k, v).problem
    problem = flash_dmattn.explain(*leaves).problem

    def forward() -> object:
        return flash_dmattn.attention(q, k, v, backend=choice)

    def bare_forward() -> object:
        return forward_pass(backend, alone)(Inputs(q, k, v))

    def both() -> object:
        return torch.autograd.grad(flash_dmattn.attention(*leaves, backend=choice), leaves, dout)

    def bare_both() -> object:
        inputs = Inputs(q, k, v)
        out, lse = forward_pass(backend, problem)(inputs)
        return backward_pass(backend, problem)(Saved(inputs, out, lse), dout, None)

    functions: dict[str, list[Callable[[], object]]] = {}
    if backend.accepts(alone, "forward"):
        functions["forward, no grad"] = [forward, bare_forward]
        if backend.accepts(problem, "backward"):
            functions["forward + backward"] = [both, bare_both]
    return functions


class _Nothing(torch.autograd.Function):
    """A function in Python that allocates its result and its gradients, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def kinds(device: torch.device) -> dict[str, tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]]:
    """By name, the inputs of a kind of call, and the call of them."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = torch.randn(3, *OF_KINDS, device=device, dtype=dtype)
    tokens = tuple(x.flatten(0, 1) for x in (q, k, v))
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, dtype=dtype)
    lengths = torch.tensor([LENGTH, LENGTH // 2], device=device, dtype=torch.int32)
    keys = (torch.arange(LENGTH, device=device) < lengths[:, None])[:, None, None]
    causal = torch.ones(LENGTH, LENGTH, device=device, dtype=torch.bool).tril()
    pairs = causal ^ (torch.rand(LENGTH, LENGTH, device=device) < 0.1)
    edges = torch.tensor([0, LENGTH // 2, BATCH * LENGTH], device=device, dtype=torch.int32)
    packed = flash_dmattn.Sequences.packed(edges, max_seqlen_q=2 * LENGTH)
    padded = flash_dmattn.Sequences.padded(seqlens_q=lengths, seqlens_k=lengths)
    prepared = flash_dmattn.masks.PreparedMask.from_mask(pairs)
    heads_first = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))

    def ours(*inputs: torch.Tensor, **others: Any) -> torch.Tensor:
        return cast(torch.Tensor, flash_dmattn.attention(*inputs, **others))

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "plain": ((q, k, v), ours),
        "bias": ((q, k, v, bias), lambda q, k, v, bias: ours(q, k, v, bias=bias)),
        "mask of pairs": ((q, k, v), lambda *x: ours(*x, pairs)),
        "mask of keys (B, 1, 1, L)": ((q, k, v), lambda *x: ours(*x, keys)),
        "prepared mask": ((q, k, v), lambda *x: ours(*x, mask=prepared)),
        "padded sequences": ((q, k, v), lambda *x: ours(*x, sequences=padded)),
        "packed sequences": (tokens, lambda *x: ours(*x, sequences=packed)),
        "packed sequences, made anew": (
            tokens,
            lambda *x: ours(*x, sequences=flash_dmattn.Sequences.packed(edges, max_seqlen_q=2 * LENGTH)),
        ),
        "a function that does nothing": ((q, k, v), _Nothing.apply),
        "SDPA": (heads_first, sdpa),
        "SDPA, mask of keys": (heads_first, lambda q, k, v: sdpa(q, k, v, attn_mask=keys)),
    }


def run_kinds(options: argparse.Namespace, device: torch.device) -> int:
    print(f"microseconds of the host for q, k, v of {OF_KINDS} on {device.type}, backend {options.backend!r}")
    print(f"{'':30}{'forward':>10}{'step':>10}")
    calls = kinds(device)

    def forward(inputs: tuple[torch.Tensor, ...], call: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: call(*inputs)

    def step(inputs: tuple[torch.Tensor, ...], call: Callable[..., torch.Tensor]) -> Callable[[], object]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        dout = torch.randn_like(call(*leaves))
        return lambda: torch.autograd.grad(call(*leaves), leaves, dout)

    with flash_dmattn.config(backend=options.backend):
        once = best_us([forward(*one) for one in calls.values()], options.rounds, options.calls)
        both = best_us([step(*one) for one in calls.values()], options.rounds, options.calls)
    for name, *taken in zip(calls, once, both, strict=True):
        print(f"{name:30}{taken[0]:10.1f}{taken[1]:10.1f}")
    return 0


def run(args: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    if args.kinds:
        return run_kinds(args, device)
    print(f"microseconds of the host for q, k, v of {SHAPE}; goal for forward: at most {GOAL_US:.0f} added")
    print(f"{'':30}{'attention()':>12}{'backend':>10}{'added':>8}")
    for name in CANDIDATES:
        if not BACKENDS[name].probe().usable or (device.type == "cpu" and name != "eager"):
            continue
        for which, functions in pairs(name, device).items():
            ours, bare = best_us(functions, args.rounds, args.calls)
            print(f"{name + ', ' + which:30}{ours:12.1f}{bare:10.1f}{ours - bare:8.1f}")
    return 0


def add_parser(commands: Any) -> None:
    command = commands.add_parser("dispatch", help="what attention() adds to its backend, on the host")
    command.add_argument("--rounds", type=int, default=1000)
    command.add_argument("--calls", type=int, default=10, help="calls in one round")
    command.add_argument("--kinds", action="store_true", help="kinds of calls, with masks and sequences, beside SDPA")
    command.add_argument("--backend", default="auto", help="of --kinds")
    command.set_defaults(run=run)
