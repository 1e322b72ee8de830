"""The kernel that fills rows of no sequence: gaps between packed sequences, and the unused ends of padded ones."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fill_gaps_kernel(
    x,
    lse,
    bounds,
    number,
    rows,
    width,
    num_heads,
    share,
    COLUMN: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Fill one gap with `share` programs.

    Packed sequences have a gap before each of them, and one more after the last. Padded sequences have one gap each:
    the unused end of their slots. x (rows of all slots, width) is contiguous and gets zeros; lse (1 or S, num_heads,
    rows) gets -inf. COLUMN of the bounds has the first row of each sequence, and the next column its length.
    """
    gap = tl.program_id(0) // share
    part = tl.program_id(0) % share
    if IS_PACKED:
        begin = tl.load(bounds + (gap - 1) * 4 + COLUMN, mask=gap > 0, other=0)
        begin += tl.load(bounds + (gap - 1) * 4 + COLUMN + 1, mask=gap > 0, other=0)
        end = tl.load(bounds + gap * 4 + COLUMN, mask=gap < number, other=rows)
        slot = gap.to(tl.int64) * 0
    else:
        begin = tl.load(bounds + gap * 4 + COLUMN + 1)
        end = begin * 0 + rows
        slot = gap.to(tl.int64)
    values = (end - begin).to(tl.int64) * width
    at = x + (slot * rows + begin) * width
    for start in range(part * BLOCK, values, share * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(at + place, tl.zeros([BLOCK], x.dtype.element_ty), mask=place < values)
    if HAS_LSE:
        for start in range(part * BLOCK, end - begin, share * BLOCK):
            place = start + tl.arange(0, BLOCK)
            for h in range(0, num_heads):
                row = lse + (slot * num_heads + h) * rows + begin
                tl.store(row + place, tl.full([BLOCK], float("-inf"), tl.float32), mask=place < end - begin)
