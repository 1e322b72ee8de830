"""Who packs a mask: PyTorch, unless a faster packer that was registered here serves the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...problem import Band
from . import packing
from .packing import KeySet, TileLists


class Packer(NamedTuple):
    """The three functions that prepare a mask; every packer gives the results of `packing`, bit for bit.

    Attributes:
        pack_tiles: (bool (Bm, Hm, Lq, Lk) of any strides, band) -> bits, classes, row_lists, col_lists of a `TileMask`.
        list_tiles: classes -> row_lists, col_lists.
        key_set: bool (Bm, Hm, 1, Lk) of any strides -> kept, count, prefix of a `KeyMask`.
    """

    pack_tiles: Callable[[torch.Tensor, Band | None], list[torch.Tensor]]
    list_tiles: Callable[[torch.Tensor], TileLists]
    key_set: Callable[[torch.Tensor], KeySet]


def _pack_tiles(mask: torch.Tensor, band: Band | None) -> list[torch.Tensor]:
    bits, classes = packing.pack_mask(mask, band)
    return [bits, classes, *packing.list_tiles(classes)]


PYTORCH = Packer(_pack_tiles, packing.list_tiles, packing.key_set)
_find_faster: Callable[[torch.Tensor], Packer | None] = lambda tensor: None


def register(find_faster: Callable[[torch.Tensor], Packer | None]) -> None:
    """Ask `find_faster` for the packer of a tensor from now on; where it returns None, PyTorch packs."""
    global _find_faster
    _find_faster = find_faster


def packer(tensor: torch.Tensor) -> Packer:
    """The packer that serves a tensor."""
    return _find_faster(tensor) or PYTORCH
