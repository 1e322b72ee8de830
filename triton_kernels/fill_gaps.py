"""The kernel that writes the rows of no sequence: between two, before the first, behind the last, and unused slots."""

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
    COLUMN: tl.constexpr,
    IS_PACKED: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """SHARE programs for the gap before each sequence, and one more behind the last; or behind what is used of a slot.

    x (rows of all slots, width) is contiguous and gets zeros; lse (1 or S, num_heads, rows) gets -inf. COLUMN of the
    bounds has the first of each sequence, and the next one its length.
    """
    gap = tl.program_id(0) // SHARE
    part = tl.program_id(0) % SHARE
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
    for start in range(part * BLOCK, values, SHARE * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(at + place, tl.zeros([BLOCK], x.dtype.element_ty), mask=place < values)
    if HAS_LSE:
        for start in range(part * BLOCK, end - begin, SHARE * BLOCK):
            place = start + tl.arange(0, BLOCK)
            for h in range(0, num_heads):
                row = lse + (slot * num_heads + h) * rows + begin
                tl.store(row + place, tl.full([BLOCK], float("-inf"), tl.float32), mask=place < end - begin)
