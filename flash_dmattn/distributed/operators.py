"""The operators of the strategy "gather": each one node of a graph, with the collectives inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..definition import define
from ..dispatch.registry import BACKENDS
from ..flops import backward_flop_of, forward_flop_of, register
from ..gradients import empty_gradient, empty_gradients, empty_outputs
from ..problem import NeedsGrad, allowed_pairs
from .agreement import agree_within
from .exchange import Gathering, Returning
from .fetching import Fetching, GivingBack
from .layout import from_flat
from .problems import HeadGroup, head_groups, rank_problem, views_of
from .reading import Moves, moves_of, places_in
from .rows import RankRows, Sums
from .slices import plan

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor[] mask, str[] mask_forms, Tensor? bias, Tensor? sink"
_NUMBERS = (
    "str group, int rank, int[] layout, int[] layout_k, int left, int right, float softmax_scale, float softcap, "
    "bool deterministic, str forward, str backward, int head_groups, bool sends_parts, ScalarType exchange_dtype, "
    "int number, bool[5] needs_grad"
)


class Numbers(NamedTuple):
    """What operators receive beside tensors, in the order of their schemas.

    Attributes:
        group, rank: of the process group its name, and this process's place in it.
        layout, layout_k: `SequenceLayout.flat`.
        left, right: the window of the whole call, causality folded in.
        forward, backward: names of the backends.
        head_groups: how many groups of key-value heads are gathered one after the other.
        sends_parts: whether ranks send each other the keys that are read; else every rank gets all of them.
        exchange_dtype: in which gradients of k and v are sent.
        number: of the call, 0 in a compiled graph.
    """

    group: str
    rank: int
    layout: tuple[int, ...]
    layout_k: tuple[int, ...]
    left: int
    right: int
    softmax_scale: float
    softcap: float
    deterministic: bool
    forward: str
    backward: str
    head_groups: int
    sends_parts: bool
    exchange_dtype: torch.dtype
    number: int
    needs_grad: tuple[bool, ...]

    def compare(self, direction: str, **tensors: Tensor | None) -> None:
        """Compare the operator with the operators of the other ranks."""
        values = self._asdict()
        del values["rank"]
        agree_within(self.group, direction, self.number, {**tensors, **values})

    def rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: list[Tensor],
        mask_forms: list[str],
        bias: Tensor | None,
        sink: Tensor | None,
    ) -> RankRows:
        """The calls of this rank."""
        seqlen_k, window = self.layout_k[0], (self.left, self.right)
        numbers = (window, self.softmax_scale, self.softcap, self.deterministic, NeedsGrad(*self.needs_grad))
        problem = rank_problem(q, v, bias, sink, seqlen_k, k.shape[2], *numbers)
        parts = plan(from_flat(tuple(self.layout)), self.rank, seqlen_k, window)
        held = self.moves.held if self.sends_parts else ((0, seqlen_k),)
        return RankRows(problem, parts, places_in(held, parts), views_of(mask_forms, mask), q, bias, sink)

    @property
    def moves(self) -> Moves:
        """Which keys ranks send each other, where they send parts."""
        return moves_of(tuple(self.layout), tuple(self.layout_k), self.rank, (self.left, self.right))

    def pairs(self, q: Tensor) -> int:
        """How many pairs of a query and a key the slices of this rank allow, those of all query heads together."""
        parts = plan(from_flat(tuple(self.layout)), self.rank, self.layout_k[0], (self.left, self.right))
        allowed = sum(allowed_pairs(part.seqlen_q, part.seqlen_k, part.window) for part in parts)
        return q.shape[0] * q.shape[2] * allowed

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
        """Groups of heads with the keys and values of other ranks; each comes while the one before it is computed.

        The first is on its way when this returns: what the host has to do before it is needed costs nothing then.
        """
        heads_k = k.shape[2]
        groups = head_groups(heads_k, self.head_groups)

        def start(heads: HeadGroup) -> Gathering | Fetching:
            tensors = [x[:, :, heads.of(heads_k)] for x in (k, v)]
            if self.sends_parts:
                return Fetching(tensors, 1, self.moves, self.group)
            return Gathering(tensors, 1, from_flat(tuple(self.layout_k)), self.group)

        def each(coming: Gathering | Fetching) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
            for heads, following in zip(groups, [*groups[1:], None]):
                held_k, held_v = coming.wait()
                if following is not None:
                    coming = start(following)  # its buffers are free while this one computes
                yield heads, held_k, held_v

        return each(start(groups[0]))

    def returning(self, gradients: list[Tensor]) -> Returning | GivingBack:
        """Gradients of what `arriving` has brought, on their way back."""
        if self.sends_parts:
            return GivingBack(gradients, 1, self.moves, self.group)
        return Returning(gradients, 1, from_flat(tuple(self.layout_k)), self.rank, self.group)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    mask_forms: list[str],
    bias: Tensor | None,
    sink: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:
    n = Numbers(*numbers)
    if n.number == 0:  # else the call was compared
        n.compare("forward", q=q, k=k, v=v, bias=bias, sink=sink)
    arriving = n.arriving(k, v)
    rows = n.rows(q, k, v, mask, mask_forms, bias, sink)
    backend = BACKENDS[n.forward]
    out, lse = empty_outputs(q, v)
    for heads, held_k, held_v in arriving:
        rows.forward(backend, heads, held_k, held_v, out, lse)
    return out, lse


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    mask_forms: list[str],
    bias: Tensor | None,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *numbers: Any,
) -> list[Tensor]:
    n = Numbers(*numbers)
    n.compare("backward", q=q, k=k, v=v, bias=bias, sink=sink)
    arriving = n.arriving(k, v)
    rows = n.rows(q, k, v, mask, mask_forms, bias, sink)
    backend = BACKENDS[n.backward]
    sums = Sums.of(rows)
    dk, dv = (empty_gradient(x) if needed else None for x, needed in zip((k, v), n.needs_grad[1:3]))

    def store(heads: HeadGroup, returning: Returning | GivingBack) -> None:
        for gradient, total in zip([x for x in (dk, dv) if x is not None], returning.wait()):
            gradient[:, :, heads.of(k.shape[2])] = total

    leaving: tuple[HeadGroup, Returning | GivingBack] | None = None
    for heads, held_k, held_v in arriving:
        sent = rows.backward(backend, heads, held_k, held_v, out, lse, dout, dlse, sums, n.exchange_dtype)
        if leaving is not None:
            store(*leaving)
        if sent:  # on its way while the next group is computed
            leaving = (heads, n.returning(sent))
    if leaving is not None:
        store(*leaving)
    return [x for x in (sums.q, dk, dv, sums.bias, sums.sink) if x is not None]


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    mask_forms: list[str],
    bias: Tensor | None,
    sink: Tensor | None,
    *others: Any,
) -> list[Tensor]:
    return empty_gradients((q, k, v, bias, sink), others[-1])  # needs_grad, the last of `Numbers`


def _forward_flop(q: Tensor, k: Tensor, v: Tensor, *others: Any, out_val: object = None) -> int:
    return forward_flop_of(Numbers(*others[4:]).pairs(q), q.shape[3], v.shape[3])


def _backward_flop(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any, out_val: object = None
) -> int:
    numbers = Numbers(*others[6:])
    return backward_flop_of(numbers.pairs(q), q.shape[3], v.shape[3], numbers.needs_grad)


define("gather_forward", f"({_INPUTS}, {_NUMBERS}) -> (Tensor out, Tensor lse)", _forward, _forward_fake)
# A list holds the gradients asked for and no others: an operator cannot return None under torch.compile.
define(
    "gather_backward",
    f"(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_NUMBERS}) -> Tensor[]",
    _backward,
    _backward_fake,
)
gather_forward = register(torch.ops.flash_dmattn.gather_forward, _forward_flop)
gather_backward = register(torch.ops.flash_dmattn.gather_backward, _backward_flop)
