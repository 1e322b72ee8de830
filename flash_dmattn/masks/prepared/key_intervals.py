"""A mask of one row for all queries as intervals, in plain PyTorch; the oracle of the kernel."""

from __future__ import annotations

import torch

from ...problem import Band

# start, stop, order (see `IntervalMask`).
KeyIntervals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def key_intervals(mask: torch.Tensor, seqlen_q: int, band: Band | None, reorder: bool) -> KeyIntervals:
    """The queries that see each key of a mask of one row: all that the band leaves where it is kept, else none.

    Args:
        mask: bool (Bm, Hm, 1, Lk), any strides.
        seqlen_q: number of queries.
        band: what is folded in.
        reorder: whether the order has live keys first, each part ascending; else it has no places.

    Returns:
        start and stop int32 (Bm, Hm, Lk), order int32 (Bm, Hm, Lk or 0), contiguous.

    Example:
        >>> start, stop, order = key_intervals(torch.tensor([[[[True, False, True]]]]), 3, Band(-3, 0), True)
        >>> start.tolist(), stop.tolist(), order.tolist()
        ([[[0, 0, 2]]], [[[3, 0, 3]]], [[[0, 2, 1]]])
    """
    kept = mask[:, :, 0]
    low, high = band or (-seqlen_q, kept.size(-1))
    keys = torch.arange(kept.size(-1), dtype=torch.int32, device=mask.device)
    begins, ends = (keys - high).clamp(min=0), (keys - low + 1).clamp(max=seqlen_q)
    live = kept & (begins < ends)
    start, stop = ((x * live).to(torch.int32).contiguous() for x in (begins, ends))
    if not reorder:
        return start, stop, start.new_empty((*start.shape[:2], 0))
    order = (~live).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
    return start, stop, order.contiguous()
