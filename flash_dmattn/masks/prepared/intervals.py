"""`IntervalMask`: a mask that keeps each key for one interval of queries, without a bit for each pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..blocks import MaskStats
from ..pad import pad
from .interval_tiles import covering, interval_classes
from .packing import tiles
from .types import PreparedMask, class_stats


@dataclass(frozen=True, eq=False, repr=False)
class IntervalMask(PreparedMask):
    """A mask in which every key is seen by one run of queries, `start <= i < stop`, with the band folded in.

    Causality, windows, documents, a prefix, padding, and causal top-k over one score per key are of this kind. It
    occupies 16 bytes for a key, 20 with an order, and 8 for a tile of 128 x 128: 1/256 of the bits of a `TileMask`.

    All tensors are int32, contiguous and on the mask's device:

    Attributes:
        start, stop: (Bm, Hm, Lk). Queries `start` to `stop`, not included, attend to the key, 0 <= start < stop <= Lq;
            both are 0 for a dead key, which no query attends to.
        order: (Bm, Hm, P), the key at each of P places, live keys first, neighbours of similar intervals, so that tiles
            of 128 places are dense; P is Lk, or fewer where some dead keys have no place. Or (Bm, Hm, 0), keys in their
            own order. It changes no result, only the time.
        bounds: (Bm, Hm, 128 * Tp, 2), start and stop at each place, Tp = ceil(P / 128), P being Lk without an order;
            (0, 0) past the last place.
        row_lists, col_lists: (Bm, Hm, Tq, 2 + Tp) and (Bm, Hm, Tp, 2 + Tq), the tiles of places as a `TileMask` lists
            those of keys.
    """

    form: ClassVar[Literal["tiles", "keys", "intervals"]] = "intervals"

    start: torch.Tensor
    stop: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor
    row_lists: torch.Tensor
    col_lists: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_k = self.start.shape
        return batch, num_heads, self.seqlen_q, seqlen_k

    @property
    def device(self) -> torch.device:
        return self.start.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.start, self.stop, self.order, self.bounds, self.row_lists, self.col_lists

    @property
    def is_reordered(self) -> bool:
        """Whether it has an order of keys of its own."""
        return self.order.size(2) > 0 or self.seqlen_k == 0

    @property
    def num_places(self) -> int:
        """How many keys have a place: all, or those of an order that leaves dead keys out."""
        return self.order.size(2) or self.seqlen_k

    def unpacked(self) -> torch.Tensor:
        return self.dense()

    def dense(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        first, last = start, self.seqlen_q
        if start != 0 or stop is not None:  # a slice makes a number of a size that is a symbol
            first, last, _ = slice(start, stop).indices(self.seqlen_q)
        rows = torch.arange(first, max(first, last), dtype=torch.int32, device=self.device)[:, None]
        allowed = rows >= self.start[:, :, None]
        allowed &= rows < self.stop[:, :, None]
        return allowed

    def stats(self) -> MaskStats:
        """As for any prepared mask, of tiles of places: 128 keys that stand side by side in `order`, if it has one."""
        classes = interval_classes(self.bounds, self.seqlen_q)
        classes = pad(classes, (0, tiles(self.seqlen_k) - classes.size(3)))
        seen = covering(self.start, self.stop, self.seqlen_q)
        attending = int((self.stop - self.start).sum(dtype=torch.int64))
        return class_stats(self.shape, attending, classes, int((seen == 0).sum()))
