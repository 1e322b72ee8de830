"""A context-parallel call before anything is sent: its arguments checked, its strategy and its backends chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..backends.protocol import Backend, Direction
from ..biases import ByDistance, ListBias, check_covered, is_made, require_dense_bias, require_lists, split
from ..caches import ClockCache
from ..dispatch.config import BackendChoice, Decision, blocks, disabled, invariant
from ..dispatch.registry import BACKENDS, on_change, works
from ..dispatch.selection import Selection, choice_in_force, choose, falls_back, report_fallback, select_pair
from ..masks import PreparedMask
from ..masks.arguments import integer
from ..problem import (
    AttentionProblem,
    NeedsGrad,
    RawFlags,
    as_scores,
    check_flag,
    check_floats,
    dtype_name,
    unpacked_spec,
)
from ..reference.dropout import BLOCK
from ..sequences import Sequences
from ..validation import PreparedCall, describe, follow_autocast
from .documents import (
    NO_SPANS,
    Documents,
    Spans,
    bounds_text,
    cached_for,
    check_kind,
    read_documents,
    read_lengths,
    sequences_on,
    without_empty,
)
from .exchange import CLEAR_SHARE, HeadTrade, Route, length_of, runs_read, share_moved, sum_dtype, sum_gradient
from .group import Members, Shared, check_layout, size_and_rank
from .layout import SequenceLayout
from .slices import HeadGroup, ShardedMask, Slice, plan, slice_problem

Strategy = Literal["auto", "gather", "ulysses"]


# The arguments of a call that have to be the same on every rank.
_SAME = ("is_causal", "window_size", "softmax_scale", "softcap", "deterministic", "return_lse")


class ParallelCall(NamedTuple):
    """The checked call of one rank.

    Attributes:
        problem: the rank's rows over all keys, as one ordinary call; the strides of k and v are meaningless.
        request: the arguments, with q, k and v in the dtype of autocast.
        members, layout, layout_k: of the group that gathers keys or, for "ulysses" over one group, trades heads.
        mask: None, 4-D bool, or a `ShardedMask`.
        bias: None, (b, h, i, j), or the values of a bias by distance, (b, h, 1 or Lq / W, n), or for entries of lists.
        sink: None or (Hq,). Over a mesh of two dims all three have this rank's heads.
        why: the reason for the strategy, as text.
        head_groups: the number of groups of key-value heads for "gather".
        sends_parts: whether ranks of "gather" send only the keys that each rank needs; else every rank gets all keys.
        trade: how heads are traded for positions, with "ulysses" and over the inner dim of a mesh of two dims; else
            None.
        spans: packed documents or padded entries.
    """

    problem: AttentionProblem
    request: Request
    members: Members
    layout: SequenceLayout
    layout_k: SequenceLayout
    mask: Tensor | ShardedMask | None
    bias: Tensor | None
    sink: Tensor | None
    strategy: str
    why: str
    head_groups: int
    sends_parts: bool
    trade: HeadTrade | None
    spans: Spans

    @property
    def mask_needs_keys(self) -> bool:
        return is_sharded_by_keys(self.mask, self.layout_k)

    @property
    def bias_needs_keys(self) -> bool:
        return self.problem.bias is not None and is_sharded_by_keys(self.bias, self.layout_k)

    @property
    def shares_bias(self) -> bool:
        """Whether one row of the bias, or of values of distances, is for all queries; a bias of lists has rows."""
        return self.bias is not None and self.bias.shape[2] == 1 and self.problem.list_bias is None

    @property
    def sums_bias(self) -> bool:
        """Whether several calls have a value of the bias, so that its gradient is summed in fp32."""
        return self.shares_bias or shares_entries(self.bias, self.problem, self.spans)

    @property
    def all_sequences(self) -> Sequences | None:
        """The sequences of a call that has all positions of some heads; None where it has none, or a mask."""
        sequences = self.request.sequences
        if sequences is None or self.strategy != "ulysses":
            return None
        longest = max((seqlen_q for seqlen_q, _ in self.spans.lengths), default=0)
        return sequences_on(sequences, self.request.q.device, longest)

    @property
    def route(self) -> Route:
        """Which keys are sent between which ranks."""
        over = (self.members.name, self.members.rank, self.layout.flat, self.layout_k.flat, *self.spans)
        return Route(*over, *self.problem.window, self.sends_parts, self.request.number)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The calls that this rank makes: one for each run of its rows, or one for all rows of its heads."""
        if self.strategy == "ulysses":
            return (Slice(0, self.layout.length, 0, self.layout_k.length, self.problem.window),)
        return self.slices_of(self.members.rank)

    def slices_of(self, rank: int) -> tuple[Slice, ...]:
        """The calls that a rank of "gather" makes."""
        return plan(self.layout, rank, self.layout_k.length, self.problem.window, self.spans)

    def keys_held(self, rank: int) -> int:
        if not self.sends_parts:
            return self.layout_k.length
        return length_of(runs_read(self.layout, rank, self.layout_k.length, self.problem.window, self.spans))

    def problems(self) -> list[AttentionProblem]:
        """Return the different problems among the calls of all ranks. One choice of backends has to serve them all."""
        p = self.problem
        if self.trade is not None and self.strategy == "ulysses":  # all positions of the heads of a rank
            one = slice_problem(p, self.slices[0], self.trade.heads, self.layout_k.length)
            strides = unpacked_spec((p.batch, one.seqlen_q, one.num_heads, p.head_dim)).strides
            one = one._replace(q_strides=strides, is_causal=p.is_causal, window_size=p.window_size)
            return [one if self.all_sequences is None else self._with_sequences(one, self.all_sequences)]
        # Dynamo of torch 2.11 sorts only by numbers, not by tuples.
        has_distances = p.relative is not None
        held_by = [self.keys_held(rank) for rank in range(self.members.size)]  # a plan of all parts of the rank each
        parts = dict.fromkeys(
            (part.without_place(has_distances, p.dropout_p), held)
            for rank, held in enumerate(held_by)
            for part in self.slices_of(rank)
        ) or {(Slice(0, 0, 0, 0, (-1, -1)), 0): None}  # no rank makes a call where no sequence has a query
        ordered = sorted(sorted(parts, key=lambda each: each[0].stop), key=lambda each: each[0].row_stop)
        heads = HeadGroup(0, self.head_groups)  # the other groups have equal problems
        return [slice_problem(p, part, heads, held) for part, held in ordered]

    def _with_sequences(self, problem: AttentionProblem, sequences: Sequences) -> AttentionProblem:
        """Describe the call with all positions of some heads, which has the sequences themselves."""
        spec = sequences.describe_rows(self.layout.length, self.layout_k.length)
        has_keys = problem.bias is not None and problem.bias.shape[3] > 1
        flags = problem.flags._replace(sequences=spec, bias_packing="keys" if spec.packs_keys and has_keys else "none")
        return problem._replace(
            batch=spec.number,
            seqlen_q=spec.max_seqlen_q,
            seqlen_k=spec.max_seqlen_k,
            flags=flags,
            arrival="tokens" if spec.packs_queries else "rows",
        )

    def shared(self, pair: Selection) -> Shared:
        """Return names and values, as text, of everything that has to be the same on every rank."""
        p, mask, bias, added = self.problem, self.mask, self.bias, self.request.added
        needed = [name for name, needed in zip(NeedsGrad._fields, p.needs_grad, strict=True) if needed]
        values = {
            "device": p.device,
            "dropout_p": p.dropout_p,
            "q": f"{dtype_name(p.dtype)} {(p.batch, p.seqlen_q, p.num_heads, p.head_dim)}",
            "k": (p.batch, self.layout_k.local_length, p.num_heads_k, p.head_dim),
            "v": (p.batch, self.layout_k.local_length, p.num_heads_k, p.head_dim_v),
            "mask": None if mask is None else tuple(mask.shape) if isinstance(mask, Tensor) else "prepared",
            "lists": (p.flags.block_q, p.flags.block_k, p.flags.list_size) if p.mask_form == "lists" else None,
            "values of lists": p.flags.is_list_bias,
            "bias.bias": None if added is None else f"{dtype_name(added.dtype)} {tuple(added.shape)}",
            "gradient of bias.bias": added is not None and added.requires_grad and torch.is_grad_enabled(),
            "bias": None if bias is None else f"{dtype_name(bias.dtype)} {tuple(bias.shape)}",
            "bias.zero, bias.outside": (p.flags.zero, p.flags.outside) if p.relative is not None else None,
            "sink": None if p.sink is None else dtype_name(p.sink),
            **{name: getattr(self, name) for name in ("layout", "layout_k", "strategy", "head_groups")},
            "sequences": None if self.request.sequences is None else self.request.sequences.layout,
            "documents": bounds_text(() if self.spans.kind == "padded" else self.spans.bounds),
            "lengths": bounds_text(self.spans.bounds if self.spans.kind == "padded" else ()),
            "keys sent": "those that are read" if self.sends_parts else "all",
            **{name: getattr(p, name) for name in _SAME},
            "requires_grad": ", ".join(needed) or "nothing",
            "reduce_bias_grad": self.request.reduce_bias_grad,
            "exchange_dtype": self.request.exchange_dtype,
            "backends": tuple([None if one is None else one.name for one in pair]),
        }
        return tuple((name, str(value)) for name, value in values.items())


class Request(NamedTuple):
    """The unchecked arguments of a call on one rank; `groups` has one, or the inner and the outer one.

    `number` counts the calls over the groups; it is 0 in a compiled graph. After the check of a bias that is no tensor,
    `bias` is its values, and `by_distance` or `is_list_bias` tells its kind; `added` is the `bias` of a `ListBias`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | ShardedMask | None
    bias: Any
    sink: Tensor | None
    groups: tuple[Members, ...]
    layout: SequenceLayout
    layout_k: SequenceLayout | None
    strategy: str
    head_groups: int | None
    reduce_bias_grad: bool
    exchange_dtype: torch.dtype | None
    raw_flags: RawFlags
    sequences: Sequences | None
    number: int
    by_distance: ByDistance | None = None
    is_list_bias: bool = False
    added: Tensor | None = None

    @property
    def sums_added(self) -> bool:
        """Whether the gradient of the bias that is added to values of lists is summed over ranks."""
        added = self.added
        return added is not None and added.requires_grad and self.reduce_bias_grad and added.shape[-2:-1] == (1,)

    def describe(self) -> ParallelCall:
        """Check the arguments, and make the call of the group that gathers keys, without sending or computing."""
        check_layout(self.layout, size_and_rank(self.groups)[0])
        q, k, v = follow_autocast(*(self[:3] if self.sequences is None else self._rows_of_sequences(self.sequences)))
        if invariant():
            raise ValueError("config(invariant=True) is in force; context_parallel_attention does not have the mode")
        check_flag("reduce_bias_grad", self.reduce_bias_grad)
        if isinstance(q, Tensor) and q.is_nested:
            raise ValueError(
                "q is a nested tensor; context parallelism shares one sequence: pad it, or mask its documents"
            )
        if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
            describe(PreparedCall(q, k, v, None, None, None, self.raw_flags))  # it raises the error
        if is_made(self.bias):
            require_dense_bias(self.bias, "of ranks that share a sequence")
        is_list_bias = isinstance(self.bias, ListBias)
        added = self.bias.bias if is_list_bias else None
        if added is not None:
            check_floats("bias.bias", added)
        bias, by_distance = (self._list_values(added), None) if is_list_bias else split(self.bias)
        if by_distance is not None and by_distance.has_rows and q.shape[1] == 1 < self.layout.world_size:
            raise ValueError("bias is a Band, and each rank has 1 row; it needs 2 rows of each rank or more")
        request = self._replace(q=q, k=k, v=v, bias=bias, by_distance=by_distance)
        request = request._replace(is_list_bias=is_list_bias, added=added)
        call = request._over_mesh() if len(self.groups) == 2 else request._over_group(request)
        dtype = call.problem.dtype
        if self.exchange_dtype not in (None, dtype, sum_dtype(dtype)):
            raise ValueError(
                f"exchange_dtype is {self.exchange_dtype}; it needs to be None, {dtype} or {sum_dtype(dtype)}"
            )
        return call

    def _rows_of_sequences(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, of packed sequences with a batch of 1; refuse arguments that sequences do not support."""
        check_kind(sequences)
        mask, bias, is_packed = self.mask, self.bias, sequences.layout == "packed"
        wanted = "tokens of this rank" if is_packed else "sequences, rows of this rank"
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            if not isinstance(x, Tensor) or x.dim() != 4 - is_packed:
                has = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
                raise ValueError(f"{name} has {has}; with sequences it needs ({wanted}, heads, head_dim)")
        if isinstance(bias, ListBias):
            raise ValueError(
                "bias is a ListBias with sequences; its lists are a mask, and sequences over ranks go with no other: "
                "pass lists that name keys of the sequence of each query, without sequences"
            )
        if mask is not None and (is_packed or not isinstance(mask, Tensor)):
            needs = "None" if is_packed else "None or a bool tensor, because a prepared mask is of the whole batch"
            why = ", which are a mask" if is_packed else ""
            raise ValueError(f"mask is a {type(mask).__name__} with sequences{why}; it needs to be {needs}")
        if not is_packed:
            return self.q, self.k, self.v
        if self.layout_k not in (None, self.layout):
            raise ValueError("layout_k is not layout; with sequences keys need to be where the queries are")
        is_by_position = isinstance(bias, Tensor) and (bias.dim() != 3 or (bias.shape[1] > 1 and bias.shape[2] > 1))
        if is_by_position:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}; with sequences over ranks it needs (heads, 1, keys) or "
                "(heads, tokens of this rank, 1), or to be a bias by distance"
            )
        q, k, v = (x.unsqueeze(0) for x in self[:3])
        return q, k, v

    def _list_values(self, added: Tensor | None) -> Tensor:
        """Return the values of a `ListBias` plus its ordinary bias; refuse a mask without lists."""
        mask, bias = self.mask, self.bias
        if not isinstance(mask, ShardedMask):
            has = "None" if mask is None else f"a {type(mask).__name__}"
            raise TypeError(
                f"mask is {has} and bias is a ListBias; mask needs to be of "
                "flash_dmattn.distributed.ShardedMask.from_lists or from_topk_lists"
            )
        if added is not None and self._replace(added=added).sums_added:
            added = added.to(sum_dtype(added.dtype))
            for members in self.groups:
                added = sum_gradient(added, members, self.number)
            bias = bias._replace(bias=added)
        if added is None and mask.form == "lists":
            values: Tensor = bias.values  # `describe` checks them
            return values
        return ListBias(*bias).with_bias(mask.lists)

    def _over_mesh(self) -> ParallelCall:
        """Make the call over the outer group: q, k and v without memory, and this rank's heads of other tensors."""
        if self.strategy != "auto":
            raise ValueError(
                f"strategy is {self.strategy!r}; over a mesh of two dims it needs to be 'auto', which is both"
            )
        inner, outer = self.groups
        joined, within = self.layout.joined(inner.size)
        q, k, v, mask, bias, sink = self[:6]
        joined_k, within_k = self._check_layouts(self.layout.world_size).joined(inner.size)
        size, heads = inner.size, q.shape[2]
        check_heads(heads, k.shape[2], size)
        trade = HeadTrade(inner, within[outer.rank], within_k[outer.rank], k.shape[2], self.number)

        def traded(x: Tensor) -> Tensor:
            return _without_memory(x, x.shape[0], x.shape[1] * size, max(1, x.shape[2] // size), x.shape[3])

        def summed(x: Tensor, is_shared: bool) -> Tensor:
            if not (is_shared and self.reduce_bias_grad and x.requires_grad):
                return x
            return sum_gradient(x.to(sum_dtype(x.dtype)), inner, self.number)

        def own_heads(name: str, x: Tensor) -> Tensor:
            if x.shape[1] not in (1, k.shape[2], heads):
                raise ValueError(f"{name} has {x.shape[1]} heads; it needs 1, {k.shape[2]} or {heads}")
            return trade.heads.cut(x)

        if isinstance(mask, ShardedMask) and mask.heads > 1:
            raise ValueError(f"mask was prepared with {mask.heads} heads; over a mesh of two dims it needs to have one")
        if isinstance(mask, Tensor) and mask.dim() in (2, 3, 4):
            mask = own_heads("mask", as_scores(mask))
        if isinstance(bias, Tensor) and bias.dim() in (2, 3, 4):
            is_shared = as_scores(bias).shape[2] == 1 and not self.is_list_bias
            bias = own_heads("bias", summed(as_scores(bias), is_shared))
        if isinstance(sink, Tensor) and sink.shape == (heads,):
            sink = summed(sink, True)[trade.heads.of(heads)]
        request = self._replace(groups=(outer,), layout=joined, layout_k=joined_k, strategy="gather")
        request = request._replace(q=traded(q), k=traded(k), v=traded(v), mask=mask, bias=bias, sink=sink)
        return request._over_group(self)._replace(trade=trade)

    def _over_group(self, passed: Request) -> ParallelCall:
        """Make the call over one group; q, k and v of `passed` show whether gradients are needed."""
        q, k, v, mask, bias, sink = self[:6]
        (members,) = self.groups
        layout, layout_k = self.layout, self._check_layouts(members.size)
        raw_flags, by_distance = self.raw_flags, self.by_distance
        every_mask = _with_all_keys(mask, layout_k)
        has_values = by_distance is not None or self.is_list_bias
        every_bias = bias if has_values else _with_all_keys(bias, layout_k)
        if isinstance(mask, ShardedMask):
            raw_flags = _check_sharded(mask, raw_flags, members, layout, layout_k)
        if isinstance(mask, ShardedMask) and mask.form == "lists":
            every_mask = _one_of_lists(mask)
        elif isinstance(mask, ShardedMask):
            # If each row has keys of one document only, the mask has no tensor on any device.
            device = q.device if all(one is None for one in mask.masks) else mask.device
            no_mask = torch.empty(0, dtype=torch.bool, device=device)
            every_mask = _without_memory(no_mask, mask.batch, mask.heads, layout.local_length, layout_k.length)
        elif isinstance(mask, PreparedMask):
            raise TypeError(
                "mask is a PreparedMask, of whole rows; context parallelism needs a ShardedMask of "
                "flash_dmattn.distributed, by from_mask or from_lists, or a bool tensor of this rank's rows"
            )
        every_k, every_v = (_without_memory(x, x.shape[0], layout_k.length, *x.shape[2:]) for x in (k, v))
        # The distances that need a value depend on all rows, which are checked below.
        numbers = None if by_distance is None else by_distance._replace(outside="zero")
        call = PreparedCall(q, every_k, every_v, every_mask, every_bias, sink, raw_flags)
        problem, _, _ = describe(call._replace(by_distance=numbers, is_list_bias=self.is_list_bias))
        spans = self._read_spans(problem, layout.length, layout_k.length)
        if by_distance is not None and bias is not None:
            outside, lengths = by_distance.outside, {(layout.length, layout_k.length)}
            if outside == "error" and spans.kind:
                # A slice of several documents has hidden pairs farther apart, which must not index outside of the
                # values. Nor does a call with all positions need values for more than its sequences.
                lengths, outside = spans.lengths, "clamp"
            if by_distance.outside == "error":
                for seqlen_q, seqlen_k in lengths:
                    check_covered(bias.shape[-1], by_distance.zero, seqlen_q, seqlen_k, problem.window)
            problem = problem._replace(flags=problem.flags._replace(outside=outside))
        if torch.is_grad_enabled():
            needs = (x is not None and x.requires_grad for x in (*passed[:3], bias, sink))
            problem = problem._replace(needs_grad=NeedsGrad(*needs))
        if problem.dropout_p > 0 and isinstance(mask, ShardedMask):
            _check_rows_of_dropout(problem.dropout_p, mask)
        mask = as_scores(mask) if isinstance(mask, Tensor) else mask
        bias = None if bias is None else as_scores(bias)
        share = share_moved(layout, layout_k, problem.window, spans)
        share = share if share <= CLEAR_SHARE else 1.0
        has_rows = isinstance(mask, ShardedMask) or any(isinstance(x, Tensor) and x.shape[2] > 1 for x in (mask, bias))
        heads = problem.num_heads, problem.num_heads_k
        strategy, why = choose_strategy(self.strategy, *heads, members.size, has_rows, share)
        if self.sequences is not None and spans.kind == "masked" and strategy == "gather":
            mask = _document_mask(self.sequences, spans.bounds, q.device, layout, members.rank, problem)
        problem = _as_read(problem, mask, bias, layout_k, spans)
        return ParallelCall(
            problem,
            passed,
            members,
            layout,
            layout_k,
            mask,
            bias,
            sink,
            strategy,
            why,
            _check_head_groups(self.head_groups, problem, bias),
            strategy == "gather" and share < 1,
            HeadTrade(members, layout, layout_k, problem.num_heads_k, self.number) if strategy == "ulysses" else None,
            spans,
        )

    def _read_spans(self, problem: AttentionProblem, seqlen_q: int, seqlen_k: int) -> Spans:
        """Return the sequences of the call, of whole lengths, or of its mask."""
        if self.sequences is None:
            return self.mask.spans if isinstance(self.mask, ShardedMask) else NO_SPANS
        if self.sequences.layout == "padded":
            return Spans(read_lengths(self.sequences, problem.batch, seqlen_q, seqlen_k), "padded")
        documents = read_documents(self.sequences, seqlen_q)
        return Spans(documents, "packed") if problem.dropout_p > 0 else Spans(without_empty(documents), "masked")

    def _check_layouts(self, size: int) -> SequenceLayout:
        """Return the layout of the keys."""
        q, k, v, layout, layout_k = self.q, self.k, self.v, self.layout, self.layout_k
        if layout_k is None:
            if k.shape[1] != q.shape[1]:
                raise ValueError(
                    f"k has {k.shape[1]} rows and q has {q.shape[1]}; layout_k needs to be the layout of the keys, not "
                    "None"
                )
            layout_k = layout
        check_layout(layout_k, size, "layout_k")
        for name, x, sharding in (("q", q, layout), ("k", k, layout_k), ("v", v, layout_k)):
            if x.shape[1] != sharding.local_length:
                raise ValueError(
                    f"{name} has {x.shape[1]} rows; it needs the {sharding.local_length} that each of {size} ranks has "
                    f"of {sharding.length}: layout.shard({name}, 1, rank) takes them"
                )
        return layout_k


def _check_rows_of_dropout(dropout_p: float, mask: ShardedMask) -> None:
    """Refuse dropout with a prepared mask that has no whole blocks of dropout."""
    if mask.spans.kind:
        raise ValueError(
            f"dropout_p is {dropout_p} with a ShardedMask of documents; it needs to be 0.0: dropout counts rows and "
            "keys within each document, and a prepared mask has rows of several: pass sequences="
        )
    for start, _ in chain.from_iterable(mask.layout.intervals):
        if start % BLOCK:
            raise ValueError(
                f"layout has an interval from {start} on, and dropout_p is {dropout_p}; with a ShardedMask it needs to "
                f"begin at a multiple of {BLOCK}: dropout is drawn for whole blocks of rows, and a prepared mask has "
                "no rows before its own (pass a bool tensor as the mask)"
            )


def _without_memory(like: Tensor, *shape: int) -> Tensor:
    """Return a placeholder for a tensor of 4 dims, with memory for one value."""
    return like.detach().new_empty((1, 1, 1, 1)).expand(shape)


def _document_mask(
    sequences: Sequences,
    documents: Documents,
    device: torch.device,
    layout: SequenceLayout,
    rank: int,
    problem: AttentionProblem,
) -> ShardedMask:
    """Make the mask of documents from the bounds of the sequences, on the device of q, once for all layers."""
    arguments = (device, layout, rank, problem.is_causal, problem.window_size)
    return cached_for(sequences, arguments, lambda: ShardedMask._of_documents(documents, *arguments))


def _one_of_lists(mask: ShardedMask) -> PreparedMask:
    """Return a placeholder for the lists of all rows of a rank: their sizes and the band of the call."""
    lists = [require_lists(part) for part in mask.masks]
    number, first = sum(x.keys.shape[2] for x in lists), lists[0]
    keys = _without_memory(first.keys, *first.keys.shape[:2], number, first.keys.shape[3])
    rows, every_key = mask.layout.local_length, mask.layout_k.length
    band: dict[str, Any] = {"is_causal": mask.is_causal, "window_size": mask.window_size}
    return replace(first, seqlen_q=rows, seqlen_k=every_key, keys=keys, **band)


def is_sharded_by_keys(x: Any, layout_k: SequenceLayout) -> bool:
    """Return whether a mask or a bias has one row for all queries, and only the keys of this rank."""
    if not isinstance(x, Tensor) or not 2 <= x.dim() <= 4:
        return False
    rows, keys = as_scores(x).shape[2:]
    return rows == 1 and keys == layout_k.local_length and 1 < keys < layout_k.length


def _with_all_keys(x: Any, layout_k: SequenceLayout) -> Any:
    """Return a mask or a bias with all keys; one that is sharded by keys becomes a tensor without memory."""
    if is_sharded_by_keys(x, layout_k):
        return _without_memory(x, *as_scores(x).shape[:3], layout_k.length)
    return x


def _check_sharded(
    mask: ShardedMask, raw_flags: RawFlags, members: Members, layout: SequenceLayout, layout_k: SequenceLayout
) -> RawFlags:
    """Return the flags with the band of the mask, after checking that the mask was made for this rank and call."""
    if (mask.layout, mask.layout_k) != (layout, layout_k):
        raise ValueError(f"mask was prepared for other layouts, {mask}; it needs those of the call")
    if mask.rank != members.rank:
        raise ValueError(f"mask was prepared for rank {mask.rank}; this is rank {members.rank}")
    is_causal, window_size = check_flag("is_causal", raw_flags.is_causal), raw_flags.window_size
    if is_causal not in (False, mask.is_causal) or window_size not in (None, mask.window_size):
        raise ValueError(
            f"is_causal is {is_causal} and window_size is {window_size}, but mask was prepared with "
            f"is_causal={mask.is_causal}, window_size={mask.window_size}; a prepared mask brings its own limits"
        )
    return raw_flags._replace(is_causal=mask.is_causal, window_size=mask.window_size)


def shares_entries(bias: Tensor | None, problem: AttentionProblem, spans: Spans) -> bool:
    """Return whether entries of the batch that make calls of their own share one entry of the bias."""
    return bias is not None and bias.shape[0] == 1 < problem.batch and spans.kind == "padded"


def _as_read(
    problem: AttentionProblem,
    mask: Tensor | ShardedMask | None,
    bias: Tensor | None,
    layout_k: SequenceLayout,
    spans: Spans,
) -> AttentionProblem:
    """Describe mask and bias of the slices: prepared, gathered, or in the dtype of the sum of its gradients."""
    if isinstance(mask, ShardedMask):
        form = mask.form
        rows = 1 if form == "keys" else problem.seqlen_q
        prepared = unpacked_spec((mask.batch, mask.heads, rows, problem.seqlen_k))
        problem = problem._replace(mask=prepared, mask_form=form)
    elif is_sharded_by_keys(mask, layout_k) and problem.mask is not None:
        problem = problem._replace(mask=unpacked_spec(problem.mask.shape)._replace(dtype=torch.bool))
    if bias is None or problem.list_bias is not None:
        return problem
    if bias.shape[2] > 1 and not shares_entries(bias, problem, spans):
        return problem
    dtype = sum_dtype(bias.dtype) if problem.needs_grad.bias else bias.dtype
    if problem.relative is not None:
        return problem._replace(relative=problem.relative._replace(dtype=dtype))
    if problem.bias is None:
        return problem
    spec = unpacked_spec(problem.bias.shape) if is_sharded_by_keys(bias, layout_k) else problem.bias
    return problem._replace(bias=spec._replace(dtype=dtype))


def _check_head_groups(number: int | None, problem: AttentionProblem, bias: Tensor | None) -> int:
    if number is None:
        return 1  # the fastest from 16384 to 65536 tokens (docs/scale.md)
    if problem.num_heads_k % integer("head_groups", number, 1):
        raise ValueError(f"head_groups is {number}; it needs to divide the {problem.num_heads_k} key-value heads")
    has_rows = bias is not None and (bias.shape[2] > 1 or problem.list_bias is not None)
    if number > 1 and bias is not None and bias.shape[1] == 1 and has_rows and problem.needs_grad.bias:
        raise ValueError(
            f"head_groups is {number}, and bias of shape {tuple(bias.shape)} has one gradient for all heads, "
            "which one call has to sum; it needs to be 1"
        )
    return number


_pairs: ClockCache[Selection] = ClockCache(256)
on_change.append(_pairs.clear)


def choose_backends(call: ParallelCall, backend: BackendChoice) -> Selection:
    """Choose the backends that serve each call of every rank, and report it; backward is None without gradients."""
    requested = choice_in_force(backend)
    pair = find_backends(call, requested)
    if call.strategy == "ulysses" or torch.compiler.is_compiling():
        return pair  # `attention`, which each rank of "ulysses" calls, reports it
    if falls_back(call.problem, requested, pair):
        report_fallback(call.problem)
    records = blocks.now.records
    if records is not None:
        backward = None if pair.backward is None else pair.backward.name
        records.append(Decision(call.problem, requested, pair.forward.name, backward))
    return pair


def find_backends(call: ParallelCall, requested: BackendChoice) -> Selection:
    """Make the choice, without a warning or a record."""
    if call.strategy == "ulysses":
        return choose(call.problems()[0], requested)
    if torch.compiler.is_compiling():  # sizes may be symbols there, which cannot be in a key
        return _choose_pair(call.problems(), requested)
    shape = (call.problem, call.layout, call.spans, call.head_groups, call.sends_parts)
    key = (*shape, requested, disabled(), BACKENDS.version)
    return _pairs.get_or_make(key, lambda: _choose_pair(call.problems(), requested))


def _choose_pair(problems: list[AttentionProblem], requested: BackendChoice) -> Selection:
    for name in (requested,) if isinstance(requested, str) else requested:  # "auto" has no name to check
        if name in BACKENDS and BACKENDS[name].is_differentiable:
            pairs = ", ".join(repr(n) for n, b in BACKENDS.items() if not b.is_differentiable)
            raise ValueError(
                f"backend is {requested!r}, and {name!r} is one differentiable function; context parallelism needs a "
                f"forward/backward pair: one of {pairs}"
            )
    selections = [select_pair(problem, requested) for problem in problems]
    # The best pair may differ between slices, but all of them use the same one.
    forward = _first_for_all([pair.forward.name for pair in selections], problems, "forward")
    backward = [pair.backward.name for pair in selections if pair.backward is not None]
    return Selection(forward, _first_for_all(backward, problems, "backward") if backward else None)


def _first_for_all(preferred: list[str], problems: list[AttentionProblem], direction: Direction) -> Backend:
    """Return the first backend that accepts one pass of all slices: first of the choices for slices, then of all."""
    if len(set(preferred)) == 1:
        return BACKENDS[preferred[0]]
    names = list(BACKENDS.table)  # Dynamo of torch 2.11 does not unpack the registry itself
    for name in [*(name for name in names if name in preferred), *names]:
        backend = BACKENDS[name]
        if backend.is_differentiable or name in disabled() or not works(name):
            continue
        if all(backend.accepts(problem, direction) for problem in problems):
            return backend
    raise AssertionError("eager serves every call")


def choose_strategy(
    requested: str, num_heads: int, num_heads_k: int, size: int, has_rows: bool, share: float
) -> tuple[str, str]:
    """Return "gather" or "ulysses" for a group of `size` ranks, and the reason, which calls the size W.

    `has_rows` is whether each rank has rows of a mask or bias, `share` the fraction of all keys that gather would send.
    """
    if requested not in ("auto", "gather", "ulysses"):
        raise ValueError(f"strategy is {requested!r}; it needs to be one of 'auto', 'gather', 'ulysses'")
    if requested == "ulysses":
        if has_rows:
            raise ValueError(
                "strategy is 'ulysses', and a mask or bias has rows of this rank, which would have to move with the "
                "queries; strategy='gather' leaves them where they are"
            )
        check_heads(num_heads, num_heads_k, size)
    if requested != "auto":
        return requested, "it was asked for"
    if has_rows:
        return "gather", "a mask or bias has rows of this rank, which stay where they are"
    if not _heads_divide(num_heads, num_heads_k, size):
        return "gather", "the ranks do not divide the heads, as ulysses needs"
    # Gather sends 1.5 W / (G + 1) times the bytes of Ulysses, or a fraction of that.
    even = (num_heads // num_heads_k + 1) / 1.5
    if size * share > even:
        return "ulysses", "it sends less than gather: W > (Hq / Hk + 1) / 1.5"
    if size > even:
        return "gather", "ranks read so few keys of others that it sends less than ulysses"
    return "gather", "ulysses would send no less: W <= (Hq / Hk + 1) / 1.5"


def _heads_divide(num_heads: int, num_heads_k: int, size: int) -> bool:
    return num_heads % size == 0 and (num_heads_k % size == 0 or size % num_heads_k == 0)


def check_heads(num_heads: int, num_heads_k: int, size: int) -> None:
    """Refuse heads that `size` ranks cannot trade for positions."""
    if not _heads_divide(num_heads, num_heads_k, size):
        raise ValueError(
            f"q has {num_heads} heads on {num_heads_k} key-value heads, and {size} ranks trade them; it needs heads of "
            "q that are a multiple of the ranks, and key-value heads that divide them or are divided by them: "
            "strategy='gather' over one dim needs nothing of the kind"
        )
