"""Time training steps of other projects' models on this library, and on the project's best way of attention.

Weights and data are random, on a GPU in fp32 with autocast to bf16 unless `--dtype fp32` says otherwise. A step is
forward, loss, backward and a step of AdamW, without torch.compile. Each way of attention has a model with the same
weights, and groups of steps of all ways take turns in one process. The project's way that is fastest in the first
groups continues with ours, and the losses of both are compared.

One more way replaces attention by a sum of its inputs. Its step shows the share of attention, and the ceiling: how many
times as fast the step would be if attention took no time. The share excludes the project's work around attention, such
as making a matrix of biases, so a way that needs no such matrix may exceed the ceiling.

Waits are the calls of one step in which the host waits for the GPU, as torch's profiler counts them; on a CPU, the
operators that would wait on a GPU. Lines of this library that wait are printed below the table.

    python -m benchmarks steps                            # a GPU, 150 s
    python -m benchmarks steps --only T5 openfold3 --seconds 60
    python -m benchmarks steps --only Boltz Protenix --dtype fp32 --steps 200
    python -m benchmarks steps --quick --steps 6          # tiny models, on a CPU too

Exit status 1 if the first losses differ by more than bf16 explains, or if our way did not run on this library.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import flash_dmattn

from .machine import device_name
from .runner import FAILED, PASSED, USAGE
from .step_models import MODELS, OURS, WITHOUT, Model

GROUP = 3  # steps are timed as one, so that the host can run ahead
FIRST = 3  # groups of every way; the first is a warm-up
LOSS_ERROR = 2e-2  # relative, of the first loss
ON_GPU = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ON_CPU = ("aten::_local_scalar_dense", "aten::nonzero")  # which wait on a GPU
PACKAGE = Path(flash_dmattn.__file__).parent
COMMANDS = PACKAGE / "tools"  # which started this program


class Way:
    """One way of attention in a model: its own weights and optimizer, and what its steps took."""

    def __init__(self, model: Model, name: str, quick: bool, device: torch.device, casts: bool) -> None:
        self.name, self.model, self.on_gpu = name, model, device.type == "cuda"
        self.casts = casts and self.on_gpu
        torch.manual_seed(0)
        with torch.device(device):
            module, self.loss = model.make(name, quick)
        module.train()
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=3e-5, fused=self.on_gpu)
        self.losses: list[Tensor] = []
        self.ms: list[float] = []
        self.host_ms: list[float] = []

    def train(self, steps: int) -> None:
        """Train for several steps."""
        with self.model.attention(self.name):
            for _ in range(steps):
                with torch.autocast("cuda", torch.bfloat16) if self.casts else nullcontext():
                    loss = self.loss()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.losses.append(loss.detach())

    def group(self, steps: int, timed: bool) -> None:
        """Train for several steps, and keep how long one took."""
        self.wait()
        started = time.perf_counter()
        self.train(steps)
        host = time.perf_counter() - started
        self.wait()
        if timed:
            self.ms.append(1e3 * (time.perf_counter() - started) / steps)
            self.host_ms.append(1e3 * host / steps)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def waits(self) -> int:
        """Count the waits of one step."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        # The profiler waits itself, when it ends.
        with profile(activities=activities) as profiler, record_function("a step"):
            self.train(1)
        events = profiler.events()
        span = next(event.time_range for event in events if event.name == "a step")
        within = (event for event in events if span.start <= event.time_range.start <= span.end)
        return sum(event.name in (ON_GPU if self.on_gpu else ON_CPU) for event in within)

    def waiting_lines(self) -> Counter[str]:
        """Count the waits of one step by the line of this library that calls them."""
        lines: Counter[str] = Counter()
        if not self.on_gpu:
            return lines

        def show(message: Warning | str, *_: Any) -> None:
            frames = [frame for frame in traceback.extract_stack() if PACKAGE in Path(frame.filename).parents]
            frames = [frame for frame in frames if COMMANDS not in Path(frame.filename).parents]
            if frames and "synchroniz" in str(message):
                lines[f"{Path(frames[-1].filename).relative_to(PACKAGE.parent)}:{frames[-1].lineno}"] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.train(1)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return lines


class Result(NamedTuple):
    """A row of the table.

    Attributes:
        ours: milliseconds of a step of ours.
        host: milliseconds of the host in a step of ours, and of theirs.
        theirs: milliseconds by way of the project, the one that is compared first.
        without: milliseconds without attention.
        losses: ours and theirs.
        waits: of a step of ours, and of theirs.
        backends: of our calls.
        lines: of this library that wait.
        failed: why ways of the project were left out.
    """

    ours: float
    host: tuple[float, float]
    theirs: dict[str, float]
    without: float
    losses: tuple[list[float], list[float]]
    waits: tuple[int, int]
    backends: list[str]
    lines: Counter[str]
    failed: dict[str, str]

    @property
    def agrees(self) -> bool:
        """Whether both ways began with the same loss."""
        ours, theirs = (losses[0] for losses in self.losses)
        return abs(ours - theirs) <= LOSS_ERROR * abs(theirs)

    @property
    def row(self) -> str:
        (best, theirs), *others = self.theirs.items()
        ours, reference = self.losses
        apart = max(abs(x - y) for x, y in zip(ours, reference))
        slower = "; ".join(f"{name} {ms:.1f}" for name, ms in others)
        cells = (
            f"{self.ours:.1f}",
            f"{theirs:.1f}, {best}",
            f"{theirs / self.ours:.2f}",
            f"{max(0.0, 1 - self.without / theirs):.0%}",
            f"{theirs / self.without:.2f}",
            f"{reference[0]:.4g} to {reference[-1]:.4g}",
            f"{apart:.1e} in {len(reference)}{'' if self.agrees else ' WRONG'}",
            f"{self.waits[0]}, {self.waits[1]}",
            f"{self.host[0]:.1f}, {self.host[1]:.1f}",
            " ".join(self.backends) or "none",
            slower or "-",
        )
        return " | ".join(cells)


HEAD = (
    "| model, batch | ours, ms | theirs, ms | ratio | share of attention | ceiling | loss | "
    "largest difference, steps | waits, ours and theirs | host, ours and theirs | our backends | slower ways |"
)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def measure(model: Model, quick: bool, device: torch.device, casts: bool, steps: int, seconds: float) -> Result:
    """Train a model in all its ways, for fewer steps where they would take longer than `seconds`."""
    started = time.perf_counter()
    size = min(GROUP, max(1, steps // FIRST))
    ours, without = (Way(model, name, quick, device, casts) for name in (OURS, WITHOUT))
    decisions: list[Any] = []
    with flash_dmattn.config(record=decisions):
        ours.group(size, timed=False)
    without.group(size, timed=False)
    theirs: list[Way] = []
    failed: dict[str, str] = {}
    for name in model.peers:
        reason = model.missing(name, device)
        if reason is None:
            try:
                way = Way(model, name, quick, device, casts)
                way.group(size, timed=False)
                theirs.append(way)
            except Exception as error:  # of a kernel of another project
                reason = one_line(error)
        if reason is not None:
            failed[name] = reason
    if not theirs:
        raise RuntimeError("; ".join(failed.values()))
    for _ in range(FIRST - 1):
        for way in (ours, *theirs, without):
            way.group(size, timed=True)
    theirs.sort(key=lambda way: statistics.median(way.ms))
    best = theirs[0]
    slower = {way.name: statistics.median(way.ms) for way in theirs[1:]}
    between = statistics.median(without.ms)
    del theirs, without, way
    gc.collect()
    while len(ours.losses) < steps and time.perf_counter() - started < seconds:
        more = min(size, steps - len(ours.losses))
        ours.group(more, timed=True)
        best.group(more, timed=True)
    losses = [torch.stack(way.losses).tolist() for way in (ours, best)]
    return Result(
        statistics.median(ours.ms),
        (statistics.median(ours.host_ms), statistics.median(best.host_ms)),
        {best.name: statistics.median(best.ms), **slower},
        between,
        (losses[0], losses[1]),
        (ours.waits(), best.waits()),
        sorted({f"{d.forward}/{d.backward}" for d in decisions}),
        ours.waiting_lines(),
        failed,
    )


def run(args: argparse.Namespace) -> int:
    """Measure the models that were named, and print the table."""
    device, started = torch.device(args.device), time.perf_counter()
    if device.type == "cpu" and not args.quick:
        print("on a CPU only --quick ends in time", file=sys.stderr)
        return USAGE
    chosen = [model for model in MODELS if any(word in model.name for word in args.only)]
    results: dict[str, Result] = {}
    left_out: dict[str, str] = {}
    for index, model in enumerate(chosen):
        left = args.seconds - (time.perf_counter() - started)
        reason = model.missing(OURS, device) if left > 0 else f"the {args.seconds:.0f} s are over"
        if reason is None:
            try:
                seconds = left / (len(chosen) - index)
                results[model.name] = measure(model, args.quick, device, args.dtype == "bf16", args.steps, seconds)
            except Exception as error:  # of another project's code, or for want of memory; the others still run
                traceback.print_exc()
                reason = one_line(error)
            gc.collect()
        if reason is not None:
            left_out[model.name] = reason
        text = reason or results[model.name].row
        print(f"[{index + 1}/{len(chosen)}] {time.perf_counter() - started:.0f} s: {model.name}: {text}", flush=True)

    print(f"\n{device_name(device)}, torch {torch.__version__}; ms of a step\n")
    print(f"{HEAD}\n|{' --- |' * (HEAD.count('|') - 1)}")
    for title, result in results.items():
        print(f"| {title} | {result.row} |")
    for title, result in results.items():
        for line, number in result.lines.items():
            print(f"waits of the host in {title}: {number} at {line}")
        for way, reason in result.failed.items():
            print(f"left out: {title}, {way}: {reason}")
    for title, reason in left_out.items():
        print(f"left out: {title}: {reason}")
    return FAILED if not results or any(not (x.agrees and x.backends) for x in results.values()) else PASSED


def add_parser(commands: Any) -> None:
    command = commands.add_parser(
        "steps",
        help="training steps of other projects' models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--only", nargs="+", default=[""], metavar="NAME", help="models whose name contains one of these")
    add("--steps", type=int, default=50, help="of both ways whose losses are compared, 9 of others")
    add("--seconds", type=float, default=150.0, help="for all; steps are fewer where they would take longer")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of autocast on a GPU; fp32 is without it")
    add("--quick", action="store_true", help="tiny models")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    command.set_defaults(run=run)
