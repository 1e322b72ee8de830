"""The launch plans of calls with short rows: how programs share the work, and the arguments of each kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from flash_dmattn.gradients import key_gradient, new_like, query_gradient
from flash_dmattn.problem import Gradients, MaskView, NeedsGrad, bias_class
from flash_dmattn.problem.inputs import Inputs, Saved
from flash_dmattn.reference.entropy import NOTHING_SENT, SentEntropy, delta_of_sink
from flash_dmattn.reference.sinks import sink_gradient

from .bias_forms import TILE_BIAS
from .plan import NO_ROWS, Call, row_strides, rows_of_flags
from .plan_slots import chunks_of, empty_slots, most_slots, plan_sum
from .short_backward import KEY_SUM, NO_DBIAS, SLOTS, STORE, short_backward_kernel
from .short_calls import ShortCall, ShortTile, backward_tiles, forward_tile
from .short_forward import short_forward_kernel
from .short_rows import Walk
from .tile_ops import DENSE_ROW


def _walk(call: Call, tiles: int, sums_dbias: bool = False) -> tuple[Walk, int, int]:
    """Return the walk of a launch, the chunks of each walk, and the number of programs."""
    bias, shape = call.bias, call.shape
    owners_b, owners_h = (1, 1) if bias is None else bias.shape[:2]
    owners = owners_b * owners_h
    slots = most_slots(bias.numel()) if sums_dbias and bias is not None else None
    chunk, chunks = chunks_of(shape.batch * shape.num_heads // owners, owners * tiles, call.num_sms, slots)
    repeat = 1 if bias is None else call.flags.bias_repeat
    return Walk(owners_b, owners_h, tiles, chunk, repeat), chunks, owners * tiles * chunks


def mask_tensors(mask: MaskView) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors of a mask that the kernels read: bools, bits, or the start and the stop of each key."""
    if mask.form == "none":
        return None, None
    if mask.form == "intervals":
        return mask.tensors[0], mask.tensors[1]
    return mask.tensors[0], None


def _values(call: Call, tile: ShortTile, walk: Walk, *read: Tensor) -> dict[str, Any]:
    one_row = call.mask.form == "dense" and call.dense_mask_strides().row == 0
    return {
        "access": call.dense_mask_strides(),
        "walk": walk,
        "MASK": DENSE_ROW.value if one_row else call.mask_kind,
        # A bias that adds to scores is read as one value per score; a broadcast dim has stride 0.
        "BIAS": TILE_BIAS.value if call.is_biased else call.bias_kind,
        "WIDE": call.wide(*read),
        "STAGES": tile.num_stages,
        "HAS_SINK": call.has_sink,
    }


def plan_short_forward(call: Call) -> Callable[..., None]:
    """Plan the results of one class of calls: run(x, out, lse, *rows)."""
    q, k, v, shape = call.q, call.k, call.v, call.shape
    tile = forward_tile(ShortCall.of(q, k, v, call.mask, call.arch))
    assert tile is not None
    walk, _, programs = _walk(call, triton.cdiv(shape.seqlen_q, tile.block_m))
    launch = call.launch(short_forward_kernel, programs, tile, **_values(call, tile, walk, q, k, v))
    flags = call.flags

    def run(x: Inputs, out: Tensor, lse: Tensor, *rows: Tensor) -> None:
        own = rows_of_flags(flags, rows) if rows else NO_ROWS
        launch(x.q, x.k, x.v, x.bias, *mask_tensors(x.mask), out, lse, x.sink, x.dropout, *own)

    return run


def plan_short_backward(
    call: Call, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad
) -> Callable[..., Gradients]:
    """Plan the gradients of one class of calls: run(saved, dout, dlse, sent), `sent` as for `launch.backward`."""
    need_q, need_k, need_v, need_bias, need_sink = needs_grad
    q, k, v, bias, shape, repeat = call.q, call.k, call.v, call.bias, call.shape, call.flags.bias_repeat
    made_as = bias_class(bias.shape) if need_bias and bias is not None else "none"
    kind = NO_DBIAS
    if made_as == "key":
        kind = KEY_SUM
    elif made_as == "score" and bias is not None:
        kind = STORE if bias.shape[:2] == (shape.batch, shape.num_heads) else SLOTS
    described, heads = ShortCall.of(q, k, v, call.mask, call.arch), shape.batch * shape.num_heads
    tiles = backward_tiles(described, bool(kind == SLOTS), heads)
    # PyTorch computes dsink from delta, and with a sink also the gradient of a bias of one value per query.
    reads_delta = need_sink or (call.has_sink and made_as == "query")
    launches = []
    slots = 1
    for tile in tiles if need_q or need_k or need_v or kind != NO_DBIAS or reads_delta else ():
        all_keys = tile.block_n >= shape.seqlen_k
        all_rows = tile.block_m >= shape.seqlen_q
        dbias_here = kind if all_rows else NO_DBIAS
        num_tiles = triton.cdiv(shape.seqlen_q, tile.block_m) if all_keys else triton.cdiv(shape.seqlen_k, tile.block_n)
        walk, chunks, programs = _walk(call, num_tiles, dbias_here == SLOTS)
        if dbias_here == SLOTS:
            slots = chunks
        launch = call.launch(
            short_backward_kernel,
            programs,
            tile,
            **_values(call, tile, walk, q, k, v, dout),
            **row_strides(dout=dout),
            dlse_strides=(0, 0, 0) if dlse is None else tuple(dlse.stride()),
            ALL_KEYS=all_keys,
            HAS_DLSE=dlse is not None,
            STORE_DELTA=(len(tiles) > 1 or reads_delta) and all_keys,
            NEED_Q=need_q and all_keys,
            NEED_K=need_k and all_rows,
            NEED_V=need_v and all_rows,
            DBIAS=dbias_here.value,
        )
        launches.append(launch)
    # Compared once here, because comparing two Triton constants takes as long as allocating a tensor.
    sums_keys = bool(kind == KEY_SUM) and bias is not None
    new_q, new_k, new_v = (
        new_like(x.shape, x.stride()) if needed else None for x, needed in ((q, need_q), (k, need_k), (v, need_v))
    )
    stores_bias = bool(kind != NO_DBIAS) and not sums_keys and bias is not None
    new_bias = new_like(bias.shape, bias.stride()) if stores_bias and bias is not None else None
    add = plan_sum(slots, bias) if stores_bias and slots > 1 and bias is not None else None
    needs_delta, is_query = len(launches) > 1 or reads_delta, made_as == "query"
    sum_sizes, num_heads = (shape.batch, shape.num_heads, shape.seqlen_k), shape.num_heads

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None, sent: SentEntropy = NOTHING_SENT) -> Gradients:
        (q, k, v, mask, bias, sink, _, dropout), _, lse = saved
        dq = None if new_q is None else new_q(q)
        dk = None if new_k is None else new_k(k)
        dv = None if new_v is None else new_v(v)
        made = dbias = delta = None
        if new_bias is not None and bias is not None:
            dbias = new_bias(bias)
            made = empty_slots(slots, dbias)
        elif sums_keys:
            made = torch.empty(sum_sizes, dtype=torch.float32, device=q.device)
        if needs_delta:
            delta = torch.empty((2, *lse.shape), dtype=torch.float32, device=q.device)
        for launch in launches:
            read = (q, k, v, bias, dout, lse, dlse, sent.gradient, *mask_tensors(mask))
            launch(*read, delta, dq, dk, dv, made, sink, dropout)
        if add is not None:
            add(made, dbias)
        if sink is None and not (sums_keys or is_query):
            return dq, dk, dv, dbias
        row_delta = None if delta is None else delta_of_sink(delta[0], sent.gradient, sink, lse)
        if bias is not None and sums_keys:
            dbias = key_gradient(bias, made, num_heads, repeat)
        elif bias is not None and is_query:
            dbias = query_gradient(bias, sent.own(dlse), lse, num_heads, repeat, sink, row_delta)
        if sink is None:
            return dq, dk, dv, dbias
        return dq, dk, dv, dbias, sink_gradient(sink, lse, row_delta) if need_sink and row_delta is not None else None

    return run
