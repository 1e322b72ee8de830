"""Times the packing kernels of Triton and CUDA on a GPU, as a share of the bandwidth of a copy, and compares their bits
with PyTorch's.

python -m benchmarks.mask_pack           # equality, then the table; exit status 1 if a bit differs
python -m benchmarks sweep strips        # every strip size, for STRIP in triton_kernels/mask_pack.py
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.storage import TileMask
from flash_dmattn.problem import Band, causal_window, make_band

from .machine import device_name

STRIPS = [(keys, warps) for keys in (128, 256, 512, 1024) for warps in (2, 4, 8, 16)]


def random_mask(*shape: int) -> torch.Tensor:
    """Return random bools, with some tiles full and some empty."""
    mask = torch.empty(shape, dtype=torch.bool, device="cuda")
    mask.view(torch.uint8).random_(0, 2)
    mask[..., : shape[-2] // 3, : shape[-1] // 2] = True
    mask[..., shape[-2] // 2 :, : shape[-1] // 3] = False
    return mask


def equality_cases() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield masks of every load width, broadcast form and layout, more than 65535 heads, more than 2^31 elements."""
    for shape in ((2, 3, 1, 1), (1, 2, 7, 130), (2, 2, 300, 1040), (1, 1, 1000, 4096), (2, 1, 129, 4095)):
        yield str(shape), random_mask(*shape)
    wide = random_mask(2, 2, 500, 1200)
    yield "slice by 16", wide[..., 16:1040]
    yield "slice by 4", wide[..., 4:1032]
    yield "slice by 1", wide[..., 1:1030]
    yield "transposed", wide.mT
    yield "heads last", wide.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    yield "every second key", wide[..., ::2]
    yield "one key", wide[..., :1].expand(-1, -1, -1, 700)
    yield "one of all", wide[:1, :1, :1, :1].expand(2, 2, 300, 700)
    yield "70000 heads", random_mask(35000, 2, 4, 40)
    yield "2.6e9 elements", random_mask(1, 1, 65536, 40000)
    yield "7e10 positions, so 2.2e9 words", random_mask(1, 1, 2, 1 << 18)[:, :, :1].expand(-1, -1, 270_000, -1)
    yield "2.6e9 elements by columns", random_mask(1, 1, 40000, 65536).mT


def cuda_tile_mask(mask: torch.Tensor, band: Band | None) -> list[torch.Tensor]:
    """Bits, classes and lists by the operator of the CUDA extension, which has to be loaded."""
    low, high = band or (0, 0)
    return torch.ops.flash_dmattn.cuda_pack_mask(mask, low, high, band is not None)


def compare(extension: bool) -> bool:
    """Print where the kernels and plain PyTorch on the same GPU differ; return whether all bits are equal."""
    from flash_dmattn.triton_kernels import key_pack, mask_pack

    good = True
    for name, mask in equality_cases():
        seqlen_q, seqlen_k = mask.shape[2:]
        differs = []
        for is_causal, window_size in ((False, (-1, -1)), (True, (-1, -1)), (False, (200, 30))):
            band = make_band(seqlen_q, seqlen_k, causal_window(is_causal, window_size))
            bits, classes = mask_pack.pack_mask(mask, band)
            wanted_bits, wanted_classes = packing.pack_mask(mask, band)
            pairs = [("bits", bits, wanted_bits), ("classes", classes, wanted_classes)]
            lists = zip(mask_pack.list_tiles(classes), packing.list_tiles(wanted_classes), strict=True)
            pairs += [(field, *pair) for field, pair in zip(("row_lists", "col_lists"), lists, strict=True)]
            differs += [f"{field} (band {band})" for field, x, y in pairs if not torch.equal(x, y)]
            if extension:
                wanted = (wanted_bits, wanted_classes, *packing.list_tiles(wanted_classes))
                equal = [torch.equal(x, y) for x, y in zip(cuda_tile_mask(mask, band), wanted, strict=True)]
                differs += [] if all(equal) else [f"cuda (band {band})"]
                del wanted
            del bits, wanted_bits, pairs
        keys = mask[:, :, -1:]
        sets = zip(("kept", "count", "prefix"), key_pack.key_set(keys), packing.key_set(keys), strict=True)
        differs += [field for field, x, y in sets if not torch.equal(x, y)]
        print(f"{'DIFFERENT' if differs else 'equal':10}{name} {', '.join(differs)}")
        good &= not differs
    return good


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of one run on the device, after three to warm up."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def host_microseconds(run: Callable[[], object], repeats: int = 200) -> float:
    """Time that the host needs to enqueue one run."""
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * elapsed / repeats


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a copy of 1 GiB."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * milliseconds(lambda: target.copy_(source)))


def result_bytes(prepared: object) -> int:
    fields = (getattr(prepared, field.name) for field in dataclasses.fields(prepared))  # type: ignore[arg-type]
    return sum(x.numel() * x.element_size() for x in fields if isinstance(x, torch.Tensor))


def table(copy: float, extension: bool) -> None:
    """Print the time of packing, of the lists, and of both: by `from_mask`, and by the extension."""
    from flash_dmattn.triton_kernels import mask_pack

    print(f"{'mask':34}{'load':>6}{'pack ms':>9}{'lists ms':>9}{'both ms':>9}{'GB/s':>7}{'of copy':>9}{'cuda ms':>9}")
    for length, is_causal in itertools.product((16384, 8192, 16380, 16383), (False, True)):
        mask = random_mask(1, 4, length, length)
        band = make_band(length, length, causal_window(is_causal, (-1, -1)))
        prepared = PreparedMask.from_mask(mask, is_causal=is_causal)
        assert isinstance(prepared, TileMask)  # only a mask of one row is not
        pack = milliseconds(partial(mask_pack.pack_mask, mask, band))
        lists = milliseconds(partial(mask_pack.list_tiles, prepared.classes))
        both = milliseconds(partial(PreparedMask.from_mask, mask, is_causal=is_causal))
        read = mask.numel()
        if is_causal:  # the tiles above the diagonal are not read
            tiles = packing.tiles(length)
            read = read * (tiles + 1) // (2 * tiles)
        rate = (read + result_bytes(prepared)) / (1e-3 * both)
        name = f"(1, 4, {length}, {length})" + (" causal" if is_causal else "")
        load = mask_pack.vector_bytes(mask)
        by_cuda = f"{milliseconds(partial(cuda_tile_mask, mask, band)):9.3f}" if extension else ""
        print(f"{name:34}{load:>5}B{pack:9.3f}{lists:9.3f}{both:9.3f}{1e-9 * rate:7.0f}{rate / copy:9.1%}{by_cuda}")
    keys = random_mask(2, 8, 2, 32768)[:, :, :1]
    print(
        f"{'keys (2, 8, 1, 32768)':34}{'':6}{milliseconds(lambda: PreparedMask.from_mask(keys, seqlen_q=32768)):27.3f}"
    )
    small = random_mask(1, 2, 128, 128)
    tile_host = host_microseconds(lambda: PreparedMask.from_mask(small))
    key_host = host_microseconds(lambda: PreparedMask.from_mask(small[:, :, :1], seqlen_q=128))
    print(f"host time of from_mask: {tile_host:.1f} us on (1, 2, 128, 128), {key_host:.1f} us on (1, 2, 1, 128)")


def sweep(copy: float) -> None:
    """Print packing alone for every strip size, best first, for each load width, without and with a causal band."""
    from flash_dmattn.triton_kernels import mask_pack

    for length, is_causal in itertools.product((16384, 16380, 16383), (False, True)):
        mask, band = random_mask(1, 4, length, length), make_band(length, length, causal_window(is_causal, (-1, -1)))
        runs = {strip: partial(mask_pack.pack_mask, mask, band, strip=strip) for strip in STRIPS}
        times = sorted((milliseconds(run), strip) for strip, run in runs.items())
        print(f"{mask_pack.vector_bytes(mask)} bytes a load, {'causal' if is_causal else 'no band'}:")
        for took, (keys, warps) in times:
            share = "" if is_causal else f"{1.125 * mask.numel() / (1e-3 * took) / copy:8.1%} of copy"
            print(f"  {keys:5} keys {warps:3} warps {took:8.3f} ms{share}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    availability = cuda.probe()
    if not availability.usable:
        print(f"without the kernels of the CUDA extension: {availability.reason}")
    good = compare(availability.usable)
    copy = copy_bandwidth()
    print(f"{device_name(torch.device('cuda'))}: copy {1e-9 * copy:.0f} GB/s")
    table(copy, availability.usable)
    return 0 if good else 1


def run_sweep(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("sweep strips: torch finds no GPU on this machine.", file=sys.stderr)
        return 2
    sweep(copy_bandwidth())
    return 0


def add_parser(searches: Any) -> None:
    command = searches.add_parser("strips", help="strips of the mask packing of Triton")
    command.set_defaults(run=run_sweep)


if __name__ == "__main__":
    sys.exit(main())
