"""Interval masks in plain PyTorch: the queries of each key, an order of keys, and the tiles that kernels walk.

The oracle of `triton_kernels/key_pack.py` and `interval_pack.py`, whose functions have these names and these results,
bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...problem import Band, allowed_pairs, hint
from ..arguments import pad
from . import packing
from .packing import TILE, tiles

# start, stop, order (see `IntervalMask`).
KeyIntervals = tuple[Tensor, Tensor, Tensor]
# start, stop, and 4 numbers, int64 (see `mask_intervals`).
MaskIntervals = tuple[Tensor, Tensor, Tensor]
# bounds, row_lists, col_lists (see `IntervalMask`).
IntervalTiles = tuple[Tensor, Tensor, Tensor]

# Bits of the Hilbert curve along each axis; a code is this pair of numbers, one bit for dead, then the head.
BITS = 8
_DEAD = 1 << 2 * BITS
MOST_HEADS_OF_CODES = (2**31 - 1) // (2 * _DEAD)  # whose codes fit 32 bits

# For `order_saves`, on an H200 (132 SMs) in bf16 at head dim 128: the time that a tile of 128 x 128 takes an SM in each
# pass, and the time that an order of keys takes a call.
_SMS = 132
_FORWARD_US, _BACKWARD_US = 2.0, 5.5
_ORDER_US = 80.0

# Places are whole numbers of this share of the keys, so that calls with such masks are of few classes.
SHARES = 64


def key_intervals(mask: Tensor, seqlen_q: int, band: Band | None, reorder: bool) -> KeyIntervals:
    """Return start, stop and order of a bool mask (Bm, Hm, 1, Lk): a kept key is seen by all queries of the band.

    The order has live keys first, each part ascending; without `reorder` it has no places. All are contiguous.
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


def mask_intervals(bits: Tensor, row_lists: Tensor, seqlen_k: int) -> MaskIntervals:
    """Return from the bits of a `TileMask` the first query of each key, the one after the last, and numbers.

    A key is seen by one run of queries if and only if as many see it as there are from the first to the last. The
    numbers, 4 of int64, are: 1 if some key is seen by several runs; the most live keys of a head; the pairs that
    attend; the active tiles. If the first is 1, a kernel may leave anything in the rest.
    """
    batch, num_heads, seqlen_q, _ = bits.shape
    start, stop, count = torch.zeros(3, batch, num_heads, seqlen_k, dtype=torch.int64, device=bits.device)
    step = max(1, packing.CHUNK_ELEMENTS // max(1, batch * num_heads * seqlen_k))
    for begin in range(0, seqlen_q, step):
        flags = packing.unpack_words(bits[:, :, begin : begin + step], seqlen_k).to(torch.uint8)
        seen = flags.amax(2).bool()
        first, last = flags.argmax(2), flags.size(2) - 1 - flags.flip(2).argmax(2)  # argmax finds the first of a tie
        start = torch.where(seen & (count == 0), begin + first, start)
        stop = torch.where(seen, begin + last + 1, stop)
        count += flags.sum(2, dtype=torch.int64)
    has_several = (count != stop - start).any()
    pairs, active = (x.sum(dtype=torch.int64) for x in (stop - start, row_lists[..., :2]))
    numbers = torch.stack([has_several.long(), live_keys(start, stop), pairs, active])
    return start.to(torch.int32).contiguous(), stop.to(torch.int32).contiguous(), numbers


def interval_bounds(start: Tensor, stop: Tensor, order: Tensor) -> Tensor:
    """Return the interval at each place: int32 (Bm, Hm, 128 * Tk, 2), (0, 0) for places past the last key."""
    if order.size(2):
        start, stop = (x.gather(2, order.long()) for x in (start, stop))
    bounds = torch.stack([start, stop], dim=-1)
    return pad(bounds, (0, 0, 0, -bounds.size(2) % TILE)).contiguous()


def interval_classes(bounds: Tensor, seqlen_q: int) -> Tensor:
    """Return the class of every tile of places: uint8 (Bm, Hm, Tq, Tk), as `packing.classify` has it."""
    tiles_q = tiles(seqlen_q)
    start, stop = bounds.unflatten(2, (-1, TILE)).unbind(-1)
    first_row = torch.arange(tiles_q, dtype=torch.int32, device=bounds.device) * TILE
    last_row = (first_row + TILE).clamp(max=seqlen_q)
    active = covering(start // TILE, (stop + (TILE - 1)) // TILE, tiles_q) > 0
    full = (start.amax(-1, keepdim=True) <= first_row) & (last_row <= stop.amin(-1, keepdim=True))
    return (active.to(torch.uint8) + full).transpose(-1, -2).contiguous()


def covering(start: Tensor, stop: Tensor, length: int) -> Tensor:
    """Count the intervals [start, stop) of the last dim that have each of the positions below `length`."""
    shape = (*start.shape[:-1], length)
    positions = torch.arange(length, dtype=start.dtype, device=start.device).expand(shape).contiguous()
    begun, ended = (torch.searchsorted(x.sort(dim=-1).values, positions, right=True) for x in (start, stop))
    return begun - ended


def hilbert_codes(x: Tensor, y: Tensor, bits: int) -> Tensor:
    """Return how far along a Hilbert curve of 2 ** bits x 2 ** bits points (x, y) is: near numbers are near points.

    Source: Warren, "Hacker's Delight", 2nd edition, 2013, chapter 16.
    """
    code = torch.zeros_like(x)
    for bit in reversed(range(bits)):
        right, upper = (x >> bit) & 1, (y >> bit) & 1
        code = (code << 2) | ((3 * right) ^ upper)
        # In both lower quarters the curve is mirrored along a diagonal; on the right along the other one.
        flip = (right & (1 - upper)) * ((1 << bit) - 1)
        x, y = x ^ flip, y ^ flip
        x, y = torch.where(upper == 0, y, x), torch.where(upper == 0, x, y)
    return code


def key_order(start: Tensor, stop: Tensor, seqlen_q: int) -> Tensor:
    """Order keys (Bm, Hm, Lk) so that neighbours have similar intervals: live ones by Hilbert code, then the dead.

    An interval is a point (start, stop), in 8 bits an axis. Keys of one code, and dead keys, stay in their order.
    """
    heads, seqlen_k = start.size(0) * start.size(1), start.size(2)
    # In 64 bits, because positions may take 31. Codes take fewer, so that one sort of all heads takes half the time.
    x, y = (position.long() * (1 << BITS) // (seqlen_q + 1) for position in (start, stop))
    code = torch.where(start < stop, hilbert_codes(x, y, BITS), _DEAD)
    head = torch.arange(heads, device=start.device)[:, None]
    code = code.reshape(heads, seqlen_k) + head * (2 * _DEAD)
    code = code.to(torch.int32 if heads <= MOST_HEADS_OF_CODES else torch.int64)
    place = code.flatten().sort(stable=True).indices.view(heads, seqlen_k)
    return (place - head * seqlen_k).to(torch.int32).view(start.shape)


def live_keys(start: Tensor, stop: Tensor) -> Tensor:
    """Count the live keys of the head that has most: a number that is on the device still."""
    live = (start < stop).sum(2, dtype=torch.int64)
    return live.amax() if live.numel() else live.new_zeros(())


def first_places(start: Tensor, stop: Tensor, order: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the first places of an order; return it with the start and stop of the keys there, as copies."""
    order = order[:, :, :places].clone(memory_format=torch.contiguous_format)
    keys = order.long()
    return order, start.gather(2, keys), stop.gather(2, keys)


def places_for(live: int, seqlen_k: int) -> int:
    """Choose how many places an order has, in whole tiles, if a head has at most so many live keys.

    If these are more than half of the keys, each key has a place: moving gradients would cost more.
    """
    share = TILE * max(1, tiles(seqlen_k) // SHARES)
    places = max(1, -(-live // share)) * share
    return places if 2 * places <= seqlen_k else seqlen_k


def reorder_pays(
    heads: int, seqlen_q: int, seqlen_k: int, keys_kept: int, *, is_causal: bool, has_backward: bool
) -> bool:
    """Estimate only by sizes whether top-k attention gains more from keys in order than the order costs.

    `heads` are batch entries times heads; a query keeps at most `keys_kept` keys. The rule is fitted to simulations
    with independent scores, and to times on an H200: docs/mask_storage.md has the formula, docs/notes/intervals.md the
    figures.
    """
    heads, seqlen_q, seqlen_k = hint(heads), hint(seqlen_q), hint(seqlen_k)
    kept = min(hint(keys_kept), seqlen_k)
    if kept == 0 or seqlen_q == 0:
        return False
    tiles_q, tiles_k = tiles(seqlen_q), tiles(seqlen_k)
    if is_causal:
        shorter = min(tiles_q, tiles_k)
        natural = shorter * tiles_k - shorter * shorter / 2
        pairs = allowed_pairs(seqlen_q, seqlen_k, (kept - 1, 0))  # as many keys of each prefix as a window has
    else:
        natural, pairs = float(tiles_q * tiles_k), seqlen_q * kept
    # A comparison of symbols, which remain where torch gives no hints, is a symbol too, and so is its bool(): a branch
    # makes it a condition of the graph.
    if order_saves(heads * natural, heads * pairs, kept, has_backward=has_backward):  # noqa: SIM103
        return True
    return False


def order_saves(natural: float, pairs: float, kept: float, *, has_backward: bool) -> bool:
    """Return whether an order saves a call more time than it costs.

    `natural` counts active tiles of all heads, keys being in natural order; `pairs` what it keeps, over all heads;
    `kept` the keys that a query keeps.
    """
    saved = natural - (1 + 15 / math.sqrt(kept)) * pairs / (TILE * TILE)
    return saved * (_FORWARD_US + has_backward * _BACKWARD_US) / _SMS > _ORDER_US
