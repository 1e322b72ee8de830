"""What `attention()` adds to its backend on the smallest of calls: (1, 8, 2, 16) on the CPU, one thread.

    python -m benchmarks.dispatch_cost

The bare backend is `backends.eager.forward` and `.backward`, called with a problem described beforehand. Rounds of
both alternate and the best of each counts: rounds are short, so that some of them find a busy machine idle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import flash_dmattn
from flash_dmattn.backends import eager

GOAL_US = 15.0
SHAPE = (1, 8, 2, 16)


def best_us(functions: list[Callable[[], object]], rounds: int, calls: int) -> list[float]:
    """The least time of one call of each function, in microseconds, over alternating rounds."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / calls * 1e6)
    return best


def without_gradients() -> list[Callable[[], object]]:
    """The call and the bare forward, nothing requiring a gradient."""
    q, k, v = torch.randn(3, *SHAPE)
    problem = flash_dmattn.explain(q, k, v).problem
    return [lambda: flash_dmattn.attention(q, k, v), lambda: eager.forward(problem, q, k, v, (), None)]


def with_gradients() -> list[Callable[[], object]]:
    """The call and its gradients, and the bare forward and backward."""
    q, k, v, dout = torch.randn(4, *SHAPE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    problem = flash_dmattn.explain(*leaves).problem

    def ours() -> object:
        return torch.autograd.grad(flash_dmattn.attention(*leaves), leaves, dout)

    def bare() -> object:
        out, lse = eager.forward(problem, q, k, v, (), None)
        return eager.backward(problem, dout, None, q, k, v, (), None, out, lse)

    return [ours, bare]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=10, help="calls in one round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"microseconds for q, k, v of {SHAPE}, fp32, CPU, 1 thread; goal for forward: at most {GOAL_US:.0f} added")
    print(f"{'':20}{'attention()':>12}{'backend':>10}{'added':>8}")
    for name, functions in (("forward, no grad", without_gradients()), ("forward + backward", with_gradients())):
        ours, bare = best_us(functions, arguments.rounds, arguments.calls)
        print(f"{name:20}{ours:12.1f}{bare:10.1f}{ours - bare:8.1f}")


if __name__ == "__main__":
    main()
