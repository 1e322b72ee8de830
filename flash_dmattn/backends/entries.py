"""What backends hand to the plain formula: whole masks and biases, and the numbers of a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..problem import AttentionProblem, Flags, MaskForm, MaskView, SequenceView
from ..reference import formula
from ..reference.dropout import Dropout
from ..reference.sequences import Batch


def whole_batch(
    problem: AttentionProblem, mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias with 1 entry or one for each of the batch: copies of those that have another number.

    Differentiable. A bias that is copied is of the dtype of the softmax, so that its gradient is rounded once.
    """
    flags = problem.flags
    if mask is not None:
        mask = formula.spread_entries(mask, problem.batch, flags.mask_repeat)
    if bias is not None and "bias" in problem.partly_shared:
        wide = bias.double() if bias.element_size() == 8 else bias.float()
        bias = formula.spread_entries(wide, problem.batch, flags.bias_repeat)
    return mask, bias


def formula_numbers(problem: AttentionProblem) -> dict[str, Any]:
    """The arguments of a call that are no tensors, as `flash_dmattn.reference.formula` names them."""
    return {
        "is_causal": problem.is_causal,
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "window_size": problem.window_size,
    }


def dropout_of(key: Tensor | None, flags: Flags) -> Dropout | None:
    """Dropout of a call, of which a backend receives the key."""
    return None if key is None else Dropout(flags.dropout_p, key)


def bools_of(mask: MaskView) -> Tensor | None:
    """The bool mask of a call with sequences, 4-D: a tree of new tokens is (S or 1, 1, n, n)."""
    if mask.form != "tree":
        return mask.dense
    from ..masks.prepared.tree import unpack_tree  # importing flash_dmattn does not need it

    return unpack_tree(mask.tensors[0])[:, None]


def batch_of(sequences: SequenceView, flags: Flags, mask_form: MaskForm) -> Batch:
    """The sequences of a call, as the loop over them has them."""
    of_mask = "tree" if mask_form == "tree" else flags.mask_packing
    packed = (flags.packs_queries, flags.packs_keys, of_mask, flags.bias_packing)
    return Batch(sequences.bounds, sequences.block_table, *packed)
