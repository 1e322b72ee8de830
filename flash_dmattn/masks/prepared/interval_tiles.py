"""What kernels walk of an interval mask: its bounds by place, and lists of 128 x 128 tiles, in plain PyTorch."""

from __future__ import annotations

import torch

from ..pad import pad
from .packing import TILE, tiles

# bounds, row_lists, col_lists (see `IntervalMask`).
IntervalTiles = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_place(of_key: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """What belongs to keys (Bm, Hm, Lk), at the places of an order; itself where the order is empty."""
    return of_key.gather(2, order.long()) if order.size(2) else of_key


def interval_bounds(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The interval at each place: int32 (Bm, Hm, 128 * Tk, 2), (0, 0) for places past the last key."""
    bounds = torch.stack([by_place(x, order) for x in (start, stop)], dim=-1)
    return pad(bounds, (0, 0, 0, -bounds.size(2) % TILE)).contiguous()


def interval_classes(bounds: torch.Tensor, seqlen_q: int) -> torch.Tensor:
    """The class of every tile of places: uint8 (Bm, Hm, Tq, Tk), as `packing.classify` has it."""
    tiles_q = tiles(seqlen_q)
    start, stop = bounds.unflatten(2, (-1, TILE)).unbind(-1)
    first_row = torch.arange(tiles_q, dtype=torch.int32, device=bounds.device) * TILE
    last_row = (first_row + TILE).clamp(max=seqlen_q)
    active = covering(start // TILE, (stop + (TILE - 1)) // TILE, tiles_q) > 0
    full = (start.amax(-1, keepdim=True) <= first_row) & (last_row <= stop.amin(-1, keepdim=True))
    return (active.to(torch.uint8) + full).transpose(-1, -2).contiguous()


def covering(start: torch.Tensor, stop: torch.Tensor, length: int) -> torch.Tensor:
    """How many of the intervals [start, stop) of the last dim have each of the positions below `length`."""
    shape = (*start.shape[:-1], length)
    positions = torch.arange(length, dtype=start.dtype, device=start.device).expand(shape).contiguous()
    begun, ended = (torch.searchsorted(x.sort(dim=-1).values, positions, right=True) for x in (start, stop))
    return begun - ended
