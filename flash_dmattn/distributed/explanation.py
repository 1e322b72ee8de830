"""`explain_context_parallel`: what a context-parallel call would do on this rank, as a table or a dict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from ..backends.protocol import Backend, Reason
from ..biases import Bias
from ..dispatch.config import fallback
from ..dispatch.profiles import cite
from ..dispatch.registry import BACKENDS
from ..dispatch.selection import BackendError, choice_in_force, falls_back, refuse_fallback, selected_names
from ..explanation import Explanation, Verdict, make_verdict
from ..problem import AttentionProblem, RawFlags, arguments_like, as_scores, dtype_name
from .api import context_parallel_attention
from .call import ParallelCall, Request, find_backends
from .exchange import share_moved, sum_dtype
from .group import Group, groups_of
from .layout import SequenceLayout
from .slices import ShardedMask, Slice

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import ParallelOptions


class Transfer(NamedTuple):
    """Bytes of some collectives of a pass: this rank sends `sent` to other ranks, and receives `received`.

    `what` names the tensors, `how` the collective, "all_gather" or "all_to_all".
    """

    what: str
    how: str
    sent: int
    received: int


@dataclass(frozen=True, repr=False, kw_only=True)
class ParallelExplanation(Explanation):
    """The result of `explain_context_parallel`: an `Explanation` of the rank's rows over all keys; prints as a table.

    Attributes:
        strategy: "gather", "ulysses", or "both" over a mesh of two dims.
        why: the reason for it.
        rank, ranks: this process, and the number of ranks.
        layout, layout_k: of queries and keys, over all ranks.
        slices: the calls that this rank makes, of its rows over runs of all keys.
        forward_traffic, backward_traffic: what it sends and receives in each pass, in order.
        transient_bytes: the approximate peak memory of received tensors.
        remarks: which tensors are not sent, and which gradients are partial.
    """

    strategy: Literal["gather", "ulysses", "both"]
    why: str
    rank: int
    ranks: int
    layout: SequenceLayout
    layout_k: SequenceLayout
    slices: tuple[Slice, ...]
    forward_traffic: tuple[Transfer, ...]
    backward_traffic: tuple[Transfer, ...]
    transient_bytes: int
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for json.dumps."""
        as_they_are = ("strategy", "why", "rank", "ranks", "transient_bytes")
        return {
            **super().to_dict(),
            **{name: getattr(self, name) for name in as_they_are},
            "layout": [list(runs) for runs in self.layout.intervals],
            "layout_k": [list(runs) for runs in self.layout_k.intervals],
            "slices": [part._asdict() for part in self.slices],
            "forward_traffic": [transfer._asdict() for transfer in self.forward_traffic],
            "backward_traffic": [transfer._asdict() for transfer in self.backward_traffic],
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        lines = [
            f"context_parallel_attention, rank {self.rank} of {self.ranks}: {self.problem}",
            f"strategy {self.strategy}: {self.why}",
            f"layout: {_intervals(self.layout, self.rank)} of {self.layout.length} positions",
        ]
        if self.layout_k != self.layout:
            lines.append(f"layout_k: {_intervals(self.layout_k, self.rank)} of {self.layout_k.length} positions")
        lines += ["", *(f"call of {_rows_of(p)}: {_keys_of(p)}" for p in self.slices), ""]
        for name, transfers in (("forward", self.forward_traffic), ("backward", self.backward_traffic)):
            sent, received = sum(x.sent for x in transfers), sum(x.received for x in transfers)
            lines.append(f"{name} sends {_size(sent)}, receives {_size(received)}")
            lines += [f"  {x.what}: {x.how}, {_size(x.sent)} out, {_size(x.received)} in" for x in transfers]
        lines += [f"about {_size(self.transient_bytes)} of memory for what is gathered or traded", ""]
        profile = [] if self.profile is None else [f"profile: {self.profile}"]
        error = [] if self.error is None else self.error.split("\n")[:1]
        return "\n".join([*lines, *self.remarks, self.chosen, *error, *profile, "", *self._table()])

    __repr__ = __str__


def explain_context_parallel(
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
) -> ParallelExplanation:
    """Explain what `context_parallel_attention` would do with these arguments on this rank; sends and computes nothing.

    One rank can call it without the other ranks, because layouts describe all ranks.

    Args:
        q, k, v, mask, bias and the rest: as for `context_parallel_attention`.

    Returns:
        A `ParallelExplanation`: print it, or use its `to_dict()`. If no backend would run the call, its `error` is the
        message.

    Raises:
        TypeError, ValueError: the arguments are invalid, as in `context_parallel_attention`.

    >>> import torch, torch.distributed as dist
    >>> from flash_dmattn.distributed import SequenceLayout, explain_context_parallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v = torch.randn(3, 1, 16, 4, 8)
    >>> layout = SequenceLayout.zigzag(16, 1)
    >>> print(explain_context_parallel(q, k, v, group=dist.group.WORLD, layout=layout, strategy="gather"))
    context_parallel_attention, rank 0 of 1: batch 1, 16 queries x 16 keys, 4 heads, head_dim 8, ...
    strategy gather: it was asked for
    layout: 0:16 of 16 positions
    <BLANKLINE>
    call of rows 0:16: keys 0:16
    ...
    >>> dist.destroy_process_group()
    """
    passed = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "group": group, "layout": layout}
    arguments = arguments_like(
        context_parallel_attention, explain_context_parallel, **passed, return_lse=return_lse, **options
    )
    requested = choice_in_force(arguments.pop("backend"))
    raw_flags = RawFlags(**{name: arguments.pop(name) for name in RawFlags._fields if name in arguments})
    groups = groups_of(arguments.pop("group"))
    call = Request(**arguments, groups=groups, raw_flags=raw_flags, number=0).describe()
    layout_k = call.request.layout_k
    is_traded, members = call.strategy == "ulysses", call.members
    problems = call.problems()
    problem = problems[0] if is_traded else call.problem
    forward = backward = error = None
    try:
        pair = find_backends(call, requested)
        if fallback() == "error" and falls_back(problem, requested, pair):
            refuse_fallback(problem)
        forward, backward = selected_names(problem, pair)
    except BackendError as refusal:
        error = str(refusal)
    chosen, why, rank = call.strategy, call.why, members.rank
    if call.trade is not None and not is_traded:
        inner = call.trade.members
        why = f"a mesh of two dims, {members.size} ranks gather keys and {inner.size} trade heads"
        chosen, rank = "both", members.rank * inner.size + inner.rank
    forward_traffic, backward_traffic = _traffic(call)
    return ParallelExplanation(
        problem,
        requested,
        forward,
        backward,
        error,
        tuple(_verdict(backend, problems, is_traded) for backend in BACKENDS.table.values()),
        cite(problem) if requested == "auto" else None,
        strategy=chosen,  # type: ignore[arg-type]
        why=why,
        rank=rank,
        ranks=layout.world_size,
        layout=layout,
        layout_k=layout if layout_k is None else layout_k,
        slices=call.slices,
        forward_traffic=forward_traffic,
        backward_traffic=backward_traffic,
        transient_bytes=_transient_bytes(call, forward_traffic),
        remarks=tuple(_remarks(call)),
    )


def _verdict(backend: Backend, problems: list[AttentionProblem], is_traded: bool) -> Verdict:
    """Return the verdict of a backend on all slices together."""
    verdicts = [make_verdict(backend, problem) for problem in problems]
    reasons = [reason for verdict in verdicts for reason in verdict.reasons]
    is_pair = is_traded or not backend.is_differentiable
    if not is_pair:
        text = "it is one differentiable function; gathered keys need a forward/backward pair"
        reasons.insert(0, Reason(backend.name, "composite", text))
    return Verdict(
        backend.name,
        is_pair and all(verdict.forward for verdict in verdicts),
        None if verdicts[0].backward is None else is_pair and all(verdict.backward for verdict in verdicts),
        tuple(dict.fromkeys(reasons)),
        tuple(dict.fromkeys(reason for verdict in verdicts for reason in verdict.preferences)),
        tuple(dict.fromkeys(note for verdict in verdicts for note in verdict.notes)),
    )


def _traffic(call: ParallelCall) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return the traffic of both passes of this rank, in order."""
    p, needs, mask, bias = call.problem, call.problem.needs_grad, call.mask, call.bias
    forward: list[Transfer] = []
    backward: list[Transfer] = []
    if call.mask_needs_keys and isinstance(mask, Tensor):
        forward.append(_keys_moved(call, "mask, sharded by keys", mask.shape[:3].numel()))
    if call.bias_needs_keys and bias is not None:
        dtype = sum_dtype(bias.dtype) if needs.bias else bias.dtype
        forward.append(_keys_moved(call, "bias, sharded by keys", bias.shape[:3].numel() * dtype.itemsize))
    if call.strategy == "gather":
        each = p.batch * p.num_heads_k * (p.head_dim + p.head_dim_v) * p.dtype.itemsize
        forward.append(_keys_moved(call, "keys and values", each))
        backward.append(_keys_moved(call, "keys and values again", each))
        dims = p.head_dim * needs.k + p.head_dim_v * needs.v
        if dims:
            names = " and ".join(name for name, needed in (("dk", needs.k), ("dv", needs.v)) if needed)
            each = p.batch * p.num_heads_k * dims * (call.request.exchange_dtype or p.dtype).itemsize
            backward.append(_keys_moved(call, names, each, back=True))
    if call.trade is not None:
        (there, result), (dresult, *gradients) = _traded(call)
        forward = [there, *forward, result]
        backward = [dresult, *backward, *gradients]
    backward += _summed(call)
    return tuple(forward), tuple(backward) if any(needs) else ()


def _transient_bytes(call: ParallelCall, forward: tuple[Transfer, ...]) -> int:
    """Return the approximate peak memory of gathered or traded tensors."""
    total, p = 0, call.problem
    if call.strategy == "gather":
        # A forward pass has the received tensors, and a copy in order; a backward pass also gradients of two slices,
        # their sum, and the parts that are sent.
        held = call.keys_held(call.members.rank) * p.batch * p.num_heads_k // call.head_groups
        total = (6 if any(p.needs_grad) else 2) * held * (p.head_dim + p.head_dim_v) * p.dtype.itemsize
    if call.trade is not None:
        total += 2 * sum(transfer.sent + transfer.received for transfer in (forward[0], forward[-1]))
    return total


def _keys_moved(call: ParallelCall, what: str, each: int, *, back: bool = False) -> Transfer:
    """Count `each` bytes per position of keys, sent to the ranks that need it, or back to the rank that owns it."""
    sent = received = (call.members.size - 1) * call.layout_k.local_length
    if call.sends_parts:
        moves = call.route.moves()
        sent, received = moves.sent, moves.received
    if back:
        sent, received = received, sent
    return Transfer(what, "all_to_all" if back or call.sends_parts else "all_gather", each * sent, each * received)


def _traded(call: ParallelCall) -> tuple[list[Transfer], list[Transfer]]:
    """Count the bytes of q, k, v and out, and of their gradients, when heads are traded for positions."""
    q, k = call.request[:2]
    p, size = call.problem, 1 if call.trade is None else call.trade.members.size
    rows_q, rows_k = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    heads_q, heads_k = q.shape[2], k.shape[2] * max(1, size // k.shape[2])  # ranks may outnumber heads
    values = (rows_q * heads_q * p.head_dim, rows_k * heads_k * p.head_dim, rows_k * heads_k * p.head_dim_v)
    itemsize = p.dtype.itemsize
    out = rows_q * heads_q * (p.head_dim_v * itemsize + p.return_lse * sum_dtype(p.dtype).itemsize)
    gradients = [(f"d{name}", n) for name, n, needed in zip("qkv", values, p.needs_grad, strict=False) if needed]

    def moved(what: str, number: int) -> Transfer:
        part = number // size * (size - 1)  # every rank keeps one part
        return Transfer(what, "all_to_all", part, part)

    there = [
        moved("q, k and v, for heads", sum(values) * itemsize),
        moved("out and lse, for rows" if p.return_lse else "out, for rows", out),
    ]
    back = [moved("dout and dlse, for heads" if p.return_lse else "dout, for heads", out)]
    if gradients:
        names = ", ".join(name for name, _ in gradients)
        back.append(moved(f"{names}, for rows", sum(n for _, n in gradients) * itemsize))
    return there, back


def _summed(call: ParallelCall) -> Iterator[Transfer]:
    needs = call.problem.needs_grad

    def gathered(what: str, sent: int, size: int) -> Transfer:
        return Transfer(what, "all_gather", (size - 1) * sent, (size - 1) * sent)

    added = call.request.added
    if added is not None and call.request.sums_added:
        for members in reversed(call.request.groups):
            yield gathered("dbias with lists, summed", added.numel() * sum_dtype(added.dtype).itemsize, members.size)
    terms = (("bias", call.bias, call.request.bias, needs.bias), ("sink", call.sink, call.request.sink, needs.sink))
    for name, x, passed, needed in terms:
        if x is None or passed is None or not needed or (name == "bias" and not call.shares_bias):
            continue
        itemsize = sum_dtype(x.dtype).itemsize
        if name == "bias" and call.bias_needs_keys:
            yield _keys_moved(call, "dbias, sharded by keys", x.shape[:3].numel() * itemsize, back=True)
        elif call.request.reduce_bias_grad:
            yield gathered(f"d{name}, summed", x.numel() * itemsize, call.members.size)
        if call.request.reduce_bias_grad and call.trade is not None and call.strategy == "gather":
            # The gradient has all heads: a rank's is zero for heads that it does not compute.
            every_head = as_scores(passed) if name == "bias" else passed
            size = call.trade.members.size
            yield gathered(f"d{name}, summed over heads", every_head.numel() * itemsize, size)


def _remarks(call: ParallelCall) -> Iterator[str]:
    """Yield remarks: which tensors are not sent, which gradients are partial, and the dtypes of sending and summing."""
    needs, number = call.problem.needs_grad, len(call.spans.bounds) // 2
    if call.spans.is_split and call.strategy == "gather":
        if call.spans.kind == "packed":
            yield f"{number} documents, by which dropout counts; each with tokens makes a call for each run of rows"
        else:
            yield (
                f"{number} padded entries of the batch; each makes a call for each run of rows, "
                "consecutive ones of equal lengths one"
            )
    elif call.spans.kind and call.strategy == "ulysses":
        yield f"{number} sequences, of which this rank has all positions; one call has them all"
    for name, x, is_sharded in (("mask", call.mask, call.mask_needs_keys), ("bias", call.bias, call.bias_needs_keys)):
        if name == "mask" and call.spans.kind == "masked" and call.strategy == "gather":
            yield f"{number} documents; a call of rows of several reads an interval mask, others none"
        elif is_sharded:
            yield f"{name}: sharded by keys, gathered"
        elif isinstance(x, ShardedMask) and x.form == "lists":
            yield "mask: lists of this rank's rows, which stay where they are; they may name any key that is sent"
        elif isinstance(x, ShardedMask) or (x is not None and (x.shape[2] > 1 or call.problem.list_bias is not None)):
            yield f"{name}: rows of this rank, which stay where they are"
        elif x is not None:
            yield f"{name}: the same on every rank, not sent"
    partial = "of this rank's rows; DDP and FSDP sum it over ranks"
    partial = "complete, summed over ranks here" if call.request.reduce_bias_grad else partial
    if call.bias is not None and needs.bias:
        complete = call.bias_needs_keys or not call.shares_bias
        yield f"gradient of bias: {'complete' if complete else partial}"
    if needs.sink:
        yield f"gradient of sink: {partial}"
    if call.problem.dropout_p > 0:
        yield "dropout: rank 0 sends its key of 16 bytes to the other ranks, which drop what one GPU would"
    if call.strategy == "gather" and (needs.k or needs.v):
        dtype = call.problem.dtype
        sent, total = (dtype_name(x) for x in (call.request.exchange_dtype or dtype, sum_dtype(dtype)))
        yield f"gradients of k and v: sent in {sent}, summed in {total} in the order of ranks"
    if call.sends_parts:
        share = share_moved(call.layout, call.layout_k, call.problem.window, call.spans)
        yield f"ranks send the keys that others read: no rank more than {share:.1%} of what an all_gather would"
    if call.head_groups > 1:
        yield f"key-value heads go in {call.head_groups} groups, each on its way while the one before it is computed"


def _intervals(layout: SequenceLayout, rank: int) -> str:
    return ", ".join(f"{start}:{stop}" for start, stop in layout.runs(rank))


def _rows_of(part: Slice) -> str:
    """Describe the rows of a slice, and the documents or padded entries that they are of."""
    rows = f"rows {part.row}:{part.row_stop}"
    if part.entries is None:
        return rows
    last = part.number + part.entries[1] - part.entries[0] - 1
    return f"{rows} of sequence {part.number}" + (f" to {last}" if last > part.number else "")


def _keys_of(part: Slice) -> str:
    """Describe the keys of a slice and its window, aligned at the end of the slice."""
    if part.seqlen_k == 0:
        return "no keys"
    left, right = part.window
    band = "" if (left, right) == (-1, -1) else ", causal" if (left, right) == (-1, 0) else f", window {part.window}"
    return f"keys {part.start}:{part.stop}{band}"


def _size(number: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"
