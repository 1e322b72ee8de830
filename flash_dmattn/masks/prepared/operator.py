"""The operator that prepares a mask, which `prepare_mask` and `attention` both go through, compiled or not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from ..backends import cuda
from ..problem import device_capability
from ..settings import process
from . import packing
from .broadcast import collapse
from .packing import TILE_WORDS, Band, make_band, tiles

_LIBRARY = torch.library.Library("flash_dmattn", "FRAGMENT")
_LIBRARY.define(
    "prepare_mask(Tensor mask, SymInt seqlen_q, SymInt seqlen_k, bool is_causal, int[2] window_size) -> Tensor[]"
)


def prepared_tensors(
    mask: torch.Tensor, seqlen_q: int, seqlen_k: int, is_causal: bool, window_size: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    """The tensors of the prepared form of a mask: those of a `KeyMask` where it has one row for all queries.

    Args:
        mask: bool (Bm, Hm, Lq or 1, Lk or 1), any strides; an expanded dim (stride 0) counts as size 1.
        seqlen_q, seqlen_k, is_causal, window_size: valid, as `prepare_mask` has them.

    Returns:
        kept, count, prefix of a `KeyMask`, or bits, classes, row_lists, col_lists of a `TileMask`; no two of them
        share memory.
    """
    # Collapsed before the operator, so that sizes alone decide what it returns: compilers change strides.
    return tuple(_OPERATOR(collapse(mask), seqlen_q, seqlen_k, is_causal, window_size))


_kernels: ModuleType | None = None


def packer(tensor: torch.Tensor) -> ModuleType:
    """The module whose `pack_mask`, `list_tiles` and `key_set` serve a tensor: Triton on a GPU, PyTorch elsewhere."""
    global _kernels
    if not tensor.is_cuda:
        return packing
    if _kernels is None:
        try:
            _kernels = importlib.import_module("flash_dmattn.triton_kernels.mask_pack")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "triton":
                raise
            _kernels = packing
    return _kernels


def prepare(
    mask: torch.Tensor, seqlen_q: int, seqlen_k: int, is_causal: bool, window_size: Sequence[int]
) -> list[torch.Tensor]:
    """What the operator does, for a collapsed mask."""
    if mask.size(2) == 1:
        return list(packer(mask).key_set(mask.expand(-1, -1, 1, seqlen_k)))
    left, right = window_size
    return pack_tiles(mask, seqlen_q, seqlen_k, make_band(seqlen_q, seqlen_k, is_causal, (left, right)))


def pack_tiles(mask: torch.Tensor, seqlen_q: int, seqlen_k: int, band: Band | None) -> list[torch.Tensor]:
    """The tensors of a `TileMask` of a collapsed mask, even of one with a single row: bits, classes, both lists."""
    dense = mask.expand(-1, -1, seqlen_q, seqlen_k)
    if packs_by_extension(mask):
        low, high = (0, 0) if band is None else band
        return _extension_packer()(dense, low, high, band is not None)
    pack = packer(mask)
    bits, classes = pack.pack_mask(dense, band)
    return [bits, classes, *pack.list_tiles(classes)]


def packs_by_extension(tensor: torch.Tensor) -> bool:
    """Whether the CUDA extension packs a mask: on a Hopper GPU where it works and nobody has disabled its backend."""
    return (
        tensor.is_cuda
        and device_capability(tensor.device) == (9, 0)
        and cuda.NAME not in process.disabled
        and cuda.probe().usable
    )


_pack_mask: Callable[..., list[torch.Tensor]] | None = None


def _extension_packer() -> Callable[..., list[torch.Tensor]]:
    # Looked up once, after the probe has loaded the extension: torch.ops takes a microsecond to find an operator.
    global _pack_mask
    if _pack_mask is None:
        _pack_mask = torch.ops.flash_dmattn.cuda_pack_mask.default
    return _pack_mask


def _prepare_fake(
    mask: torch.Tensor, seqlen_q: int, seqlen_k: int, is_causal: bool, window_size: list[int]
) -> list[torch.Tensor]:
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
