"""Tile lists for FlexAttention: which 128 x 128 tiles of a call are partly or wholly allowed, by row and by column."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import AttentionProblem

# FlexAttention's own default; every tile its kernels pick for the head dims it accepts divides it.
BLOCK = 128


class Band(NamedTuple):
    """Causal and window as one condition on a key and a query, lower <= j - i <= upper; None is no limit."""

    lower: int | None
    upper: int | None


class BlockLists(NamedTuple):
    """Contiguous int32 lists (B | 1, Hq | 1, ...): counts per row of tiles, and tile indices of which the first count.

    `kv_*` walk the keys of a row of tiles (forward, dq), `q_*` the queries of a column (dk, dv). A tile in a `full_*`
    list is allowed everywhere, so that the kernel reads no mask for it.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def band_of(problem: AttentionProblem) -> Band:
    """The band of a call, without the limits that exclude nothing: those of a query of length 1, or a wide window."""
    offset = problem.seqlen_k - problem.seqlen_q
    left, right = problem.window_size
    lower = offset - left if left >= 0 else None
    upper = offset + right if right >= 0 else None
    if problem.is_causal:
        upper = offset if upper is None else min(upper, offset)
    if lower is not None and lower <= 1 - problem.seqlen_q:
        lower = None
    if upper is not None and upper >= problem.seqlen_k - 1:
        upper = None
    return Band(lower, upper)


def block_lists(
    mask: Tensor | None,
    band: Band,
    *,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
) -> BlockLists | None:
    """The tile lists of a call, or None where everything is allowed.

    Args:
        mask: (B | 1, Hq | Hk | 1, Lq | 1, Lk | 1) bool, its broadcast dims of size 1, or None.
        band: the causal limit and the window.
        num_heads: Hq. A mask with Hk heads is summarised at its own size and only its lists are repeated.
        seqlen_q, seqlen_k: Lq and Lk, at least 1.
        device: where the lists go. Nothing is read back to the host.

    >>> lists = block_lists(None, Band(None, 0), num_heads=1, seqlen_q=256, seqlen_k=256, device=torch.device("cpu"))
    >>> lists.kv_num_blocks.tolist(), lists.full_kv_num_blocks.tolist()  # the diagonal, and what lies below it
    ([[[1, 1]]], [[[0, 1]]])
    """
    if mask is None and band == Band(None, None):
        return None
    partial, full = tile_classes(mask, band, seqlen_q, seqlen_k, device)
    heads = partial.shape[1]
    if heads not in (1, num_heads):
        # The kernels look a query head up modulo the number of lists, where grouped heads need it divided.
        partial, full = (x.repeat_interleave(num_heads // heads, dim=1) for x in (partial, full))
    return BlockLists(
        *_compact(partial),
        *_compact(full),
        *_compact(partial.transpose(2, 3)),
        *_compact(full.transpose(2, 3)),
    )


def tile_classes(
    mask: Tensor | None, band: Band, seqlen_q: int, seqlen_k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which tiles are (partly, wholly) allowed, bool (B | 1, H | 1, ceil(Lq / 128), ceil(Lk / 128)), disjoint.

    A tile where mask and band each allow something, but nothing in common, counts as partly allowed: it costs time,
    not correctness, as every element of such a tile is tested again.
    """
    rows, keys = _bounds(seqlen_q, device), _bounds(seqlen_k, device)
    some, every = _band_classes(band, rows, keys)
    if mask is not None:
        mask_some, mask_every = _mask_classes(mask, rows, keys)
        some, every = some & mask_some, every & mask_every
    return some & ~every, every


def _bounds(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # First and last position of every tile; the last tile may be short.
    first = torch.arange((length + BLOCK - 1) // BLOCK, device=device, dtype=torch.int32) * BLOCK
    return first, (first + (BLOCK - 1)).clamp(max=length - 1)


def _band_classes(band: Band, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    # j - i takes every value between its extremes on a tile, so the extremes decide.
    (first_row, last_row), (first_key, last_key) = rows, keys
    least = first_key[None, :] - last_row[:, None]
    most = last_key[None, :] - first_row[:, None]
    some = every = torch.ones_like(least, dtype=torch.bool)[None, None]
    if band.lower is not None:
        some, every = some & (most >= band.lower), every & (least >= band.lower)
    if band.upper is not None:
        some, every = some & (least <= band.upper), every & (most <= band.upper)
    return some, every


def _mask_classes(mask: Tensor, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    # Counting reads the mask once, where any() and all() would read it twice; a ragged edge is never padded (a copy).
    area = torch.ones((), dtype=torch.int32, device=mask.device)
    count = mask
    if mask.shape[3] > 1:
        count = _tile_sums(count, 3)
        area = area * (keys[1] - keys[0] + 1)
    if mask.shape[2] > 1:
        count = _tile_sums(count, 2)
        area = area * (rows[1] - rows[0] + 1)[:, None]
    return count > 0, count == area


def _tile_sums(x: Tensor, dim: int) -> Tensor:
    whole = x.shape[dim] // BLOCK
    edge = x.shape[dim] - whole * BLOCK
    sums = x.narrow(dim, 0, whole * BLOCK).unflatten(dim, (whole, BLOCK)).sum(dim + 1, dtype=torch.int32)
    if edge == 0:
        return sums
    rest = x.narrow(dim, whole * BLOCK, edge).sum(dim, keepdim=True, dtype=torch.int32)
    return torch.cat((sums, rest), dim) if whole else rest


def _compact(active: Tensor) -> tuple[Tensor, Tensor]:
    # A stable descending sort puts the indices of the active tiles first, in order, without a host synchronisation.
    # The kernels compute offsets as if both were contiguous, whatever their strides.
    counts = active.sum(-1, dtype=torch.int32)
    indices = active.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.contiguous(), indices.contiguous()
