"""Every tile choice of the attention kernels, with the measurement behind it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .tile_ops import BAND, KEYS, TILE_BIAS


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its pipeline.

    `edge_stages` are those of the loop over blocks that need a look at the mask; 0 stands for the same.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    edge_stages: int = 0

    @property
    def options(self) -> dict[str, int]:
        """What Triton compiles a kernel with."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# Rows of a table: the padded head dim up to which they hold. Measured on an H200 (torch 2.11, Triton 3.6, bf16), except
# the rows of 256, which were chosen to fit shared memory. TFLOP/s; the next best choice stands behind the semicolon.
# Without a mask: L 4096 full at D 64, the same and 16384 causal at D 128.
_SM90 = {
    "forward": {
        64: Tile(64, 128, 4, 3),  # 453; 417 for 128x64 at 4 warps
        128: Tile(64, 64, 4, 3),  # 488 to 506, and 522 to 550; 128x64 at 8 warps 417 and 442
        256: Tile(64, 32, 4, 2),
    },
    "keys": {
        64: Tile(64, 64, 4, 3),  # 454; 476 for 128x64, which spills
        128: Tile(64, 64, 4, 2),  # 602 and 596, with 18 to 26 registers spilled; 32x64, which spills none, 474
        256: Tile(32, 32, 4, 1),
    },
    "queries": {
        64: Tile(128, 64, 8, 3),  # 588; 611 and, in another run, 572 for 4 warps
        128: Tile(128, 64, 8, 3),  # 617 and 637; 128x128 525 and 539
        256: Tile(32, 32, 4, 1),
    },
}
# With a bias of one value per score: milliseconds at B4 H16 L2048 D64 and at B1 H16 L4096 D128.
_SM90_BIAS = {
    "forward": {
        64: Tile(128, 64, 8, 3),  # 0.24; 0.27 for 128x64 at 4 warps
        128: Tile(128, 64, 8, 3),  # 0.35; 0.40 for 64x64
        256: Tile(64, 32, 4, 2),
    },
    "keys": {
        64: Tile(64, 64, 4, 3),  # 0.45 with dbias stored; 0.56 with two stages or for 32x64
        128: Tile(64, 64, 4, 2),  # 0.64; 0.72 for 32x64 with four stages
        256: Tile(32, 32, 4, 1),
    },
    "queries": {
        128: Tile(128, 64, 8, 3),  # 0.53 at B8 D64 with a bias shared by the batch; 0.57 for 64x64
        256: Tile(32, 32, 4, 1),
    },
    "product": {
        64: Tile(128, 64, 4, 4),  # 0.15, nothing near it is slower
        128: Tile(128, 128, 8, 3),  # 0.16
        256: Tile(64, 32, 4, 2),
    },
    "bias": {
        128: Tile(64, 64, 4, 2),  # 0.59 at B8 D64, bound by L2; 0.58 for 64x128, which spills
        256: Tile(32, 32, 4, 1),
    },
}
# With lists of tiles: a causal top-k of 1024 keys, L 8192, and 128-blocks of density 0.1, L 16384, both H16/4 D128.
_SM90_TILES = {
    "forward": {
        64: Tile(64, 64, 4, 3),
        # 0.82 and 0.51: two programs to a processor, which the shared memory of more stages at an edge would not leave;
        # 0.82 and 0.55 for two stages.
        128: Tile(64, 64, 4, 5, 3),
        256: Tile(64, 32, 4, 2),
    },
    "keys": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 4, 2),  # 1.60 and 0.93; 1.78 and 1.12 for 64x128 at 8 warps
        256: Tile(32, 32, 4, 1),
    },
    "queries": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 4, 2),  # 0.86 and 0.63; 0.96 and 0.64 for 128x64 at 8 warps
        256: Tile(32, 32, 4, 1),
    },
}
# With kept keys, which are gathered: not through the tensor memory accelerator.
_SM90_KEYS = {
    "forward": {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 2)},
    "keys": {128: Tile(64, 64, 4, 2), 256: Tile(32, 32, 4, 1)},
    "queries": {128: Tile(64, 64, 4, 3), 256: Tile(32, 32, 4, 1)},
}
# Fits the 99 KB of shared memory of every GPU since Ampere; not tuned.
_SMALL = {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)}
# fp32 products run outside the tensor cores unless TF32 is allowed, and their tiles take twice the room.
_FP32 = {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)}


def _row(table: dict[int, Tile], block_d: int) -> Tile:
    return next(tile for limit, tile in table.items() if block_d <= limit)


def tile_of(
    kernel: str, dtype: torch.dtype, block_d: int, capability: tuple[int, int] | None, *, mask: int, bias: int
) -> Tile:
    """The tile of a kernel ("forward", "keys", "queries", "product", "bias") for the larger of the padded head dims."""
    if dtype == torch.float32:
        return _row(_FP32, block_d)
    if capability != (9, 0):
        return _row(_SMALL, block_d)
    has_tile_bias = bias == TILE_BIAS.value
    masked = _SM90_KEYS if mask == KEYS.value else _SM90_TILES
    table = _SM90_BIAS if has_tile_bias or kernel in ("product", "bias") else _SM90
    if mask != BAND.value and kernel in masked and not has_tile_bias:
        table = masked
    return _row(table[kernel], block_d)
