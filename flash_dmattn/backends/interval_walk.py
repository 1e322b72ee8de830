"""What kernels walk of a mask that is known by its keys: intervals in an order of keys, or in their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..problem import AttentionProblem, Flags, MaskView, bias_class

if TYPE_CHECKING:
    from ..masks.prepared.operator import KeyForm


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


def call_key_form(problem: AttentionProblem, gathers: bool) -> KeyForm | None:
    """The form that a mask of one row takes in a call; None without such a mask."""
    p = problem
    if p.mask is None or not p.mask.broadcast()[2]:
        return None
    from ..masks.prepared.operator import key_form  # importing flash_dmattn does not need it

    mask_heads = 1 if p.mask.broadcast()[1] else p.mask.shape[1]
    per_score = "score" in (p.bias_class, p.dbias_class) or p.dropout_p > 0
    sizes = (mask_heads, p.batch, p.seqlen_q, p.num_heads, p.num_heads_k)
    return key_form(*sizes, bias_is_per_score=per_score, gathers=gathers)


def interval_notes(problem: AttentionProblem, gathers: bool) -> tuple[str, ...]:
    """What `explain` says of a call with an interval mask, or one that becomes one, on a backend that reads them."""
    p = problem
    if p.mask_form == "intervals":
        if p.dropout_p > 0:
            return ("takes keys in their own order: dropout cannot follow that of a mask",)
        if p.bias_class == "score":
            return (
                "takes keys in their own order: a bias of one value per query and key cannot follow that of a mask",
            )
        return ("in a mask's order of keys, if it has one, copies k and v",)
    form = call_key_form(p, gathers) if p.mask_form == "dense" else None
    if form is None or not form.reorder:
        return ()
    return ("copies k and v in the order of kept keys, so that others cost nothing",)


def is_per_score(bias: Tensor | None, needs_dbias: bool) -> bool:
    """Whether a call has a bias of one value per score, or needs the gradient of one of that shape."""
    if bias is None:
        return False
    return bias_class(bias.shape, bias.stride()) == "score" or (needs_dbias and bias_class(bias.shape) == "score")


def walked_view(
    mask: MaskView, q: Tensor, k: Tensor, bias: Tensor | None, flags: Flags, *, needs_dbias: bool, gathers: bool
) -> MaskView:
    """A mask with one row for all queries in the form that serves the call; any other mask as it is.

    Args:
        mask: of any form.
        q, k, bias, flags: of the call.
        needs_dbias: whether the gradient of the bias is asked for.
        gathers: whether the kernels take a set of keys, which few queries are served by.
    """
    rows = mask.dense
    if mask.form == "keys" and not gathers:
        prefix = mask.tensors[2]
        rows = (prefix[:, :, 1:] > prefix[:, :, :-1])[:, :, None]
    if rows is None or not (rows.shape[2] == 1 or rows.stride()[2] == 0):
        return mask
    from ..masks.prepared.operator import key_form, prepared_view  # importing flash_dmattn does not need it

    scores = is_per_score(bias, needs_dbias) or flags.dropout_p > 0
    mask_heads = 1 if rows.stride()[1] == 0 else rows.shape[1]
    batch, seqlen_q, num_heads = q.shape[:3]
    form = key_form(mask_heads, batch, seqlen_q, num_heads, k.shape[2], bias_is_per_score=scores, gathers=gathers)
    if form.form == "keys":
        return mask
    return prepared_view(rows, q.shape[1], k.shape[1], flags.window, form)


def interval_walk(
    mask: MaskView,
    seqlen_q: int,
    num_heads_k: int,
    bias: Tensor | None,
    *,
    needs_dbias: bool = False,
    has_dropout: bool = False,
) -> IntervalWalk:
    """The tiles of a view of the form "intervals", in its order if k, v and bias can follow it.

    A bias of one value per score cannot, nor can the gradient of one of that shape: what it gains it would lose to the
    copy. Nor can k and v where several heads of a group have masks of their own, nor dropout, which goes by the number
    of a key. Tiles of keys in their own order are then listed anew.

    Args:
        mask: of the form "intervals".
        seqlen_q, num_heads_k: of the call.
        bias: 4-D, or None.
        needs_dbias: whether its gradient is asked for.
        has_dropout: whether probabilities are dropped.
    """
    start, stop, order, bounds, row_lists, col_lists = mask.tensors
    scores = is_per_score(bias, needs_dbias)
    if order.shape[2] == 0:
        return IntervalWalk(bounds, row_lists, col_lists, None, scores)
    if not scores and not has_dropout and order.shape[1] in (1, num_heads_k):
        return IntervalWalk(bounds, row_lists, col_lists, order, scores)
    from ..masks.prepared.interval_operators import run_interval_tiles  # importing flash_dmattn does not need it

    bounds, row_lists, col_lists = run_interval_tiles(start, stop, order[:, :, :0].contiguous(), seqlen_q)
    return IntervalWalk(bounds, row_lists, col_lists, None, scores)
