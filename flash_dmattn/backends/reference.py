"""The plain formula as a backend, chosen by name only: the oracle, and the one that shows probabilities."""

from __future__ import annotations

from torch import Tensor

from ..problem import FEATURES as FEATURE_NAMES
from ..problem import AttentionProblem
from ..reference import formula
from .entries import whole_batch
from .protocol import Availability, Rule

NAME = "reference"
HAS_FORWARD_AD = True
REPEATS_ENTRIES = True
FEATURES = frozenset(FEATURE_NAMES)
RULES: tuple[Rule, ...] = ()
AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "by_name_only",
        lambda p: False,
        lambda p: "it holds every score of the call at once, so it is chosen by name only",
        'use backend="reference"',
    ),
)


def probe() -> Availability:
    """Always usable: it needs nothing but torch."""
    return Availability(True)


def attention(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(out, lse), and the (B, Hq, Lq, Lk) probabilities where asked for; see `flash_dmattn.reference.formula`."""
    mask, bias = whole_batch(problem, mask, bias)
    return formula.attention(
        q,
        k,
        v,
        mask,
        bias,
        is_causal=problem.is_causal,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        window_size=problem.window_size,
        return_probs=problem.return_probs,
        sink=sink,
    )
