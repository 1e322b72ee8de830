"""Masks and biases that a part of the batch shares, for what reads one entry for each of the batch."""

from __future__ import annotations

from torch import Tensor

from ..problem import AttentionProblem
from ..reference import formula


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
