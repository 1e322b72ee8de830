"""The launch plan of a forward pass: one kernel, or with split-KV a kernel for shares of the keys and a combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from flash_dmattn.problem.inputs import Inputs

from .bias_forms import ROW_BIAS, has_flat_blocks
from .forward import forward_kernel
from .forward_combine import combine_kernel, fold_kernel
from .kernel_launch import Launch, by_name
from .plan import LEAST_TO_PACK, LEAST_TO_PACK_FORWARD, NO_ROWS, Call, num_kv_splits, read_of, rows_of_flags
from .plan_packed import plan_pieces
from .tile_ops import DENSE, KEYS, TILES, Shape
from .tile_table import Tile

# With few rows, a share of the keys has at least LEAST_BLOCKS blocks, and a head at most MOST_SHARES shares.
LEAST_BLOCKS, MOST_SHARES = 2, 64
_LISTS = (KEYS.value, TILES.value)
EDGES = (DENSE.value, TILES.value)  # in an ascending walk, all blocks of these masks are at an edge
_NOWHERE = (None, None)  # bounds and page table of a call without sequences
# The combine kernel: values of parts for each thread, most warps, and most values that a program loads at once.
VALUES_OF_THREAD, COMBINE_WARPS, COMBINE_VALUES = 32, 4, 8192
# Keys of a span, a number of whole tiles, and the most bytes of the sums of spans: docs/invariance.md. Another number
# is another arithmetic: all calls of a release have one.
SPAN, MAX_SPANS_BYTES = 2048, 2**28


def plan_forward(call: Call) -> Callable[..., None]:
    """Plan the results of one class of calls: run(x, out, lse, *rows)."""
    least = LEAST_TO_PACK if max(call.block_d, call.block_dv) <= 32 else LEAST_TO_PACK_FORWARD
    call.packed = frozenset(("k", "v") if call.packs_pieces(least) else ())
    shape, tile = call.shape, call.tile("forward")
    few = call.has_few_rows
    parts = call.column_parts(tile)
    tma, bias_tma, descriptors = (False, False, []) if few else call.key_descriptors(tile, parts)
    rows_tma = tma and call.has_wide_heads and call.tma(call.q)
    if rows_tma:
        descriptors.append(call.rows_descriptor(0, call.q, tile.block_m, call.block_d))
    programs = triton.cdiv(shape.seqlen_q, tile.block_m) * shape.batch * shape.num_heads
    blocks = triton.cdiv(shape.seqlen_k, tile.block_n)
    splits = num_kv_splits(programs, blocks, call.num_sms)
    if few:  # two programs to an SM if a program has to read the places of keys before the keys
        splits = num_key_shares(programs, blocks, call.num_sms * (2 if call.mask_kind in _LISTS else 1))
    edges = call.edges(shape.seqlen_k % tile.block_n)
    one_loop = few and edges and call.mask_kind != TILES.value
    if call.invariant:
        splits, one_loop = num_spans(call, programs, shape), call.mask_kind in EDGES
    launch = call.launch(
        forward_kernel,
        programs * splits * parts,
        tile,
        descriptors,
        **forward_values(call, tile, splits),
        bias_strides=call.bias_strides(bias_tma),
        TMA=tma,
        ROWS_TMA=rows_tma,
        BIAS_TMA=bias_tma,
        EDGES=edges,
        PAGE=0,
        GROUPED=False,
        ONE_LOOP=one_loop,
        FLAT=not (one_loop or call.invariant) and has_flat_blocks(call.bias_kind, call.mask_kind),
    )
    return run_in_shares(call, launch, shape, splits)


def run_in_shares(
    call: Call, launch: Launch, shape: Shape, splits: int, fill: Launch | None = None
) -> Callable[..., None]:
    """Plan what follows the forward kernel: it combines shares of the keys, to out of this shape.

    Then it fills rows of no sequence.
    """
    combine, is_fold = None, call.invariant
    if splits > 1:
        plan = plan_fold if is_fold else plan_combine
        combine = plan(call.values(), shape, splits, call.has_sink, call.overlaps)
    flags = call.flags
    pack = plan_pieces(call.precision, call.k, call.v) if call.packed else None

    def run(x: Inputs, out: Tensor, lse: Tensor, *rows: Tensor) -> None:
        asked = own = rows_of_flags(flags, rows) if rows else NO_ROWS
        made: tuple[Any, ...] = (out, lse, x.sink)
        if combine is not None:
            made, own = (*empty_parts(splits, out, lse), None), parts_of_rows(splits, asked)
        if combine is not None and is_fold:
            tops, sums = torch.empty((2, splits, *lse.shape), dtype=torch.float32, device=out.device)
            made, own = (made[0], tops, None), (sums, None)
        k, v = (x.k, x.v) if pack is None else pack(x.k, x.v)
        launch(x.q, k, v, x.bias, *read_of(x.mask), *made, *(x.sequences or _NOWHERE), x.dropout, *own)
        if combine is not None and is_fold:
            combine(*made[:2], own[0], out, lse, x.sink)
        elif combine is not None:
            combine(*made[:2], *own, out, lse, *asked, x.sink)
        if fill is not None and x.sequences is not None:
            fill(out, lse, x.sequences.bounds)
            if combine is not None:  # it has joined shares of rows that no program wrote
                for row, value in zip(asked, (-torch.inf, 0.0), strict=True):
                    if row is not None:
                        row.masked_fill_(lse == -torch.inf, value)

    return run


def forward_values(call: Call, tile: Tile, splits: int) -> dict[str, Any]:
    """Name the arguments that the forward kernel takes both with and without sequences."""
    return {
        "scale": abs(call.score_scale),
        "splits": splits,
        "WIDE": call.wide(call.k, call.v),
        "SPLIT_KEYS": splits > 1,
        "NEGATIVE": call.flags.softmax_scale < 0,
        "STAGES": tile.num_stages,
        "EDGE_STAGES": tile.edge_stages or tile.num_stages,
        "HAS_SINK": call.has_sink and splits == 1,
        "OVERLAP": call.overlaps and splits > 1,
        "COLUMN_PARTS": call.column_parts(tile),
        "BLOCK_DV": call.block_dv // call.column_parts(tile),
        "SPAN": SPAN if call.invariant else 0,
    }


def num_spans(call: Call, programs: int, shape: Shape) -> int:
    """Return the spans of a call if each gets programs of its own, else 1; no bit depends on it.

    `programs` counts the programs of all queries, `shape` has all rows.
    """
    spans = triton.cdiv(call.shape.seqlen_k, SPAN)
    size = spans * shape.batch * shape.seqlen_q * shape.num_heads * (shape.head_dim_v + 2) * 4
    return spans if programs < call.num_sms and size <= MAX_SPANS_BYTES else 1


def num_key_shares(heads: int, blocks: int, most_programs: int) -> int:
    """Return how many programs share the keys of each head with few rows; shares are as equal as blocks allow."""
    shares = max(1, min(most_programs // heads, blocks // LEAST_BLOCKS, MOST_SHARES))
    return triton.cdiv(blocks, triton.cdiv(blocks, shares))


def plan_combine(values: dict[str, Any], shape: Shape, splits: int, has_sink: bool, overlaps: bool) -> Launch:
    """Plan the kernel that adds the shares of out, of this shape, and a sink.

    It is run(parts, parts_lse, parts_largest, parts_entropy, out, lse, largest, entropy, sink).
    """
    rows = shape.batch * shape.num_heads * shape.seqlen_q
    shares = triton.next_power_of_2(splits)
    num_warps = max(1, min(COMBINE_WARPS, shares * values["BLOCK_DV"] // (32 * VALUES_OF_THREAD)))
    at_once = min(shares, COMBINE_VALUES // values["BLOCK_DV"])
    rest = by_name(
        combine_kernel,
        values,
        shape=shape,
        splits=splits,
        num_rows=rows,
        SPLITS=shares,
        AT_ONCE=at_once,
        HAS_SINK=has_sink,
        OVERLAP=overlaps,
    )
    options = {"num_warps": num_warps, **({"launch_pdl": True} if overlaps else {})}
    return Launch(combine_kernel, rows, rest, options)


def plan_fold(values: dict[str, Any], shape: Shape, splits: int, has_sink: bool, overlaps: bool) -> Launch:
    """Plan the kernel that folds spans of out, of this shape: run(parts, tops, sums, out, lse, sink)."""
    rows = shape.batch * shape.num_heads * shape.seqlen_q
    rest = by_name(
        fold_kernel,
        values,
        shape=shape,
        splits=splits,
        num_rows=rows,
        BIASED=values["BIAS"] > ROW_BIAS.value,
        HAS_SINK=has_sink,
        OVERLAP=overlaps,
    )
    return Launch(fold_kernel, rows, rest, {"num_warps": 1, **({"launch_pdl": True} if overlaps else {})})


def parts_of_rows(splits: int, rows: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Allocate the largest scores and the entropies of each share of the keys, where they are asked for."""
    return tuple([None if x is None else torch.empty((splits, *x.shape), dtype=x.dtype, device=x.device) for x in rows])


def empty_parts(splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate out, in fp32, and lse of each share of the keys."""
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    return parts, torch.empty((splits, *lse.shape), dtype=lse.dtype, device=out.device)
