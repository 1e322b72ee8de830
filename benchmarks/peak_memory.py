"""The most memory that a call holds at once above what there was before it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .timing import Call

MIB = 2**20
T = TypeVar("T")


class Peaks(NamedTuple):
    """MiB above the inputs; out and the gradients count.

    `forward`: while the forward runs and keeps what its backward needs. `backward`: while the backward runs, above what
    was there when it began. `both`: over the two, above what was there when the forward began.
    """

    forward: float
    backward: float | None
    both: float | None


def peaks(call: Call, leaves: list[Tensor], dout: Tensor, *, backward: bool = True) -> Peaks:
    """Peaks of a call that has run before, so that nothing is compiled or loaded now."""
    watch = _watch_gpu if dout.device.type == "cuda" else _watch_cpu
    kept: list[Tensor] = []

    def run_forward() -> None:
        kept.append(call())

    def run_backward() -> None:
        kept.extend(torch.autograd.grad(kept[0], leaves, dout))

    with torch.set_grad_enabled(backward):
        forward, held = watch(run_forward)
    if not backward:
        return Peaks(forward / MIB, None, None)
    peak, _ = watch(run_backward)
    return Peaks(forward / MIB, peak / MIB, max(forward, held + peak) / MIB)


def held(make: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return the result of `make`, and the MiB that stay allocated after it, without garbage."""
    made: list[T] = []
    watch = _watch_gpu if device.type == "cuda" else _watch_cpu
    _, kept = watch(lambda: made.append(make()))
    return made[0], kept / MIB


@contextmanager
def quick_collections() -> Iterator[None]:
    """Let collections of garbage look only at objects that are made from here on.

    A peak takes several, and with torch and Triton loaded a collection of all objects takes half a second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _watch_gpu(run: Callable[[], None]) -> tuple[float, float]:
    """Return bytes above those before: the most during a run, and those still held after it."""
    torch.cuda.synchronize()
    gc.collect()  # frees now, and not during the run, what modules that refer to each other held of the run before
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gc.collect()
    return peak, torch.cuda.memory_allocated() - before


def _watch_cpu(run: Callable[[], None]) -> tuple[float, float]:
    """Return the same by the allocations that the profiler sees: the allocator of the CPU counts nothing itself."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return float(most), float(held)
