"""The calls of one rank: each run of its rows over the keys that they see; and its mask, prepared for them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import PreparedMask
from ..masks.arguments import bool_mask
from ..problem import AttentionProblem, TensorSpec, causal_window, check_flag, check_window, unpacked_spec
from .layout import SequenceLayout

# Slices of keys start on a multiple of it, so that rows of masks and biases stay on the alignment that kernels need.
ALIGNMENT = 128


class Slice(NamedTuple):
    """One ordinary call: rows `row` to `row_stop` of a rank's tensors over keys `start` to `stop` in global order.

    `window` is (left, right) of this call, -1 for an unlimited side. Causality is a right of 0.
    """

    row: int
    row_stop: int
    start: int
    stop: int
    window: tuple[int, int]

    @property
    def rows(self) -> slice:
        """Its rows in the tensors of the rank."""
        return slice(self.row, self.row_stop)

    @property
    def keys(self) -> slice:
        """Its keys in tensors of all keys."""
        return slice(self.start, self.stop)

    @property
    def seqlen_q(self) -> int:
        return self.row_stop - self.row

    @property
    def seqlen_k(self) -> int:
        return self.stop - self.start

    def cut(self, x: Tensor) -> Tensor:
        """Return a view of the part of a mask or bias (b, h, Lq / W or 1, Lk or 1) that this call reads."""
        x = x[:, :, self.rows] if x.shape[2] > 1 else x
        return x[..., self.keys] if x.shape[3] > 1 else x


class HeadGroup(NamedTuple):
    """One of `number` equal parts of the heads: the key-value heads and the query heads that read them.

    Parts share a key-value head where there are more of them than such heads.
    """

    place: int
    number: int

    def of(self, heads: int) -> slice:
        """Return its part of a head dim of 1, of all key-value heads or of all query heads."""
        if heads == 1:
            return slice(0, 1)
        if heads < self.number:
            first = self.place // (self.number // heads)
            return slice(first, first + 1)
        width = heads // self.number
        return slice(self.place * width, (self.place + 1) * width)

    def cut(self, x: Tensor) -> Tensor:
        """Return its part of a mask or bias (b, h, i, j)."""
        return x[:, self.of(x.shape[1])]


def slice_keys(
    a: int, b: int, seqlen_q: int, seqlen_k: int, window: tuple[int, int], alignment: int
) -> tuple[int, int, tuple[int, int]]:
    """Return (start, stop, window): the keys that rows [a, b) of a call need, and their window in a call of their own.

    None of the rows attends to a key before `start`, a multiple of `alignment`, or past `stop`. The call of rows [a, b)
    on keys [start, stop) is aligned at its own end, so the window shifts by as much, and is never negative.
    """
    left, right = window
    offset = seqlen_k - seqlen_q
    stop = seqlen_k if right < 0 else max(0, min(seqlen_k, b + offset + right))
    start = 0 if left < 0 else min(max(0, a + offset - left), stop) // alignment * alignment
    if start >= stop:
        return stop, stop, (-1, -1)
    shift = stop - b - offset
    return start, stop, (left + shift if left >= 0 else -1, right - shift if right >= 0 else -1)


def plan(layout: SequenceLayout, rank: int, seqlen_k: int, window: tuple[int, int]) -> tuple[Slice, ...]:
    """Return the calls of one rank; the window is the one of the whole call, with causality folded in."""
    slices, row = [], 0
    for a, b in layout.runs(rank):
        slices.append(Slice(row, row + b - a, *slice_keys(a, b, layout.length, seqlen_k, window, ALIGNMENT)))
        row += b - a
    return tuple(slices)


def slice_problem(rank: AttentionProblem, part: Slice, heads: HeadGroup, held: int) -> AttentionProblem:
    """Describe one slice and one group of heads of a rank's rows, whose tensors of keys have `held` of them."""
    left, right = part.window
    causal = right == 0
    num_heads_k = max(1, rank.num_heads_k // heads.number)
    return rank._replace(
        seqlen_q=part.seqlen_q,
        seqlen_k=part.seqlen_k,
        num_heads=rank.num_heads // heads.number,
        num_heads_k=num_heads_k,
        # The strides of all keys of the group that have arrived: a slice of them is a view.
        k_strides=unpacked_spec((rank.batch, held, num_heads_k, rank.head_dim)).strides,
        v_strides=unpacked_spec((rank.batch, held, num_heads_k, rank.head_dim_v)).strides,
        mask=_cut_spec(rank.mask, part, heads),
        bias=_cut_spec(rank.bias, part, heads),
        is_causal=causal,
        window_size=(left, -1 if causal else right),
        flags=rank.flags._replace(left=left, right=right),
    )


def _cut_spec(spec: TensorSpec | None, part: Slice, heads: HeadGroup) -> TensorSpec | None:
    if spec is None:
        return None
    b, h, i, j = spec.shape
    own = heads.of(h)
    shape = (b, own.stop - own.start, part.seqlen_q if i > 1 else i, part.seqlen_k if j > 1 else j)
    return spec._replace(shape=shape)


@dataclass(frozen=True, eq=False, repr=False)
class ShardedMask:
    """The rows of a mask that one rank has, prepared once for any number of calls; `from_mask` makes it.

    `context_parallel_attention` takes it in the place of a bool mask.

    Attributes:
        layout, layout_k: of the queries and of the keys.
        rank: whose rows these are.
        is_causal, window_size: the band that is part of it, bottom-right aligned; -1 is unlimited on that side.
        batch, heads: (Bm, Hm), each 1 or as many as in the calls.
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

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,
        layout: SequenceLayout,
        rank: int,
        *,
        layout_k: SequenceLayout | None = None,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
        reorder: bool | None = None,
    ) -> ShardedMask:
        """Prepare the rows of a mask that one rank has, for any number of calls; nothing is sent.

        For W ranks, with Lq and Lk positions in all, the result is equal to the rank's rows of
        `mask & causal_mask(Lq, Lk) & sliding_window_mask(Lq, Lk, window_size)`. Its method `dense` returns them.

        Args:
            mask: bool, read from the right as (Bm, Hm, Lq / W or 1, Lk or 1): the rank's own rows, as
                `layout.shard(mask, -2, rank)` takes them out of a whole mask, over all keys in global order.
            layout: of the queries.
            rank: whose rows these are, `torch.distributed.get_rank(group)`.
            layout_k: of the keys; the layout of the queries where it is not given.
            is_causal, window_size, reorder: as in `flash_dmattn.masks.PreparedMask.from_mask`, of the whole call.

        Returns:
            ShardedMask, with a prepared mask for each interval of the rank.

        Raises:
            TypeError: `mask` is not a bool tensor.
            ValueError: it has other rows or keys than the layout.

        >>> import torch
        >>> from flash_dmattn.distributed import SequenceLayout, ShardedMask
        >>> layout = SequenceLayout.zigzag(64, 2)
        >>> whole = torch.rand(64, 64) > 0.5
        >>> mask = ShardedMask.from_mask(layout.shard(whole, 0, 1), layout, 1, is_causal=True)
        >>> bool((mask.dense()[0, 0] == layout.shard(whole.tril(), 0, 1)).all())
        True
        """
        layout_k = layout if layout_k is None else layout_k
        if isinstance(mask, Tensor) and not 2 <= mask.dim() <= 4:
            raise ValueError(f"mask has {mask.dim()} dimensions, shape {tuple(mask.shape)}; it needs 2, 3 or 4")
        scores = bool_mask("mask", mask)
        rows, keys = layout.local_length, layout_k.length
        if scores.shape[2] not in (1, rows) or scores.shape[3] not in (1, keys):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}, read as (batch, heads, rows of this rank, all keys); "
                f"it needs rows in {{1, {rows}}} and keys in {{1, {keys}}}"
            )
        is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
        masks = [
            PreparedMask.from_mask(
                part.cut(scores),
                seqlen_q=part.seqlen_q,
                seqlen_k=part.seqlen_k,
                window_size=part.window,
                reorder=reorder,
            )
            for part in plan(layout, rank, keys, causal_window(is_causal, window_size))
        ]
        batch, heads = scores.shape[:2]
        return cls(layout, layout_k, rank, is_causal, window_size, batch, heads, tuple(masks))

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.masks[0].device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ShardedMask:
        """Return the same mask on a device, as `torch.Tensor.to` does."""
        return replace(self, masks=tuple(mask.to(device, non_blocking=non_blocking) for mask in self.masks))

    def dense(self) -> Tensor:
        """Return the bool mask of the rank's rows over all keys, band included: (Bm, Hm, Lq / W, Lk)."""
        shape = (self.batch, self.heads, self.layout.local_length, self.layout_k.length)
        dense = torch.zeros(shape, dtype=torch.bool, device=self.device)
        window = causal_window(self.is_causal, self.window_size)
        for part, mask in zip(plan(self.layout, self.rank, self.layout_k.length, window), self.masks):
            dense[:, :, part.rows, part.keys] = mask.dense()
        return dense

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`: the class itself, which `torch.load` may call.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        # Not the values: printing them waits for the device.
        return (
            f"ShardedMask(rank={self.rank} of {self.layout.world_size}, shape={(self.batch, self.heads)} x "
            f"{self.layout.local_length} of {self.layout.length} rows x {self.layout_k.length} keys, "
            f"is_causal={self.is_causal}, window_size={self.window_size}, device={str(self.device)!r})"
        )


torch.serialization.add_safe_globals([SequenceLayout, ShardedMask])
