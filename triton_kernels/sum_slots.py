"""The kernel that adds partial sums of the gradient of a bias, in a fixed order, and rounds the result once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_slots_kernel(slots, dbias, size, count, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add `count` slots, SLOTS at a time. `slots` is fp32 (count, size), contiguous; dbias has `size` values."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        tile = tl.load(
            slots + slot.to(tl.int64)[:, None] * size + at[None, :], mask=(slot < count)[:, None] & inside[None, :],
            other=0.0,
        )  # fmt: skip
        acc += tl.sum(tile, 0)
    tl.store(dbias + at, acc.to(dbias.dtype.element_ty), mask=inside)
