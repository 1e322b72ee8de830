"""The launch plan of a forward pass in forward mode, of calls with and without sequences, and its entry point."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flash_dmattn.problem import Flags, MaskView, SequenceView
from flash_dmattn.reference.tangents import Tangents

from . import launch
from .kernel_launch import on_device
from .plan import Call, read_of, row_strides
from .plan_sequences import SequenceCall
from .tangents import tangents_kernel
from .tile_ops import LOG2E, NO_BIAS
from .tile_table import tangents_tile

# The first tangent among the arguments of the kernel; those of q, k, v and the bias follow each other as these do.
_FIRST_TANGENT = 4


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    sink: Tensor | None,
    tangents: Tangents,
    results: tuple[Tensor, ...],
    flags: Flags,
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> None:
    """Write out, lse and their tangents, all contiguous; with sequences the rows of some sequence."""
    q, k, v = (launch.unit_rows(x) for x in (q, k, v))
    tq, tk, tv = (None if x is None else launch.unit_rows(x.to(q.dtype)) for x in tangents[:3])
    sink, tsink = (None if x is None else x.contiguous() for x in (sink, tangents.sink))
    own = Tangents(tq, tk, tv, tangents.bias, tsink)
    located = () if sequences is None else tuple(sequences)
    with on_device(q):
        tensors = (q, k, v, bias, sink, *own, dropout, *located, *mask.tensors)
        key = ("tangents", mask.form, flags, *launch.signature(*tensors))
        plan = launch.plans.find(key, lambda: plan_tangents(q, k, v, mask, bias, sink, own, flags, sequences))
        where = (None, None) if sequences is None else tuple(sequences)
        plan(q, k, v, bias, *own[:4], *read_of(mask), *results, sink, tsink, *where, dropout)


def plan_tangents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    sink: Tensor | None,
    tangents: Tangents,
    flags: Flags,
    sequences: SequenceView | None,
) -> Callable[..., None]:
    """Plan one launch for a class of calls; it takes the tensors of the kernel, in their order."""

    def call_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Call:
        if sequences is None:
            return launch.Call(q, k, v, mask, bias, flags, sink)
        return SequenceCall(q, k, v, mask, bias, flags, sink, sequences)

    # The tangents are described as a call of their own, in which the inputs stand in for those that are not there.
    tq, tk, tv, tbias, _ = tangents
    call = call_of(q, k, v, bias)
    own = call_of(*(x if t is None else t for x, t in ((q, tq), (k, tk), (v, tv))), tbias)
    shape, tile = call.shape, tangents_tile(q.dtype, max(call.block_d, call.block_dv), call.arch)
    tiles, search = call.tiles_of_queries(tile.block_m)
    tma, bias_tma, descriptors = call.key_descriptors(tile)
    own_tma, tbias_tma, own_descriptors = own.key_descriptors(tile)
    if not (tma and own_tma):
        tma = bias_tma = tbias_tma = False
        descriptors = own_descriptors = []
    present = tuple(x is not None for x in tangents)
    own_descriptors = [x._replace(slot=x.slot + _FIRST_TANGENT) for x in own_descriptors if present[x.slot]]
    return call.launch(
        tangents_kernel,
        tiles * shape.num_heads,
        tile,
        [*descriptors, *own_descriptors],
        **row_strides(tq=own.q, tk=own.k, tv=own.v),
        bias_strides=call.bias_strides(bias_tma),
        tbias_strides=own.bias_strides(tbias_tma),
        scale=abs(call.scale_log2),
        tangent_scale=abs(flags.softmax_scale) * LOG2E.value,
        TBIAS=NO_BIAS.value if tbias is None else own.bias_kind,
        TMA=tma,
        BIAS_TMA=bias_tma,
        TBIAS_TMA=tbias_tma,
        WIDE=call.wide(call.k, call.v) or own.wide(own.k, own.v),
        NEGATIVE=flags.softmax_scale < 0,
        EDGES=call.edges(shape.seqlen_k % tile.block_n),
        STAGES=tile.num_stages,
        HAS_SINK=sink is not None,
        HAS_TQ=present[0],
        HAS_TK=present[1],
        HAS_TV=present[2],
        HAS_TSINK=present[4],
        SEARCH=search,
        PAGE=max(1, k.shape[1]) if flags.layout.startswith("paged") else 0,
    )
