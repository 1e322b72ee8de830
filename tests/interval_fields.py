"""Checks of the fields of every interval mask."""

from __future__ import annotations

import torch

from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.storage import IntervalMask


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
    dense = mask.dense()
    if mask.is_reordered:
        dense = dense.gather(3, mask.order.long()[:, :, None].expand(-1, -1, seqlen_q, -1))
    # The lists are the same as of a dense mask of places.
    row_lists, col_lists = packing.list_tiles(packing.pack_mask(dense, None)[1])
    assert torch.equal(mask.row_lists, row_lists) and torch.equal(mask.col_lists, col_lists)
    start, stop = mask.bounds[:, :, None].unbind(-1)
    rows = torch.arange(seqlen_q)[:, None]
    allowed = (rows >= start) & (rows < stop)
    assert torch.equal(allowed[..., :places], dense) and not allowed[..., places:].any()
    assert mask.bounds.shape == (batch, heads, -(-places // 128) * 128, 2)
