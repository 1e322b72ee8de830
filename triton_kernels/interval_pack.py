"""The kernels that find the queries of each key of a bool mask, and whether they are one run.

The mask is read once, a byte for an element, and a block of 256 rows adds to three words of each key that some of them
see. A thread reads 32 rows of a few keys and turns the column of each into the bits of a word w. If its bits are one
run, the lowest is w & -w, the highest w & ~(w >> 1), and adding the lowest clears them all:

    is one run = ((w + (w & -w)) & w) == 0

The runs of several words are one if as many queries see the key as there are from the first to the last. A block that
finds more runs in a word says so, and later blocks return at once: of a mask that is no intervals little is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_dmattn.masks.prepared.mask_intervals import MaskIntervals
from flash_dmattn.problem import Band

from .kernel_launch import launch
from .mask_pack import ones_below, vector_bytes

# Keys of a strip, and warps, by the bytes of a load. Each warp takes 32 rows; 8 loads of 16 bytes are in flight.
STRIP = {16: (512, 8), 4: (256, 8), 1: (64, 8)}
WORD = 32
# Keys of a program that looks at the sums.
SUMS_BLOCK, SUMS_NUM_WARPS = 1024, 4


@triton.jit
def _eight_rows(
    mask_ptr, first_rows, first_key, seqlen_q, seqlen_k, stride_q, stride_k,
    VEC: tl.constexpr, LANES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Bit n of the result (LANES, BLOCK_K): whether row `first_rows + n` sees the key, n < 8."""
    numbers = tl.arange(0, 8)
    rows = numbers[:, None] + first_rows[None, :]
    starts = (rows.to(tl.int64) * stride_q)[:, :, None]
    is_row = (rows < seqlen_q)[:, :, None]
    shifts = numbers.to(tl.uint32)[:, None, None]
    if VEC == 1:
        keys = first_key + tl.arange(0, BLOCK_K)
        offsets = starts + (keys.to(tl.int64) * stride_k)[None, None, :]
        sees = tl.load(mask_ptr + offsets, mask=is_row & (keys < seqlen_k)[None, None, :], other=0) != 0
        return tl.sum(sees.to(tl.uint32) << shifts, axis=0)
    quads = tl.arange(0, BLOCK_K // 4)
    # One predicate for all bytes of a load, and seen to be; stride_q counts loads.
    inside = first_key + quads // (VEC // 4) * VEC < seqlen_k
    four = tl.load(
        mask_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        + starts * (VEC // 4)
        + (first_key // 4 + quads)[None, None, :],
        mask=is_row & inside[None, None, :],
        other=0,
    ).to(tl.uint32, bitcast=True)
    # Bit 7 of a byte is set by the sum if any lower bit is.
    ones = ((((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) & 0x80808080) >> 7
    columns = tl.sum(ones << shifts, axis=0)  # byte k has 8 rows of key k of the quad
    of_keys = (columns[:, :, None] >> (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, :]) & 0xFF
    return tl.reshape(of_keys, (LANES, BLOCK_K))


@triton.jit
def _position(bit):
    """Which bit is set, of words that have one: the exponent of the number."""
    return (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit(
    do_not_specialize=[
        "seqlen_q", "seqlen_k", "num_heads", "stride_b", "stride_h", "low", "high", "blocks", "strips", "total",
    ]
)  # fmt: skip
def _runs_kernel(
    mask_ptr, sums_ptr, flag_ptr,
    seqlen_q, seqlen_k, num_heads, stride_b, stride_h, stride_q, stride_k, low, high, blocks, strips, total,
    VEC: tl.constexpr, HAS_BAND: tl.constexpr, LANES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs read neighbouring keys of the same rows.
    strip = tl.program_id(0) % strips
    block = tl.program_id(0) // strips % blocks
    head = tl.program_id(0) // strips // blocks
    first_row, first_key = block * (LANES * 32), strip * BLOCK_K
    wanted = tl.load(flag_ptr, volatile=True) != 0  # not from the cache of an earlier block
    if HAS_BAND:
        wanted &= (first_key + (BLOCK_K - 1) >= first_row + low) & (first_key <= first_row + (LANES * 32 - 1) + high)
    if wanted:
        start = (head // num_heads).to(tl.int64) * stride_b + (head % num_heads).to(tl.int64) * stride_h
        mask_ptr += start * VEC
        rows = first_row + tl.arange(0, LANES) * 32
        words = tl.zeros((LANES, BLOCK_K), tl.uint32)
        for step in range(0, 32, 8):
            some = _eight_rows(
                mask_ptr, rows + step, first_key, seqlen_q, seqlen_k, stride_q, stride_k, VEC, LANES, BLOCK_K
            )  # fmt: skip
            words |= some << step
        keys = first_key + tl.arange(0, BLOCK_K)
        if HAS_BAND:
            ahead = keys[None, :] - rows[:, None]
            # low <= high, so the bits of the second term are among those of the first.
            words &= ones_below(ahead - low + 1) ^ ones_below(ahead - high)
        lowest = words & (words ^ (words - 1))
        gaps = ((words + lowest) & words) != 0
        if tl.max(tl.max(gaps.to(tl.int32), axis=1), axis=0) != 0:
            tl.store(flag_ptr, 0)
        is_seen = words != 0
        first = tl.where(is_seen, rows[:, None] + _position(lowest), seqlen_q)
        end = tl.where(is_seen, rows[:, None] + (_position(words ^ (words & (words >> 1))) + 1), 0)
        count = tl.sum(tl.where(is_seen, end - first, 0), axis=0)
        at = sums_ptr + head.to(tl.int64) * seqlen_k + keys
        some_see = (count > 0) & (keys < seqlen_k)
        # Sums begin at 0, so the first query is kept as its distance from the end.
        tl.atomic_max(at, seqlen_q - tl.min(first, axis=0), mask=some_see, sem="relaxed")
        tl.atomic_max(at + total, tl.max(end, axis=0), mask=some_see, sem="relaxed")
        tl.atomic_add(at + 2 * total.to(tl.int64), count, mask=some_see, sem="relaxed")


@triton.jit(do_not_specialize=["seqlen_q", "total"])
def _sums_kernel(sums_ptr, start_ptr, stop_ptr, flag_ptr, seqlen_q, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    stop = tl.load(sums_ptr + total + at, mask=inside, other=0)
    count = tl.load(sums_ptr + 2 * total.to(tl.int64) + at, mask=inside, other=0)
    start = tl.where(stop > 0, seqlen_q - tl.load(sums_ptr + at, mask=inside, other=0), 0)
    tl.store(start_ptr + at, start, mask=inside)
    tl.store(stop_ptr + at, stop, mask=inside)
    if tl.max((count != stop - start).to(tl.int32), axis=0) != 0:
        tl.store(flag_ptr, 0)


def mask_intervals(mask: torch.Tensor, band: Band | None) -> MaskIntervals:
    """Launch both kernels; the result of `flash_dmattn.masks.prepared.mask_intervals.mask_intervals`.

    Args:
        mask: bool (Bm, Hm, Lq, Lk), any strides, 0 included.
        band: what is folded in; blocks outside it are not read.
    """
    batch, num_heads, seqlen_q, seqlen_k = mask.shape
    start, stop = (torch.empty(batch, num_heads, seqlen_k, dtype=torch.int32, device=mask.device) for _ in range(2))
    is_intervals = torch.ones((), dtype=torch.bool, device=mask.device)
    total = start.numel()
    if total:
        sums, flag = torch.zeros(3, total, dtype=torch.int32, device=mask.device), is_intervals.view(torch.uint8)
        vec = vector_bytes(mask)
        block_k, lanes = STRIP[vec]
        blocks, strips = triton.cdiv(seqlen_q, lanes * WORD), triton.cdiv(seqlen_k, block_k)
        programs = batch * num_heads * blocks * strips
        if programs:
            stride_b, stride_h, stride_q, stride_k = mask.stride()
            strides = (stride_b // vec, stride_h // vec, stride_q // vec, stride_k)
            numbers = (seqlen_q, seqlen_k, num_heads, *strides, *(band or (0, 0)), blocks, strips, total)
            tensors, constants = (mask.view(torch.uint8), sums, flag), (vec, band is not None, lanes, block_k)
            launch(_runs_kernel, programs, tensors, numbers, constants, lanes)
        tensors, programs = (sums, start, stop, flag), triton.cdiv(total, SUMS_BLOCK)
        launch(_sums_kernel, programs, tensors, (seqlen_q, total), (SUMS_BLOCK,), SUMS_NUM_WARPS)
    return start, stop, is_intervals
