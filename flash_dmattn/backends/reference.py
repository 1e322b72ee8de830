"""The plain formula as a backend, used only by name: the oracle, and the only backend that returns probabilities.

It also converts calls for `flash_dmattn.reference`, which the other backends in plain PyTorch run, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import FEATURES, AttentionProblem, MaskChoice, MaskView
from ..problem.inputs import Inputs
from ..reference import formula
from ..reference import sequences as loop
from ..reference.distances import AnyBias, ChunkBias, Distances, values_of, with_values
from ..reference.dropout import Dropout
from ..reference.lists import Lists, ListValues, dense_bias, slot_table, value_gradient
from ..reference.sequences import Batch
from .mask_choice import convert
from .protocol import Backend, Forward, Rule


def whole_batch(
    problem: AttentionProblem, mask: Tensor | None, bias: AnyBias | None
) -> tuple[Tensor | None, AnyBias | None]:
    """Return mask and bias with 1 entry or with one for each entry of the batch, copied if they have another number.

    It is differentiable. A copied bias has the dtype of the softmax, so that its gradient is rounded once.
    """
    flags = problem.flags
    if mask is not None:
        mask = formula.spread_entries(mask, problem.batch, flags.mask_repeat)
    values = values_of(bias)
    if values is not None and "bias" in problem.partly_shared:
        wide = values.double() if values.element_size() == 8 else values.float()
        bias = with_values(bias, formula.spread_entries(wide, problem.batch, flags.bias_repeat))
    return mask, bias


def bias_of(problem: AttentionProblem, inputs: Inputs) -> AnyBias | None:
    flags = problem.flags
    if inputs.bias is None or not flags.outside:
        return inputs.bias
    return Distances(inputs.bias, flags.zero, flags.outside == "clamp")


def lists_of(problem: AttentionProblem, inputs: Inputs) -> Lists:
    keys, _, slots = inputs.mask.tensors
    return Lists(keys, slots, problem.flags.block_q, problem.flags.block_k)


class FormulaOperands(NamedTuple):
    """The bool mask of a call without sequences, and its bias, both for the whole batch; differentiable.

    `to_list_values` converts the gradient of this bias to the gradient of the values of lists, if the call has them.
    """

    mask: Tensor | None
    bias: AnyBias | None
    to_list_values: Callable[[Tensor], Tensor] = lambda dbias: dbias


def for_formula(problem: AttentionProblem, x: Inputs) -> FormulaOperands:
    """Return the mask and the bias of a call without sequences, as arguments of the formula."""
    flags = problem.flags
    if x.mask.form != "lists":
        return FormulaOperands(*whole_batch(problem, readable_mask(problem, x), bias_of(problem, x)))
    lists, bias = lists_of(problem, x), x.bias
    slots = slot_table(lists, problem.seqlen_q, problem.seqlen_k)
    if bias is None or not flags.is_list_bias:
        return FormulaOperands(*whole_batch(problem, slots >= 0, bias_of(problem, x)))
    wide = bias.to(torch.promote_types(bias.dtype, formula.softmax_dtype(x.q)))  # its gradient is rounded once
    slots = formula.spread_entries(slots, problem.batch, flags.mask_repeat)
    values = formula.spread_entries(wide, problem.batch, flags.bias_repeat)
    made = dense_bias(values, slots, lists.block_q)
    return FormulaOperands(slots >= 0, made, lambda dbias: value_gradient(dbias, values, slots, lists.block_q))


def chunk_bias_of(problem: AttentionProblem, inputs: Inputs) -> ChunkBias | None:
    """Return the bias of a call, with the lists if it has values for entries of lists."""
    if inputs.bias is not None and problem.flags.is_list_bias:
        return ListValues(inputs.bias, lists_of(problem, inputs), problem.flags.mask_repeat)
    return bias_of(problem, inputs)


def for_sequences(problem: AttentionProblem, x: Inputs) -> tuple[Tensor | Lists | None, ChunkBias | None]:
    """Return the bool mask or the lists of a call with sequences, and its bias."""
    mask = lists_of(problem, x) if x.mask.form == "lists" else readable_mask(problem, x)
    return mask, chunk_bias_of(problem, x)


def formula_numbers(problem: AttentionProblem) -> dict[str, Any]:
    """Return the numeric arguments of `flash_dmattn.reference.formula` for a call."""
    return {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap, "window_size": problem.window}


def asked_for(problem: AttentionProblem) -> dict[str, bool]:
    """Return which statistics of its rows a call asks for."""
    return {"max_scores": problem.flags.max_scores, "entropy": problem.flags.entropy}


def dropout_of(problem: AttentionProblem, inputs: Inputs) -> Dropout | None:
    return None if inputs.dropout is None else Dropout(problem.dropout_p, inputs.dropout)


def bool_mask(mask: MaskView) -> Tensor | None:
    """Return the bool mask of a call, 4-D; a tree of new tokens becomes (S or 1, 1, n, n)."""
    if mask.form != "tree":
        return mask.dense
    from ..masks.prepared.packing import unpack_tree  # importing flash_dmattn does not need it

    return unpack_tree(mask.tensors[0])[:, None]


def readable_mask(problem: AttentionProblem, x: Inputs) -> Tensor | None:
    """Return the bool mask of a call, unpacked from the form for other passes."""
    is_prepared = x.mask.form not in ("none", "dense", "tree")
    return bool_mask(convert(problem, MaskChoice("dense"), x.mask, x.sequences) if is_prepared else x.mask)


def batch_of(problem: AttentionProblem, inputs: Inputs) -> Batch:
    flags, spec, sequences = problem.flags, problem.sequences, inputs.sequences
    assert spec is not None and sequences is not None
    mask_packing = "tree" if inputs.mask.form == "tree" else flags.mask_packing
    return Batch(*sequences, spec.packs_queries, spec.packs_keys, mask_packing, flags.bias_packing)


def plan_forward(problem: AttentionProblem) -> Forward:
    """Plan (out, lse), and other results that the problem asks for; see `flash_dmattn.reference.formula`."""
    numbers = {**formula_numbers(problem), **asked_for(problem)}

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        tensors, others = (x.q, x.k, x.v), {"sink": x.sink, "dropout": dropout_of(problem, x), **numbers}
        if x.sequences is not None:
            return loop.attention(batch_of(problem, x), *tensors, *for_sequences(problem, x), **others)
        mask, bias, _ = for_formula(problem, x)
        return formula.attention(*tensors, mask, bias, return_probs=problem.return_probs, **others)

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
            example={"device": "sm_90"},
        ),
    ),
    mask_forms=frozenset({"dense", "tree", "lists"}),
    repeats_entries=True,
    has_forward_ad=True,
)
