"""Milliseconds of one backend on the call that stands for a class of calls."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api import attention
from ...dispatch.profiles import NUM_HEADS, Figures, Row
from ...explanation import explain

# milliseconds(run, seconds): the median time of run() in about so many seconds.
Timer = Callable[[Callable[[], object], float], float]

LEAST, MOST = 3, 50  # repetitions
# A buffer that fills the caches of any GPU, written before each run, which then reads memory.
_FLUSH_BYTES = 1 << 28
_MOST_FLUSHES = 200


class EventTimer:
    """Times runs on the current stream by CUDA events.

    Before each run the device gets so much to write that it is still busy when the host has enqueued the run: the time
    is that of the kernels, whatever the host takes to launch them.
    """

    def __init__(self, device: torch.device) -> None:
        self.flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._times(lambda: None, 1, 1)
        self.flush_milliseconds = self._times(self.flushed.zero_, 1, 1)[0]

    def __call__(self, run: Callable[[], object], seconds: float) -> float:
        """The median of as many runs as fit, in milliseconds; the first call of `run` was before."""
        began = time.perf_counter()
        run()
        host = 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        flushes = flushes_for(host, self.flush_milliseconds)
        (first,) = self._times(run, 1, flushes)
        count = int(min(max(1e3 * seconds / (first + flushes * self.flush_milliseconds), LEAST), MOST))
        return statistics.median(self._times(run, count, flushes))

    def _times(self, run: Callable[[], object], count: int, flushes: int) -> list[float]:
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
        for start, stop in events:
            for _ in range(flushes):
                self.flushed.zero_()
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
        return [float(start.elapsed_time(stop)) for start, stop in events]


def flushes_for(host: float, flush: float) -> int:
    """How often the buffer is written, `flush` milliseconds each, to outlast `host` of launching a run by half."""
    return min(max(math.ceil(1.5 * host / max(flush, 1e-3)), 1), _MOST_FLUSHES)


def call_of(row: Row, device: torch.device, shrink: int = 1) -> dict[str, Any]:
    """The arguments of the call of a row, random tensors in bf16, as leaves that need what the row asks for.

    Args:
        row: the class of calls.
        device: where.
        shrink: what lengths are divided by, for tests.
    """
    generator = torch.Generator(device).manual_seed(0)
    row = row._replace(seqlen_q=max(1, row.seqlen_q // shrink), seqlen_k=max(1, row.seqlen_k // shrink))

    def normal(*shape: int, grad: bool) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        return x.requires_grad_(grad)

    call: dict[str, Any] = {
        "q": normal(row.batch, row.seqlen_q, NUM_HEADS, row.head_dim, grad=row.grad),
        "k": normal(row.batch, row.seqlen_k, row.num_heads_k, row.head_dim, grad=row.grad),
        "v": normal(row.batch, row.seqlen_k, row.num_heads_k, row.head_dim, grad=row.grad),
    }
    if row.mask_shape is not None:
        call["mask"] = torch.rand(row.mask_shape, generator=generator, device=device) < 0.5
    if row.bias_shape is not None:
        call["bias"] = normal(*row.bias_shape, grad=row.dbias)
    return call


def measure(row: Row, backend: str, seconds: float, device: torch.device, timer: Timer, shrink: int = 1) -> Figures:
    """Time a backend on a row; what it refuses, what it raises and what is not finite is the error of the figures.

    Args:
        row: the class of calls.
        backend: its name.
        seconds: about how long its repetitions may take; compiling comes before.
        device, timer: where and how.
        shrink: as for `call_of`.
    """
    call = call_of(row, device, shrink)
    (verdict,) = (verdict for verdict in explain(**call).verdicts if verdict.backend == backend)
    if verdict.reasons:
        return Figures(error=f"it refuses: {verdict.reasons[0].text}")
    leaves = [x for x in call.values() if x.requires_grad]

    def forward() -> Tensor:
        out = attention(**call, backend=backend)
        assert isinstance(out, Tensor)
        return out

    try:
        out = forward()
        dout = torch.ones_like(out)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        results = [out, *(backward() if leaves else ())]
        if not all(bool(x.isfinite().all()) for x in results):
            return Figures(error="its results are not finite")
        del results
        passes = 2 if leaves else 1
        return Figures(timer(forward, seconds / passes), timer(backward, seconds / passes) if leaves else None)
    except Exception as raised:  # any failure of a backend is what is measured here
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return Figures(error=" ".join(f"{type(raised).__name__}: {raised}".split())[:200])
