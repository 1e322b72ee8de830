"""Who packs masks on a GPU: the CUDA extension on Hopper, Triton on other GPUs and for sets of keys."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch

from ..backends.cuda import backend as cuda
from ..masks.prepared import packers
from ..masks.prepared.packers import Packer
from ..problem import Band, device_arch
from .settings import process


def packs_by_extension(tensor: torch.Tensor) -> bool:
    """Whether the CUDA extension packs a mask: on a Hopper GPU where it works and nobody has disabled its backend."""
    return (
        tensor.is_cuda
        and device_arch(tensor.device) == "sm_90"
        and cuda.NAME not in process.disabled
        and cuda.probe().usable
    )


def find_packer(tensor: torch.Tensor) -> Packer | None:
    """The fastest packer for a tensor; None for that of PyTorch."""
    if packs_by_extension(tensor):
        return _extension_packer()
    return _triton_packer() if tensor.is_cuda else None


@cache
def _triton_packer() -> Packer | None:
    try:
        kernels = importlib.import_module("flash_dmattn.triton_kernels.mask_pack")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None

    def pack_tiles(mask: torch.Tensor, band: Band | None) -> list[torch.Tensor]:
        bits, classes = kernels.pack_mask(mask, band)
        return [bits, classes, *kernels.list_tiles(classes)]

    return Packer(pack_tiles, kernels.list_tiles, kernels.key_set)


@cache
def _extension_packer() -> Packer:
    # Made once, after the probe has loaded the extension: torch.ops takes a microsecond to find an operator.
    return around_extension(torch.ops.flash_dmattn.cuda_pack_mask.default)


def around_extension(pack_mask: Callable[..., list[torch.Tensor]]) -> Packer:
    """The packer whose tiles come from the operator of the extension."""

    def pack_tiles(mask: torch.Tensor, band: Band | None) -> list[torch.Tensor]:
        low, high = (0, 0) if band is None else band
        return pack_mask(mask, low, high, band is not None)

    rest = _triton_packer() or packers.PYTORCH
    return Packer(pack_tiles, rest.list_tiles, rest.key_set)


packers.register(find_packer)
