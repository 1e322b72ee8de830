"""The kernel that finds the queries of each key in the bits of a mask, and whether they are one run.

A key's run begins in a row that sees it below one that does not, and ends where the next such row does not: bits that
differ from those of the row before. There are few, so a program visits each alone: the beginning is written, and the
end raises what stands there from 0. Whoever finds another end there has found a second run, and says so; later programs
return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_dmattn.masks.prepared.mask_intervals import MaskIntervals

from .kernel_launch import launch

# Rows and words of a program, and its warps: a thread has 8 words in loads of 16 bytes.
ROWS, WORDS, NUM_WARPS = 16, 128, 8


@triton.jit
def _any(words):
    return tl.max(tl.max((words != 0).to(tl.int32), axis=1), axis=0)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "quads", "blocks", "strips"])
def _runs_kernel(
    bits_ptr, start_ptr, stop_ptr, flag_ptr, seqlen_q, seqlen_k, quads, blocks, strips,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """`quads`: words of a row, by 4. `blocks` cover one row more than there are, in which the last runs end."""
    strip = tl.program_id(0) % strips
    block = tl.program_id(0) // strips % blocks
    head = (tl.program_id(0) // strips // blocks).to(tl.int64)
    wanted = tl.load(flag_ptr, volatile=True) != 0  # not from the cache of an earlier program
    if wanted:
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
            key = keys + ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127)  # the exponent of the number
            is_change = changes != 0
            begins = (now.to(tl.uint32, bitcast=True) & lowest) != 0
            tl.store(start_ptr + key, rows + tl.zeros_like(now), mask=is_change & begins)
            ends = is_change & (begins == 0)
            ended = tl.atomic_max(stop_ptr + key, rows + tl.zeros_like(now), mask=ends, sem="relaxed")
            if _any(tl.where(ends, ended, 0)) != 0:
                tl.store(flag_ptr, 0)
            changes ^= lowest
            some = _any(changes)


def mask_intervals(bits: torch.Tensor, seqlen_k: int) -> MaskIntervals:
    """Launch it; the result of `flash_dmattn.masks.prepared.mask_intervals.mask_intervals`."""
    batch, num_heads, seqlen_q, words = bits.shape
    start, stop = (torch.zeros(batch, num_heads, seqlen_k, dtype=torch.int32, device=bits.device) for _ in range(2))
    is_intervals = torch.ones((), dtype=torch.bool, device=bits.device)
    if bits.numel():
        blocks, strips = triton.cdiv(seqlen_q + 1, ROWS), triton.cdiv(words, WORDS)
        tensors = (bits, start, stop, is_intervals.view(torch.uint8))
        numbers = (seqlen_q, seqlen_k, words // 4, blocks, strips)
        launch(_runs_kernel, batch * num_heads * blocks * strips, tensors, numbers, (ROWS, WORDS), NUM_WARPS)
    return start, stop, is_intervals
