"""Tile lists for FlexAttention: which 128 x 128 tiles of a call are partly or wholly allowed, by row and by column."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...definition import define
from ...problem import AttentionProblem
from ...reference import formula

# FlexAttention's own default; every tile its kernels pick for the head dims it accepts divides it.
BLOCK = 128


class Limits(NamedTuple):
    """The band of a call as conditions on a key and a query, lower <= j - i <= upper; None is no condition."""

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


def limits_of(problem: AttentionProblem) -> Limits:
    """The band of a call, without the limits that exclude nothing: those of a query of length 1, or a wide window."""
    offset = problem.seqlen_k - problem.seqlen_q
    left, right = problem.window
    lower = offset - left if left >= 0 else None
    upper = offset + right if right >= 0 else None
    if lower is not None and lower <= 1 - problem.seqlen_q:
        lower = None
    if upper is not None and upper >= problem.seqlen_k - 1:
        upper = None
    return Limits(lower, upper)


class Places(NamedTuple):
    """Where the rows that sequences are laid out in come from, int32; 0 of rows that come from nowhere.

    Attributes:
        sequence, query, token: of each query its sequence, its place in that, and its token among all that are packed.
        key: of each key its place in its sequence.
    """

    sequence: Tensor
    query: Tensor
    token: Tensor
    key: Tensor


class Blocks(NamedTuple):
    """What a call's mask, causal limit and window become: tile lists, and the limits as int32 of no dimension.

    Tensors all, filled on the device: a Python int would be compiled into the graph, a copied one would wait for the
    host. None is no limit; no lists mean that everything is allowed. Of sequences the limits have one dimension: the
    first and the last key that each query may see; `places` are then what masks and biases are read through.
    """

    lists: BlockLists | None = None
    lower: Tensor | None = None
    upper: Tensor | None = None
    places: Places | None = None


def prepare_blocks(problem: AttentionProblem, mask: Tensor | None, device: torch.device) -> Blocks:
    """The lists and limits of a call, without a host synchronisation.

    A mask (B | 1, Hq | Hk | 1, Lq | 1, Lk | 1), its broadcast dims of size 1, is summarised at its own size, and its
    lists alone are repeated. In a caller's graph all is one operator, which Inductor would otherwise take apart:
    captured expressions that are not buffers make its FlexAttention fail on CPU (torch 2.13).
    """
    p, limits = problem, limits_of(problem)
    if mask is None and limits == Limits(None, None):
        return Blocks()
    sizes = (p.num_heads, p.seqlen_q, p.seqlen_k, device, p.batch, p.flags.mask_repeat)
    if torch.compiler.is_compiling():
        *lists, lower, upper = _OPERATOR(mask, limits.lower, limits.upper, *sizes)
        return Blocks(
            BlockLists(*lists), None if limits.lower is None else lower, None if limits.upper is None else upper
        )
    lower, upper = (None if n is None else _filled(n, device) for n in limits)
    return Blocks(block_lists(mask, limits, *sizes), lower, upper)


def _filled(limit: int, device: torch.device) -> Tensor:
    return torch.full((), limit, dtype=torch.int32, device=device)


def _blocks(mask: Tensor | None, lower: int | None, upper: int | None, *sizes: Any) -> list[Tensor]:
    # An operator returns no None: an unused limit is filled with 0.
    return [*block_lists(mask, Limits(lower, upper), *sizes), *(_filled(n or 0, sizes[3]) for n in (lower, upper))]


def _blocks_fake(mask: Tensor | None, lower: int | None, upper: int | None, *sizes: Any) -> list[Tensor]:
    num_heads, seqlen_q, seqlen_k, device, batch, _ = sizes
    entries, heads = (1, 1) if mask is None else (mask.shape[0], mask.shape[1])
    lists = (entries if entries == 1 else batch, heads if heads == 1 else num_heads)
    rows, columns = ((length + BLOCK - 1) // BLOCK for length in (seqlen_q, seqlen_k))
    shapes = [(*lists, rows), (*lists, rows, columns)] * 2 + [(*lists, columns), (*lists, columns, rows)] * 2 + [()] * 2
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


_OPERATOR = define(
    "flex_blocks",
    "(Tensor? mask, SymInt? lower, SymInt? upper, SymInt num_heads, SymInt seqlen_q, SymInt seqlen_k, Device device, "
    "SymInt batch, SymInt repeat) -> Tensor[]",
    _blocks,
    _blocks_fake,
)


def block_lists(
    mask: Tensor | None,
    limits: Limits,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
    batch: int | None = None,
    repeat: int = 1,
) -> BlockLists:
    """The tile lists of a mask and of limits; entry b of the batch reads entry b // repeat of the mask, cyclically.

    >>> lists = block_lists(None, Limits(None, 0), 1, 256, 256, torch.device("cpu"))
    >>> lists.kv_num_blocks.tolist(), lists.full_kv_num_blocks.tolist()  # the diagonal, and what lies below it
    ([[[1, 1]]], [[[0, 1]]])
    """
    partial, full = tile_classes(mask, limits, seqlen_q, seqlen_k, device)
    heads = partial.shape[1]
    if heads not in (1, num_heads):
        # The kernels look a query head up modulo the number of lists, where grouped heads need it divided.
        partial, full = (x.repeat_interleave(num_heads // heads, dim=1) for x in (partial, full))
    if batch is not None:
        # Nor do they divide the batch where parts of it share an entry.
        partial, full = (formula.spread_entries(x, batch, repeat) for x in (partial, full))
    return BlockLists(*(x for a in (partial, full, partial.mT, full.mT) for x in compact(a)))


def tile_classes(
    mask: Tensor | None, limits: Limits, seqlen_q: int, seqlen_k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which tiles are (partly, wholly) allowed, bool (B | 1, H | 1, ceil(Lq / 128), ceil(Lk / 128)), disjoint.

    A tile where mask and limits each allow something, but nothing in common, counts as partly allowed: it costs time,
    not correctness, as every element of such a tile is tested again.
    """
    rows, keys = tile_bounds(seqlen_q, device), tile_bounds(seqlen_k, device)
    some, every = _band_classes(limits, rows, keys)
    if mask is not None:
        mask_some, mask_every = mask_classes(mask, rows, keys)
        some, every = some & mask_some, every & mask_every
    return some & ~every, every


def tile_bounds(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # First and last position of every tile; the last tile may be short.
    first = torch.arange((length + BLOCK - 1) // BLOCK, device=device, dtype=torch.int32) * BLOCK
    return first, (first + (BLOCK - 1)).clamp(max=length - 1)


def _band_classes(limits: Limits, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    # j - i takes every value between its extremes on a tile, so the extremes decide.
    (first_row, last_row), (first_key, last_key) = rows, keys
    least = first_key[None, :] - last_row[:, None]
    most = last_key[None, :] - first_row[:, None]
    some = every = torch.ones_like(least, dtype=torch.bool)[None, None]
    if limits.lower is not None:
        some, every = some & (most >= limits.lower), every & (least >= limits.lower)
    if limits.upper is not None:
        some, every = some & (least <= limits.upper), every & (most <= limits.upper)
    return some, every


def mask_classes(mask: Tensor, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    # Counting reads the mask once, where any() and all() would read it twice; a ragged edge is never padded (a copy).
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
    whole = x.shape[dim] // BLOCK
    edge = x.shape[dim] - whole * BLOCK
    sums = x.narrow(dim, 0, whole * BLOCK).unflatten(dim, (whole, BLOCK)).sum(dim + 1, dtype=torch.int32)
    if edge == 0:
        return sums
    rest = x.narrow(dim, whole * BLOCK, edge).sum(dim, keepdim=True, dtype=torch.int32)
    return torch.cat((sums, rest), dim) if whole else rest


def compact(active: Tensor) -> tuple[Tensor, Tensor]:
    # A stable descending sort puts the indices of the active tiles first, in order, without a host synchronisation.
    # The kernels compute offsets as if both were contiguous, whatever their strides.
    counts = active.sum(-1, dtype=torch.int32)
    indices = active.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.contiguous(), indices.contiguous()
