"""Packed masks that happen to be intervals, recognised: the one step of preparing that waits for the device."""

from __future__ import annotations

import torch

from .compact_order import compact_order, places_for
from .interval_operators import run_interval_tiles, run_key_order, run_mask_intervals
from .interval_order import order_saves


def interval_tensors(
    bits: torch.Tensor, row_lists: torch.Tensor, seqlen_k: int, reorder: bool | None
) -> tuple[torch.Tensor, ...] | None:
    """The tensors of an `IntervalMask` that allows what bits do; None where some key has several runs of queries.

    Values decide, so it waits for the device, once. Then the numbers of pairs and of tiles are known too, and they say
    whether an order of keys pays, and how many places it needs.

    Args:
        bits, row_lists: of a `TileMask`, the band folded in.
        seqlen_k: number of keys.
        reorder: whether keys of similar intervals stand side by side; by default where that pays in a forward pass.
    """
    seqlen_q = bits.size(2)
    start, stop, numbers = run_mask_intervals(bits, row_lists, seqlen_k)
    has_several, live, pairs, active = numbers.tolist()
    if has_several:
        return None
    if reorder is None:
        kept = pairs / max(1, start.size(0) * start.size(1) * seqlen_q)
        reorder = kept > 0 and order_saves(active, pairs, kept, has_backward=False)
    if not reorder:
        order = start.new_empty((*start.shape[:2], 0))
        return start, stop, order, *run_interval_tiles(start, stop, order, seqlen_q)
    order, places = run_key_order(start, stop, seqlen_q), places_for(live, seqlen_k)
    if places < seqlen_k:
        return start, stop, *compact_order(start, stop, order, seqlen_q, places)
    return start, stop, order, *run_interval_tiles(start, stop, order, seqlen_q)
