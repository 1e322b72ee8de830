"""One query: the query heads of a group as rows of their key-value head, whose keys are then read once for all."""

from __future__ import annotations

from torch import Tensor


def heads_as_rows(x: Tensor, num_heads: int, num_heads_k: int) -> Tensor:
    """A mask or a bias of one query in that form; with fewer heads than queries have it holds for every row as it is.

    Args:
        x: (B, heads, 1, keys).
        num_heads, num_heads_k: of the call.

    Returns:
        (B, num_heads_k, heads of a group, keys), a view, where x has `num_heads`; else x.

    >>> import torch
    >>> heads_as_rows(torch.arange(4).view(1, 4, 1, 1), 4, 2).squeeze(3)
    tensor([[[0, 1],
             [2, 3]]])
    """
    return x.unflatten(1, (num_heads_k, num_heads // num_heads_k)).squeeze(3) if x.shape[1] == num_heads else x
