"""How the eager passes split a call into chunks: the rows, keys and memory of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.definition import listed

from . import formula
from .blocks import Block
from .masks import MaskReader

DEFAULT_CHUNK_BYTES = 256 * 2**20

# The elementwise passes over a chunk of this size run from cache, ten times faster than from memory. Measured at 8
# heads, 2048 x 2048, D 64 on 2 cores with 1 MB of L2 each. 4 MB is 7 % slower; 16 MB is 3 % faster, but too large for
# the caches of other CPUs.
CPU_CHUNK_BYTES = 8 * 2**20

# With fewer rows (queries x group) or keys than these, packing the operands slows down a matrix product.
GOOD_ROWS = 128
GOOD_KEYS = 1024

# From this number of scores on, a chunk has one entry or head if each has its own mask. A chunk of several would have
# every key that is visible to any of them.
GOOD_SCORES = 2**16

# A block of queries gathers its visible keys if they are less than this fraction of the keys from the first to the last
# of them. Copying keys is cheap compared with their products.
GATHERED_SHARE = 0.75

# With fewer scores, finding the visible keys takes longer than computing the scores of all keys.
FEW_SCORES = 2**15


class Extent(NamedTuple):
    """The size of one chunk in each dimension."""

    batch: int
    heads: int  # key-value heads; a chunk always takes their whole groups of query heads
    rows: int
    keys: int


class Span(NamedTuple):
    """Keys of one chunk: a run of them, or the positions of some, ascending."""

    keys: slice | Tensor
    is_masked: bool  # whether the mask forbids any score of the chunk


class Chunks:
    """One call, split into chunks within the memory budget; keys that band or mask hide from a block are skipped.

    Args:
        q, k, v, is_causal, window_size, chunk_bytes: as for the passes of `eager.py`.
        mask: the reader of the mask.
        score_buffers: the number of tensors of the size of the scores in a chunk.
        sums_per_key: the number of sums of each key that outlive a chunk.
        bias_entries: the entries of the bias, and the number of consecutive entries of the batch with the same one.
        scatters: whether the keys of a chunk may be farther apart than its length.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskReader | None,
        is_causal: bool,
        window_size: tuple[int, int] | None,
        chunk_bytes: int,
        score_buffers: int,
        sums_per_key: int,
        bias_entries: tuple[int, int] = (1, 1),
        scatters: bool = True,
    ) -> None:
        self.batch, self.seqlen_q, self.num_heads, head_dim = q.shape
        self.seqlen_k, self.num_heads_k = k.shape[1:3]
        self.group = self.num_heads // self.num_heads_k
        self.left, self.right = window_size if window_size is not None else (-1, -1)
        if is_causal:
            self.right = 0
        self.device = q.device
        self.dtype = formula.softmax_dtype(q)
        self.dims = head_dim + v.shape[3]
        self.score_buffers = score_buffers
        self.sums_per_key = sums_per_key
        self._scatters = scatters
        self._buffers: dict[int, Tensor] = {}
        self.mask = mask
        scores = self.batch * self.num_heads * self.seqlen_q * self.seqlen_k
        only_seen = mask is not None and mask.reads_only_seen
        self._share = 1.0 if only_seen else GATHERED_SHARE
        self._looks = mask is not None and (only_seen or scores > FEW_SCORES) and not is_capturing(self.device)
        self.extent = self._extent(chunk_bytes)
        # A chunk must not reach across a multiple of these, where the mask or the bias skips or repeats entries.
        mask_entries = (1, 1) if mask is None else (mask.entries, mask.repeat)
        self._steps = [
            repeat if repeat > 1 else size
            for size, repeat in (mask_entries, bias_entries)
            if size not in (1, self.batch)
        ]
        self._is_whole = self.extent[:3] == (self.batch, self.num_heads_k, self.seqlen_q) and not self._steps

    def chunk_bytes(self, extent: Extent) -> int:
        """Return the bytes of all temporaries of one chunk of this extent."""
        batch, heads, rows, keys = extent
        pairs, group_rows = batch * heads, self.group * rows
        # One more tile than the buffers, for casts and reductions; and the bool edges of the causal or window band.
        scores = pairs * group_rows * keys * (self.score_buffers + 1) + rows * keys // 4
        # q, dout, out, dout * out and dq; and columns such as lse and delta.
        row_side = pairs * group_rows * (3 * self.dims + 8)
        return (scores + row_side + pairs * keys * self.dims) * self.dtype.itemsize

    def sums_bytes(self, extent: Extent) -> int:
        """Return the bytes of the sums of dk and dv, which outlive a chunk: a row for each key of the chunk's heads."""
        return extent.batch * extent.heads * self.seqlen_k * self.sums_per_key * self.dtype.itemsize

    def _extent(self, budget: int) -> Extent:
        limit = min(budget, CPU_CHUNK_BYTES) if self.device.type == "cpu" else budget
        extent = Extent(self.batch, self.num_heads_k, self.seqlen_q, self.seqlen_k)
        if self._looks and self.mask is not None and self.group * self.seqlen_q * self.seqlen_k >= GOOD_SCORES:
            own_entries, own_heads = self.mask.entries > 1, self.mask.heads > 1
            extent = extent._replace(**{"batch": 1} if own_entries else {}, **{"heads": 1} if own_heads else {})

        used = self.chunk_bytes(extent)
        if used <= limit and used + self.sums_bytes(extent) <= budget:
            return extent

        def fits(name: str) -> bool:
            used = self.chunk_bytes(extent)
            # Fewer heads make the sums smaller; fewer rows or keys do not.
            return used <= limit and (name in ("rows", "keys") or used + self.sums_bytes(extent) <= budget)

        # Split rows first, down to the size that products need for speed, then entries and heads, then keys; and only
        # at last rows and keys below that size.
        good_rows = -(-GOOD_ROWS // self.group)
        floors = (("rows", good_rows), ("batch", 1), ("heads", 1), ("keys", GOOD_KEYS))
        for name, floor in (*floors, ("rows", 8), ("keys", 64), ("rows", 1), ("keys", 1)):
            while getattr(extent, name) > floor and not fits(name):
                extent = extent._replace(**{name: max(floor, -(-getattr(extent, name) // 2))})
        return extent

    def buffer(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """Return one of the score buffers in this shape; each chunk overwrites the values of the chunk before."""
        if index not in self._buffers:
            batch, heads, rows, keys = self.extent
            size = batch * heads * self.group * rows * keys
            self._buffers[index] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._buffers[index][: math.prod(shape)].view(shape)

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        """Yield every (batch, heads) part of the call."""
        if self._is_whole:
            yield slice(0, self.batch), slice(0, self.num_heads_k)
            return
        for batch in _slices(self.batch, self.extent.batch, self._steps):
            for heads in _slices(self.num_heads_k, self.extent.heads):
                yield batch, heads

    def blocks(self, batch: slice, heads: slice) -> Iterator[tuple[Block, list[Span]]]:
        """Yield the blocks of rows of one (batch, heads) part that have any key, each with its keys."""
        for rows in _slices(self.seqlen_q, self.extent.rows):
            block = Block(batch, heads, rows, self._is_whole)
            spans = self.spans(block)
            if spans:
                yield block, spans

    def spans(self, block: Block) -> list[Span]:
        """Return the keys that some query of the block may attend to, cut to the length of a chunk."""
        shift, size = self.seqlen_k - self.seqlen_q, self.extent.keys
        start = 0 if self.left < 0 else max(0, block.rows.start + shift - self.left)
        stop = self.seqlen_k if self.right < 0 else min(self.seqlen_k, block.rows.stop + shift + self.right)
        if start >= stop:
            return []
        if self.mask is None or not self._looks:
            if stop - start <= size:
                return [Span(slice(start, stop), self.mask is not None)]
            return [Span(keys, self.mask is not None) for keys in _slices(stop, size, start=start)]
        some, every = self.mask.seen(block, slice(start, stop))
        keys = some.nonzero().squeeze(1)
        if len(keys) == 0:
            return []
        first, last = int(keys[0]), int(keys[-1]) + 1
        if len(keys) >= self._share * (last - first):
            runs = _slices(start + last, size, start=start + first)
            return [Span(run, not every[run.start - start : run.stop - start].all()) for run in runs]
        # With copies of keys, bias and mask in addition to the buffers of scores, a chunk has half the keys.
        parts: Sequence[Tensor] = keys.split(max(1, size // 2))
        if not self._scatters:
            parts = keys.split(listed(torch.bincount((keys - first) // size)))
        return [Span(part + start, not every[part].all()) for part in parts if len(part)]

    def band_edges(self, block: Block, keys: slice | Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (columns of the chunk, bool (rows, columns): outside the causal or window band) where there are any."""
        if self.left < 0 and self.right < 0:
            return
        shift = self.seqlen_k - self.seqlen_q
        first, last = block.rows.start + shift, block.rows.stop - 1 + shift  # the diagonal at the first and last row
        if isinstance(keys, Tensor):
            if self.right >= 0:
                yield slice(None), keys > self._diagonal(first, last, self.right)
            if self.left >= 0:
                yield slice(None), keys < self._diagonal(first, last, -self.left)
            return
        # Only columns that are hidden from some row need work, at most one for each row of the block.
        if self.right >= 0 and keys.stop > first + self.right + 1:
            lo = max(keys.start, first + self.right + 1)
            yield slice(lo - keys.start, None), self._ramp(lo, keys.stop) > self._diagonal(first, last, self.right)
        if self.left >= 0 and keys.start < last - self.left:
            hi = min(keys.stop, last - self.left)
            yield slice(0, hi - keys.start), self._ramp(keys.start, hi) < self._diagonal(first, last, -self.left)

    def skip_nothing(self) -> bool:
        """Return whether every score of the call belongs to some chunk."""
        return self.left < 0 and self.right < 0 and not self._looks

    def _diagonal(self, first: int, last: int, offset: int) -> Tensor:
        return self._ramp(first + offset, last + offset + 1)[:, None]

    def _ramp(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.device)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured.

    The host then cannot read values of tensors, and a replay may have other values.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _slices(length: int, size: int, steps: Sequence[int] = (), start: int = 0) -> Iterator[slice]:
    """Yield slices of at most size from start to length that do not reach across a multiple of any step."""
    while start < length:
        stop = min(start + size, length, *(start - start % step + step for step in steps))
        yield slice(start, stop)
        start = stop
