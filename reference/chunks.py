"""How the eager passes cut a call into chunks: which rows, which keys, and how many bytes one chunk may hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import formula

DEFAULT_CHUNK_BYTES = 256 * 2**20

# The elementwise passes over a chunk of this size run from cache, ten times faster than from memory. Measured at 8
# heads, 2048 x 2048, D 64 on 2 cores with 1 MB of L2 each. 4 MB is 7 % slower; 16 MB is 3 % faster, but would not fit
# in the caches of other CPUs.
CPU_CHUNK_BYTES = 8 * 2**20

# With fewer rows (queries x group) or keys than these, packing the operands slows down a matrix product.
GOOD_ROWS = 128
GOOD_KEYS = 1024


class Extent(NamedTuple):
    """How far one chunk reaches in each dimension."""

    batch: int
    heads: int  # key-value heads; a chunk always takes their whole groups of query heads
    rows: int
    keys: int


class Block(NamedTuple):
    """The entries, key-value heads and queries of one chunk; its keys come from :meth:`Chunks.spans`."""

    batch: slice
    heads: slice
    rows: slice

    def pick(self, x: Tensor, keys: slice, repeat: int) -> Tensor:
        """Return the chunk's part of a (Bx | 1, Hk | 1, G | 1, Lq | 1, Lk | 1) tensor.

        Entry b of the batch reads entry b // repeat % Bx. A chunk reads one entry or consecutive ones: see
        :meth:`Chunks.pairs`.
        """
        wanted = (entries_of(self.batch, x.shape[0], repeat), self.heads, slice(None), self.rows, keys)
        return x[tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, wanted, strict=True))]

    def by_group(self, s: Tensor, group: int) -> Tensor:
        """View the (pairs, G * rows, keys) scores of the chunk as (batch, heads, G, rows, keys)."""
        batch, heads, rows = (part.stop - part.start for part in self)
        return s.view(batch, heads, group, rows, s.shape[2])


def entries_of(batch: slice, size: int, repeat: int) -> slice:
    """Return the entries, of a tensor with size entries, that a part of the batch reads: b // repeat % size."""
    first = batch.start // repeat % max(size, 1)
    return slice(first, first + (batch.stop - batch.start if repeat == 1 else 1))


class Chunks:
    """One call, cut into chunks that fit the byte budget; chunks that band or mask leave empty are skipped."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        window_size: tuple[int, int] | None,
        chunk_bytes: int,
        score_buffers: int,
        sums_per_key: int,
        mask_repeat: int = 1,
        bias_entries: tuple[int, int] = (1, 1),
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
        self.extent = self._extent(chunk_bytes)
        self._buffers: dict[int, Tensor] = {}
        self._mask_entries = (1, 1) if mask is None else (mask.shape[0], mask_repeat)
        # A chunk must not reach across a multiple of these, where the mask or the bias skips or repeats entries.
        self._steps = [
            repeat if repeat > 1 else size
            for size, repeat in (self._mask_entries, bias_entries)
            if size not in (1, self.batch)
        ]
        self._occupied = None if mask is None else self._occupancy(mask)

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

        def fits(name: str) -> bool:
            used = self.chunk_bytes(extent)
            # Fewer heads make the sums smaller; fewer rows or keys do not.
            return used <= limit and (name in ("rows", "keys") or used + self.sums_bytes(extent) <= budget)

        # Cut rows first, down to what products need; then entries and heads; then keys. Only in the end cut rows and
        # keys so short that products lose speed.
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
        for batch in _slices(self.batch, self.extent.batch, self._steps):
            for heads in _slices(self.num_heads_k, self.extent.heads):
                yield batch, heads

    def blocks(self, batch: slice, heads: slice) -> Iterator[tuple[Block, list[slice]]]:
        """Yield the blocks of rows of one (batch, heads) part that see any key, each with its runs of keys."""
        for rows in _slices(self.seqlen_q, self.extent.rows):
            block = Block(batch, heads, rows)
            spans = self.spans(block)
            if spans:
                yield block, spans

    def spans(self, block: Block) -> list[slice]:
        """Return the runs of keys that some query of the block may attend to, cut to the length of a chunk."""
        shift = self.seqlen_k - self.seqlen_q
        start = 0 if self.left < 0 else max(0, block.rows.start + shift - self.left)
        stop = self.seqlen_k if self.right < 0 else min(self.seqlen_k, block.rows.stop + shift + self.right)
        runs = [(start, stop)]
        if self._occupied is not None:
            rows = []
            for row in self._occupied_entries(block.batch):
                for part, size in zip(block[1:], self.extent[1:]):
                    row = row[part.start // size if len(row) > 1 else 0]
                rows.append(row)
            row = [any(cells) for cells in zip(*rows)]
            if len(row) > 1:
                runs = _clip(_runs(row, self._grain()), start, stop)
            elif not row[0]:
                runs = []
        size = self.extent.keys
        return [slice(a, min(a + size, hi)) for lo, hi in runs for a in range(lo, hi, size)]

    def _occupied_entries(self, batch: slice) -> list:
        """Return where the mask allows anything, for each entry or block of entries that a part of the batch reads."""
        occupied = self._occupied or []
        if len(occupied) == 1:
            return occupied
        size, repeat = self._mask_entries
        if size != self.batch:
            return occupied[entries_of(batch, size, repeat)]
        return occupied[batch.start // self.extent.batch : -(-batch.stop // self.extent.batch)]

    def band_edges(self, block: Block, keys: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield (columns of the chunk, bool (rows, columns): outside the causal or window band) where there are any."""
        shift = self.seqlen_k - self.seqlen_q
        first, last = block.rows.start + shift, block.rows.stop - 1 + shift  # the diagonal at the first and last row
        # Only columns that some row must not see need work; they are at most as many as the block has rows.
        if self.right >= 0 and keys.stop > first + self.right + 1:
            lo = max(keys.start, first + self.right + 1)
            beyond = self._ramp(lo, keys.stop) > self._ramp(first, last + 1)[:, None] + self.right
            yield slice(lo - keys.start, None), beyond
        if self.left >= 0 and keys.start < last - self.left:
            hi = min(keys.stop, last - self.left)
            beyond = self._ramp(keys.start, hi) < self._ramp(first, last + 1)[:, None] - self.left
            yield slice(0, hi - keys.start), beyond

    def skip_nothing(self) -> bool:
        """Return whether every score of the call belongs to some chunk."""
        return self.left < 0 and self.right < 0 and self._occupied is None

    def _ramp(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.device)

    def _grain(self) -> int:
        # Keys are skipped in units of this size: fine enough to follow a block mask, coarse enough for fast products.
        return max(256, self.extent.keys // 8)

    def _occupancy(self, mask: Tensor) -> list | None:
        """Return whether the mask allows anything, by batch, heads, rows and grain of keys; None if always."""
        if is_capturing(self.device) or 0 in (self.batch, self.seqlen_q, self.seqlen_k):
            return None
        cells = grouped_own(mask, self.num_heads_k, self.num_heads).view(torch.uint8)
        # One reduction and one copy to the host decide every chunk of the call.
        batch = self.extent.batch if len(mask) == self.batch else 1
        for dim, size in ((3, self.extent.rows), (4, self._grain()), (0, batch), (1, self.extent.heads)):
            cells = _any_per_block(cells, dim, size)
        occupied = cells.amax(2).bool().tolist()
        full = all(cell for per_batch in occupied for per_head in per_batch for row in per_head for cell in row)
        return None if full else occupied


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured.

    The host then cannot read values of tensors, and a replay may have other values.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def grouped_own(x: Tensor, num_heads_k: int, num_heads: int) -> Tensor:
    """View a mask or bias as (B | 1, Hk | 1, G | 1, Lq | 1, Lk | 1), dims expanded with stride 0 narrowed to 1."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(dim, 0, 1)
    return formula.grouped(x, num_heads_k, num_heads)


def _any_per_block(x: Tensor, dim: int, size: int) -> Tensor:
    length = x.shape[dim]
    if length == 1 or size == 1:
        return x
    full = length - length % size
    parts = []
    if full:
        parts.append(x.narrow(dim, 0, full).unflatten(dim, (full // size, size)).amax(dim + 1))
    if full < length:
        parts.append(x.narrow(dim, full, length - full).amax(dim, keepdim=True))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _runs(occupied: list[bool], grain: int) -> Iterator[tuple[int, int]]:
    start = None
    for index, used in enumerate([*occupied, False]):
        if used and start is None:
            start = index * grain
        elif not used and start is not None:
            yield start, index * grain
            start = None


def _clip(runs: Iterator[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    clipped = [(max(lo, start), min(hi, stop)) for lo, hi in runs]
    return [(lo, hi) for lo, hi in clipped if lo < hi]


def _slices(length: int, size: int, steps: Sequence[int] = ()) -> Iterator[slice]:
    """Yield slices of at most size that cover a length and do not reach across a multiple of any step."""
    start = 0
    while start < length:
        stop = min(start + size, length, *(start - start % step + step for step in steps))
        yield slice(start, stop)
        start = stop
