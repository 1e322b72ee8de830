"""Our backends as columns: each by name, `cuda` with the backward pass of `triton` where it has none for a call.

There is also what "auto" takes, but on a GPU only where that is none of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

import flash_dmattn
from flash_dmattn import masks
from flash_dmattn.backends.protocol import Direction
from flash_dmattn.dispatch.config import parse_choice
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.problem import AttentionProblem, device_arch

from ..cases import Case
from ..inputs import Inputs
from .protocol import Attend, Bound, Mode, Needs, System

AUTO = "auto"
NAMES = ("cuda", "triton", "flex", AUTO, "eager", "reference")
# The backend whose backward pass is taken if the backend itself refuses it.
PAIRED = {"cuda": "triton"}


def needs(name: str, case: Case, device: torch.device) -> Needs:
    """Return what the rules of a backend refuse of a case."""
    where = device_arch(device)
    if name == AUTO:
        chosen = case.explain(where)
        return Needs(backends=tuple(name for name in (chosen.forward, chosen.backward) if name is not None))
    alone = case.explain(where, gradients=False).problem
    with_lse = case.explain(where, gradients=False, return_lse=True).problem
    forward, lse = (refusal(name, problem, ("forward",)) for problem in (alone, with_lse))
    if forward or not case.takes_gradients:
        return Needs(forward, "", lse, (name,))
    problem = case.explain(where).problem
    backward = refusal(name, problem, ("forward", "backward"))
    other = PAIRED.get(name)
    if refusal(name, problem, ("backward",)) and other is not None and not refusal(other, problem, ("backward",)):
        return Needs("", "", lse, (name, other))
    return Needs("", backward, lse, (name, name))


def auto_has_a_row(case: Case, device: torch.device, names: Collection[str]) -> bool:
    """Return whether a system with one of these names shows what "auto" takes for a case."""
    return set(needs(AUTO, case, device).backends) <= set(names) & set(NAMES)


def refusal(name: str, problem: AttentionProblem, passes: tuple[Direction, ...]) -> str:
    """Return every rule of a backend that some passes of a call break, in words."""
    return "; ".join(str(reason) for reason in BACKENDS[name].broken_rules(problem, passes))


def missing(name: str, device: torch.device) -> str:
    if name == AUTO:
        return ""
    if name in ("cuda", "triton") and device.type == "cpu":
        return "its kernels run on GPUs"
    return BACKENDS[name].probe().reason


def bind(name: str, inputs: Inputs, mode: Mode) -> Bound:
    """`flash_dmattn.attention`, with the bool tensor as it is or prepared beforehand, causality folded in.

    A backend that takes the lists of a mask gets these as its prepared mask.
    """
    q, k, v, _, mask, _, is_causal = inputs[:7]
    bias = inputs.passed_bias
    seqlen_q, seqlen_k = inputs.lengths
    passed: torch.Tensor | masks.PreparedMask | None = mask
    if mode.prepared and inputs.lists is not None and _takes_lists(name, inputs):
        passed, is_causal = inputs.lists, False
    elif mode.prepared and mask is not None:
        passed = masks.PreparedMask.from_mask(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal)
    choice = parse_choice(name)
    if name in PAIRED and q.requires_grad:
        problem = flash_dmattn.explain(q, k, v, passed, bias, is_causal=is_causal).problem
        if not BACKENDS[name].accepts(problem, "backward"):
            choice = parse_choice(f"{name},{PAIRED[name]}")
    returns = mode.with_lse

    def results() -> tuple[torch.Tensor, ...]:
        result = flash_dmattn.attention(q, k, v, passed, bias, is_causal=is_causal, return_lse=returns, backend=choice)
        return result if isinstance(result, tuple) else (result,)

    return results


def _takes_lists(name: str, inputs: Inputs) -> bool:
    problem = flash_dmattn.explain(inputs.q, inputs.k, inputs.v, inputs.lists, inputs.bias).problem
    return BACKENDS[name].accepts(problem, "forward")


def layers(name: str, case: Case, biases: Sequence[torch.Tensor]) -> list[Attend]:
    """`flash_dmattn.attention` with the mask of each layer as intervals, made of its bias: nothing of (L, L)."""
    assert case.mask is not None and case.mask.kind == "topk"
    backends = needs(name, case, biases[0].device).backends
    choice = parse_choice(name if len(set(backends)) == 1 else f"{backends[0]},{backends[-1]}")
    kept = min(case.mask.size, case.seqlen)
    prepared = [masks.PreparedMask.from_topk(bias, kept, is_causal=True, seqlen_q=case.seqlen_q) for bias in biases]

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, *, mask: masks.PreparedMask
    ) -> torch.Tensor:
        out = flash_dmattn.attention(q, k, v, mask, bias, is_causal=case.is_causal, backend=choice)
        assert isinstance(out, torch.Tensor)
        return out

    return [partial(attend, mask=mask) for mask in prepared]


SYSTEMS = tuple(
    System(
        name,
        partial(bind, name),
        partial(needs, name),
        partial(missing, name),
        ours=True,
        compiles=name == "flex",
        slow=name in ("flex", "eager"),
        layers=partial(layers, name),
    )
    for name in NAMES
)
