"""Masks that tests of prepared masks share, and checks of what is made of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import masks
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.storage import IntervalMask

# Limits of a band, as `PreparedMask` takes them.
BANDS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"window_size": (7, 3)},
    {"window_size": (0, 0)},
    {"window_size": (-1, 2), "is_causal": True},
    {"window_size": (60, -1), "is_causal": True},
    {"window_size": (2**40, 0)},
    {"window_size": (10**15, 10**15)},
]


def in_band(seqlen_q: int, seqlen_k: int, is_causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """The band of the contract on the whole square: bool (Lq, Lk)."""
    gap = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    left, right = window_size
    right = 0 if is_causal else right
    return ((gap >= -left) | (left < 0)) & ((gap <= right) | (right < 0))


def tiled_mask(*shape: int, seed: int = 0) -> Tensor:
    """Random bools with some tiles full, some empty, and some full but for one key or empty but for one."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    for number, (row, col) in enumerate(itertools.product(range(0, shape[-2], 128), range(0, shape[-1], 128))):
        tile = mask[..., row : row + 128, col : col + 128]
        if number % 5 < 4:
            tile[:] = number % 2 == 0
        if number % 5 in (2, 3):
            tile[..., -1, -1] ^= True
    return mask


def runs(batch: int, heads: int, seqlen_q: int, seqlen_k: int, seed: int = 0) -> Tensor:
    """A random mask of one run of queries for each key, or none."""
    generator = torch.Generator().manual_seed(seed)
    start, stop = torch.randint(-5, seqlen_q + 6, (2, batch, heads, 1, seqlen_k), generator=generator)
    rows = torch.arange(seqlen_q)[:, None]
    return (rows >= start) & (rows < stop)


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
    """Check the statistics of a prepared mask against its dense mask, in the order of its places."""
    actual, expected = prepared.stats(), masks.mask_stats(dense)
    for name in ("shape", "block_size", "density", "active_tile_fraction", "empty_rows"):
        assert getattr(actual, name) == getattr(expected, name), name
    all_of_it, tiles = dense.shape[3] // 128, max(1, -(-dense.shape[3] // 128))
    full = masks.mask_stats(dense[..., : all_of_it * 128]).full_tile_fraction  # a last tile of fewer keys is never full
    assert actual.full_tile_fraction == pytest.approx(full * all_of_it / tiles)


def same(one: PreparedMask, other: PreparedMask) -> bool:
    """Whether two prepared masks are of one class and equal in every tensor."""
    return type(one) is type(other) and all(map(torch.equal, one.tensors, other.tensors))
