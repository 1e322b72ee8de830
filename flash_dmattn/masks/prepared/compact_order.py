"""An order of keys with places for live keys alone, which memory and time are then a matter of, not the length."""

from __future__ import annotations

import torch

from .interval_operators import run_interval_tiles
from .packing import TILE, tiles

# Places are whole numbers of this share of the keys, so that calls with such masks are of few classes.
SHARES = 64


def places_for(live: int, seqlen_k: int) -> int:
    """How many places an order has in which so many keys, at most, of each head are live.

    Whole tiles. Where that is more than half of the keys there is a place for each: moving gradients would cost more.

    Example:
        >>> places_for(9000, 2**20), places_for(9000, 16384), places_for(1, 16384), places_for(1, 100)
        (16384, 16384, 256, 100)
    """
    share = TILE * max(1, tiles(seqlen_k) // SHARES)
    places = max(1, -(-live // share)) * share
    return places if 2 * places <= seqlen_k else seqlen_k


def live_keys(start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """How many keys of a head are live, at most: a number that is on the device still."""
    live = (start < stop).sum(2, dtype=torch.int64)
    return live.amax() if live.numel() else live.new_zeros(())


def compact_order(
    start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, seqlen_q: int, places: int
) -> list[torch.Tensor]:
    """The first places of an order, with the bounds and lists of tiles of these: O(Lq * places).

    Args:
        start, stop, order: int32 (Bm, Hm, Lk), of an `IntervalMask`.
        seqlen_q: number of queries.
        places: how many stay, at least as many as there are live keys.

    Returns:
        order, bounds, row_lists, col_lists, as fields of an `IntervalMask` of `places`.
    """
    order = order[:, :, :places].clone(memory_format=torch.contiguous_format)  # the rest is not kept alive
    keys = order.long()
    start, stop = (x.gather(2, keys) for x in (start, stop))
    return [order, *run_interval_tiles(start, stop, order[:, :, :0].contiguous(), seqlen_q)]
