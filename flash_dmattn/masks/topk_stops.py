"""Where causal top-k lets go of each key: with one score per key, what it keeps of a key is one interval of rows."""

from __future__ import annotations

import torch

from .topk import kth_smallest_of_prefixes, ranks


def topk_stops(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The first position whose prefix has k keys that are better than a given one, for every key.

    Key j is among the k best of the prefix that ends at p, itself included, exactly for `j <= p < stop[j]`: a key that
    k better ones have met never comes back. Equal keys are ranked as `topk_mask` ranks them, the earliest first.

    The k-th best rank of a prefix only falls as the prefix grows. So all of these thresholds are found together, as for
    `topk_mask`, and the place where they pass a key's own rank is a binary search: O(L log L) in time, O(L) in memory.

    Args:
        keys: integers (N, L) in the order of the scores, as `sort_keys` makes them.
        k: how many are kept, from 1.

    Returns:
        int64 (N, L), from j to L; L where a key stays to the end, j where it is never kept.

    Equivalent, for a row without ties::

        better = keys[None, :] > keys[:, None]
        met = better.cumsum(1) >= k
        stop = where(met.any(1), met.int().argmax(1), L).maximum(arange(L))

    Example:
        >>> topk_stops(torch.tensor([[3, 1, 2, 2]]), 2).tolist()
        [[4, 2, 4, 3]]
    """
    rows, length = keys.shape
    rank = ranks(keys)
    positions = torch.arange(length, device=keys.device).expand(rows, -1)
    threshold = kth_smallest_of_prefixes(rank, positions + 1, k)
    # A prefix of fewer than k keys keeps them all; it has the greatest rank for its threshold otherwise, which rises.
    threshold = threshold.masked_fill(positions + 1 < k, length)
    # The first position with a threshold below the rank, where both are negated so that the row ascends.
    passed = torch.searchsorted(threshold.neg(), rank.neg(), right=True)
    return passed.maximum(positions).contiguous()


def topk_intervals(keys: torch.Tensor, k: int, seqlen_q: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of queries that keep each key, by causal top-k.

    Args:
        keys: integers (B, H, Lk) as `sort_keys` makes them: the lowest is that of a key that is not allowed.
        k: how many are kept, from 1.
        seqlen_q: number of queries; the last one stands at the last key.
        local: a query also sees so many of the last keys up to its own.

    Returns:
        (start, stop) int32 (B, H, Lk), contiguous, from 0 to `seqlen_q`; both 0 for a key that nobody keeps.

    Example:
        >>> topk_intervals(torch.tensor([[[3, 1, 2, 2]]]), 2, 3, 0)
        (tensor([[[0, 0, 1, 0]]], dtype=torch.int32), tensor([[[3, 1, 3, 0]]], dtype=torch.int32))
    """
    seqlen_k = keys.size(2)
    position = torch.arange(seqlen_k, device=keys.device)
    stop = topk_stops(keys.flatten(0, 1), k).view(keys.shape).maximum(position + min(local, seqlen_k))
    start, stop = ((x + (seqlen_q - seqlen_k)).clamp(0, seqlen_q) for x in (position, stop))
    dead = (keys == torch.iinfo(keys.dtype).min) | (start >= stop)
    start, stop = (x.masked_fill(dead, 0).to(torch.int32).contiguous() for x in (start.expand(keys.shape), stop))
    return start, stop
