"""The CUDA extension for Hopper: a forward pass, and a backward pass for most calls; triton completes the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import operators
from ...gradients import empty_gradients, key_gradient, query_gradient, sink_gradient
from ...problem import (
    AttentionProblem,
    Band,
    Flags,
    Gradients,
    MaskView,
    NeedsGrad,
    SequenceView,
    bias_class,
    fits_tma,
    make_band,
)
from ..direct import DirectBackward, DirectForward
from ..interval_walk import interval_notes, interval_walk, walked_view
from ..protocol import Availability
from . import direct, extension
from . import sequences as of_sequences
from .bias_rows import copies_bias, copy_note, readable, readable_if_small, stores_into
from .group_rows import group_rows
from .parts import (
    Triple,
    attend_in_parts,
    differentiate_in_parts,
    new_gradients,
    part_notes,
    parts_of,
    refuses_entries,
)
from .rules import AUTO_RULES, INSTANCES, RULES

__all__ = [
    "AUTO_RULES",
    "FEATURES",
    "INSTANCES",
    "MASK_FORM",
    "NAME",
    "PROVIDES",
    "RULES",
    "STORES_DBIAS",
    "backward",
    "direct_backward",
    "direct_forward",
    "forward",
    "notes",
    "probe",
    "refuses_entries",
]

NAME = "cuda"
FEATURES = frozenset({"mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse", "sink"}) | {
    "sequences",
    "paged",
    "dropout_p",
}
MASK_FORM = "prepared"
STORES_DBIAS = True
PROVIDES = frozenset({"notes", "refuses_entries", "direct_forward", "direct_backward"})
# Number of KV splits of the forward kernel: 0 lets the operator choose (csrc/api/num_splits.h), 1 is none. Tests set
# others, to reach on small shapes what happens on large ones.
NUM_KV_SPLITS = 0
# The same of the work tiles that share a tile of a dbias (csrc/api/backward_schedule.h); 1 is none.
NUM_DBIAS_CHUNKS = 0

_found: Availability | None = None


def probe() -> Availability:
    """Whether the compiled extension can be loaded; the first result is remembered."""
    global _found
    if _found is None:
        _found = _load()
    return _found


def _load() -> Availability:
    try:
        loaded = extension.load()
    except extension.ExtensionMismatchError as error:
        return Availability(False, str(error), "rebuild it, or install what it needs: docs/building.md", error)
    except Exception as error:  # a broken installation raises anything; a probe reports it
        if isinstance(error, ModuleNotFoundError) and error.name == extension.NAME:
            return _not_built(error)
        return Availability(False, f"the CUDA extension cannot be loaded: {error}", "rebuild it", error)
    driver, runtime = loaded.cuda_versions()
    if driver // 1000 < runtime // 1000:
        return Availability(
            False,
            f"the driver is of CUDA {_dotted(driver)}; the extension holds the runtime of {_dotted(runtime)}",
            "update the driver, or build the extension with an older nvcc",
        )
    return Availability(True)


def _not_built(error: ModuleNotFoundError) -> Availability:
    hint = f"build it in a checkout: {extension.BUILD_COMMAND}; docs/building.md"
    found = extension.not_built()
    if found is None:
        return Availability(False, str(error), hint, error)
    return Availability(False, f"{error}; its build said: {found.reason}", hint, error, found.output)


def _dotted(version: int) -> str:
    """13000 as 13.0, as CUDA counts."""
    return f"{version // 1000}.{version % 1000 // 10}"


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """Copies that a call makes, and the parts that it is computed in."""
    if problem.sequences is not None:
        return of_sequences.notes(problem)
    p = problem
    of_rows = tuple(
        f"copies {name}, of strides {tuple(strides)}: TMA reads rows of unit stride that start on 16 bytes"
        for name, shape, strides in (
            ("q", (p.batch, p.seqlen_q, p.num_heads, p.head_dim), p.q_strides),
            ("k", (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim), p.k_strides),
            ("v", (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v), p.v_strides),
        )
        if not fits_tma(shape, strides, p.dtype.itemsize)
    )
    of_bias = (copy_note(p),) if copies_bias(p) else ()
    return interval_notes(problem, gathers=False) + of_rows + of_bias + part_notes(p)


def _rows(x: Tensor) -> Tensor:
    # The smallest copy that TMA can read is that of the one tensor.
    readable = x.data_ptr() % 16 == 0 and fits_tma(x.shape, x.stride(), x.element_size())
    return x if readable else x.clone(memory_format=torch.contiguous_format)


class _Kernels(NamedTuple):
    """What a call uses: the extension's operators, and what prepares a mask."""

    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    gather_keys: Callable[..., list[Tensor]]
    gather_bias: Callable[..., Tensor]
    interval_bits: Callable[..., Tensor]
    collapse: Callable[..., Tensor]
    pack_tiles: Callable[..., list[Tensor]]


_found_kernels: _Kernels | None = None


def _kernels() -> _Kernels:
    # Looked up once: torch.ops takes a microsecond to find an operator, and importing flash_dmattn needs no masks.
    global _found_kernels
    if _found_kernels is None:
        from ...masks.broadcast import collapse
        from ...masks.prepared.operator import pack_tiles

        operators = torch.ops.flash_dmattn  # the probe has loaded the extension
        attend, differentiate = operators.cuda_forward_kernel.default, operators.cuda_backward_kernel.default
        gather_keys, gather_bias = operators.cuda_gather_keys.default, operators.cuda_gather_bias.default
        bits = operators.cuda_interval_bits.default
        _found_kernels = _Kernels(attend, differentiate, gather_keys, gather_bias, bits, collapse, pack_tiles)
    return _found_kernels


class _Tiles(NamedTuple):
    """A mask as the kernels take it: bits or bounds, and lists of tiles; and the order in which keys are to come."""

    allowed: Tensor
    row_lists: Tensor
    col_lists: Tensor
    order: Tensor | None = None

    def in_order(self, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """k, v and a bias of one value per key, by place."""
        if self.order is None:
            return k, v, bias
        kernels = _kernels()
        k, v = kernels.gather_keys(k, v, self.order, self.allowed)
        if bias is not None and bias_class(bias.shape, bias.stride()) == "key":
            bias = kernels.gather_bias(bias, self.order)
        elif bias is not None:
            bias = bias[..., : k.shape[1]]  # one value for all keys
        return k, v, bias


class _ByPlace:
    """Gradients of a call whose order has places for some keys alone, the live ones and a few more.

    Kernels see a call of as many keys as there are places, in their own order. What they return is moved to the keys
    that have these places; others get zeros.

    Attributes:
        of_places: an order, dk, dv and the sums of dbias, as the kernels take them.
    """

    def __init__(self, order: Tensor, dk: Tensor | None, dv: Tensor | None, sums: Tensor | None) -> None:
        places = order.shape[2]
        own = torch.arange(places, dtype=torch.int32, device=order.device).expand(order.shape).contiguous()
        by_place = [None if x is None else x.new_empty((x.shape[0], places, *x.shape[2:])) for x in (dk, dv)]
        self.of_places = (own, *by_place, None if sums is None else sums.new_zeros((*sums.shape[:2], places)))
        self._order, self._results = order.long(), (dk, dv, sums)

    def move(self) -> None:
        """Write the gradients of all keys."""
        for result, found in zip(self._results, self.of_places[1:], strict=True):
            if result is None or found is None:
                continue
            index = self._order
            if result.dim() == 4:
                index = index.expand(result.shape[0], result.shape[2], -1).transpose(1, 2)[..., None]
                result.zero_().scatter_(1, index.expand_as(found), found)
            else:
                index = index.repeat_interleave(result.shape[1] // index.shape[1], 1)
                result.scatter_(2, index.expand_as(found), found)  # it has been zeros


def _tiles_of(
    mask: MaskView,
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    band: Band | None,
    flags: Flags,
    needs_dbias: bool = False,
) -> _Tiles | None:
    """The tiles of a mask of any form but "keys", packed here where it is dense; None without a mask."""
    if mask.form == "none":
        return None
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if mask.form == "intervals":
        of_call = {"needs_dbias": needs_dbias, "has_dropout": flags.dropout_p > 0}
        walk = interval_walk(mask, seqlen_q, k.shape[2], bias, **of_call)
        # Beside a bias of one value per score the kernels read bits.
        allowed = _kernels().interval_bits(walk.bounds, seqlen_q) if walk.is_per_score else walk.bounds
        return _Tiles(allowed, walk.row_lists, walk.col_lists, walk.order)
    packed: Sequence[Tensor] = mask.tensors
    if mask.dense is not None:
        kernels = _kernels()
        packed = kernels.pack_tiles(kernels.collapse(mask.dense), seqlen_q, seqlen_k, band)
    bits, _, row_lists, col_lists = packed
    return _Tiles(bits, row_lists, col_lists)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None = None,
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if sequences is not None:
        return of_sequences.forward(q, k, v, bias, flags, sink, sequences)
    out, lse = operators.empty_outputs(q, v)
    if k.shape[1] == 0:
        return operators.fill_empty(out, lse, sink)
    if out.numel() == 0:
        return out, lse
    parts = parts_of(q.shape[0], mask, bias, flags)
    if parts:
        attend_in_parts(parts, _attend, q, k, v, out, lse, mask, bias, flags, sink)
    else:
        _attend(q, k, v, out, lse, mask, bias, flags, sink, dropout)
    return out, lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None = None,
    dropout: Tensor | None = None,
) -> None:
    """Write out and lse of a call that has both queries and keys, of which no part of the batch shares a thing."""
    if sink is None and dropout is None:
        joined = group_rows(q, k, v, out, lse, mask, bias, flags)
        if joined is not None:
            q, k, v, out, lse, mask, bias, flags = joined
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    band = make_band(seqlen_q, seqlen_k, flags.window)
    low, high = (-seqlen_q, seqlen_k) if band is None else band
    k, v = _rows(k), _rows(v)
    walked: Sequence[Tensor] = ()
    mask = walked_view(mask, q, k, bias, flags, needs_dbias=False, gathers=False)
    tiles = _tiles_of(mask, q, k, bias, band, flags)
    if tiles is not None:
        walked = [tiles.allowed, tiles.row_lists]
        k, v, bias = tiles.in_order(k, v, bias)
    if bias is not None:
        # Kernels with dropout read no bias value by value.
        bias = readable_if_small(bias, q, v) if dropout is None else readable(bias)
    if sink is not None:
        sink = (sink.float() if sink.dtype == torch.float64 else sink).contiguous()
    numbers = (low, high, flags.softmax_scale, flags.softcap, NUM_KV_SPLITS, dropout, flags.dropout_p)
    _kernels().attend(_rows(q), k, v, walked, bias, sink, out, lse, *numbers, flags.one_mask_row and band is None)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    needs_grad: NeedsGrad,
    sink: Tensor | None = None,
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
    dbias_out: Tensor | None = None,
    of_part: Triple | None = None,
) -> Gradients:
    """`of_part`: where dq, dk and dv of a part of the batch are to be written, None for what is not needed."""
    if sequences is not None:
        call = (dout, dlse, q, k, v, bias, out, lse, flags, needs_grad, sink, sequences)
        return of_sequences.backward(*call, NUM_DBIAS_CHUNKS)
    seqlen_q, seqlen_k, num_heads_k = q.shape[1], k.shape[1], k.shape[2]
    if out.numel() == 0 or seqlen_k == 0:
        return empty_gradients((q, k, v, bias), dout, dlse, out, lse, sink, needs_grad)
    parts = parts_of(q.shape[0], mask, bias, flags)
    if parts:
        return differentiate_in_parts(
            parts, _backward, dout, dlse, q, k, v, mask, bias, out, lse, flags, needs_grad, sink, dbias_out
        )
    band = make_band(seqlen_q, seqlen_k, flags.window)
    low, high = (-seqlen_q, seqlen_k) if band is None else band
    dq, dk, dv = new_gradients(q, k, v, needs_grad) if of_part is None else of_part
    mask = walked_view(mask, q, k, bias, flags, needs_dbias=needs_grad.bias, gathers=False)
    of_queries = bias is not None and needs_grad.bias and bias_class(bias.shape) == "query"
    # What follows from delta alone: dsink, and beside a sink dbias of one value per query.
    delta = torch.empty_like(lse) if needs_grad.sink or (of_queries and sink is not None) else None
    dbias = stored = sums = None
    if bias is not None and needs_grad.bias:
        if of_queries:
            pass  # when delta is there
        elif bias_class(bias.shape) == "key":
            # In an order of keys the kernel adds to them; else it writes all of them.
            allocate = torch.zeros if mask.form == "intervals" else torch.empty
            sums = allocate((*lse.shape[:2], seqlen_k), dtype=torch.float32, device=q.device)
        else:
            if dbias_out is not None and stores_into(dbias_out, q, flags):
                dbias = stored = dbias_out
            else:
                dbias = stored = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    of_call = (low, high, flags.softmax_scale, flags.softcap, flags.deterministic, NUM_DBIAS_CHUNKS)
    numbers = (*of_call, dropout, flags.dropout_p)
    if any(x is not None for x in (dq, dk, dv, stored, sums)):
        k, v = _rows(k), _rows(v)
        walked: Sequence[Tensor] = ()
        order, ordered_bias = None, bias
        tiles = _tiles_of(mask, q, k, bias, band, flags, needs_grad.bias)
        if tiles is not None:
            walked, order = [tiles.allowed, tiles.row_lists, tiles.col_lists], tiles.order
            k, v, ordered_bias = tiles.in_order(k, v, bias)
        summed_q = dq
        if order is not None and flags.deterministic and dq is None:
            summed_q = operators.empty_gradient(q)  # its sums fix the order of the others
        read_bias = None if ordered_bias is None else readable(ordered_bias)
        results_of_keys = None
        if order is not None and order.shape[2] < seqlen_k:
            results_of_keys = _ByPlace(order, dk, dv, sums)
        walked_order, *of_keys = (order, dk, dv, sums) if results_of_keys is None else results_of_keys.of_places
        tensors = (_rows(dout), dlse, _rows(q), k, v, walked, walked_order, read_bias)
        results = (out.contiguous(), lse.contiguous(), summed_q, *of_keys[:2], stored, of_keys[2], delta)
        _kernels().differentiate(*tensors, *results, *numbers)
        if results_of_keys is not None:
            results_of_keys.move()
    elif delta is not None:
        tensors = (_rows(dout), dlse, _rows(q), _rows(k), _rows(v), (), None, None)
        results = (out.contiguous(), lse.contiguous(), None, None, None, None, None, delta)
        _kernels().differentiate(*tensors, *results, *numbers)
    if bias is not None and sums is not None:
        dbias = key_gradient(bias, sums, num_heads_k, flags.bias_repeat)
    elif bias is not None and of_queries:
        dbias = query_gradient(bias, dlse, lse, num_heads_k, flags.bias_repeat, sink, delta)
    if sink is None:
        return dq, dk, dv, dbias
    return dq, dk, dv, dbias, sink_gradient(sink, lse, delta) if needs_grad.sink and delta is not None else None


forward, backward = operators.define_pair(NAME, _forward, _backward)


def direct_forward(problem: AttentionProblem, mask: MaskView) -> DirectForward | None:
    """The forward pass of a class of calls: see `Backend`."""
    return direct.forward_pass(problem, mask, _kernels().attend, _rows, lambda: NUM_KV_SPLITS)


def direct_backward(problem: AttentionProblem, mask: MaskView) -> DirectBackward | None:
    """The backward pass of a class of calls."""
    return direct.backward_pass(problem, mask, _kernels().differentiate, _rows, lambda: NUM_DBIAS_CHUNKS)
