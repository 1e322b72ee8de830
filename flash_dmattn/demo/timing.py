"""How long each backend takes for one real call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from .gradient_check import Call


class TimedBackend(NamedTuple):
    """Median time of one backend in milliseconds, None where it cannot, and why."""

    backend: str
    dtype: torch.dtype
    forward_ms: float | None
    both_ms: float | None
    reasons: tuple[str, ...]


def time_call(call: Call, repeats: int = 10) -> list[TimedBackend]:
    """Time every backend on a call: the forward without gradients, and forward with backward.

    Args:
        call: tensors of the size and dtype to time.
        repeats: timed runs after two to warm up; the median is taken.
    """
    device = call.arguments.q.device
    timed = []
    for verdict in call.explain().verdicts:
        forward_ms = both_ms = None
        if verdict.forward:
            forward_ms = median_ms(torch.no_grad()(lambda name=verdict.backend: call.run(name)), repeats, device)
        if verdict.accepts:
            both_ms = median_ms(lambda name=verdict.backend: call.gradients(call.run(name)), repeats, device)
        reasons = tuple(map(str, verdict.reasons))
        timed.append(TimedBackend(verdict.backend, call.arguments.q.dtype, forward_ms, both_ms, reasons))
    return timed


def median_ms(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median wall time of run() in milliseconds, the work queued on an accelerator included."""
    times = []
    for index in range(repeats + 2):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        if index >= 2:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
