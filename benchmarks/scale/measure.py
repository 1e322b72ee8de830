"""Time of passes that ranks make together, bandwidth of collectives, and errors of results beside one GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Runs of one pass: as many as fit about this time within these limits, after WARM runs that do not count. A run of more
# than SLOW milliseconds gains nothing from further ones.
LEAST, MOST, MILLISECONDS, WARM, SLOW = 3, 20, 500.0, 2, 1000.0
# The largest error of 16 bit results: rounding alone, here and on one GPU, makes 4e-3.
MOST_ERROR = 1.5e-2
SIZES = tuple(1 << n for n in range(20, 30))  # bytes of a rank: 1 MB to 512 MB


class Group(NamedTuple):
    """The ranks that run together: this one, how many they are, and its device."""

    rank: int
    size: int
    device: torch.device


class Passes(NamedTuple):
    """Milliseconds of the slowest rank, the median of the runs; and out with the gradients of the last run."""

    forward: float
    backward: float
    results: list[Tensor]


def time_passes(group: Group, call: Callable[[], Tensor], leaves: Sequence[Tensor], dout: Tensor) -> Passes:
    """Time a forward pass without gradients and a backward pass, every rank at the same time."""
    with torch.no_grad():
        forward = timed(group, call)
    out = call()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(leaves), dout, retain_graph=True)

    milliseconds = timed(group, backward)
    return Passes(forward, milliseconds, [out.detach(), *backward()])


def time_graphs(group: Group, call: Callable[[], Tensor], leaves: Sequence[Tensor], dout: Tensor) -> Passes:
    """Time CUDA graphs of a forward pass and of both passes; the backward pass is what the second takes longer."""
    with torch.no_grad():
        forward = timed(group, captured(call)[0].replay)

    def step() -> list[Tensor]:
        out = call()
        return [out.detach(), *torch.autograd.grad(out, list(leaves), dout)]

    graph, results = captured(step)
    return Passes(forward, timed(group, graph.replay) - forward, results)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a run with its collectives in a CUDA graph; return the graph and the tensors that a replay fills."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()  # compiles, compares the calls of the ranks, and starts NCCL
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The thread that watches NCCL asks for events meanwhile, which a capture of all threads forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph, results


def timed(group: Group, run: Callable[[], Any]) -> float:
    """Return milliseconds of a run on the slowest rank, the median of several."""
    once = _slowest(group, [_once(group, run)])[0]
    if once > SLOW:
        return _slowest(group, [_once(group, run)])[0]
    for _ in range(WARM - 1):
        run()
    once = _slowest(group, [_once(group, run)])[0]
    count = int(min(max(MILLISECONDS / max(once, 1e-3), LEAST), MOST))
    return statistics.median(_slowest(group, [_once(group, run) for _ in range(count)]))


def _once(group: Group, run: Callable[[], Any]) -> float:
    if group.device.type == "cpu":
        dist.barrier()
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    torch.cuda.synchronize()
    dist.barrier()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def _slowest(group: Group, milliseconds: list[float]) -> list[float]:
    together = torch.tensor(milliseconds, device=group.device)
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    slowest: list[float] = together.tolist()
    return slowest


def compare(
    group: Group, names: Sequence[str], results: Sequence[Tensor], wanted: Sequence[Tensor], places: Tensor | None
) -> dict[str, Any]:
    """Return relative errors of each result on the worst rank, and whether all are what rounding leaves.

    Args:
        names: of the results.
        results, wanted: the rows of this rank.
        places: where the rows of `wanted` stand in `results`, None where they are the same.
    """
    errors = {}
    for name, x, y in zip(names, results, wanted, strict=True):
        x = x if places is None else x.index_select(1, places)
        gap = (x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-30)
        errors[name] = _slowest(group, [gap.item()])[0]
    return {"errors": errors, "right": all(error <= MOST_ERROR for error in errors.values())}


def bandwidths(group: Group, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each collective and size: `mb` a rank has, and GB/s that it receives."""
    for size in sizes:
        mine = torch.zeros(size // 2, dtype=torch.bfloat16, device=group.device)
        gathered = torch.empty(size // 2 * group.size, dtype=torch.bfloat16, device=group.device)
        traded = torch.empty_like(mine)
        runs: dict[str, tuple[Callable[[], Any], float]] = {
            "all_gather": (partial(dist.all_gather_into_tensor, gathered, mine), size * (group.size - 1)),
            "all_to_all": (partial(dist.all_to_all_single, traded, mine), size * (group.size - 1) / group.size),
        }
        for name, (run, received) in runs.items():
            milliseconds = timed(group, run)
            yield {"collective": name, "mb": size / 2**20, "ms": milliseconds, "gbs": received / milliseconds / 1e6}
