"""The kernels that test whether the queries of each key are one run of rows, from the bits of a mask.

A run of a key begins or ends at a row whose bit differs from the row before. These bits are rare, so a program visits
them one by one. It writes the beginning of a run. It writes the end by an atomic maximum, which returns the value
before, 0 at first. Another value shows a second run: the program then sets a flag, and later programs return at once.

Programs read the flag by an atomic, because Triton lets one thread execute it and broadcasts the result. With a plain
load each thread would read for itself, and some could return while others wait for them at a barrier.

A second kernel writes beginning and end for all keys, dead ones included, and computes the counts by which the host
chooses a form. All memory that must start at 0 is one int64 allocation. It has the four counts of `mask_intervals`, and
then, as int32, the live keys of each head and the ends of all keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_dmattn.masks.prepared.intervals import MaskIntervals

from .kernel_launch import ceil_div, launch

# Rows and 32-bit words of a program, and its warps: a thread has 8 words, in loads of 16 bytes.
ROWS, WORDS, NUM_WARPS = 16, 128, 8
# A program counts up to COUNTED keys, and up to COUNTED rows of tiles; and its warps.
COUNTED, COUNT_NUM_WARPS = 1024, 4


@triton.jit
def _any(words):
    return tl.max(tl.max((words != 0).to(tl.int32), axis=1), axis=0)


@triton.jit
def _halves(numbers_ptr, heads):
    """Return pointers to the counts of live keys of heads, and to the ends of keys."""
    live_ptr = (numbers_ptr + 4).to(tl.pointer_type(tl.int32), bitcast=True)
    return live_ptr, live_ptr + heads


@triton.jit(do_not_specialize=["heads", "seqlen_q", "seqlen_k", "quads", "blocks", "strips"])
def _runs_kernel(
    bits_ptr, start_ptr, numbers_ptr, heads, seqlen_q, seqlen_k, quads, blocks, strips,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Find beginnings and ends of runs.

    `quads` is the number of 32-bit words of a row, divided by 4. `blocks` cover one more row than the mask has, because
    runs that reach the last row end there.
    """
    strip = tl.program_id(0) % strips
    block = tl.program_id(0) // strips % blocks
    head = (tl.program_id(0) // strips // blocks).to(tl.int64)
    _, ends_ptr = _halves(numbers_ptr, heads)
    if tl.atomic_max(numbers_ptr, 0, sem="relaxed") == 0:
        rows = (block * ROWS + tl.arange(0, ROWS))[:, None]
        columns = (strip * WORDS + tl.arange(0, WORDS))[None, :]
        inside = columns < quads * 4
        at = bits_ptr + (head * seqlen_q + rows) * (quads * 4) + columns
        now = tl.load(at, mask=inside & (rows < seqlen_q), other=0)
        before = tl.load(at - quads * 4, mask=inside & (rows > 0) & (rows <= seqlen_q), other=0)
        changes = (now ^ before).to(tl.uint32, bitcast=True)
        keys = head * seqlen_k + columns * 32
        some = _any(changes)
        while some != 0:
            lowest = changes & (changes ^ (changes - 1))
            key = keys + ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127)  # log2, by the exponent
            is_change = changes != 0
            begins = (now.to(tl.uint32, bitcast=True) & lowest) != 0
            tl.store(start_ptr + key, rows + tl.zeros_like(now), mask=is_change & begins)
            ends = is_change & (begins == 0)
            ended = tl.atomic_max(ends_ptr + key, rows + tl.zeros_like(now), mask=ends, sem="relaxed")
            if _any(tl.where(ends, ended, 0)) != 0:
                tl.store(numbers_ptr, 1)
            changes ^= lowest
            some = _any(changes)


@triton.jit(do_not_specialize=["heads", "seqlen_k", "tiles_q", "list_length", "chunks"])
def _count_kernel(
    start_ptr, stop_ptr, lists_ptr, numbers_ptr, heads, seqlen_k, tiles_q, list_length, chunks,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Write the runs, and count live keys, pairs and active tiles.

    Sums are integers, so the order of programs does not matter. Each program adds to the live keys of its head, and
    takes the maximum over heads with the sum so far; the last program of a head has its total.
    """
    head = (tl.program_id(0) // chunks).to(tl.int64)
    at = tl.program_id(0) % chunks * COUNTED + tl.arange(0, COUNTED)
    live_ptr, ends_ptr = _halves(numbers_ptr, heads)
    if tl.load(numbers_ptr) == 0:
        inside = at < seqlen_k
        keys = head * seqlen_k + at
        stop = tl.load(ends_ptr + keys, mask=inside, other=0)
        is_live = stop > 0
        start = tl.load(start_ptr + keys, mask=is_live, other=0)  # the start of a dead key is uninitialised
        tl.store(start_ptr + keys, start, mask=inside)
        tl.store(stop_ptr + keys, stop, mask=inside)
        live = tl.sum(is_live.to(tl.int32), axis=0)
        if live != 0:
            before = tl.atomic_add(live_ptr + head, live, sem="relaxed")
            tl.atomic_max(numbers_ptr + 1, (before + live).to(tl.int64), sem="relaxed")
            tl.atomic_add(numbers_ptr + 2, tl.sum((stop - start).to(tl.int64), axis=0), sem="relaxed")
        row_list = lists_ptr + (head * tiles_q + at) * list_length
        is_row = at < tiles_q
        # 64 bits, because the sum over a chunk of rows may exceed 32.
        active = tl.load(row_list, mask=is_row, other=0).to(tl.int64) + tl.load(row_list + 1, mask=is_row, other=0)
        active = tl.sum(active, axis=0)
        if active != 0:
            tl.atomic_add(numbers_ptr + 3, active, sem="relaxed")


def mask_intervals(bits: torch.Tensor, row_lists: torch.Tensor, seqlen_k: int) -> MaskIntervals:
    """Launch both kernels; returns what `flash_dmattn.masks.prepared.intervals.mask_intervals` returns."""
    batch, num_heads, seqlen_q, words = bits.shape
    heads, tiles_q, list_length = batch * num_heads, row_lists.size(2), row_lists.size(3)
    keys = heads * seqlen_k
    numbers = torch.zeros(4 + (heads + keys + 1) // 2, dtype=torch.int64, device=bits.device)
    allocate = torch.empty if bits.numel() else torch.zeros
    start, stop = (allocate(batch, num_heads, seqlen_k, dtype=torch.int32, device=bits.device) for _ in range(2))
    if bits.numel():
        blocks, strips = ceil_div(seqlen_q + 1, ROWS), ceil_div(words, WORDS)
        sizes = (heads, seqlen_q, seqlen_k, words // 4, blocks, strips)
        launch(_runs_kernel, heads * blocks * strips, (bits, start, numbers), sizes, (ROWS, WORDS), NUM_WARPS)
        chunks = ceil_div(max(seqlen_k, tiles_q), COUNTED)
        count_sizes = (heads, seqlen_k, tiles_q, list_length, chunks)
        tensors = (start, stop, row_lists, numbers)
        launch(_count_kernel, heads * chunks, tensors, count_sizes, (COUNTED,), COUNT_NUM_WARPS)
    return start, stop, numbers[:4]
