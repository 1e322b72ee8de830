"""The plain formula as a backend, chosen by name only: the oracle, and the one that shows probabilities."""

from __future__ import annotations

from torch import Tensor

from ..problem import FEATURES as FEATURE_NAMES
from ..problem import AttentionProblem, SequenceView
from ..reference import formula
from ..reference import sequences as loop
from .entries import batch_of, dropout_of, formula_numbers, whole_batch
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
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(out, lse), and the (B, Hq, Lq, Lk) probabilities where asked for; see `flash_dmattn.reference.formula`."""
    dropped = dropout_of(dropout, problem.flags)
    if sequences is not None:
        batch = batch_of(sequences, problem.flags, problem.mask_form)
        return loop.attention(batch, q, k, v, mask, bias, sink, dropped, **formula_numbers(problem))
    mask, bias = whole_batch(problem, mask, bias)
    return formula.attention(
        q,
        k,
        v,
        mask,
        bias,
        return_probs=problem.return_probs,
        sink=sink,
        dropout=dropped,
        **formula_numbers(problem),
    )
