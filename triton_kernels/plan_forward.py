"""The plan of a forward pass: one kernel, or one for shares of the keys and one that combines them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from flash_dmattn.problem import MaskView

from .forward import forward_kernel
from .forward_combine import combine_kernel
from .kernel_launch import Launch
from .plan import Call, num_kv_splits, read_of, row_strides
from .tile_ops import NO_SEQUENCES, Shape


def plan_forward(call: Call) -> Callable[..., None]:
    """How a class of calls makes out and lse: run(q, k, v, mask, bias, sink, out, lse, dropout)."""
    shape, flags, tile = call.shape, call.flags, call.tile("forward")
    tma, bias_tma, descriptors = call.key_descriptors(tile)
    programs = triton.cdiv(shape.seqlen_q, tile.block_m) * shape.batch * shape.num_heads
    splits = num_kv_splits(programs, triton.cdiv(shape.seqlen_k, tile.block_n), call.num_sms)
    strides = row_strides(call.q, call.k, call.v)
    numbers = (call.bias_strides(bias_tma), call.mask_strides(), shape, abs(call.scale_log2), flags.softcap, splits)
    numbers = (*numbers, *call.sink_strides, None, call.dropout)
    constants = (
        *call.constants(tile),
        tma,
        bias_tma,
        call.wide(call.k, call.v),
        call.precision,
        splits > 1,
        flags.softmax_scale < 0,
        call.edges(shape.seqlen_k % tile.block_n),
        tile.num_stages,
        tile.edge_stages or tile.num_stages,
        call.has_sink and splits == 1,
        NO_SEQUENCES.value,
        *(False, 0, False),
        call.has_dropout,
    )
    launch = Launch(forward_kernel, programs * splits, (*strides, *numbers), constants, tile.options, descriptors)
    if splits == 1:
        none = (None, None)
        return lambda q, k, v, mask, bias, sink, out, lse, dropout: launch(
            q, k, v, bias, *read_of(mask), out, lse, sink, *none, dropout
        )
    combine = plan_combine(call, shape, splits)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        dropout: Tensor | None,
    ) -> None:
        parts = empty_parts(splits, out, lse)
        launch(q, k, v, bias, *read_of(mask), *parts, None, None, None, dropout)
        combine(*parts, out, lse, sink)

    return run


def plan_combine(call: Call, shape: Shape, splits: int) -> Launch:
    """What joins the shares of the keys: run(parts, parts_lse, out, lse, sink), with out and lse of a shape."""
    rows, block = shape.batch * shape.num_heads * shape.seqlen_q, 16
    sizes, constants = (shape, splits, rows, *call.sink_strides), (block, call.block_dv, call.has_sink)
    return Launch(combine_kernel, triton.cdiv(rows, block), sizes, constants)


def empty_parts(splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Room for out and lse of each share of the keys, in fp32."""
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    return parts, torch.empty((splits, *lse.shape), dtype=torch.float32, device=out.device)
