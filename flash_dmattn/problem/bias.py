"""What a bias has one value for: it decides how kernels read the bias, and how they make its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

# One value per query, per key, or per score (query and key); a bias of one value per head counts as one per query.
BiasClass = Literal["query", "key", "score"]


def bias_class(shape: Sequence[int], strides: Sequence[int] | None = None) -> BiasClass:
    """The class of a bias (batch, heads, seqlen_q, seqlen_k).

    Args:
        shape: of the bias.
        strides: of the bias, where it is read: a dim of stride 0 holds one value. Its gradient has the whole shape,
            so its class takes no strides.

    >>> bias_class((1, 4, 1, 128)), bias_class((1, 4, 64, 128), (0, 8192, 128, 1)), bias_class((1, 4, 64, 1))
    ('key', 'score', 'query')
    """
    if shape[3] == 1 or (strides is not None and strides[3] == 0):
        return "query"
    if shape[2] == 1 or (strides is not None and strides[2] == 0):
        return "key"
    return "score"
