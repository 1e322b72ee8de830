"""Plans both passes of calls without sequences from the problem of a class of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...gradients import (
    allocate_outputs,
    differentiate_without_keys,
    empty_gradient,
    has_pairs,
    key_gradient,
    new_like,
    query_gradient,
    run_without_keys,
)
from ...problem import AttentionProblem, Gradients, MaskView, fits_tma, make_band
from ...problem.inputs import Inputs, Saved
from ...reference.lists import repeat_heads
from ...reference.sinks import sink_gradient
from ..mask_choice import interval_walk, reads_scores
from ..protocol import Backward, Forward
from . import sequences
from .group_rows import group_shift, has_group_rows, plan_group_rows
from .operands import (
    Attend,
    bias_reader,
    copy_unpadded,
    forward_bias,
    kernels,
    padded_rows,
    pads_dbias,
    readable_rows,
    reader,
    stores_into,
)
from .parts import Differentiate, Triple, attend_in_parts, differentiate_in_parts, part_size

# Number of KV splits of the forward kernel: 0 lets the operator choose (csrc/api/num_splits.h), 1 means no split. Tests
# set other numbers, to cover with small shapes the code for large ones.
NUM_KV_SPLITS = 0
# Number of work tiles for each tile of dbias (csrc/api/backward_schedule.h): 0 lets the operator choose.
NUM_DBIAS_CHUNKS = 0
# Codes of `Flags.outside` in the extension (csrc/api/call.h): 0 without a bias by distance, 1 for the first or
# last value, 2 for the value 0.
_OUTSIDE = {"": 0, "error": 1, "clamp": 1, "zero": 2}


def plan_forward(p: AttentionProblem) -> Forward:
    if not has_pairs(p):
        return run_without_keys(p, wide_lse=True)
    if p.sequences is not None:
        return sequences.plan_forward(p)
    outputs, attend = allocate_outputs(p), _plan_attend(p)

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        results = outputs(x.q)
        attend(x, *results)
        return results

    return forward


def _plan_attend(p: AttentionProblem) -> Attend:
    """Plan the function that writes out, lse and the maximum scores."""
    if part_size(p) != p.batch:
        return attend_in_parts(p, _plan_attend)
    if has_group_rows(p):
        return plan_group_rows(p, _plan_attend)
    read_rows, read_bias, read_tiles = reader(p.rows, p.dtype.itemsize), forward_bias(p), _tile_reader(p)
    band = make_band(p.seqlen_q, p.seqlen_k, p.window)
    low, high = (-p.seqlen_q, p.seqlen_k) if band is None else band
    scale, softcap, dropout_p = p.softmax_scale, p.softcap, p.dropout_p
    one_mask_row = p.flags.one_mask_row and band is None
    numbers, has_keys = (one_mask_row, *_distances(p), group_shift(p)), p.bias_class == "key"
    attend, is_invariant = kernels().attend, p.flags.invariant

    def run(x: Inputs, out: Tensor, lse: Tensor, *largest: Tensor) -> None:
        q, k, v, mask, bias, sink, _, dropout = x
        q, k, v = read_rows(q, k, v)
        walked: Sequence[Tensor] = ()
        order = None
        if read_tiles is not None:
            allowed, row_lists, _, order = read_tiles(mask)
            walked = (allowed, row_lists)
            if order is not None and bias is not None and not has_keys:
                bias = bias[..., : order.shape[2]]
        if read_bias is not None and bias is not None:
            bias = read_bias(bias)
        if sink is not None:
            sink = (sink.float() if sink.dtype == torch.float64 else sink).contiguous()
        splits = 1 if is_invariant else NUM_KV_SPLITS
        tensors = (q, k, v, walked, bias, sink, out, lse)
        attend(*tensors, low, high, scale, softcap, splits, dropout, dropout_p, *numbers, order, mask.fresh, *largest)

    return run


def takes_fresh(p: AttentionProblem) -> bool:
    """Return whether the forward pass uses its mask once, and the packer supports k and v of a class of calls."""
    fits = all(fits_tma(shape, strides, p.dtype.itemsize) for shape, strides in p.rows[1:])
    return fits and has_pairs(p) and not has_group_rows(p) and part_size(p) == p.batch


def _distances(p: AttentionProblem) -> tuple[int, int]:
    """Return the code of `Flags.outside` in the extension, and `Flags.zero`."""
    return _OUTSIDE[p.flags.outside], p.flags.zero


def _tile_reader(p: AttentionProblem) -> Callable[[MaskView], tuple[Tensor, Tensor, Tensor, Tensor | None]] | None:
    """Return `mask -> bits or bounds, both lists of tiles, the order of keys or None`, if p has a mask."""

    def read_tiles(mask: MaskView) -> tuple[Tensor, Tensor, Tensor, None]:
        bits, _, row_lists, col_lists = mask.tensors
        return bits, row_lists, col_lists, None

    read_intervals = interval_walk(p)

    # Kernels with a bias of one value per score need bits, not bounds, and keys in their original order.
    def read_bits(mask: MaskView) -> tuple[Tensor, Tensor, Tensor, None]:
        bounds, row_lists, col_lists, _ = read_intervals(mask)
        return kernels().interval_bits(bounds, p.seqlen_q), row_lists, col_lists, None

    if p.mask_form == "none":
        return None
    return read_tiles if p.mask_form == "tiles" else read_bits if reads_scores(p) else read_intervals


class _Reordered:
    """Gradients of a call that runs only on its live keys, padded to a multiple of the block size.

    The kernels have the keys in the order of the mask, without most of the dead keys. `move` copies their results to
    the original positions, and sets the gradients of all other keys to zero.

    Attributes:
        results: the order, dk, dv and the sums of dbias that the kernels get.
    """

    def __init__(self, order: Tensor, dk: Tensor | None, dv: Tensor | None, sums: Tensor | None) -> None:
        places = order.shape[2]
        identity = torch.arange(places, dtype=torch.int32, device=order.device).expand(order.shape).contiguous()
        by_place = [None if x is None else x.new_empty((x.shape[0], places, *x.shape[2:])) for x in (dk, dv)]
        self.results: tuple[Tensor | None, ...] = (
            identity,
            *by_place,
            None if sums is None else sums.new_zeros((*sums.shape[:2], places)),
        )
        self._order, self._by_key = order, (dk, dv, sums)

    def gather(
        self, k: Tensor, v: Tensor, bias: Tensor | None, bounds: Tensor, has_keys: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy k, v and, if it has one value per key, a bias into the order of the mask."""
        k, v, *biases = kernels().gather_keys(k, v, bias if has_keys else None, self._order, bounds)
        if bias is not None:
            bias = biases[0] if has_keys else bias[..., : k.shape[1]]
        return k, v, bias

    def move(self) -> None:
        order = self._order.long()
        for by_key, by_place in zip(self._by_key, self.results[1:], strict=True):
            if by_key is None or by_place is None:
                continue
            by_key.zero_()
            if by_key.dim() == 4:
                index = order.expand(by_key.shape[0], by_key.shape[2], -1).transpose(1, 2)[..., None]
                by_key.scatter_(1, index.expand_as(by_place), by_place)
            else:
                index = repeat_heads(order, by_key.shape[1])
                by_key.scatter_(2, index.expand_as(by_place), by_place)


def plan_backward(p: AttentionProblem) -> Backward:
    if not has_pairs(p):
        return differentiate_without_keys(p)
    if p.sequences is not None:
        return sequences.plan_backward(p, lambda: NUM_DBIAS_CHUNKS)
    return differentiate_in_parts(p, _plan_differentiate) if part_size(p) != p.batch else _plan_differentiate(p)


def _plan_differentiate(p: AttentionProblem) -> Differentiate:
    needs, dbias_class = p.needs_grad, p.dbias_class
    shapes = p.rows
    read_rows, read_tiles = reader(shapes, p.dtype.itemsize), _tile_reader(p)
    new_q, new_k, new_v = (new_like(*shape) if needed else None for shape, needed in zip(shapes, needs, strict=False))
    allocate_bias = None
    if dbias_class == "score" and p.bias is not None:
        allocate_bias = new_like(p.bias.shape, p.bias.strides)
    pads = dbias_class == "score" and pads_dbias(p)
    relative = p.relative if needs.bias else None
    allocate_values = None if relative is None else new_like(relative.shape, relative.strides)
    sum_sizes = (p.batch, p.num_heads, p.seqlen_k) if dbias_class == "key" else None
    # PyTorch computes dsink from delta, and with a sink also the gradient of a bias of one value per query.
    needs_delta = needs.sink or (dbias_class == "query" and p.sink is not None)
    runs_kernel = any(needs[:3]) or dbias_class in ("key", "score") or relative is not None
    read_bias = bias_reader(p)
    low, high = make_band(p.seqlen_q, p.seqlen_k, p.window) or (-p.seqlen_q, p.seqlen_k)
    numbers = (low, high, p.softmax_scale, p.softcap, p.deterministic)
    num_heads_k, repeat, dropout_p, distances = p.num_heads_k, p.flags.bias_repeat, p.dropout_p, _distances(p)
    differentiate, has_keys = kernels().differentiate, p.bias_class == "key"

    def run(
        saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None, into: Triple | None = None
    ) -> Gradients:
        (q, k, v, mask, bias, sink, _, dropout), out, lse = saved
        if into is not None:
            dq, dk, dv = into
        else:
            dq = None if new_q is None else new_q(q)
            dk = None if new_k is None else new_k(k)
            dv = None if new_v is None else new_v(v)
        delta = torch.empty_like(lse, dtype=torch.float32) if needs_delta else None
        stored = sums = None
        if pads and bias is not None:
            stored = padded_rows(bias)
        elif allocate_bias is not None and bias is not None:
            stored = dbias_out
            if stored is None or not stores_into(stored, q, p.flags):
                stored = allocate_bias(bias)
        elif allocate_values is not None and bias is not None:
            stored = allocate_values(bias)
        elif sum_sizes is not None:
            sums = torch.empty(sum_sizes, dtype=torch.float32, device=q.device)
        if not (dout.is_contiguous() and dout.data_ptr() % 16 == 0):
            dout = readable_rows(dout)
        q, k, v = read_rows(q, k, v)
        out, lse_read = out.contiguous(), lse.contiguous()
        chunks = (NUM_DBIAS_CHUNKS, dropout, dropout_p, *distances)
        walked: Sequence[Tensor] = ()
        if runs_kernel:
            order = by_place = None
            read = bias
            if read_tiles is not None:
                allowed, row_lists, col_lists, order = read_tiles(mask)
                walked = (allowed, row_lists, col_lists)
            if read_bias is not None and read is not None:
                read = read_bias(read)
            summed_q = dq
            results: tuple[Tensor | None, ...] = (order, dk, dv, sums)
            if order is not None:
                if p.deterministic and dq is None:
                    summed_q = empty_gradient(q)  # the kernel fixes the order of all sums by the order of dq's
                if order.shape[2] < p.seqlen_k:
                    by_place = _Reordered(order, dk, dv, sums)
                    results = by_place.results
                    k, v, read = by_place.gather(k, v, read, allowed, has_keys)
            tensors = (dout, dlse, q, k, v, walked, results[0], read, out, lse_read)
            written = (summed_q, *results[1:3], stored, results[3], delta)
            differentiate(*tensors, *written, *numbers, *chunks, p.flags.invariant, by_place is not None)
            if by_place is not None:
                by_place.move()
        elif delta is not None:
            nothing = (None, None, None, None, None)
            tensors = (dout, dlse, q, k, v, walked, None, None, out, lse_read)
            differentiate(*tensors, *nothing, delta, *numbers, *chunks[:3], 0, 0)  # delta is the same as for any bias
        dbias = stored
        if pads and allocate_bias is not None and bias is not None and stored is not None:
            dbias = copy_unpadded(allocate_bias(bias), stored)
        if sums is not None and bias is not None:
            dbias = key_gradient(bias, sums, num_heads_k, repeat)
        elif dbias_class == "query" and bias is not None:
            dbias = query_gradient(bias, dlse, lse, num_heads_k, repeat, sink, delta)
        if dbias_out is not None and dbias is not None and dbias is not dbias_out:
            dbias = dbias_out.copy_(dbias)
        dsink = sink_gradient(sink, lse, delta) if needs.sink and sink is not None and delta is not None else None
        return dq, dk, dv, dbias, dsink

    return run
