"""`python -m flash_dmattn info --verify`: compares each backend with the formula in fp64, on one case per feature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TextIO

import torch
from torch import Tensor

from ..api import attention
from ..backends.protocol import Reason
from ..dispatch.config import BackendChoice, disabled, parse_choice
from ..dispatch.registry import BACKENDS
from ..dispatch.selection import available_backends
from ..explanation import Explanation, explain
from ..problem import dtype_name
from ..reference import formula, yardstick
from ..reference.yardstick import FLOOR, RATIO

# Lengths are odd and differ, to test partial tiles and the bottom-right alignment.
BATCH, SEQLEN_Q, SEQLEN_K, NUM_HEADS, HEAD_DIM = 2, 37, 53, 4, 32
OUTPUTS, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv", "dbias")


@dataclass(frozen=True)
class Case:
    """One feature: the shapes of mask and bias, the flags of the call, and the inputs that take a gradient."""

    name: str
    num_heads_k: int = NUM_HEADS
    mask: tuple[int, ...] | None = None
    empty_rows: bool = False
    bias: tuple[int, ...] | None = None
    is_causal: bool = False
    needs_grad: tuple[str, ...] = ("q", "k", "v")

    @property
    def results(self) -> tuple[str, ...]:
        return OUTPUTS + tuple(f"d{name}" for name in self.needs_grad)

    def sample(self, device: str, dtype: torch.dtype) -> Sample:
        """Draw its tensors; they are equal for every device and backend."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

        tensors = {
            "q": normal(BATCH, SEQLEN_Q, NUM_HEADS, HEAD_DIM),
            "k": normal(BATCH, SEQLEN_K, self.num_heads_k, HEAD_DIM),
            "v": normal(BATCH, SEQLEN_K, self.num_heads_k, HEAD_DIM),
        }
        mask = None
        if self.mask is not None:
            mask = torch.rand(self.mask, generator=generator, dtype=torch.float32, device="cpu") < 0.5
            mask[..., 0] = True  # so that no row is empty by chance
            if self.empty_rows:
                mask[..., ::5, :] = False
            mask = mask.to(device)
        if self.bias is not None:
            tensors["bias"] = normal(*self.bias)
        dout = normal(BATCH, SEQLEN_Q, NUM_HEADS, HEAD_DIM)
        dlse = normal(BATCH, NUM_HEADS, SEQLEN_Q, dtype=torch.float32)
        return Sample(self.name, tensors, {"mask": mask, "is_causal": self.is_causal}, self.results, dout, dlse)


CASES = (
    # First, because for a backend that supports only a part of a call, `check` runs the part on one case only.
    Case(
        "all together",
        num_heads_k=2,
        mask=(BATCH, 1, SEQLEN_Q, SEQLEN_K),
        bias=(1, NUM_HEADS, SEQLEN_Q, SEQLEN_K),
        is_causal=True,
        needs_grad=("q", "k", "v", "bias"),
    ),
    Case("causal", is_causal=True),
    Case("mask", mask=(BATCH, 1, SEQLEN_Q, SEQLEN_K)),
    Case("bias", bias=(1, NUM_HEADS, SEQLEN_Q, SEQLEN_K), needs_grad=("q", "k", "v", "bias")),
    Case("bias alone needs grad", bias=(1, NUM_HEADS, SEQLEN_Q, SEQLEN_K), needs_grad=("bias",)),
    Case("grouped heads", num_heads_k=2, bias=(BATCH, 2, 1, SEQLEN_K), needs_grad=("q", "k", "v", "bias")),
    Case("empty rows", mask=(BATCH, 1, SEQLEN_Q, SEQLEN_K), empty_rows=True),
)


@dataclass(frozen=True)
class Outcome:
    """The result of one backend on one case: errors with their limits, or the reasons why it did not run."""

    backend: str
    device: str
    dtype: str
    case: str
    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    exception: str | None = None
    backward: str | None = None  # the backend of the backward pass, if it is another one

    @property
    def failed(self) -> tuple[str, ...]:
        """The results with an error above their limit, or NaN."""
        return tuple(name for name in self.errors if not self.errors[name] <= self.limits[name])

    @property
    def passed(self) -> bool:
        return self.exception is None and not self.failed

    @property
    def verdict(self) -> str:
        """A short verdict for the table."""
        if not self.passed:
            return "FAIL"
        if not self.errors:
            return "not run"
        return "pass, in part" if self.reasons and self.backward is None else "pass"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for json.dumps."""
        # JSON has no NaN and no infinity.
        finite = {name: x if math.isfinite(x) else str(x) for name, x in self.errors.items()}
        return {
            "backend": self.backend,
            "backward": self.backward,
            "device": self.device,
            "dtype": self.dtype,
            "case": self.case,
            "verdict": self.verdict,
            "tensors": {name: {"error": x, "limit": self.limits[name]} for name, x in finite.items()},
            "reasons": [reason._asdict() for reason in self.reasons],
            "exception": self.exception,
        }


def verify(stream: TextIO) -> list[Outcome]:
    """Run every backend on every case and device of this machine; write the table to `stream` row by row."""
    devices = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        devices.append(("cuda", torch.bfloat16))
    on_gpu = ", and 2 to 4 minutes on the GPU, where Triton and FlexAttention compile" if len(devices) > 1 else ""
    stream.write(f"\n{len(CASES)} cases on each backend: about 20 s on a CPU core{on_gpu}\n")
    stream.flush()
    outcomes = [o for device, dtype in devices for o in verify_on(device, dtype, tuple(BACKENDS), stream)]
    counts = {verdict: sum(o.verdict.startswith(verdict) for o in outcomes) for verdict in ("pass", "FAIL", "not run")}
    stream.write(f"\n{counts['pass']} passed, {counts['FAIL']} failed, {counts['not run']} not run\n")
    return outcomes


def verify_on(
    device: str,
    dtype: torch.dtype,
    backends: Sequence[str],
    stream: TextIO,
    has_time: Callable[[], bool] = lambda: True,
) -> list[Outcome]:
    """Run some backends on every case on one device; write the table to `stream` row by row.

    `has_time` is called before each case; it ends when that returns False.
    """
    name = dtype_name(dtype)
    header = "backend".ljust(11) + "case".ljust(23) + "".join(x.ljust(15) for x in (*OUTPUTS, *GRADIENTS)) + "verdict"
    stream.write(
        f"\n{name} on {device}: error < limit, where error is |x - x64| / |x64| against the formula in fp64\n"
        f"and limit is {RATIO} x the error of the formula in {name} + {FLOOR:.0e}\n\n{header}\n"
    )
    outcomes: list[Outcome] = []
    samples = [case.sample(device, dtype) for case in CASES]

    def show(backend: str, case: str, check: Callable[[], Outcome]) -> Outcome:
        # Before the run, because the first call of a compiled backend takes long.
        stream.write(backend.ljust(11) + case.ljust(23))
        stream.flush()
        outcome = check()
        remarks = _remarks(outcome, outcomes[-1] if outcomes else None)
        stream.write(_numbers(outcome) + "".join(f"\n{'':11}{line}" for line in remarks) + "\n")
        stream.flush()
        outcomes.append(outcome)
        return outcome

    for backend in backends:
        if backend not in available_backends():
            off = backend in disabled()
            text = "it is switched off" if off else BACKENDS[backend].probe().reason
            reason = Reason(backend, "disabled" if off else "unavailable", text)
            show(backend, "all", partial(Outcome, backend, device, name, "all", reasons=(reason,)))
            continue
        part_shown = False
        for sample in samples:
            if not has_time():
                return outcomes
            outcome = show(backend, sample.name, partial(sample.check, backend, not part_shown))
            ran = bool(outcome.errors) or outcome.exception is not None
            part_shown = part_shown or (ran and bool(outcome.reasons) and outcome.backward is None)
    return outcomes


class Sample:
    """One call with its tensors; `check` compares the results of a backend with the formula.

    `tensors` has q, k, v and, if there is one, bias, and `flags` the other arguments of `attention`. `results` are the
    names of the compared results, out of `OUTPUTS` and `GRADIENTS`. `dlse` is not used if lse is no result.
    """

    def __init__(
        self,
        name: str,
        tensors: dict[str, Tensor],
        flags: dict[str, Any],
        results: tuple[str, ...],
        dout: Tensor,
        dlse: Tensor | None = None,
    ) -> None:
        self.name, self.tensors, self.flags, self.results = name, tensors, flags, results
        self.dout, self.dlse = dout, dlse

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """All results of the formula in fp64."""
        return self._run(formula.attention, self.results, exact=True)

    @cached_property
    def yardstick(self) -> Outcome:
        """The errors of plain PyTorch in the dtypes of the call, from which the limits of all backends are computed."""
        call = {"mask": None, "bias": None, **self.tensors, **self.flags}
        dlse = self.dlse if "lse" in self.results else None
        plain = (*formula.attention(**call), *yardstick.gradients(self.dout, dlse, **call))
        by_name = dict(zip(OUTPUTS + GRADIENTS, plain))
        errors = {name: error(by_name[name], self.exact[name]) for name in self.results}
        limits = {name: RATIO * x + FLOOR for name, x in errors.items()}
        return replace(self._outcome("formula"), errors=errors, limits=limits)

    def check(self, backend: str, allow_partial: bool) -> Outcome:
        """Compare a backend with the formula; with `allow_partial` it runs only outputs if it refuses the whole call.

        The caller allows that for one case only, because to compile it for each case would take minutes.
        """
        wanted = self.results
        reasons = self._refusal(backend, wanted)
        partner = self._backward_partner(backend) if reasons else None
        if reasons and partner is None:
            parts = (OUTPUTS, OUTPUTS[:1]) if allow_partial else ()
            wanted = next((part for part in parts if not self._refusal(backend, part)), ())
        changes: dict[str, Any] = {"reasons": reasons, "backward": partner}
        if wanted:
            limits = self.yardstick.limits
            pair = backend if partner is None else (backend, partner)
            try:
                results = self._run(attention, wanted, return_lse="lse" in wanted, backend=pair)
            except Exception as raised:  # any failure of a backend is a result of this report
                changes["exception"] = f"{type(raised).__name__}: {raised}"
            else:
                changes["errors"] = {name: error(results[name], self.exact[name]) for name in wanted}
                changes["limits"] = {name: limits[name] for name in wanted}
        return replace(self._outcome(backend), **changes)

    def explain(self, wanted: tuple[str, ...] | None = None, backend: BackendChoice = "auto") -> Explanation:
        """Explain the call, or the part that computes the results `wanted`."""
        wanted = self.results if wanted is None else wanted
        return explain(**self._leaves(wanted), **self.flags, return_lse="lse" in wanted, backend=backend)

    def _outcome(self, backend: str) -> Outcome:
        return Outcome(backend, self.dout.device.type, dtype_name(self.dout.dtype), self.name)

    def _refusal(self, backend: str, wanted: tuple[str, ...]) -> tuple[Reason, ...]:
        (verdict,) = (verdict for verdict in self.explain(wanted).verdicts if verdict.backend == backend)
        return verdict.reasons

    def _backward_partner(self, backend: str) -> str | None:
        """Return a backend that can compute the backward pass for this one's forward pass; None if there is none."""
        if BACKENDS[backend].is_differentiable:
            return None
        others = (x for x in available_backends() if x != backend and not BACKENDS[x].is_differentiable)
        return next((x for x in others if self.explain(backend=parse_choice(f"{backend},{x}")).error is None), None)

    def _leaves(self, wanted: tuple[str, ...], exact: bool = False) -> dict[str, Any]:
        tensors = {name: x.double() if exact else x for name, x in self.tensors.items()}
        return {name: x.detach().requires_grad_(f"d{name}" in wanted) for name, x in tensors.items()}

    def _run(
        self, function: Callable[..., Any], wanted: tuple[str, ...], exact: bool = False, **more: Any
    ) -> dict[str, Tensor]:
        """Call a function and return its outputs and their gradients by name."""
        leaves = self._leaves(wanted, exact)
        outputs = function(**leaves, **self.flags, **more)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = outputs if "lse" in wanted else outputs[:1]
        results = {name: x.detach() for name, x in zip(OUTPUTS, outputs)}
        gradients = [name for name in wanted if name not in OUTPUTS]
        if gradients:
            cotangents = [x.to(output.dtype) for x, output in zip((self.dout, self.dlse), outputs) if x is not None]
            needed = [leaves[name.removeprefix("d")] for name in gradients]
            results |= zip(gradients, torch.autograd.grad(outputs, needed, cotangents))
        return results


def error(x: Tensor, oracle: Tensor) -> float:
    """Return |x - oracle| / |oracle|; infinity if infinite values differ, NaN if x has NaN."""
    x = x.to(oracle.dtype)
    infinite = oracle.isinf()
    if not x[infinite].equal(oracle[infinite]):
        return math.inf
    difference, norm = (x - oracle)[~infinite].norm().item(), oracle[~infinite].norm().item()
    return difference / norm if norm else difference


def _numbers(outcome: Outcome) -> str:
    def short(x: float) -> str:
        return f"{x:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")

    def cell(name: str) -> str:
        if name not in outcome.errors:
            return "-"
        own, limit = outcome.errors[name], outcome.limits[name]
        return f"{short(own)}{'<' if own <= limit else '>'}{short(limit)}"

    return "".join(cell(name).ljust(15) for name in (*OUTPUTS, *GRADIENTS)) + outcome.verdict


def _remarks(outcome: Outcome, previous: Outcome | None) -> list[str]:
    def causes(x: Outcome) -> list[tuple[str, str]]:
        return [(reason.backend, reason.code) for reason in x.reasons]

    by = "" if outcome.backward is None else f"gradients by {outcome.backward}, "
    lines = [f"{by}because {reason.text}" for reason in outcome.reasons]
    if lines and previous is not None and causes(previous) == causes(outcome):
        lines = ["for the same reasons"]
    return lines if outcome.exception is None else [*lines, outcome.exception.splitlines()[0]]
