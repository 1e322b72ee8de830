"""Compares all systems on the same tensors with fp64, and with plain PyTorch in the same dtype."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..cases import Case
from ..inputs import make_inputs
from ..systems import Mode, System
from ..truth import Yardstick, errors, truth
from .trial import attempt, device_is_lost

Record = dict[str, Any]


def row(case: Case, systems: list[System], device: torch.device) -> Record:
    """Measure the errors of out, lse, dq, dk, dv and dbias of every system, and judge them by the accuracy rule."""
    inputs = make_inputs(case, device)
    exact = truth(inputs, case.takes_gradients)
    yardstick = Yardstick(inputs, exact)
    record: Record = {"name": case.name, "group": case.group, "shape": case.shape, "what": case.what}
    record |= {"plain": yardstick.errors, "limits": yardstick.limits, "systems": []}
    for system in systems:
        line: Record = {"system": system.name, "ours": system.ours}
        record["systems"].append(line)
        if record.get("lost"):
            line |= {"verdict": "failed", "reason": f"not run: {record['lost']} left the GPU unusable"}
            continue
        trial = attempt(system, Mode(with_lse=True), case, inputs)
        line |= {"backends": list(trial.needs.backends), "reason": trial.reason, "errors": {}, "from_plain": {}}
        line["failing"] = []
        if not trial.failed or not device_is_lost(device):
            measured = errors(trial.results, exact)
            line["errors"] = finite(measured)
            line["from_plain"] = finite(yardstick.distances(trial.results))
            line["failing"] = [name for name, x in measured.items() if not x <= yardstick.limits[name]]
        else:
            record["lost"] = system.name
        line["verdict"] = verdict(trial.failed, bool(trial.results), line["failing"])
    return record


def verdict(failed: bool, has_results: bool, failing: list[str]) -> str:
    """ "pass" or "fail" by the rule, "failed" with an exception, "refused" where the system says so itself."""
    if failed:
        return "failed"
    if not has_results:
        return "refused"
    return "fail" if failing else "pass"


def finite(measured: dict[str, float]) -> dict[str, float | None]:
    """With None for NaN and infinity, which JSON has not."""
    return {name: x if math.isfinite(x) else None for name, x in measured.items()}


def failures(record: Record) -> list[str]:
    """Ours that failed or break the rule, one line each."""
    problems = []
    for line in record["systems"]:
        if line["ours"] and line["verdict"] in ("fail", "failed"):
            limits = ", ".join(
                f"{name} {_number(line['errors'][name])} above {record['limits'][name]:.1e}"
                for name in line.get("failing", [])
            )
            problems.append(f"{record['name']}, {line['system']}: {limits or line['reason']}")
    return problems


def _number(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.1e}"
