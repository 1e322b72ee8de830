"""The command: check, time, print, write."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import NamedTuple, TextIO

import torch

from ...dispatch import profiles
from ...dispatch.config import disabled, process
from ...dispatch.preferences import MEASURED
from ...dispatch.profiles import ROWS, Figures, Profile, Row, write
from ...problem import device_arch
from ..cli import PROGRAM
from ..cli.info import find_driver
from ..cli.verify import CASES, Outcome, verify_on
from .progress import Progress
from .report import table
from .timing import EventTimer, measure

# eager first: it is the yardstick of the others, and compiles nothing. flex last: it compiles longest.
ORDER = ("eager", "triton", "flex")
CHECK_SHARE = 0.35  # of the time, after which no further check starts
ROW_SECONDS = 0.6  # of repetitions, for each backend and row

Check = Callable[[Callable[[], bool]], list[Outcome]]
Measure = Callable[[Row, str, float], Figures]


class Instruments(NamedTuple):
    """What a run measures with, which tests put other things in the place of.

    Attributes:
        check: check(has_time) -> outcomes of the checks against the formula, none started once has_time() is False.
        measure: measure(row, backend, seconds) -> its figures.
        clock: seconds that only grow.
        gpu, arch, driver: what is measured, by name.
    """

    check: Check
    measure: Measure
    clock: Callable[[], float]
    gpu: str
    arch: str
    driver: str


def run(index: int, seconds: float) -> int:
    """The command on the GPU of an index: 0, or 1 where it cannot be measured or the profile cannot be written."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return _fail(
            "it times an NVIDIA GPU, and torch sees none; python -m flash_dmattn info has the driver and torch"
        )
    if index >= count:
        return _fail(f"--device is {index}, and torch sees {count} GPU{'s' * (count > 1)}: give 0 to {count - 1}")
    device = torch.device("cuda", index)
    arch = device_arch(device)
    if not profiles.is_profiled(arch):
        return _fail(f"the GPU is {arch}; profiles are of NVIDIA GPUs from sm_{profiles.LEAST_ARCH} on")
    off = [name for name in MEASURED if name in disabled()]
    if off:
        return _fail(f"{', '.join(off)} is switched off; calibrate compares {', '.join(MEASURED)}")
    torch.cuda.set_device(device)  # the checks compute on the current one
    driver, _ = find_driver()
    instruments = Instruments(
        partial(verify_on, "cuda", torch.bfloat16, ORDER, sys.stdout),
        partial(measure, device=device, timer=EventTimer(device)),
        time.monotonic,
        torch.cuda.get_device_name(device),
        arch,
        driver.get("version", "unknown"),
    )
    return calibrate(instruments, seconds, sys.stdout, sys.stderr)


def calibrate(instruments: Instruments, seconds: float, stream: TextIO, progress_stream: TextIO) -> int:
    """Measure with these instruments, print the table to `stream`, and write the profile to its place."""
    gpu = instruments.gpu
    stream.write(f"{gpu}, {instruments.arch}: about {seconds:.0f} s, most of them compiling\n")
    profile = measured(instruments, seconds, progress_stream)
    stream.write(f"\n{table(profile)}\n\n")
    if not profile.rows:
        return _fail(f"no class of calls was measured within {seconds:.0f} s; give more with --seconds")
    path = profiles.path_of(gpu)
    try:
        write(profile, path)
    except OSError as error:
        return _fail(f"{path} cannot be written: {error.strerror}")
    profiles.forget()
    stream.write(f"wrote {path}\n{_effect(profile, seconds)}\n")
    return 0


def measured(instruments: Instruments, seconds: float, progress_stream: TextIO) -> Profile:
    """The profile of checks and timings, as many as end in the time given."""
    clock = instruments.clock
    started = clock()
    progress = Progress(progress_stream, 1 + len(ROWS) * len(ORDER), clock)
    progress.step("checks against the formula")
    wrong = failures(instruments.check(lambda: clock() - started < CHECK_SHARE * seconds))
    rows: dict[str, dict[str, Figures]] = {}
    longest = 0.0
    for row in ROWS:
        # A row that compiles as long as the longest one so far would end too late.
        begun = clock()
        if begun - started + longest > seconds:
            progress.skip(len(ORDER))
            continue
        figures: dict[str, Figures] = {}
        for backend in ORDER:
            progress.step(f"{row.name}: {backend}")
            figures[backend] = instruments.measure(row, backend, min(ROW_SECONDS, seconds / 100))
        rows[row.name] = figures
        longest = max(longest, clock() - begun)
    progress.step("done")
    progress.close()
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    versions = profiles.versions()
    return Profile(
        instruments.gpu, instruments.arch, **versions, driver=instruments.driver, made=now, wrong=wrong, rows=rows
    )


def failures(outcomes: list[Outcome]) -> dict[str, str]:
    """By backend, the first check that it failed; triton counts as wrong, too, where a case of it was not checked."""
    wrong: dict[str, str] = {}
    for outcome in outcomes:
        if not outcome.passed and outcome.backend in MEASURED:
            wrong.setdefault(outcome.backend, f"it failed the check {outcome.case!r}{_cause(outcome)}")
    reached = {outcome.case for outcome in outcomes if outcome.backend == "triton" and outcome.errors}
    missing = [case.name for case in CASES if case.name not in reached]
    if missing and "triton" not in wrong:
        wrong["triton"] = f"it was not checked on {missing[0]!r}"
    return wrong


def _cause(outcome: Outcome) -> str:
    if outcome.exception is not None:
        return f": {outcome.exception.splitlines()[0]}"
    name = next(name for name in outcome.errors if not outcome.errors[name] <= outcome.limits[name])
    return f": {name} is {outcome.errors[name]:.1e} off, with a limit of {outcome.limits[name]:.1e}"


def _effect(profile: Profile, seconds: float) -> str:
    """What auto will make of it."""
    lines = []
    left_out = [row.name for row in ROWS if row.name not in profile.rows]
    if left_out:
        lines.append(
            f"not reached in {seconds:.0f} s: {', '.join(left_out)}; what was compiled is kept, so run it once more"
        )
    if process.profile == "off":
        lines.append("FLASH_DMATTN_PROFILE=off: auto does not read it in this environment")
    elif profile.arch == "sm_90" and process.rules != "profile":
        lines.append("on sm_90 the built-in rules stay in force; FLASH_DMATTN_RULES=profile lets the profile decide")
    else:
        lines.append(f"auto goes by it from now on; {PROGRAM} explain cites it")
    return "\n".join(lines)


def _fail(message: str) -> int:
    print(f"{PROGRAM} calibrate: error: {message}", file=sys.stderr)
    return 1
