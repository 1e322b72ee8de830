"""Who packs masks on a GPU: the CUDA extension on Hopper, Triton on others and for masks of one row or of sequences."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..masks.prepared import packers
from ..masks.prepared.interval_order import MOST_HEADS_OF_CODES
from ..masks.prepared.interval_tiles import IntervalTiles
from ..masks.prepared.packers import Packer
from ..problem import Band, device_arch
from .config import disabled
from .registry import works
from .triton_modules import triton_module


def packs_by_extension(tensor: torch.Tensor) -> bool:
    """Whether the CUDA extension packs a mask: on a Hopper GPU where it works and nobody has disabled its backend."""
    return tensor.is_cuda and device_arch(tensor.device) == "sm_90" and "cuda" not in disabled() and works("cuda")


def find_packer(tensor: torch.Tensor) -> Packer | None:
    """The fastest packer for a tensor; None for that of PyTorch."""
    if packs_by_extension(tensor):
        return _extension_packer()
    return _triton_packer(device_arch(tensor.device)[:3]) if tensor.is_cuda else None


@cache
def _triton_packer(family: str = "sm_") -> Packer | None:
    """That of NVIDIA's GPUs, "sm_", or of AMD's, "gfx"."""
    of_masks = triton_module("flash_dmattn.triton_kernels.mask_pack")
    of_keys = triton_module("flash_dmattn.triton_kernels.key_pack")
    of_intervals = triton_module("flash_dmattn.triton_kernels.interval_pack")
    of_sequences = triton_module("flash_dmattn.triton_kernels.sequence_pack")
    if of_masks is None or of_keys is None or of_intervals is None or of_sequences is None:
        return None

    def pack_tiles(mask: torch.Tensor, band: Band | None) -> list[torch.Tensor]:
        bits, classes = of_masks.pack_mask(mask, band)
        return [bits, classes, *of_masks.list_tiles(classes)]

    return packers.PYTORCH._replace(
        pack_tiles=pack_tiles,
        list_tiles=of_masks.list_tiles,
        key_set=of_keys.key_set,
        score_keys=of_keys.score_keys,
        key_intervals=of_keys.key_intervals,
        mask_intervals=of_intervals.mask_intervals,
        interval_tiles=of_keys.interval_tiles,
        first_places=of_keys.first_places,
        # AMD's have not been tried with it.
        pack_sequences=of_sequences.pack_sequences if family == "sm_" else packers.PYTORCH.pack_sequences,
    )


@cache
def _extension_packer() -> Packer:
    # Made once, after the probe has loaded the extension: torch.ops takes a microsecond to find an operator.
    return around_extension(torch.ops.flash_dmattn)


def around_extension(operators: Any) -> Packer:
    """The packer of the operators of the extension, under their names; the rest is Triton's or PyTorch's."""
    pack_mask, interval_tiles = operators.cuda_pack_mask.default, operators.cuda_interval_tiles.default
    topk_intervals, order_keys = operators.cuda_topk_intervals.default, operators.cuda_key_order.default
    rest = _triton_packer() or packers.PYTORCH

    def pack_tiles(mask: torch.Tensor, band: Band | None) -> list[torch.Tensor]:
        low, high = (0, 0) if band is None else band
        return pack_mask(mask, low, high, band is not None)

    def list_intervals(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, seqlen_q: int) -> IntervalTiles:
        bounds, row_lists, col_lists = interval_tiles(start, stop, order, seqlen_q)
        return bounds, row_lists, col_lists

    def find_topk(keys: torch.Tensor, k: int, seqlen_q: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
        if keys.dtype != torch.int32:  # of scores in fp64
            return rest.topk_intervals(keys, k, seqlen_q, local)
        start, stop = topk_intervals(keys, k, seqlen_q, local)
        return start, stop

    def key_order(start: torch.Tensor, stop: torch.Tensor, seqlen_q: int) -> torch.Tensor:
        if start.size(0) * start.size(1) > MOST_HEADS_OF_CODES:
            return rest.key_order(start, stop, seqlen_q)
        return order_keys(start, stop, seqlen_q)

    return rest._replace(
        pack_tiles=pack_tiles, interval_tiles=list_intervals, topk_intervals=find_topk, key_order=key_order
    )


packers.register(find_packer)
