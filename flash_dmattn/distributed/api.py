"""`context_parallel_attention`: one call whose sequence is sharded over the ranks of a group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NoReturn, TypedDict, cast, overload

import torch
from torch import Tensor

from ..biases import Bias, Relative
from ..call import prepare_call, run_call
from ..dispatch.config import BackendChoice
from ..dispatch.selection import Selection
from ..masks.arguments import integer
from ..problem import RawFlags, check_tensor, dtype_name, refuse_keywords
from ..reference.dropout import draw_key, key_of_part
from ..sequences import Sequences
from .call import ParallelCall, Request, Strategy, choose_backends
from .documents import NO_SPANS, rows_outside
from .exchange import Route, gather_keys, share_key, sum_dtype, sum_gradient
from .group import Group, Members, agree, check_layout, groups_of, next_number, refuse_together, size_and_rank
from .layout import SequenceLayout
from .operators import attend_gathered
from .slices import ShardedMask

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ParallelOptions(TypedDict, total=False):
    """Keywords of `context_parallel_attention` that do not decide what it returns, for the overloads below."""

    layout_k: SequenceLayout | None
    strategy: Strategy
    reduce_bias_grad: bool
    exchange_dtype: torch.dtype | None
    head_groups: int | None
    is_causal: bool
    softmax_scale: float | None
    softcap: float
    window_size: tuple[int, int] | None
    deterministic: bool | None
    backend: BackendChoice
    sink: Tensor | None
    sequences: Sequences | None
    dropout_p: float


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None = None,
    bias: Bias | None = None,
    *,
    group: Group,
    layout: SequenceLayout,
    return_lse: Literal[False] = False,
    **options: Unpack[ParallelOptions],
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None = None,
    bias: Bias | None = None,
    *,
    group: Group,
    layout: SequenceLayout,
    return_lse: Literal[True],
    **options: Unpack[ParallelOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None = None,
    bias: Bias | None = None,
    *,
    group: Group,
    layout: SequenceLayout,
    return_lse: bool = False,
    **options: Unpack[ParallelOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None = None,
    bias: Bias | None = None,
    *,
    group: Group,
    layout: SequenceLayout,
    layout_k: SequenceLayout | None = None,
    strategy: Strategy = "auto",
    reduce_bias_grad: bool = False,
    exchange_dtype: torch.dtype | None = None,
    head_groups: int | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: BackendChoice = "auto",
    sink: Tensor | None = None,
    sequences: Sequences | None = None,
    dropout_p: float = 0.0,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` of one sequence whose positions are sharded over the ranks of a group.

    Equivalent to, with W ranks and the tensors of the whole sequence on each::

        out = flash_dmattn.attention(whole_q, whole_k, whole_v, whole_mask, whole_bias, **keywords)
        out = layout.shard(out, 1, rank)

    Every rank calls it at the same time with its own rows, and gets its own rows of the result. Gradients belong to the
    sum of the losses of all ranks. Lq and Lk are lengths of the whole sequence; other sizes are as in `attention`.

    Args:
        q: (B, Lq / W, Hq, D), the rows that `layout` gives this rank, `layout.shard(whole_q, 1, rank)`.
        k: (B, Lk / W, Hk, D), the rows of `layout_k`.
        v: (B, Lk / W, Hk, Dv).
        mask: bool, read from the right as (B, H, i, j): i is 1, one row for all queries, or Lq / W, the rows of this
            rank; j is 1, Lk in global order, or with i = 1 also Lk / W, sharded as the keys. Or a `ShardedMask`, for
            any number of calls. Rows of masks are never sent.
        bias: of the same shapes, any float dtype. Its gradient has its shape, and is complete if the bias has rows of
            this rank, or is sharded by keys. The gradient of a replicated bias is partial, from the rows of each rank,
            as for any weight: DDP and FSDP sum it over ranks, and so does `reduce_bias_grad`. Or a `biases.Relative` of
            the whole call, replicated; or a `biases.Band` whose values have the rows of this rank, (*batch, H, Lq / W,
            n); or, with lists, a `biases.ListBias` whose values have the lists of this rank.
        group: a `ProcessGroup`, or a `DeviceMesh` of one dim; or of two, (outer, inner): heads are traded for positions
            over the inner dim, keys gathered over the outer one. `layout` counts all ranks, the inner dim first. Masks
            and biases have the rows that an inner group has together, of `layout.joined(inner size)[0]`: (B, H, Lq /
            outer size, ·). The gradient of a bias is then the sum over this rank's heads.
        layout: of the queries, and of the keys if `layout_k` is None.
        layout_k: of the keys.
        strategy: "gather" gathers keys and values, under a window only the ones that a rank needs; rows of masks and
            biases are not sent. "ulysses" trades heads for positions; it is for calls without rows of masks or biases,
            whose number of heads is a multiple of the ranks. "auto" selects the one that sends fewer bytes.
        reduce_bias_grad: sum gradients of a bias with i = 1 or of a `Relative`, and of the sink, over the ranks here,
            in their order.
        exchange_dtype: in which gradients of k and v are sent, their own by default; torch.float32 rounds them later.
        head_groups: the number of groups of key-value heads for "gather", None for 1. A group is sent while the one
            before it is computed. More groups need less memory, and more time.
        is_causal, softmax_scale, softcap, window_size, deterministic, return_lse, backend: as in `attention`, of the
            whole call.
        sink: (Hq,), as in `attention`, the same on every rank; its gradient is that of this rank's rows.
        sequences: the same on every rank; a `Relative` covers the longest one. Of `Sequences.packed`, with all
            positions: the documents of the sequence. q, k and v are packed then, (L / W, Hq or Hk, D or Dv); as in
            `attention`, out is (L / W, Hq, Dv) and lse (Hq, L / W). Each query attends to its own document. There can
            be no other mask; a bias is (H, 1, L), (H, 1, L / W), (H, L / W, 1), or one by distance. Where keys are
            gathered without dropout, a NaN in v of one document may reach others in the same slice. Or of
            `Sequences.padded`: the used positions of each entry of the batch, at the front of all Lq and Lk. Causality,
            windows and distances count from the end of each entry, and padding is not read. Any bias goes with them,
            and a bool tensor as the mask.
        dropout_p: as in `attention`. Each rank draws from its generator, and what rank 0 draws counts for all, so that
            one GPU in its state drops the same, also with sequences. With a `ShardedMask` each interval of the layout
            begins at a multiple of 16; one of documents is refused.

    Returns:
        out (B, Lq / W, Hq, Dv), or with `return_lse` a tuple of it and lse (B, Hq, Lq / W), both as in `attention`.
        Results are bitwise reproducible for a given number of ranks if the backend is.

    Raises:
        TypeError, ValueError: an argument is wrong on some rank, or ranks differ. All ranks raise the same error, in
            every call and backward pass; it names the ranks and what each has.
        BackendUnsupportedError, BackendUnavailableError: as in `attention`; one pair of backends runs on all ranks.
        NotImplementedError: on a second derivative, which only "ulysses" with `backend="eager"` has.

    Gathered keys: Llama Team, The Llama 3 herd of models (2024). Traded heads: Jacobs et al., DeepSpeed Ulysses (2023).
    Chunks in zigzag: Brandon et al., Striped attention (2023), and ring-flash-attention.

    >>> import torch, torch.distributed as dist
    >>> from flash_dmattn.distributed import SequenceLayout, context_parallel_attention
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more of them
    >>> layout = SequenceLayout.zigzag(16, dist.get_world_size())
    >>> q, k, v = torch.randn(3, 1, layout.local_length, 4, 8)
    >>> context_parallel_attention(q, k, v, group=dist.group.WORLD, layout=layout, is_causal=True).shape
    torch.Size([1, 16, 4, 8])
    >>> dist.destroy_process_group()
    """
    if unknown:
        refuse_keywords(context_parallel_attention, unknown)
    groups = groups_of(group)
    raw_flags = RawFlags(is_causal, softmax_scale, softcap, window_size, deterministic, return_lse, dropout_p=dropout_p)
    is_compiling = torch.compiler.is_compiling()
    options = (strategy, head_groups, reduce_bias_grad, exchange_dtype, raw_flags, sequences)
    number = 0 if is_compiling else next_number(groups)
    request = Request(q, k, v, mask, bias, sink, groups, layout, layout_k, *options, number)
    if is_compiling:
        # A refusal is raised only on this rank, because ranks cannot communicate while a graph is traced.
        call = request.describe()
        pair = choose_backends(call, backend)
    else:
        call, pair = _prepare_together(request, backend)
    dropout = _dropout_key(call, groups)
    q, k, v = call.request[:3] if call.trade is None else call.trade.to_heads(*call.request[:3])
    mask, bias, sink = _read_tensors(call)
    if call.trade is not None and call.strategy == "ulysses":
        heads = call.trade.heads
        bias = None if bias is None else heads.cut(bias)
        own_mask = heads.cut(mask) if isinstance(mask, Tensor) else None
        flags, own_sequences = call.problem.flags, call.all_sequences
        is_packed = own_sequences is not None and own_sequences.layout == "packed"
        if is_packed:
            q, k, v = (x.squeeze(0) for x in (q, k, v))
            bias = None if bias is None else bias.squeeze(0)
        added = Relative(bias.squeeze(-2), flags.zero, flags.outside) if bias is not None and flags.outside else bias
        sink = None if sink is None else sink[heads.of(call.problem.num_heads)]
        own = prepare_call(q, k, v, own_mask, added, sink, own_sequences, raw_flags._replace(return_lse=True))
        out, lse = (x.unsqueeze(0) if is_packed else x for x in run_call(own, backend, dropout))
    else:
        out, lse = attend_gathered(call, pair, q, k, v, mask, bias, sink, dropout)
    rows = (out, lse) if call.trade is None else call.trade.to_rows(out, lse if return_lse else None)
    is_packed = sequences is not None and sequences.layout == "packed"
    out = rows[0].squeeze(0) if is_packed else rows[0]
    if not return_lse or rows[1] is None:
        return out
    lse = rows[1]
    if sequences is not None and call.spans.kind == "masked" and sink is not None:
        # Rows of no sequence have no sink.
        outside = rows_outside(sequences, call.spans.bounds, layout, size_and_rank(groups)[1], lse.device)
        lse = lse if outside is None else lse.masked_fill(outside, -math.inf)
    return out, lse.squeeze(0) if is_packed else lse


def gather_sequence(x: Tensor, dim: int, *, group: Group, layout: SequenceLayout) -> Tensor:
    """Gather a tensor whose positions are sharded over ranks, such as the keys of a selector; differentiable.

    Every rank calls it at the same time, and has to run its backward pass too. Equivalent to, without its gradient::

        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        whole = layout.unshard(parts, dim)

    The gradient of x is the sum of the gradients of all ranks for its rows, in fp32 and in the order of ranks.

    Args:
        x: any shape, any dtype that is not complex; `layout.local_length` along `dim`.
        dim: of the positions.
        group: a `ProcessGroup`, or a `DeviceMesh` of one dim.
        layout: the positions of each rank.

    Returns:
        The tensor of the whole sequence, `layout.length` along `dim`.

    Raises:
        TypeError, ValueError: an argument is wrong on some rank, or ranks differ; all ranks raise the same error.

    >>> import torch, torch.distributed as dist
    >>> from flash_dmattn.distributed import SequenceLayout, gather_sequence
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layout = SequenceLayout.zigzag(16, 1)
    >>> gather_sequence(torch.randn(2, layout.local_length, 8), 1, group=dist.group.WORLD, layout=layout).shape
    torch.Size([2, 16, 8])
    >>> dist.destroy_process_group()
    """
    groups = groups_of(group)
    is_compiling = torch.compiler.is_compiling()
    number = 0 if is_compiling else next_number(groups)
    try:
        members, *others = groups
        if others:
            raise ValueError("group is a mesh of 2 dims; gather_sequence needs one: take it by name, mesh['cp']")
        check_layout(layout, members.size)
        check_tensor("x", x)
        dim = integer("dim", dim, -x.dim())
        if x.is_complex():
            raise TypeError(f"x has dtype {dtype_name(x.dtype)}; it needs a real one: torch.view_as_real(x) has two")
        if dim >= x.dim() or x.shape[dim] != layout.local_length:
            raise ValueError(
                f"x has shape {tuple(x.shape)} and dim is {dim}, which needs the {layout.local_length} positions of "
                "a rank"
            )
    except Exception as error:
        refuse_together(groups, error)
    if not is_compiling:
        words = {"gathered": f"{dtype_name(x.dtype)} {tuple(x.shape)}", "dim": dim % x.dim(), "layout": layout}
        agree(groups, (*((name, str(value)) for name, value in words.items()), ("requires_grad", str(x.requires_grad))))
    flat = layout.flat
    route = Route(members.name, members.rank, flat, flat, *NO_SPANS, -1, -1, False, number)
    return gather_keys(x.movedim(dim, -1), route).movedim(-1, dim)


@torch._disable_dynamo  # if a graph breaks around a call, this must not be compiled separately
def _prepare_together(request: Request, backend: BackendChoice) -> tuple[ParallelCall, Selection]:
    """Prepare the call on every rank, or raise the error of one rank on all of them."""
    try:
        call = request.describe()
        pair = choose_backends(call, backend)
        shared = call.shared(pair)
    except Exception as error:  # any exception, because the other ranks wait for this one
        refuse_together(request.groups, error)
    agree(request.groups, shared)
    return call, pair


def _dropout_key(call: ParallelCall, groups: tuple[Members, ...]) -> Tensor | None:
    """Return the dropout key of all ranks, at the first head of this rank; None without dropout."""
    if call.problem.dropout_p == 0:
        return None
    q = call.request.q
    key = share_key(draw_key(q.device), call.problem.dropout_p, groups, call.request.number)
    return key if call.trade is None else key_of_part(key, head=call.trade.heads.of(q.shape[2]).start)


def _read_tensors(call: ParallelCall) -> tuple[Tensor | ShardedMask | None, Tensor | None, Tensor | None]:
    """Return mask, bias and sink for the slices: with all keys, in fp32 if their gradient is a sum."""
    mask, bias, sink, needs = call.mask, call.bias, call.sink, call.problem.needs_grad
    reduces, number = call.request.reduce_bias_grad, call.request.number
    if call.mask_needs_keys:
        mask = gather_keys(cast(Tensor, mask), call.route)
    if bias is not None and call.sums_bias and needs.bias:
        bias = bias.to(sum_dtype(bias.dtype))
    if bias is not None and call.shares_bias:
        if call.bias_needs_keys:
            bias = gather_keys(bias, call.route)
        elif needs.bias and reduces:
            bias = sum_gradient(bias, call.members, number)
    if sink is not None and needs.sink:
        sink = sink.to(sum_dtype(sink.dtype))
        sink = sum_gradient(sink, call.members, number) if reduces else sink
    return mask, bias, sink
