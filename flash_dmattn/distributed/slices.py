"""The calls of one rank: each run of its rows over their visible keys; and its mask, prepared for them.

A packed document, or a padded entry, may make calls of its own: for each run of rows, its queries over its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..biases import require_lists
from ..masks import PreparedMask
from ..masks.arguments import INTEGER_DTYPES, bool_mask, pair
from ..masks.index_scores import IndexScores
from ..masks.prepared.mask import check_entries
from ..problem import (
    AttentionProblem,
    MaskForm,
    TensorSpec,
    as_scores,
    causal_window,
    check_flag,
    check_floats,
    check_window,
    collapse,
    unpacked_spec,
    values_can_be_read,
)
from ..reference.dropout import BLOCK
from ..sequences import Sequences
from .documents import (
    NO_SPANS,
    Documents,
    Piece,
    Spans,
    document_limits,
    format_bounds,
    parse_bounds,
    read_documents,
    rows_seeing,
    without_empty,
)
from .layout import SequenceLayout

# Slices of keys start at a multiple of it, so that rows of masks and biases keep the alignment that kernels need.
ALIGNMENT = 128


class Slice(NamedTuple):
    """One ordinary call: rows `row` to `row_stop` of a rank's tensors over keys `start` to `stop` in global order.

    `window` is (left, right) of this call, -1 for an unlimited side. Causality is a right of 0. The distance of a pair
    in the whole call is its distance in this call plus `shift`, because each call is aligned at its last key.
    `is_masked` is False if all rows and keys are of one document, so that the mask of documents hides no pair.

    `entries` is (first, last) of a call with some entries of the batch; None for all of it. Dropout counts from
    `number` for its first entry, and from `first_row` and `first_key` in its entries: in a document from its begin.
    """

    row: int
    row_stop: int
    start: int
    stop: int
    window: tuple[int, int]
    shift: int = 0
    is_masked: bool = True
    entries: tuple[int, int] | None = None
    number: int = 0
    first_row: int = 0
    first_key: int = 0

    @property
    def rows(self) -> slice:
        """Its rows in the tensors of the rank."""
        return slice(self.row, self.row_stop)

    @property
    def keys(self) -> slice:
        """Its keys in tensors of all keys."""
        return slice(self.start, self.stop)

    @property
    def batch(self) -> slice:
        """Its entries in tensors that have all entries."""
        return slice(None) if self.entries is None else slice(*self.entries)

    @property
    def seqlen_q(self) -> int:
        return self.row_stop - self.row

    @property
    def seqlen_k(self) -> int:
        return self.stop - self.start

    def rows_of(self, share: int) -> slice:
        """Return its rows in a tensor that has one row for every `share` rows of the rank."""
        return slice(self.row // share, -(-self.row_stop // share))

    def lead(self, dropout_p: float) -> int:
        """Return how many rows of zeros go before its own: kernels draw dropout for whole blocks of rows."""
        return self.first_row % BLOCK if dropout_p > 0 else 0

    def without_place(self, has_distances: bool, dropout_p: float) -> Slice:
        """Return a call of the same sizes that begins at 0 everywhere: the same backends serve it."""
        entries = None if self.entries is None else (0, self.entries[1] - self.entries[0])
        shift, lead = self.shift if has_distances else 0, self.lead(dropout_p)
        return Slice(0, self.seqlen_q, 0, self.seqlen_k, self.window, shift, self.is_masked, entries, first_row=lead)

    def place_in(self, x: Tensor) -> tuple[slice, ...]:
        """Return the index of its part in a mask or bias (b, h, Lq / W or 1, Lk or 1)."""
        batch, _, rows, keys = x.shape
        all_of = slice(None)
        return (
            self.batch if batch > 1 else all_of,
            all_of,
            self.rows if rows > 1 else all_of,
            self.keys if keys > 1 else all_of,
        )

    def cut(self, x: Tensor) -> Tensor:
        """Return a view of the part of a mask or bias for this call."""
        return x[self.place_in(x)]


class HeadGroup(NamedTuple):
    """One of `number` equal groups of heads: key-value heads and their query heads.

    Several groups have the same key-value head if there are more groups than key-value heads.
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
    a: int,
    b: int,
    seqlen_q: int,
    seqlen_k: int,
    window: tuple[int, int],
    alignment: int,
    limits: tuple[int, int] | None = None,
) -> tuple[int, int, tuple[int, int]]:
    """Return (start, stop, window): the keys that rows [a, b) of a call need, and the window of a call with only them.

    None of the rows attends to a key before `start`, a multiple of `alignment`, or past `stop`. The call of rows [a, b)
    on keys [start, stop) is aligned at its last key, which shifts the window; no side of it becomes negative. `limits`
    are the first key of the rows, which need not be a multiple, and the key after the last.
    """
    left, right = window
    offset = seqlen_k - seqlen_q
    stop = seqlen_k if right < 0 else max(0, min(seqlen_k, b + offset + right))
    start = 0 if left < 0 else min(max(0, a + offset - left), stop) // alignment * alignment
    if limits is not None:
        start, stop = max(start, limits[0]), min(stop, limits[1])
    if start >= stop:
        return stop, stop, (-1, -1)
    shift = stop - b - offset
    return start, stop, (left + shift if left >= 0 else -1, right - shift if right >= 0 else -1)


def plan(
    layout: SequenceLayout, rank: int, seqlen_k: int, window: tuple[int, int], spans: Spans = NO_SPANS
) -> tuple[Slice, ...]:
    """Return the calls of one rank; `window` is of the whole call, with causality folded in.

    With documents, for which queries and keys have equal lengths, a call has the keys of the documents of its rows, or
    each of the documents has a call.
    """
    slices, row = [], 0
    for a, b in layout.runs(rank):
        if spans.is_split:
            slices += [_slice_piece(piece, a, b, row, window) for piece in spans.pieces(a, b)]
            row += b - a
            continue
        documents = spans.bounds
        first, last, is_one = document_limits(documents, a, b) if documents else (0, seqlen_k, False)
        start, stop, slice_window = slice_keys(a, b, layout.length, seqlen_k, window, ALIGNMENT, (first, last))
        shift = stop - b - (seqlen_k - layout.length)
        slices.append(
            Slice(row, row + b - a, start, stop, slice_window, shift, not is_one, first_row=a, first_key=start)
        )
        row += b - a
    return tuple(slices)


def _slice_piece(piece: Piece, a: int, b: int, row: int, window: tuple[int, int]) -> Slice:
    """Return the call of one piece for positions [a, b), whose rows begin at `row` in the tensors of the rank."""
    first, seqlen_q, seqlen_k = piece.first, piece.seqlen_q, piece.seqlen_k
    begin, end = max(a - first, 0), min(b - first, seqlen_q)
    start, stop, slice_window = slice_keys(begin, end, seqlen_q, seqlen_k, window, ALIGNMENT)
    row += first - a
    return Slice(
        row + begin,
        row + end,
        first + start,
        first + stop,
        slice_window,
        stop - end - (seqlen_k - seqlen_q),
        entries=(piece.entry, piece.entry + piece.how_many),
        number=piece.number,
        first_row=begin,
        first_key=start,
    )


def slice_problem(rank: AttentionProblem, part: Slice, heads: HeadGroup, held: int) -> AttentionProblem:
    """Describe one slice and one group of heads of a rank's rows; tensors of keys have `held` rows."""
    left, right = part.window
    causal = right == 0
    if not part.is_masked:
        rank = rank._replace(mask=None, mask_form="none")
    zero = rank.flags.zero + part.shift if rank.relative is not None else 0
    num_heads_k, num_heads = max(1, rank.num_heads_k // heads.number), rank.num_heads // heads.number
    batch = rank.batch if part.entries is None else part.entries[1] - part.entries[0]
    lead, q_strides = part.lead(rank.dropout_p), rank.q_strides
    if lead:
        q_strides = unpacked_spec((batch, part.seqlen_q + lead, num_heads, rank.head_dim)).strides
    return rank._replace(
        batch=batch,
        seqlen_q=part.seqlen_q + lead,
        seqlen_k=part.seqlen_k,
        num_heads=num_heads,
        q_strides=q_strides,
        num_heads_k=num_heads_k,
        # The strides of all received keys of the group, because a slice is a view.
        k_strides=unpacked_spec((rank.batch, held, num_heads_k, rank.head_dim)).strides,
        v_strides=unpacked_spec((rank.batch, held, num_heads_k, rank.head_dim_v)).strides,
        mask=_cut_spec(rank.mask, part, heads, lead),
        bias=_cut_spec(rank.bias, part, heads, lead),
        is_causal=causal,
        window_size=(left, -1 if causal else right),
        relative=_cut_spec(rank.relative, part, heads, lead, has_keys=False),
        list_bias=_cut_values(rank, part, heads),
        flags=rank.flags._replace(left=left, right=right, zero=zero),
    )


def _cut_spec(
    spec: TensorSpec | None, part: Slice, heads: HeadGroup, lead: int, has_keys: bool = True
) -> TensorSpec | None:
    if spec is None:
        return None
    b, h, i, j = spec.shape
    kept = heads.of(h)
    keys = part.seqlen_k if j > 1 and has_keys else j
    b = b if b == 1 or part.entries is None else part.entries[1] - part.entries[0]
    shape = (b, kept.stop - kept.start, part.seqlen_q + lead if i > 1 else i, keys)
    # Rows with others before them are a copy.
    return spec._replace(shape=shape, strides=unpacked_spec(shape).strides if lead and i > 1 else spec.strides)


def with_lead(x: Tensor, dim: int, lead: int, value: float = 0.0) -> Tensor:
    """Return a contiguous tensor with `lead` rows of a value before its own, along a dim; itself without them."""
    # F.pad keeps the strides of heads that are the last dim in memory.
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (lead, 0), value=value).contiguous() if lead else x


def share_of_values(rows: int, local_length: int, block_q: int) -> int:
    """Return the number of rows with the same row of values for entries of lists: one, or a block of queries."""
    return 1 if rows == local_length else block_q


def _cut_values(rank: AttentionProblem, part: Slice, heads: HeadGroup) -> TensorSpec | None:
    spec = _cut_spec(rank.list_bias, part, heads, 0, has_keys=False)
    if spec is None or rank.list_bias is None:
        return None
    rows = part.rows_of(share_of_values(rank.list_bias.shape[2], rank.seqlen_q, rank.flags.block_q))
    batch, number, _, entries = spec.shape
    return spec._replace(shape=(batch, number, rows.stop - rows.start, entries))


@dataclass(frozen=True, eq=False, repr=False)
class ShardedMask:
    """The rows of a mask of one rank, prepared once for any number of calls; its `from_...` methods create it.

    `context_parallel_attention` takes it instead of a bool mask.

    Attributes:
        layout, layout_k: of the queries and of the keys.
        rank: the rank of the rows.
        is_causal, window_size: the band that is part of it, bottom-right aligned; -1 is unlimited on that side.
        batch, heads: (Bm, Hm), each 1 or as many as in the calls.
        masks: a `PreparedMask` for each interval of the rank, on the keys of its rows; None if all of these are of one
            document.
        bounds: the bounds of `documents` as a string, for packed sequences.
    """

    layout: SequenceLayout
    layout_k: SequenceLayout
    rank: int
    is_causal: bool
    window_size: tuple[int, int]
    batch: int
    heads: int
    masks: tuple[PreparedMask | None, ...]
    bounds: str = ""

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
        """Prepare the rows of a mask of one rank, for any number of calls, without communication.

        For W ranks, with Lq and Lk positions in all, the result is equal to the rank's rows of
        `mask & causal_mask(Lq, Lk) & sliding_window_mask(Lq, Lk, window_size)`. Its method `dense` returns them.

        Args:
            mask: bool, read from the right as (Bm, Hm, Lq / W or 1, Lk or 1): the rank's own rows, as
                `layout.shard(mask, -2, rank)` takes them out of a whole mask, over all keys in global order.
            layout: of the queries.
            rank: the rank of the rows, `torch.distributed.get_rank(group)`.
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

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequences,
        layout: SequenceLayout,
        rank: int,
        *,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
    ) -> ShardedMask:
        """Make the mask of packed documents for a rank's rows, without communication: a query attends to its document.

        `context_parallel_attention(..., sequences=sequences)` creates it once for all layers. Created here, it supports
        calls in graphs of `torch.compile`, one graph for each set of bounds, and batches of several entries. It takes
        O(length) of memory, on the device of the sequences, which needs to be the device of q.

        Args:
            sequences: of `Sequences.packed`, with as many keys as queries; the same on every rank. Their values are
                copied to the host once, which waits for the device.
            layout: of queries and keys.
            rank: the rank of the rows.
            is_causal, window_size: as in `attention`; calls must not repeat them.

        Raises:
            TypeError, ValueError: the sequences are of another kind, or do not match the layout.

        >>> import torch
        >>> from flash_dmattn import Sequences
        >>> from flash_dmattn.distributed import SequenceLayout, ShardedMask
        >>> documents = Sequences.packed(torch.tensor([0, 3, 8]))
        >>> mask = ShardedMask.from_sequences(documents, SequenceLayout.zigzag(8, 2), 1, is_causal=True)
        >>> mask.dense()[0, 0].int().tolist()
        [[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]]
        """
        documents = without_empty(read_documents(sequences, layout.length))
        return cls._of_documents(documents, sequences.device, layout, rank, is_causal, window_size)

    @classmethod
    def _of_documents(
        cls,
        documents: Documents,
        device: torch.device,
        layout: SequenceLayout,
        rank: int,
        is_causal: bool,
        window_size: tuple[int, int] | None,
    ) -> ShardedMask:
        """Make the mask of `from_sequences` from bounds on the host, on a device."""
        is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
        masks: list[PreparedMask | None] = []
        window = causal_window(is_causal, window_size)
        parts = plan(layout, rank, layout.length, window, Spans(documents, "masked"))
        for (a, _), part in zip(layout.runs(rank), parts, strict=True):
            if part.is_masked:
                first, last = (x.sub(a).to(device) for x in rows_seeing(documents, part.start, part.stop))
                masks.append(PreparedMask.from_intervals(first, last, part.seqlen_q, window_size=part.window))
            else:
                masks.append(None)
        return cls(layout, layout, rank, is_causal, window_size, 1, 1, tuple(masks), format_bounds(documents))

    @classmethod
    def from_lists(
        cls,
        index: Tensor,
        layout: SequenceLayout,
        rank: int,
        *,
        layout_k: SequenceLayout | None = None,
        block_size: int | tuple[int, int] = 1,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
    ) -> ShardedMask:
        """Prepare the lists of the rows of one rank, of keys of the whole sequence, without communication.

        The result is equal to the rank's rows of `PreparedMask.from_lists` of the whole index.

        Args:
            index: integers (Bm, Hm, R, K), or fewer dims, of the R lists of the rank's rows, as
                `layout.shard(index, -2, rank)` takes them out of a whole index of a list for each query. Keys, or
                blocks of keys, count from the first one of the sequence; -1 is for none.
            layout: of the queries. Its intervals begin and end at multiples of block_q.
            rank: the rank of the rows.
            layout_k: of the keys, `layout` by default.
            block_size: queries that share a list, and keys of a block, as one int or (block_q, block_k).
            is_causal, window_size: as in `attention`, of the whole sequence; calls must not repeat them. Slices of a
                window begin at multiples of 128 keys, which block_k has to divide.

        Raises:
            TypeError, ValueError: as for `PreparedMask.from_lists`, or the lists do not match the layout.

        >>> import torch
        >>> from flash_dmattn.distributed import SequenceLayout, ShardedMask
        >>> layout = SequenceLayout.zigzag(8, 2)
        >>> index = torch.tensor([[0, -1], [0, 1], [2, 0], [0, 3], [4, 0], [4, 7], [6, 1], [7, 3]])
        >>> mask = ShardedMask.from_lists(layout.shard(index, 0, 1), layout, 1, is_causal=True)
        >>> mask.dense()[0, 0].int().tolist()
        [[1, 0, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]]
        """
        keys, (block_q, block_k) = (layout if layout_k is None else layout_k).length, pair("block_size", block_size, 1)
        if not isinstance(index, Tensor) or index.dtype not in INTEGER_DTYPES:
            has = f"dtype {index.dtype}" if isinstance(index, Tensor) else f"type {type(index).__name__}"
            raise TypeError(f"index has {has}; it needs to be an integer torch.Tensor, -1 for no key")
        if not 2 <= index.dim() <= 4:
            raise ValueError(f"index has {index.dim()} dimensions, shape {tuple(index.shape)}; it needs 2, 3 or 4")
        index, last = collapse(index, dims=range(index.dim() - 2))[(None,) * (4 - index.dim())], -(-keys // block_k) - 1
        if values_can_be_read(index):
            check_entries(index, index.new_full((1, 1, 1, 1), last, dtype=torch.int64))

        def lists_of(part: Slice, rows: slice) -> PreparedMask:
            # The band hides these keys from all queries of the slice.
            first, blocks = part.start // block_k, index[:, :, rows].long()
            seen = (blocks >= first) & (blocks < -(-part.stop // block_k))
            return PreparedMask.from_lists(
                torch.where(seen, blocks - first, -1),
                seqlen_q=part.seqlen_q,
                seqlen_k=part.seqlen_k,
                block_size=(block_q, block_k),
                window_size=part.window,
            )

        sizes = (*index.shape[:2], index.shape[2], block_q, block_k)
        return cls._of_lists(lists_of, "index", sizes, layout, rank, layout_k, is_causal, window_size)

    @classmethod
    def from_topk_lists(
        cls,
        scores: Tensor | IndexScores,
        k: int,
        layout: SequenceLayout,
        rank: int,
        *,
        layout_k: SequenceLayout | None = None,
        block_size: int | tuple[int, int] = 1,
        is_causal: bool = False,
        local: int = 0,
    ) -> ShardedMask:
        """List the `k` visible keys, or blocks, of highest score for each row of a rank, without communication.

        The result is equal to the rank's rows of `PreparedMask.from_topk_lists` of the whole scores. Lists have the
        same number of entries, so values for a `ListBias` are rows of the whole values.

        Args:
            scores: float (B, H, R, N), or fewer dims: the scores of the rank's R lists for all N keys or blocks. Or
                `IndexScores` whose q and weights have the rank's rows, and k the keys of all ranks.
            k, block_size, is_causal, local: as for `PreparedMask.from_topk_lists`.
            layout, rank, layout_k: as for `from_lists`.

        Raises:
            TypeError, ValueError: as for `PreparedMask.from_topk_lists`, or the lists do not match the layout.

        >>> import torch
        >>> from flash_dmattn import masks
        >>> from flash_dmattn.distributed import SequenceLayout, ShardedMask
        >>> layout, scores = SequenceLayout.zigzag(8, 2), torch.rand(1, 1, 8, 8)
        >>> mask = ShardedMask.from_topk_lists(layout.shard(scores, 2, 1), 3, layout, 1, is_causal=True)
        >>> whole = masks.PreparedMask.from_topk_lists(scores, 3, is_causal=True)
        >>> torch.equal(mask.lists.index, layout.shard(whole.index, 2, 1))
        True
        """
        keys = (layout if layout_k is None else layout_k).length
        block_q, block_k = pair("block_size", block_size, 1)
        if isinstance(scores, IndexScores):
            if len(scores.batch_dims) != 1:
                raise ValueError(
                    f"scores.q has batch dims {scores.batch_dims}; over ranks it needs one, (batch, rows, heads, dim)"
                )
            batch, heads, number, columns = scores.q.shape[0], 1, scores.q.shape[1], scores.k.shape[1]
        else:
            check_floats("scores", scores)
            if not 2 <= scores.dim() <= 4:
                raise ValueError(f"scores has {scores.dim()} dimensions, shape {tuple(scores.shape)}; it needs 2 to 4")
            batch, heads, number, columns = as_scores(scores).shape
        if columns != -(-keys // block_k):
            raise ValueError(
                f"scores have {columns} columns; they need {-(-keys // block_k)}, a block of {block_k} of all {keys} "
                "keys each"
            )

        def lists_of(part: Slice, rows: slice) -> PreparedMask:
            blocks = -(-part.stop // block_k)
            if isinstance(scores, IndexScores):
                q, weights = scores.q[:, rows], scores.weights[:, rows]
                part_scores: Any = replace(scores, q=q, k=scores.k[:, :blocks], weights=weights)
            else:
                part_scores = scores[..., rows, :blocks]
            made: Any = PreparedMask.from_topk_lists(
                part_scores,
                k,
                seqlen_q=part.seqlen_q,
                seqlen_k=part.stop,
                block_size=(block_q, block_k),
                is_causal=is_causal,
                local=local,
            )
            more = min(k + local, -(-keys // block_k)) - made.keys.shape[3]
            return replace(made, keys=F.pad(made.keys, (0, more), value=-1)) if more else made

        sizes = (batch, heads, number, block_q, block_k)
        return cls._of_lists(lists_of, "scores", sizes, layout, rank, layout_k, is_causal, None)

    @classmethod
    def _of_lists(
        cls,
        lists_of: Callable[[Slice, slice], PreparedMask],
        name: str,
        sizes: tuple[int, int, int, int, int],
        layout: SequenceLayout,
        rank: int,
        layout_k: SequenceLayout | None,
        is_causal: bool,
        window_size: tuple[int, int] | None,
    ) -> ShardedMask:
        """Make the mask from the result of a function for each slice and its lists.

        Sizes are checked for all ranks, so that all of them raise if one cannot support them.

        Args:
            lists_of: returns the lists of a slice and of its rows.
            name: the name of the argument with the lists, for messages.
            sizes: its batch, heads and lists, the queries that share a list, and the keys of a block.
        """
        batch, heads, number, block_q, block_k = sizes
        layout_k = layout if layout_k is None else layout_k
        if number != -(-layout.local_length // block_q):
            raise ValueError(
                f"{name} has {number} lists; it needs {-(-layout.local_length // block_q)}, of the "
                f"{layout.local_length} rows of a rank"
            )
        is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
        window = causal_window(is_causal, window_size)
        for one, runs in enumerate(layout.intervals):
            for a, b in runs:
                if a % block_q or (b % block_q and b != layout.length):
                    raise ValueError(
                        f"rows {a} to {b} are of rank {one}, and {block_q} queries share a list; layout needs "
                        "intervals of multiples of it"
                    )
            for part in plan(layout, one, layout_k.length, window):
                if part.start % block_k:
                    raise ValueError(
                        f"a slice of the window begins at key {part.start} on rank {one}; block_size needs blocks of "
                        f"keys that divide it, not {block_k}"
                    )
        parts = plan(layout, rank, layout_k.length, window)
        masks = tuple(lists_of(part, part.rows_of(block_q)) for part in parts)
        return cls(layout, layout_k, rank, is_causal, window_size, batch, heads, masks)

    @property
    def documents(self) -> Documents:
        """The bounds of each document, (begin, end, begin, end, ...); () without packed sequences."""
        return parse_bounds(self.bounds)

    @property
    def spans(self) -> Spans:
        """The documents for a plan."""
        return Spans(self.documents, "masked") if self.bounds else NO_SPANS

    @property
    def form(self) -> MaskForm:
        """The form of its masks: see `PreparedMask`."""
        return next((mask.form for mask in self.masks if mask is not None), "intervals")

    @property
    def lists(self) -> PreparedMask:
        """Return the lists of all rows of the rank as one mask over all keys.

        It is for `IndexScores.at` and `ListBias.dense`, and has no band.

        Raises:
            TypeError: it has no lists.
        """
        lists = [require_lists(mask) for mask in self.masks]
        parts = self._parts
        block_size, rows, keys = lists[0].block_size, self.layout.local_length, self.layout_k.length
        firsts = [part.start // block_size[1] for part in parts]
        named = [torch.where(x.keys < 0, -1, x.keys + first) for first, x in zip(firsts, lists, strict=True)]
        tensors = [torch.cat(x, 2) for x in (named, [x.count for x in lists], [x.slots for x in lists])]
        return PreparedMask._made("lists", tensors, seqlen_q=rows, seqlen_k=keys, block_size=block_size)

    @property
    def device(self) -> torch.device:
        """The device of its tensors; the CPU if it has none."""
        return next((mask.device for mask in self.masks if mask is not None), torch.device("cpu"))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ShardedMask:
        """Return the same mask on a device, as `torch.Tensor.to` does."""
        masks = [None if mask is None else mask.to(device, non_blocking=non_blocking) for mask in self.masks]
        return replace(self, masks=tuple(masks))

    def dense(self) -> Tensor:
        """Return the bool mask of the rank's rows over all keys, band included: (Bm, Hm, Lq / W, Lk)."""
        shape = (self.batch, self.heads, self.layout.local_length, self.layout_k.length)
        dense = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for part, mask in zip(self._parts, self.masks, strict=True):
            every = dense.new_ones(1, 1, part.seqlen_q, part.seqlen_k)
            prepared = PreparedMask.from_mask(every, window_size=part.window) if mask is None else mask
            dense[:, :, part.rows, part.keys] = prepared.dense()
        return dense

    @property
    def _parts(self) -> tuple[Slice, ...]:
        window = causal_window(self.is_causal, self.window_size)
        return plan(self.layout, self.rank, self.layout_k.length, window, self.spans)

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`: the class itself, which `torch.load` may call.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        # Not the values: printing them waits for the device.
        return (
            f"ShardedMask(form={self.form!r}, rank={self.rank} of {self.layout.world_size}, "
            f"shape={(self.batch, self.heads)} x {self.layout.local_length} of {self.layout.length} rows x "
            f"{self.layout_k.length} keys, "
            f"is_causal={self.is_causal}, window_size={self.window_size}, device={str(self.device)!r})"
        )


torch.serialization.add_safe_globals([SequenceLayout, ShardedMask])
