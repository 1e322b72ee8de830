"""Copies k, v and bias into the order of keys of an interval mask, and gradients back, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import AttentionProblem, MaskView
from ...problem.inputs import Inputs
from ...reference import formula
from ...reference.lists import repeat_heads
from ..mask_choice import follows_order, interval_walk


def has_order(p: AttentionProblem, mask: MaskView) -> bool:
    """Return whether a call uses its keys in the order of its interval mask, if that has one."""
    return mask.tensors[2].shape[2] > 0 and follows_order(p, mask)


def tiles_of_bounds(p: AttentionProblem, mask: MaskView, in_order: bool = True) -> MaskView:
    """Convert an interval mask for the kernels: bounds instead of bits, an int64 for each key, start in the low half.

    Without `in_order` keys are not moved, whatever the order of the mask.
    """
    walk = interval_walk(p, in_order)(mask)
    classes = walk.row_lists
    if _reads_classes(p):
        from ...masks.prepared.intervals import interval_classes  # importing flash_dmattn does not need it

        classes = interval_classes(walk.bounds, p.seqlen_q)
    return MaskView("tiles", (walk.bounds.view(torch.int64).squeeze(-1), classes, walk.row_lists, walk.col_lists))


def ascending(mask: MaskView) -> MaskView:
    """Merge the full and the partial tiles of each list in one ascending list of partial tiles; empty ones stay last.

    The order of a row's blocks then depends on no other row.
    """
    bits, classes, *lists = mask.tensors
    return mask._replace(tensors=(bits, classes, *(_ascending(each) for each in lists)))


def _ascending(lists: Tensor) -> Tensor:
    count, tiles = lists[..., :2].sum(-1, keepdim=True, dtype=lists.dtype), lists[..., 2:]
    number = tiles.shape[-1]
    is_empty = torch.arange(number, device=lists.device) >= count
    tiles = torch.where(is_empty, tiles + number, tiles).sort(-1).values
    return torch.cat([torch.zeros_like(count), count, torch.where(is_empty, tiles - number, tiles)], -1)


def _reads_classes(p: AttentionProblem) -> bool:
    # The gradients of a shared bias, of a bias by distance and of head dims above 256 need classes, which the mask does
    # not have.
    is_shared = p.dbias_class == "score" or (p.relative is not None and p.needs_grad.bias)
    return is_shared or (any(p.needs_grad) and max(p.head_dim, p.head_dim_v) > 256)


class Ordered:
    """A call whose k, v and bias are in the order of keys of its interval mask; so are their gradients.

    Attributes:
        inputs: the tensors of the kernels. The mask has the form "tiles". A reordered bias is fp32, so that its
            gradient is rounded once. If both the bias and the mask have several entries, it has an entry for each of
            the batch.
        flags: the flags for these tensors.
    """

    def __init__(self, p: AttentionProblem, x: Inputs) -> None:
        _, k, v, mask, bias, *_ = x
        flags, (_, _, mask_order, bounds, _, _) = p.flags, mask.tensors
        self.flags = flags
        self._own_bias, self._bias_repeat, self._seqlen_k = bias, flags.bias_repeat, p.seqlen_k
        self._bias_order: Tensor | None = None
        batch, seqlen_k, heads, _ = k.shape
        # k and v have an entry for each of the batch, so the order needs one, too.
        orders = formula.spread_entries(mask_order.long(), batch, flags.mask_repeat)
        places = orders.shape[2]  # all keys, or live ones
        order = orders.expand(batch, heads, places).transpose(1, 2)
        pairs = torch.arange(batch * heads, device=k.device).view(batch, 1, heads)
        self._rows = (pairs // heads * seqlen_k + order) * heads + pairs % heads
        start, stop = bounds[:, :, :places].unbind(-1)
        # Dead keys become zeros. They are in tiles of live keys, and p = 0 times NaN in a dead key would be NaN.
        dead = (
            formula.spread_entries(start >= stop, batch, flags.mask_repeat)
            .expand(batch, heads, places)
            .transpose(1, 2)[..., None]
        )
        k, v = (t.reshape(-1, t.shape[3])[self._rows].masked_fill_(dead, 0) for t in (k, v))
        # A bias that is expanded over keys has one value, but may need a gradient for each key.
        if bias is not None and "key" in (p.bias_class, p.dbias_class):
            if orders.shape[0] > 1 and bias.shape[0] not in (1, batch):
                bias = formula.spread_entries(bias, batch, flags.bias_repeat)
                self.flags = flags._replace(bias_repeat=1)
            own_order = repeat_heads(orders, p.num_heads) if bias.shape[1] == p.num_heads else orders
            shape = torch.broadcast_shapes(bias.shape[:2], own_order.shape[:2])  # the larger batch and heads of both
            self._bias_order = own_order.expand(*shape, -1)
            values = bias[:, :, :1].float().expand(*self._bias_order.shape[:2], 1, seqlen_k)
            bias = values.gather(3, self._bias_order[:, :, None])
        elif bias is not None and bias.shape[3] > places:
            bias = bias[..., :places]  # one value for all keys
        self.inputs = x._replace(k=k, v=v, mask=tiles_of_bounds(p, mask), bias=bias)

    def by_key(self, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of k or v, moved back to the keys."""
        if gradient is None:
            return gradient
        batch, places, heads, head_dim = gradient.shape
        rows = gradient.reshape(-1, head_dim)
        allocate = rows.new_empty if places == self._seqlen_k else rows.new_zeros
        result = allocate((batch * self._seqlen_k * heads, head_dim)).index_copy_(0, self._rows.flatten(), rows)
        return result.view(batch, self._seqlen_k, heads, head_dim)

    def bias_by_key(self, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the bias, moved back to the keys, in the shape and dtype of the bias of the call."""
        own = self._own_bias
        if gradient is None or own is None or self._bias_order is None:
            return gradient
        allocate = gradient.new_empty if gradient.shape[3] == self._seqlen_k else gradient.new_zeros
        ordered = allocate((*gradient.shape[:3], self._seqlen_k))
        ordered.scatter_(3, self._bias_order[:, :, None], gradient)
        if ordered.shape[0] != own.shape[0] != 1:
            ordered = formula.sum_entries(ordered, own.shape[0], self._bias_repeat)
        return ordered.sum_to_size(own.shape).to(own.dtype)
