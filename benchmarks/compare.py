"""One workload of the comparison: every system is run and checked, then all are timed in turns."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from . import report, timing
from .floors import Floor, floors
from .systems import System, systems
from .truth import allowances, errors, truth, wrong
from .workloads import TILE, Inputs, Workload, count, make_inputs

ROUNDS = 3
REASON_LENGTH = 500

Record = dict[str, Any]


def compare(workload: Workload, backends: list[str], rep_ms: float, device: torch.device) -> Record:
    """Return what peers.json holds of a workload: `compare_here` on a stream that suits it."""
    if not (workload.launch_bound and device.type == "cuda"):
        return compare_here(workload, backends, rep_ms, device)
    # Autograd ties leaves to the stream of their first use, and the default stream cannot be captured.
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return compare_here(workload, backends, rep_ms, device)


def compare_here(workload: Workload, backends: list[str], rep_ms: float, device: torch.device) -> Record:
    """Check and time every system on the current stream.

    Args:
        workload: what to run.
        backends: ours, by name.
        rep_ms: how long each pass of each system is timed in each of the three rounds, in milliseconds.
        device: where.
    """
    inputs = make_inputs(workload, device)
    record = describe(workload, inputs)
    print(report.heading(record), flush=True)
    exact = truth(inputs)
    record["limits"] = allowances(inputs, exact)
    trials = []
    for system in systems(workload, backends):
        line, call = try_out(system, inputs, exact, record["limits"])
        state = "failed" if call is None else f"first call after {line['first_call_s']:.1f} s"
        print(f"    {system.name}: {state}", flush=True)
        trials.append((line, call))
    del exact
    time_in_turns([trial for trial in trials if trial[1] is not None], workload, inputs, rep_ms)
    record["lines"] = [line for line, _ in trials]
    pairs = record["counts"]["pairs"]
    for line, _ in trials:
        passes = floors(inputs, pairs, reads_mask=not line["mask_beforehand"])
        for name, floor in zip(("forward", "backward"), passes, strict=True):
            relate(line[name], floor)
        print(report.line_text(line), flush=True)
    print(f"    times as fast as the fastest peer: {report.against_peers(record)}", flush=True)
    return record


def describe(workload: Workload, inputs: Inputs) -> Record:
    """Shape, counts and floors: of the allowed pairs, and of all pairs of the 128 x 128 tiles that allow something."""
    counts = count(inputs)
    batch, seqlen, heads, _ = inputs.q.shape
    of_tiles = counts.active_tiles * batch * heads * (-(-seqlen // TILE) * TILE) ** 2
    record: Record = {"name": workload.name, "shape": workload.shape, "what": workload.what}
    record["counts"] = counts._asdict()
    for key, pairs in (("floor_ms", counts.pairs), ("tile_floor_ms", of_tiles)):
        forward, backward = floors(inputs, pairs, reads_mask=True)
        record[key] = {"forward": forward.ms, "backward": backward.ms}
    return record


def try_out(
    system: System, inputs: Inputs, exact: dict[str, Tensor], limits: dict[str, float]
) -> tuple[Record, timing.Call | None]:
    """Compile, check and measure the memory of a system: its line so far, and what to time, None where it failed."""
    line: Record = {"system": system.name, "ours": system.ours, "mask_beforehand": system.mask_beforehand}
    line |= {"reason": "", "first_call_s": None, "peak_mb": None, "errors": {}, "wrong": []}
    line |= {"forward": None, "backward": None}
    call: timing.Call | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            started = time.perf_counter()
            call = system.bind(inputs)
            with torch.no_grad():
                call()
            results = timing.run_once(call, inputs.leaves, inputs.dout)
            found = errors(results, exact)
            line["first_call_s"] = time.perf_counter() - started
            line["wrong"] = wrong(found, limits, system.ours)
            line["errors"] = {name: x if math.isfinite(x) else None for name, x in found.items()}  # JSON has no NaN
            del results
            line["peak_mb"] = timing.peak_mb(call, inputs.leaves, inputs.dout)
        except Exception as error:
            line["reason"] = reason(error, [str(warning.message) for warning in caught])
            call = None
    return line, call


def time_in_turns(trials: list[tuple[Record, timing.Call]], workload: Workload, inputs: Inputs, rep_ms: float) -> None:
    """Time the systems one after the other, three rounds of it, and write medians of all samples to their lines."""
    leaves = list(inputs.leaves.values())
    samples: list[list[tuple[timing.Samples, timing.Samples]]] = [[] for _ in trials]
    for _ in range(ROUNDS):
        for (line, call), taken in zip(trials, samples, strict=True):
            if line["reason"]:
                continue
            try:
                taken.append(timing.measure(call, leaves, inputs.dout, as_graph=workload.launch_bound, rep_ms=rep_ms))
            except Exception as error:
                line["reason"] = reason(error, [])
    for (line, _), taken in zip(trials, samples, strict=True):
        if line["reason"]:
            continue
        for name, rounds in zip(("forward", "backward"), zip(*taken, strict=True), strict=True):
            pooled = timing.Samples([x for one in rounds for x in one.ms], rounds[-1].how)
            ms, p20, p80 = pooled.summary()
            line[name] = {"ms": ms, "p20": p20, "p80": p80, "how": pooled.how}


def relate(timed: Record | None, floor: Floor) -> None:
    """Add to a timed pass what its time means: TFLOP/s on the allowed pairs, and the share of the floor reached."""
    if timed is not None:
        timed["tflops"] = floor.flop / timed["ms"] / 1e9
        timed["of_floor"] = floor.ms / timed["ms"]


def reason(error: Exception, warned: list[str]) -> str:
    """Why a system has no time, in one line: the exception, and what SDPA warned of the kernel it was pinned to."""
    said = [f"{type(error).__name__}: {' '.join(str(error).split())}"[:REASON_LENGTH]]
    for text in dict.fromkeys(text.partition(" (Triggered")[0] for text in warned):
        if "attention" in text.lower() and "not used because" not in text and "runtime disabled" not in text:
            said.append(text)
    return " | ".join(said)
