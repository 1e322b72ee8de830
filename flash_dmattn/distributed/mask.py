"""`ShardedMask`: the rows of a mask that one rank has, prepared once for any number of context-parallel calls."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from ..masks import PreparedMask
from ..masks.arguments import bool_mask
from ..problem import causal_window, check_flag, check_window
from .layout import SequenceLayout
from .slices import Slice, plan


@dataclass(frozen=True, eq=False, repr=False)
class ShardedMask:
    """What `context_parallel_attention` takes in the place of a bool mask; `prepare_mask` makes it.

    Attributes:
        layout, layout_k: of the queries and of the keys.
        rank: whose rows these are.
        is_causal, window_size: the band that is part of it, bottom-right aligned; -1 is unlimited on that side.
        batch, heads: (Bm, Hm), each 1 or that of the calls.
        masks: a `PreparedMask` for each interval of the rank, on the keys that its rows can see.
    """

    layout: SequenceLayout
    layout_k: SequenceLayout
    rank: int
    is_causal: bool
    window_size: tuple[int, int]
    batch: int
    heads: int
    masks: tuple[PreparedMask, ...]

    @property
    def window(self) -> tuple[int, int]:
        """The band as (left, right), -1 for an unlimited side."""
        return causal_window(self.is_causal, self.window_size)

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The rows and keys of each of `masks`."""
        return plan(self.layout, self.rank, self.layout_k.length, self.window)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.masks[0].device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ShardedMask:
        """The same mask on a device, as `torch.Tensor.to` has it."""
        return replace(self, masks=tuple(mask.to(device, non_blocking=non_blocking) for mask in self.masks))

    def dense(self) -> Tensor:
        """The bool mask of the rank's rows over all keys, band included: (Bm, Hm, Lq / W, Lk)."""
        shape = (self.batch, self.heads, self.layout.local_length, self.layout_k.length)
        dense = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for part, mask in zip(self.slices, self.masks):
            dense[:, :, part.rows, part.keys] = mask.dense()
        return dense

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`: the fields alone, without the slices that are made of them.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        # Not the values: printing them waits for the device.
        return (
            f"ShardedMask(rank={self.rank} of {self.layout.world_size}, shape={(self.batch, self.heads)} x "
            f"{self.layout.local_length} of {self.layout.length} rows x {self.layout_k.length} keys, "
            f"is_causal={self.is_causal}, window_size={self.window_size}, device={str(self.device)!r})"
        )


torch.serialization.add_safe_globals([SequenceLayout, ShardedMask])


def prepare_mask(
    mask: Tensor,
    layout: SequenceLayout,
    rank: int,
    *,
    layout_k: SequenceLayout | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    reorder: bool | None = None,
) -> ShardedMask:
    """Prepares the rows of a mask that one rank has, for any number of calls; nothing is sent.

    For W ranks, Lq and Lk positions in all: the result stands for the rank's rows of
    `mask & causal_mask(Lq, Lk) & sliding_window_mask(Lq, Lk, window_size)`, as its method `dense` returns them.

    Args:
        mask: bool, read from the right as (Bm, Hm, Lq / W or 1, Lk or 1): the rank's own rows, as
            `layout.shard(mask, -2, rank)` takes them out of a whole mask, over all keys in global order.
        layout: of the queries.
        rank: whose rows these are, `torch.distributed.get_rank(group)`.
        layout_k: of the keys; that of the queries where it is not given.
        is_causal, window_size, reorder: as in `flash_dmattn.masks.PreparedMask.from_mask`, of the whole call.

    Returns:
        ShardedMask, with a prepared mask for each interval of the rank.

    Raises:
        TypeError: `mask` is not a bool tensor.
        ValueError: its rows or keys are not those of the layout.

    >>> import torch
    >>> from flash_dmattn.distributed import SequenceLayout, prepare_mask
    >>> layout = SequenceLayout.zigzag(64, 2)
    >>> whole = torch.rand(64, 64) > 0.5
    >>> mask = prepare_mask(layout.shard(whole, 0, 1), layout, 1, is_causal=True)
    >>> bool((mask.dense()[0, 0] == layout.shard(whole.tril(), 0, 1)).all())
    True
    """
    layout_k = layout if layout_k is None else layout_k
    if isinstance(mask, Tensor) and not 2 <= mask.dim() <= 4:
        raise ValueError(f"mask has {mask.dim()} dimensions, shape {tuple(mask.shape)}; it needs 2, 3 or 4")
    given = bool_mask("mask", mask)
    rows, keys = layout.local_length, layout_k.length
    if given.shape[2] not in (1, rows) or given.shape[3] not in (1, keys):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, read as (batch, heads, rows of this rank, all keys); "
            f"it needs rows in {{1, {rows}}} and keys in {{1, {keys}}}"
        )
    is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
    masks = []
    for part in plan(layout, rank, keys, causal_window(is_causal, window_size)):
        masks.append(
            PreparedMask.from_mask(
                cut(given, part),
                seqlen_q=part.seqlen_q,
                seqlen_k=part.seqlen_k,
                window_size=part.window,
                reorder=reorder,
            )
        )
    batch, heads = given.shape[:2]
    return ShardedMask(layout, layout_k, rank, is_causal, window_size, batch, heads, tuple(masks))


def cut(x: Tensor, part: Slice) -> Tensor:
    """The part of a mask or bias (b, h, Lq / W or 1, Lk or 1) that one call reads: a view."""
    x = x[:, :, part.rows] if x.shape[2] > 1 else x
    return x[..., part.keys] if x.shape[3] > 1 else x
