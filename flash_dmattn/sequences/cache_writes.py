"""The operator that writes new keys and values into a cache, and who writes: PyTorch, or a faster writer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..definition import define
from ..problem import PACKED_QUERIES, Layout
from .tokens import token_places


class CacheWrite(NamedTuple):
    """One write of new keys and values: all tensors 4-D, sizes and dtypes checked.

    Attributes:
        k_cache, v_cache: (S, Lk, Hk, ·), (1, Tk, Hk, ·), or in pages (pages, page_size, Hk, ·); any strides.
        k, v: the new ones, (S, L, Hk, ·) or (1, T, Hk, ·); any strides. Neither v nor v_cache of a cache of one kind.
        bounds, block_table: of a `SequenceView`, the new tokens in the place of queries. Entries of the table may be
            wrong, and a sequence may have fewer keys than new tokens: neither may write beyond the caches.
        layout: of the sequences.
    """

    k_cache: Tensor
    v_cache: Tensor | None
    k: Tensor
    v: Tensor | None
    bounds: Tensor
    block_table: Tensor | None
    layout: Layout

    @property
    def packs_tokens(self) -> bool:
        """Whether the new tokens are one row."""
        return self.layout in PACKED_QUERIES

    @property
    def packs_keys(self) -> bool:
        """Whether the caches are."""
        return self.layout == "packed"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write, or no place for it."""
        return self.k.numel() == 0 or self.k_cache.numel() == 0 or self.bounds.shape[0] == 0


def places(write: CacheWrite) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row of new tokens goes: (is_written, entry of the cache, row of the entry), int64 of all rows.

    A row that goes nowhere has entry and row 0.
    """
    own, token, is_token = token_places(write.bounds, write.k.shape[0], write.k.shape[1], write.packs_tokens)
    _, tokens, first, keys = write.bounds.long()[own].unbind(1)
    place = keys - tokens + token
    is_written = is_token & (place >= 0)
    place = torch.where(is_written, place, 0)
    entry = torch.zeros_like(own) if write.packs_keys else own
    row = first + place
    if write.block_table is not None:
        pages, page_size = write.k_cache.shape[:2]
        entry = write.block_table[own, place // page_size].long().clamp(0, pages - 1)
        row = place % page_size
    return is_written, torch.where(is_written, entry, 0), torch.where(is_written, row, 0)


def write_by_pytorch(write: CacheWrite) -> None:
    """Write by index, without a look at the values: it waits for no device."""
    is_written, entry, row = places(write)
    # Sizes may not depend on values. So a row that goes nowhere does what the first one does that goes somewhere, and
    # where none does all of them write back what is there.
    leader = is_written.int().argmax()
    source = torch.where(is_written, torch.arange(len(entry), device=entry.device), leader)
    entry, row = entry[source], row[source]
    for cache, new in ((write.k_cache, write.k), (write.v_cache, write.v)):
        if cache is None or new is None:
            continue
        values = torch.where(is_written[leader], new.flatten(0, 1)[source], cache[entry, row])
        cache.index_put_((entry, row), values)


Writer = Callable[[CacheWrite], None]
_find_faster: Callable[[CacheWrite], Writer | None] = lambda write: None


def register(find_faster: Callable[[CacheWrite], Writer | None]) -> None:
    """Ask `find_faster` for the writer of a write from now on; where it returns None, PyTorch writes."""
    global _find_faster
    _find_faster = find_faster


def _write(
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    bounds: Tensor,
    block_table: Tensor | None,
    layout: Layout,
) -> None:
    write = CacheWrite(k_cache, v_cache, k, v, bounds, block_table, layout)
    if not write.is_empty:
        (_find_faster(write) or write_by_pytorch)(write)


def _write_fake(*_: object) -> None:
    return None


OPERATOR = define(
    "append_to_cache",
    "(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor k, Tensor? v, Tensor bounds, Tensor? block_table, str layout) "
    "-> ()",
    _write,
    _write_fake,
)
