"""The order of keys that makes tiles of an interval mask dense, and where it pays to have one."""

from __future__ import annotations

import math

import torch

from ...problem import allowed_pairs, hint
from .packing import TILE, tiles

# Bits of the Hilbert curve along each axis; a code is this pair of numbers, one bit that says dead, then the head.
BITS = 8
_DEAD = 1 << 2 * BITS
MOST_HEADS_OF_CODES = (2**31 - 1) // (2 * _DEAD)  # whose codes fit 32 bits

# What `reorder_pays` counts with. Measured on an H200 (132 SMs) in bf16 at head dim 128: what a tile of 128 x 128 costs
# an SM, and what making an order and walking keys in it costs a call.
_SMS = 132
_FORWARD_US, _BACKWARD_US = 2.0, 5.5
_ORDER_US = 80.0


def hilbert_codes(x: torch.Tensor, y: torch.Tensor, bits: int) -> torch.Tensor:
    """The distance along a Hilbert curve at which it meets (x, y): points that are near on the curve are near.

    Args:
        x, y: integers of one shape, from 0 to 2 ** bits - 1.
        bits: of the curve, along each axis.

    Returns:
        Integers of that shape, from 0 to 4 ** bits - 1; each is the code of one point.

    Source: Warren, "Hacker's Delight", 2nd edition, 2013, chapter 16.

    Example:
        >>> hilbert_codes(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0]), 1).tolist()
        [0, 1, 2, 3]
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


def key_order(start: torch.Tensor, stop: torch.Tensor, seqlen_q: int) -> torch.Tensor:
    """The order of keys in which neighbours have similar intervals: live ones by Hilbert code, then the dead.

    An interval is a point (start, stop), cut to 8 bits an axis. Keys of one code, and dead keys, stay in their order.
    One stable sort serves all heads. Nothing waits for the device.

    Args:
        start, stop: integers (Bm, Hm, Lk), the rows [start, stop) of each key, from 0 to `seqlen_q`; a key with
            `start >= stop` is dead.
        seqlen_q: number of queries.

    Returns:
        int32 (Bm, Hm, Lk), contiguous: the key at each place.

    Example:
        >>> key_order(torch.tensor([[[2, 0, 3, 0]]]), torch.tensor([[[4, 0, 4, 4]]]), 4).tolist()
        [[[3, 0, 2, 1]]]
    """
    heads, seqlen_k = start.size(0) * start.size(1), start.size(2)
    # In 64 bits, because positions may take 31; codes take fewer, and a sort half the time for it.
    x, y = (position.long() * (1 << BITS) // (seqlen_q + 1) for position in (start, stop))
    code = torch.where(start < stop, hilbert_codes(x, y, BITS), _DEAD)
    of_head = torch.arange(heads, device=start.device)[:, None]
    code = code.reshape(heads, seqlen_k) + of_head * (2 * _DEAD)
    code = code.to(torch.int32 if heads <= MOST_HEADS_OF_CODES else torch.int64)
    place = code.flatten().sort(stable=True).indices.view(heads, seqlen_k)
    return (place - of_head * seqlen_k).to(torch.int32).view(start.shape)


def live_keys(start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """How many keys of a head are live, at most: a number that is on the device still."""
    live = (start < stop).sum(2, dtype=torch.int64)
    return live.amax() if live.numel() else live.new_zeros(())


def first_places(
    start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first places of an order, and the intervals of the keys that stand there.

    Args:
        start, stop, order: int32 (Bm, Hm, Lk), contiguous, of an `IntervalMask`.
        places: how many, up to Lk.

    Returns:
        order, start and stop int32 (Bm, Hm, places), contiguous, with memory of their own.

    Example:
        >>> start, stop, order = torch.tensor([[[[2, 0, 3]]], [[[4, 0, 4]]], [[[0, 2, 1]]]], dtype=torch.int32)
        >>> [x.tolist() for x in first_places(start, stop, order, 2)]
        [[[[0, 2]]], [[[2, 3]]], [[[4, 4]]]]
    """
    order = order[:, :, :places].clone(memory_format=torch.contiguous_format)
    keys = order.long()
    return order, start.gather(2, keys), stop.gather(2, keys)


def reorder_pays(
    heads: int, seqlen_q: int, seqlen_k: int, keys_kept: int, *, is_causal: bool, has_backward: bool
) -> bool:
    """Whether top-k attention is expected to gain more from keys in order than the order costs, by sizes alone.

    In natural order scattered keys leave a kernel every tile that causality does. In order it visits about
    `1 + 15 / sqrt(W)` times the tiles that the kept pairs would fill, W being the number of keys that a query keeps::

        tiles = min(Tq, Tk) * Tk - min(Tq, Tk) ** 2 / 2         (causal, T = length / 128; else Tq * Tk)
        saved = heads * (tiles - (1 + 15 / sqrt(W)) * pairs / 128 ** 2)
        saved * (2.0 us forward + 5.5 us backward) / 132 SMs > 80 us

    Args:
        heads: batch entries times heads.
        seqlen_q, seqlen_k: number of queries and keys.
        keys_kept: W, how many keys a query keeps at most.
        is_causal: whether a query keeps keys of its own prefix.
        has_backward: whether there will be a backward pass.

    Source: fitted to simulations with independent scores (1.51 at W = 1024, 2.1 at 256) and to times on an H200.

    Example:
        >>> [reorder_pays(16, n, n, 1024, is_causal=True, has_backward=False) for n in (4096, 8192)]
        [False, True]
        >>> reorder_pays(16, 4096, 4096, 1024, is_causal=True, has_backward=True)
        True
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
    """Whether an order saves a call more time than it costs.

    Args:
        natural: tiles of 128 x 128 that some pair is in, keys being in natural order; of all heads, as `pairs`.
        pairs: pairs of a query and a key that it keeps.
        kept: how many keys a query keeps.
        has_backward: whether there will be a backward pass.
    """
    saved = natural - (1 + 15 / math.sqrt(kept)) * pairs / (TILE * TILE)
    return saved * (_FORWARD_US + has_backward * _BACKWARD_US) / _SMS > _ORDER_US
