"""How fast every system is on the same tensors: checked first, then timed in turns, and related to the floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn.problem import device_arch

from ..cases import TILE, Case, Pass
from ..floors import Floor, Rates, floors
from ..inputs import Inputs, count, make_inputs
from ..peak_memory import peaks
from ..systems import Mode, System
from ..timing import Call, Runner, gradients, measure
from ..truth import Results, Yardstick, errors, truth, wrong
from ..turns import Alone, at_once
from .equivalence import finite
from .trial import Trial, attempt, device_is_lost, worded

Record = dict[str, Any]


OUT_OF_MEMORY = torch.OutOfMemoryError.__name__  # begins the reason of a system that failed so


class Effort(NamedTuple):
    """How long each pass of each system is timed, in milliseconds, and bounds of the number of its runs."""

    rep_ms: float
    least: int
    most: int


class Laps:
    """Seconds of the parts of a row, the device waited for at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    def __call__(self, name: str) -> None:
        """End a part, which began at the end of the part before."""
        if self.device.type == "cuda" and not device_is_lost(self.device):
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name], self.started = now - self.started, now


FULL, QUICK = Effort(60.0, 5, 50), Effort(10.0, 3, 10)


def row(
    case: Case,
    systems: list[System],
    device: torch.device,
    *,
    passes: Sequence[Pass],
    effort: Effort,
    rates: Rates,
    alone: Alone = at_once,
) -> Record:
    """Check and time every system, and measure its memory.

    Args:
        case: the case to run.
        systems: the systems to run.
        device: the device to run on.
        passes: the passes to time, if the case has them.
        effort: how long to time.
        rates: the rates of the device, for floors.
        alone: waits until this process may time. A system that had no memory beside other processes runs again then.
    """
    lap = Laps(device)
    inputs = make_inputs(case, device)
    record = describe(case, inputs, device, rates)
    lap("inputs")
    exact = truth(inputs, case.takes_gradients)
    limits = record["limits"] = Yardstick(inputs, exact).limits
    lap("truth")
    columns: dict[tuple[str, str], tuple[Record, Trial]] = {}

    def run_first(system: System, name: str, mode: Mode, line: Record) -> None:
        trial = attempt(system, mode, case, inputs)
        line["backends"] = list(trial.needs.backends)
        column = line["columns"][name] = check(trial, exact, limits, inputs)
        columns[system.name, name] = column, trial
        if trial.failed and device_is_lost(device):
            record["lost"] = system.name
        elif device.type == "cuda":
            torch.cuda.empty_cache()  # other processes may use this GPU

    for system in systems:
        line: Record = {"system": system.name, "ours": system.ours, "backends": [], "columns": {}}
        record["systems"].append(line)
        for name, mode in system.modes(case).items():
            if record.get("lost"):
                line["columns"][name] = _empty(f"not run: {record['lost']} left the GPU unusable", failed=True)
            else:
                run_first(system, name, mode, line)
    lap("first runs")
    lines = {line["system"]: line for line in record["systems"]}
    again = [key for key, (column, _) in columns.items() if OUT_OF_MEMORY in column["reason"]]
    if not again:
        exact.clear()
    was_shared = not record.get("lost") and alone()
    lap("turn")
    for system_name, name in again if was_shared else ():
        trial = columns[system_name, name][1]
        run_first(trial.system, name, trial.mode, lines[system_name])
    exact.clear()
    for name in (name for name in case.passes if name in passes):
        if record.get("lost"):
            break
        time_pass(name, list(columns.values()), inputs, effort)
        broken = [trial.system.name for column, trial in columns.values() if column["failed"]]
        if broken and device_is_lost(device):
            record["lost"] = " or ".join(dict.fromkeys(broken))
    lap("timed runs")
    record["seconds"] = {name: seconds for name, seconds in lap.seconds.items() if name != "turn"}
    pairs = record["counts"]["pairs"]
    for column, trial in columns.values():
        pass_floors = floors(inputs, pairs, reads_mask=not trial.mode.prepared)
        for name in case.passes:
            relate(column[name], pass_floors[name], rates)
    return record


def describe(case: Case, inputs: Inputs, device: torch.device, rates: Rates) -> Record:
    """Shape, counts and floors: of the allowed pairs, and of all pairs of the 128 x 128 tiles that allow something."""
    counts = count(inputs)
    batch, _, heads, _ = inputs.q.shape
    seqlen_q, seqlen_k = inputs.lengths
    tile_pairs = counts.active_tiles * batch * heads * seqlen_q * (-(-seqlen_k // TILE) * TILE)
    record: Record = {"name": case.name, "group": case.group, "x": case.x, "shape": case.shape, "what": case.what}
    record["has_mask"] = case.mask is not None
    chosen = case.explain(device_arch(device))
    record["auto"] = [chosen.forward, chosen.backward]
    record["counts"] = counts._asdict()
    for key, pairs in (("floor_ms", counts.pairs), ("tile_floor_ms", tile_pairs)):
        both = floors(inputs, pairs, reads_mask=True)
        record[key] = {name: both[name].ms(rates) for name in case.passes}
    record["systems"] = []
    return record


def check(trial: Trial, exact: Results, limits: dict[str, float], inputs: Inputs) -> Record:
    """Return the column of a system before it is timed: what it got wrong, and its memory."""
    column = _empty(trial.reason, trial.failed)
    column["first_call_s"] = trial.first_call_s
    if trial.call is None:
        return column
    measured = errors(trial.results, exact)
    column["errors"] = finite(measured)
    column["wrong"] = wrong(measured, limits, trial.system.ours, inputs.q.dtype)
    trial.results = {}
    if trial.failed:
        return column
    leaves = list(inputs.leaves.values())
    try:
        weighed = peaks(trial.out, leaves, inputs.dout, backward=trial.has_backward)
        column["peak_mb"] = weighed.both if trial.has_backward else weighed.forward
    except Exception as error:
        column |= {"reason": worded(error), "failed": True}
    return column


def _empty(reason: str, failed: bool) -> Record:
    column: Record = {"reason": reason, "failed": failed, "first_call_s": None, "peak_mb": None}
    return column | {"errors": {}, "wrong": [], "forward": None, "backward": None, "step": None}


def time_pass(name: Pass, columns: list[tuple[Record, Trial]], inputs: Inputs, effort: Effort) -> None:
    """Time one pass of all systems that have it, in turns, and write it to their columns."""
    leaves = list(inputs.leaves.values())
    timed: list[tuple[Record, Runner]] = []
    for column, trial in columns:
        if trial.call is None or column["failed"] or (name != "forward" and not trial.has_backward):
            continue
        try:
            timed.append((column, Runner(runs(name, trial.out, leaves, inputs.dout))))
        except Exception as error:
            column |= {"reason": f"{name}: {worded(error)}", "failed": True}
    with torch.set_grad_enabled(name != "forward"):
        measure([runner for _, runner in timed], inputs.q.device, **effort._asdict())
    for column, runner in timed:
        if runner.error is not None:
            column |= {"reason": f"{name}: {worded(runner.error)}", "failed": True}
        else:
            column[name] = runner.summary()


def runs(name: Pass, call: Call, leaves: list[Tensor], dout: Tensor) -> Callable[[], object]:
    """Return the function that one repetition of a pass runs; "backward" reuses one graph."""
    if name == "forward":
        return call
    if name == "step":
        return lambda: torch.autograd.grad(call(), leaves, dout)
    with torch.enable_grad():
        return partial(gradients, call(), leaves, dout)


def relate(timed: Record | None, floor: Floor, rates: Rates) -> None:
    """Add to a timed pass what its time means: TFLOP/s on the allowed pairs, and the share of the floor reached."""
    if timed is not None:
        timed["tflops"] = floor.flop / timed["ms"] / 1e9
        timed["of_floor"] = floor.ms(rates) / timed["ms"]


def failures(record: Record) -> list[str]:
    """Ours that failed or are less accurate than the rule demands, one line each."""
    problems = []
    for line in (line for line in record["systems"] if line["ours"]):
        for mode, column in line["columns"].items():
            if column["failed"] or column["wrong"]:
                limits = ", ".join(
                    f"{name} {_number(column['errors'][name])} above {record['limits'][name]:.1e}"
                    for name in column["wrong"]
                )
                which = "" if mode == "call" else f" ({mode})"
                problems.append(f"{record['name']}, {line['system']}{which}: {limits or column['reason']}")
    return problems


def _number(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.1e}"
