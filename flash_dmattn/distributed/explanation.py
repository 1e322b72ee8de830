"""`explain_context_parallel`: what a context-parallel call would do on this rank, as a table or a dict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from ..backends.protocol import Backend, Reason
from ..dispatch.config import BackendChoice, fallback
from ..dispatch.profiles import cite
from ..dispatch.registry import BACKENDS
from ..dispatch.selection import BackendError, choice_in_force, choose, falls_back, refuse_fallback, selected_names
from ..explanation import Explanation, Verdict, verdict_of
from ..problem import AttentionProblem, dtype_name, refuse_keywords
from .call import ParallelCall
from .choice import find_pair, slices_of
from .exchange import sum_dtype
from .group import Group, groups_of
from .layout import SequenceLayout
from .mask import ShardedMask
from .reading import share_moved
from .request import Ours, Request
from .slices import Slice, plan
from .strategy import Strategy
from .traffic import Traffic, traffic_of
from .ulysses import problem_of_heads


@dataclass(frozen=True, repr=False, kw_only=True)
class ParallelExplanation(Explanation):
    """What `explain_context_parallel` says; an `Explanation` of the rank's rows over all keys, and prints as a table.

    Attributes:
        strategy: "gather", "ulysses", or "both" over a mesh of two dims.
        why: the reason for it.
        rank, ranks: this process, and how many share the sequence.
        layout, layout_k: of queries and keys, over all ranks.
        slices: the calls that this rank makes, of its rows over runs of all keys.
        traffic: what it sends and receives in each pass, and about how much memory that takes.
        remarks: what stays where it is, and what gradients are of.
    """

    strategy: Literal["gather", "ulysses", "both"]
    why: str
    rank: int
    ranks: int
    layout: SequenceLayout
    layout_k: SequenceLayout
    slices: tuple[Slice, ...]
    traffic: Traffic
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return super().to_dict() | {
            "strategy": self.strategy,
            "why": self.why,
            "rank": self.rank,
            "ranks": self.ranks,
            "layout": [list(of_rank) for of_rank in self.layout.intervals],
            "layout_k": [list(of_rank) for of_rank in self.layout_k.intervals],
            "slices": [part._asdict() for part in self.slices],
            "forward_traffic": [transfer._asdict() for transfer in self.traffic.forward],
            "backward_traffic": [transfer._asdict() for transfer in self.traffic.backward],
            "transient_bytes": self.traffic.transient,
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
        lines += ["", *(f"call of rows {_run(p.row, p.row_stop)}: {_keys_of(p)}" for p in self.slices), ""]
        for name, transfers in (("forward", self.traffic.forward), ("backward", self.traffic.backward)):
            sent, received = (sum(x) for x in zip(*((t.sent, t.received) for t in transfers))) if transfers else (0, 0)
            lines.append(f"{name} sends {_size(sent)}, receives {_size(received)}")
            lines += [f"  {t.what}: {t.how}, {_size(t.sent)} out, {_size(t.received)} in" for t in transfers]
        lines += [
            f"about {_size(self.traffic.transient)} of memory for what is gathered or traded",
            "",
        ]
        profile = [] if self.profile is None else [f"profile: {self.profile}"]
        error = [] if self.error is None else self.error.split("\n")[:1]
        return "\n".join([*lines, *self.remarks, self.chosen, *error, *profile, "", *self.table])

    __repr__ = __str__


def explain_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None = None,
    bias: Tensor | None = None,
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
    sequences: None = None,
    dropout_p: float = 0.0,
    **unknown: NoReturn,
) -> ParallelExplanation:
    """Say what `context_parallel_attention` would do with these arguments on this rank; sends and computes nothing.

    One rank can call it alone: what others have is known from the layouts.

    Args:
        q, k, v, mask, bias and the rest: as for `context_parallel_attention`.

    Returns:
        A `ParallelExplanation`: print it, or take its `to_dict()`. Where no backend would run the call, its `error` is
        the message.

    Raises:
        TypeError, ValueError: the arguments are invalid, as `context_parallel_attention` would say.

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
    if unknown:
        refuse_keywords(explain_context_parallel, unknown)
    ours = Ours(reduce_bias_grad, exchange_dtype, sequences is not None, dropout_p)
    numbers = (is_causal, softmax_scale, softcap, window_size, deterministic, return_lse)
    tensors = (q, k, v, mask, bias, sink)
    request = Request.of(tensors, groups_of(group), 0, layout, layout_k, strategy, head_groups, numbers, ours)
    call, own_sink = request.described()
    requested = choice_in_force(backend)
    if call.strategy == "ulysses":
        problem = problem_of_heads(call)
        problems = [problem]
        parts: tuple[Slice, ...] = (Slice(0, problem.seqlen_q, 0, problem.seqlen_k, problem.window),)
    else:
        problem, problems = call.problem, slices_of(call)
        parts = plan(call.layout, call.members.rank, call.layout_k.length, problem.window)
    forward = backward = error = None
    try:
        found = choose(problem, requested) if call.strategy == "ulysses" else find_pair(call, requested)
        if fallback() == "error" and falls_back(problem, requested, found):
            refuse_fallback(problem)
        forward, backward = selected_names(problem, found)
    except BackendError as refusal:
        error = str(refusal)
    both = request.both
    return ParallelExplanation(
        problem,
        requested,
        forward,
        backward,
        error,
        tuple(_verdict(backend, problems, call.strategy) for backend in BACKENDS.table.values()),
        cite(problem) if requested == "auto" else None,
        strategy=call.strategy if both is None else "both",  # type: ignore[arg-type]
        why=call.why
        if both is None
        else f"a mesh of two dims, {both.outer.size} ranks gather keys and {both.inner.size} trade heads",
        rank=call.members.rank if both is None else both.outer.rank * both.inner.size + both.inner.rank,
        ranks=layout.world_size,
        layout=layout,
        layout_k=layout if layout_k is None else layout_k,
        slices=parts,
        traffic=traffic_of(request, call, own_sink),
        remarks=tuple(_remarks(request, call)),
    )


def _verdict(backend: Backend, problems: list[AttentionProblem], strategy: str) -> Verdict:
    """What a backend says of all slices together."""
    verdicts = [verdict_of(backend, problem) for problem in problems]
    reasons = [reason for verdict in verdicts for reason in verdict.reasons]
    is_pair = strategy != "gather" or not backend.is_differentiable
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


def _remarks(request: Request, call: ParallelCall) -> Iterator[str]:
    """What stays, what gradients are of, and in which dtype they are sent and summed."""
    needs, reduce = call.problem.needs_grad, request.ours.reduce_bias_grad
    for name, x, is_sharded in (("mask", call.mask, call.mask_needs_keys), ("bias", call.bias, call.bias_needs_keys)):
        if is_sharded:
            yield f"{name}: sharded by keys, gathered"
        elif isinstance(x, ShardedMask) or (x is not None and x.shape[2] > 1):
            yield f"{name}: rows of this rank, which stay where they are"
        elif x is not None:
            yield f"{name}: the same on every rank, not sent"
    partial = "complete, summed over ranks here" if reduce else "of this rank's rows; DDP and FSDP sum it over ranks"
    if call.bias is not None and needs.bias:
        complete = call.bias_needs_keys or call.bias.shape[2] > 1
        yield f"gradient of bias: {'complete' if complete else partial}"
    if needs.sink:
        yield f"gradient of sink: {partial}"
    if call.strategy == "gather" and (needs.k or needs.v):
        dtype = call.problem.dtype
        sent, total = (dtype_name(x) for x in (request.ours.exchange_dtype or dtype, sum_dtype(dtype)))
        yield f"gradients of k and v: sent in {sent}, summed in {total} in the order of ranks"
    if call.sends_parts:
        share = share_moved(call.layout, call.layout_k, call.problem.window)
        yield f"ranks send the keys that others read: no rank more than {share:.1%} of what an all_gather would"
    if call.head_groups > 1:
        yield f"key-value heads go in {call.head_groups} groups, each on its way while the one before it is computed"


def _intervals(layout: SequenceLayout, rank: int) -> str:
    return ", ".join(_run(*interval) for interval in layout.of_rank(rank))


def _run(start: int, stop: int) -> str:
    return f"{start}:{stop}"


def _keys_of(part: Slice) -> str:
    """The keys of a slice and its window, aligned at its own end."""
    if part.seqlen_k == 0:
        return "no keys"
    left, right = part.window
    band = "" if (left, right) == (-1, -1) else ", causal" if (left, right) == (-1, 0) else f", window {part.window}"
    return f"keys {_run(part.start, part.stop)}{band}"


def _size(number: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"
