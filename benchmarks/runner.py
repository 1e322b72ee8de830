"""One suite from its first case to its last: what is done already, the budget, interruptions, and the exit status."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from . import compiling, systems
from . import machine as machines
from .cases import PASSES, Case, Pass, cases_of
from .floors import Rates
from .peak_memory import quick_collections
from .progress import Progress, progress
from .report import text
from .results import Record, Results, load, missing
from .suites import equivalence, memory, model, performance
from .suites.trial import device_is_lost, forget, precision_of, stream_of, worded
from .turns import Alone, Turns, at_once, turns_of

PASSED, FAILED, USAGE, UNFINISHED = 0, 1, 2, 3
FAILURES: dict[str, Callable[[Record], list[str]]] = {
    "equivalence": equivalence.failures,
    "performance": performance.failures,
    "memory": memory.failures,
    "model": model.failures,
}
PUBLISHED = Path(__file__).resolve().parent / "results"  # a folder for each machine
# Keys of the cases that run on a CPU, where a call of 16k would take minutes.
CPU_SEQLEN, CPU_SEQLEN_QUICK = 1024, 256
# A quick run takes about so long on an idle CPU core.
CPU_QUICK_SECONDS = {"equivalence": 20, "performance": 20, "memory": 10, "model": 15}


@dataclass(frozen=True)
class Options:
    """The choices of the command line.

    Attributes:
        out: the folder of this device's results.
        machine: the result of `machine.describe`.
        only: parts of names or groups of cases.
        systems: names, or None for all systems of a suite.
        passes: the passes of the performance suite.
        deadline: seconds on the monotonic clock. A case that may end later does not begin. The published run says how
            long a case takes, or else the longest case so far.
        share: (i, n): the i-th of n processes that share the cases and the file of results, from 1. Processes on one
            GPU prepare cases side by side, and time them one after another.
        compiles: "first", before the cases run; "only", and no case runs; "not".
        fresh: start again and do not continue an earlier run.
    """

    device: torch.device
    out: Path
    machine: Record
    only: list[str] | None = None
    systems: list[str] | None = None
    passes: Sequence[Pass] = PASSES
    quick: bool = False
    deadline: float | None = None
    share: tuple[int, int] = (1, 1)
    compiles: Literal["first", "only", "not"] = "first"
    fresh: bool = False

    def settings(self, suite: str) -> Record:
        """Return the settings that must be equal for a run to continue."""
        names = systems.chosen(suite, self.systems, quick=self.quick, device=self.device)
        settings: Record = {"quick": self.quick, "systems": names}
        return settings | ({"passes": list(self.passes)} if suite == "performance" else {})


def plan(suite: str, options: Options) -> list[Case]:
    """Return all cases that a run with these options has, small ones on a CPU; `only` does not count here."""
    cases = cases_of(suite, None, options.quick)
    if suite == "performance":
        cases = [case for case in cases if set(case.passes) & set(options.passes)]
    if options.device.type == "cpu" and suite != "equivalence":
        cases = [case.reduced(CPU_SEQLEN_QUICK if options.quick else CPU_SEQLEN) for case in cases]
    return cases


def run(suite: str, options: Options) -> int:
    """Run what is missing of a suite, writing its file after every row; return the exit status.

    Raises:
        OtherRun: the file is of another machine, commit or choice.
    """
    planned = plan(suite, options)
    head: Record = {"suite": suite, "machine": options.machine, "settings": options.settings(suite)}
    head["planned"] = [case.name for case in planned]
    results = Results(options.out / f"{suite}.json", head, fresh=options.fresh)
    asked = {case.name for case in cases_of(suite, options.only, options.quick)}
    known = known_seconds(suite)
    wanted = share(options.share, [case for case in planned if case.name in asked], known)
    todo = [case for case in wanted if case.name not in results]
    available, reasons = systems.available(head["settings"]["systems"], options.device)
    print(f"{suite}: {machines.line(options.machine)}", flush=True)
    for name, reason in reasons.items():
        print(f"    {name} is left out: {reason}", flush=True)
    print(f"    {forecast(suite, todo, options, known)}", flush=True)
    results.leave_out(reasons)
    if options.compiles != "not":
        compile_todo(suite, todo, available, options)
    if options.compiles == "only":
        return PASSED
    _rows(suite, todo, len(wanted), available, results, options, known)
    failures = [said for row in results.content["rows"] for said in FAILURES[suite](row)]
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    left = [name for name in missing(results.content) if name in {case.name for case in wanted}]
    if left:
        print(f"{suite}: {len(left)} of {len(planned)} cases are left; the same command goes on with {left[0]}")
    return UNFINISHED if left else FAILED if failures else PASSED


def forecast(suite: str, todo: list[Case], options: Options, known: dict[str, float]) -> str:
    """Say how many cases run, what is left out, and about how long it takes if an earlier run tells."""
    on_cpu, every = options.device.type == "cpu", len(cases_of(suite))
    said = [f"{len(todo)} of {every} cases" + (" (--quick)" if options.quick else "")]
    if on_cpu and suite != "equivalence":
        said.append(f"at {CPU_SEQLEN_QUICK if options.quick else CPU_SEQLEN} keys or fewer")
    if on_cpu and options.quick:
        said.append(f"about {CPU_QUICK_SECONDS[suite]} s on an idle core")
    elif not on_cpu and todo and all(case.name in known for case in todo):
        said.append(f"about {sum(known[case.name] for case in todo):.0f} s, and before them the compilers")
    return ", ".join(said)


def known_seconds(suite: str, published: Path = PUBLISHED) -> dict[str, float]:
    """Return how long each case took in the published runs, on the machine where it took longest."""
    known: dict[str, float] = {}
    for path in published.glob(f"*/{suite}.json"):
        for row in load(path)["rows"]:
            if row.get("seconds"):
                known[row["name"]] = max(known.get(row["name"], 0.0), sum(row["seconds"].values()))
    return known


def share(part: tuple[int, int], cases: list[Case], known: dict[str, float]) -> list[Case]:
    """Return the cases of one of several processes, so that all processes take about as long.

    The longest come first. A case that no run has ended comes last, because it may leave no time for others, and
    counts as the longest.
    """
    index, count = part
    longest = max(known.values(), default=1.0)
    parts: list[list[Case]] = [[] for _ in range(count)]
    sums = [0.0] * count
    for case in sorted(cases, key=lambda case: -known.get(case.name, longest)):
        least = sums.index(min(sums))
        parts[least].append(case)
        sums[least] += known.get(case.name, longest)
    return sorted(parts[index - 1], key=lambda case: case.name not in known)


def _rows(
    suite: str,
    todo: list[Case],
    total: int,
    available: list[systems.System],
    results: Results,
    options: Options,
    known: dict[str, float],
) -> None:
    longest = 0.0

    def run_cases(cases: list[Case], bar: Progress, turns: Turns | None = None) -> list[Case]:
        """Add the rows of these cases; return the cases that had no memory beside other processes."""
        nonlocal longest
        left = []
        for case in cases:
            started = time.monotonic()
            if options.deadline is not None and started + known.get(case.name, longest) > options.deadline:
                continue
            # On a CPU the name may tell of more keys than there are.
            bar.case(case.name if options.device.type == "cuda" else f"{case.name}, here with {case.seqlen} keys")
            with turns.case() if turns else nullcontext(at_once) as alone:
                forget(options.device)
                row = make_row(suite, case, available, options, alone)
            longest = max(longest, time.monotonic() - started)
            if turns and not row.get("lost") and performance.OUT_OF_MEMORY in json.dumps(row):
                left.append(case)
                continue
            results.add(row)
            bar.line(text.row(suite, row))
            bar.done()
            if row.get("lost"):
                bar.line(f"{row['lost']} left the GPU unusable for this process; run again to go on")
                return []
        forget(options.device)
        return left

    with progress(suite, total, total - len(todo)) as bar:
        shared = turns_of(options.device, options.out, options.share[1])
        left = run_cases(todo, bar, shared)
        if shared and left:
            with shared.last():
                run_cases(left, bar)


def systems_of(suite: str, case: Case, available: list[systems.System], device: torch.device) -> list[systems.System]:
    """Return the systems that run a case; on a GPU slow ones only run one case of each kind."""
    in_full = case.all_systems or suite not in ("performance", "model") or device.type == "cpu"
    taken = [system for system in available if in_full or not system.slow]
    if device.type == "cpu" or not systems.ours.auto_has_a_row(case, device, [system.name for system in taken]):
        return taken
    return [system for system in taken if system.name != systems.ours.AUTO]


def compile_todo(suite: str, todo: list[Case], available: list[systems.System], options: Options) -> None:
    """Have everything compiled that the cases need, on a GPU."""
    device = options.device
    if device.type != "cuda" or suite == "model":  # which is one case
        return
    jobs = []
    for case in todo:
        taken = systems_of(suite, case, available, device)
        taken = [system for system in taken if system.compiles or (system.ours and not system.slow)]
        runs = tuple((system.name, _modes_of(suite, system, case)) for system in taken)
        jobs.append(compiling.Job(case, runs, device))
    compiling.compile_ahead(suite, jobs, options.deadline)


def _modes_of(suite: str, system: systems.System, case: Case) -> tuple[systems.Mode, ...]:
    if suite == "performance":
        return tuple(system.modes(case).values())
    return (systems.Mode(with_lse=suite == "equivalence"),)


def make_row(
    suite: str, case: Case, available: list[systems.System], options: Options, alone: Alone = at_once
) -> Record:
    """Make the row of a case; an exception outside any system, such as no memory for the inputs, is its error.

    `alone` waits until this process may time.
    """
    device = options.device
    effort = performance.QUICK if options.quick else performance.FULL
    functions: dict[str, Callable[..., Record]] = {
        "equivalence": equivalence.row,
        "memory": memory.row,
        "performance": partial(
            performance.row,
            passes=options.passes,
            effort=effort,
            rates=Rates(**options.machine["rates"]),
            alone=alone,
        ),
        "model": partial(model.row, effort=effort),
    }

    try:
        with stream_of(device), quick_collections(), precision_of(case):
            row = functions[suite](case, systems_of(suite, case, available, device), device)
        json.dumps(row, allow_nan=False)
    except Exception as error:
        row = {"name": case.name, "group": case.group, "shape": case.shape, "what": case.what}
        row |= {"error": worded(error), "systems": []}
        if device_is_lost(device):
            row["lost"] = "the case"
    return row
