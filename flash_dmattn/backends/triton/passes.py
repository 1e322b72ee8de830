"""Both passes on the Triton kernels; a launch plan is for a class of calls whose tensors have equal alignment."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...gradients import (
    accepts_packed_layout,
    allocate_outputs,
    contiguous_strides,
    differentiate_without_keys,
    empty_outputs,
    fill_empty,
    has_pairs,
    run_without_keys,
)
from ...problem import AttentionProblem, Gradients, MaskView, RowEntropy, collapse
from ...problem.inputs import Inputs, Saved, result_in_rows
from ...reference.entropy import SentEntropy, joined_gradients
from ...reference.tangents import Tangents
from ..protocol import Backward, Direction, Forward, ForwardTangents
from . import lists
from .key_order import Ordered, ascending, has_order, tiles_of_bounds

# Calls up to these numbers of keys, and of (query, key) pairs in all heads, use a bool mask without packing it.
FEW_KEYS, FEW_PAIRS = 1024, 2**21
# From this number of keys on, it is faster to load k and v once for a whole group.
GROUP_ROWS_FROM = 512

_launch: ModuleType | None = None


def kernels() -> ModuleType:
    """Import the launch module at first use: importing Triton takes a second, and it may not be installed."""
    global _launch
    if _launch is None:  # cached, because an import statement takes two microseconds
        _launch = importlib.import_module("flash_dmattn.triton_kernels.launch")
    return _launch


def is_short(p: AttentionProblem, direction: Direction) -> bool:
    """Return whether a pass of a call runs the kernel of short rows, which supports a mask in any form."""
    if p.relative is not None or p.flags.invariant or (direction == "backward" and p.flags.sums):
        return False
    call = kernels().ShortCall.described(p)
    serves: bool = call.serves_forward() if direction == "forward" else call.serves_backward()
    return serves


def has_group_rows(p: AttentionProblem) -> bool:
    """Return whether the heads of a group, with one query each, become rows of one tile, to load k and v once.

    Dropout forbids it, because its random numbers go by tiles of queries of one head. A bias by distance forbids it,
    because rows of one query have one distance to a key. A bool mask is packed after that.
    """
    if p.seqlen_q != 1 or p.num_heads == p.num_heads_k or p.seqlen_k < GROUP_ROWS_FROM:
        return False
    if p.flags.invariant and (p.mask is not None or p.bias is not None):
        return False  # as rows of one tile they would have another form
    return p.flags.left < 0 and p.dropout_p == 0 and p.relative is None


def _shares_keys_of_group(p: AttentionProblem) -> bool:
    """Return whether the mask allows rows of one tile the same keys; one that was packed for one query does not."""
    if p.mask_form == "keys":
        return p.mask is not None and p.mask.shape[1] != p.num_heads
    return p.mask_form in ("none", "dense")


def has_few_pairs(p: AttentionProblem) -> bool:
    """Return whether a call is so small that packing its bool mask, by two launches, takes longer than it saves.

    In fp32 the kernels that load bools spill a hundred registers per thread.
    """
    return (
        p.dtype.itemsize == 2
        and p.seqlen_k <= FEW_KEYS
        and p.batch * p.num_heads * p.seqlen_q * p.seqlen_k <= FEW_PAIRS
    )


def reads_dense(p: AttentionProblem, direction: Direction) -> bool:
    """Return whether a pass uses a bool mask without packing it; with sequences see `packs_for_sequences`."""
    if p.sequences is not None or p.flags.invariant:
        return False
    if direction == "tangents":
        return has_few_pairs(p)
    return is_short(p, direction) or has_few_pairs(p) or (direction == "forward" and has_group_rows(p))


def reads_as_arrived(p: AttentionProblem, direction: Direction) -> bool:
    """Return whether a pass takes q, k and v as they arrive: kernels use strides that the plan holds, not shapes.

    Head-first tensors are only for passes with short rows. Their backward pass allocates gradients like q, k and v, so
    these must be contiguous as (B, L, H, D). Tokens are not for the backward pass of large heads, which splits rows.
    """
    if p.mask_form == "lists" or p.flags.sums:
        return False
    if p.arrival == "tokens":
        return accepts_packed_layout(p, direction) and (direction == "forward" or max(p.head_dim, p.head_dim_v) <= 256)
    if not has_pairs(p) or not _has_unit_rows(p) or not is_short(p, direction):
        return False
    if direction == "forward":
        return p.seqlen_q != 1 or p.num_heads == p.num_heads_k
    return all(tuple(strides) == contiguous_strides(shape) for shape, strides in p.rows)


def _has_unit_rows(p: AttentionProblem) -> bool:
    return all(strides[3] == 1 or shape[3] == 1 for shape, strides in p.rows)


def copies_bias(p: AttentionProblem) -> bool:
    """Return whether passes copy a bias of one value per score because values of adjacent keys are apart in memory.

    A projection of pairs to heads returns such a bias. Each value that a kernel loads from it takes a sector of memory,
    in every pass and for every batch entry that shares it. Small calls take the time of a launch longer with a copy.
    """
    if p.bias is None or p.relative is not None or p.bias_class != "score" or p.bias.strides[3] == 1:
        return False
    return p.batch * p.num_heads * p.seqlen_q * p.seqlen_k > FEW_PAIRS


def _with_adjacent_keys(x: Inputs) -> Inputs:
    assert x.bias is not None
    return x._replace(bias=collapse(x.bias).contiguous().expand(x.bias.shape))


def plan_forward(p: AttentionProblem) -> Forward:
    if p.mask_form == "lists":
        return lists.plan_forward(p)
    if not has_pairs(p):
        return run_without_keys(p, wide_lse=True)
    launch, flags, arrival, outputs = kernels(), p.flags, p.arrival, allocate_outputs(p)
    short = p.sequences is None and is_short(p, "forward")
    has_bounds = p.mask_form == "intervals" and not short
    groups = p.sequences is None and not short and has_group_rows(p) and _shares_keys_of_group(p)
    merges = p.flags.invariant and p.mask_form in ("tiles", "sequence_tiles")
    copies, plans, plan_token = p.sink is not None or not _has_unit_rows(p), launch.plans, object()
    run_on, spread_bias = launch.run_on, copies_bias(p)

    def make_plan(x: Inputs) -> Callable[..., None]:
        plan: Callable[..., None] = launch.forward_plan(launch.planned_call(x.in_rows(arrival), flags, groups))
        return plan

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        results = outputs(x.q)
        if spread_bias:
            x = _with_adjacent_keys(x)
        if has_bounds:
            if has_order(p, x.mask):
                ordered = Ordered(p, x)
                launch.forward(ordered.inputs, *results, flags=ordered.flags)
                return results
            x = x._replace(mask=tiles_of_bounds(p, x.mask))
        if merges:
            x = x._replace(mask=ascending(x.mask))
        if copies:
            x = launch.readable(x)
        if groups and x.mask.dense is not None:
            x = x._replace(mask=launch.packed_for_group_rows(x.mask.dense, x.q, x.k, flags))
        key = (plan_token, x.q.get_device(), *_places(x))
        plan = plans.get(key)
        if plan is None:
            plan = plans.put(key, run_on(x.q, make_plan, x))
        run_on(x.q, plan, x, *results)
        return results

    return forward


def plan_tangents(p: AttentionProblem) -> ForwardTangents:
    launch, has_keys = importlib.import_module("flash_dmattn.triton_kernels.plan_tangents"), has_pairs(p)

    def tangents(x: Inputs, own: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.bias is not None
        (out, lse), (tout, tlse) = empty_outputs(x.q, x.v, wide), empty_outputs(x.q, x.v, wide)
        if not has_keys or p.sequences is not None:  # also for rows of no sequence
            sink = None if p.sequences is not None else x.sink
            fill_empty(out, lse, sink)
            tout.zero_()
            tlse.zero_()
            if sink is not None and own.sink is not None:
                tlse.copy_(own.sink.masked_fill(sink == -torch.inf, 0.0)[:, None])
        if has_keys:
            mask = tiles_of_bounds(p, x.mask, in_order=False) if x.mask.form == "intervals" else x.mask
            launch.forward(x._replace(mask=mask), own, (out, lse, tout, tlse), p.flags)
        return out, lse, tout, tlse

    return tangents


def plan_backward(p: AttentionProblem) -> Backward:
    """Plan the backward pass of a class of calls; every sum is taken in fp32, in a fixed order, and rounded once."""
    if p.mask_form == "lists":
        return lists.plan_backward(p)
    if not has_pairs(p):
        return differentiate_without_keys(p)
    launch, flags, arrival, needs_grad = kernels(), p.flags, p.arrival, p.needs_grad
    has_bounds, is_tree = p.mask_form == "intervals" and not is_short(p, "backward"), p.mask_form == "tree"
    merges = p.flags.invariant and p.mask_form in ("tiles", "sequence_tiles")
    copies, plans, plan_token = p.sink is not None or not _has_unit_rows(p), launch.plans, object()
    run_on, unit_rows, is_invariant = launch.run_on, launch.unit_rows, p.flags.invariant
    spread_bias = copies_bias(p)

    def make_plan(x: Inputs, dout: Tensor, dlse: Tensor | None) -> Callable[..., Gradients]:
        call = launch.planned_call(x.in_rows(arrival), flags)
        results = result_in_rows(dout, arrival), result_in_rows(dlse, arrival)
        plan: Callable[..., Gradients] = launch.backward_plan(call, *results, needs_grad)
        return plan

    def backward(
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        *,
        dbias_out: Tensor | None = None,
        entropy: RowEntropy | None = None,
    ) -> Gradients:
        x, out, lse = saved
        sent: tuple[SentEntropy, ...] = ()
        if entropy is not None:
            own_dlse, (dlse, dentropy) = dlse, joined_gradients(entropy, dlse, lse)
            sent = (SentEntropy(dentropy, own_dlse),)
        if is_tree:
            x = x._replace(mask=_tiles_of_tree(p, x))
        if spread_bias:
            x = _with_adjacent_keys(x)
        if has_bounds:
            if has_order(p, x.mask):
                ordered = Ordered(p, x)
                saved = Saved(ordered.inputs, out, lse)
                dq, dk, dv, dbias, *dsink = launch.backward(saved, dout, dlse, ordered.flags, needs_grad, *sent)
                return dq, ordered.by_key(dk), ordered.by_key(dv), ordered.bias_by_key(dbias), *dsink
            x = x._replace(mask=tiles_of_bounds(p, x.mask))
        if merges:
            x = x._replace(mask=ascending(x.mask))
        if copies:
            x = launch.readable(x)
        if x is not saved.inputs or not (out.is_contiguous() and lse.is_contiguous()):
            saved = Saved(x, out.contiguous(), lse.contiguous())
        if is_invariant and not (dout.is_contiguous() and dout.data_ptr() % 16 == 0):
            dout = dout.clone(memory_format=torch.contiguous_format)  # how it lies decides the order of a sum in delta
        dout = unit_rows(dout)
        strides = dout.stride(), None if dlse is None else dlse.stride()
        places = _places(x, dout, dlse, saved.out, saved.lse)
        # Whether entropies have a gradient, which is always aligned, because it was just allocated.
        key = (plan_token, x.q.get_device(), saved.lse.dtype, strides, len(sent), *places)
        plan = plans.get(key)
        if plan is None:
            plan = plans.put(key, run_on(x.q, make_plan, x, dout, dlse))
        gradients: Gradients = run_on(x.q, plan, saved, dout, dlse, *sent)
        return gradients

    return backward


def _tiles_of_tree(p: AttentionProblem, x: Inputs) -> MaskView:
    """Convert a tree for the backward kernels, which lack it: to a mask of all keys, with the window of the call."""
    from ...masks.prepared.operators import packer_for  # importing flash_dmattn does not need it
    from ...masks.prepared.packing import unpack_tree

    assert p.sequences is not None and x.sequences is not None
    pairs = unpack_tree(x.mask.tensors[0])[:, None]
    tiles = packer_for(pairs).pack_sequences(pairs, x.sequences.bounds, "tree", p.sequences, p.window)
    return MaskView("sequence_tiles", tuple(tiles))


def _places(x: Inputs, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the alignment of each tensor, in bytes modulo 16, or None if all are 0; and size and stride of pages."""
    q, k, v, mask, bias, sink, sequences, dropout = x
    tensors, pages = (q, k, v, bias, sink, dropout, *mask.tensors, *others), None
    if sequences is not None:
        table = sequences.block_table
        tensors = (*tensors, sequences.bounds, table)
        pages = None if table is None else (k.shape[0], table.stride(0))
    bits = 0
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr()
    return pages, None if bits % 16 == 0 else tuple([None if t is None else t.data_ptr() % 16 for t in tensors])
