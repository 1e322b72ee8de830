"""Interval masks in plain PyTorch: the queries of each key, an order of keys, and the tiles that kernels walk.

`triton_kernels/key_pack.py` and `interval_pack.py` have functions of the same names with the same results, bit for bit;
tests compare them.
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
# start, stop, and 4 counts, int64 (see `mask_intervals`).
MaskIntervals = tuple[Tensor, Tensor, Tensor]
# bounds, row_lists, col_lists (see `IntervalMask`).
IntervalTiles = tuple[Tensor, Tensor, Tensor]

# Bits of the Hilbert curve along each axis. From the lowest bits up, a code has the position on the curve, one bit for
# hidden keys, and the head.
BITS = 8
_DEAD = 1 << 2 * BITS
MOST_HEADS_OF_CODES = (2**31 - 1) // (2 * _DEAD)  # with more heads codes need 64 bits

# For `order_saves`, measured on an H200 (132 SMs) in bf16 at head dim 128. The time of an SM for a tile of 128 x 128 in
# each pass, and the time that an order of keys adds to a call.
_SMS = 132
_FORWARD_US, _BACKWARD_US = 2.0, 5.5
_ORDER_US = 80.0

# The length of an order is rounded up to a number of tiles, about Lk / 64 keys, to limit the number of plans.
SHARES = 64


def key_intervals(mask: Tensor, seqlen_q: int, band: Band | None, reorder: bool) -> KeyIntervals:
    """Return start, stop and order of a bool mask (Bm, Hm, 1, Lk): a kept key is visible to all queries of the band.

    A key is live if it is visible to some query. The order has the live keys first, then the rest, both ascending;
    without `reorder` its last size is 0. All are contiguous.
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
    """Return from the bits of a `TileMask` the first query of each key, the one after the last, and 4 counts.

    The queries of a key are consecutive if and only if their number is last - first + 1. The counts, int64, are: 1 if
    the queries of some key are not consecutive; the largest number of live keys of a head; the visible pairs; the
    active tiles. If the first is 1, the other results are undefined.
    """
    batch, num_heads, seqlen_q, _ = bits.shape
    start, stop, count = torch.zeros(3, batch, num_heads, seqlen_k, dtype=torch.int64, device=bits.device)
    step = max(1, packing.CHUNK_ELEMENTS // max(1, batch * num_heads * seqlen_k))
    for begin in range(0, seqlen_q, step):
        flags = packing.unpack_words(bits[:, :, begin : begin + step], seqlen_k).to(torch.uint8)
        seen = flags.amax(2).bool()
        first, last = flags.argmax(2), flags.size(2) - 1 - flags.flip(2).argmax(2)  # argmax returns the first maximum
        start = torch.where(seen & (count == 0), begin + first, start)
        stop = torch.where(seen, begin + last + 1, stop)
        count += flags.sum(2, dtype=torch.int64)
    has_several = (count != stop - start).any()
    pairs, active = (x.sum(dtype=torch.int64) for x in (stop - start, row_lists[..., :2]))
    numbers = torch.stack([has_several.long(), live_keys(start, stop), pairs, active])
    return start.to(torch.int32).contiguous(), stop.to(torch.int32).contiguous(), numbers


def interval_bounds(start: Tensor, stop: Tensor, order: Tensor) -> Tensor:
    """Return the intervals of the keys in order: int32 (Bm, Hm, 128 * Tk, 2), (0, 0) after the last key."""
    if order.size(2):
        start, stop = (x.gather(2, order.long()) for x in (start, stop))
    bounds = torch.stack([start, stop], dim=-1)
    return pad(bounds, (0, 0, 0, -bounds.size(2) % TILE)).contiguous()


def interval_classes(bounds: Tensor, seqlen_q: int) -> Tensor:
    """Return the class of every tile of keys in order, as `packing.classify` does: uint8 (Bm, Hm, Tq, Tk)."""
    tiles_q = tiles(seqlen_q)
    start, stop = bounds.unflatten(2, (-1, TILE)).unbind(-1)
    first_row = torch.arange(tiles_q, dtype=torch.int32, device=bounds.device) * TILE
    last_row = (first_row + TILE).clamp(max=seqlen_q)
    active = covering(start // TILE, (stop + (TILE - 1)) // TILE, tiles_q) > 0
    full = (start.amax(-1, keepdim=True) <= first_row) & (last_row <= stop.amin(-1, keepdim=True))
    return (active.to(torch.uint8) + full).transpose(-1, -2).contiguous()


def covering(start: Tensor, stop: Tensor, length: int) -> Tensor:
    """Count for each position below `length` the intervals [start, stop) of the last dim that contain it."""
    shape = (*start.shape[:-1], length)
    positions = torch.arange(length, dtype=start.dtype, device=start.device).expand(shape).contiguous()
    begun, ended = (torch.searchsorted(x.sort(dim=-1).values, positions, right=True) for x in (start, stop))
    return begun - ended


def hilbert_codes(x: Tensor, y: Tensor, bits: int) -> Tensor:
    """Return the index of the point (x, y) on a Hilbert curve of 2 ** bits x 2 ** bits points.

    Points with similar indices are near one another.

    Source: Warren, "Hacker's Delight", 2nd edition, 2013, chapter 16.
    """
    code = torch.zeros_like(x)
    for bit in reversed(range(bits)):
        right, upper = (x >> bit) & 1, (y >> bit) & 1
        code = (code << 2) | ((3 * right) ^ upper)
        # In both lower quarters the curve is mirrored: in the left one along one diagonal, in the right one along the
        # other.
        flip = (right & (1 - upper)) * ((1 << bit) - 1)
        x, y = x ^ flip, y ^ flip
        x, y = torch.where(upper == 0, y, x), torch.where(upper == 0, x, y)
    return code


def key_order(start: Tensor, stop: Tensor, seqlen_q: int) -> Tensor:
    """Order keys (Bm, Hm, Lk) so that neighbours have similar intervals: live keys by Hilbert code, then hidden ones.

    An interval is a point (start, stop), in 8 bits for each axis. Keys of equal code, and hidden keys, stay in their
    order.
    """
    heads, seqlen_k = start.size(0) * start.size(1), start.size(2)
    # Scaled in int64, because positions may have 31 bits. Codes are int32 if possible: that sort takes half the time.
    x, y = (position.long() * (1 << BITS) // (seqlen_q + 1) for position in (start, stop))
    code = torch.where(start < stop, hilbert_codes(x, y, BITS), _DEAD)
    head = torch.arange(heads, device=start.device)[:, None]
    code = code.reshape(heads, seqlen_k) + head * (2 * _DEAD)
    code = code.to(torch.int32 if heads <= MOST_HEADS_OF_CODES else torch.int64)
    place = code.flatten().sort(stable=True).indices.view(heads, seqlen_k)
    return (place - head * seqlen_k).to(torch.int32).view(start.shape)


def live_keys(start: Tensor, stop: Tensor) -> Tensor:
    """Return the largest number of live keys of a head, as a tensor: it does not wait for the device."""
    live = (start < stop).sum(2, dtype=torch.int64)
    return live.amax() if live.numel() else live.new_zeros(())


def first_places(start: Tensor, stop: Tensor, order: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the first `places` keys of an order; return it, and the start and stop of these keys, as copies."""
    order = order[:, :, :places].clone(memory_format=torch.contiguous_format)
    keys = order.long()
    return order, start.gather(2, keys), stop.gather(2, keys)


def places_for(live: int, seqlen_k: int) -> int:
    """Choose the length of an order, in whole tiles, if heads have at most `live` live keys.

    If these are more than half of the keys, the order has all keys: moving gradients would cost more than it saves.
    """
    share = TILE * max(1, tiles(seqlen_k) // SHARES)
    places = max(1, -(-live // share)) * share
    return places if 2 * places <= seqlen_k else seqlen_k


def reorder_pays(
    heads: int, seqlen_q: int, seqlen_k: int, keys_kept: int, *, is_causal: bool, has_backward: bool
) -> bool:
    """Estimate from sizes whether an order of keys saves top-k attention more time than it costs.

    `heads` is batch entries times heads; a query keeps at most `keys_kept` keys. The rule is fitted to simulations
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
        pairs = allowed_pairs(seqlen_q, seqlen_k, (kept - 1, 0))  # a causal window has the same number of pairs
    else:
        natural, pairs = float(tiles_q * tiles_k), seqlen_q * kept
    # Without hints sizes are symbols, and so is their comparison, even as bool(): only a branch makes it a condition of
    # the graph.
    if order_saves(heads * natural, heads * pairs, kept, has_backward=has_backward):  # noqa: SIM103
        return True
    return False


def order_saves(natural: float, pairs: float, kept: float, *, has_backward: bool) -> bool:
    """Return whether an order of keys saves a call more time than it costs.

    `natural` is the number of active tiles of all heads without an order, `pairs` the number of visible pairs of all
    heads, `kept` the number of keys that a query keeps.
    """
    saved = natural - (1 + 15 / math.sqrt(kept)) * pairs / (TILE * TILE)
    return saved * (_FORWARD_US + has_backward * _BACKWARD_US) / _SMS > _ORDER_US
