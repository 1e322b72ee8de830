"""Which sequence each row of tokens is of, and its place in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenPlaces(NamedTuple):
    """Of each row of (S, L, ...) or (1, T, ...), flattened: int64 (rows,) of the first two.

    Attributes:
        own: the sequence; of a row of none any that there is.
        place: the place among its tokens, which may be beyond them, or negative.
        is_used: bool, whether the row is a token of its sequence.
    """

    own: Tensor
    place: Tensor
    is_used: Tensor


def token_places(bounds: Tensor, entries: int, rows: int, is_packed: bool) -> TokenPlaces:
    """The places of the queries of a `SequenceView` with these bounds, of one sequence at least.

    Args:
        bounds: int32 (S, 4).
        entries, rows: the first sizes of the tensor of queries.
        is_packed: whether it is one row of all sequences.
    """
    row = torch.arange(entries * rows, device=bounds.device)
    if is_packed:
        firsts = bounds[:, 0].long()
        # The last that begins at or before a row: those without tokens begin where the next one does.
        own = (torch.searchsorted(firsts, row, right=True) - 1).clamp(min=0)
        place = row - firsts[own]
    else:
        own, place = row // rows, row % rows
    return TokenPlaces(own, place, (place >= 0) & (place < bounds[own, 1]))
