"""The forms of prepared masks: tiles, keys, intervals and lists; with sequences tiles per sequence, and trees."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...definition import is_of_transform, listed, outside_of_transforms
from ...problem import Band, MaskForm, MaskView, SequenceSpec, causal_window, make_band
from ...reference.lists import Lists, by_query, repeat_heads, spread, table
from ...sequences.layout import Sequences
from ..arguments import pad
from ..blocks import MaskStats, mask_stats
from . import packing
from .intervals import covering, interval_classes
from .lists import keys_seen, take
from .mask import PreparedMask as PreparedMask
from .packing import EMPTY, FULL, TILE, tiles, unpack_sequences

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False, repr=False)
class BatchMask(PreparedMask):
    """A mask of seqlen_q x seqlen_k for each batch entry. Lists may also have sequences.

    Attributes:
        seqlen_q, seqlen_k: number of queries and keys of the calls.
        leading: the leading dims of the mask that it was made from; None if that had one batch dim.
    """

    seqlen_q: int
    seqlen_k: int = field(repr=False)
    leading: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(Bm, Hm, Lq or 1, Lk): Bm is 1 or the batch size, Hm is 1 or a number of heads."""

    def unpacked(self) -> Tensor:
        return self.dense()

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The leading dims that are folded into its batch of Bm entries, each 1 or as in the calls."""
        return self.shape[:1] if self.leading is None else self.leading

    def expand_batch(self, dims: tuple[int, ...]) -> Self:
        """Expand the leading dims to `dims`, which may be longer than `batch_dims`, with a copy of the tensors."""
        dims_in_view = (*(1,) * (len(dims) - len(self.batch_dims)), *self.batch_dims)
        tensors = [
            x.view(*dims_in_view, *x.shape[1:]).expand(*dims, *x.shape[1:]).reshape(math.prod(dims), *x.shape[1:])
            for x in self.tensors
        ]
        return self._with_tensors(tensors, leading=dims)

    def stats(self) -> MaskStats:
        """See `PreparedMask.stats`; `shape` has Lq rows. It unpacks 128 queries at a time."""
        shape = (*self.shape[:2], self.seqlen_q, self.seqlen_k)
        attending = empty_rows = 0
        classes = [torch.zeros(*shape[:2], 0, tiles(self.seqlen_k), dtype=torch.uint8, device=self.device)]
        for start in range(0, self.seqlen_q, TILE):
            part = self.dense(start, start + TILE)
            attending += int(part.sum())
            empty_rows += int((~part.any(3)).sum())
            classes.append(packing.pack_mask(part, None)[1])
        return _class_stats(shape, attending, torch.cat(classes, 2), empty_rows)

    @property
    def band(self) -> Band | None:
        """The diagonals `low <= j - i <= high` that `is_causal` and `window_size` permit; None if they permit all."""
        return make_band(self.seqlen_q, self.seqlen_k, causal_window(self.is_causal, self.window_size))

    def _within_band(self, allowed: Tensor, start: int, stop: int | None) -> Tensor:
        """Apply the band to the query rows `start` to `stop` of a mask."""
        if self.band is None:
            return allowed
        rows = torch.arange(self.seqlen_q, device=self.device)[start:stop, None]
        diagonals = torch.arange(self.seqlen_k, device=self.device) - rows
        return allowed & (diagonals >= self.band.low) & (diagonals <= self.band.high)


@dataclass(frozen=True, eq=False, repr=False)
class TileMask(BatchMask):
    """A mask that depends on the query, as bits and lists of 128 x 128 tiles, with the band folded in.

    docs/mask_storage.md describes the fields. They are contiguous, as in all forms.
    """

    form: ClassVar[MaskForm] = "tiles"

    bits: Tensor
    classes: Tensor
    row_lists: Tensor
    col_lists: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_q, _ = self.bits.shape
        return batch, num_heads, seqlen_q, self.seqlen_k

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        return packing.unpack_words(self.bits[:, :, start:stop], self.seqlen_k)

    def stats(self) -> MaskStats:
        return _bit_stats(self.shape, self.bits, self.classes)


@dataclass(frozen=True, eq=False, repr=False)
class KeyMask(BatchMask):
    """A mask with one row for up to 15 queries, as the set of keys that it keeps; the band is not folded in.

    docs/mask_storage.md describes the fields.
    """

    form: ClassVar[MaskForm] = "keys"

    kept: Tensor
    count: Tensor
    prefix: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_k = self.kept.shape
        return batch, num_heads, 1, seqlen_k

    def unpacked(self) -> Tensor:
        return (self.prefix.diff(dim=-1) > 0)[:, :, None]

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._within_band(self.unpacked().expand(-1, -1, self.seqlen_q, -1)[:, :, start:stop], start, stop)


@dataclass(frozen=True, eq=False, repr=False)
class IntervalMask(BatchMask):
    """A mask in which key j is visible to the queries `start[j] <= i < stop[j]`, with the band folded in.

    Causality, windows, documents, a prefix, padding, and causal top-k over one score per key are of this kind. It
    needs 16 bytes for a key, 20 with an order, and 8 for a tile of 128 x 128: 1/256 of the bits of a `TileMask`. An
    order of keys changes only the time, not the result. docs/mask_storage.md describes the fields.
    """

    form: ClassVar[MaskForm] = "intervals"

    start: Tensor
    stop: Tensor
    order: Tensor
    bounds: Tensor
    row_lists: Tensor
    col_lists: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_k = self.start.shape
        return batch, num_heads, self.seqlen_q, seqlen_k

    @property
    def is_reordered(self) -> bool:
        return self.order.size(2) > 0 or self.seqlen_k == 0

    @property
    def num_places(self) -> int:
        """The number of keys that kernels visit: all, or the length of the order, which may leave hidden keys out."""
        return self.order.size(2) or self.seqlen_k

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        rows = torch.arange(self.seqlen_q, dtype=torch.int32, device=self.device)[start:stop, None]
        allowed = rows >= self.start[:, :, None]
        allowed &= rows < self.stop[:, :, None]
        return allowed

    def stats(self) -> MaskStats:
        """See `PreparedMask.stats`; with an `order`, a tile has 128 keys that are side by side in it."""
        classes = interval_classes(self.bounds, self.seqlen_q)
        classes = pad(classes, (0, tiles(self.seqlen_k) - classes.size(3)))
        seen = covering(self.start, self.stop, self.seqlen_q)
        attending = int((self.stop - self.start).sum(dtype=torch.int64))
        return _class_stats(self.shape, attending, classes, int((seen == 0).sum()))


@dataclass(frozen=True, eq=False, repr=False)
class ListMask(BatchMask):
    """A mask with a list of keys, or of blocks of keys, for each query or block of queries.

    Keys that the band hides from all queries of a list are not in it. If entries are blocks, the band may hide other
    keys of a block, so kernels compare positions. All tensors are int32, contiguous and on the mask's device, with
    R = ceil(Lq / block_q). With sequences, keys are positions in their sequence; if queries are packed, Bm is 1 and R
    the number of all queries, else Bm is the number of sequences.

    Attributes:
        keys: (Bm, Hm, R, K), the keys, or blocks, of each list: ascending, without repeats, then -1.
        count: (Bm, Hm, R), the number of keys in each list.
        slots: (Bm, Hm, R, K), the position of each key in the list of the caller's index, then -1; or (Bm, Hm, R, 0) if
            the caller's lists have the same order.
        block_size: (queries of a list, keys of a block).
        spec: the layout of the sequences; None without.
    """

    form: ClassVar[MaskForm] = "lists"

    keys: Tensor
    count: Tensor
    slots: Tensor
    block_size: tuple[int, int] = field(default=(1, 1), kw_only=True)
    spec: SequenceSpec | None = field(default=None, kw_only=True, repr=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads = self.keys.shape[:2]
        return batch, num_heads, self.seqlen_q, self.seqlen_k

    @property
    def sizes_of_values(self) -> tuple[tuple[int, int], int]:
        """The sizes that values of a `ListBias` need: one row for each query or each list, and K."""
        return (self.seqlen_q, self.keys.shape[2]), self.keys.shape[3]

    @property
    def as_lists(self) -> Lists:
        """The lists in the type of `flash_dmattn.reference`."""
        return Lists(self.keys, self.slots, *self.block_size)

    @property
    def index(self) -> Tensor:
        """The keys in the order of the caller's index; -1 for entries that count for no query."""
        if self.slots.shape[3] == 0:
            return self.keys
        # A compiler cannot trace the lock of a cached property.
        is_kept = not (torch.compiler.is_compiling() or is_of_transform(self.keys, self.slots))
        return self._index if is_kept else self._moved()

    @cached_property
    def _index(self) -> Tensor:
        with outside_of_transforms():
            return self._moved()

    def _moved(self) -> Tensor:
        more = torch.where(self.slots < 0, self.keys.shape[3], self.slots).long()
        places = self.keys.new_full((*self.keys.shape[:3], self.keys.shape[3] + 1), -1)
        return places.scatter(3, more, self.keys)[..., :-1].contiguous()

    @property
    def index_of_rows(self) -> Tensor:
        """`index`; if keys of sequences are packed, with rows of k instead of positions in the sequence."""
        spec, sequences = self.spec, self.sequences
        if spec is None or sequences is None or not spec.packs_keys:
            return self.index
        first = keys_seen(sequences.make_bounds(spec), spec, (-1, -1)).first.to(torch.int32)
        rows = (self.index + first[0, :, None]).clamp(max=max(spec.rows_k - 1, 0))
        return torch.where(self.index < 0, -1, rows)

    def gather(self, scores: Tensor) -> Tensor:
        """Return the scores of the keys or blocks in the lists; it can be differentiated twice.

        Args:
            scores: (B, H, rows, ceil(Lk / block_k)), with 1, R or Lq rows. B is 1 or the lists' batch size; H divides
                their heads, or is a multiple of them.

        Returns:
            (B, H, R or Lq, K), in the order of `index`; 0 where it has -1.
        """
        index, block_q = self.index, self.block_size[0]
        if scores.shape[2] not in (1, index.shape[2]):
            index = by_query(index, self.seqlen_q, block_q)
        heads = max(scores.shape[1], index.shape[1])
        return take(repeat_heads(scores, heads), repeat_heads(index, heads))

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        rows = range(self.seqlen_q)[start:stop]
        step_q, step_k = self.block_size
        lists = slice(rows.start // step_q, -(-rows.stop // step_q))
        keys = self.keys[:, :, lists]
        made = table(keys, keys[..., :0], 0, -(-self.seqlen_k // step_k)) >= 0
        made = spread(made, 2, step_q, rows.start, max(rows.start, rows.stop))
        return self._within_band(spread(made, 3, step_k, 0, self.seqlen_k), start, stop).contiguous()

    def _within_band(self, allowed: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
        if self.spec is None or self.sequences is None:
            return super()._within_band(allowed, start, stop)
        window = causal_window(self.is_causal, self.window_size)
        *_, low, high = keys_seen(self.sequences.make_bounds(self.spec), self.spec, window)
        keys = torch.arange(self.seqlen_k, device=self.device)
        return allowed & (keys >= low[:, None, start:stop, None]) & (keys <= high[:, None, start:stop, None])


@dataclass(frozen=True, eq=False, repr=False)
class SequenceTileMask(PreparedMask):
    """A mask for sequences, as bits and lists of 128 x 128 tiles, with causality and window of each folded in.

    No tile has tokens of two sequences. If `first` is the first query of sequence s among all queries, the rows of
    tiles of s begin at number `first // 128 + s`; columns of tiles are numbered likewise by keys. R is the number of
    rows of q, all slots included. With Tq = R // 128 + S, Tk likewise for keys, C = ceil(max_seqlen_k / 128) and
    D = ceil(max_seqlen_q / 128), the fields are as in a `TileMask`:

    Attributes:
        bits: int32 (1, Hm, R, 4 * C), for the keys of the query's sequence; 0 after the last key, and in rows of no
            sequence.
        classes: uint8 (1, Hm, Tq, C).
        row_lists: int32 (1, Hm, Tq, 2 + C).
        col_lists: int32 (1, Hm, Tk, 2 + D), with rows of tiles numbered from 0 in each sequence.
    """

    form: ClassVar[MaskForm] = "sequence_tiles"

    sequences: Sequences = field(repr=False, compare=False)
    spec: SequenceSpec = field(repr=False)
    bits: Tensor
    classes: Tensor
    row_lists: Tensor
    col_lists: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.spec.shape_of_tiles(self.bits.shape[1])

    def unpacked(self) -> Tensor:
        """Return the equal bool tensor, band included.

        Returns:
            (1, Hm, queries of all sequences, max_seqlen_k) if queries are packed, else (S, Hm, max_seqlen_q,
            max_seqlen_k).
        """
        return unpack_sequences(self.bits, self.spec)

    def dense_sequence(self, number: int, head: int = 0) -> Tensor:
        """Return the mask of one head and one sequence, bool (Lq_s, Lk_s), band included; it waits for the device."""
        first, seqlen_q, _, seqlen_k = listed(self.sequences.make_bounds(self.spec)[number])
        first += 0 if self.spec.packs_queries else number * self.spec.rows_q
        return packing.unpack_words(self.bits[0, head, first : first + seqlen_q], self.spec.max_seqlen_k)[:, :seqlen_k]

    def stats(self) -> MaskStats:
        """See `PreparedMask.stats`; only the pairs, tiles and rows of sequences count.

        `shape` is (1, Hm, queries of all sequences, max_seqlen_k).
        """
        lengths_q, lengths_k = self.sequences.make_bounds(self.spec).long()[:, 1::2].unbind(1)
        heads, rows = self.bits.shape[1:3]
        queries, pairs = int(lengths_q.sum()), int((lengths_q * lengths_k).sum())
        number = heads * int((-(-lengths_q // TILE) * -(-lengths_k // TILE)).sum())
        counted = _bit_stats(
            (1, heads, queries, self.spec.max_seqlen_k), self.bits, self.classes, heads * pairs, number
        )
        # Rows of no sequence have no bits either, and were counted as empty.
        return replace(counted, empty_rows=counted.empty_rows - heads * (rows - queries))


@dataclass(frozen=True, eq=False, repr=False)
class TreeMask(PreparedMask):
    """A mask between the new tokens of each sequence, at most n; earlier keys are always visible.

    Attributes:
        bits: int32 (S or 1, n, ceil(n / 32)), contiguous. Bit t % 32 of int32 t // 32 of row i is whether query i of
            a sequence attends to new token t, which is its key Lk - Lq + t. Bits from n on are 0.
    """

    form: ClassVar[MaskForm] = "tree"

    bits: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        number, tokens, _ = self.bits.shape
        return number, tokens, tokens

    def unpacked(self) -> Tensor:
        return packing.unpack_tree(self.bits)

    def stats(self) -> MaskStats:
        """Count only pairs of new tokens, as `mask_stats` does; it waits for the device."""
        return mask_stats(self.unpacked()[:, None])


def unpack_view(view: MaskView, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Unpack tiles, keys or intervals to the bool mask (Bm, Hm, Lq or 1, Lk), without the band of a call."""
    return PreparedMask._made(view.form, view.tensors, seqlen_q=seqlen_q, seqlen_k=seqlen_k).unpacked()


def _bit_stats(
    shape: tuple[int, int, int, int], bits: Tensor, classes: Tensor, pairs: int | None = None, number: int | None = None
) -> MaskStats:
    empty_rows = int((bits == 0).all(-1).sum())
    return _class_stats(shape, int(packing.count_bits(bits)), classes, empty_rows, pairs, number)


def _class_stats(
    shape: tuple[int, int, int, int],
    attending: int,
    classes: Tensor,
    empty_rows: int,
    pairs: int | None = None,
    number: int | None = None,
) -> MaskStats:
    """Make statistics from the number of visible pairs, the classes of tiles, and the number of empty rows.

    Args:
        pairs, number: the number of all pairs and of all tiles; by default the product of `shape` and the size of
            `classes`.
    """
    pairs = math.prod(shape) if pairs is None else pairs
    number = max(1, classes.numel() if number is None else number)
    return MaskStats(
        shape=shape,
        block_size=(TILE, TILE),
        density=attending / max(1, pairs),
        active_tile_fraction=int((classes != EMPTY).sum()) / number,
        full_tile_fraction=int((classes == FULL).sum()) / number,
        empty_rows=empty_rows,
    )
