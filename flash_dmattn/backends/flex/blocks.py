"""Masks, causal limits and windows in the form of FlexAttention: lists of 128 x 128 tiles, and limits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...definition import define
from ...problem import AttentionProblem
from ...reference import formula
from ...reference.lists import repeat_heads

# FlexAttention's default; the tiles of its kernels divide it for all supported head dims.
BLOCK = 128

# The eight tensors of a BlockMask, in its order: contiguous int32 (B | 1, Hq | 1, ...). The first two are counts (...,
# rows) and indices (..., rows, columns) of the partial tiles of a row. The next two are the full tiles, for which the
# kernel needs no mask. The same four for each column follow. A count is the number of valid indices.
Lists = tuple[Tensor, ...]


class Places(NamedTuple):
    """The token in each row of the padded sequences, for indexing masks and biases: int32.

    Attributes:
        sequence, query, token: for each query its sequence, its position there, and its index among all packed tokens.
        key: for each key its position in its sequence.
    """

    sequence: Tensor
    query: Tensor
    token: Tensor
    key: Tensor


class Blocks(NamedTuple):
    """Masks, limits and sequences as tensors, which are inputs of a graph, so that their values do not recompile it.

    Attributes:
        lists: the tile lists; None where every pair is allowed.
        lower, upper: int32. Without a dimension they are limits on key - query. With one they are the first and the
            last key that each query may attend to, in rows of sequences. None is no limit.
        places: for indexing a mask or a bias; None if they are indexed by row and column.
        origin: int32, of a bias by distance: the index of key - query = 0 in its values.
    """

    lists: Lists | None = None
    lower: Tensor | None = None
    upper: Tensor | None = None
    places: Places | None = None
    origin: Tensor | None = None


def make_limits(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """Return the limits on key - query; None if a limit hides no pair, as for 1 query or a large window."""
    offset = problem.seqlen_k - problem.seqlen_q
    left, right = problem.window
    lower = offset - left if left >= 0 else None
    upper = offset + right if right >= 0 else None
    if lower is not None and lower <= 1 - problem.seqlen_q:
        lower = None
    if upper is not None and upper >= problem.seqlen_k - 1:
        upper = None
    return lower, upper


def dense_blocks(problem: AttentionProblem, mask: Tensor | None, device: torch.device) -> Blocks:
    """Make the lists and limits of a dense call, without waiting for the device.

    A mask (B | 1, Hq | Hk | 1, Lq | 1, Lk | 1), its broadcast dims of size 1, is summarised at this size; only its
    lists are repeated. A caller's graph has one operator for all of this, because captured expressions that are not
    buffers make Inductor's FlexAttention fail on CPU (torch 2.13).
    """
    p, (lower, upper) = problem, make_limits(problem)
    if mask is None and lower is None and upper is None:
        return Blocks()
    function = _DENSE if torch.compiler.is_compiling() else dense_tensors
    made = function(mask, lower, upper, p.num_heads, p.seqlen_q, p.seqlen_k, device, p.batch, p.flags.mask_repeat)
    # An operator cannot return None, so it returns only existing limits, after the lists.
    return Blocks(tuple(made[:8]), None if lower is None else made[8], None if upper is None else made[-1])


def dense_tensors(
    mask: Tensor | None,
    lower: int | None,
    upper: int | None,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
    batch: int,
    repeat: int,
) -> list[Tensor]:
    """Make the lists of a dense call, then the limits that it has as tensors, filled on the device.

    Entry b of the batch has entry b // repeat of the mask, cyclically. A tile in which mask and limits allow pairs, but
    no common pair, is listed as partial, which is correct, because the kernel tests each pair, but slower.

    >>> made = dense_tensors(None, None, 0, 1, 256, 256, torch.device("cpu"), 1, 1)
    >>> made[0].tolist(), made[2].tolist()  # the diagonal, and what lies below it
    ([[[1, 1]]], [[[0, 1]]])
    """
    rows, keys = tile_edges(seqlen_q, device), tile_edges(seqlen_k, device)
    some, every = band(lower, upper, (rows[0][:, None], rows[1][:, None]), keys)
    some, every = some[None, None], every[None, None]
    if mask is not None:
        mask_some, mask_every = mask_classes(mask, rows, keys)
        some, every = some & mask_some, every & mask_every
    some, every = (formula.spread_entries(x, batch, repeat) for x in (some, every))
    limits = (torch.full((), n, dtype=torch.int32, device=device) for n in (lower, upper) if n is not None)
    return [*tile_lists(some, every, num_heads), *limits]


def _dense_fake(mask: Tensor | None, lower: int | None, upper: int | None, *sizes: Any) -> list[Tensor]:
    num_heads, seqlen_q, seqlen_k, device, batch, _ = sizes
    entries, heads = (1, 1) if mask is None else (mask.shape[0], mask.shape[1])
    shared = (entries if entries == 1 else batch, heads if heads == 1 else num_heads)
    shapes = list_shapes(*shared, *((length + BLOCK - 1) // BLOCK for length in (seqlen_q, seqlen_k)))
    shapes += [() for n in (lower, upper) if n is not None]
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


_DENSE = define(
    "flex_blocks",
    "(Tensor? mask, SymInt? lower, SymInt? upper, SymInt num_heads, SymInt seqlen_q, SymInt seqlen_k, Device device, "
    "SymInt batch, SymInt repeat) -> Tensor[]",
    dense_tensors,
    _dense_fake,
)


def tile_edges(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of every tile; the last tile may be partial."""
    first = torch.arange((length + BLOCK - 1) // BLOCK, device=device, dtype=torch.int32) * BLOCK
    return first, (first + (BLOCK - 1)).clamp(max=length - 1)


def band(
    lower: int | None, upper: int | None, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return in which tiles limits on key - query allow a pair, and in which every pair, from the edges of tiles."""
    # key - query takes every value between its extremes on a tile, so the extremes decide.
    least, most = keys[0] - rows[1], keys[1] - rows[0]
    some = every = torch.ones_like(least, dtype=torch.bool)
    if lower is not None:
        some, every = some & (most >= lower), every & (least >= lower)
    if upper is not None:
        some, every = some & (least <= upper), every & (most <= upper)
    return some, every


def mask_classes(mask: Tensor, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return in which tiles a 4-D mask allows a pair, and in which every pair; dims of size 1 are kept."""
    # Counting needs one pass over the mask, any() and all() would need two. A ragged edge is not padded, to avoid a
    # copy.
    area = torch.ones((), dtype=torch.int32, device=mask.device)
    count = mask
    if mask.shape[3] > 1:
        count = tile_sums(count, 3)
        area = area * (keys[1] - keys[0] + 1)
    if mask.shape[2] > 1:
        count = tile_sums(count, 2)
        area = area * (rows[1] - rows[0] + 1)[:, None]
    return count > 0, count == area


def tile_sums(x: Tensor, dim: int) -> Tensor:
    tiles, edge = divmod(x.shape[dim], BLOCK)
    sums = x.narrow(dim, 0, tiles * BLOCK).unflatten(dim, (tiles, BLOCK)).sum(dim + 1, dtype=torch.int32)
    if edge == 0:
        return sums
    rest = x.narrow(dim, tiles * BLOCK, edge).sum(dim, keepdim=True, dtype=torch.int32)
    return torch.cat((sums, rest), dim) if tiles else rest


def tile_lists(some: Tensor, every: Tensor, num_heads: int) -> list[Tensor]:
    """Make `Lists` from bool (B, H, rows, columns): which tiles allow a pair, and which allow every pair."""
    # The kernels look a query head up modulo the number of lists.
    some, every = (repeat_heads(x, num_heads) for x in (some, every))
    partial = some & ~every
    return [x for active in (partial, every, partial.mT, every.mT) for x in _compact(active)]


def _compact(active: Tensor) -> tuple[Tensor, Tensor]:
    # A stable descending sort puts the indices of the active tiles first, in order, without a host synchronisation.
    # The kernels compute offsets as if both were contiguous, whatever their strides.
    counts = active.sum(-1, dtype=torch.int32)
    indices = active.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts.contiguous(), indices.to(torch.int32, memory_format=torch.contiguous_format)


def list_shapes(entries: int, heads: int, rows: int, columns: int) -> list[tuple[int, ...]]:
    shared = (entries, heads)
    return [(*shared, rows), (*shared, rows, columns)] * 2 + [(*shared, columns), (*shared, columns, rows)] * 2
