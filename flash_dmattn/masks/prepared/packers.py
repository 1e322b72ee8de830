"""Who packs a mask: PyTorch, unless a faster packer that was registered here serves the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...problem import Band, SequenceSpec
from ..topk import score_keys
from ..topk_stops import topk_intervals
from . import packing
from .interval_order import first_places, key_order
from .interval_tiles import IntervalTiles, interval_bounds, interval_classes
from .key_intervals import KeyIntervals, key_intervals
from .mask_intervals import MaskIntervals, mask_intervals
from .packing import KeySet, TileLists
from .sequence_packing import MaskPacking, pack_sequences


class Packer(NamedTuple):
    """The functions that prepare a mask; every packer gives the results of plain PyTorch, bit for bit.

    Attributes:
        pack_tiles: (bool (Bm, Hm, Lq, Lk) of any strides, band) -> bits, classes, row_lists, col_lists of a `TileMask`.
        list_tiles: classes -> row_lists, col_lists.
        key_set: bool (Bm, Hm, 1, Lk) of any strides -> kept, count, prefix of a `KeyMask`.
        score_keys: as `masks.topk.score_keys`.
        key_intervals: as `key_intervals.key_intervals`.
        mask_intervals: as `mask_intervals.mask_intervals`.
        interval_tiles: (start, stop, order, seqlen_q) -> bounds, row_lists, col_lists of an `IntervalMask`.
        topk_intervals: as `masks.topk_stops.topk_intervals`.
        key_order: as `interval_order.key_order`.
        first_places: as `interval_order.first_places`.
        pack_sequences: as `sequence_packing.pack_sequences`.
    """

    pack_tiles: Callable[[torch.Tensor, Band | None], list[torch.Tensor]]
    list_tiles: Callable[[torch.Tensor], TileLists]
    key_set: Callable[[torch.Tensor], KeySet]
    score_keys: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    key_intervals: Callable[[torch.Tensor, int, Band | None, bool], KeyIntervals]
    mask_intervals: Callable[[torch.Tensor, torch.Tensor, int], MaskIntervals]
    interval_tiles: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], IntervalTiles]
    topk_intervals: Callable[[torch.Tensor, int, int, int], tuple[torch.Tensor, torch.Tensor]]
    key_order: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    first_places: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ]
    pack_sequences: Callable[
        [torch.Tensor, torch.Tensor, MaskPacking, SequenceSpec, tuple[int, int]], list[torch.Tensor]
    ]


def _pack_tiles(mask: torch.Tensor, band: Band | None) -> list[torch.Tensor]:
    bits, classes = packing.pack_mask(mask, band)
    return [bits, classes, *packing.list_tiles(classes)]


def list_intervals(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, seqlen_q: int) -> IntervalTiles:
    """`Packer.interval_tiles` in PyTorch, with the lists by the fastest packer of the device."""
    bounds = interval_bounds(start, stop, order)
    return bounds, *packer(bounds).list_tiles(interval_classes(bounds, seqlen_q))


PYTORCH = Packer(
    _pack_tiles,
    packing.list_tiles,
    packing.key_set,
    score_keys,
    key_intervals,
    mask_intervals,
    list_intervals,
    topk_intervals,
    key_order,
    first_places,
    pack_sequences,
)
_find_faster: Callable[[torch.Tensor], Packer | None] = lambda tensor: None


def register(find_faster: Callable[[torch.Tensor], Packer | None]) -> None:
    """Ask `find_faster` for the packer of a tensor from now on; where it returns None, PyTorch packs."""
    global _find_faster
    _find_faster = find_faster


def packer(tensor: torch.Tensor) -> Packer:
    """The packer that serves a tensor."""
    return _find_faster(tensor) or PYTORCH
