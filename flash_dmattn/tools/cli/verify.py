"""`python -m flash_dmattn info --verify`: each backend on a small case of each feature, against the formula in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...backends.protocol import Reason
    from ...dispatch.config import BackendChoice

# Odd lengths that differ, so that a tail and the bottom-right alignment are met.
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


CASES = (
    # The first one shows most, for backends that serve a part of a call only.
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
    """What came of one backend on one case: errors beside their limits, or the reasons why it did not run."""

    backend: str
    device: str
    dtype: str
    case: str
    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    exception: str | None = None
    backward: str | None = None  # the backend of the backward pass, where it is another

    @property
    def passed(self) -> bool:
        """Whether everything that ran is within its limit; NaN is not."""
        return self.exception is None and all(self.errors[name] <= self.limits[name] for name in self.errors)

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if not self.passed:
            return "FAIL"
        if not self.errors:
            return "not run"
        return "pass, in part" if self.reasons and self.backward is None else "pass"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        # JSON has no word for NaN and infinity.
        finite = {name: x if math.isfinite(x) else str(x) for name, x in self.errors.items()}
        numbers = {name: {"error": finite[name], "limit": self.limits[name]} for name in finite}
        return {
            "backend": self.backend,
            "backward": self.backward,
            "device": self.device,
            "dtype": self.dtype,
            "case": self.case,
            "verdict": self.verdict,
            "tensors": numbers,
            "reasons": [reason._asdict() for reason in self.reasons],
            "exception": self.exception,
        }


def verify(stream: TextIO) -> list[Outcome]:
    """Run every backend on every case and device of this machine; write the table to `stream` row by row."""
    import torch

    from ...dispatch.registry import BACKENDS

    devices = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        devices.append(("cuda", torch.bfloat16))
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

    Args:
        device, dtype: where, and of q, k, v and bias.
        backends: their names, in the order in which they run.
        stream: what the table is written to.
        has_time: asked before each case; cases after it has said no are left out.
    """
    from ...reference.yardstick import FLOOR, RATIO

    name = str(dtype).removeprefix("torch.")
    stream.write(
        f"\n{name} on {device}: error < limit, where error is |x - x64| / |x64| against the formula in fp64\n"
        f"and limit is {RATIO} x the error of the formula in {name} + {FLOOR:.0e}\n\n{_header()}\n"
    )
    outcomes: list[Outcome] = []
    for outcome in _outcomes(device, dtype, backends, stream, has_time):
        remarks = _remarks(outcome, outcomes[-1] if outcomes else None)
        stream.write(_numbers(outcome) + "".join(f"\n{'':11}{line}" for line in remarks) + "\n")
        stream.flush()
        outcomes.append(outcome)
    return outcomes


def _outcomes(
    device: str, dtype: torch.dtype, backends: Sequence[str], stream: TextIO, has_time: Callable[[], bool]
) -> Iterator[Outcome]:
    from ...backends.protocol import Reason
    from ...dispatch.config import disabled
    from ...dispatch.registry import probe
    from ...dispatch.selection import available_backends
    from ...reference.yardstick import FLOOR, RATIO

    dtype_name = str(dtype).removeprefix("torch.")
    for backend in backends:
        if backend not in available_backends():
            is_disabled = backend in disabled()
            text = "it is switched off" if is_disabled else probe(backend).reason
            reason = Reason(backend, "disabled" if is_disabled else "unavailable", text)
            _start(stream, backend, "all")
            yield Outcome(backend, device, dtype_name, "all", reasons=(reason,))
            continue
        part_shown = False
        for case in CASES:
            if not has_time():
                return
            _start(stream, backend, case.name)
            inputs = Inputs(case, device, dtype)
            reasons = inputs.reasons_against(backend, inputs.everything)
            wanted: tuple[str, ...] = inputs.everything
            partner = inputs.backward_partner(backend) if reasons else None
            if reasons and partner is None:
                # Less of the same call, on one case only: compiling a part for each would take minutes.
                parts = (OUTPUTS, OUTPUTS[:1]) if not part_shown else ()
                wanted = next((part for part in parts if not inputs.reasons_against(backend, part)), ())
                part_shown = part_shown or bool(wanted)
            if not wanted:
                yield Outcome(backend, device, dtype_name, case.name, reasons=reasons)
                continue
            oracle, plain = inputs.oracle(wanted), inputs.yardstick()
            limits = {name: RATIO * error(plain[name], oracle[name]) + FLOOR for name in wanted}
            try:
                found = inputs.attention(backend if partner is None else (backend, partner), wanted)
            except Exception as raised:  # any failure of a backend is a result of this report
                text = f"{type(raised).__name__}: {raised}"
                yield Outcome(backend, device, dtype_name, case.name, reasons=reasons, exception=text, backward=partner)
                continue
            errors = {name: error(found[name], oracle[name]) for name in wanted}
            yield Outcome(backend, device, dtype_name, case.name, errors, limits, reasons, backward=partner)


class Inputs:
    """The tensors of one case, the same on every device and for every backend."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.case, self.dtype = case, dtype
        self.tensors = {
            "q": normal(BATCH, SEQLEN_Q, NUM_HEADS, HEAD_DIM),
            "k": normal(BATCH, SEQLEN_K, case.num_heads_k, HEAD_DIM),
            "v": normal(BATCH, SEQLEN_K, case.num_heads_k, HEAD_DIM),
        }
        mask = None
        if case.mask is not None:
            mask = torch.rand(case.mask, generator=generator) < 0.5
            mask[..., 0] = True  # no row is empty by chance
            if case.empty_rows:
                mask[..., ::5, :] = False
            mask = mask.to(device)
        if case.bias is not None:
            self.tensors["bias"] = normal(*case.bias)
        self.flags: dict[str, Any] = {"mask": mask, "is_causal": case.is_causal}
        self.dout = normal(BATCH, SEQLEN_Q, NUM_HEADS, HEAD_DIM)
        self.dlse = torch.randn((BATCH, NUM_HEADS, SEQLEN_Q), generator=generator).to(device)

    @property
    def everything(self) -> tuple[str, ...]:
        """Names of all results of the case: out, lse and the gradients that it asks for."""
        return OUTPUTS + tuple(f"d{name}" for name in self.case.needs_grad)

    def reasons_against(self, backend: str, wanted: tuple[str, ...]) -> tuple[Reason, ...]:
        """Every reason why a backend does not compute these results."""
        from ...explanation import explain

        explanation = explain(**self.leaves(self.dtype, wanted), **self.flags, return_lse="lse" in wanted)
        (verdict,) = (verdict for verdict in explanation.verdicts if verdict.backend == backend)
        return verdict.reasons

    def backward_partner(self, backend: str) -> str | None:
        """The backend whose backward pass completes the forward pass of this one; None where there is none."""
        from ...dispatch.registry import BACKENDS
        from ...dispatch.selection import available_backends
        from ...explanation import explain

        if BACKENDS[backend].is_differentiable:
            return None
        leaves = self.leaves(self.dtype, self.everything)
        for other in available_backends():
            if other != backend and not BACKENDS[other].is_differentiable:
                explanation = explain(**leaves, **self.flags, return_lse=True, backend=(backend, other))
                if explanation.error is None:
                    return other
        return None

    def attention(self, backend: BackendChoice, wanted: tuple[str, ...]) -> dict[str, Tensor]:
        """These results by `flash_dmattn.attention`."""
        from ...api import attention

        leaves = self.leaves(self.dtype, wanted)
        found = attention(**leaves, **self.flags, return_lse="lse" in wanted, backend=backend)
        return self.results(found if isinstance(found, tuple) else (found,), leaves, wanted)

    def oracle(self, wanted: tuple[str, ...]) -> dict[str, Tensor]:
        """The same by the formula in fp64."""
        import torch

        from ...reference import formula

        leaves = self.leaves(torch.float64, wanted)
        return self.results(formula.attention(**leaves, **self.flags), leaves, wanted)

    def yardstick(self) -> dict[str, Tensor]:
        """All results by plain PyTorch in the dtype of the case."""
        from ...reference import formula, yardstick

        given = {"mask": None, "bias": None, **self.tensors, **self.flags}
        dlse = self.dlse if "lse" in self.everything else None
        found = (*formula.attention(**given), *yardstick.gradients(self.dout, dlse, **given))
        return {name: x for name, x in zip(OUTPUTS + GRADIENTS, found) if x is not None}

    def leaves(self, dtype: torch.dtype, wanted: tuple[str, ...]) -> dict[str, Any]:
        """The inputs in a dtype, those whose gradient is wanted as leaves of a new graph."""
        return {name: x.detach().to(dtype).requires_grad_(f"d{name}" in wanted) for name, x in self.tensors.items()}

    def results(
        self, outputs: tuple[Tensor, ...], leaves: dict[str, Any], wanted: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Name the outputs and their gradients."""
        import torch

        found = {name: x.detach() for name, x in zip(OUTPUTS, outputs)}
        gradients = [name for name in wanted if name not in OUTPUTS]
        if gradients:
            cotangents = [x.to(output.dtype) for x, output in zip((self.dout, self.dlse), outputs)]
            needed = [leaves[name.removeprefix("d")] for name in gradients]
            found |= zip(gradients, torch.autograd.grad(outputs, needed, cotangents))
        return found


def error(found: Tensor, oracle: Tensor) -> float:
    """|found - oracle| / |oracle|; infinite where an infinity is not the same in both, NaN where a NaN is."""
    found = found.to(oracle.dtype)
    infinite = oracle.isinf()
    if not found[infinite].equal(oracle[infinite]):
        return math.inf
    difference, norm = (found - oracle)[~infinite].norm().item(), oracle[~infinite].norm().item()
    return difference / norm if norm else difference


def _header() -> str:
    cells = [name.ljust(15) for name in (*OUTPUTS, *GRADIENTS)]
    return "backend".ljust(11) + "case".ljust(23) + "".join(cells) + "verdict"


def _start(stream: TextIO, backend: str, case: str) -> None:
    # Before the run, because the first call of a compiled backend takes its time.
    stream.write(backend.ljust(11) + case.ljust(23))
    stream.flush()


def _numbers(outcome: Outcome) -> str:
    cells = [
        f"{_short(outcome.errors[name])}{'<' if outcome.errors[name] <= outcome.limits[name] else '>'}"
        f"{_short(outcome.limits[name])}"
        if name in outcome.errors
        else "-"
        for name in (*OUTPUTS, *GRADIENTS)
    ]
    return "".join(cell.ljust(15) for cell in cells) + outcome.verdict


def _short(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")


def _remarks(outcome: Outcome, previous: Outcome | None) -> list[str]:
    def causes(of: Outcome) -> list[tuple[str, str]]:
        return [(reason.backend, reason.code) for reason in of.reasons]

    by = "" if outcome.backward is None else f"gradients by {outcome.backward}, "
    lines = [f"{by}because {reason.text}" for reason in outcome.reasons]
    if lines and previous is not None and causes(previous) == causes(outcome):
        lines = ["for the same reasons"]
    return lines if outcome.exception is None else [*lines, outcome.exception.splitlines()[0]]
