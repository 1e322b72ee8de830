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
from .tile_ops import KEYS, NO_SEQUENCES, TILES, Shape

# A share of the keys of few rows has at least so many blocks, and a call at most so many shares.
LEAST_BLOCKS, MOST_SHARES = 2, 64
_LISTS = (KEYS.value, TILES.value)
# Values of parts for each thread of the kernel that combines them, as far as its most warps reach, and those at once.
VALUES_OF_THREAD, COMBINE_WARPS, COMBINE_VALUES = 32, 4, 8192


def plan_forward(call: Call) -> Callable[..., None]:
    """How a class of calls makes out and lse: run(q, k, v, mask, bias, sink, out, lse, dropout)."""
    shape, flags, tile = call.shape, call.flags, call.tile("forward")
    few = call.has_few_rows
    tma, bias_tma, descriptors = (False, False, []) if few else call.key_descriptors(tile)
    programs = triton.cdiv(shape.seqlen_q, tile.block_m) * shape.batch * shape.num_heads
    blocks = triton.cdiv(shape.seqlen_k, tile.block_n)
    splits = num_kv_splits(programs, blocks, call.num_sms)
    if few:  # two to an SM where places of keys are read before they are
        splits = num_key_shares(programs, blocks, call.num_sms * (2 if call.mask_kind in _LISTS else 1))
    edges = call.edges(shape.seqlen_k % tile.block_n)
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
        edges,
        tile.num_stages,
        tile.edge_stages or tile.num_stages,
        call.has_sink and splits == 1,
        NO_SEQUENCES.value,
        *(False, 0, False),
        call.has_dropout,
        call.heads_first,
        few and edges and call.mask_kind != TILES.value,
        call.overlaps and splits > 1,
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


def num_key_shares(heads: int, blocks: int, most_programs: int) -> int:
    """Among how many programs to share the keys of few rows of each head, none with more blocks than it must."""
    shares = max(1, min(most_programs // heads, blocks // LEAST_BLOCKS, MOST_SHARES))
    return triton.cdiv(blocks, triton.cdiv(blocks, shares))


def plan_combine(call: Call, shape: Shape, splits: int) -> Launch:
    """What joins the shares of the keys: run(parts, parts_lse, out, lse, sink), with out and lse of a shape."""
    rows = shape.batch * shape.num_heads * shape.seqlen_q
    shares = triton.next_power_of_2(splits)
    num_warps = max(1, min(COMBINE_WARPS, shares * call.block_dv // (32 * VALUES_OF_THREAD)))
    at_once = min(shares, COMBINE_VALUES // call.block_dv)
    constants = (call.block_dv, shares, at_once, call.has_sink, call.heads_first, call.overlaps)
    options = {"num_warps": num_warps, **({"launch_pdl": True} if call.overlaps else {})}
    return Launch(combine_kernel, rows, (shape, splits, rows, *call.sink_strides), constants, options)


def empty_parts(splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Room for out and lse of each share of the keys, in fp32."""
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    return parts, torch.empty((splits, *lse.shape), dtype=torch.float32, device=out.device)
