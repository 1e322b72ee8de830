"""Prepared masks: a bool mask turned, once, into what attention kernels walk: bits and tile lists, or a set of keys.

`intervals.py` has the third kind, which never was a bool mask.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ...problem import Band, MaskView, causal_window, make_band
from ..blocks import MaskStats
from ..saved import restore_with
from . import packing
from .packing import EMPTY, FULL, TILE

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False, repr=False)
class PreparedMask(ABC):
    """What attention takes in the place of a bool mask, for any number of calls: a tile, key or interval mask.

    Attributes:
        seqlen_q, seqlen_k: number of queries and keys of the calls it is for.
        is_causal, window_size: the band that is part of it, bottom-right aligned; -1 is unlimited on that side.
        form: "tiles" of a `TileMask`, "keys" of a `KeyMask`, "intervals" of an `IntervalMask`.
        batch_dims: the leading dims that its batch of Bm entries stands for, each 1 or that of the calls: (Bm,), or as
            the mask had them that it was made of.
        one_row: whether it was made of a mask with one row for all queries, the band apart. Some kernels then take more
            queries at once.
    """

    form: ClassVar[Literal["tiles", "keys", "intervals"]]

    seqlen_q: int
    seqlen_k: int
    is_causal: bool
    window_size: tuple[int, int]
    leading: tuple[int, ...] | None = field(default=None, kw_only=True)
    one_row: bool = field(default=False, kw_only=True)

    @property
    def batch_dims(self) -> tuple[int, ...]:
        return self.shape[:1] if self.leading is None else self.leading

    def expand_batch(self, dims: tuple[int, ...]) -> Self:
        """The same mask with its leading dims expanded: a copy of its tensors.

        Args:
            dims: as many as `batch_dims` or more, each as there or, where that is 1, any.
        """
        own = (*(1,) * (len(dims) - len(self.batch_dims)), *self.batch_dims)
        tensors = [
            x.view(*own, *x.shape[1:]).expand(*dims, *x.shape[1:]).reshape(math.prod(dims), *x.shape[1:])
            for x in self.tensors
        ]
        return self._with(tensors, dims)

    def _with(self, tensors: Sequence[torch.Tensor], leading: tuple[int, ...] | None) -> Self:
        numbers = self.seqlen_q, self.seqlen_k, self.is_causal, self.window_size
        return type(self)(*numbers, *tensors, leading=leading, one_row=self.one_row)

    @property
    def band(self) -> Band | None:
        """The diagonals `low <= j - i <= high` that `is_causal` and `window_size` leave; None where that is all."""
        return make_band(self.seqlen_q, self.seqlen_k, causal_window(self.is_causal, self.window_size))

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(Bm, Hm, Lq or 1, Lk): Bm is 1 or the batch size, Hm is 1 or a number of heads."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The fields that are tensors, in their order."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def view(self) -> MaskView:
        """What a kernel backend receives."""
        return MaskView(self.form, self.tensors)

    @cached_property
    def call_key(self) -> tuple[object, ...]:
        """Tell calls with such masks apart, whatever these allow; hashable."""
        return call_key(self)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same mask on a device, as `torch.Tensor.to` has it: itself where it is there already.

        >>> import torch
        >>> from flash_dmattn.masks import prepare_mask
        >>> prepare_mask(torch.ones(8, 8, dtype=torch.bool), is_causal=True).to("cpu")
        TileMask(shape=(1, 1, 8, 8), seqlen_q=8, is_causal=True, window_size=(-1, -1), device='cpu')
        """
        tensors = [x.to(device, non_blocking=non_blocking) for x in self.tensors]
        if all(moved is x for moved, x in zip(tensors, self.tensors, strict=True)):
            return self
        return self._with(tensors, self.leading)

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle, copy and `torch.save`: the fields alone, since what is cached may name a device left behind."""
        fields = (self.form, self.seqlen_q, self.seqlen_k, self.is_causal, self.window_size, *self.tensors)
        given = {"leading": self.leading, "one_row": self.one_row}
        return restore_with, (given, *fields)

    def __repr__(self) -> str:
        # Not the values: printing them waits for the device, and there may be millions.
        leading = "" if self.leading is None else f"batch_dims={self.leading}, "
        return (
            f"{type(self).__name__}(shape={self.shape}, {leading}seqlen_q={self.seqlen_q}, is_causal={self.is_causal}, "
            f"window_size={self.window_size}, device={str(self.device)!r})"
        )

    @abstractmethod
    def unpacked(self) -> torch.Tensor:
        """The bool mask of `shape`, contiguous, that allows what this one does together with the band."""

    @abstractmethod
    def dense(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The bool mask of query rows `start` to `stop`, band included: (Bm, Hm, stop - start, Lk)."""

    @abstractmethod
    def stats(self) -> MaskStats:
        """Density, active and full tiles of 128 x 128, and empty rows, band included; it waits for the device.

        As `mask_stats` counts them, but a last tile with fewer than 128 keys is never full: kernels mask its end.
        """


@dataclass(frozen=True, eq=False, repr=False)
class TileMask(PreparedMask):
    """A mask that depends on the query, as bits and lists of 128 x 128 tiles, with the band folded in.

    With Tq = ceil(Lq / 128), Tk = ceil(Lk / 128) and W = 4 * Tk, all contiguous and on the mask's device:

    Attributes:
        bits: int32 (Bm, Hm, Lq, W). Bit j % 32 of word j // 32 says whether the query attends to key j; bits of keys
            past Lk are 0. Rows are whole multiples of 16 bytes.
        classes: uint8 (Bm, Hm, Tq, Tk). 0: empty, 1: partial, 2: full. In a full tile all of its queries that exist
            attend to 128 keys; a last tile with fewer keys is partial at most.
        row_lists: int32 (Bm, Hm, Tq, 2 + Tk). For a row of tiles the number of its full tiles, that of its partial
            tiles, then the columns of its full, of its partial and of its empty tiles, each ascending.
        col_lists: int32 (Bm, Hm, Tk, 2 + Tq), the same for the columns of tiles.
    """

    form: ClassVar[Literal["tiles", "keys", "intervals"]] = "tiles"

    bits: torch.Tensor
    classes: torch.Tensor
    row_lists: torch.Tensor
    col_lists: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_q, _ = self.bits.shape
        return batch, num_heads, seqlen_q, self.seqlen_k

    @property
    def device(self) -> torch.device:
        return self.bits.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.bits, self.classes, self.row_lists, self.col_lists

    @property
    def row_full_count(self) -> torch.Tensor:
        """Full tiles in a row of tiles: a view (Bm, Hm, Tq) of `row_lists`."""
        return self.row_lists[..., 0]

    @property
    def row_partial_count(self) -> torch.Tensor:
        """Partial tiles in a row of tiles: a view (Bm, Hm, Tq) of `row_lists`."""
        return self.row_lists[..., 1]

    @property
    def row_indices(self) -> torch.Tensor:
        """Columns of the full, the partial and the empty tiles: a view (Bm, Hm, Tq, Tk) of `row_lists`."""
        return self.row_lists[..., 2:]

    @property
    def col_full_count(self) -> torch.Tensor:
        """Full tiles in a column of tiles: a view (Bm, Hm, Tk) of `col_lists`."""
        return self.col_lists[..., 0]

    @property
    def col_partial_count(self) -> torch.Tensor:
        """Partial tiles in a column of tiles: a view (Bm, Hm, Tk) of `col_lists`."""
        return self.col_lists[..., 1]

    @property
    def col_indices(self) -> torch.Tensor:
        """Rows of the full, the partial and the empty tiles: a view (Bm, Hm, Tk, Tq) of `col_lists`."""
        return self.col_lists[..., 2:]

    def unpacked(self) -> torch.Tensor:
        return self.dense()

    def dense(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return packing.unpack_words(self.bits[:, :, start:stop], self.seqlen_k)

    def stats(self) -> MaskStats:
        attending = int(packing.count_bits(self.bits))
        return class_stats(self.shape, attending, self.classes, int((self.bits == 0).all(-1).sum()))


@dataclass(frozen=True, eq=False, repr=False)
class KeyMask(PreparedMask):
    """A mask with one row for a few queries, as the set of keys it keeps; the band is not folded in.

    Query i attends to the kept keys among `i + band.low` to `i + band.high`, which are numbers
    `prefix[max(i + low, 0)]` to `prefix[min(i + high + 1, Lk)]` of `kept`, the end not included.

    Attributes:
        kept: int32 (Bm, Hm, Lk), the positions of the kept keys, ascending, then Lk for the rest.
        count: int32 (Bm, Hm), how many are kept.
        prefix: int32 (Bm, Hm, Lk + 1), how many are kept below each position.
    """

    form: ClassVar[Literal["tiles", "keys", "intervals"]] = "keys"

    kept: torch.Tensor
    count: torch.Tensor
    prefix: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_k = self.kept.shape
        return batch, num_heads, 1, seqlen_k

    @property
    def device(self) -> torch.device:
        return self.kept.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.kept, self.count, self.prefix

    def unpacked(self) -> torch.Tensor:
        return (self.prefix.diff(dim=-1) > 0)[:, :, None]

    def dense(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        keys = self.unpacked().expand(-1, -1, self.seqlen_q, -1)[:, :, start:stop]
        if self.band is None:
            return keys
        rows = torch.arange(self.seqlen_q, device=self.device)[start:stop, None]
        diagonals = torch.arange(self.seqlen_k, device=self.device) - rows
        return keys & (diagonals >= self.band.low) & (diagonals <= self.band.high)

    def stats(self) -> MaskStats:
        """As for any prepared mask; `shape` counts Lq rows."""
        batch, num_heads, _, seqlen_k = self.shape
        low, high = self.band or Band(-self.seqlen_q, seqlen_k)
        rows = torch.arange(self.seqlen_q, device=self.device)
        kept = self._kept_between(rows + low, rows + high + 1)
        # Together the rows of a tile reach from the lowest key of the first to the highest of the last, without gaps;
        # what all of them reach is from the lowest of the last to the highest of the first.
        first_row = torch.arange(0, self.seqlen_q, TILE, device=self.device)[:, None]
        last_row = (first_row + (TILE - 1)).clamp(max=self.seqlen_q - 1)
        first_key = torch.arange(0, seqlen_k, TILE, device=self.device)
        end = first_key + TILE
        met = self._kept_between(torch.maximum(first_key, first_row + low), torch.minimum(end, last_row + (high + 1)))
        inside = (first_key >= last_row + low) & (end <= first_row + (high + 1))
        whole = inside & (self._kept_between(first_key, end)[..., None, :] == TILE)
        classes = (met > 0).to(torch.uint8) + whole
        shape = (batch, num_heads, self.seqlen_q, seqlen_k)
        return class_stats(shape, int(kept.sum(dtype=torch.int64)), classes, int((kept == 0).sum()))

    def _kept_between(self, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        """How many keys are kept from `start` to `stop`, not included: (Bm, Hm, ...)."""
        start, stop = (x.clamp(0, self.seqlen_k) for x in (start, stop))
        return (self.prefix[..., stop] - self.prefix[..., start]).clamp(min=0)


def call_key(mask: Any, left_out: tuple[str, ...] = ()) -> tuple[object, ...]:
    """The `call_key` of a mask: its form, and every field; of a tensor what a call is validated by.

    Args:
        mask: one of the dataclasses that attention takes in the place of a bool mask.
        left_out: fields that every call compares itself.
    """
    values = (getattr(mask, field.name) for field in fields(mask) if field.name not in left_out)
    return mask.form, *((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in values)


def class_stats(shape: tuple[int, int, int, int], attending: int, classes: torch.Tensor, empty_rows: int) -> MaskStats:
    """The statistics of a mask of `shape` from its pairs that attend, the classes of its tiles, and its empty rows."""
    batch, num_heads, seqlen_q, seqlen_k = shape
    number = max(1, classes.numel())
    return MaskStats(
        shape=shape,
        block_size=(TILE, TILE),
        density=attending / max(1, batch * num_heads * seqlen_q * seqlen_k),
        active_tile_fraction=int((classes != EMPTY).sum()) / number,
        full_tile_fraction=int((classes == FULL).sum()) / number,
        empty_rows=empty_rows,
    )
