"""Time of several attention calls side by side: every repetition of one is followed by one of each of the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Call = Callable[[], Tensor]
How = Literal["events", "graph", "wall clock"]

# Below this a launch takes as long as the kernel, and CUDA graphs are replayed instead.
GRAPH_MS = 0.1
CAPTURED_MS = 1.0  # the longest run that is then captured, too; launches do not bound longer runs
REPLAYED_MS = 0.5  # of work in one graph
LONG_MS = 10.0  # a run of this length makes the time of launches negligible
SLOW_MS = 1000.0  # runs of one pass, from the second on, take about so long at most; one such run is enough
# The buffer that empties the L2 cache. Writing it takes some 250 microseconds on an H200, in which the host enqueues
# the run. Without it, events around a small run would measure the host.
FLUSH_BYTES = 1 << 30
# How often the buffer is written before the first run after a wait, because the host has enqueued nothing then.
FLUSHES_AHEAD = 4


@dataclass
class Runner:
    """One system's pass while it is timed: milliseconds of single runs, or why there are none."""

    run: Callable[[], object]
    how: How = "events"
    ms: list[float] = field(default_factory=list)
    host_us: float | None = None
    error: Exception | None = None
    estimate: float = 0.0
    graph: torch.cuda.CUDAGraph | None = None
    calls: int = 1

    def summary(self) -> dict[str, Any]:
        """Median, 20th and 80th percentile, least, how many runs, how they were taken, and the host's part."""
        ordered = sorted(self.ms)
        last = len(ordered) - 1
        spread = {"p20": ordered[round(0.2 * last)], "p80": ordered[round(0.8 * last)], "min": ordered[0]}
        return {
            "ms": statistics.median(ordered),
            **spread,
            "runs": len(ordered),
            "how": self.how,
            "host_us": self.host_us,
        }


def gradients(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """Run the backward pass that is timed; the graph stays, for the next run."""
    return torch.autograd.grad(out, leaves, dout, retain_graph=True)


def leave_default_stream(device: torch.device) -> None:
    """Make another stream the current one: the default stream cannot be captured, and an attempt harms its generator.

    Tensors of the runs have to be made behind it, because autograd binds leaves to the stream of their first use.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def measure(runners: list[Runner], device: torch.device, *, rep_ms: float, least: int, most: int) -> None:
    """Time runs in turns, each repetition apart.

    CUDA events time each run, with the L2 cache emptied before it. If some run takes less than 0.1 ms, then all runs
    below 1 ms that can be captured are instead replayed as CUDA graphs of several runs. On a CPU the clock times them.

    Args:
        runners: the runs to time. An exception ends the runs of its runner, and is stored there.
        device: the device of the runs. Its current stream may not be the default one: see `leave_default_stream`.
        rep_ms: the approximate time for all runs of a runner, in milliseconds.
        least, most: limits of the number of runs; less than `least` where those would take a second or more.
    """
    if device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        raise RuntimeError("the default stream is in use; it needs to be another one: leave_default_stream(device)")
    stopwatch = Stopwatch(device)
    for runner in runners:
        _attempt(runner, lambda runner=runner: _warm_up(runner, stopwatch))  # type: ignore[misc]
    alive = [runner for runner in runners if runner.error is None]
    if device.type == "cuda" and any(runner.estimate < GRAPH_MS for runner in alive):
        for runner in (runner for runner in alive if runner.estimate < CAPTURED_MS):
            _capture(runner)
    counts = [_count(runner, rep_ms, least, most) for runner in alive]
    rounds = max(counts, default=0)
    for index in range(rounds):
        for runner, count in zip(alive, counts, strict=True):
            if runner.error is None and index * count // rounds != (index + 1) * count // rounds:
                _attempt(runner, lambda runner=runner: stopwatch.start(runner))  # type: ignore[misc]
        try:
            stopwatch.collect()
        except Exception as error:  # an earlier launch failed, and nobody knows which one
            for runner in alive:
                runner.error = runner.error or error
            break
    for runner in alive:
        runner.graph = None  # its memory


def _count(runner: Runner, rep_ms: float, least: int, most: int) -> int:
    """Return how many runs are left; none where the run that showed how long it takes is kept."""
    if runner.ms:
        return 0
    least = max(1, min(least, int(SLOW_MS / runner.estimate)))
    return int(min(max(rep_ms / (runner.estimate * runner.calls), least), most))


class Stopwatch:
    """Times single runs on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.on_gpu else None
        self.pending: list[tuple[Runner, Any, Any]] = []

    def start(self, runner: Runner) -> None:
        """Enqueue one run between two events; on CPU, run it."""
        run = runner.run if runner.graph is None else runner.graph.replay
        if self.flushed is None:
            started = time.perf_counter()
            run()
            runner.ms.append(1e3 * (time.perf_counter() - started))
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(1 if self.pending else FLUSHES_AHEAD):
            self.flushed.zero_()
        first.record()
        run()
        last.record()
        self.pending.append((runner, first, last))

    def collect(self) -> None:
        """Wait for the runs that were started, and give each its time."""
        if self.on_gpu:
            torch.cuda.synchronize()
        for runner, first, last in self.pending:
            runner.ms.append(first.elapsed_time(last) / runner.calls)
        self.pending.clear()


def _attempt(runner: Runner, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        runner.error = error


def _warm_up(runner: Runner, stopwatch: Stopwatch) -> None:
    """Run once, then one to three times to see how long it takes; time the host, too, for a short run.

    The time of a run of more than a second is kept.
    """
    runner.how = "events" if stopwatch.on_gpu else "wall clock"
    runner.run()
    for _ in range(3):
        stopwatch.start(runner)
        stopwatch.collect()
        if runner.ms[-1] > LONG_MS:
            break
    runner.estimate = max(1e-4, statistics.median(runner.ms))
    if runner.estimate <= SLOW_MS:
        runner.ms.clear()
    if stopwatch.on_gpu and runner.estimate <= LONG_MS:
        host = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            runner.run()
            host.append(1e6 * (time.perf_counter() - started))
        runner.host_us = statistics.median(host)
        torch.cuda.synchronize()


def _capture(runner: Runner) -> None:
    """Capture several runs as one CUDA graph; what cannot be captured stays with events, and its rows say so."""
    calls = max(1, int(REPLAYED_MS / runner.estimate))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                runner.run()
    except Exception as error:
        print(f"    not capturable, timed by events: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return
    runner.graph, runner.calls, runner.how = graph, calls, "graph"
    graph.replay()
    torch.cuda.synchronize()
