"""Dropout in the kernels: which probabilities of a tile are kept, by the rule of `flash_dmattn.reference.dropout`.

One call of Philox serves four probabilities: two queries that are 8 apart, by two keys that are 8 apart. In the
fragments of tensor cores, with queries in rows or in columns, one thread holds all four, so threads exchange no random
numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """A probability is kept if its Philox number is at least `threshold`; it is then multiplied by `scale`."""

    threshold: int
    scale: float


@triton.jit
def places_of(key):
    """Return (row, key, head, entry) at which a part of a call begins, from what follows its dropout key; else zeros.

    Rows and keys are int32, so that they do not widen what they are added to.
    """
    is_part = (tl.load(key + 1) >> 32) != 0
    tile = tl.load(key + 2, mask=is_part, other=0)
    batch = tl.load(key + 3, mask=is_part, other=0)
    return tile.to(tl.int32), (tile >> 32).to(tl.int32), batch.to(tl.uint32), (batch >> 32).to(tl.uint32)


@triton.jit
def philox_words(key, entry, head, rows, keys):
    """Draw the four numbers of Philox4x32-7 for queries and keys without their bit 3; head, rows and keys broadcast."""
    # Triton takes one seed of 64 bits, and splits it into two 32-bit numbers again. The shift drops the bit that says
    # that places follow.
    seed = tl.load(key) | (tl.load(key + 1) << 32)
    return tl.philox(seed, keys, rows, head, entry, n_rounds=7)


@triton.jit
def joined_words(key, entry, head, rows, keys):
    """Draw the same numbers as one tensor (rows, keys, 2, 2): its last two axes are the two keys and the two
    queries."""
    first, second, third, fourth = philox_words(key, entry, head, rows, keys)
    return tl.join(tl.join(first, second), tl.join(third, fourth))


@triton.jit
def is_kept(
    key, dropout, b, h, first, first_key, rows, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATHERED: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Return whether each probability of a tile is kept: (queries, keys), or (keys, queries) where AXIS is 0.

    Args:
        key: int64 (2,) or, of a part of a call, (4,), in memory.
        b, h: the entry, or sequence, and the query head.
        first, first_key: first query and first key of the tile, multiples of 16.
        rows, keys: queries and keys of the tile. With GATHERED keys are in no order, and each probability has its own
            call of Philox.
    """
    row_place, key_place, head_place, entry_place = places_of(key)
    entry, head = b.to(tl.uint32) + entry_place, h.to(tl.uint32) + head_place
    if GATHERED:
        row_half, key_half = (rows >> 3) & 1, (keys >> 3) & 1
        # Added behind the halving, places take fewer registers.
        rows, keys = (rows >> 4) * 8 + (rows & 7) + (row_place >> 1), (keys >> 4) * 8 + (keys & 7) + (key_place >> 1)
        rows, keys = tl.broadcast(rows[:, None], keys[None, :])
        first_word, second, third, fourth = philox_words(key, entry, head, rows, keys)
        upper = tl.where((key_half == 0)[None, :], first_word, second)
        lower = tl.where((key_half == 0)[None, :], third, fourth)
        kept = tl.where((row_half == 0)[:, None], upper, lower) >= tl.cast(dropout.threshold, tl.uint32)
        return kept if AXIS == 1 else tl.trans(kept)
    else:
        half_rows = ((first + row_place) >> 1) + tl.arange(0, BLOCK_M // 2)
        half_keys = ((first_key + key_place) >> 1) + tl.arange(0, BLOCK_N // 2)
        if AXIS == 1:
            half_rows, half_keys = tl.broadcast(half_rows[:, None], half_keys[None, :])
            words = joined_words(key, entry, head, half_rows, half_keys)
            blocks = tl.reshape(words, (BLOCK_M // 16, 8, BLOCK_N // 16, 8, 2, 2))
            words = tl.reshape(tl.permute(blocks, (0, 5, 1, 2, 4, 3)), (BLOCK_M, BLOCK_N))
        else:
            half_keys, half_rows = tl.broadcast(half_keys[:, None], half_rows[None, :])
            words = joined_words(key, entry, head, half_rows, half_keys)
            blocks = tl.reshape(words, (BLOCK_N // 16, 8, BLOCK_M // 16, 8, 2, 2))
            words = tl.reshape(tl.permute(blocks, (0, 4, 1, 2, 5, 3)), (BLOCK_N, BLOCK_M))
        return words >= tl.cast(dropout.threshold, tl.uint32)
