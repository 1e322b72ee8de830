"""What kernels walk of an interval mask in a call: in its order of keys, or in their own where that cannot serve."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..problem import AttentionProblem, MaskView, bias_class


class IntervalWalk(NamedTuple):
    """Bounds and lists of tiles as an `IntervalMask` has them, and the order of keys that they are in.

    Attributes:
        order: int32 (Bm, Hm, Lk), the key at each place; None where places are keys.
        is_per_score: whether the call has a bias of one value per score, or the gradient of one of that shape.
    """

    bounds: Tensor
    row_lists: Tensor
    col_lists: Tensor
    order: Tensor | None
    is_per_score: bool


def interval_notes(problem: AttentionProblem) -> tuple[str, ...]:
    """What `explain` says of a call with an interval mask on a backend that reads them."""
    if problem.mask_form != "intervals":
        return ()
    bias = problem.bias
    if bias is not None and bias_class(bias.shape, bias.strides) == "score":
        return ("takes keys in their own order: a bias of one value per query and key cannot follow that of a mask",)
    return ("in a mask's order of keys, if it has one, copies k and v",)


def interval_walk(
    mask: MaskView, seqlen_q: int, num_heads_k: int, bias: Tensor | None, *, needs_dbias: bool = False
) -> IntervalWalk:
    """The tiles of a view of the form "intervals", in its order if k, v and bias can follow it.

    A bias of one value per score cannot, nor can the gradient of one of that shape: what it gains it would lose to the
    copy. Nor can k and v where several heads of a group have masks of their own. Tiles of keys in their own order are
    then listed anew.

    Args:
        mask: of the form "intervals".
        seqlen_q, num_heads_k: of the call.
        bias: 4-D, or None.
        needs_dbias: whether its gradient is asked for.
    """
    start, stop, order, bounds, row_lists, col_lists = mask.tensors
    is_per_score = bias is not None and (
        bias_class(bias.shape, bias.stride()) == "score" or (needs_dbias and bias_class(bias.shape) == "score")
    )
    if order.shape[2] == 0:
        return IntervalWalk(bounds, row_lists, col_lists, None, is_per_score)
    if not is_per_score and order.shape[1] in (1, num_heads_k):
        return IntervalWalk(bounds, row_lists, col_lists, order, is_per_score)
    from ..masks.prepared.interval_operators import run_interval_tiles  # importing flash_dmattn does not need it

    bounds, row_lists, col_lists = run_interval_tiles(start, stop, order[:, :, :0].contiguous(), seqlen_q)
    return IntervalWalk(bounds, row_lists, col_lists, None, is_per_score)
