"""Masks in tiles: counts per tile, expanding of block masks, smoothing to blocks, statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import check_flag, collapse
from .arguments import bool_mask, common_shape, integer, pad, pair
from .builders import causal_mask, combine

# Elements summed at once, to bound memory: padding copies them, and on CPU a sum in another dtype converts them first.
CHUNK_ELEMENTS = 1 << 24


def tile_counts(mask: Tensor, block_size: tuple[int, int]) -> Tensor:
    """Count the True of each tile of a (..., Lq, Lk) mask: int32 (..., ceil(Lq/bq), ceil(Lk/bk))."""
    *lead, seqlen_q, seqlen_k = mask.shape
    if torch.compiler.is_compiling():  # a compiler fuses the copies, and chunks would specialise the graph on sizes
        return _tile_counts(mask, block_size)
    # Tiles larger than the mask are cut to its size, so that no padding is needed.
    block_q, block_k = block_size = min(block_size[0], max(seqlen_q, 1)), min(block_size[1], max(seqlen_k, 1))
    tiles_q, tiles_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    counts = torch.empty(*lead, tiles_q, tiles_k, dtype=torch.int32, device=mask.device)
    rows_at_once = max(1, CHUNK_ELEMENTS * seqlen_q // max(1, mask.numel()))
    step = max(1, rows_at_once // block_q)
    for tile in range(0, tiles_q, step):
        rows = mask[..., tile * block_q : (tile + step) * block_q, :]
        counts[..., tile : tile + step, :] = _tile_counts(rows, block_size)
    return counts


def _tile_counts(rows: Tensor, block_size: tuple[int, int]) -> Tensor:
    """Count the True of each tile, without chunks; used on whole rows of tiles."""
    block_q, block_k = block_size
    seqlen_q, seqlen_k = rows.shape[-2:]
    tiles_q, tiles_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    padded = pad(rows, (0, tiles_k * block_k - seqlen_k, 0, tiles_q * block_q - seqlen_q))
    tiles = padded.unflatten(-1, (tiles_k, block_k)).unflatten(-3, (tiles_q, block_q))
    # A sum of uint8 in uint8 is 25 times faster on CPU than a sum of bool in int32; 255 rows cannot overflow it.
    column_sum = torch.uint8 if block_q <= 255 else torch.int32
    return tiles.view(torch.uint8).sum(-3, dtype=column_sum).sum(-1, dtype=torch.int32)


def tile_sizes(seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], device: torch.device) -> Tensor:
    """Count the positions of each tile; the last ones are smaller: int32 (ceil(Lq/bq), ceil(Lk/bk))."""
    sizes = []
    for length, block in zip((seqlen_q, seqlen_k), block_size, strict=True):
        starts = torch.arange(0, length, block, device=device)
        sizes.append((length - starts).clamp(max=block).to(torch.int32))
    return sizes[0][:, None] * sizes[1]


def expand_blocks(block_mask: Tensor, block_size: int | tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    """Expand a block mask to tokens: every pair of a query and a key in a True block is True.

    Equivalent to `block_mask.repeat_interleave(bq, -2).repeat_interleave(bk, -1)[..., :seqlen_q, :seqlen_k]`.
    A block mask does not distinguish positions inside a block: pass `is_causal=True` or a second mask for that.

    Args:
        block_mask: bool tensor of 2 to 4 dims, (..., ceil(seqlen_q / bq) or 1, ceil(seqlen_k / bk) or 1).
        block_size: tokens per block, one int or (bq, bk).
        seqlen_q, seqlen_k: number of queries and keys; the last blocks may be smaller.

    Returns:
        4-D bool tensor (..., seqlen_q, seqlen_k); a dim with one block stays of size 1.

    Raises:
        TypeError: `block_mask` is not bool, or a size is not an int.
        ValueError: the number of blocks is neither 1 nor the number that the lengths need.

    Example:
        >>> expand_blocks(torch.tensor([[True, False], [True, True]]), 2, 3, 4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    out = bool_mask("block_mask", block_mask)
    blocks = pair("block_size", block_size, 1)
    for dim, name, length, block in ((3, "seqlen_k", seqlen_k, blocks[1]), (2, "seqlen_q", seqlen_q, blocks[0])):
        check_blocks(block_mask, name, out.size(dim), length, block)
        if out.size(dim) == 1 and length:
            continue
        out = out.index_select(dim, torch.arange(length, device=out.device) // block)
    return out


def check_blocks(block_mask: Tensor, name: str, number: int, length: int, block: int) -> None:
    """Refuse a number of blocks that is neither 1 nor the number that a length needs."""
    needed = -(-integer(name, length) // block)
    if number not in (1, needed):
        raise ValueError(
            f"block_mask has {number} blocks along {name} (shape {tuple(block_mask.shape)}); it needs {needed}, or 1, "
            f"for {name} = {length} in blocks of {block}"
        )


def smooth_blocks(
    mask: Tensor, block_size: int | tuple[int, int], *, is_causal: bool = False, allowed: Tensor | None = None
) -> Tensor:
    """Set each tile of a mask to the majority of its allowed positions, so that kernels skip more tiles.

    A tile becomes True if more than half of its positions that causality and `allowed` permit are True. The result
    is never True outside of these, and a row that would lose all its keys is not changed.

    Args:
        mask: bool tensor of 2 to 4 dims, (..., Lq, Lk); a size of 1 is expanded to the length of `allowed`.
        block_size: tokens per tile, one int or (bq, bk); (1, bk) smooths each row separately.
        is_causal: whether only keys up to i + Lk - Lq are permitted.
        allowed: bool tensor broadcastable with `mask`, True for permitted positions.

    Returns:
        4-D bool tensor of the broadcast shape.

    Raises:
        TypeError, ValueError: not a bool mask, a block size below 1, a flag that is no bool, shapes that do not
            broadcast.

    Example:
        >>> smooth_blocks(torch.tensor([[True, True, True, False, False, True]]), (1, 3)).int()
        tensor([[[[1, 1, 1, 0, 0, 0]]]], dtype=torch.int32)
    """
    mask = bool_mask("mask", mask)
    blocks = pair("block_size", block_size, 1)
    check_flag("is_causal", is_causal)
    operands = [("mask", mask)] if allowed is None else [("mask", mask), ("allowed", bool_mask("allowed", allowed))]
    # Only lengths are compared, with one head of each: `combine` aligns grouped heads.
    seqlen_q, seqlen_k = common_shape([m[:, :1] for _, m in operands], [name for name, _ in operands])[2:]
    limit = combine(allowed, causal_mask(seqlen_q, seqlen_k, device=mask.device) if is_causal else None)
    kept = mask if limit is None else combine(mask, limit)
    assert kept is not None  # because mask is a tensor
    kept = kept.expand(*kept.shape[:2], seqlen_q, seqlen_k)
    if limit is None:
        possible = tile_sizes(seqlen_q, seqlen_k, blocks, mask.device)
    else:
        limit = limit.expand(*limit.shape[:2], seqlen_q, seqlen_k)
        if limit.size(1) not in (1, kept.size(1)):
            limit = limit.repeat_interleave(kept.size(1) // limit.size(1), dim=1)
        possible = tile_counts(limit, blocks)
    dense = 2 * tile_counts(kept, blocks) > possible
    smooth = expand_blocks(dense, blocks, seqlen_q, seqlen_k).expand_as(kept)
    if limit is not None:
        smooth = smooth & limit
    return torch.where(smooth.any(-1, keepdim=True), smooth, kept)


@dataclass(frozen=True)
class MaskStats:
    """How sparse a mask is, for tokens, tiles and rows.

    Attributes:
        shape: (batch, heads, seqlen_q, seqlen_k) of the mask.
        block_size: (queries, keys) of a tile.
        density: fraction of positions that are True.
        active_tile_fraction: fraction of tiles with at least one True: the tiles that a kernel computes.
        full_tile_fraction: fraction of tiles that are all True: a kernel does not apply the mask there.
        empty_rows: number of rows, over batch and heads, without a visible key.
    """

    shape: tuple[int, int, int, int]
    block_size: tuple[int, int]
    density: float
    active_tile_fraction: float
    full_tile_fraction: float
    empty_rows: int

    def __str__(self) -> str:
        rows = self.shape[0] * self.shape[1] * self.shape[2]
        return (
            f"{' x '.join(map(str, self.shape))}, density {self.density:.1%}, "
            f"{self.block_size[0]}x{self.block_size[1]} tiles: {self.active_tile_fraction:.1%} active, "
            f"{self.full_tile_fraction:.1%} full; empty rows {self.empty_rows} of {rows}"
        )


def mask_stats(
    mask: Tensor, block_size: int | tuple[int, int] = 128, *, seqlen_q: int | None = None, seqlen_k: int | None = None
) -> MaskStats:
    """Count density, active and full tiles, and empty rows of a mask; it waits for the device.

    Equivalent to `mask.float().mean()`, the fraction of tiles with any True or all True, and
    `(~mask.any(-1)).sum()`.

    Args:
        mask: bool tensor of 2 to 4 dims.
        block_size: tokens per tile, one int or (queries, keys); tiles at the end may be smaller.
        seqlen_q, seqlen_k: lengths to which a size of 1 is expanded.

    Returns:
        MaskStats. Fractions are 0 if a length is 0.

    Raises:
        TypeError, ValueError: not a bool mask, a block size below 1, or lengths other than the sizes of the mask.

    Example:
        >>> from flash_dmattn.masks import causal_mask
        >>> stats = mask_stats(causal_mask(4, 4), block_size=2)
        >>> stats.density, stats.active_tile_fraction, stats.full_tile_fraction, stats.empty_rows
        (0.625, 0.75, 0.25, 0)
    """
    blocks = pair("block_size", block_size, 1)
    full = expand_lengths(bool_mask("mask", mask), seqlen_q, seqlen_k)
    batch, num_heads, length_q, length_k = full.shape
    # Expanded batch entries and heads are equal: count one, and multiply.
    one = collapse(full, dims=(0, 1))
    copies = batch * num_heads // max(1, one.size(0) * one.size(1))
    counts = tile_counts(one, blocks)
    sizes = tile_sizes(length_q, length_k, blocks, mask.device)
    positions, tiles = max(1, one.numel()), max(1, counts.numel())
    attending = int(counts.sum(dtype=torch.int64))
    return MaskStats(
        shape=(batch, num_heads, length_q, length_k),
        block_size=blocks,
        density=attending / positions,
        active_tile_fraction=int((counts > 0).sum()) / tiles,
        full_tile_fraction=int((counts == sizes).sum()) / tiles,
        empty_rows=copies * int((~one.any(-1)).sum()),
    )


def expand_lengths(mask: Tensor, seqlen_q: int | None, seqlen_k: int | None) -> Tensor:
    """Expand query and key dims of size 1 of a 4-D mask to the lengths, without a copy."""
    for dim, name, length in ((2, "seqlen_q", seqlen_q), (3, "seqlen_k", seqlen_k)):
        if length is None:
            continue
        if mask.size(dim) not in (1, integer(name, length)):
            raise ValueError(f"mask has {name} = {mask.size(dim)} (shape {tuple(mask.shape)}); it needs {length} or 1")
        sizes = [-1, -1, -1, -1]
        sizes[dim] = length
        mask = mask.expand(*sizes)
    return mask
