"""Both passes on the Triton kernels; a launch plan serves a class of calls whose tensors have equal alignment."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from ...gradients import (
    allocate_outputs,
    contiguous_strides,
    differentiate_without_keys,
    empty_outputs,
    fill_empty,
    has_pairs,
    run_without_keys,
    zero_gradients,
)
from ...problem import AttentionProblem, Gradients
from ...problem.inputs import Inputs, Saved
from ...reference.tangents import Tangents
from ..protocol import Backward, Direction, Forward, ForwardTangents
from .key_order import Ordered, has_order, tiles_of_bounds
from .tree_tiles import tiles_of_tree

# Calls of at most so many keys, and so many (query, key) pairs in all heads, read a bool mask as it is.
FEW_KEYS, FEW_PAIRS = 1024, 2**21

_launch: ModuleType | None = None


def kernels() -> ModuleType:
    """Import the launch module at first use: importing Triton takes a second, and it may not be installed."""
    global _launch
    if _launch is None:  # kept, because the import system takes two microseconds
        _launch = importlib.import_module("flash_dmattn.triton_kernels.launch")
    return _launch


def _sequence_kernels() -> ModuleType:
    return importlib.import_module("flash_dmattn.triton_kernels.sequences")


def is_short(p: AttentionProblem, direction: Direction) -> bool:
    """Return whether a pass of a call runs the kernel of short rows, which reads a mask in any form."""
    if p.relative is not None:
        return False
    call = kernels().ShortCall.described(p)
    serves: bool = call.serves_forward() if direction == "forward" else call.serves_backward()
    return serves


def has_group_rows(p: AttentionProblem) -> bool:
    """Return whether the query heads of a group become rows of one tile; a bool mask is packed after that."""
    if p.seqlen_q != 1 or p.num_heads == p.num_heads_k or p.seqlen_k < kernels().GROUP_ROWS_FROM:
        return False
    return p.flags.left < 0 and p.dropout_p == 0 and p.relative is None


def has_few_pairs(p: AttentionProblem) -> bool:
    """Return whether a call is so small that two more launches, to pack its bool mask, take longer than they save.

    In fp32 the kernels that read bools spill a hundred registers a thread.
    """
    return (
        p.dtype.itemsize == 2
        and p.seqlen_k <= FEW_KEYS
        and p.batch * p.num_heads * p.seqlen_q * p.seqlen_k <= FEW_PAIRS
    )


def reads_dense(p: AttentionProblem, direction: Direction) -> bool:
    """Return whether a pass of a call takes a bool mask as it is; beside sequences `packs_beside_sequences` decides."""
    if p.sequences is not None:
        return False
    if direction == "tangents":
        return has_few_pairs(p)
    return is_short(p, direction) or has_few_pairs(p) or (direction == "forward" and has_group_rows(p))


def reads_heads_first(p: AttentionProblem, direction: Direction) -> bool:
    """Return whether a pass takes q, k and v in head-first layout, (B, H, L, D).

    Only passes with short rows do: their kernels use strides that the plan holds, so the shape does not matter. A
    backward pass allocates gradients like q, k and v, so these must be contiguous as (B, L, H, D).
    """
    if p.sequences is not None or not has_pairs(p) or not _has_unit_rows(p) or not is_short(p, direction):
        return False
    if direction == "forward":
        return p.seqlen_q != 1 or p.num_heads == p.num_heads_k
    shapes = (
        ((p.batch, p.seqlen_q, p.num_heads, p.head_dim), p.q_strides),
        ((p.batch, p.seqlen_k, p.num_heads_k, p.head_dim), p.k_strides),
        ((p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v), p.v_strides),
    )
    return all(tuple(strides) == contiguous_strides(shape) for shape, strides in shapes)


def _has_unit_rows(p: AttentionProblem) -> bool:
    rows = ((p.q_strides, p.head_dim), (p.k_strides, p.head_dim), (p.v_strides, p.head_dim_v))
    return all(strides[3] == 1 or dim == 1 for strides, dim in rows)


def plan_forward(p: AttentionProblem) -> Forward:
    """Plan the forward pass of a class of calls."""
    if p.sequences is not None:
        return _plan_sequences_forward(p)
    if not has_pairs(p):
        return run_without_keys(p)
    launch, flags, outputs, dtype = kernels(), p.flags, allocate_outputs(p), p.dtype
    short = is_short(p, "forward")
    has_bounds = p.mask_form == "intervals" and not short
    copies, packs = not _has_unit_rows(p), p.mask_form == "dense" and not short and has_group_rows(p)
    heads_first, unit_rows, plans = p.arrival == "heads_first", launch.unit_rows, launch.plans
    takes_tf32, is_current_device, this = launch.takes_tf32, launch.is_current_device, object()

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v, mask, bias, sink, _, dropout = x
        out, lse = outputs(q)
        if has_bounds:
            if has_order(p, mask):
                o = Ordered(p, x)
                launch.forward(q, o.k, o.v, o.mask, o.bias, out, lse, o.flags, sink, dropout)
                return out, lse
            mask = tiles_of_bounds(p, mask)
        if copies:
            q, k, v = unit_rows(q), unit_rows(k), unit_rows(v)
        if sink is not None:
            sink = sink.contiguous()
        if packs and mask.dense is not None:
            mask = launch.packed_for_forward(mask.dense, q, k, flags, True)
        key = (this, q.get_device(), takes_tf32(dtype), _places(q, k, v, bias, sink, dropout, *mask.tensors))
        plan = plans.get(key)
        if plan is None:
            rows = (q, k, v) if not heads_first else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            groups = packs or launch.takes_group_rows(*rows[:2], mask, flags)
            with launch.on_device(q):
                plan = launch.forward_plan(launch.planned_call(*rows, mask, bias, flags, sink, groups))
            plans.keep(key, plan)
        if is_current_device(q):
            plan(q, k, v, mask, bias, sink, out, lse, dropout)
        else:
            with torch.cuda.device(q.device):
                plan(q, k, v, mask, bias, sink, out, lse, dropout)
        return out, lse

    return forward


def plan_tangents(p: AttentionProblem) -> ForwardTangents:
    """Plan the forward pass of a class of calls in forward mode."""
    launch = importlib.import_module("flash_dmattn.triton_kernels.plan_tangents")

    def tangents(x: Inputs, own: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (out, lse), (tout, tlse) = empty_outputs(x.q, x.v), empty_outputs(x.q, x.v)
        if out.numel() == 0 or 0 in x.k.shape[:2] or (x.sequences is not None and len(x.sequences.bounds) == 0):
            fill_empty(out, lse, None if x.sequences is not None else x.sink)
            if x.sink is not None and own.sink is not None and x.sequences is None:
                own_sink = own.sink.masked_fill(x.sink == -torch.inf, 0.0)
                return out, lse, tout.zero_(), tlse.copy_(own_sink[:, None])
            return out, lse, tout.zero_(), tlse.zero_()
        if x.sequences is not None:  # rows of no sequence
            fill_empty(out, lse, None)
            tout.zero_(), tlse.zero_()
        mask = tiles_of_bounds(p, x.mask, in_order=False) if x.mask.form == "intervals" else x.mask
        results = (out, lse, tout, tlse)
        launch.forward(x.q, x.k, x.v, mask, x.bias, x.sink, own, results, p.flags, x.sequences, x.dropout)
        return results

    return tangents


def _plan_sequences_forward(p: AttentionProblem) -> Forward:
    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_outputs(x.q, x.v)
        assert x.sequences is not None
        if len(x.sequences.bounds) == 0 or out.numel() == 0:
            return fill_empty(out, lse, None)
        _sequence_kernels().forward(x.q, x.k, x.v, x.mask, x.bias, out, lse, p.flags, x.sink, x.sequences, x.dropout)
        return out, lse

    return forward


def plan_backward(p: AttentionProblem) -> Backward:
    """Plan the backward pass of a class of calls; every sum is taken in fp32, in a fixed order, and rounded once."""
    if p.sequences is not None:
        return _plan_sequences_backward(p)
    if not has_pairs(p):
        return differentiate_without_keys(p)
    launch, flags, needs_grad, dtype = kernels(), p.flags, p.needs_grad, p.dtype
    has_bounds = p.mask_form == "intervals" and not is_short(p, "backward")
    copies, is_column, heads_first = not _has_unit_rows(p), p.head_dim_v == 1, p.arrival == "heads_first"
    unit_rows, plans = launch.unit_rows, launch.plans
    takes_tf32, is_current_device, this = launch.takes_tf32, launch.is_current_device, object()

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        (q, k, v, mask, bias, sink, _, dropout), out, lse = saved
        if has_bounds:
            if has_order(p, mask):
                o = Ordered(p, saved.inputs)
                tensors = (dout, dlse, q, o.k, o.v, o.mask, o.bias, out, lse)
                dq, dk, dv, dbias, *dsink = launch.backward(*tensors, o.flags, needs_grad, sink, dropout)
                return dq, o.by_key(dk), o.by_key(dv), o.bias_by_key(dbias), *dsink
            mask = tiles_of_bounds(p, mask)
        if copies:
            q, k, v = unit_rows(q), unit_rows(k), unit_rows(v)
        if sink is not None:
            sink = sink.contiguous()
        strides = dout.stride()
        if not (strides[3] == 1 or is_column):
            dout = dout.contiguous()
            strides = dout.stride()
        out, lse = out.contiguous(), lse.contiguous()
        places = _places(q, k, v, bias, sink, dropout, *mask.tensors, dout, dlse, out, lse)
        dlse_strides = None if dlse is None else dlse.stride()
        key = (this, q.get_device(), takes_tf32(dtype), strides, dlse_strides, places)
        plan = plans.get(key)
        if plan is None:
            rows = (q, k, v) if not heads_first else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            with launch.on_device(q):
                plan = launch.backward_plan(launch.Call(*rows, mask, bias, flags, sink), dout, dlse, needs_grad)
            plans.keep(key, plan)
        if is_current_device(q):
            gradients: Gradients = plan(dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout)
            return gradients
        with torch.cuda.device(q.device):
            gradients = plan(dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout)
        return gradients

    return backward


def _plan_sequences_backward(p: AttentionProblem) -> Backward:
    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        (q, k, v, mask, bias, sink, sequences, dropout), out, lse = saved
        assert sequences is not None
        if len(sequences.bounds) == 0 or out.numel() == 0:
            lse = torch.full_like(lse, torch.inf)  # none of its rows has a sink
            return zero_gradients((q, k, v, bias), dout, None, out, lse, sink, p.needs_grad)
        if mask.form == "tree":
            mask = tiles_of_tree(mask.tensors[0], sequences.bounds, q.shape[1], k.shape[1], p.flags)
        gradients: Gradients = _sequence_kernels().backward(
            dout, dlse, q, k, v, mask, bias, out, lse, p.flags, p.needs_grad, sink, sequences, dropout
        )
        return gradients

    return backward


def _places(*tensors: Tensor | None) -> tuple[int | None, ...] | None:
    """Return the alignment of each tensor, in bytes modulo 16; None if all are 0, the usual case."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    return None if bits % 16 == 0 else tuple([None if x is None else x.data_ptr() % 16 for x in tensors])
