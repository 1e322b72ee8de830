"""What `attention()` adds to its backend on the smallest of calls, (1, 8, 2, 16): time of the host alone.

The bare backend is its `forward` and `backward`, called with a problem described beforehand. Rounds of both alternate
and the best of each counts: rounds are short, so that some of them find a busy machine idle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, cast

import torch

import flash_dmattn
from flash_dmattn.backends.protocol import KernelBackend, accepts
from flash_dmattn.dispatch.registry import BACKENDS, probe
from flash_dmattn.problem import MaskView

GOAL_US = 15.0
SHAPE = (1, 8, 2, 16)
CANDIDATES = ("cuda", "triton", "eager")


def best_us(functions: list[Callable[[], object]], rounds: int, calls: int) -> list[float]:
    """The least time of one call of each function, in microseconds, over alternating rounds."""
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
    backend = cast(KernelBackend, BACKENDS[name])
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    q, k, v, dout = torch.randn(4, *SHAPE, device=device, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    alone = flash_dmattn.explain(q, k, v).problem
    problem = flash_dmattn.explain(*leaves).problem

    def forward() -> object:
        return flash_dmattn.attention(q, k, v, backend=name)

    def bare_forward() -> object:
        return backend.forward(alone, q, k, v, MaskView(), None)

    def both() -> object:
        return torch.autograd.grad(flash_dmattn.attention(*leaves, backend=name), leaves, dout)

    def bare_both() -> object:
        out, lse = backend.forward(problem, q, k, v, MaskView(), None)
        return backend.backward(problem, dout, None, q, k, v, MaskView(), None, out, lse)

    found: dict[str, list[Callable[[], object]]] = {}
    if accepts(backend, alone, "forward"):
        found["forward, no grad"] = [forward, bare_forward]
        if accepts(backend, problem, "backward"):
            found["forward + backward"] = [both, bare_both]
    return found


def run(given: argparse.Namespace) -> int:
    """Print the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    print(f"microseconds of the host for q, k, v of {SHAPE}; goal for forward: at most {GOAL_US:.0f} added")
    print(f"{'':30}{'attention()':>12}{'backend':>10}{'added':>8}")
    for name in CANDIDATES:
        if not probe(name).usable or (device.type == "cpu" and name != "eager"):
            continue
        for which, functions in pairs(name, device).items():
            ours, bare = best_us(functions, given.rounds, given.calls)
            print(f"{name + ', ' + which:30}{ours:12.1f}{bare:10.1f}{ours - bare:8.1f}")
    return 0


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    command = commands.add_parser("dispatch", help="what attention() adds to its backend, on the host")
    command.add_argument("--rounds", type=int, default=1000)
    command.add_argument("--calls", type=int, default=10, help="calls in one round")
    command.set_defaults(run=run)
