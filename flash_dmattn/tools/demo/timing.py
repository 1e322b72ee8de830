"""How long each backend takes for one real call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from .gradient_check import Call, finding


class TimedBackend(NamedTuple):
    """Median time of one backend in milliseconds, None where it cannot, and why."""

    backend: str
    dtype: torch.dtype
    forward_ms: float | None
    both_ms: float | None
    reasons: tuple[str, ...]


def time_call(call: Call, repeats: int = 10, compile_on_cpu: bool = True) -> list[TimedBackend]:
    """Time every backend on a call: the forward without gradients, and forward with backward.

    Args:
        call: tensors of the size and dtype to time.
        repeats: timed runs after two to warm up; the median is taken.
        compile_on_cpu: also time a backend that first has to compile for the CPU, which takes 10 to 30 s.
    """
    device = call.arguments.q.device
    inference = {verdict.backend: verdict for verdict in call.detached().explain().verdicts}
    timed = []
    for verdict in call.explain().verdicts:
        alone = inference[verdict.backend]
        reasons = [finding(reason) for reason in (*verdict.reasons, *alone.reasons)]
        forward_ms = both_ms = None
        compiles = [reason for reason in alone.preferences if reason.code == "cpu_compile_time"]
        if compiles and not compile_on_cpu:
            reasons = [*(reason.text for reason in compiles), *reasons]
        elif alone.accepts:
            forward_ms = median_ms(partial(call.detached().run, verdict.backend), repeats, device)
        if verdict.accepts:
            both_ms = median_ms(partial(_both, call, verdict.backend), repeats, device)
        dtype = call.arguments.q.dtype
        timed.append(TimedBackend(verdict.backend, dtype, forward_ms, both_ms, tuple(dict.fromkeys(reasons))))
    return timed


def _both(call: Call, backend: str) -> tuple[torch.Tensor, ...]:
    return call.gradients(call.run(backend))


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
