"""The strategy "gather": each pass is one operator, a node of a graph, with the collectives inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.mask_choice import choose_form, view_of
from ..definition import define, distinct, is_transformed
from ..dispatch.registry import BACKENDS
from ..dispatch.selection import Selection
from ..flops import backward_flop_of, forward_flop_of, register
from ..gradients import empty_gradient, empty_gradients, empty_outputs, spread
from ..problem import Flags, Gradients, MaskView, NeedsGrad, allowed_pairs
from .call import ParallelCall
from .exchange import ROUTE, Pending, Route, places_in
from .rows import RankRows, Sums, slice_problem, views_of
from .slices import HeadGroup, ShardedMask

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? bias, Tensor? sink"
_NUMBERS = (
    f"{ROUTE}, str[] mask_forms, float softmax_scale, float softcap, bool deterministic, str forward, str backward, "
    "int head_groups, ScalarType exchange_dtype, bool[5] needs_grad"
)


class Operands(NamedTuple):
    """The tensors that both operators receive, in the order of `_INPUTS`; `mask` lists the tensors of all slices."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: list[Tensor]
    bias: Tensor | None
    sink: Tensor | None


class GatherSettings(NamedTuple):
    """All that both operators receive beside tensors; `flat` and `of` have it in the order of their schemas.

    Attributes:
        route: how keys travel.
        mask_forms: the form of each slice's mask.
        forward, backward: names of the backends.
        head_groups: how many groups of key-value heads are gathered one after the other.
        exchange_dtype: in which gradients of k and v are sent.
    """

    route: Route
    mask_forms: Sequence[str]
    softmax_scale: float
    softcap: float
    deterministic: bool
    forward: str
    backward: str
    head_groups: int
    exchange_dtype: torch.dtype
    needs_grad: Sequence[bool]

    @classmethod
    def of(cls, values: Sequence[Any]) -> GatherSettings:
        """Make it of the arguments of an operator."""
        number = len(Route._fields)
        return cls(Route.of(*values[:number]), *values[number:])

    @property
    def flat(self) -> tuple[Any, ...]:
        """The arguments of an operator."""
        return *self.route, *self[1:]

    def compare(self, direction: str, x: Operands) -> None:
        """Compare the operator with the operators of the other ranks, whose masks may have other forms."""
        own = {**x._asdict(), **self._asdict()}
        del own["mask"], own["route"], own["mask_forms"]
        self.route.compare(direction, **own)

    def rows(self, x: Operands) -> RankRows:
        """Return the calls of this rank."""
        route, parts = self.route, self.route.parts
        places, views = places_in(route.held, parts), views_of(self.mask_forms, x.mask)
        flags = Flags(route.left, route.right, self.softmax_scale, self.softcap, self.deterministic)
        return RankRows(parts, places, views, x.q, x.bias, x.sink, flags, NeedsGrad(*self.needs_grad))

    def arriving(self, x: Operands) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
        """Bring keys and values of one group of heads after the other, each while the one before it is computed.

        The first is on its way when this returns, so the host's work before it is needed costs nothing.
        """
        groups = [HeadGroup(place, self.head_groups) for place in range(self.head_groups)]

        def start(heads: HeadGroup) -> Pending:
            return self.route.bring([y[:, :, heads.of(y.shape[2])] for y in (x.k, x.v)], 1)

        def each(pending: Pending) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
            for heads, following in zip(groups, [*groups[1:], None]):
                held_k, held_v = pending.wait()
                if following is not None:
                    pending = start(following)  # its buffers are free while this one computes
                yield heads, held_k, held_v

        return each(start(groups[0]))

    def pairs(self, q: Tensor) -> int:
        """Count the pairs of a query and a key that the slices of this rank allow, over all query heads."""
        allowed = sum(allowed_pairs(part.seqlen_q, part.seqlen_k, part.window) for part in self.route.parts)
        return q.shape[0] * q.shape[2] * allowed


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, settings = Operands(*arguments[:6]), GatherSettings.of(arguments[6:])
    if settings.route.number == 0:  # else the call was compared
        settings.compare("forward", x)
    arriving, rows = settings.arriving(x), settings.rows(x)
    backend = BACKENDS[settings.forward]
    out, lse = empty_outputs(x.q, x.v)
    for heads, held_k, held_v in arriving:
        rows.forward(backend, heads, held_k, held_v, out, lse)
    return out, lse


def _backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> list[Tensor]:
    x, (out, lse), settings = Operands(*arguments[:6]), arguments[6:8], GatherSettings.of(arguments[8:])
    settings.compare("backward", x)
    arriving, rows = settings.arriving(x), settings.rows(x)
    backend = BACKENDS[settings.backward]
    sums = Sums.of(rows)
    dk, dv = (empty_gradient(y) if needed else None for y, needed in zip((x.k, x.v), settings.needs_grad[1:3]))

    def store(heads: HeadGroup, pending: Pending) -> None:
        for gradient, total in zip([y for y in (dk, dv) if y is not None], pending.wait()):
            gradient[:, :, heads.of(gradient.shape[2])] = total

    leaving: tuple[HeadGroup, Pending] | None = None
    for heads, held_k, held_v in arriving:
        sent = rows.backward(backend, heads, held_k, held_v, out, lse, dout, dlse, sums, settings.exchange_dtype)
        if leaving is not None:
            store(*leaving)
        if sent:  # on its way while the next group is computed
            leaving = (heads, settings.route.send_back(sent, 1))
    if leaving is not None:
        store(*leaving)
    return [y for y in (sums.q, dk, dv, sums.bias, sums.sink) if y is not None]


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


def _backward_fake(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> list[Tensor]:
    x = Operands(*arguments[:6])
    return empty_gradients((x.q, x.k, x.v, x.bias, x.sink), arguments[-1])  # needs_grad, the last of the settings


def _forward_flop(*arguments: Any, out_val: object = None) -> int:
    x = Operands(*arguments[:6])
    return forward_flop_of(GatherSettings.of(arguments[6:]).pairs(x.q), x.q.shape[3], x.v.shape[3])


def _backward_flop(dout: Tensor, dlse: Tensor | None, *arguments: Any, out_val: object = None) -> int:
    x, settings = Operands(*arguments[:6]), GatherSettings.of(arguments[8:])
    return backward_flop_of(settings.pairs(x.q), x.q.shape[3], x.v.shape[3], settings.needs_grad)


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


class GatherAttention(torch.autograd.Function):
    """(out, lse) of a rank's rows, with the gradients of its own tensors; it saves nothing that was gathered."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Run the forward pass."""
        q, k, v, bias, sink, settings, *mask = arguments
        out, lse = gather_forward(q, k, v, mask, bias, sink, *settings.flat)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward pass reads."""
        q, k, v, bias, sink, settings, *mask = inputs
        ctx.save_for_backward(q, k, v, bias, sink, *output, *mask)
        ctx.set_materialize_grads(False)  # an unused lse must not cost a dlse of zeros
        ctx.settings = settings

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass; a second derivative is refused."""
        q, k, v, bias, sink, out, lse, *mask = ctx.saved_tensors
        # Ranks that send nothing back would keep the others waiting, so a gradient of nothing is one of zeros.
        dout = torch.zeros_like(out) if dout is None else dout
        run = GatherGradients.apply if torch.is_grad_enabled() else _gradients
        gradients = run(dout, dlse, q, k, v, bias, sink, out, lse, ctx.settings, *mask)
        return *gradients, *(None,) * (1 + len(mask))


class GatherGradients(torch.autograd.Function):
    """The backward pass as a function of its own, so that it can refuse to have a derivative."""

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        """Run the backward pass."""
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Refuse."""
        raise NotImplementedError(
            "context_parallel_attention has no second derivative; "
            'flash_dmattn.attention(..., backend="eager") has one on one device'
        )


def _gradients(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> Gradients:
    q, k, v, bias, sink, out, lse, settings, *mask = arguments
    gradients = gather_backward(dout, dlse, q, k, v, mask, bias, sink, out, lse, *settings.flat)
    return spread(gradients, NeedsGrad(*settings.needs_grad))


def attend_gathered(
    call: ParallelCall,
    pair: Selection,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None,
    bias: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of this rank's rows, or over a mesh of two dims of its heads of its inner group's rows.

    `mask` and `bias` have all keys, or one.
    """
    problem, flags = call.problem, call.problem.flags
    views = _views(call, pair, mask)
    settings = GatherSettings(
        call.route,
        tuple(view.form for view in views),
        flags.softmax_scale,
        flags.softcap,
        flags.deterministic,
        pair.forward.name,
        "" if pair.backward is None else pair.backward.name,
        call.head_groups,
        call.request.exchange_dtype or q.dtype,
        tuple(problem.needs_grad),
    )
    tensors = [x for view in views for x in view.tensors]
    if pair.backward is None and not is_transformed():
        out, lse = gather_forward(q, k, v, tensors, bias, sink, *settings.flat)
        return out, lse
    results: tuple[Tensor, Tensor] = GatherAttention.apply(*distinct(q, k, v, bias, sink, settings, *tensors))
    return results


def _views(call: ParallelCall, pair: Selection, mask: Tensor | ShardedMask | None) -> list[MaskView]:
    """Return the mask of each slice as both passes receive it, all heads together."""
    parts = call.slices
    if mask is None:
        return [MaskView()] * len(parts)
    views, held = [], call.keys_held(call.members.rank)
    for index, part in enumerate(parts):
        own = mask.masks[index] if isinstance(mask, ShardedMask) else part.cut(mask)
        problem = slice_problem(call.problem, part, HeadGroup(0, 1), held)
        views.append(view_of(problem, choose_form(problem, *pair), own))
    return views
