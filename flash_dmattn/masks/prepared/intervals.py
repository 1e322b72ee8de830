"""`IntervalMask`: a mask that keeps each key for one interval of queries, in O(Lk) memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ..blocks import MaskStats
from .packing import TILE, tiles
from .types import PreparedMask, class_stats


@dataclass(frozen=True, eq=False, repr=False)
class IntervalMask(PreparedMask):
    """A mask in which every key is seen by one run of queries, `start <= i < stop`, with the band folded in.

    Causality, windows, documents, a prefix, padding, and causal top-k over one score per key are of this kind. It
    occupies 8 bytes for a key, 12 with an order, whatever the number of queries.

    All tensors are int32, contiguous and on the mask's device:

    Attributes:
        start, stop: (Bm, Hm, Lk). Queries `start` to `stop`, not included, attend to the key, 0 <= start < stop <= Lq;
            both are 0 for a dead key, which no query attends to.
        order: (Bm, Hm, Lk), the key at each place, live keys first, neighbours of similar intervals, so that tiles of
            128 places are dense; or (Bm, Hm, 0), keys in their own order. It changes no result, only the time.
    """

    form: ClassVar[Literal["tiles", "keys", "intervals"]] = "intervals"

    start: torch.Tensor
    stop: torch.Tensor
    order: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_k = self.start.shape
        return batch, num_heads, self.seqlen_q, seqlen_k

    @property
    def device(self) -> torch.device:
        return self.start.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.start, self.stop, self.order

    @property
    def is_reordered(self) -> bool:
        """Whether it has an order of keys of its own."""
        return self.order.size(2) == self.seqlen_k

    def unpacked(self) -> torch.Tensor:
        return self.dense()

    def dense(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        first, last, _ = slice(start, stop).indices(self.seqlen_q)
        rows = torch.arange(first, max(first, last), dtype=torch.int32, device=self.device)[:, None]
        allowed = rows >= self.start[:, :, None]
        allowed &= rows < self.stop[:, :, None]
        return allowed

    def stats(self) -> MaskStats:
        """As for any prepared mask, of tiles of places: 128 keys that stand side by side in `order`, if it has one."""
        begins, ends = (self._by_place(x) for x in (self.start, self.stop))
        tiles_q = tiles(self.seqlen_q)
        first_row = torch.arange(tiles_q, dtype=torch.int32, device=self.device) * TILE
        last_row = (first_row + TILE).clamp(max=self.seqlen_q)
        # What is missing in the last leaf allows nothing: its tiles are partial at most.
        missing = -self.seqlen_k % TILE
        begins, ends = (F.pad(x, (0, missing)).unflatten(2, (-1, TILE)) for x in (begins, ends))
        active = _covering(begins // TILE, (ends + (TILE - 1)) // TILE, tiles_q) > 0
        latest, earliest = begins.amax(-1, keepdim=True), ends.amin(-1, keepdim=True)
        full = (latest <= first_row) & (last_row <= earliest)
        seen = _covering(self.start, self.stop, self.seqlen_q)
        attending = int((self.stop - self.start).sum(dtype=torch.int64))
        return class_stats(self.shape, attending, active.to(torch.uint8) + full, int((seen == 0).sum()))

    def _by_place(self, of_key: torch.Tensor) -> torch.Tensor:
        return of_key.gather(2, self.order.long()) if self.is_reordered else of_key


def _covering(start: torch.Tensor, stop: torch.Tensor, length: int) -> torch.Tensor:
    """How many of the intervals [start, stop) of the last dim have each of the positions below `length`."""
    shape = (*start.shape[:-1], length)
    positions = torch.arange(length, dtype=start.dtype, device=start.device).expand(shape).contiguous()
    begun, ended = (torch.searchsorted(x.sort(dim=-1).values, positions, right=True) for x in (start, stop))
    return begun - ended
