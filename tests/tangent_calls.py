"""Calls in forward mode, drawn at random: the tangents of any of their inputs, and the rule of accuracy for results.

The oracle is `backend="reference"` in fp64, the formula that PyTorch differentiates; it is the yardstick, too, in the
dtype of the call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accuracy import DEVIATIONS, LSE_ROUNDING, NOTHING_LEFT, Results, failures_of, independent
from cases import HIDDEN, JUMPS, SEEN, STEPS
from draws import Drawn, placed
from sequence_calls import SequenceCall, spoiled
from torch import Tensor

import flash_dmattn

NAMES = ("q", "k", "v", "bias", "sink")


@dataclass(frozen=True)
class TangentCall:
    """A call of `attention`: its float tensors and their tangents by name, and all else that it takes."""

    tensors: dict[str, Tensor]
    tangents: dict[str, Tensor]
    others: dict[str, Any]
    pass_bias: Callable[[Tensor], Any]
    seed: int
    told: str
    data: str = "centred"

    def run(self, backend: str, tangents: dict[str, Tensor] | None = None) -> Results:
        """Return out, lse and their tangents, by `torch.func.jvp`."""
        own = self.tangents if tangents is None else tangents

        def attend(*leaves: Tensor) -> tuple[Tensor, ...]:
            given = {**self.tensors, **dict(zip(own, leaves, strict=True))}
            if "bias" in given:
                given["bias"] = self.pass_bias(given["bias"])
            torch.manual_seed(self.seed)  # which decides what is dropped
            return flash_dmattn.attention(**given, **self.others, return_lse=True, backend=backend)

        primals = tuple(self.tensors[name] for name in own)
        (out, lse), (tout, tlse) = torch.func.jvp(attend, primals, tuple(own.values()))
        return {"out": out, "lse": lse, "tout": tout, "tlse": tlse}

    def explain(self, backend: str) -> flash_dmattn.Explanation:
        given = {**self.tensors, **self.others}
        if "bias" in given:
            given["bias"] = self.pass_bias(given["bias"])
        return flash_dmattn.explain(**given, return_lse=True, backend=backend)

    def to(self, dtype: torch.dtype) -> TangentCall:
        """Return the same values in another dtype."""
        tensors, tangents = ({n: x.to(dtype) for n, x in part.items()} for part in (self.tensors, self.tangents))
        return replace(self, tensors=tensors, tangents=tangents)


def draw_tangents(number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Draw tangents of some tensors, at least one. Torch gives each of them the strides of its tensor."""
    rng, random_numbers = random.Random(f"tangents {number}"), torch.Generator().manual_seed(number)
    chosen = [name for name in tensors if rng.random() < 0.75] or [rng.choice(list(tensors))]
    tangents = {}
    for name in chosen:
        tangents[name] = torch.randn(tensors[name].shape, generator=random_numbers).to(tensors[name])
    return tangents


def dense_call(number: int, drawn: Drawn, device: str) -> TangentCall:
    """Return a drawn call with tangents."""
    case = drawn.case
    if case.data in (*SEEN, *HIDDEN) and case.data != "seen nan q":
        case = case.with_(data="centred")  # not what products of NaN with a probability of 0 make
    x = placed(drawn, case.build(device))
    tensors = {name: t for name in NAMES if (t := getattr(x, name)) is not None}
    others = {"mask": x.mask, **case.flags(), **case.dropping()}
    tangents = draw_tangents(number, tensors)
    told = f"{case.repro()}\n  {drawn[1:]}"
    return TangentCall(tensors, tangents, others, case.passed, case.seed, told, case.data)


def sequences_call(number: int, call: SequenceCall) -> TangentCall:
    """Return a drawn call with sequences with tangents; rows of no sequence hold NaN."""
    call = spoiled(call)
    call = replace(call, k=call.k.nan_to_num(0.0)) if call.data == "seen nan k" else call
    tensors = {name: t.detach() for name in NAMES if (t := getattr(call, name)) is not None}
    others = {"mask": call.mask, "sequences": call.sequences, **call.flags}
    return TangentCall(tensors, draw_tangents(number, tensors), others, lambda x: x, call.seed, call.told, call.data)


def luck(off: Tensor, exact: Tensor) -> Tensor:
    """Return the error of the yardstick, scaled so that `DEVIATIONS` of it are what one of its kind has at bad luck.

    Where the window and dropout leave few probabilities, a few rows have most of the error, one rounding each.
    """
    number = independent(exact.square())
    return off * (1 + DEVIATIONS / (2 * number).sqrt()) / DEVIATIONS


def assert_accurate(got: Results, call: TangentCall) -> None:
    """Check every result by the rule of accuracy; terms that cancel are measured against the tangents of each input."""
    wide = call.to(torch.float64)
    exact, in_dtype = wide.run("reference"), call.run("reference")
    bad = exact["lse"].isnan()
    by_row = bad.mT.unsqueeze(-1)  # rows that see a NaN; their tangents are anything
    assert torch.equal(got["lse"].isnan(), bad) and torch.equal(got["out"].isnan().all(-1), by_row[..., 0]), call.told

    def without_bad(x: Results) -> Results:
        return {name: y.masked_fill(bad if name in ("lse", "tlse") else by_row, 0.0) for name, y in x.items()}

    got, exact, in_dtype = (without_bad(x) for x in (got, exact, in_dtype))
    sizes: Results = {"tout": torch.zeros_like(exact["tout"]), "tlse": torch.zeros_like(exact["tlse"])}
    for name, tangent in wide.tangents.items():
        alone = without_bad(wide.run("reference", {name: tangent}))
        moved = alone["tlse"].abs()
        sizes["tlse"] += moved
        sizes["tout"] += alone["tout"].abs() + moved.mT.unsqueeze(-1) * exact["out"].abs()
    like = {"out": call.tensors["q"], "tout": call.tensors["q"]}
    spread = {name: luck(in_dtype[name].double() - exact[name], exact[name]) for name in ("tout", "tlse")}
    if call.data != "centred":  # far from 0 fp32 rounds scores as it rounds lse, whatever is added to them
        far = exact["lse"].abs().clamp_min(1e3 if call.data in (*JUMPS, *STEPS) else 0.0)
        rounding = LSE_ROUNDING * far.masked_fill(far > NOTHING_LEFT, 0.0) / DEVIATIONS
        spread["out"] = luck(in_dtype["out"].double() - exact["out"], exact["out"])
        spread["out"] += exact["out"].abs() * rounding.mT.unsqueeze(-1)
        spread["lse"] = rounding.clone()
        spread["tlse"] += sizes["tlse"] * rounding
        spread["tout"] += sizes["tout"] * rounding.mT.unsqueeze(-1)
    failures = failures_of(got, exact, in_dtype, like, call.told, sizes=sizes, spread=spread)
    assert not failures, f"tangents of {list(call.tangents)}: " + "; ".join(failures.values())
