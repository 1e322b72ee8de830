"""One system on one case: bound, run for the first time, its results taken, and whatever goes wrong put into words."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cases import Case
from ..inputs import Inputs
from ..systems import Bound, Mode, Needs, System
from ..truth import Results

REASON_LENGTH = 500


@dataclass
class Trial:
    """A system on a case, in one mode.

    Attributes:
        needs: the answer of the system about the case.
        call: the call, None if it cannot run.
        reason: why the call, or only its backward pass, does not run.
        failed: whether the reason is an exception, and not an answer in `needs`.
        first_call_s: seconds until the first results, compilation included.
    """

    system: System
    mode: Mode
    needs: Needs
    call: Bound | None = None
    reason: str = ""
    failed: bool = False
    has_backward: bool = False
    first_call_s: float | None = None
    results: Results = field(default_factory=dict)

    def out(self) -> Tensor:
        """Run the call, for its first result."""
        assert self.call is not None
        return self.call()[0]


def attempt(system: System, mode: Mode, case: Case, inputs: Inputs) -> Trial:
    """Bind and run a system once, forward under no_grad and, where the case takes gradients, with its backward."""
    device = inputs.q.device
    needs = system.needs(case, device)
    trial = Trial(system, mode, needs, reason=needs.refusal)
    if needs.refusal:
        return trial
    if mode.with_lse and needs.lse_refusal:
        mode = mode._replace(with_lse=False)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.set_grad_enabled(case.takes_gradients and not needs.backward_refusal):
                call = system.bind(inputs, mode)
            trial.results = outputs(call, inputs, backward=False)
            trial.call = call
            if case.takes_gradients and needs.backward_refusal:
                trial.reason = f"backward: {needs.backward_refusal}"
            elif case.takes_gradients:
                trial.results = outputs(call, inputs, backward=True)
                trial.has_backward = True
            if device.type == "cuda":
                torch.cuda.synchronize()
            trial.first_call_s = time.perf_counter() - started
        except Exception as error:  # a system that cannot run is a row with its error
            which = "backward: " if trial.call is not None else ""
            trial.reason = which + worded(error, [str(warning.message) for warning in caught])
            trial.failed = True
    return trial


def outputs(call: Bound, inputs: Inputs, *, backward: bool) -> Results:
    """out, lse where it is returned, and the gradients of one call."""
    with torch.set_grad_enabled(backward):
        returned = call()
    results = dict(zip(("out", "lse"), returned))
    if backward:
        leaves = inputs.leaves
        results |= dict(zip(leaves, torch.autograd.grad(returned[0], list(leaves.values()), inputs.dout), strict=True))
    return {name: x.detach() for name, x in results.items()}


def device_is_lost(device: torch.device) -> bool:
    """Return whether an error, for example an illegal access of a peer, has made the GPU unusable for this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def stream_of(device: torch.device) -> AbstractContextManager[object]:
    """Make the stream of a case, because the default stream cannot be captured.

    The case must not change its stream: autograd binds leaves to the stream of their first use.
    """
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


@contextmanager
def precision_of(case: Case) -> Iterator[None]:
    """Have torch allow TF32 in fp32 as the case says."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if case.allows_tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def forget(device: torch.device) -> None:
    """Free the memory of a case, and its compiled graphs, whose number torch limits for each function."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def worded(error: BaseException, warned: list[str] | None = None) -> str:
    """Return an exception in one line, with what SDPA warned of the kernel it was pinned to."""
    said = [f"{type(error).__name__}: {' '.join(str(error).split())}"[:REASON_LENGTH]]
    if "No available kernel" in said[0]:  # of SDPA, pinned to a kernel that does not serve the call
        said = ["not available here"]
    for text in dict.fromkeys(text.partition(" (Triggered")[0] for text in warned or ()):
        if "attention" in text.lower() and "not used because" not in text and "runtime disabled" not in text:
            said.append(text)
    return " | ".join(said)
