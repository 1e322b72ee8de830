"""The plain formula as a backend, chosen by name only: the oracle, and the only backend that returns probabilities."""

from __future__ import annotations

from torch import Tensor

from ..problem import FEATURES, AttentionProblem
from ..problem.inputs import Inputs
from ..reference import formula
from ..reference import sequences as loop
from .entries import (
    batch_of,
    bias_of,
    bool_mask,
    chunk_bias_of,
    dropout_of,
    formula_numbers,
    lists_as_tensors,
    lists_of,
    whole_batch,
)
from .protocol import Backend, Forward, Rule


def plan_forward(problem: AttentionProblem) -> Forward:
    """Plan (out, lse), and the (B, Hq, Lq, Lk) probabilities if asked for; see `flash_dmattn.reference.formula`."""
    numbers = formula_numbers(problem)

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        dropout = dropout_of(problem, x)
        others = {"return_probs": problem.return_probs, "sink": x.sink, "dropout": dropout}
        if x.mask.form == "lists" and x.sequences is not None:
            own = (lists_of(problem, x), chunk_bias_of(problem, x), x.sink, dropout)
            return loop.attention(batch_of(problem, x), x.q, x.k, x.v, *own, **numbers)
        if x.mask.form == "lists":
            allowed, added, _ = lists_as_tensors(problem, x)
            return formula.attention(x.q, x.k, x.v, allowed, added, **others, **numbers)
        mask, bias = bool_mask(x.mask), bias_of(problem, x)
        if x.sequences is not None:
            return loop.attention(batch_of(problem, x), x.q, x.k, x.v, mask, bias, x.sink, dropout, **numbers)
        mask, bias = whole_batch(problem, mask, bias)
        return formula.attention(x.q, x.k, x.v, mask, bias, **others, **numbers)

    return forward


BACKEND = Backend(
    name="reference",
    plan_forward=plan_forward,
    features=frozenset(FEATURES),
    auto_rules=(
        Rule(
            "by_name_only",
            lambda p: False,
            lambda p: "it holds every score of the call at once, so it is chosen by name only",
            'use backend="reference"',
        ),
    ),
    mask_forms=frozenset({"dense", "tree", "lists"}),
    repeats_entries=True,
    has_forward_ad=True,
)
