"""Steps that the classmethods of `PreparedMask` share: checks of arguments, and the tiles of intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...problem import MaskView, SequenceSpec, check_flag, check_window
from ...sequences.layout import Sequences
from ..arguments import integer
from .intervals import live_keys, order_saves, places_for
from .operators import run_first_places, run_interval_tiles, run_key_order, run_mask_intervals


def band_fields(is_causal: bool, window_size: tuple[int, int] | None) -> dict[str, Any]:
    """Check the band; return it as fields of a mask."""
    return {"is_causal": check_flag("is_causal", is_causal), "window_size": check_window(window_size)}


def full_length(name: str, what: str, size: int, length: int | None) -> int:
    """Return the real length along a dim of a mask, from its size and from the argument."""
    if length is None:
        if size == 1:
            raise ValueError(f"mask has one {what} for all; {name} is None; it needs to be their number.")
        return size
    if size not in (1, integer(name, length)):
        raise ValueError(f"mask has {size} {what}s and {name} is {length}; they need to be equal, or the mask needs 1.")
    return length


def check_compact(compact: bool, reorder: bool | None) -> None:
    """Refuse `compact` without an order of keys."""
    if check_flag("compact", compact) and reorder is False:
        raise ValueError("compact is True and reorder is False; only an order of keys has places to leave out.")


def spec_beside(sequences: Sequences, seqlen_q: int | None, seqlen_k: int | None) -> SequenceSpec:
    """Describe the sequences of a mask, from the lengths of the tensors of its calls."""
    if not isinstance(sequences, Sequences):
        raise TypeError(f"sequences is a {type(sequences).__name__}; it needs to be a flash_dmattn.Sequences.")
    for name, length, tensor in (("seqlen_q", seqlen_q, "q"), ("seqlen_k", seqlen_k, "k")):
        if length is None:
            pages = ", of pages block_table.shape[1] * page_size" if name == "seqlen_k" else ""
            raise ValueError(f"{name} is None; beside sequences it needs to be {tensor}.shape[-3]{pages}.")
    assert seqlen_q is not None and seqlen_k is not None
    return sequences.spec_of(integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k))


def check_same_device(name: str, mask: torch.Tensor, sequences: Sequences) -> None:
    """Refuse a mask that is not where the sequences are."""
    if mask.device != sequences.device:
        raise ValueError(f"{name} is on {mask.device}; it needs to be where sequences are, on {sequences.device}.")


def interval_walk(
    start: torch.Tensor,
    stop: torch.Tensor,
    seqlen_q: int,
    reorder: bool,
    places: int | None = None,
    *,
    compact: bool = False,
) -> Sequence[torch.Tensor]:
    """Return order, bounds, row_lists and col_lists of an `IntervalMask`: O(Lq * places).

    Args:
        start, stop, seqlen_q: fields of the mask.
        reorder: whether it has an order of keys.
        places: the number of places of an order. It has room for the live keys of each head; by default for all keys.
        compact: choose `places` by the number of live keys, which waits for the device.
    """
    seqlen_k = start.size(2)
    if compact:
        places = places_for(int(live_keys(start, stop)), seqlen_k)
    order = run_key_order(start, stop, seqlen_q) if reorder else start.new_empty((*start.shape[:2], 0))
    if not reorder or places is None or places == seqlen_k:
        return order, *run_interval_tiles(start, stop, order, seqlen_q)
    order, start, stop = run_first_places(start, stop, order, places)  # the rest is not kept alive
    return order, *run_interval_tiles(start, stop, start.new_empty((*start.shape[:2], 0)), seqlen_q)


def recognise_intervals(
    view: MaskView, seqlen_q: int, seqlen_k: int, reorder: bool | None
) -> Sequence[torch.Tensor] | None:
    """Return the tensors of an `IntervalMask` that allows the same as tiles; None if a key has several runs of queries.

    Values decide, so it waits for the device, once. The numbers of pairs and of tiles come back with the answer. They
    say how many places an order of keys needs, and, if `reorder` is None, whether it pays in a forward pass.
    """
    bits, _, row_lists, _ = view.tensors
    start, stop, numbers = run_mask_intervals(bits, row_lists, seqlen_k)
    has_several, live, pairs, active = numbers.tolist()
    if has_several:
        return None
    if reorder is None:
        kept = pairs / max(1, start.size(0) * start.size(1) * seqlen_q)
        reorder = kept > 0 and order_saves(active, pairs, kept, has_backward=False)
    return start, stop, *interval_walk(start, stop, seqlen_q, reorder, places_for(live, seqlen_k))
