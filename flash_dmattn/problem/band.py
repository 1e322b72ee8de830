"""The band of a call: the diagonals that causality and a window leave, aligned bottom-right."""

from __future__ import annotations

from typing import NamedTuple


class Band(NamedTuple):
    """The allowed diagonals: query i may attend to key j where `low <= j - i <= high`."""

    low: int
    high: int


def causal_window(is_causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """Causality and a window as one window (left, right), -1 for an unlimited side: causality is a right side of 0."""
    left, right = window_size
    return left, 0 if is_causal else right


def make_band(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> Band | None:
    """The diagonals that a window leaves, as `causal_window` has it; None where it forbids nothing."""
    left, right = window
    aligned = seqlen_k - seqlen_q
    # Unlimited sides, and limits beyond the last diagonal, become the diagonal past the last: all sums stay in int32.
    low = -seqlen_q if left < 0 else max(aligned - left, -seqlen_q)
    high = seqlen_k if right < 0 else min(aligned + right, seqlen_k)
    return None if low <= 1 - seqlen_q and high >= seqlen_k - 1 else Band(low, high)


def allowed_pairs(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> int:
    """How many pairs of a query and a key a window leaves, as `causal_window` has it.

    >>> allowed_pairs(4, 4, (-1, 0)), allowed_pairs(2, 5, (1, 0)), allowed_pairs(5, 2, (-1, 0))
    (10, 4, 3)
    """
    band = make_band(seqlen_q, seqlen_k, window)
    if band is None:
        return seqlen_q * seqlen_k
    return _pairs_below(seqlen_q, seqlen_k, band.high + 1) - _pairs_below(seqlen_q, seqlen_k, band.low)


def _pairs_below(seqlen_q: int, seqlen_k: int, diagonal: int) -> int:
    """Pairs (i, j) with j - i < diagonal: the sum over the queries of i + diagonal, from 0 to the number of keys."""
    first = min(max(-diagonal, 0), seqlen_q)  # the first query with a key
    last = min(max(seqlen_k - diagonal, first), seqlen_q)  # from here on all keys are below
    partly = (last - first) * (first + last - 1 + 2 * diagonal) // 2
    return partly + (seqlen_q - last) * seqlen_k


def keys_of_query(seqlen_k: int, window: tuple[int, int]) -> int:
    """How many keys a query may attend, by their number and its window.

    >>> keys_of_query(4096, (15, 0)), keys_of_query(4096, (15, -1))
    (16, 4096)
    """
    left, right = window
    return seqlen_k if left < 0 or right < 0 else min(seqlen_k, left + right + 1)
