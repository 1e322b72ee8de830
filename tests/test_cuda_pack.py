"""Mask packing by the CUDA extension, bit for bit against plain PyTorch; `benchmarks.mask_pack` has larger masks.

It runs on a GPU, and on the emulated one.
"""

from __future__ import annotations

import pytest
import torch
from cases import DEVICE
from torch import Tensor

from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.dispatch.packers import packs_by_extension
from flash_dmattn.masks import prepare_mask
from flash_dmattn.masks.prepared import packing
from flash_dmattn.problem import causal_window, make_band

SHAPES = ((2, 3, 1, 1), (1, 2, 7, 130), (2, 2, 300, 1040), (1, 1, 1000, 4096), (2, 1, 129, 4095))
EMPTY_SHAPES = ((2, 1, 0, 5), (1, 2, 130, 0), (0, 1, 3, 4), (1, 0, 3, 4), (1, 1, 0, 0))
BANDS = ((False, (-1, -1)), (True, (-1, -1)), (False, (200, 30)), (True, (0, -1)))


@pytest.fixture(autouse=True)
def extension() -> None:
    availability = cuda.probe()
    if not availability.usable:
        pytest.skip(f"cuda: {availability.reason}")


def check(mask: Tensor, same: Tensor | None = None) -> None:
    """The extension's results for a mask are those of plain PyTorch, for it or for one that means the same."""
    seqlen_q, seqlen_k = mask.shape[2:]
    for is_causal, window_size in BANDS:
        band = make_band(seqlen_q, seqlen_k, causal_window(is_causal, window_size))
        found = torch.ops.flash_dmattn.cuda_pack_mask(mask, *(band or (0, 0)), band is not None)
        bits, classes = packing.pack_mask(mask if same is None else same, band)
        wanted = (bits, classes, *packing.list_tiles(classes))
        for name, x, y in zip(("bits", "classes", "row_lists", "col_lists"), found, wanted, strict=True):
            assert torch.equal(x, y), f"{name} of {tuple(mask.shape)}, strides {mask.stride()}, band {band}"


def random_mask(*shape: int) -> Tensor:
    """Random bools, with some tiles full and some empty."""
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(DEVICE)
    mask[..., : shape[-2] // 3, : shape[-1] // 2] = True
    mask[..., shape[-2] // 2 :, : shape[-1] // 3] = False
    return mask


@pytest.mark.parametrize("shape", (*SHAPES, *EMPTY_SHAPES), ids=str)
def test_every_size(shape: tuple[int, ...]) -> None:
    check(random_mask(*shape))


@pytest.mark.parametrize("offset", (1, 4, 8, 16))
def test_rows_that_start_between_wide_loads(offset: int) -> None:
    check(random_mask(2, 2, 500, 1200)[..., offset : 1024 + offset])


def test_any_strides() -> None:
    wide = random_mask(2, 2, 500, 1200)
    for mask in (
        wide.mT,
        wide[..., ::2],
        wide.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        wide[..., :1].expand(-1, -1, -1, 700),
        wide[:1, :1, :1].expand(2, 2, 300, -1),
    ):
        check(mask)


@pytest.mark.parametrize("offset", (0, 1))
def test_every_byte_but_zero_is_true(offset: int) -> None:
    """Bytes of another dtype that are viewed as bools, by wide loads and by single ones."""
    row_bytes = 512 + offset
    numbers = torch.arange(2 * 200 * row_bytes, device=DEVICE, dtype=torch.int64).view(1, 2, 200, row_bytes)
    numbers = (numbers * 2654435761 >> 7 & 0x1FF).clamp(max=256) % 256  # half of them 0, the others any byte
    numbers[..., :128, :128] = numbers[..., :128, :128].clamp(min=1)  # a full tile
    keys = numbers.to(torch.uint8)[..., offset:]
    check(keys.view(torch.bool), keys != 0)


@pytest.mark.skipif(DEVICE == "cpu", reason="masks on the CPU are packed by PyTorch")
def test_prepared_masks_are_packed_by_it() -> None:
    mask = random_mask(2, 1, 300, 1040)
    assert packs_by_extension(mask) and not packs_by_extension(mask.cpu())
    for found, wanted in zip(
        prepare_mask(mask, is_causal=True).tensors, prepare_mask(mask.cpu(), is_causal=True).tensors, strict=True
    ):
        assert torch.equal(found.cpu(), wanted)
