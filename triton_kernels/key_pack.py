"""The kernels that pack masks described key by key: one row for all queries, or one interval of queries per key.

A program takes a chunk of the keys of one head. The position of a key in the result depends on how many keys before it
are kept. So for rows of several chunks, a first launch counts the kept keys of each chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flash_dmattn.masks.prepared.intervals import IntervalTiles, KeyIntervals
from flash_dmattn.masks.prepared.packing import TILE, KeySet, tiles
from flash_dmattn.problem import Band

from .kernel_launch import ceil_div, launch, next_power_of_2
from .mask_pack import list_tiles

# Keys of a chunk, its warps, and the maximum number of chunks of a row: a program needs the counts of all chunks at
# once.
CHUNK, CHUNK_NUM_WARPS, MOST_CHUNKS = 4096, 8, 1024
# Keys and warps of the one chunk of a short row.
SHORT_CHUNK, SHORT_NUM_WARPS = 1024, 4
# Scores that a program converts to integers of the same order, and its warps.
SCORES_BLOCK, SCORES_NUM_WARPS = 1024, 4
# Columns of the result that a program writes, and its warps.
PLACES_BLOCK, PLACES_NUM_WARPS = 512, 4
# Tiles of queries that a program of the tile kernel compares with its 128 columns at once, and its warps.
TILES_BLOCK, TILES_NUM_WARPS = 16, 4


@triton.jit
def _live(mask_ptr, keys, seqlen_q, seqlen_k, stride_k, low, high):
    """Return the queries that see each key, from `start` to `stop`, and whether there are any."""
    start = tl.maximum(keys - high, 0)
    stop = tl.minimum(keys - low + 1, seqlen_q)
    flags = tl.load(mask_ptr + keys.to(tl.int64) * stride_k, mask=keys < seqlen_k, other=0) != 0
    return start, stop, (flags & (start < stop)).to(tl.int32)


@triton.jit
def _chunk_of(mask_ptr, num_heads, stride_b, stride_h, chunks, CHUNK: tl.constexpr):
    """Return the head and the chunk of a program, the keys of the chunk, and a pointer to the mask of the head."""
    head = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    keys = chunk * CHUNK + tl.arange(0, CHUNK)
    return head, chunk, keys, mask_ptr + head // num_heads * stride_b + head % num_heads * stride_h


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "seqlen_k", "stride_b", "stride_h", "low", "high", "chunks"])
def _count_kernel(
    mask_ptr, counts_ptr, num_heads, seqlen_q, seqlen_k, stride_b, stride_h, stride_k, low, high, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    head, chunk, keys, mask_ptr = _chunk_of(mask_ptr, num_heads, stride_b, stride_h, chunks, CHUNK)
    _, _, live = _live(mask_ptr, keys, seqlen_q, seqlen_k, stride_k, low, high)
    tl.store(counts_ptr + head * chunks + chunk, tl.sum(live, axis=0))


@triton.jit
def _places(counts_ptr, live, head, chunk, chunks, COUNTS: tl.constexpr):
    """Count the live keys before each key of a chunk, and in the row. COUNTS is a power of 2, at least `chunks`."""
    if COUNTS == 1:
        before = 0
        total = tl.sum(live, axis=0)
    else:
        others = tl.arange(0, COUNTS)
        counts = tl.load(counts_ptr + head * chunks + others, mask=others < chunks, other=0)
        before = tl.sum(tl.where(others < chunk, counts, 0), axis=0)
        total = tl.sum(counts, axis=0)
    return before + tl.cumsum(live, axis=0) - live, total


@triton.jit(do_not_specialize=["num_heads", "seqlen_k", "stride_b", "stride_h", "chunks"])
def _key_set_kernel(
    mask_ptr, counts_ptr, kept_ptr, count_ptr, prefix_ptr,
    num_heads, seqlen_k, stride_b, stride_h, stride_k, chunks,
    CHUNK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    head, chunk, keys, mask_ptr = _chunk_of(mask_ptr, num_heads, stride_b, stride_h, chunks, CHUNK)
    _, _, flags = _live(mask_ptr, keys, 1, seqlen_k, stride_k, -1, seqlen_k)
    places, total = _places(counts_ptr, flags, head, chunk, chunks, COUNTS)
    inside = keys < seqlen_k
    kept_ptr += head * seqlen_k
    prefix_ptr += head * (seqlen_k + 1)
    tl.store(prefix_ptr + keys, places, mask=inside)
    tl.store(kept_ptr + places, keys, mask=flags != 0)
    # Columns after the last kept key have seqlen_k, which is no key.
    tl.store(kept_ptr + keys, tl.zeros_like(keys) + seqlen_k, mask=inside & (keys >= total))
    if chunk == 0:
        tl.store(prefix_ptr + seqlen_k, total)
        tl.store(count_ptr + head, total)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "seqlen_k", "stride_b", "stride_h", "low", "high", "chunks"])
def _key_intervals_kernel(
    mask_ptr, counts_ptr, start_ptr, stop_ptr, order_ptr,
    num_heads, seqlen_q, seqlen_k, stride_b, stride_h, stride_k, low, high, chunks,
    CHUNK: tl.constexpr, COUNTS: tl.constexpr, REORDER: tl.constexpr,
):  # fmt: skip
    head, chunk, keys, mask_ptr = _chunk_of(mask_ptr, num_heads, stride_b, stride_h, chunks, CHUNK)
    start, stop, live = _live(mask_ptr, keys, seqlen_q, seqlen_k, stride_k, low, high)
    inside = keys < seqlen_k
    at = head * seqlen_k + keys
    tl.store(start_ptr + at, start * live, mask=inside)
    tl.store(stop_ptr + at, stop * live, mask=inside)
    if REORDER:
        places, total = _places(counts_ptr, live, head, chunk, chunks, COUNTS)
        places = tl.where(live != 0, places, total + keys - places)
        tl.store(order_ptr + head * seqlen_k + places, keys, mask=inside)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "tiles_q", "tiles_k"])
def _interval_tiles_kernel(
    start_ptr, stop_ptr, order_ptr, bounds_ptr, classes_ptr, seqlen_q, seqlen_k, tiles_q, tiles_k,
    HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # A program has 128 columns of a head.
    head = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = tl.program_id(0) % tiles_k
    places = tile_k * TILE + tl.arange(0, TILE)
    inside = places < seqlen_k
    keys = head * seqlen_k + places
    if HAS_ORDER:
        keys = head * seqlen_k + tl.load(order_ptr + keys, mask=inside, other=0)
    start = tl.load(start_ptr + keys, mask=inside, other=0)
    stop = tl.load(stop_ptr + keys, mask=inside, other=0)
    at = bounds_ptr + (head * tiles_k * TILE + places) * 2
    tl.store(at, start)
    tl.store(at + 1, stop)

    classes_ptr += head * tiles_q * tiles_k + tile_k
    for first_tile in range(0, tiles_q, BLOCK):
        tiles_of = first_tile + tl.arange(0, BLOCK)
        first = tiles_of * TILE
        end = tl.minimum(first + TILE, seqlen_q)
        sees = (start[None, :] < end[:, None]) & (stop[None, :] > first[:, None]) & (start < stop)[None, :]
        sees_all = (start[None, :] <= first[:, None]) & (stop[None, :] >= end[:, None])
        is_active = tl.max(sees.to(tl.int32), axis=1)
        is_full = tl.min(sees_all.to(tl.int32), axis=1)
        kind = (is_active + is_active * is_full).to(tl.uint8)
        tl.store(classes_ptr + tiles_of.to(tl.int64) * tiles_k, kind, mask=tiles_of < tiles_q)


@triton.jit(do_not_specialize=["total", "places", "seqlen_k"])
def _first_places_kernel(
    start_ptr, stop_ptr, order_ptr, placed_start_ptr, placed_stop_ptr, placed_order_ptr, total, places, seqlen_k,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    first = at // places * seqlen_k  # of the head
    key = tl.load(order_ptr + first + at % places, mask=inside, other=0)
    tl.store(placed_order_ptr + at, key, mask=inside)
    tl.store(placed_start_ptr + at, tl.load(start_ptr + first + key, mask=inside, other=0), mask=inside)
    tl.store(placed_stop_ptr + at, tl.load(stop_ptr + first + key, mask=inside, other=0), mask=inside)


@triton.jit(
    do_not_specialize=[
        "total", "num_heads", "seqlen_k", "score_b", "score_h", "score_k", "allowed_b", "allowed_h", "allowed_k",
    ]
)  # fmt: skip
def _score_keys_kernel(
    scores_ptr, allowed_ptr, keys_ptr, total, num_heads, seqlen_k,
    score_b, score_h, score_k, allowed_b, allowed_h, allowed_k,
    HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    head, key = at // seqlen_k, at % seqlen_k
    batch, head = head // num_heads, head % num_heads
    score = tl.load(scores_ptr + batch * score_b + head * score_h + key * score_k, mask=inside, other=0.0)
    if scores_ptr.dtype.element_ty == tl.float64:
        bits = score.to(tl.int64, bitcast=True)
        highest = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    else:
        score = score.to(tl.float32)
        bits = score.to(tl.int32, bitcast=True)
        highest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    lowest = ~highest
    bits = tl.where(bits == lowest, 0, bits)  # the two zeros tie
    keys = tl.where(bits < 0, bits ^ highest, bits)
    keys = tl.where(score != score, lowest + 1, keys)
    keys = tl.where(score == float("-inf"), lowest, keys)
    if HAS_ALLOWED:
        offsets = batch * allowed_b + head * allowed_h + key * allowed_k
        keys = tl.where(tl.load(allowed_ptr + offsets, mask=inside, other=0) != 0, keys, lowest)
    tl.store(keys_ptr + at, keys, mask=inside)


class _Chunks(NamedTuple):
    """How the keys of a mask are split over programs: keys of a chunk, warps of a program, and chunks of a row."""

    size: int
    num_warps: int
    number: int

    def counts(self, mask: torch.Tensor) -> torch.Tensor:
        """Allocate the counts of all chunks; empty where a row has one chunk and needs no count."""
        heads = mask.shape[0] * mask.shape[1]
        return torch.empty(heads * (self.number if self.number > 1 else 0), dtype=torch.int32, device=mask.device)

    def constants(self) -> tuple[int, int]:
        """Return CHUNK and COUNTS, as the kernels take them."""
        return self.size, next_power_of_2(self.number)


def _chunks(seqlen_k: int) -> _Chunks:
    if seqlen_k <= SHORT_CHUNK:
        return _Chunks(SHORT_CHUNK, SHORT_NUM_WARPS, 1)
    size = CHUNK
    while ceil_div(seqlen_k, size) > MOST_CHUNKS:
        size *= 2
    return _Chunks(size, CHUNK_NUM_WARPS, ceil_div(seqlen_k, size))


def _count(mask: torch.Tensor, counts: torch.Tensor, chunks: _Chunks, seqlen_q: int, band: Band) -> None:
    """Launch the counting kernel, if `counts` is not empty."""
    if counts.numel():
        stride_b, stride_h, _, stride_k = mask.stride()
        numbers = (mask.shape[1], seqlen_q, mask.shape[3], stride_b, stride_h, stride_k, *band, chunks.number)
        tensors = (mask.view(torch.uint8), counts)
        launch(_count_kernel, counts.numel(), tensors, numbers, (chunks.size,), chunks.num_warps)


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, heads and keys, 0 for a dim of size 1."""
    b, h, _, k = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return b, h, k


def score_keys(scores: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Launch the kernel of sort keys; return what `flash_dmattn.masks.topk.score_keys` returns.

    Args:
        scores: float (B or 1, H or 1, 1, Lk), any strides.
        allowed: bool (B or 1, H or 1, 1, Lk or 1), any strides, or None.
    """
    heads = scores.shape[:2] if allowed is None else torch.broadcast_shapes(scores.shape[:2], allowed.shape[:2])
    shape = (*heads, scores.shape[3])
    integers = torch.int64 if scores.dtype == torch.float64 else torch.int32
    keys = torch.empty(*shape, dtype=integers, device=scores.device)
    if keys.numel():
        flags = None if allowed is None else allowed.view(torch.uint8)
        flag_strides = (0, 0, 0) if allowed is None else _strides(allowed)
        numbers = (keys.numel(), shape[1], shape[2], *_strides(scores), *flag_strides)
        programs = ceil_div(keys.numel(), SCORES_BLOCK)
        tensors, constants = (scores, keys if flags is None else flags, keys), (flags is not None, SCORES_BLOCK)
        launch(_score_keys_kernel, programs, tensors, numbers, constants, SCORES_NUM_WARPS)
    return keys


def key_set(mask: torch.Tensor) -> KeySet:
    """Launch the key set kernel; return what `flash_dmattn.masks.prepared.packing.key_set` returns.

    Args:
        mask: bool (Bm, Hm, 1, Lk), any strides, 0 included.
    """
    batch, num_heads, _, seqlen_k = mask.shape
    kept = torch.empty(batch, num_heads, seqlen_k, dtype=torch.int32, device=mask.device)
    count = torch.empty(batch, num_heads, dtype=torch.int32, device=mask.device)
    prefix = torch.empty(batch, num_heads, seqlen_k + 1, dtype=torch.int32, device=mask.device)
    if batch * num_heads:
        chunks = _chunks(seqlen_k)
        counts = chunks.counts(mask)
        _count(mask, counts, chunks, 1, Band(-1, seqlen_k))
        stride_b, stride_h, _, stride_k = mask.stride()
        tensors = (mask.view(torch.uint8), counts, kept, count, prefix)
        numbers = (num_heads, seqlen_k, stride_b, stride_h, stride_k, chunks.number)
        programs = batch * num_heads * chunks.number
        launch(_key_set_kernel, programs, tensors, numbers, chunks.constants(), chunks.num_warps)
    return kept, count, prefix


def key_intervals(mask: torch.Tensor, seqlen_q: int, band: Band | None, reorder: bool) -> KeyIntervals:
    """Launch the key interval kernel; return what `flash_dmattn.masks.prepared.intervals.key_intervals` returns.

    Args:
        mask: bool (Bm, Hm, 1, Lk), any strides, 0 included.
        seqlen_q: number of queries.
        band: the band that is folded into the intervals.
        reorder: whether live keys are to come first.
    """
    batch, num_heads, _, seqlen_k = mask.shape
    shape = (batch, num_heads, seqlen_k)
    start, stop = (torch.empty(*shape, dtype=torch.int32, device=mask.device) for _ in range(2))
    order = torch.empty(*shape[:2], seqlen_k if reorder else 0, dtype=torch.int32, device=mask.device)
    if batch * num_heads * seqlen_k:
        chunks = _chunks(seqlen_k)
        band = band or Band(-seqlen_q, seqlen_k)
        counts = chunks.counts(mask) if reorder else mask.new_empty(0, dtype=torch.int32)
        _count(mask, counts, chunks, seqlen_q, band)
        stride_b, stride_h, _, stride_k = mask.stride()
        tensors = (mask.view(torch.uint8), counts, start, stop, order)
        numbers = (num_heads, seqlen_q, seqlen_k, stride_b, stride_h, stride_k, *band, chunks.number)
        constants = (*chunks.constants(), reorder)
        launch(_key_intervals_kernel, batch * num_heads * chunks.number, tensors, numbers, constants, chunks.num_warps)
    return start, stop, order


def first_places(
    start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel that writes columns; return what `flash_dmattn.masks.prepared.intervals.first_places` returns.

    Args:
        start, stop, order: int32 (Bm, Hm, Lk), contiguous.
        places: the number of columns, up to Lk.
    """
    batch, num_heads, seqlen_k = start.shape
    placed = [torch.empty(batch, num_heads, places, dtype=torch.int32, device=start.device) for _ in range(3)]
    total = placed[0].numel()
    if total:
        tensors, programs = (start, stop, order, *placed), ceil_div(total, PLACES_BLOCK)
        launch(_first_places_kernel, programs, tensors, (total, places, seqlen_k), (PLACES_BLOCK,), PLACES_NUM_WARPS)
    placed_start, placed_stop, placed_order = placed
    return placed_order, placed_start, placed_stop


def interval_tiles(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, seqlen_q: int) -> IntervalTiles:
    """Launch the tile kernel and the list kernel; return what `packers.list_intervals` returns.

    Args:
        start, stop: int32 (Bm, Hm, Lk), contiguous.
        order: int32 (Bm, Hm, Lk or 0), contiguous.
        seqlen_q: number of queries.
    """
    batch, num_heads, seqlen_k = start.shape
    tiles_q, tiles_k = tiles(seqlen_q), tiles(seqlen_k)
    bounds = torch.empty(batch, num_heads, tiles_k * TILE, 2, dtype=torch.int32, device=start.device)
    classes = torch.empty(batch, num_heads, tiles_q, tiles_k, dtype=torch.uint8, device=start.device)
    if bounds.numel():
        constants = (order.numel() > 0, TILES_BLOCK, TILE)
        numbers = (seqlen_q, seqlen_k, tiles_q, tiles_k)
        tensors = (start, stop, order, bounds, classes)
        launch(_interval_tiles_kernel, batch * num_heads * tiles_k, tensors, numbers, constants, TILES_NUM_WARPS)
    return bounds, *list_tiles(classes)
