"""Masks made by the CUDA extension, bit for bit as by plain PyTorch; `benchmarks.mask_pack` has larger ones to pack.

It runs on a GPU, and on the emulated one.
"""

from __future__ import annotations

import emulated_cuda
import pytest
import torch
from cases import DEVICE
from torch import Tensor

from flash_dmattn.dispatch.packers import around_extension, packs_by_extension
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.operators import PYTORCH
from flash_dmattn.masks.topk import sort_keys
from flash_dmattn.problem import causal_window, make_band

# The last has columns of 514 tiles, whose lists are long.
SHAPES = ((2, 3, 1, 1), (1, 2, 7, 130), (2, 2, 300, 1040), (1, 1, 1000, 4096), (2, 1, 129, 4095), (1, 1, 65700, 150))
EMPTY_SHAPES = ((2, 1, 0, 5), (1, 2, 130, 0), (0, 1, 3, 4), (1, 0, 3, 4), (1, 1, 0, 0))
BANDS = ((False, (-1, -1)), (True, (-1, -1)), (False, (200, 30)), (True, (0, -1)))


@pytest.fixture(autouse=True)
def extension() -> None:
    availability = BACKENDS["cuda"].probe()
    if not availability.usable:
        pytest.skip(f"cuda: {availability.reason}")


def check(mask: Tensor, same: Tensor | None = None) -> None:
    """Compare the extension's results for a mask with plain PyTorch's, for it or for one that means the same."""
    seqlen_q, seqlen_k = mask.shape[2:]
    for is_causal, window_size in BANDS:
        band = make_band(seqlen_q, seqlen_k, causal_window(is_causal, window_size))
        actual = torch.ops.flash_dmattn.cuda_pack_mask(mask, *(band or (0, 0)), band is not None)
        bits, classes = packing.pack_mask(mask if same is None else same, band)
        wanted = (bits, classes, *packing.list_tiles(classes))
        for name, x, y in zip(("bits", "classes", "row_lists", "col_lists"), actual, wanted, strict=True):
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
    for actual, wanted in zip(
        PreparedMask.from_mask(mask, is_causal=True).tensors,
        PreparedMask.from_mask(mask.cpu(), is_causal=True).tensors,
        strict=True,
    ):
        assert torch.equal(actual.cpu(), wanted)


# Interval masks


@pytest.mark.parametrize("kind", ("ties", "rise", "fall"))
@pytest.mark.parametrize("length", (1, 255, 256, 257, 700))
def test_top_k_as_intervals(length: int, kind: str) -> None:
    """Stops, order, bounds and lists, of scores with ties, NaN and forbidden keys."""
    random, extension = torch.Generator().manual_seed(length), around_extension(torch.ops.flash_dmattn)
    scores = torch.randn(2, 1, length, generator=random).round(decimals=1)
    scores = scores if kind == "ties" else scores.sort(-1, descending=kind == "fall").values
    scores[..., ::7] = torch.nan
    keys = sort_keys(scores.to(DEVICE), (torch.rand(scores.shape, generator=random) < 0.9).to(DEVICE))
    for k in (1, 5, 256, 300):
        for seqlen_q, local in ((length, 0), (max(1, length - 9), 20), (length + 130, 2**40)):
            start, stop = PYTORCH.topk_intervals(keys, k, seqlen_q, local)
            order = PYTORCH.key_order(start, stop, seqlen_q)
            wanted = (start, stop, order, *PYTORCH.interval_tiles(start, stop, order, seqlen_q))
            actual = (*extension.topk_intervals(keys, k, seqlen_q, local), extension.key_order(start, stop, seqlen_q))
            actual += extension.interval_tiles(start, stop, order, seqlen_q)
            for name, x, y in zip(FIELDS, actual, wanted, strict=True):
                assert torch.equal(x, y), f"{name}, k {k}, {seqlen_q} queries, {local} local"


FIELDS = ("start", "stop", "order", "bounds", "row_lists", "col_lists")


@pytest.mark.parametrize("k", (300, 5000))
@pytest.mark.parametrize("length", (16_384, 16_385, 65_537, 100_000))
def test_top_k_of_long_rows(length: int, k: int) -> None:
    """Their keys are taken 256 at a time up to 16384, 512 up to 65536, and then 1024, in segments of 32768."""
    scores = torch.randn(1, 1, length, generator=torch.Generator().manual_seed(k)).round(decimals=1).to(DEVICE)
    keys, extension = sort_keys(scores, None), around_extension(torch.ops.flash_dmattn)
    actual, wanted = (made.topk_intervals(keys, k, length, 0) for made in (extension, PYTORCH))
    assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k",
    ((1, 1), (128, 128), (300, 257), (1, 700), (700, 1), (0, 5), (5, 0), (300, 65700), (4096, 65536)),
)
def test_tiles_of_intervals(seqlen_q: int, seqlen_k: int) -> None:
    """Full tiles, empty ones and others, by key and by place; and the bits that mean the same. Rows of 512 are long."""
    extension = around_extension(torch.ops.flash_dmattn)
    start, stop = torch.randint(-3, seqlen_q + 4, (2, 2, 2, seqlen_k), generator=torch.Generator().manual_seed(0))
    start[0, 0], stop[0, 0] = 0, seqlen_q
    start[1, 0], stop[1, 0] = seqlen_q // 3, 2 * seqlen_q // 3
    mask = PreparedMask.from_intervals(start, stop, seqlen_q, reorder=True).to(DEVICE)
    for order in (mask.order, mask.order[:, :, :0].contiguous()):
        actual = extension.interval_tiles(mask.start, mask.stop, order, seqlen_q)
        wanted = PYTORCH.interval_tiles(mask.start, mask.stop, order, seqlen_q)
        for name, x, y in zip(FIELDS[3:], actual, wanted, strict=True):
            assert torch.equal(x, y), f"{name}, {order.shape[2]} places"
        if seqlen_q * seqlen_k > 2**26:
            continue  # as many bits as take a minute here
        dense = mask.unpacked()
        if order.shape[2]:
            dense = dense.gather(3, order.long()[:, :, None].expand_as(dense))
        bits = torch.ops.flash_dmattn.cuda_interval_bits(actual[0], seqlen_q)
        assert torch.equal(bits, packing.pack_mask(dense, None)[0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_what_it_does_not_make(dtype: torch.dtype) -> None:
    """PyTorch does: sort keys of fp64 scores have 64 bits, and codes of so many heads would need more than 32."""
    extension = around_extension(torch.ops.flash_dmattn)
    keys = sort_keys(torch.randn(2, 1, 50, dtype=dtype, device=DEVICE), None)
    for x, y in zip(extension.topk_intervals(keys, 9, 50, 0), PYTORCH.topk_intervals(keys, 9, 50, 0), strict=True):
        assert torch.equal(x, y)
    heads = 2**15
    start = torch.arange(3, dtype=torch.int32, device=DEVICE).repeat(1, heads, 1)
    order = extension.key_order(start, start.flip(-1), 3)
    assert torch.equal(order, PYTORCH.key_order(start, start.flip(-1), 3))
    assert order[0, -1].tolist() == [0, 1, 2]


@pytest.mark.skipif(DEVICE == "cpu", reason="masks on the CPU are made by PyTorch")
def test_interval_masks_are_made_by_it() -> None:
    scores = torch.randn(1, 2, 1, 900, device=DEVICE).round(decimals=1)
    one, other = (PreparedMask.from_topk(x, 60, is_causal=True, local=5, reorder=True) for x in (scores, scores.cpu()))
    assert all(torch.equal(x.cpu(), y) for x, y in zip(one.tensors, other.tensors, strict=True))


# Masks with one row for all queries

WINDOWS = ((-1, -1), (-1, 0), (200, 30), (0, 0), (-5, 3), (3, -5))


def check_keys(mask: Tensor, seqlen_q: int) -> None:
    """Compare the intervals of a mask (B, H, 1, Lk) with those of plain PyTorch, with and without an order of keys."""
    extension = around_extension(torch.ops.flash_dmattn)
    for window in WINDOWS:
        band = make_band(seqlen_q, mask.shape[3], window)
        for reorder in (False, True):
            actual, fresh = extension.row_intervals(mask, seqlen_q, band, reorder)
            start, stop, order = PYTORCH.key_intervals(mask, seqlen_q, band, reorder)
            wanted = (start, stop, order, *PYTORCH.interval_tiles(start, stop, order, seqlen_q))
            assert not fresh
            for name, x, y in zip(FIELDS, actual, wanted, strict=True):
                assert torch.equal(x, y), f"{name}, {seqlen_q} queries, window {window}, reorder {reorder}"


@pytest.mark.parametrize("density", (0.0, 0.03, 0.5, 1.0))
@pytest.mark.parametrize("seqlen_q", (0, 1, 130, 1000))
@pytest.mark.parametrize("shape", ((2, 3, 130), (1, 1, 1), (1, 2, 1040), (2, 1, 4095), (0, 1, 4), (1, 0, 4), (1, 1, 0)))
def test_masks_of_keys(shape: tuple[int, int, int], seqlen_q: int, density: float) -> None:
    """Scattered keys, runs that fill tiles, no keys and all."""
    mask = torch.rand(*shape[:2], 1, shape[2], generator=torch.Generator().manual_seed(0)) < density
    if density == 0.5:
        mask[..., :400], mask[..., 400:700] = True, False
    check_keys(mask.to(DEVICE), seqlen_q)


def test_masks_of_keys_of_any_strides() -> None:
    """Transposed, of every second byte, of other numbers than 1, between wide loads, expanded."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(3, (2, 2, 1, 1200), generator=generator, dtype=torch.uint8).mul_(127).to(DEVICE)
    wide = numbers.view(torch.bool)
    for mask in (
        wide,
        wide[..., ::2],
        wide.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        wide[..., 8:1032],
        wide[..., 16:1040],
        wide[..., :1].expand(-1, -1, -1, 700),
        wide[:1, :1].expand(3, 2, -1, -1),
    ):
        check_keys(mask, 300)


@pytest.mark.parametrize("seqlen_k", (2**18, 2**18 + 1))
def test_the_longest_mask_of_keys(seqlen_k: int) -> None:
    """The last one fills the shared memory of a block; longer ones go another way."""
    mask = (torch.arange(seqlen_k, device=DEVICE) % 5000 < 2).view(1, 1, 1, -1)
    extension = around_extension(torch.ops.flash_dmattn)
    actual, _ = extension.row_intervals(mask, 100, None, True)
    start, stop, order = PYTORCH.key_intervals(mask, 100, None, True)
    wanted = (start, stop, order, *PYTORCH.interval_tiles(start, stop, order, 100))
    assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))


def test_more_masks_of_keys_than_threads_count_in_int32() -> None:
    """2^23 blocks of 256 threads, of masks without keys: on an emulated GPU they only come to be launched."""
    masks = 2**23 + 1
    mask = torch.ones(masks, 1, 1, 0, dtype=torch.bool, device=DEVICE)
    emulated = DEVICE == "cpu"
    if emulated:
        emulated_cuda.launches(leaves_out=True)
    try:
        made = torch.ops.flash_dmattn.cuda_key_mask(mask, 1, -1, 0, False, True, None, None, None)
    finally:
        if emulated:
            emulated_cuda.launches()
    row_lists, counters = made[4], made[6]
    assert row_lists.shape == (masks, 1, 1, 2) and counters.shape == (4096,)
    assert emulated or not (row_lists.any() or counters.any())


@pytest.mark.parametrize(
    ("mask_shape", "bias_shape"),
    (((1, 1), (1, 1)), ((1, 2), (1, 4)), ((3, 1), (3, 4)), ((3, 2), (1, 2)), ((1, 4), (3, 1)), ((3, 4), None)),
)
@pytest.mark.parametrize("bias_dtype", (torch.float32, torch.bfloat16), ids=str)
def test_keys_are_gathered_as_by_the_operator(
    mask_shape: tuple[int, int], bias_shape: tuple[int, int] | None, bias_dtype: torch.dtype
) -> None:
    """Live tiles are compared, with zeros at their dead places. Counters are 0."""
    generator, keys = torch.Generator().manual_seed(0), 600
    draw = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)
    k, v = draw(3, 4, keys, 64).bfloat16().transpose(1, 2), draw(3, keys, 4, 72).bfloat16()[..., :40]
    bias = None if bias_shape is None else draw(*bias_shape, keys, 1).to(bias_dtype).mT
    mask = (torch.rand(*mask_shape, 1, keys, generator=generator) < 0.3).to(DEVICE)
    mask[:1, :, :, 100:] = False
    band = make_band(500, keys, (-1, 0))
    extension = around_extension(torch.ops.flash_dmattn)
    made, (counters, *gathered) = extension.row_intervals(mask, 500, band, True, k, v, bias)
    start, _, order, bounds, *_ = made
    wanted = torch.ops.flash_dmattn.cuda_gather_keys(k, v, bias, order, bounds)
    assert counters.dtype == torch.int32 and counters.numel() > 1000 and not counters.any()
    live = (made[1] > start).sum(-1)
    assert live.max() > 100 > live.min() > 0 or mask_shape[0] == 1
    assert len(gathered) == len(wanted) == (2 if bias is None else 3)
    for name, actual, other, source in zip("kv", gathered, wanted, (k, v), strict=False):
        for batch in range(3):
            for head in range(4):
                row = min(batch, mask_shape[0] - 1), head * mask_shape[1] // 4
                places, number = order[row].long(), int(live[row])
                end = min(keys, -(-number // packing.TILE) * packing.TILE)
                by_place = source[batch, places[:end], head].clone()
                by_place[number:] = 0
                assert torch.equal(actual[batch, :end, head], by_place), name
                assert torch.equal(other[batch, :end, head], by_place), name
    if bias is not None:
        heads, batch = max(mask_shape[1], bias.shape[1]), max(mask_shape[0], bias.shape[0])
        orders = order.repeat_interleave(heads // mask_shape[1], 1).expand(batch, -1, -1)[:, :, None].long()
        by_place = bias.float().repeat_interleave(heads // bias.shape[1], 1).expand(batch, -1, -1, -1).gather(3, orders)
        assert torch.equal(gathered[2], by_place) and torch.equal(wanted[2], by_place)
