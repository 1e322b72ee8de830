"""Every tile choice of the attention kernels, with the measurement behind it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Rows of a table: the padded head dim up to which they hold. Measured on an H200 (torch 2.11, Triton 3.6, bf16), except
# the rows of 256, which were chosen to fit shared memory and have not been timed.
# Dense attention, TFLOP/s at L 4096 full and 16384 causal; the next best choice stands behind the semicolon.
_SM90_DENSE = {
    "forward": {
        64: Tile(64, 128, 4, 3),  # 416 and 423 with TMA; 388 and 383 for 128x64 at 8 warps
        128: Tile(64, 64, 4, 3),  # 494 and 474 with TMA; 453 and 489 for 128x128 at 8 warps without
        256: Tile(64, 32, 4, 2),
    },
    "keys": {
        64: Tile(64, 64, 4, 2),  # 385 and 412, no spill; 32x128 reaches 389 and 414 but spills
        128: Tile(32, 128, 8, 3),  # 485 and 505, no spill; 64x128 with two stages 447 and 547, but spills
        256: Tile(32, 32, 4, 1),
    },
    "queries": {
        64: Tile(64, 64, 4, 2),  # 561 and 515; 128x64 at 8 warps 577 and 462
        128: Tile(128, 64, 8, 3),  # 558 and 579; 128x128 526 and 537
        256: Tile(32, 32, 4, 1),
    },
}
# With a mask: milliseconds of a causal top-k of 1024 keys at B1 H16/4 L8192 with a bias per key, packing included.
_SM90_MASK = {
    "forward": {
        64: Tile(64, 64, 4, 2),  # 0.70; 0.68 with three stages, 0.74 for 128x64 at 8 warps
        128: Tile(64, 64, 4, 2),  # 0.90; 1.00 for 128x128 at 8 warps
        256: Tile(64, 32, 4, 2),
    },
    "keys": {
        128: Tile(64, 64, 4, 2),  # 1.30 at D 64, 2.03 at D 128; 1.53 and 2.07 for 64x128 at 8 warps
        256: Tile(32, 32, 4, 1),
    },
    "queries": {
        128: Tile(64, 64, 4, 2),  # 0.77 at D 64, 1.09 at D 128; 0.93 and 1.15 for 128x64 at 8 warps
        256: Tile(32, 32, 4, 1),
    },
}
# With a bias of one value per score and no mask: milliseconds at B4 H16 L2048 D64 and at B1 H16 L4096 D128.
_SM90_BIAS = {
    "forward": {
        64: Tile(64, 64, 4, 2),  # 0.27; 0.29 for 128x64 at 8 warps
        128: Tile(128, 64, 8, 3),  # 0.41; 0.42 for 64x64
        256: Tile(64, 32, 4, 2),
    },
    "keys": {
        128: Tile(64, 64, 4, 2),  # 0.59 at D 64, 0.76 at D 128; 0.62 and 0.78 for 32x128 at 8 warps
        256: Tile(32, 32, 4, 1),
    },
    "queries": {
        128: Tile(128, 64, 8, 3),  # 0.60 at D 64, 0.68 at D 128; 0.63 and 0.80 for 64x64
        256: Tile(32, 32, 4, 1),
    },
}
# Fits the 99 KB of shared memory of every GPU since Ampere; not tuned.
_SMALL = {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)}
# fp32 products run outside the tensor cores unless TF32 is allowed, and their tiles take twice the room.
_FP32 = {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)}


def _row(table: dict[int, Tile], block_d: int) -> Tile:
    return next(tile for limit, tile in table.items() if block_d <= limit)


def tile_of(
    kernel: str,
    dtype: torch.dtype,
    block_d: int,
    capability: tuple[int, int] | None,
    *,
    has_mask: bool = False,
    has_tile_bias: bool = False,
) -> Tile:
    """The tile of "forward", "keys", "queries" or "bias" for the larger of the padded head dims."""
    if dtype == torch.float32:
        return _row(_FP32, block_d)
    if capability != (9, 0) or kernel == "bias":
        return _row(_SMALL, block_d)
    table = _SM90_MASK if has_mask else _SM90_BIAS if has_tile_bias else _SM90_DENSE
    return _row(table[kernel], block_d)
