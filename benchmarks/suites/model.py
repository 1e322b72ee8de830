"""The training step of a decoder, with the attention of every system: checked first, then timed in turns."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.problem import device_arch
from flash_dmattn.reference import yardstick

from ..cases import Case
from ..decoder import Decoder, without_attention
from ..inputs import layer_mask
from ..peak_memory import held, peaks
from ..systems import Attend, System
from ..timing import Runner, measure
from ..truth import Results, errors, plain_attention, wrong
from .equivalence import finite
from .performance import Effort
from .trial import device_is_lost, worded

Record = dict[str, Any]
# The weight whose gradient is compared. The backward pass computes it last.
FIRST_WEIGHT = "layers.0.q_proj.weight"
# The error of the loss, a single number, may be 0 by chance, so a ratio to it bounds nothing. Half a unit of bf16 does.
LOSS_LIMIT = 2.0**-9


@dataclass
class Step:
    """The training step of a decoder with one system's attention: forward and backward, no optimizer.

    Attributes:
        leaves: the parameters that take a gradient, by name.
    """

    decoder: Decoder
    attends: Sequence[Attend]
    leaves: dict[str, Tensor]

    @classmethod
    def of(cls, decoder: Decoder, attends: Sequence[Attend]) -> Step:
        """Return the step for every parameter."""
        return cls(decoder, attends, dict(decoder.named_parameters()))

    def loss(self) -> Tensor:
        loss: Tensor = self.decoder(self.attends)
        return loss

    def __call__(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(), list(self.leaves.values()))

    def first(self) -> Results:
        """Run for the first time: what is compared. Parameters that get no gradient are leaves no more."""
        loss = self.loss()
        grads = torch.autograd.grad(loss, list(self.leaves.values()), allow_unused=True)
        gradients = {name: x for name, x in zip(self.leaves, grads, strict=True) if x is not None}
        self.leaves = {name: x for name, x in self.leaves.items() if name in gradients}
        results = {"loss": loss.detach(), "dwq": gradients[FIRST_WEIGHT]}
        biases = [name for name in self.decoder.bias_names if name in gradients]
        return results | ({"dbias": torch.stack([gradients[name] for name in biases])} if biases else {})


@torch.enable_grad()
def row(case: Case, systems: list[System], device: torch.device, *, effort: Effort) -> Record:
    """Check, weigh and time the step of every system."""
    decoder = Decoder(case, device)
    record: Record = {"name": case.name, "group": case.group, "shape": case.shape, "what": case.what}
    chosen = case.explain(device_arch(device))
    record |= {"auto": [chosen.forward, chosen.backward], "without_attention": None, "systems": []}
    record["parameters"] = sum(parameter.numel() for parameter in decoder.parameters())
    dense = [layer_mask(case, bias) for bias in decoder.biases]
    exact = truth(decoder, case, dense)
    plain = Step.of(decoder, [plain_attention(mask, case.is_causal) for mask in dense]).first()
    del dense  # gigabytes
    record["loss"], record["plain"] = float(exact["loss"]), errors(plain, exact)
    record["limits"] = limits(record["plain"])
    steps: list[tuple[Record, Step]] = []
    for system in systems:
        line: Record = {"system": system.name, "ours": system.ours, "reason": "", "failed": False, "step": None}
        line |= {"backends": [], "errors": {}, "wrong": [], "peak_mb": None, "masks_mb": None, "first_call_s": None}
        record["systems"].append(line)
        if record.get("lost"):
            line |= {"reason": f"not run: {record['lost']} left the GPU unusable", "failed": True}
            continue
        step = attempt(line, system, case, decoder, exact, record["limits"])
        if step is not None:
            steps.append((line, step))
        elif line["failed"] and device_is_lost(device):
            record["lost"] = system.name
    if not record.get("lost"):
        time_steps(record, decoder, steps, device, effort)
    return record


def truth(decoder: Decoder, case: Case, dense: Sequence[Tensor]) -> Results:
    """Loss and gradients in fp64 of the same parameters, with dense masks and the attention of the eager backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, mask: Tensor) -> Tensor:
        out = flash_dmattn.attention(q, k, v, mask, bias, is_causal=case.is_causal, backend="eager")
        assert isinstance(out, Tensor)
        return out

    exact = copy.deepcopy(decoder).double()
    return Step.of(exact, [partial(attend, mask=mask) for mask in dense]).first()


def limits(plain: dict[str, float]) -> dict[str, float]:
    """Return the limits of the accuracy rule for the model; the yardstick is the model in bf16 with plain PyTorch.

    The yardstick includes the error of the linear layers, which all systems share.
    """
    bounds = {name: yardstick.RATIO * x + yardstick.FLOOR for name, x in plain.items()}
    return {**bounds, "loss": LOSS_LIMIT}


def attempt(
    line: Record, system: System, case: Case, decoder: Decoder, exact: Results, limits: dict[str, float]
) -> Step | None:
    """Run the step of a system once, check and weigh it; None, and a line that says why, where it does not run."""
    device = decoder.tokens.device
    needs = system.needs(case, device)
    line["backends"] = list(needs.backends)
    line["reason"] = needs.refusal or needs.backward_refusal
    if system.layers is None:
        line["reason"] = "it is no part of models"
    if system.layers is None or line["reason"]:
        return None
    started = time.perf_counter()
    try:
        attends, line["masks_mb"] = held(partial(system.layers, case, decoder.biases), device)
        step = Step.of(decoder, attends)
        measured = errors(step.first(), exact)
        line["first_call_s"] = time.perf_counter() - started
        line["errors"] = finite(measured)
        line["wrong"] = wrong(measured, limits, system.ours)
        if system.ours and "dbias" not in measured:
            line["wrong"].append("dbias")
        without = [name for name in decoder.bias_names if name not in step.leaves]
        line["reason"] = "it gives no gradient of the bias" if without else ""
        one = torch.ones_like(exact["loss"], dtype=torch.float32)
        line["peak_mb"] = peaks(step.loss, list(step.leaves.values()), one).both
    except Exception as error:  # a system that cannot run is a row with its error
        line |= {"reason": worded(error), "failed": True}
        return None
    return step


def time_steps(
    record: Record, decoder: Decoder, steps: list[tuple[Record, Step]], device: torch.device, effort: Effort
) -> None:
    """Time the step of all systems, and of the decoder without attention, in turns."""
    bare = Step.of(decoder, [without_attention] * len(decoder.layers))
    bare.first()
    runners = [(record, "without_attention", Runner(bare))]
    runners += [(line, "step", Runner(step)) for line, step in steps]
    measure([runner for _, _, runner in runners], device, **effort._asdict())
    for target, key, runner in runners:
        if runner.error is None:
            target[key] = runner.summary()
        else:
            target |= {"reason": worded(runner.error), "failed": True}
    broken = [line["system"] for line, _ in steps if line["failed"]]
    if broken and device_is_lost(device):
        record["lost"] = " or ".join(broken)


def failures(record: Record) -> list[str]:
    """Ours that failed or disagree with fp64, one line each."""
    problems = []
    for line in record["systems"]:
        if line["ours"] and (line["failed"] or line["wrong"]):
            broken = ", ".join(_said(line, n, record["limits"][n]) for n in line["wrong"])
            problems.append(f"{record['name']}, {line['system']}: {broken or line['reason']}")
    return problems


def _said(line: Record, name: str, limit: float) -> str:
    if name not in line["errors"]:
        return f"{name} is missing"
    x = line["errors"][name]
    return f"{name} {'NaN' if x is None else format(x, '.1e')} above {limit:.1e}"
