"""Masks for the eager passes: the mask of one chunk, and the visible keys of a block of queries.

A mask is a bool tensor, the bits of tiles, the run of queries of each key, or the list of keys of each query. All but
the first are used in place, without a bool for each pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Block, grouped_own
from .lists import Lists, blocks_of, spread, table

_BITS = 8  # of a byte


class TileBits(NamedTuple):
    """A mask as bits, int32 (Bm, Hm, Lq, W): bit j % 32 of word j // 32 says whether a query attends to key j."""

    bits: Tensor


class Intervals(NamedTuple):
    """A mask in which queries start to stop, the last not included, attend to a key: both integers (Bm, Hm, Lk).

    It holds the band of a call.
    """

    start: Tensor
    stop: Tensor


AnyMask = Tensor | TileBits | Intervals | Lists


class MaskReader:
    """A bool mask (Bm, Hm, Lq or 1, Lk or 1), expanded block by block; subclasses are for the other kinds.

    Args:
        tensors: of the mask, each (Bm, Hm, rows, keys); Hm is 1, the key-value heads or the query heads.
        num_heads_k, num_heads: of the call.
        repeat: entry b of the batch has entry b // repeat % Bm.
    """

    # Whether keys that are hidden from all queries of a block are skipped, so that NaN in their values has no effect.
    reads_only_seen = False

    def __init__(self, tensors: tuple[Tensor, ...], num_heads_k: int, num_heads: int, repeat: int) -> None:
        self._tensors = [grouped_own(x, num_heads_k, num_heads) for x in tensors]
        self.repeat = repeat
        self.heads = self._tensors[0].shape[1]  # 1 if the mask is the same for all key-value heads
        # The entries of the mask as passed: chunks may not cross a multiple of it.
        self.entries = tensors[0].shape[0]

    def part(self, block: Block, keys: slice | Tensor) -> Tensor:
        """Return which scores are allowed: bool (batch, heads, G, rows, keys), a dim is 1 where all agree."""
        return block.pick(self._tensors[0], keys, self.repeat)

    def seen(self, block: Block, keys: slice) -> tuple[Tensor, Tensor]:
        """Return for each of the keys whether some query of the block attends to it, and whether all do."""
        part = self.part(block, keys)
        some, every = some_and_every(part, (0, 1, 2, 3))
        return some.expand(keys.stop - keys.start), every.expand(keys.stop - keys.start)


class BitReader(MaskReader):
    """The bits of tiles, unpacked block by block."""

    def part(self, block: Block, keys: slice | Tensor) -> Tensor:
        bits = self._tensors[0].view(torch.uint8)
        if isinstance(keys, Tensor):
            return (
                (block.pick(bits, keys // _BITS, self.repeat) >> (keys % _BITS).to(torch.uint8)).bitwise_and_(1).bool()
            )
        return _unpack(block.pick(bits, _bytes_of(keys), self.repeat), keys)

    def seen(self, block: Block, keys: slice) -> tuple[Tensor, Tensor]:
        rows = block.pick(self._tensors[0].view(torch.uint8), _bytes_of(keys), self.repeat).flatten(0, 3)
        some, every = _fold(rows, torch.bitwise_or), _fold(rows, torch.bitwise_and)
        return _unpack(some, keys), _unpack(every, keys)


class IntervalReader(MaskReader):
    """The run of queries of each key, expanded block by block."""

    def part(self, block: Block, keys: slice | Tensor) -> Tensor:
        start, stop = (block.pick(x, keys, self.repeat) for x in self._tensors)
        rows = torch.arange(block.rows.start, block.rows.stop, dtype=start.dtype, device=start.device)[:, None]
        return (rows >= start).logical_and_(rows < stop)

    def seen(self, block: Block, keys: slice) -> tuple[Tensor, Tensor]:
        start, stop = (block.pick(x, keys, self.repeat) for x in self._tensors)
        some, _ = some_and_every((start < block.rows.stop) & (stop > block.rows.start), (0, 1, 2, 3))
        _, every = some_and_every((start <= block.rows.start) & (stop >= block.rows.stop), (0, 1, 2, 3))
        return some, every


class ListReader(MaskReader):
    """The list of keys of each query, expanded block by block; the call applies a band."""

    reads_only_seen = True

    def __init__(self, lists: Lists, num_heads_k: int, num_heads: int, repeat: int) -> None:
        super().__init__((lists.keys, lists.slots), num_heads_k, num_heads, repeat)
        self._block_q, self._block_k = lists.block_q, lists.block_k

    def _own(self, block: Block) -> list[Tensor]:
        """Return the keys and the slots of the lists of a block, (batch, heads, G, lists, entries)."""
        own = block._replace(rows=blocks_of(block.rows, self._block_q))
        return [own.pick(x, slice(0, x.shape[4]), self.repeat) for x in self._tensors]

    def block_slots(self, block: Block, run: slice) -> Tensor:
        """Return the slot of each query and block of keys, (batch, heads, G, rows, blocks); -1 where none chose it."""
        columns = blocks_of(run, self._block_k)
        keys, slots = self._own(block)
        made = table(keys, slots, columns.start, columns.stop - columns.start)
        return spread(made, 3, self._block_q, block.rows.start, block.rows.stop)

    def slots(self, block: Block, keys: slice | Tensor) -> Tensor:
        """Return the slot of each score, (batch, heads, G, rows, keys); -1 where no entry chose it."""
        run = run_of(keys)
        made = spread(self.block_slots(block, run), 4, self._block_k, run.start, run.stop)
        return made if isinstance(keys, slice) else made.index_select(4, keys - run.start)

    def part(self, block: Block, keys: slice | Tensor) -> Tensor:
        return self.slots(block, keys) >= 0

    def seen(self, block: Block, keys: slice) -> tuple[Tensor, Tensor]:
        own = self._own(block)[0]
        columns = blocks_of(keys, self._block_k)
        counts = torch.bincount(own.flatten() + 1, minlength=columns.stop + 1)[1 + columns.start : 1 + columns.stop]
        counts = spread(counts, 0, self._block_k, keys.start, keys.stop)
        return counts > 0, counts == own.shape[:4].numel()


def read_mask(mask: AnyMask, num_heads_k: int, num_heads: int, repeat: int) -> MaskReader:
    """Return the reader of a mask."""
    if isinstance(mask, TileBits):
        return BitReader((mask.bits,), num_heads_k, num_heads, repeat)
    if isinstance(mask, Intervals):
        return IntervalReader((mask.start[:, :, None], mask.stop[:, :, None]), num_heads_k, num_heads, repeat)
    if isinstance(mask, Lists):
        return ListReader(mask, num_heads_k, num_heads, repeat)
    return MaskReader((mask,), num_heads_k, num_heads, repeat)


def some_and_every(cells: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Reduce a bool tensor by `or` and by `and`."""
    if all(cells.shape[dim] == 1 for dim in dims):
        cells = cells.flatten(0, len(dims))
        return cells, cells
    cells = cells.view(torch.uint8)  # on a CPU, any() and all() of bools take 25 times as long
    return cells.amax(dims).bool(), cells.amin(dims).bool()


def _fold(rows: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the rows of a matrix, half of them with the other half until one is left."""
    while rows.shape[0] > 1:
        half = rows.shape[0] // 2
        folded = combine(rows[:half], rows[half : 2 * half])
        rows = folded if rows.shape[0] == 2 * half else torch.cat([folded, rows[2 * half :]])
    return rows[0]


def run_of(keys: slice | Tensor) -> slice:
    """Return the run of keys from the first to the last one of a chunk."""
    return keys if isinstance(keys, slice) else slice(int(keys[0]), int(keys[-1]) + 1)


def _bytes_of(keys: slice) -> slice:
    return slice(keys.start // _BITS, -(-keys.stop // _BITS))


def _unpack(bytes_: Tensor, keys: slice) -> Tensor:
    """Return the bits of `keys` in the last dim of the bytes that hold them, as bools."""
    bits = bytes_[..., None] >> torch.arange(_BITS, dtype=torch.uint8, device=bytes_.device)
    first = keys.start % _BITS
    return bits.bitwise_and_(1).flatten(-2)[..., first : first + keys.stop - keys.start].bool()
