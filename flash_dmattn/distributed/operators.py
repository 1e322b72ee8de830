"""The strategy "gather": each pass is one operator, a node of a graph, which contains the collectives.

`RankRows` runs the calls of one rank for one group of heads, after its keys and values have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.mask_choice import choose_form, view_of
from ..backends.protocol import Backend
from ..definition import distinct, is_transformed
from ..dispatch.plan import backward_pass, forward_pass
from ..dispatch.registry import BACKENDS
from ..dispatch.selection import Selection
from ..gradients import empty_gradient, empty_gradients, empty_outputs, fill_empty, narrow, spread
from ..operators import count_backward_flop, count_forward_flop, define_counted, describe_operands
from ..problem import AttentionProblem, Flags, Gradients, MaskView, NeedsGrad, allowed_pairs
from ..problem.inputs import Inputs, Saved
from ..reference.dropout import key_of_part
from .call import ParallelCall
from .exchange import ROUTE, Pending, Route, places_in, sum_dtype
from .slices import HeadGroup, ShardedMask, Slice, share_of_values, slice_problem, with_lead

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? bias, Tensor? sink, Tensor? dropout"
_NUMBERS = (
    f"{ROUTE}, str[] mask_forms, float softmax_scale, float softcap, bool deterministic, bool allows_tf32, int zero, "
    "str outside, int block_q, int block_k, int list_size, bool is_list_bias, float dropout_p, str forward, "
    "str backward, int head_groups, ScalarType exchange_dtype, bool[5] needs_grad"
)


NUMBER_OF_TENSORS = {"none": 0, "dense": 1, "tiles": 4, "keys": 3, "intervals": 6, "lists": 3}


def read_views(forms: Sequence[str], tensors: Sequence[Tensor]) -> list[MaskView]:
    """Return the masks of a rank's slices, from their forms and the list of all their tensors."""
    views, place = [], 0
    for form in forms:
        number = NUMBER_OF_TENSORS[form]
        views.append(MaskView(form, tuple(tensors[place : place + number])))  # type: ignore[arg-type]
        place += number
    return views


def view_of_heads(view: MaskView, heads: HeadGroup) -> MaskView:
    """Return the part of a mask for a group of heads; a mask has one head, or a head for each head of k or q."""
    if heads.number == 1 or not view.tensors or view.tensors[0].shape[1] == 1:
        return view
    # Kernels need contiguous tensors of prepared masks.
    parts = [x[:, heads.of(x.shape[1])] for x in view.tensors]
    return MaskView(view.form, tuple(parts if view.form == "dense" else [x.contiguous() for x in parts]))


class RankRows(NamedTuple):
    """The calls of a rank: its slices, and the index of the keys in k and v, the mask and the dropout key of each.

    q is (B, Lq / W, Hq, D). The bias has the rank's rows or one row, and all keys or one; or values of distances or
    of entries of lists. `flags` belong to all rows over all keys. `is_split` is whether documents or entries make calls
    of their own: some rows may then be in no call, and an entry of a bias in several.
    """

    parts: tuple[Slice, ...]
    places: tuple[slice, ...]
    views: list[MaskView]
    dropouts: list[Tensor | None]
    q: Tensor
    bias: Tensor | None
    sink: Tensor | None
    flags: Flags
    needs_grad: NeedsGrad
    is_split: bool = False

    def forward(self, backend: Backend, heads: HeadGroup, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Fill out and lse of a group of heads; k and v have the received keys in global order."""
        query_heads = heads.of(self.q.shape[2])
        slices = zip(self.parts, self.places, self.views, self.dropouts)
        # The largest first, because the host prepares the other ones while it is computed.
        for part, keys, view, dropout in sorted(slices, key=lambda one: -one[0].seqlen_q * one[0].seqlen_k):
            problem, inputs = self._slice(part, heads, view, dropout, k, v, keys)
            lead, results = part.lead(self.flags.dropout_p), forward_pass(backend, problem)(inputs)
            out[part.batch, part.rows, query_heads] = results[0][:, lead:]
            lse[part.batch, query_heads, part.rows] = results[1][..., lead:]

    def backward(
        self,
        backend: Backend,
        heads: HeadGroup,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        sums: Sums,
        exchange_dtype: torch.dtype,
    ) -> list[Tensor]:
        """Add this group's gradients of q, bias and sink to `sums`; return the needed ones of dk and dv.

        dk and dv are sums over this rank's rows, rounded once to the dtype of the exchange.
        """
        query_heads = heads.of(self.q.shape[2])
        dk, dv = (
            KeySum(x, len(self.parts), exchange_dtype) if needed else None
            for x, needed in zip((k, v), self.needs_grad[1:])
        )
        for part, keys, view, dropout in zip(self.parts, self.places, self.views, self.dropouts):
            problem, inputs = self._slice(part, heads, view, dropout, k, v, keys)
            rest: dict[str, Tensor] = {}
            group_dbias, lead = None if sums.bias is None else heads.cut(sums.bias), part.lead(self.flags.dropout_p)
            at = None if group_dbias is None else self._place_in_bias(part)
            is_added = self.is_split or (group_dbias is not None and group_dbias.shape[2] == 1)
            place = None
            if group_dbias is not None and at is not None and not is_added:
                place = _cleared_around(group_dbias, part) if at[3] == part.keys else group_dbias[at]
                if backend.stores_dbias and at[3] == part.keys and lead == 0:
                    rest["dbias_out"] = place
            # out and lse have the layout in which every backend writes them. No row before others has a gradient: its
            # probabilities are exp(s - inf).
            rows, results = (part.batch, part.rows, query_heads), (part.batch, query_heads, part.rows)
            own_lse = with_lead(lse[results], 2, lead, math.inf)
            saved = Saved(inputs, with_lead(out[rows], 1, lead).contiguous(), own_lse.contiguous())
            own_dlse = None if dlse is None else with_lead(dlse[results], 2, lead)
            gradients = backward_pass(backend, problem)(saved, with_lead(dout[rows], 1, lead), own_dlse, **rest)
            dq, dk_part, dv_part, dbias, *dsink = gradients
            if dq is not None and sums.q is not None:
                sums.q[rows] = dq[:, lead:]
            for total, term in ((dk, dk_part), (dv, dv_part)):
                if total is not None and term is not None:
                    total.add((part.batch, keys), term)
            if dbias is not None and group_dbias is not None and at is not None:
                dbias = dbias[:, :, lead:] if lead and group_dbias.shape[2] > 1 else dbias
                if place is None:  # one of several terms
                    group_dbias[at] += dbias
                elif dbias is not place:
                    place.copy_(dbias)
            if dsink and dsink[0] is not None and sums.sink is not None:
                sums.sink[query_heads] += dsink[0]
        return [x.total() for x in (dk, dv) if x is not None]

    def _slice(
        self, part: Slice, heads: HeadGroup, view: MaskView, dropout: Tensor | None, k: Tensor, v: Tensor, keys: slice
    ) -> tuple[AttentionProblem, Inputs]:
        """Return the call of one slice and one group of heads."""
        query_heads, flags = heads.of(self.q.shape[2]), self.flags
        lead, bias = part.lead(flags.dropout_p), None
        if self.bias is not None:
            bias = heads.cut(self.bias[self._place_in_bias(part)])
            bias = with_lead(bias, 2, lead) if self.bias.shape[2] > 1 else bias
        inputs = Inputs(
            with_lead(self.q[part.batch, part.rows, query_heads], 1, lead),
            k[part.batch, keys],
            v[part.batch, keys],
            view_of_heads(view, heads),
            bias,
            None if self.sink is None else self.sink[query_heads],
            dropout=None if dropout is None else key_of_part(dropout, head=query_heads.start),
        )
        zero = flags.zero + part.shift if flags.outside else 0
        (left, right), needs_grad = part.window, self.needs_grad
        return describe_operands(inputs, flags._replace(left=left, right=right, zero=zero), needs_grad), inputs

    def _place_in_bias(self, part: Slice) -> tuple[slice, ...]:
        """Return the index of the part of the bias for a slice; it has all values of distances or of a list."""
        assert self.bias is not None
        batch, heads, rows, keys = part.place_in(self.bias)
        if self.flags.is_list_bias:
            share = share_of_values(self.bias.shape[2], self.q.shape[1], self.flags.block_q)
            return batch, heads, part.rows_of(share), slice(None)
        return batch, heads, rows, slice(None) if self.flags.outside else keys


class KeySum:
    """The gradient of all received keys or values: a sum of one term for each slice, rounded to `dtype`."""

    def __init__(self, like: Tensor, number: int, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._largest: tuple[tuple[slice, slice], Tensor] | None = None
        # One addition of two terms is computed in fp32 and rounded once, so it needs no sum in a wider dtype.
        self._is_narrow = number <= 2 and dtype == like.dtype
        self._sum: Tensor | None = None

    def add(self, keys: tuple[slice, slice], gradient: Tensor) -> None:
        """Add the gradient of the entries and keys of one slice, which may be overwritten."""
        if not self._is_narrow:
            if self._sum is None:
                self._sum = torch.zeros_like(self._like, dtype=sum_dtype(self._like.dtype))
            self._sum[keys] += gradient
        elif self._largest is None:
            self._largest = (keys, gradient)
        else:
            first = self._largest
            (keys, gradient), self._largest = sorted(
                (first, (keys, gradient)), key=lambda term: term[1].shape[:2].numel()
            )
            self._sum = self._padded(self._largest)
            self._sum[keys] += gradient

    def total(self) -> Tensor:
        """Return the sum over all slices."""
        if self._sum is None and self._largest is None:
            return torch.zeros_like(self._like, dtype=self._dtype)
        if self._sum is None:
            assert self._largest is not None
            return self._padded(self._largest)
        return self._sum.to(self._dtype)

    def _padded(self, term: tuple[tuple[slice, slice], Tensor]) -> Tensor:
        keys, gradient = term
        if gradient.shape == self._like.shape:
            return gradient
        padded = torch.zeros_like(self._like)
        padded[keys] = gradient
        return padded


class Sums(NamedTuple):
    """The gradients that are not sent, filled slice by slice; None if not needed."""

    q: Tensor | None
    bias: Tensor | None
    sink: Tensor | None

    @classmethod
    def of(cls, rows: RankRows) -> Sums:
        """Allocate the needed gradients; zeros where slices add, and where some rows may be in no slice."""
        needs, dbias, dq = rows.needs_grad, None, None
        if needs.bias and rows.bias is not None:
            is_stored = rows.bias.shape[2] > 1 and not rows.is_split
            dbias = empty_gradient(rows.bias) if is_stored else rows.bias.new_zeros(rows.bias.shape)
        if needs.q:
            dq = rows.q.new_zeros(rows.q.shape) if rows.is_split else empty_gradient(rows.q)
        return cls(
            dq,
            dbias,
            rows.sink.new_zeros(rows.sink.shape) if needs.sink and rows.sink is not None else None,
        )


def _cleared_around(dbias: Tensor, part: Slice) -> Tensor:
    """Return the view of the gradient of the bias for a slice, after zeroing the keys outside of the slice."""
    rows = dbias[:, :, part.rows]
    rows[..., : part.start] = 0
    rows[..., part.stop :] = 0
    return rows[..., part.keys]


class Operands(NamedTuple):
    """The tensors that both operators receive, in the order of `_INPUTS`; `mask` lists the tensors of all slices."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: list[Tensor]
    bias: Tensor | None
    sink: Tensor | None
    dropout: Tensor | None


class GatherSettings(NamedTuple):
    """The arguments of both operators that are no tensors; `flat` has them in the order of the schemas.

    `mask_forms` has the form of each slice's mask; `forward` and `backward` are names of backends.
    """

    route: Route
    mask_forms: Sequence[str]
    softmax_scale: float
    softcap: float
    deterministic: bool
    allows_tf32: bool
    zero: int
    outside: str
    block_q: int
    block_k: int
    list_size: int
    is_list_bias: bool
    dropout_p: float
    forward: str
    backward: str
    head_groups: int
    exchange_dtype: torch.dtype
    needs_grad: Sequence[bool]

    @property
    def flat(self) -> tuple[Any, ...]:
        return *self.route, *self[1:]

    def compare(self, direction: str, x: Operands) -> None:
        """Compare the operator with the operators of the other ranks, whose masks may have other forms."""
        values = {**x._asdict(), **self._asdict()}
        del values["mask"], values["route"], values["mask_forms"]
        self.route.compare(direction, **values)

    def rows(self, x: Operands) -> RankRows:
        """Return the calls of this rank."""
        route, parts = self.route, self.route.parts
        places, views = places_in(route.held, parts), read_views(self.mask_forms, x.mask)
        dropouts = [
            None
            if x.dropout is None
            else key_of_part(
                x.dropout,
                row=part.first_row - part.lead(self.dropout_p),
                first_key=part.first_key,
                entry=part.number,
            )
            for part in parts
        ]
        flags = Flags(
            route.left,
            route.right,
            self.softmax_scale,
            self.softcap,
            self.deterministic,
            allows_tf32=self.allows_tf32,
            zero=self.zero,
            outside=self.outside,  # type: ignore[arg-type]
            block_q=self.block_q,
            block_k=self.block_k,
            list_size=self.list_size,
            is_list_bias=self.is_list_bias,
            dropout_p=self.dropout_p,
        )
        needs_grad = NeedsGrad(*self.needs_grad)
        return RankRows(parts, places, views, dropouts, x.q, x.bias, x.sink, flags, needs_grad, route.spans.is_split)

    def arriving(self, x: Operands) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
        """Yield keys and values of one group of heads after the other; each is sent while the one before is computed.

        The first is being sent when this returns, which overlaps with work of the host.
        """
        groups = [HeadGroup(place, self.head_groups) for place in range(self.head_groups)]

        def start(heads: HeadGroup) -> Pending:
            return self.route.bring([y[:, :, heads.of(y.shape[2])] for y in (x.k, x.v)], 1)

        def each(pending: Pending) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
            for heads, following in zip(groups, [*groups[1:], None]):
                held_k, held_v = pending.wait()
                if following is not None:
                    pending = start(following)  # its buffers are free while this one is computed
                yield heads, held_k, held_v

        return each(start(groups[0]))

    def pairs(self, q: Tensor) -> int:
        """Count the pairs of a query and a key that the slices of this rank allow, over all query heads."""
        allowed = (
            len(range(q.shape[0])[part.batch]) * allowed_pairs(part.seqlen_q, part.seqlen_k, part.window)
            for part in self.route.parts
        )
        return q.shape[2] * sum(allowed)


def _read(a: Any) -> tuple[Operands, GatherSettings]:
    """Return the arguments of both operators as objects."""
    route = Route.of(*(getattr(a, name) for name in Route._fields))
    settings = GatherSettings(route, *(getattr(a, name) for name in GatherSettings._fields[1:]))
    return Operands(*(getattr(a, name) for name in Operands._fields)), settings


def _forward(a: Any) -> tuple[Tensor, Tensor]:
    x, settings = _read(a)
    if settings.route.number == 0:  # else the call was compared
        settings.compare("forward", x)
    arriving, rows = settings.arriving(x), settings.rows(x)
    backend = BACKENDS[settings.forward]
    out, lse = empty_outputs(x.q, x.v, backend.widens(x.bias))
    if rows.is_split:
        fill_empty(out, lse, None)  # rows of no sequence have no sink either
    for heads, held_k, held_v in arriving:
        rows.forward(backend, heads, held_k, held_v, out, lse)
    return out, lse


def _backward(a: Any) -> list[Tensor]:
    x, settings = _read(a)
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
        sent = rows.backward(
            backend, heads, held_k, held_v, a.out, a.lse, a.dout, a.dlse, sums, settings.exchange_dtype
        )
        if leaving is not None:
            store(*leaving)
        if sent:  # sent while the next group is computed
            leaving = (heads, settings.route.send_back(sent, 1))
    if leaving is not None:
        store(*leaving)
    return [y for y in (sums.q, dk, dv, sums.bias, sums.sink) if y is not None]


def _forward_fake(a: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(a.q, a.v, BACKENDS[a.forward].widens(a.bias))


def _backward_fake(a: Any) -> list[Tensor]:
    return empty_gradients((a.q, a.k, a.v, a.bias, a.sink), a.needs_grad)


def _forward_flop(a: Any) -> int:
    return count_forward_flop(_read(a)[1].pairs(a.q), a.q.shape[3], a.v.shape[3])


def _backward_flop(a: Any) -> int:
    return count_backward_flop(_read(a)[1].pairs(a.q), a.q.shape[3], a.v.shape[3], a.needs_grad)


gather_forward = define_counted(
    "gather_forward", f"({_INPUTS}, {_NUMBERS}) -> (Tensor out, Tensor lse)", _forward, _forward_fake, _forward_flop
)
# The list has only needed gradients, because an operator cannot return None under torch.compile.
_BACKWARD_SCHEMA = f"(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_NUMBERS}) -> Tensor[]"
gather_backward = define_counted("gather_backward", _BACKWARD_SCHEMA, _backward, _backward_fake, _backward_flop)


class GatherAttention(torch.autograd.Function):
    """(out, lse) of a rank's rows, with the gradients of its own tensors; it does not save gathered tensors."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, bias, sink, dropout, settings, *mask = arguments
        out, lse = gather_forward(q, k, v, mask, bias, sink, dropout, *settings.flat)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, sink, dropout, settings, *mask = inputs
        ctx.save_for_backward(q, k, v, bias, sink, dropout, *output, *mask)
        ctx.set_materialize_grads(False)  # an unused lse must not cost a dlse of zeros
        ctx.settings = settings

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass; a second derivative is refused."""
        q, k, v, bias, sink, dropout, out, lse, *mask = ctx.saved_tensors
        # A gradient of None becomes zeros, because other ranks wait for the gradients of this one.
        dout = torch.zeros_like(out) if dout is None else dout
        run = GatherGradients.apply if torch.is_grad_enabled() else _gradients
        gradients = run(dout, dlse, q, k, v, bias, sink, dropout, out, lse, ctx.settings, *mask)
        return *gradients, *(None,) * (2 + len(mask))


class GatherGradients(torch.autograd.Function):
    """The backward pass as an autograd function, which refuses second derivatives."""

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "context_parallel_attention has no second derivative with strategy='gather'; "
            "strategy='ulysses' has one with backend=\"eager\""
        )


def _gradients(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> Gradients:
    q, k, v, bias, sink, dropout, out, lse, settings, *mask = arguments
    dlse = narrow(dlse, q.dtype)
    gradients = gather_backward(dout, dlse, q, k, v, mask, bias, sink, dropout, out, lse, *settings.flat)
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
    dropout: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of this rank's rows; over a mesh of two dims, of its heads of the rows of its inner group."""
    problem, flags = call.problem, call.problem.flags
    views = _views(call, pair, mask)
    settings = GatherSettings(
        call.route,
        tuple(view.form for view in views),
        flags.softmax_scale,
        flags.softcap,
        flags.deterministic,
        flags.allows_tf32,
        flags.zero,
        flags.outside,
        flags.block_q,
        flags.block_k,
        flags.list_size,
        flags.is_list_bias,
        flags.dropout_p,
        pair.forward.name,
        "" if pair.backward is None else pair.backward.name,
        call.head_groups,
        call.request.exchange_dtype or q.dtype,
        tuple(problem.needs_grad),
    )
    tensors = [x for view in views for x in view.tensors]
    if pair.backward is None and not is_transformed():
        out, lse = gather_forward(q, k, v, tensors, bias, sink, dropout, *settings.flat)
    else:
        out, lse = GatherAttention.apply(*distinct(q, k, v, bias, sink, dropout, settings, *tensors))
    return out, narrow(lse, q.dtype) if problem.return_lse else lse


def _views(call: ParallelCall, pair: Selection, mask: Tensor | ShardedMask | None) -> list[MaskView]:
    """Return the mask of each slice for both passes, with all heads."""
    parts, dropout_p = call.slices, call.problem.dropout_p
    if mask is None:
        return [MaskView()] * len(parts)
    views, held = [], call.keys_held(call.members.rank)
    for index, part in enumerate(parts):
        part_mask = mask.masks[index] if isinstance(mask, ShardedMask) else part.cut(mask)
        if part_mask is None:
            views.append(MaskView())
            continue
        if isinstance(part_mask, Tensor) and part_mask.shape[2] > 1:
            part_mask = with_lead(part_mask, 2, part.lead(dropout_p), False)
        problem = slice_problem(call.problem, part, HeadGroup(0, 1), held)
        views.append(view_of(problem, choose_form(problem, *pair), part_mask))
    return views
