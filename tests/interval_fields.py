"""Checks of the fields of interval masks, and of the statistics of all prepared masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import masks
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.storage import IntervalMask


def by_place(mask: IntervalMask) -> Tensor:
    """The dense mask with keys in the order of their places."""
    if not mask.is_reordered:
        return mask.dense()
    return mask.dense().gather(3, mask.order.long()[:, :, None].expand(-1, -1, mask.seqlen_q, -1))


def check_fields(mask: IntervalMask) -> None:
    """Check dtypes, layout, ranges, the one form of dead keys, and that an order is a permutation."""
    batch, heads, seqlen_q, seqlen_k = mask.shape
    assert (seqlen_q, seqlen_k) == (mask.seqlen_q, mask.seqlen_k)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in mask.tensors)
    assert len({x.data_ptr() for x in mask.tensors if x.numel()}) == sum(x.numel() > 0 for x in mask.tensors)
    assert mask.start.shape == mask.stop.shape == (batch, heads, seqlen_k)
    live = mask.start < mask.stop
    assert bool(((mask.start >= 0) & (mask.stop <= seqlen_q)).all())
    assert not mask.start[~live].any() and not mask.stop[~live].any()
    places = mask.num_places
    assert mask.order.shape == (batch, heads, places if mask.is_reordered else 0)
    if mask.is_reordered:
        assert places == seqlen_k or (places % 128 == 0 and places < seqlen_k)
        keys = mask.order.sort(-1).values  # distinct
        assert bool((keys.diff(dim=-1) > 0).all() and (keys >= 0).all() and (keys < seqlen_k).all())
        placed = live.gather(2, mask.order.long())
        assert torch.equal(placed, placed.sort(-1, descending=True).values)
        assert torch.equal(placed.sum(-1), live.sum(-1))
    dense = by_place(mask)
    # The lists are the same as of a dense mask of places.
    row_lists, col_lists = packing.list_tiles(packing.pack_mask(dense, None)[1])
    assert torch.equal(mask.row_lists, row_lists) and torch.equal(mask.col_lists, col_lists)
    start, stop = mask.bounds[:, :, None].unbind(-1)
    rows = torch.arange(seqlen_q)[:, None]
    allowed = (rows >= start) & (rows < stop)
    assert torch.equal(allowed[..., :places], dense) and not allowed[..., places:].any()
    assert mask.bounds.shape == (batch, heads, -(-places // 128) * 128, 2)


def check_stats(prepared: PreparedMask, dense: Tensor) -> None:
    """Check the statistics of a prepared mask against those of its dense mask, in the order of its places."""
    actual, expected = prepared.stats(), masks.mask_stats(dense)
    for name in ("shape", "block_size", "density", "active_tile_fraction", "empty_rows"):
        assert getattr(actual, name) == getattr(expected, name), name
    whole, tiles = dense.shape[3] // 128, max(1, -(-dense.shape[3] // 128))
    full = masks.mask_stats(dense[..., : whole * 128]).full_tile_fraction  # a last tile of fewer keys is never full
    assert actual.full_tile_fraction == pytest.approx(full * whole / tiles)
