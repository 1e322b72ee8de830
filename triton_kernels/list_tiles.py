"""Every tile of the kernels of attention over lists."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch

from .gpus import KIB, LIKE_HOPPER, shared_bytes
from .kernel_launch import next_power_of_2
from .tile_table import Tile

T = TypeVar("T")
# "keys" loops over inverse lists; "pairs" computes p and ds, "product" dq from ds, "rows" the rows from both.
ListKernel = Literal["forward", "queries", "keys", "rows", "product", "pairs"]

# The maximum number of members of a program, by its largest head dim.
_MOST_MEMBERS = {128: 128, 256: 64, 512: 64}
_MOST_MEMBERS_99_KB = {128: 128, 256: 64, 512: 32}
# Keys of a step, warps and stages by members of a program. Loads of k and v wait for an index, so that
# they get (n - 1) / 2 of n stages.
_SM90: dict[ListKernel, dict[int, dict[int, tuple[int, int, int]]]] = {
    "forward": {
        128: {16: (64, 2, 3), 32: (64, 4, 3), 64: (64, 4, 5), 128: (32, 4, 5)},
        256: {32: (64, 4, 3), 64: (64, 8, 3)},
        512: {32: (32, 4, 5), 64: (64, 8, 3)},
    },
    "queries": {
        128: {32: (64, 4, 5), 64: (64, 8, 5), 128: (64, 8, 3)},
        256: {32: (32, 4, 3), 64: (32, 8, 3)},
        512: {32: (32, 4, 1), 64: (32, 8, 1)},  # only for lists that are one step
    },
    "product": {512: {32: (64, 4, 5), 64: (64, 8, 5), 128: (64, 8, 5)}},
}
# Members, warps and stages by keys of a block.
_SM90_KEYS = {128: {64: (64, 4, 2), 128: (64, 8, 1)}, 256: {64: (32, 8, 2), 128: (32, 8, 2)}}
# Places of a tile, warps and stages by members; the loop is over columns of the head dims.
_SM90_PAIRS = {32: (128, 4, 4), 64: (128, 4, 4), 128: (128, 8, 4)}
_SM90_ROWS = {32: (64, 4, 3), 64: (128, 4, 3), 128: (128, 8, 3)}
# In a forward pass of wide heads with a separate v, shared memory holds q, k and v. On sm_100 the compiler needs a
# third more of it for k.
_SM90_WIDE_V = {16: (32, 4, 5), 64: (32, 8, 3)}
_SMALL_STEP = {128: (32, 4, 3), 256: (32, 4, 1), 512: (16, 8, 1)}


def members_of_program(
    kernel: ListKernel, members: int, head_dim: int, dtype: torch.dtype, arch: str, keys_each: int
) -> int:
    """Return how many members a program has."""
    table = _MOST_MEMBERS if shared_bytes(arch) > 99 * KIB else _MOST_MEMBERS_99_KB
    most = 128 if kernel in ("product", "pairs", "rows") else _row(table, head_dim)
    if kernel == "forward" and keys_each >= 64:
        most = min(most, 64)  # a step of whole blocks needs 64 keys
    low = 16 if dtype == torch.float32 and head_dim > 128 else 32 if dtype == torch.float32 else 128
    return min(max(16, next_power_of_2(members)), most, low)


def list_tile(
    kernel: ListKernel,
    block_m: int,
    head_dim: int,
    dtype: torch.dtype,
    arch: str,
    keys_each: int,
    holds_v: bool = False,
) -> Tile:
    """Return the tile of a kernel whose programs have `block_m` members, or, of "keys", `block_m` keys.

    Args:
        kernel: its name.
        block_m: of "keys" it becomes the `block_n` of the tile.
        head_dim: the larger of the padded head dims, without the rest.
        keys_each: keys of a block that an entry names. The entry of a whole step is one number, which takes no stage.
        holds_v: whether heads are wide, and a step of "forward" loads v in addition to k.
    """
    small = dtype == torch.float32 or arch not in LIKE_HOPPER
    if kernel in ("pairs", "rows"):
        # All keys of an entry are in one program.
        if small:
            return Tile(block_m, max(32, keys_each if kernel == "pairs" else 0), 4, 1)
        return Tile(block_m, *_row(_SM90_PAIRS if kernel == "pairs" else _SM90_ROWS, block_m))
    if kernel == "keys":
        if small:
            return Tile(16 if head_dim > 128 else 32, block_m, 4, 1)
        members, warps, stages = _row(_row(_SM90_KEYS, head_dim), block_m)
        return Tile(members, block_m, warps, stages)
    if small:
        keys, warps, stages = _row(_SMALL_STEP, head_dim)
        if dtype == torch.float32 or shared_bytes(arch) < 99 * KIB:
            stages = 1
        return Tile(block_m, keys, warps, stages)
    is_tight = kernel == "forward" and (holds_v or (head_dim > 256 and arch == "sm_100"))
    rows = _SM90_WIDE_V if is_tight else _row(_SM90[kernel], head_dim)
    keys, warps, stages = _row(rows, block_m)
    if keys_each >= keys:
        warps, stages = max(warps, 4), (stages + 1) // 2
    elif kernel == "product" and keys_each > 1:
        stages = min(stages, 3)  # a step has several entries, and loading their numbers takes one stage
    return Tile(block_m, keys, warps, stages)


def _row(rows: dict[int, T], size: int) -> T:
    return next(row for most, row in rows.items() if size <= most)
