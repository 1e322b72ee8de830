"""Tiles of a profile of the GPU, which replace rows of the tile table. This module does not import Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .gpus import shared_bytes

# Queries and keys of a tile, warps of a program, and stages of its pipeline.
Sizes = tuple[int, int, int, int]

# The largest padded head dims of the rows that a profile may have, and the kernels.
ROWS = (64, 128, 256)
KERNELS = ("forward", "keys", "queries", "product", "bias")
# The most keys of a call that is one tile in every kernel: `plan.MOST_FEW_KEYS`, without importing Triton.
LEAST_KEYS = 32
_POWERS = {16, 32, 64, 128, 256}

# Tables of launch plans add their `clear` here, because a plan keeps its tiles.
on_change: list[Callable[[], None]] = []


def class_name(kernel: str, row: int, has_bias: bool) -> str:
    """Return the name of a class of tiles in a profile: the kernel, the row of its head dims, its mask, and its bias.

    Calls with masks other than a band, or a bias of one value per query or key, use the tiles of the table.
    """
    return f"{kernel}|{row}|band|{'score' if has_bias else 'none'}"


def is_usable(name: str, sizes: Sizes, arch: str) -> bool:
    """Return whether a class may run on a tile: kernels support its sizes, and shared memory can hold its blocks."""
    kernel, row = name.split("|")[:2]
    block_m, block_n, num_warps, num_stages = sizes
    if not (block_m in _POWERS and block_n in _POWERS and block_n >= LEAST_KEYS):
        return False
    if num_warps not in (1, 2, 4, 8, 16) or not 1 <= num_stages <= 8:
        return False
    # The rows of one operand, in 16 bits, that the loop of the kernel prefetches.
    loaded = block_m if kernel in ("keys", "bias") else block_n
    return 2 * num_stages * loaded * int(row) <= shared_bytes(arch)


def _nothing(arch: str) -> Mapping[str, Sizes]:
    return {}


_tiles_of: Callable[[str], Mapping[str, Sizes]] = _nothing


def prefer(tiles_of: Callable[[str], Mapping[str, Sizes]]) -> None:
    """Set the function that returns the preferred tiles of an architecture, by the names of their classes."""
    global _tiles_of
    _tiles_of = tiles_of
    for notify in on_change:
        notify()


def preferred(kernel: str, block_d: int, arch: str, has_bias: bool) -> Sizes | None:
    """Return the tile that a profile prefers for a kernel whose mask is a band; None if it names no usable one."""
    row = next((row for row in ROWS if block_d <= row), None)
    if row is None:
        return None
    name = class_name(kernel, row, has_bias)
    sizes = _tiles_of(arch).get(name)
    return sizes if sizes is not None and is_usable(name, sizes, arch) else None
