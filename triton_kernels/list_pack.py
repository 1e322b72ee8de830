"""The kernel that lists the keys of highest score in each row: each row is loaded once and kept in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_dmattn.masks import topk

from .kernel_launch import launch, next_power_of_2

# The maximum number of keys of a row, and the keys of a warp: a thread keeps 32.
MOST_KEYS, KEYS_OF_WARP = 32768, 1024
LOWEST: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["rows", "columns", "k", "places", "local"])
def _best_kernel(
    keys_ptr, last_ptr, entries_ptr, counts_ptr, rows, columns, k, places, local,
    BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * columns + column, mask=column < columns, other=LOWEST)
    # Find the k-th largest key bit by bit: the largest number that at least k keys reach.
    least = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= k, 0, LOWEST)
    for bit in range(31):
        more = least + (1 << (30 - bit))
        least = tl.where(tl.sum((keys >= more).to(tl.int32), 0) >= k, more, least)
    # Keys that tie with it are taken in order until there are k: keys before the largest limit that allows it.
    room = k - tl.sum((keys > least).to(tl.int32), 0)
    limit = 0
    for bit in range(BITS):
        more = limit + (1 << (BITS - 1 - bit))
        limit = tl.where(tl.sum(((keys == least) & (column < more)).to(tl.int32), 0) <= room, more, limit)
    chosen = (keys > least) | ((keys == least) & (column < limit))
    last = tl.load(last_ptr + row % rows)
    chosen = (chosen | (column > last - local)) & (keys > LOWEST)
    number = chosen.to(tl.int32)
    tl.store(entries_ptr + row * places + tl.cumsum(number, 0) - 1, column, mask=chosen)
    tl.store(counts_ptr + row, tl.sum(number, 0))


def list_best(
    keys: torch.Tensor, last: torch.Tensor, k: int, local: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; the arguments and the result are as in `flash_dmattn.masks.topk.list_best`.

    PyTorch lists rows with more keys than registers hold, and keys of scores in fp64.
    """
    batch, heads, rows, columns = keys.shape
    if keys.dtype != torch.int32 or columns > MOST_KEYS:
        return topk.list_best(keys, last, k, local, places)
    keys = keys.contiguous()
    entries = keys.new_full((batch, heads, rows, places), -1)
    counts = keys.new_empty(batch, heads, rows)
    if keys.numel():
        block = next_power_of_2(columns)
        warps = max(1, block // KEYS_OF_WARP)
        tensors = (keys, last.to(torch.int32).contiguous(), entries, counts)
        launch(
            _best_kernel,
            batch * heads * rows,
            tensors,
            (rows, columns, k, places, local),
            (block, block.bit_length()),
            warps,
        )
    return entries, counts
