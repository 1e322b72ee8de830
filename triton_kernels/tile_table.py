"""Every tile of the attention kernels, with the measurement that chose it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from .bias_forms import BANDED, CLAMPED, DISTANCES, NO_BIAS, TILE_BIAS
from .gpus import KIB, shared_bytes
from .precision import MOST_FEW_ROWS, runs_on_pieces
from .preferred_tiles import preferred
from .tile_ops import BAND, KEYS, TILES


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its pipeline.

    `edge_stages` are the stages of the loop over blocks that need a mask check; 0 means `num_stages`. `registers` is
    the most that a thread may have, so that more programs fit on an SM; 0 leaves it to the compiler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    edge_stages: int = 0
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Return the options that Triton compiles a kernel with."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | {"maxnreg": self.registers} if self.registers else options


# The key of a row is the largest padded head dim that it serves. Measured on an H200 (torch 2.11, Triton 3.6) by
# benchmarks/tiles.py. A comment has the case of that benchmark and its milliseconds; after the semicolon is the next
# best tile.
_SM90 = {
    "forward": {
        64: Tile(64, 128, 4, 3),  # d32 0.895 and d64 1.21; 0.919 and 1.32 for 64x64 and 128x64
        128: Tile(64, 64, 4, 3),  # d128 1.120; 1.083 for 128x64 with two stages, which spills
        256: Tile(64, 128, 4, 1),  # d256 0.891; 1.075 for 128x64 at 8 warps
    },
    "keys": {
        32: Tile(128, 64, 4, 3),  # d32 1.426; 1.529 for 64x128
        64: Tile(64, 64, 4, 3),  # d64 2.42; 2.31 for 128x64, which spills
        128: Tile(64, 64, 4, 2),  # d128 1.80, spilling 18 to 26 registers; 2.32 for 32x64, which spills none
        256: Tile(64, 64, 8, 2),  # d256 3.467; 4.529 for 32x64
    },
    "queries": {
        32: Tile(64, 64, 4, 3),  # d32 1.027; 1.039 for 128x64
        64: Tile(128, 64, 8, 3),  # d64 1.29 to 1.40; 1.35 to 1.44 for 4 warps
        128: Tile(64, 64, 4, 2),  # d128 1.336; 1.396 for 128x64 at 8 warps
        256: Tile(128, 32, 8, 3),  # d256 1.434; 1.509 for 64x64 at 4 warps
    },
}
# The kernel of dk and dv where it only sums p of each key, so that its programs hold no sums of a head dim. Chosen by
# register spills and bounds, and not timed: docs/notes/statistics.md.
_SM90_SUMS = {128: Tile(64, 256, 8, 2, registers=128), 256: Tile(64, 256, 8, 2), 512: Tile(64, 128, 8, 1)}
_SM90_SUMS_BIASED = Tile(64, 128, 8, 2)  # head dims of 129 to 256 beside a bias per score: 64x256 takes 256 KB
_SM90_SUMS_TILES = {128: Tile(64, 128, 4, 2, registers=168), 256: Tile(64, 128, 8, 2)}
_SUMS_WIDE, _GFX_SUMS_WIDE = Tile(32, 64, 8, 1), Tile(32, 32, 4, 1)  # 80 and 64 KB
# With a bias of one value per score.
_SM90_BIAS = {
    "forward": {
        64: Tile(128, 64, 8, 3),  # bias-d64 0.24; 0.27 for 128x64 at 4 warps
        128: Tile(128, 64, 4, 2),  # bias-d128 0.331, spilling 16 registers; 0.356 for 8 warps and three stages
        256: Tile(64, 64, 4, 2),
    },
    "keys": {
        64: Tile(64, 64, 4, 3),  # bias-d64 0.45 with dbias stored; 0.56 with two stages or for 32x64
        128: Tile(64, 64, 4, 2),  # bias-d128 0.631; 0.635 for 64x128 at 8 warps
        256: Tile(32, 32, 4, 2),
    },
    "queries": {
        128: Tile(128, 64, 8, 3),  # shared-bias-d64 0.50; 0.57 for 64x64
        256: Tile(64, 32, 4, 2),
    },
    "product": {
        64: Tile(128, 64, 4, 4),  # bias-d64 0.15; neighbouring tiles are as fast
        128: Tile(128, 64, 4, 3),  # bias-d128 0.149; 0.155 for 128x128
        256: Tile(64, 32, 4, 2),
    },
    "bias": {
        128: Tile(64, 64, 4, 2),  # shared-bias-d64 0.53, bound by L2
        256: Tile(32, 32, 4, 1),
    },
}
# The same with a bias loaded through pointers, for small calls or unaligned rows. Pointers need registers, so tiles are
# smaller. At d128 with 1023 queries and keys, the forward kernel with the tile above has 3 KB of stack, and takes 22
# times as long as the cuda backend.
_SM90_BIAS_POINTERS = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(64, 32, 4, 3), 256: Tile(32, 32, 4, 1)},
    "keys": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 4, 1)},
    "queries": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 4, 1)},
    "product": {64: Tile(128, 64, 4, 4), 128: Tile(64, 64, 8, 3), 256: Tile(64, 32, 4, 2)},
    "bias": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 4, 1)},
}
# The forward kernel with a bias by distance and no other mask than a band. Two stages: its two or three loops each fill
# their pipeline.
_SM90_DISTANCES = {
    64: Tile(64, 128, 4, 2),  # 8 x 2048 x 16 heads, T5's values: 0.334; 0.353 for 64x64, 0.373 with three stages
    128: Tile(64, 64, 4, 2),  # 2 x 4096 x 16 heads: 0.603; 0.626 for 128x64 at 8 warps, 0.711 with three stages
}
# The kernel of dq with one: with three stages, as without a bias, values of fp32 would take 56 bytes too much.
_SM90_DISTANCES_WIDE_QUERIES = Tile(128, 32, 8, 2)
# The kernel of dk and dv with a bias of one value per query and distance. Chosen by register spills: 472 and 152 bytes
# with the tiles for pointers above, 40 and none with these.
_SM90_BANDED_KEYS = {64: Tile(64, 64, 8, 2), 128: Tile(32, 64, 8, 2)}
# With lists of tiles.
_SM90_TILES = {
    "forward": {
        64: Tile(64, 64, 4, 3),
        # tiles-d128 0.46 to 0.51, and 0.83 for a causal top-k; 0.445 and 1.02 for 128x64, which spills. Three stages at
        # edges, so that the shared memory of an SM has room for two programs.
        128: Tile(64, 64, 4, 5, 3),
        256: Tile(64, 64, 4, 2),
    },
    "keys": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 4, 2),  # tiles-d128 0.877, and 1.60 for a causal top-k; 1.066 and 1.78 for 64x128 at 8 warps
        256: Tile(32, 32, 4, 2),
    },
    "queries": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 4, 2),  # tiles-d128 0.560; 0.578 for 64x128 with one stage
        256: Tile(64, 32, 4, 2),
    },
}
# With kept keys, which are gathered by pointers and not loaded by TMA.
_SM90_KEYS = {
    "forward": {
        64: Tile(64, 128, 4, 2),  # keys-d64 0.840; 0.842 for 128x64
        128: Tile(64, 64, 4, 3),
        256: Tile(64, 32, 4, 2),
    },
    "keys": {
        64: Tile(32, 128, 4, 3),  # keys-d64 1.284; 1.354 for 64x64
        128: Tile(64, 64, 4, 2),
        256: Tile(32, 32, 4, 1),
    },
    "queries": {
        64: Tile(64, 64, 4, 2),  # keys-d64 0.828; 0.869 with three stages
        128: Tile(64, 64, 4, 3),
        256: Tile(32, 32, 4, 1),
    },
}
# The forward kernel for at most MOST_FEW_ROWS queries of a head, for example the heads of a group in a decoding step. k
# and v are loaded through pointers. An SM has room for two or three programs with narrow blocks of keys, for one with
# wide blocks. On an H100 with 32 heads on 8, D128: 8 x 8192 keys take 0.1039 ms narrow in two shares; 64 x 4096 keys
# take 0.3616 ms wide and 0.3826 ms narrow.
_SM90_FEW_ROWS = {
    "narrow": {64: Tile(MOST_FEW_ROWS, 128, 4, 3), 128: Tile(MOST_FEW_ROWS, 64, 4, 3)},
    "wide": {64: Tile(MOST_FEW_ROWS, 256, 4, 3), 128: Tile(MOST_FEW_ROWS, 128, 4, 3)},
}
# The same with a bias of one value per score; and with lists of tiles or of kept keys, whose prefetch leaves k and v
# (n - 1) / 2 of n stages.
_SM90_FEW_ROWS_BIAS = {128: Tile(MOST_FEW_ROWS, 64, 4, 4)}
_SM90_FEW_ROWS_LISTS = {128: Tile(MOST_FEW_ROWS, 64, 4, 5)}
# fp32 products run outside the tensor cores unless TF32 is allowed, and their tiles take twice the memory.
_SM90_FP32 = {
    "forward": {64: Tile(32, 128, 4, 2)},  # fp32-d64 0.948; 1.231 for 64x64
    "keys": {64: Tile(64, 32, 4, 1)},  # fp32-d64 2.808; 2.886 for 32x64
    "queries": {64: Tile(32, 128, 4, 2)},  # fp32-d64 1.621; 1.634 for 64x128 at 8 warps
}
_FP32 = {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)}
# fp32 on other NVIDIA GPUs, chosen for low register use and not timed. With the tiles above for 256, a thread has stack
# of up to 4 KB ("bias"), 2 KB ("queries") or 1 KB (the rest). With these it has at most 376 bytes, except for
# "queries" at 256.
_FP32_SM = {
    "forward": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "keys": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    # At 256, 984 bytes of stack. Two stages would avoid it, but take 100 to 130 KB of shared memory.
    "queries": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 32, 16, 1)},
    "bias": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 2)},
}
# Where a program may have more than 99 KB of shared memory.
_FP32_LARGE = {"queries": {256: Tile(16, 32, 4, 2)}}
# fp32 split into 16-bit parts on tensor cores: split in the kernels, and stored before them. Calls af3 8,16,512,48 with
# a shared bias, plain 4,16,2048,64, d128 4,16,1024,128. At 128, the tiles without times were chosen for low register
# use.
_PIECES = {
    "forward": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)},  # af3 0.139; 0.141 for 128x64 at 8 warps
    "keys": {64: Tile(64, 64, 4, 1), 128: Tile(32, 32, 4, 1)},  # af3 0.254; 0.279 for 32x64
    "queries": {64: Tile(64, 64, 4, 2), 128: Tile(128, 32, 8, 1)},  # af3 0.185; 0.223 for 64x32
    "product": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)},
    "bias": {64: Tile(64, 64, 4, 1), 128: Tile(64, 32, 8, 1)},  # af3 0.228; 0.270 for 64x32
}
_PIECES_STORED = {
    # plain 0.507; 0.575 for 64x64 at 4 warps with three stages
    "forward": {64: Tile(128, 64, 8, 2, registers=128), 128: Tile(64, 32, 4, 2)},
    "biased forward": {
        32: Tile(64, 64, 4, 2, registers=168),  # triangle 384,4,384,32 0.588; 0.708 without the bound
        64: Tile(128, 64, 8, 3),  # af3 0.118; 0.132 for 64x64 at 4 warps
        128: Tile(64, 32, 4, 2),
    },
    # plain 1.105, d128 0.623; 1.198 and 0.745 for 32x64
    "keys": {64: Tile(64, 64, 4, 1), 128: Tile(64, 128, 8, 1)},
    "queries": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 1)},  # plain 0.685, d128 0.435; 0.749, 0.470 for 8 warps
    "product": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)},
    "bias": {64: Tile(64, 64, 4, 1), 128: Tile(64, 32, 8, 1)},  # af3 0.148; 0.165 for 64x32
}
# Where the tiles above spill 640 bytes and more: on all GPUs but sm_90, and for dk and dv with a bias of one value per
# query and distance.
_PIECES_SMALL = {"keys": {64: Tile(32, 64, 4, 1)}, "bias": {64: Tile(64, 32, 4, 1)}}
# It needs at most the 99 KB of shared memory of every GPU since Ampere, and the 64 KB of gfx942. It is used on GPUs
# other than sm_90 and sm_100, and for short sequences. It is also used for kept keys with a bias of one value per
# score, whose pointers need registers. A warp has 16 rows of a product with `mma.sync`, so that 8 warps would compute
# 64 rows twice.
_SMALL = {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)}
# sm_100, chosen by register spills and not timed. Its tensor cores (tcgen05) need blocks of at least 64 rows and 64
# keys. "keys" at 256 would spill 230 bytes with such a block, and uses the instructions of sm_80.
_SM100 = {
    "forward": {64: Tile(64, 64, 4, 2), 128: Tile(64, 128, 8, 1), 256: Tile(64, 64, 8, 1)},
    "keys": {64: Tile(64, 64, 4, 2), 128: Tile(64, 128, 8, 1), 256: Tile(32, 32, 8, 1)},
    "queries": {64: Tile(64, 64, 4, 2), 128: Tile(64, 128, 8, 1), 256: Tile(64, 64, 8, 1)},
    "product": {64: Tile(64, 64, 4, 2), 128: Tile(64, 128, 8, 1), 256: Tile(64, 64, 8, 1)},
    "bias": {64: Tile(64, 64, 4, 2), 128: Tile(64, 128, 8, 1), 256: Tile(64, 64, 8, 1)},
}
# The kernel of dk and dv with a bias by distance; with the tile above it spills 340 registers.
_SM100_DISTANCES = {64: Tile(64, 32, 4, 2)}
# Tiles that `calibrate --tiles` times in addition to the table: all tiles without register spills. A tile that needs
# more shared memory than a GPU has is skipped there. wgmma has 64 rows for 4 warps, so 8 warps need 128 rows.
_OTHERS_SM80 = {
    "forward": {
        64: (Tile(128, 64, 8, 2), Tile(64, 128, 4, 2)),
        128: (Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
        256: (Tile(64, 32, 4, 1), Tile(128, 32, 8, 1)),
    },
    "keys": {
        64: (Tile(64, 32, 4, 2), Tile(64, 128, 8, 2)),
        128: (Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
        256: (Tile(32, 64, 4, 1), Tile(32, 32, 8, 1)),
    },
    "queries": {
        64: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
        128: (Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
        256: (Tile(64, 32, 4, 1), Tile(128, 32, 8, 1)),
    },
    "product": {64: (Tile(128, 64, 8, 2),), 128: (Tile(128, 64, 8, 2),), 256: (Tile(64, 32, 8, 1),)},
    "bias": {64: (Tile(64, 32, 4, 2),), 128: (Tile(64, 64, 8, 2),), 256: (Tile(32, 32, 8, 1),)},
}
_OTHERS_SM90 = {
    "forward": {
        64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
        128: (Tile(128, 64, 8, 3),),
        256: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    },
    "keys": {
        64: (Tile(64, 64, 4, 2),),
        128: (Tile(64, 128, 8, 2),),
        256: (Tile(32, 64, 4, 2),),
    },
    "queries": {
        64: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
        128: (Tile(128, 64, 8, 2),),
        256: (Tile(64, 64, 4, 2),),
    },
    "product": {64: (Tile(64, 64, 4, 3),), 128: (Tile(128, 128, 8, 3),), 256: (Tile(128, 64, 8, 2),)},
    "bias": {64: (Tile(128, 64, 8, 2),), 128: (Tile(64, 64, 8, 2),), 256: (Tile(64, 32, 4, 1),)},
}
_OTHERS_SM100 = {
    "forward": {
        64: (Tile(128, 128, 8, 2), Tile(64, 128, 8, 2)),
        128: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
        256: (Tile(128, 64, 8, 1), Tile(32, 32, 4, 1)),
    },
    "keys": {
        64: (Tile(64, 128, 8, 2),),
        128: (Tile(64, 32, 4, 2),),
        256: (Tile(64, 64, 8, 1), Tile(32, 32, 4, 1)),
    },
    "queries": {
        64: (Tile(128, 128, 8, 2), Tile(64, 128, 8, 2)),
        128: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
        256: (Tile(128, 64, 8, 1), Tile(32, 32, 4, 1)),
    },
    "product": {64: (Tile(128, 128, 8, 2),), 128: (Tile(128, 64, 8, 2),), 256: (Tile(128, 64, 8, 1),)},
    "bias": {64: (Tile(64, 128, 8, 2),), 128: (Tile(64, 32, 4, 2),), 256: (Tile(32, 32, 4, 1),)},
}


# Head dims from 257 to 512 (docs/notes/triton.md). "biased forward" is with a bias of one value per score. With 128
# queries, a program of the forward kernel has half of the columns of v. `pair_tiles` has the tiles of gradients.
_SM90_WIDE = {
    "forward": {
        512: Tile(128, 64, 8, 1),  # d512 7.07; 7.92 for 128x32 with two stages, 10.1 for 64x32 with all columns of v
    },
    "biased forward": {
        512: Tile(64, 32, 8, 2),  # with 128 queries 232 KB of shared memory
    },
    "bias": {
        512: Tile(64, 32, 8, 1),
    },
}
_SM80_WIDE = {
    "forward": {
        512: Tile(64, 32, 8, 2),
    },
    "biased forward": {
        512: Tile(64, 32, 8, 2),
    },
    "bias": {
        512: Tile(32, 64, 8, 1),
    },
}
_SMALL_WIDE = {
    "forward": {
        512: Tile(32, 32, 4, 1),
    },
    "biased forward": {
        512: Tile(32, 32, 4, 1),
    },
    "bias": {
        512: Tile(16, 32, 8, 1),
    },
}
_GFX_WIDE = {
    "forward": {
        512: Tile(32, 32, 4, 1),
    },
    "biased forward": {
        512: Tile(32, 32, 4, 1),
    },
    "bias": {
        512: Tile(16, 32, 4, 1),
    },
}


class PairTiles(NamedTuple):
    """The tiles of the gradients of wide heads.

    Attributes:
        pairs: queries and keys of a tile of p and ds.
        depth: values of the head dim in a step.
        product: rows of a tile of a gradient, the same number as in `pairs`, and pairs of a step.
        columns: columns of a tile of a gradient.
    """

    pairs: Tile
    depth: int
    product: Tile
    columns: int


# d512 10.6 ms; 10.7 for pairs of 128x256, whose two products are two loops, and 12.3 for 128x128 at 4 warps.
_SM90_PAIRS = PairTiles(Tile(128, 128, 8, 3), 64, Tile(128, 64, 8, 3), 256)
_SM80_PAIRS = PairTiles(Tile(128, 128, 8, 4), 16, Tile(128, 64, 8, 2), 128)  # 48 KB; a depth of 32 spills
_GFX_PAIRS = PairTiles(Tile(128, 128, 8, 1), 32, Tile(128, 32, 8, 1), 128)

# The forward kernel for at most MOST_FEW_ROWS queries of a head; an SM has room for two programs.
_SM_WIDE_FEW_ROWS = {512: Tile(MOST_FEW_ROWS, 32, 8, 2)}
# Shared memory is large enough only for the forward kernel. A rule of the backend refuses the backward pass.
_FP32_WIDE = {512: Tile(16, 32, 4, 1)}

# The most shared memory of a tile that serves every NVIDIA GPU.
ROOM_OF_SMALL = 99 * KIB


def _row(table: dict[int, Tile], block_d: int) -> Tile:
    return next(tile for limit, tile in table.items() if block_d <= limit)


def _fp32_table(kernel: str, block_d: int, arch: str) -> dict[int, Tile]:
    if arch == "sm_90":
        return _SM90_FP32[kernel] if block_d <= 64 and kernel in _SM90_FP32 else _FP32
    if not arch.startswith("sm_"):
        return _FP32
    large = block_d > 128 and kernel in _FP32_LARGE and shared_bytes(arch) > ROOM_OF_SMALL
    return _FP32_LARGE[kernel] if large else _FP32_SM.get(kernel, _FP32)


def _wide_table(kernel: str, dtype: torch.dtype, arch: str, has_few_rows: bool) -> dict[int, Tile]:
    if dtype == torch.float32:
        return _FP32_WIDE
    if arch.startswith("gfx"):
        return _GFX_WIDE[kernel]
    if has_few_rows and kernel in ("forward", "biased forward"):
        return _SM_WIDE_FEW_ROWS
    if arch == "sm_90":
        return _SM90_WIDE[kernel]
    return (_SM80_WIDE if shared_bytes(arch) > ROOM_OF_SMALL else _SMALL_WIDE)[kernel]


def pair_tiles(arch: str) -> PairTiles:
    """Return the tiles of the gradients of wide heads."""
    return _SM90_PAIRS if arch == "sm_90" else _SM80_PAIRS if arch.startswith("sm_") else _GFX_PAIRS


def tf32_fits(kernel: str, block_d: int, arch: str) -> bool:
    """Return whether an fp32 kernel has the shared memory for TF32: "keys" at 256 needs 114 KB, and 98 KB in fp32."""
    return kernel != "keys" or block_d <= 128 or shared_bytes(arch) > ROOM_OF_SMALL


def tile_of(
    kernel: str,
    dtype: torch.dtype,
    block_d: int,
    arch: str,
    *,
    mask: int,
    bias: int,
    bias_tma: bool,
    few_rows: Literal["narrow", "wide"] | None = None,
    precision: str = "ieee",
    stored: bool = False,
    may_prefer: bool = True,
) -> Tile:
    """Return the tile of a kernel: of a profile, else of the table.

    Its name is "forward", "keys", "queries", "product" or "bias"; with head dims above 256 "forward", "biased forward"
    or "bias". "sums" is "keys" where it only sums p.

    Args:
        block_d: the larger of the padded head dims.
        bias_tma: whether TMA loads a bias of one value per score.
        few_rows: the kind of key blocks for heads with at most MOST_FEW_ROWS queries; above 256 there is one kind.
        precision: see `precision.py`.
        stored: whether k and v, and q and dout, were split and stored before.
        may_prefer: whether a profile may replace the tile of the table.
    """
    if kernel == "sums":
        if arch == "sm_90" and dtype != torch.float32:
            if mask == TILES.value and block_d <= 256:
                return _row(_SM90_SUMS_TILES, block_d)
            gathers = mask == KEYS.value and bias not in READ_BY_SCORE
            if block_d > 256 or ((gathers or mask == BAND.value) and bias != BANDED.value):
                # A bias of one value per score takes the shared memory of a second program, so no bound on registers.
                wide = bias == TILE_BIAS.value and block_d > 64
                if wide and 128 < block_d <= 256:
                    return _SM90_SUMS_BIASED
                return _row(_SM90_SUMS, max(block_d, 256) if wide else block_d)
        elif block_d > 256:
            return _GFX_SUMS_WIDE if arch.startswith("gfx") else _SUMS_WIDE
        kernel = "keys"
    if runs_on_pieces(precision):
        if kernel == "forward" and arch != "sm_90":
            stored = False  # the tiles for stored pieces spill there
        if stored and kernel == "forward" and bias in READ_BY_SCORE:
            kernel = "biased forward"
        is_small = arch in ("sm_80", "sm_100") or (kernel == "keys" and bias == BANDED.value)
        if is_small and kernel in _PIECES_SMALL and block_d <= 64:
            return _row(_PIECES_SMALL[kernel], block_d)
        return _row((_PIECES_STORED if stored else _PIECES)[kernel], block_d)
    from_table = _tile_of_table(kernel, dtype, block_d, arch, mask, bias, bias_tma, few_rows)
    if not may_prefer:
        return from_table
    if dtype == torch.float32 or mask != BAND.value or bias not in (NO_BIAS.value, TILE_BIAS.value) or few_rows:
        return from_table
    has_bias = bias == TILE_BIAS.value
    if has_bias and arch == "sm_90" and not bias_tma:
        # The tiles there were timed with a bias loaded by TMA, which needs fewer registers than pointers.
        return from_table
    sizes = preferred(kernel, block_d, arch, has_bias)
    return from_table if sizes in (None, from_table[:4]) else Tile(*sizes)


_BY_DISTANCE = (DISTANCES.value, CLAMPED.value)
_BY_POINTERS = (TILE_BIAS.value, BANDED.value)
READ_BY_SCORE = (*_BY_POINTERS, *_BY_DISTANCE)


def _tile_of_table(
    kernel: str, dtype: torch.dtype, block_d: int, arch: str, mask: int, bias: int, bias_tma: bool, few_rows: str | None
) -> Tile:
    if block_d > 256:
        return _row(_wide_table(kernel, dtype, arch, few_rows is not None), block_d)
    if dtype == torch.float32:
        return _row(_fp32_table(kernel, block_d, arch), block_d)
    if arch == "sm_100":
        is_by_distance = kernel == "keys" and bias in _BY_DISTANCE and block_d <= 64
        return _row(_SM100_DISTANCES if is_by_distance else _SM100[kernel], block_d)
    if arch != "sm_90":
        return _row(_SMALL, block_d)
    if few_rows is not None and kernel == "forward":
        if mask in (KEYS.value, TILES.value):
            return _row(_SM90_FEW_ROWS_LISTS, block_d)
        return _row(_SM90_FEW_ROWS_BIAS if bias == TILE_BIAS.value else _SM90_FEW_ROWS[few_rows], block_d)
    if mask == KEYS.value and kernel in _SM90_KEYS:
        # The bias is then gathered, too, and its pointers need registers.
        return _row(_SMALL if bias in READ_BY_SCORE else _SM90_KEYS[kernel], block_d)
    if kernel == "forward" and mask == BAND.value and bias in _BY_DISTANCE and block_d <= 128:
        return _row(_SM90_DISTANCES, block_d)
    if kernel == "queries" and mask == BAND.value and bias in _BY_DISTANCE and block_d > 128:
        return _SM90_DISTANCES_WIDE_QUERIES
    if kernel == "keys" and bias == BANDED.value and block_d <= 128:
        return _row(_SM90_BANDED_KEYS, block_d)
    if kernel == "keys" and bias in _BY_DISTANCE:
        block_d = max(block_d, 64)  # the sums of the ends need registers: 128x64 would spill 264 bytes
    if bias in _BY_POINTERS and not bias_tma and kernel in _SM90_BIAS_POINTERS:
        return _row(_SM90_BIAS_POINTERS[kernel], block_d)
    if bias == TILE_BIAS.value or kernel in ("product", "bias"):
        return _row(_SM90_BIAS[kernel], block_d)
    return _row((_SM90 if mask == BAND.value else _SM90_TILES)[kernel], block_d)


# The kernel in forward mode holds two sums of a tile of out, and q, k, v and their tangents. The second table is for a
# bias of one value per score, or its tangent, that is not loaded by TMA or has 32 bits: docs/notes/triton.md.
_SM90_TANGENTS = {
    64: Tile(64, 64, 4, 3),
    128: Tile(128, 64, 8, 2),  # causal 2,16,16,4096,128 0.88; 1.11 for 128x32 with three stages, 1.34 for 64x32
    256: Tile(64, 32, 4, 2),  # two programs share the columns
}
_SM90_TANGENTS_POINTERS = {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 1)}
_SM80_TANGENTS = {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)}
_FP32_TANGENTS = {64: Tile(16, 32, 4, 1)}
_GFX_TANGENTS = {64: Tile(32, 32, 4, 1), 128: Tile(16, 32, 4, 1)}


def tangents_tile(dtype: torch.dtype, block_d: int, arch: str, by_pointers: bool) -> Tile:
    """Return the tile of the kernel in forward mode.

    Args:
        dtype: of q, k and v.
        block_d: the larger of the padded head dims.
        arch: of the GPU.
        by_pointers: whether a bias of one value per score, or its tangent, is not loaded by TMA, or has 32 bits.
    """
    if arch == "cpu":
        return _row(_FP32 if dtype == torch.float32 else _SMALL, block_d)
    if dtype == torch.float32:
        return _row(_FP32_TANGENTS, block_d)
    if not arch.startswith("sm_"):
        return _row(_GFX_TANGENTS, block_d)
    if arch != "sm_90":
        return _row(_SM80_TANGENTS, block_d)
    return _row(_SM90_TANGENTS_POINTERS if by_pointers else _SM90_TANGENTS, block_d)


def tile_of_short_sequences(block_d: int) -> Tile:
    """Return the tile of every kernel for sequences that are short on average, in 16 bits."""
    return _row(_SMALL, block_d)


def candidates(kernel: str, block_d: int, arch: str, has_bias: bool) -> tuple[Tile, ...]:
    """Return candidate tiles of a kernel whose mask is a band, in 16 bits; the first one is the tile of the table.

    Args:
        kernel, block_d, arch: as in `tile_of`.
        has_bias: whether there is a bias of one value per score.
    """
    bias = TILE_BIAS.value if has_bias else NO_BIAS.value
    from_table = _tile_of_table(kernel, torch.bfloat16, block_d, arch, BAND.value, bias, arch == "sm_90", None)
    others = {"sm_90": _OTHERS_SM90, "sm_100": _OTHERS_SM100}.get(arch, _OTHERS_SM80)
    return (from_table, *(tile for tile in others[kernel][block_d] if tile != from_table))
