"""`python -m flash_dmattn calibrate`: check backends on a device, time them on classes of calls, write the profile."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import torch
from torch import Tensor

from ..api import attention
from ..dispatch import profiles
from ..dispatch.config import BackendName, disabled, invariant, process
from ..dispatch.profiles import NUM_HEADS, ROWS, Figures, Profile, ProfileError, Row, judge, measured_on, read, write
from ..explanation import explain
from ..problem import device_arch
from .info import find_driver
from .verify import CASES, Outcome, verify_on

# eager first: all backends are compared with it, and it does not compile. flex last: it compiles longest.
ORDER = ("eager", "sdpa", "triton", "flex")
CHECK_SHARE = 0.35  # of the time; after it no further check starts
ROW_SECONDS = 0.6  # of repetitions, for each backend and row
LEAST, MOST = 3, 50  # repetitions
_BAR = 24  # characters
# On a CPU the lengths of all rows are divided by it.
_CPU_SHRINK = 4
# Size of a buffer, larger than the caches of any GPU, that is written before each run to flush them.
_FLUSH_BYTES = 1 << 28
_MOST_FLUSHES = 200

# timer(run, seconds): the median milliseconds of run(), repeated for about this number of seconds.
Timer = Callable[[Callable[[], object], float], float]


class Instruments(NamedTuple):
    """The functions that measure; tests replace them.

    Attributes:
        check: check(has_time) -> outcomes of the checks against the formula; no check starts after has_time() is False.
            For tiles: check(classes, seconds) -> (class, verdicts) of each class that is finished in time.
        measure: measure(row, backend, seconds) -> figures. For tiles: measure(class, sizes, seconds) -> milliseconds.
        clock: returns seconds, monotonic.
        gpu, arch, driver: names of the measured GPU, or of the CPU with arch "cpu".
    """

    check: Callable[..., Any]
    measure: Callable[..., Any]
    clock: Callable[[], float]
    gpu: str
    arch: str
    driver: str


def instruments_on(device: torch.device, check: Callable[..., Any], measure: Callable[..., Any]) -> Instruments:
    """Return the instruments of a GPU, and make it the current device, on which checks compute."""
    torch.cuda.set_device(device)
    driver = find_driver()[0].get("version", "unknown")
    return Instruments(check, measure, time.monotonic, torch.cuda.get_device_name(device), device_arch(device), driver)


# Backends without the mode refuse, and tiles of it are no choice, so a profile of the mode would be wrong.
MODE = "config(invariant=True) is in force; calibrate compares backends and tiles without it"


def run(chosen: int | Literal["cpu"], seconds: float) -> int:
    """Calibrate the GPU of an index, or the CPU.

    Returns:
        1 if the device cannot be measured or the profile cannot be written, else 0.
    """
    if invariant():
        return fail(MODE)
    device = torch.device("cpu")
    if chosen != "cpu":
        gpu, why = device_of(chosen)
        if gpu is None:
            return fail(why)
        device = gpu
    measures = measured_on(device_arch(device))
    off = [name for name in measures if name in disabled()]
    if off:
        return fail(f"{', '.join(off)} is switched off; calibrate compares {', '.join(measures)}")
    return calibrate(_instruments(device), seconds, sys.stdout, sys.stderr)


def _instruments(device: torch.device) -> Instruments:
    if device.type == "cpu":
        return Instruments(
            partial(verify_on, "cpu", torch.float32, backends_of("cpu"), sys.stdout),
            partial(measure, device=device, timer=time_on_host, shrink=_CPU_SHRINK),
            time.monotonic,
            profiles.cpu_name(),
            "cpu",
            f"{torch.get_num_threads()} threads",
        )
    check = partial(verify_on, "cuda", torch.bfloat16, ORDER, sys.stdout)
    return instruments_on(device, check, partial(measure, device=device, timer=EventTimer(device)))


def backends_of(arch: str) -> tuple[str, ...]:
    """Return the backends that are timed on an architecture, in this order."""
    return tuple(name for name in ORDER if name in measured_on(arch))


def share(chosen: int | Literal["cpu"], path: str) -> int:
    """Write the profile of the GPU of an index to a file for other users; return 1 on an error, else 0."""
    device, why = device_of(chosen)
    if device is None:
        return fail(why)
    profile = former(torch.cuda.get_device_name(device), device_arch(device))
    if profile is None:
        return fail(f"this GPU has no profile of these versions to share; {profiles.COMMAND} makes one")
    try:
        write(profiles.shared(profile), Path(path), 0o644)
    except OSError as error:
        return fail(f"{path} cannot be written: {error.strerror}")
    print(f"wrote {path}: where the GPU and the versions are the same, FLASH_DMATTN_PROFILE={path} reads it")
    return 0


def device_of(chosen: int | Literal["cpu"]) -> tuple[torch.device | None, str]:
    """Return the GPU of an index; or None, and why it has no profile."""
    if chosen == "cpu":
        return None, "--device is cpu; tiles and shared profiles are of GPUs: give the index of one"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return None, (
            "it times an NVIDIA GPU, and torch sees none; python -m flash_dmattn info has the driver and torch, "
            "and --device cpu times the CPU"
        )
    if chosen >= count:
        return None, f"--device is {chosen}, and torch sees {count} GPU{'s' * (count > 1)}: give 0 to {count - 1}"
    device = torch.device("cuda", chosen)
    arch = device_arch(device)
    if not profiles.is_profiled(arch):
        return None, f"the GPU is {arch}; profiles are of NVIDIA GPUs from sm_{profiles.LEAST_ARCH} on"
    return device, ""


def calibrate(instruments: Instruments, seconds: float, stream: TextIO, progress_stream: TextIO) -> int:
    """Measure with these instruments, print the table to `stream`, and write the profile to its file."""
    gpu = instruments.gpu
    compiles = "" if instruments.arch == "cpu" else ", most of them compiling"
    stream.write(f"{gpu}, {instruments.arch}: about {seconds:.0f} s{compiles}\n")
    profile = measured(instruments, seconds, progress_stream)
    stream.write(f"\n{table(profile)}\n\n")
    if not profile.rows:
        return fail(f"no class of calls was measured within {seconds:.0f} s; give more with --seconds")
    known = former(gpu, instruments.arch)
    status = save(profile if known is None else profile._replace(tiles=known.tiles), stream)
    if status == 0:
        missed = ", ".join(row.name for row in ROWS if row.name not in profile.rows)
        more = "give more with --seconds" if profile.arch == "cpu" else "what was compiled is kept, so run it once more"
        again = f"not reached in {seconds:.0f} s: {missed}; {more}"
        taken = "auto goes by it from now on; python -m flash_dmattn explain cites it"
        stream.write(f"{effect(profile.arch, again if missed else '', 'rules', 'auto', taken)}\n")
    return status


def former(gpu: str, arch: str) -> Profile | None:
    """Return the profile of this GPU with these versions, which a run extends; None if there is none."""
    try:
        profile = read(profiles.path_of(gpu))
    except ProfileError:
        return None
    here = {"gpu": gpu, "arch": arch, **profiles.versions()}
    return profile if all(getattr(profile, name) == x for name, x in here.items()) else None


def new_profile(gpu: str, arch: str, driver: str) -> Profile:
    """Return a profile without figures, with the current time and versions."""
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    v = profiles.versions()
    return Profile(gpu, arch, v["library"], v["torch"], v["triton"], driver, made, wrong={}, rows={})


def save(profile: Profile, stream: TextIO) -> int:
    """Write a profile to its file and use it from now on; return 1 if it cannot be written, else 0."""
    if process.profile == "off":
        stream.write("FLASH_DMATTN_PROFILE=off: no profile is written\n")
        return 0
    path = profiles.path_of(profile.gpu)
    try:
        write(profile, path)
    except OSError as error:
        return fail(f"{path} cannot be written: {error.strerror}")
    profiles.forget()
    stream.write(f"wrote {path}\n")
    return 0


def measured(instruments: Instruments, seconds: float, progress_stream: TextIO) -> Profile:
    """Return the profile of the checks and timings that can be made in these seconds."""
    clock = instruments.clock
    started = clock()
    backends = backends_of(instruments.arch)
    progress = Progress(progress_stream, 1 + len(ROWS) * len(backends), clock)
    progress.step("checks against the formula")
    outcomes = instruments.check(lambda: clock() - started < CHECK_SHARE * seconds)
    wrong = failures(outcomes, instruments.arch)
    rows: dict[str, dict[str, Figures]] = {}
    longest = 0.0
    for row in ROWS:
        # If this row takes as long as the longest one so far, it would end too late.
        begun = clock()
        if begun - started + longest > seconds:
            progress.skip(len(backends))
            continue
        rows[row.name] = {}
        for backend in backends:
            progress.step(f"{row.name}: {backend}")
            rows[row.name][backend] = instruments.measure(row, backend, min(ROW_SECONDS, seconds / 100))
        longest = max(longest, clock() - begun)
    progress.step("done")
    progress.close()
    return new_profile(instruments.gpu, instruments.arch, instruments.driver)._replace(wrong=wrong, rows=rows)


def failures(outcomes: list[Outcome], arch: str) -> dict[str, str]:
    """Return for each backend the first check that it failed. On a GPU triton also fails if a case was not checked."""
    wrong: dict[str, str] = {}
    for outcome in outcomes:
        if not outcome.passed and outcome.backend in measured_on(arch):
            cause = f": {outcome.exception.splitlines()[0]}" if outcome.exception is not None else ""
            for name in outcome.failed[:1]:
                cause = f": {name} is {outcome.errors[name]:.1e} off, with a limit of {outcome.limits[name]:.1e}"
            wrong.setdefault(outcome.backend, f"it failed the check {outcome.case!r}{cause}")
    reached = {outcome.case for outcome in outcomes if outcome.backend == "triton" and outcome.errors}
    missing = [case.name for case in CASES if case.name not in reached]
    if missing and arch != "cpu" and "triton" not in wrong:
        wrong["triton"] = f"it was not checked on {missing[0]!r}"
    return wrong


def effect(arch: str, left_out: str, what: str, reader: str, taken: str) -> str:
    """Return lines of text about the effect of a part of a profile, "rules" or "tiles", and `left_out`."""
    lines = [left_out] if left_out else []
    if process.profile == "off":
        lines.append(f"FLASH_DMATTN_PROFILE=off: {reader} reads none in this environment")
    elif arch == "sm_90" and process.rules != "profile":
        lines.append(f"on sm_90 the built-in {what} stay in force; FLASH_DMATTN_RULES=profile lets the profile decide")
    else:
        lines.append(taken)
    return "\n".join(lines)


def fail(message: str) -> int:
    """Print an error of the command; return its exit status."""
    print(f"{profiles.COMMAND}: error: {message}", file=sys.stderr)
    return 1


class Progress:
    """Show the number of steps done, the running step and the seconds: as a bar on a terminal, else as lines.

    Args:
        stream: where to write.
        total: number of steps.
        clock: returns seconds, monotonic.
    """

    def __init__(self, stream: TextIO, total: int, clock: Callable[[], float]) -> None:
        self.stream, self.total, self.clock = stream, total, clock
        self.done, self.started, self.on_terminal = 0, clock(), stream.isatty()

    def step(self, name: str) -> None:
        """Begin a step, and end the one before it."""
        seconds = self.clock() - self.started
        filled = _BAR * self.done // max(1, self.total)
        text = f"[{'#' * filled}{'.' * (_BAR - filled)}] {self.done:2}/{self.total}  {seconds:4.0f} s  {name}"
        # Padded, to overwrite the previous line.
        self.stream.write(f"\r{text:<79}" if self.on_terminal else f"{text}\n")
        self.stream.flush()
        self.skip(1)

    def skip(self, steps: int) -> None:
        """Count steps that are left out as done."""
        self.done = min(self.done + steps, self.total)

    def close(self) -> None:
        """End the line of the bar."""
        if self.on_terminal:
            self.stream.write("\n")
            self.stream.flush()


def table(profile: Profile) -> str:
    """Return a table of the milliseconds of each backend for each class of calls, and the choice of auto."""
    lines: list[tuple[str, ...]] = [("class of calls", *measured_on(profile.arch), "auto takes")]
    for row in ROWS:
        figures = profile.rows.get(row.name)
        if figures is None:
            lines.append((row.name, *("-" for _ in measured_on(profile.arch)), "not reached"))
            continue
        taken = dict.fromkeys(choice(profile, row.name, grad) for grad in ((False, True) if row.grad else (False,)))
        lines.append((row.name, *(_cell(figures[backend]) for backend in measured_on(profile.arch)), " / ".join(taken)))
    text = aligned(lines)
    text.insert(1, "  ".join("-" * max(len(line[column]) for line in lines) for column in range(len(lines[0]))))
    notes = [f"{backend}: {why}" for backend, why in profile.wrong.items()]
    for name, figures in profile.rows.items():
        notes += [f"{backend}, {name}: {x.error}" for backend, x in figures.items() if x.error]
    return "\n".join(["milliseconds forward / backward", "", *text, *([""] if notes else []), *notes])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Join the cells of each line, padded to the width of their column."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def _cell(figures: Figures) -> str:
    if figures.forward is None:
        return "failed"
    return f"{figures.forward:.3g}" + ("" if figures.backward is None else f" / {figures.backward:.3g}")


def choice(profile: Profile, row: str, with_gradients: bool) -> str:
    """Return the name of the backend that auto chooses in a row, if all backends accept the call."""
    judged = judge(profile, (row,), with_gradients)
    if judged is None:
        return "as without"
    refused = {(name, direction) for name, _, passes in judged.refused for direction in passes}
    if profile.arch == "cpu":
        forward = "eager" if ("sdpa", "forward") in refused else "sdpa"
        backward = "eager" if ("sdpa", "backward") in refused else "sdpa"
        return forward if not with_gradients or forward == backward else f"{forward}, {backward}"
    return next((name for name in judged.order if (name, "forward") not in refused), "eager")


def time_on_host(run: Callable[[], object], seconds: float) -> float:
    """Return the median milliseconds of runs for about these seconds, by the clock of the host."""
    times: list[float] = []
    while len(times) < LEAST or (sum(times) < 1e3 * seconds and len(times) < MOST):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


class EventTimer:
    """Times runs on the current stream by CUDA events.

    Before each run the device gets enough writes to be busy until the host has enqueued the run. So the time of the
    host's launches is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._times(lambda: None, 1, 1)
        self.flush_milliseconds = self._times(self.flushed.zero_, 1, 1)[0]

    def __call__(self, run: Callable[[], object], seconds: float) -> float:
        """Return the median milliseconds of runs for about these seconds; `run` needs to have been called before."""
        began = time.perf_counter()
        run()
        host = 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        # These flushes take 1.5 times as long as the launch of a run.
        flushes = min(max(math.ceil(1.5 * host / max(self.flush_milliseconds, 1e-3)), 1), _MOST_FLUSHES)
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


def make_call(row: Row, device: torch.device, shrink: int = 1) -> dict[str, Any]:
    """Make the arguments of the call of a row: random tensors, leaves with the gradients that the row needs.

    They are bf16 on GPUs and fp32 on CPUs.

    Args:
        row: the class of calls.
        device: of the tensors.
        shrink: divides the lengths, for CPUs and tests.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    row = row._replace(seqlen_q=max(1, row.seqlen_q // shrink), seqlen_k=max(1, row.seqlen_k // shrink))

    def normal(*shape: int, grad: bool = row.grad) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)
        return x.requires_grad_(grad)

    keys = (row.batch, row.seqlen_k, row.num_heads_k, row.head_dim)
    call = {"q": normal(row.batch, row.seqlen_q, NUM_HEADS, row.head_dim), "k": normal(*keys), "v": normal(*keys)}
    if row.mask_shape is not None:
        call["mask"] = torch.rand(row.mask_shape, generator=generator, dtype=torch.float32, device=device) < 0.5
    if row.bias_shape is not None:
        call["bias"] = normal(*row.bias_shape, grad=row.dbias)
    return call


def measure(
    row: Row, backend: BackendName, seconds: float, device: torch.device, timer: Timer, shrink: int = 1
) -> Figures:
    """Time a backend on a row. A refusal, an exception or a result that is not finite becomes `Figures.error`.

    Args:
        row: the class of calls.
        backend: its name.
        seconds: approximate time for repetitions, compilation not included.
        device: where to run.
        timer: measures a function, see `Timer`.
        shrink: as for `make_call`.
    """
    call = make_call(row, device, shrink)
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

        if not all(bool(x.isfinite().all()) for x in (out, *(backward() if leaves else ()))):
            return Figures(error="its results are not finite")
        passes = 2 if leaves else 1
        return Figures(timer(forward, seconds / passes), timer(backward, seconds / passes) if leaves else None)
    except Exception as raised:  # any failure of a backend is a result here
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return Figures(error=" ".join(f"{type(raised).__name__}: {raised}".split())[:200])
