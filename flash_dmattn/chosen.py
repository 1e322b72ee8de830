"""`Chosen`: a bias with one value for each entry of the lists of a call; its gradient trains what chose them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .problem import as_scores
from .reference.lists import by_query, dense_bias, repeat_heads, slot_table

if TYPE_CHECKING:
    from .masks import PreparedMask
    from .masks.prepared.storage import ListMask


class Chosen(NamedTuple):
    """A bias with one value for each entry of a mask of lists; pairs that no entry chose have none.

    Equivalent PyTorch, for single keys, and lists that have each key once::

        bias = torch.zeros(B, H, Lq, Lk).scatter(-1, index, values)  # the mask allows only what index has

    With blocks of keys every key of a block gets the value of its entry. Where a list names a key twice, the
    first entry counts, and its value. The gradient of `values` has their shape and dtype; it is 0 for entries that
    count for no query.

    Attributes:
        values: (*batch, H, Lq, K), or (*batch, H, R, K) with one row for each of the R lists of a head; any float
            dtype, any strides. Entries are in the order of the index that made the lists. H is 1, the heads of k or the
            heads of q; batch dims are 1 or full.
        bias: an ordinary bias beside it, a tensor. With blocks of keys it needs to have one value per query.

    Example:
        >>> import torch
        >>> from flash_dmattn import attention, biases
        >>> from flash_dmattn.masks import PreparedMask
        >>> q = k = v = torch.randn(1, 4, 1, 8)
        >>> lists = PreparedMask.from_lists(torch.tensor([[0, -1], [1, 0], [0, 2], [1, 3]]), seqlen_k=4)
        >>> values = torch.zeros(1, 1, 4, 2, requires_grad=True)
        >>> attention(q, k, v, lists, biases.Chosen(values)).sum().backward()
        >>> values.grad.shape
        torch.Size([1, 1, 4, 2])
    """

    values: Tensor
    bias: Tensor | None = None

    def dense(self, mask: PreparedMask) -> Tensor:
        """Make the matrix of these values, for calls that need it: (B, H, Lq, Lk), 0 beside the lists; with a gradient.

        Args:
            mask: of `PreparedMask.from_lists` or `from_topk_lists`.
        """
        lists = lists_beside(mask)
        slots = slot_table(lists.as_lists, lists.seqlen_q, lists.seqlen_k)
        made = dense_bias(as_scores(self.values), slots, lists.block_size[0])
        if self.bias is None:
            return made
        bias = as_scores(self.bias)
        heads = max(made.shape[1], bias.shape[1])
        return repeat_heads(made, heads) + repeat_heads(bias, heads)

    def with_bias(self, mask: Any) -> Tensor:
        """Return the values, with what the ordinary bias adds at each entry.

        Raises:
            TypeError: the mask has no lists, or values or the bias are no tensors.
            ValueError: the bias tells keys of a block apart, or has too many dims.
        """
        lists = lists_beside(mask)
        if not isinstance(self.values, Tensor):
            raise TypeError(
                f"bias.values is a {type(self.values).__name__}; it needs to be a floating-point torch.Tensor"
            )
        if self.values.dim() < 2:
            raise ValueError(
                f"bias.values has shape {tuple(self.values.shape)}; it needs (*batch, heads, rows, entries)"
            )
        if self.bias is None:
            return self.values
        if not isinstance(self.bias, Tensor):
            raise TypeError(f"bias.bias is a {type(self.bias).__name__}; it needs to be a torch.Tensor or None")
        for name, x in (("values", self.values), ("bias", self.bias)):
            if not 2 <= x.dim() <= 4:
                raise ValueError(f"bias.{name} has {x.dim()} dimensions; beside each other both need 2, 3 or 4")
        bias, block_k = as_scores(self.bias), lists.block_size[1]
        if bias.shape[-1] == 1:
            added = bias
        elif block_k > 1:
            raise ValueError(
                f"bias.bias has shape {tuple(self.bias.shape)} beside lists of blocks of {block_k} keys; it needs one "
                "value per query, (..., Lq, 1), or lists of single keys"
            )
        elif bias.shape[-1] != lists.seqlen_k or bias.shape[-2] not in (1, lists.seqlen_q):
            raise ValueError(
                f"bias.bias has shape {tuple(self.bias.shape)}; it needs (..., 1 or {lists.seqlen_q}, 1 or "
                f"{lists.seqlen_k})"
            )
        else:
            added = lists.gather(bias)
        values = as_scores(self.values)
        if added.shape[2] not in (1, values.shape[2]):
            values, added = (by_query(x, lists.seqlen_q, lists.block_size[0]) for x in (values, added))
        heads = max(values.shape[1], added.shape[1])
        return repeat_heads(values, heads) + repeat_heads(added, heads)


def lists_beside(mask: Any) -> ListMask:
    """Return the mask of a call with a `Chosen`.

    Raises:
        TypeError: it has no lists.
    """
    if getattr(mask, "form", None) != "lists":
        has = "None" if mask is None else f"a {type(mask).__name__}"
        raise TypeError(
            f"mask is {has} and bias is a Chosen, of values for entries of lists; mask needs to be a PreparedMask of "
            "from_lists or from_topk_lists"
        )
    lists: ListMask = mask
    return lists
