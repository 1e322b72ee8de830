"""How much memory every system holds above the inputs: in the forward, in the backward, and over both."""

from __future__ import annotations

from typing import Any

import torch

from ..cases import Case
from ..inputs import make_inputs
from ..peak_memory import MIB, peaks
from ..systems import Mode, System
from .trial import attempt, device_is_lost, worded

Record = dict[str, Any]


def row(case: Case, systems: list[System], device: torch.device) -> Record:
    """Peaks of every system; each is run once before, so that neither compilation nor loading is counted."""
    inputs = make_inputs(case, device)
    record: Record = {"name": case.name, "group": case.group, "shape": case.shape, "what": case.what}
    tensors = [x for x in (*inputs.leaves.values(), inputs.mask, inputs.dout) if x is not None]
    record["inputs_mb"] = sum(x.numel() * x.element_size() for x in tensors) / MIB
    # Every system returns out, and a gradient for each input.
    returned = [inputs.dout, *inputs.leaves.values()]
    record["returned_mb"] = sum(x.numel() * x.element_size() for x in returned) / MIB
    record["systems"] = []
    leaves = list(inputs.leaves.values())
    for system in systems:
        line: Record = {"system": system.name, "ours": system.ours, "backends": [], "failed": True, "peaks": None}
        record["systems"].append(line)
        if record.get("lost"):
            line["reason"] = f"not run: {record['lost']} left the GPU unusable"
            continue
        trial = attempt(system, Mode(), case, inputs)
        trial.results = {}
        line |= {"backends": list(trial.needs.backends), "reason": trial.reason, "failed": trial.failed}
        if trial.call is not None and not trial.failed:
            try:
                line["peaks"] = peaks(trial.out, leaves, inputs.dout, backward=trial.has_backward)._asdict()
            except Exception as error:
                line |= {"reason": worded(error), "failed": True}
        if line["failed"] and device_is_lost(device):
            record["lost"] = system.name
    return record


def failures(record: Record) -> list[str]:
    """Ours that failed, one line each."""
    return [
        f"{record['name']}, {line['system']}: {line['reason']}"
        for line in record["systems"]
        if line["ours"] and line["failed"]
    ]
