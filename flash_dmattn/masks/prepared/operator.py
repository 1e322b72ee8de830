"""The operator that prepares a mask, which `prepare_mask` and `attention` both go through, compiled or not."""

from __future__ import annotations

import torch

from ...problem import Band, MaskView, make_band
from ..broadcast import collapse
from .packers import packer
from .packing import TILE_WORDS, tiles

_LIBRARY = torch.library.Library("flash_dmattn", "FRAGMENT")
_LIBRARY.define("prepare_mask(Tensor mask, SymInt seqlen_q, SymInt seqlen_k, int left, int right) -> Tensor[]")


def prepared_view(mask: torch.Tensor, seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> MaskView:
    """The prepared form of a mask: "keys" where it has one row for all queries, else "tiles".

    Args:
        mask: bool (Bm, Hm, Lq or 1, Lk or 1), any strides; an expanded dim (stride 0) counts as size 1.
        seqlen_q, seqlen_k: of the call.
        window: as `causal_window` has it.

    Returns:
        The tensors of a `KeyMask` or of a `TileMask`; no two of them share memory.
    """
    # Collapsed before the operator, so that sizes alone decide what it returns: compilers change strides.
    mask = collapse(mask)
    return MaskView("keys" if mask.size(2) == 1 else "tiles", tuple(_OPERATOR(mask, seqlen_q, seqlen_k, *window)))


def prepare(mask: torch.Tensor, seqlen_q: int, seqlen_k: int, left: int, right: int) -> list[torch.Tensor]:
    """What the operator does, for a collapsed mask."""
    if mask.size(2) == 1:
        return list(packer(mask).key_set(mask.expand(-1, -1, 1, seqlen_k)))
    return pack_tiles(mask, seqlen_q, seqlen_k, make_band(seqlen_q, seqlen_k, (left, right)))


def pack_tiles(mask: torch.Tensor, seqlen_q: int, seqlen_k: int, band: Band | None) -> list[torch.Tensor]:
    """The tensors of a `TileMask` of a collapsed mask, even of one with a single row: bits, classes, both lists."""
    return packer(mask).pack_tiles(mask.expand(-1, -1, seqlen_q, seqlen_k), band)


def _prepare_fake(mask: torch.Tensor, seqlen_q: int, seqlen_k: int, left: int, right: int) -> list[torch.Tensor]:
    heads = mask.shape[:2]
    shapes: list[tuple[int, ...]]
    if mask.size(2) == 1:
        shapes = [(*heads, seqlen_k), tuple(heads), (*heads, seqlen_k + 1)]
        return [torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in shapes]
    rows, columns = tiles(seqlen_q), tiles(seqlen_k)
    classes = torch.empty((*heads, rows, columns), dtype=torch.uint8, device=mask.device)
    shapes = [(*heads, seqlen_q, columns * TILE_WORDS), (*heads, rows, 2 + columns), (*heads, columns, 2 + rows)]
    bits, *lists = (torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in shapes)
    return [bits, classes, *lists]


_LIBRARY.impl("prepare_mask", prepare, "CompositeExplicitAutograd")
torch.library.register_fake("flash_dmattn::prepare_mask", _prepare_fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flash_dmattn.prepare_mask.default
