"""Time and peak memory of one attention call on the GPU, forward and backward apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Tensor]
How = Literal["events", "graph"]

REPLAYS = 10


class Samples(NamedTuple):
    """Milliseconds of single runs, and how they were taken: by events round each, or by replaying a CUDA graph."""

    ms: list[float]
    how: How

    def summary(self) -> tuple[float, float, float]:
        """Median, 20th and 80th percentile."""
        ordered = sorted(self.ms)
        last = len(ordered) - 1
        return statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]


def gradients(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """The backward pass that is timed; the graph stays, for the next run."""
    return torch.autograd.grad(out, leaves, dout, retain_graph=True)


def measure(
    call: Call, leaves: Sequence[Tensor], dout: Tensor, *, as_graph: bool, rep_ms: float
) -> tuple[Samples, Samples]:
    """Time a call without gradients, then the backward of one with them.

    Args:
        call: the forward; of `leaves`, whose gradients are taken.
        dout: gradient of what it returns.
        as_graph: replay CUDA graphs, so that only the device's time counts. A pass that cannot be captured is timed by
            events, and the samples say so.
        rep_ms: about how long each pass is timed, in milliseconds.
    """
    torch.cuda.synchronize()
    with torch.no_grad():
        forward = sample(call, as_graph, rep_ms)
    backward = sample(partial(gradients, call(), leaves, dout), as_graph, rep_ms)
    torch.cuda.synchronize()
    return forward, backward


def sample(run: Callable[[], object], as_graph: bool, rep_ms: float) -> Samples:
    """Times of single runs on the current stream."""
    if as_graph:
        try:
            return Samples(_replayed(run, rep_ms), "graph")
        except RuntimeError as error:
            print(f"    not capturable, timed by events: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
    from triton.testing import do_bench

    return Samples(do_bench(run, warmup=rep_ms / 4, rep=rep_ms, return_mode="all"), "events")


def _replayed(run: Callable[[], object], rep_ms: float) -> list[float]:
    # As triton.testing.do_bench_cudagraph, which opens a stream of its own, where no backward can be captured.
    for _ in range(3):
        run()
    calls = max(1, int(rep_ms / REPLAYS / _elapsed(run, 5)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            run()
    graph.replay()
    return [_elapsed(graph.replay, 1) / calls for _ in range(REPLAYS)]


def _elapsed(run: Callable[[], object], times: int) -> float:
    """Milliseconds of one of `times` runs in a row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / times


def run_once(call: Call, leaves: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    """out and the gradients of one forward and backward."""
    out = call()
    return {"out": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True))}


def peak_mb(call: Call, leaves: dict[str, Tensor], dout: Tensor) -> float:
    """Most memory that one forward and backward, out and gradients included, hold at once above the inputs, in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_once(call, leaves, dout)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
