"""The kernels that pack masks, interpreted against the plain PyTorch version, and compiled for three GPUs.

Triton reads TRITON_INTERPRET when it is imported. An interpreted kernel that reads far out of bounds ends its process,
so every group of checks runs in a process of its own. By hand: TRITON_INTERPRET=1 python
tests/test_mask_pack_interpreter.py layouts
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import forked
import pytest
import torch
from layouts import unbacked
from mask_checks import runs, tiled_mask
from sequence_pack_calls import guarded, random_strides

from flash_dmattn.masks import PreparedMask, topk_mask
from flash_dmattn.masks.prepared import operators, packing
from flash_dmattn.masks.prepared.intervals import first_places, key_intervals, key_order, mask_intervals
from flash_dmattn.masks.prepared.operators import list_intervals
from flash_dmattn.masks.prepared.storage import IntervalMask
from flash_dmattn.masks.topk import score_keys
from flash_dmattn.problem import Band, causal_window, make_band

if TYPE_CHECKING:
    from compiled_triton import Job, Kernel

MISSING = [name for name in ("triton", "numpy") if find_spec(name) is None]

SHAPES = [
    (1, 1, 1, 1), (1, 1, 2, 7), (2, 1, 0, 5), (1, 2, 5, 0), (0, 1, 3, 4), (1, 0, 3, 4), (1, 1, 129, 1), (1, 3, 3, 128),
    (2, 2, 130, 33), (1, 1, 128, 516), (1, 1, 257, 640), (2, 1, 100, 1040), (1, 1, 300, 261),
]  # fmt: skip
WINDOWS = [(False, (-1, -1)), (True, (-1, -1)), (False, (40, 9)), (False, (0, 0)), (True, (200, -1)), (False, (-1, 3))]


def equal(actual: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], what: object) -> None:
    for number, (x, y) in enumerate(zip(actual, wanted, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous(), (what, number)
        assert torch.equal(x, y), (what, number)


def check_random() -> None:
    """Masks of any strides, whose bytes have any value but 0 for True, as `uint8.view(torch.bool)` has them."""
    from flash_dmattn.triton_kernels import interval_pack, key_pack, mask_pack

    for number, (shape, flags) in enumerate(zip(2 * SHAPES, itertools.cycle(WINDOWS))):  # two windows of each shape
        rows, band = shape[2], make_band(*shape[2:], causal_window(*flags))
        laid, how = random_strides(tiled_mask(*shape, seed=number), random.Random(number))
        laid = laid.expand(shape)
        mask, bools = laid.view(torch.bool), laid != 0
        row, flags_of_keys = (x[:, :, :1] if rows else x.new_ones(*shape[:2], 1, shape[3]) for x in (mask, bools))
        bits, places = bits_of(runs(*shape, seed=number)), (shape[3] + 1) // 2
        with guarded() if laid.numel() else nullcontext(), mock.patch.multiple(key_pack, CHUNK=64, SHORT_CHUNK=32):
            packed = mask_pack.pack_mask(mask, band)
            lists = mask_pack.list_tiles(packed[1])
            keys = key_pack.key_set(row)
            limits = key_pack.key_intervals(row, rows, band, True)
            tiles = key_pack.interval_tiles(*limits, rows)
            begins = interval_pack.mask_intervals(*bits)
            few = key_pack.first_places(*limits[:3], places)
        what = (shape, how, flags)
        equal(packed, packing.pack_mask(bools, band), what)
        equal(lists, packing.list_tiles(packed[1]), what)
        equal(keys, packing.key_set(flags_of_keys), what)
        equal(limits, key_intervals(flags_of_keys, rows, band, True), what)
        equal(tiles, list_intervals(*limits, rows), what)
        same_runs(begins, mask_intervals(*bits), what)
        equal(few, first_places(*limits[:3], places), what)


def layouts() -> dict[str, tuple[int, torch.Tensor]]:
    """Masks of (2, 2, 140, 272), with the bytes that a load may take of each; True lies around the slices."""
    dense = tiled_mask(2, 2, 140, 272)

    def shifted(offset: int, width: int, rows: int = 140, keys: int = 272) -> torch.Tensor:
        """`dense` inside a larger allocation, so that a byte read outside shows."""
        storage = torch.ones(offset + 4 * rows * width + 64, dtype=torch.bool)
        inside = storage[offset : offset + 4 * rows * width].view(2, 2, rows, width)[:, :, :140, :keys]
        return inside.copy_(dense[..., :keys])

    return {
        "contiguous": (16, dense),
        "aligned slice": (16, shifted(16, 288)),
        "rows of 4": (4, shifted(4, 276)),
        "16 in rows, 4 in keys": (4, shifted(0, 288, keys=268)),
        "offset 1": (1, shifted(1, 272)),
        "odd rows": (1, shifted(0, 273)),
        "odd keys": (1, shifted(0, 288, keys=271)),
        "transposed": (1, dense.mT.contiguous().mT),
        "heads last": (1, dense.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)),
        "every third key": (1, dense.repeat_interleave(3, dim=3)[..., ::3]),
        "every second row": (16, dense.repeat_interleave(2, dim=2)[:, :, ::2]),
        "one key": (1, dense[..., 5:6].expand(-1, -1, -1, 272)),
        "one row": (16, dense[:, :, 3:4].expand(-1, -1, 140, -1)),
        "one of all": (1, dense[:1, :1, :1, :1].expand(2, 2, 140, 272)),
        "size 1 with an odd stride": (16, dense[1:, :1].as_strided((1, 1, 140, 272), (7, 5, 272, 1), 140 * 272)),
    }


def check_layouts() -> None:
    from flash_dmattn.triton_kernels import mask_pack

    for name, (vector, mask) in layouts().items():
        assert mask_pack.vector_bytes(mask) == vector, (name, mask_pack.vector_bytes(mask))
        band = make_band(140, mask.size(3), (150, 0))
        equal(mask_pack.pack_mask(mask, band), packing.pack_mask(mask, band), name)
    mask, band = tiled_mask(1, 2, 130, 1040), make_band(130, 1040, (400, 300))
    for part in (mask, mask[..., 4:1032], mask[..., 3:1030]):
        for strip in ((128, 4), (256, 4), (1024, 8)):
            equal(mask_pack.pack_mask(part, band, strip=strip), packing.pack_mask(part, band), (part.shape, strip))


def check_lists() -> None:
    from flash_dmattn.triton_kernels import mask_pack

    with mock.patch.multiple(mask_pack, LIST_BLOCK=16):  # several chunks in small tables
        for shape in ((1, 2, 2, 35), (2, 1, 33, 3), (1, 1, 16, 1), (1, 2, 0, 4), (1, 2, 4, 0), (0, 2, 3, 3)):
            classes = torch.randint(3, shape, dtype=torch.uint8)
            lists = mask_pack.list_tiles(classes)
            equal(lists, packing.list_tiles(classes), shape)
            assert all(x.storage_offset() == 0 for x in lists)  # no operator may return two views of one allocation


def check_keys() -> None:
    """Sets of keys and intervals of them, in several chunks, the keys of others counted in several steps."""
    from flash_dmattn.triton_kernels import key_pack, mask_pack

    with mock.patch.multiple(key_pack, SHORT_CHUNK=32, CHUNK=64, MOST_CHUNKS=2):
        for kept in (0.0, 0.4):
            for seqlen_k in (0, 1, 32, 64, 65, 152):
                flags = torch.rand(2, 1, 1, seqlen_k) < kept
                for mask in (flags, flags.repeat_interleave(2, dim=3)[..., ::2], flags.expand(-1, 2, 1, -1)):
                    equal(key_pack.key_set(mask), packing.key_set(mask), (kept, seqlen_k))
                    for seqlen_q, window, reorder in (
                        (20, (-1, -1), True),
                        (200, (10, 3), True),
                        (40, (-1, 0), False),
                    ):
                        arguments = (mask, seqlen_q, make_band(seqlen_q, seqlen_k, window), reorder)
                        equal(key_pack.key_intervals(*arguments), key_intervals(*arguments), (kept, seqlen_k, window))
    with mock.patch.multiple(key_pack, TILES_BLOCK=2), mock.patch.object(mask_pack, "LIST_BLOCK", 16):
        sizes = (1, 1, True), (127, 129, False), (390, 150, True), (0, 5, False), (5, 0, True)
        for seqlen_q, seqlen_k, has_order in sizes:
            mask = torch.rand(1, 2, 1, seqlen_k) < 0.7
            mask[..., :128] = True
            band = make_band(seqlen_q, seqlen_k, (-1, 0))
            arguments = (*key_intervals(mask, seqlen_q, band, has_order), seqlen_q)
            equal(key_pack.interval_tiles(*arguments), list_intervals(*arguments), (seqlen_q, seqlen_k))


def bits_of(mask: torch.Tensor, band: Band | None = None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The arguments of `mask_intervals` for a mask."""
    bits, classes = packing.pack_mask(mask, band)
    return bits, packing.list_tiles(classes)[0], mask.shape[3]


def used(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that somebody has used before."""
    return torch.full(shape, 77, dtype=dtype, device=device)


def same_runs(actual: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], what: object) -> None:
    """Starts, stops and counts where every key has one run; of others, that some key has more."""
    assert actual[2].dtype == torch.int64 and actual[2][0] == wanted[2][0], what
    assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(actual, wanted, strict=True)), what
    if not wanted[2][0]:
        equal(actual, wanted, what)


def check_runs() -> None:
    """Runs that begin and end in any word, and faults of one row: one inside is missing, one far away is there."""
    from flash_dmattn.triton_kernels import interval_pack

    intervals = 0
    for shape in (*SHAPES, (1, 1, 520, 48), (2, 1, 300, 516), (1, 1, 32, 4200), (1, 2, 33, 31)):
        for is_causal, window_size in WINDOWS[::3]:
            band = make_band(*shape[2:], causal_window(is_causal, window_size))
            mask = runs(*shape)
            for inputs in (mask, mask ^ (torch.rand(shape) < 1e-3)):
                bits, wanted = bits_of(inputs, band), mask_intervals(*bits_of(inputs, band))
                # As the product has it, then with several programs for a head.
                for counted in (interval_pack.COUNTED, 32):
                    with (
                        mock.patch.object(interval_pack, "COUNTED", counted),
                        mock.patch.object(interval_pack.torch, "empty", used),
                    ):
                        same_runs(interval_pack.mask_intervals(*bits), wanted, (shape, band, counted))
                intervals += not wanted[2][0]
    assert 16 < intervals < 64, intervals
    with mock.patch.object(interval_pack, "COUNTED", 32):  # more rows of tiles than keys
        numbers = interval_pack.mask_intervals(*bits_of(torch.ones(1, 1, 4300, 5, dtype=torch.bool)))[2]
    assert numbers.tolist() == [0, 5, 5 * 4300, 34]
    for begin, end in ((0, 600), (31, 33), (32, 64), (255, 257), (5, 6), (599, 600), (0, 1), (100, 490)):
        mask = torch.zeros(1, 1, 600, 40, dtype=torch.bool)
        mask[:, :, begin:end, 7] = mask[:, :, begin:end, 31] = True
        start, stop, numbers = interval_pack.mask_intervals(*bits_of(mask))
        assert numbers[:3].tolist() == [0, 2, 2 * (end - begin)]
        assert [(int(start[..., key]), int(stop[..., key])) for key in (7, 31)] == [(begin, end)] * 2
        for row in (begin - 2, end + 1, begin - 40, end + 300, begin + 1):
            if 0 <= row < 600 and not begin + 1 == row >= end - 1:
                other = mask.clone()
                other[:, :, row, 7] ^= True
                assert interval_pack.mask_intervals(*bits_of(other))[2][0] == 1, (begin, end, row)


def check_counts() -> None:
    """Sums beyond 32 bits of a chunk and of all; of heads the fullest, whichever of its programs is last."""
    from flash_dmattn.triton_kernels import interval_pack
    from flash_dmattn.triton_kernels.kernel_launch import launch

    generator = torch.Generator().manual_seed(0)
    for heads, seqlen_k, tiles_q, tiles_k, counted in ((3, 1500, 700, 12, 1024), (2, 40, 90, 3, 16), (1, 1, 1, 1, 64)):
        longest = 2**31 - 1
        start, stop = torch.randint(longest, (2, heads, seqlen_k), generator=generator).sort(dim=0).values
        stop = torch.where(torch.rand(heads, seqlen_k, generator=generator) < 0.4, stop + 1, 0)
        lists = torch.randint(longest, (1, heads, tiles_q, 2 + tiles_k), generator=generator).to(torch.int32)
        begins, ends = start.to(torch.int32), stop.to(torch.int32)
        numbers = torch.zeros(4 + (heads + heads * seqlen_k + 1) // 2, dtype=torch.int64)
        numbers.view(torch.int32)[8 + heads :][: ends.numel()] = ends.flatten()
        actual = torch.full_like(ends, 77)
        chunks = -(-max(seqlen_k, tiles_q) // counted)
        sizes = (heads, seqlen_k, tiles_q, 2 + tiles_k, chunks)
        launch(interval_pack._count_kernel, heads * chunks, (begins, actual, lists, numbers), sizes, (counted,), 4)
        live = stop > 0
        assert torch.equal(actual, ends) and torch.equal(begins, torch.where(live, start, 0).to(torch.int32))
        wanted = [0, live.sum(1).max(), torch.where(live, stop - start, 0).sum(), lists[..., :2].sum(dtype=torch.int64)]
        assert numbers[:4].tolist() == [int(x) for x in wanted]
        assert heads == 1 or min(numbers[2:4].tolist()) > 2**34


def check_recognised() -> None:
    """Masks from bools to the tiles of places, by the packer of GPUs, as PyTorch makes them."""
    from flash_dmattn.dispatch.packers import _triton_packer

    by_kernels = _triton_packer()
    assert by_kernels is not None
    scores = torch.randn(2, 2, 1, 1300)
    few, most = (topk_mask(scores, kept, is_causal=True) for kept in (20, 700))
    for mask, wanted in ((few, 128), (most, 1300), (few & (torch.rand(few.shape) < 0.9), 0)):
        made = []
        for actual in (by_kernels, operators.PYTORCH):
            with mock.patch.object(operators, "_find_faster", lambda tensor, actual=actual: actual):
                made.append(PreparedMask.from_mask(mask, is_causal=True, find_intervals=True, reorder=True))
        assert all(x.num_places == wanted for x in made if isinstance(x, IntervalMask)), wanted
        assert all(isinstance(x, IntervalMask) is bool(wanted) for x in made)
        equal(made[0].tensors, made[1].tensors, wanted)


def check_places() -> None:
    """The first places of orders, of one program and of several."""
    from flash_dmattn.triton_kernels import key_pack

    for shape in ((2, 3, 300), (1, 1, 129), (0, 2, 50), (1, 2, 7)):
        start, stop = torch.randint(90, (2, *shape), dtype=torch.int32).sort(dim=0).values
        order = key_order(start, stop, 90)
        for places in {1, shape[2] // 2, shape[2]}:
            for block in (key_pack.PLACES_BLOCK, 32):
                with (
                    mock.patch.object(key_pack, "PLACES_BLOCK", block),
                    mock.patch.object(key_pack.torch, "empty", used),
                ):
                    actual = key_pack.first_places(start, stop, order, places)
                equal(actual, first_places(start, stop, order, places), (shape, places))


def check_scores() -> None:
    """Integers in the order of scores, of every float dtype: zeros of both signs, NaN, infinities, what is left out."""
    from flash_dmattn.triton_kernels import key_pack

    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 6e-8])
    allowed = torch.rand(2, 1, 1, 1100) < 0.8
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        scores = torch.randn(1, 3, 1, 1100)
        scores[..., :800] = special[torch.randint(8, (1, 3, 1, 800))]
        scores = scores.to(dtype)
        for inputs, flags in (
            (scores, None),
            (scores, allowed),
            (scores.mT.contiguous().mT[..., ::3], allowed[..., :1]),
            (scores[:, :1], allowed),
            (scores[..., :0], None),
        ):
            actual, wanted = key_pack.score_keys(inputs, flags), score_keys(inputs, flags)
            equal((actual,), (wanted,), (dtype, inputs.shape))


def check_offsets_beyond_int32() -> None:
    """Masks that span up to 2^34 bytes and touch few: the rest is never backed by memory."""
    from flash_dmattn.triton_kernels import key_pack, mask_pack

    storage = unbacked(1 << 34, torch.bool)
    # Loads count their own width, so the wider they are, the farther lies what 32 bits do not reach.
    for shape, strides in (
        ((2, 2, 20, 48), (1 << 20, 1 << 21, 1 << 29, 1)),
        ((2, 2, 20, 48), (1 << 20, 1 << 21, (1 << 29) + 4, 1)),
        ((2, 2, 20, 48), (1 << 20, 1 << 21, (1 << 27) + 1, 1)),
        ((2, 2, 20, 48), (1 << 20, 1 << 21, 16, 1 << 26)),
        ((4, 1, 3, 40), ((1 << 30) + 1, 0, 64, 1)),
        ((1, 4, 3, 40), (0, (1 << 30) + 1, 64, 1)),
    ):
        mask = storage.as_strided(shape, strides)
        mask.copy_(tiled_mask(*shape))
        equal(mask_pack.pack_mask(mask, None), packing.pack_mask(mask, None), strides)
    wide_keys, wide_heads = (1, 1 << 30, 1, 1 << 25), ((1 << 30) + 1, (1 << 30) + 64, 1, 1)
    for shape, strides in (((2, 2, 1, 70), wide_keys), ((4, 4, 1, 9), wide_heads)):
        keys = storage.as_strided(shape, strides)
        keys.copy_(tiled_mask(*shape))
        equal(key_pack.key_set(keys), packing.key_set(keys), strides)
        equal(key_pack.key_intervals(keys, 9, None, True), key_intervals(keys, 9, None, True), strides)


INTERPRETED: dict[str, Callable[[], None]] = {
    "random": check_random,
    "layouts": check_layouts,
    "lists": check_lists,
    "keys": check_keys,
    "runs": check_runs,
    "counts": check_counts,
    "places": check_places,
    "recognised": check_recognised,
    "scores": check_scores,
    "beyond_int32": check_offsets_beyond_int32,
}


@pytest.mark.skipif(bool(MISSING), reason=f"interpreting a kernel needs {' and '.join(MISSING)}")
@pytest.mark.parametrize("check", INTERPRETED)
def test_interpreted(check: str) -> None:
    forked.interpret(Path(__file__).name, check)


def frugal(job: Job) -> tuple[Kernel, dict[str, Any], set[str], set[str]]:
    """Compile a kernel that packs: its constants, and how wide it loads and stores; nothing spills."""
    kernel = job.compile()
    what = f"{kernel.name} {job.constants}: {kernel[3:6]}"
    # 128 registers let two programs of 256 threads share an SM: one loads while the other stores.
    assert kernel.registers <= 128 and kernel.stack == 0, what
    assert kernel.shared <= (32768 if kernel.name == "key_intervals" else 16384), what
    constants = {job.kernel.arg_names[place[0]]: value for place, value in job.constants.items()}
    loads, stores = (set(re.findall(rf"{word}\.global\.(\S+)", kernel.text)) for word in ("ld", "st"))
    return kernel, constants, loads, stores


@pytest.mark.skipif("triton" in MISSING, reason="compiling a kernel needs triton")
@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "sm_100"))
def test_compiled(arch: str) -> None:
    """One predicate for 16 bytes: a mask that cannot be seen to be uniform would split the loads."""
    from compiled_triton import packing_jobs

    seen = set()
    for job in {job.key: job for job in packing_jobs(arch)}.values():
        if job.name == "score_keys":  # it divides integers of 64 bits, by a call that takes a frame
            continue
        kernel, constants, loads, stores = frugal(job)
        seen.add(kernel.name)
        if kernel.name == "runs":
            # Each thread would load for itself whether to leave, and some would, while the others wait for them.
            assert loads == {"v4.b32"} and "volatile" not in kernel.text
        elif kernel.name == "pack":
            assert loads == {{16: "v4.b32", 4: "b32", 1: "b8"}[constants["VEC"]]} and stores == {"v4.b32", "b8"}
            seen.add((constants["VEC"], bool(constants["HAS_BAND"])))
    assert seen >= {(vector, band) for vector in (16, 4, 1) for band in (False, True)}
    assert seen >= {"runs", "count", "first_places", "list", "key_set", "key_intervals", "interval_tiles"}


if __name__ == "__main__":
    torch.manual_seed(0)
    from quick_interpreter import make_quick

    make_quick()
    INTERPRETED[sys.argv[1]]()
