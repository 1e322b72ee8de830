"""The launch plan of a forward pass in forward mode, of calls with and without sequences, and its entry point."""

from __future__ import annotations

import math

from torch import Tensor

from flash_dmattn.problem import Flags
from flash_dmattn.problem.inputs import Inputs
from flash_dmattn.reference.tangents import Tangents

from . import launch
from .kernel_launch import Launch, on_device
from .plan import Call, read_of, row_strides
from .precision import unsplit_precision
from .tangents import tangents_kernel
from .tile_table import READ_BY_SCORE, Tile, tangents_tile

# The place of tq among the kernel's arguments; tk, tv and the tangent of the bias follow.
_FIRST_TANGENT = 4


def forward(x: Inputs, tangents: Tangents, results: tuple[Tensor, ...], flags: Flags) -> None:
    """Write out, lse and their tangents, all contiguous; with sequences the rows of some sequence."""
    x = launch.readable(x)
    tq, tk, tv = (None if t is None else launch.unit_rows(t) for t in tangents[:3])
    own = Tangents(tq, tk, tv, tangents.bias, None if tangents.sink is None else tangents.sink.contiguous())
    bounds, table = (None, None) if x.sequences is None else x.sequences
    with on_device(x.q):
        key = ("tangents", x.mask.form, flags, *launch.signature(*launch.tensors_of(x), *own))
        plan = launch.plans.get_or_make(key, lambda: plan_tangents(x, own, flags))
        read = read_of(x.mask)
        plan(x.q, x.k, x.v, x.bias, *own[:4], *read, *results, x.sink, own.sink, bounds, table, x.dropout)


def plan_tangents(x: Inputs, tangents: Tangents, flags: Flags) -> Launch:
    """Plan the launch of one class of calls; it takes the tensors of the kernel, in their order."""
    # The tangents are described as a call of their own. A missing tangent is described by its input.
    q, k, v = (primal if t is None else t for primal, t in zip(x[:3], tangents[:3], strict=True))
    call = launch.planned_call(x, flags)
    own = launch.planned_call(x._replace(q=q, k=k, v=v, bias=tangents.bias), flags)
    block_d, by_pointers = max(call.block_d, call.block_dv), _reads_scores_by_pointers(call, own)
    shape, tile = call.shape, tangents_tile(x.q.dtype, block_d, call.arch, by_pointers)
    tiles, search = call.tiles_of_queries(tile.block_m)
    parts = column_parts(call, tile)
    tma, bias_tma, descriptors = call.key_descriptors(tile, parts)
    own_tma, tbias_tma, own_descriptors = own.key_descriptors(tile, parts)
    if not (tma and own_tma):
        tma = bias_tma = tbias_tma = False
        descriptors = own_descriptors = []
    present = tuple(t is not None for t in tangents)
    own_descriptors = [d._replace(slot=d.slot + _FIRST_TANGENT) for d in own_descriptors if present[d.slot]]
    return call.launch(
        tangents_kernel,
        tiles * shape.num_heads * parts,
        tile,
        [*descriptors, *own_descriptors],
        **row_strides(tq=own.q, tk=own.k, tv=own.v),
        bias_strides=call.bias_strides(bias_tma),
        tbias_strides=own.bias_strides(tbias_tma),
        scale=abs(call.score_scale),
        tangent_scale=abs(flags.softmax_scale),
        TBIAS=own.bias_kind,
        TMA=tma,
        BIAS_TMA=bias_tma,
        TBIAS_TMA=tbias_tma,
        WIDE=call.wide(call.k, call.v) or own.wide(own.k, own.v),
        NEGATIVE=flags.softmax_scale < 0,
        EDGES=call.edges(shape.seqlen_k % tile.block_n),
        STAGES=tile.num_stages,
        PRECISION=unsplit_precision(x.q.dtype, call.arch, call.allows_tf32),  # this kernel makes no pieces
        HAS_SINK=call.has_sink,
        HAS_TQ=present[0],
        HAS_TK=present[1],
        HAS_TV=present[2],
        HAS_TSINK=present[4],
        SEARCH=search,
        SIDE_BY_SIDE=entries_side_by_side(call),
        COLUMN_PARTS=parts,
        BLOCK_DV=call.block_dv // parts,
        PAGE=0 if flags.sequences is None or not flags.sequences.has_pages else max(1, x.k.shape[1]),
    )


def column_parts(call: Call, tile: Tile) -> int:
    """Return how many programs share the columns of v and of out: a thread has room for 128 sums of both."""
    return max(1, 2 * tile.block_m * call.block_dv // (128 * 32 * tile.num_warps))


def entries_side_by_side(call: Call) -> int:
    """Return how many entries of the batch read one tile of a shared bias at a time; it divides the batch.

    At most 4, because their keys have to stay in L2.
    """
    is_shared = call.bias_kind in READ_BY_SCORE and call.bias is not None and call.bias.shape[0] == 1
    return math.gcd(call.shape.batch, 4) if is_shared and call.flags.sequences is None else 1


def _reads_scores_by_pointers(*calls: Call) -> bool:
    """Return whether some bias of one value per score is not loaded by TMA, or has 32 bits."""
    biased = [call for call in calls if call.bias_kind in READ_BY_SCORE]
    if not biased:
        return False
    if not all(call.tma(call.k, call.v) for call in calls):
        return True
    return not all(call.bias_tma() and call.bias is not None and call.bias.element_size() == 2 for call in biased)
