"""Find the fastest kernels that pack masks and write to caches on a GPU.

| | Hopper | other GPUs | elsewhere |
| --- | --- | --- | --- |
| masks with a row for each query | CUDA extension | Triton | PyTorch |
| masks with one row for up to 15 queries, or for sequences | Triton | Triton | PyTorch |
| other masks with one row | CUDA extension; Triton above 2^18 keys | Triton | PyTorch |
| tiles of lists of blocks | CUDA extension; PyTorch above 2^18 keys | PyTorch | PyTorch |
| caches | Triton | Triton on NVIDIA, else PyTorch | PyTorch |
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..masks.prepared import operators
from ..masks.prepared.intervals import MOST_HEADS_OF_CODES, IntervalTiles
from ..masks.prepared.operators import Packer
from ..problem import Band, device_arch
from ..sequences import cache_writes
from ..sequences.cache_writes import CacheWrite, Writer
from .config import disabled
from .registry import works

# The largest number of keys of a mask with one row that one block can count: `kMostMaskKeys` of csrc.
MOST_KEYS = 2**18


def packs_by_extension(tensor: Tensor) -> bool:
    """Return whether the CUDA extension packs a mask: on a Hopper GPU, if it works and is not disabled."""
    return tensor.is_cuda and device_arch(tensor.device) == "sm_90" and "cuda" not in disabled() and works("cuda")


def find_packer(tensor: Tensor) -> Packer | None:
    """Return the fastest packer for a tensor; None for PyTorch."""
    if packs_by_extension(tensor):
        return _extension_packer()
    return _triton_packer(device_arch(tensor.device)[:3]) if tensor.is_cuda else None


def _triton_kernels(name: str) -> ModuleType | None:
    """Return a module of Triton kernels; None if Triton is not installed."""
    try:
        return importlib.import_module(f"flash_dmattn.triton_kernels.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None


@cache
def _triton_packer(family: str = "sm_") -> Packer | None:
    """Return the packer for NVIDIA GPUs, "sm_", or for AMD GPUs, "gfx"."""
    names = ("mask_pack", "key_pack", "interval_pack", "sequence_pack", "list_pack")
    masks, keys, intervals, sequences, lists = map(_triton_kernels, names)
    if masks is None or keys is None or intervals is None or sequences is None or lists is None:
        return None

    def pack_tiles(mask: Tensor, band: Band | None) -> list[Tensor]:
        bits, classes = masks.pack_mask(mask, band)
        return [bits, classes, *masks.list_tiles(classes)]

    return operators.PYTORCH._replace(
        pack_tiles=pack_tiles,
        list_tiles=masks.list_tiles,
        key_set=keys.key_set,
        score_keys=keys.score_keys,
        key_intervals=keys.key_intervals,
        mask_intervals=intervals.mask_intervals,
        interval_tiles=keys.interval_tiles,
        first_places=keys.first_places,
        # These two were not tried on AMD GPUs.
        list_best=lists.list_best if family == "sm_" else operators.PYTORCH.list_best,
        pack_sequences=sequences.pack_sequences if family == "sm_" else operators.PYTORCH.pack_sequences,
    )


@cache
def _extension_packer() -> Packer:
    # Cached, because torch.ops takes a microsecond to find an operator. The probe has loaded the extension before.
    return around_extension(torch.ops.flash_dmattn)


def around_extension(operators: Any) -> Packer:
    """Return a packer with the operators of the extension, and Triton or PyTorch for the other functions."""
    pack_mask, interval_tiles = operators.cuda_pack_mask.default, operators.cuda_interval_tiles.default
    topk_intervals, order_keys = operators.cuda_topk_intervals.default, operators.cuda_key_order.default
    key_mask, listed_tiles = operators.cuda_key_mask.default, operators.cuda_listed_tiles.default
    rest = _triton_packer() or operators.PYTORCH

    def pack_tiles(mask: Tensor, band: Band | None) -> list[Tensor]:
        low, high = (0, 0) if band is None else band
        return pack_mask(mask, low, high, band is not None)

    def list_intervals(start: Tensor, stop: Tensor, order: Tensor, seqlen_q: int) -> IntervalTiles:
        bounds, row_lists, col_lists = interval_tiles(start, stop, order, seqlen_q)
        return bounds, row_lists, col_lists

    def row_intervals(
        mask: Tensor,
        seqlen_q: int,
        band: Band | None,
        reorder: bool,
        k: Tensor | None = None,
        v: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        seqlen_k = mask.size(3)
        if seqlen_k > MOST_KEYS:
            return rest.row_intervals(mask, seqlen_q, band, reorder)
        low, high = band or (-seqlen_q, seqlen_k)
        if k is None or v is None:
            return key_mask(mask, seqlen_q, low, high, reorder, False, None, None, None), ()
        if not reorder or (k.data_ptr() | v.data_ptr()) % 16:
            k = v = bias = None
        made = key_mask(mask, seqlen_q, low, high, reorder, True, k, v, bias)
        return made[:6], made[6:]

    def tiles_of_lists(
        keys: Tensor, block_size: tuple[int, int], lengths: tuple[int, int], band: Band | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        seqlen_q, seqlen_k = lengths
        if seqlen_k > MOST_KEYS:
            return rest.tiles_of_lists(keys, block_size, lengths, band)
        made = listed_tiles(keys, *block_size, seqlen_q, seqlen_k, *(band or (-seqlen_q, seqlen_k)))
        return made[:6], made[6:]

    def find_topk(keys: Tensor, k: int, seqlen_q: int, local: int) -> tuple[Tensor, Tensor]:
        if keys.dtype != torch.int32:  # int64 for scores in fp64
            return rest.topk_intervals(keys, k, seqlen_q, local)
        start, stop = topk_intervals(keys, k, seqlen_q, local)
        return start, stop

    def key_order(start: Tensor, stop: Tensor, seqlen_q: int) -> Tensor:
        if start.size(0) * start.size(1) > MOST_HEADS_OF_CODES:
            return rest.key_order(start, stop, seqlen_q)
        return order_keys(start, stop, seqlen_q)

    return rest._replace(
        pack_tiles=pack_tiles,
        row_intervals=row_intervals,
        tiles_of_lists=tiles_of_lists,
        interval_tiles=list_intervals,
        topk_intervals=find_topk,
        key_order=key_order,
    )


def find_writer(write: CacheWrite) -> Writer | None:
    if not write.k_cache.is_cuda or "triton" in disabled():
        return None
    return _triton_writer() if device_arch(write.k_cache.device).startswith("sm_") else None


@cache
def _triton_writer() -> Writer | None:
    caches = _triton_kernels("append")
    return None if caches is None else caches.write


operators.register(find_packer)
cache_writes.register(find_writer)
