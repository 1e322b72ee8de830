"""Calls that make their bias: a few entries of the batch at a time, in a workspace, through ordinary passes.

For each part of the batch a bias is made, of the products of a `Projected` or of the values of a `Relative` with
positions: see `bias_makers.py`. Then the forward pass of any backend reads it. The backward pass makes the bias again,
and from its gradient the gradients of what it is made of, the factors. So nothing of the size of all scores is kept,
and a backend needs to know only tensors.

Compilers and dispatch modes see one operator for each pass. Some calls cannot run so, and `prepare_call` makes the
tensor in PyTorch, for all entries. They have a `Projected` and a softcap, which caps the sum of both products; or a
transform or forward mode sees them; or a compiler sees a prepared mask; or they need a second derivative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .autograd import differentiate, run_forward
from .backends.mask_choice import forward_of
from .bias_makers import MAKERS, Made, Maker, Term, joined, pitch_of
from .biases import MadeBias, Projected, scale_of
from .call import follow_made, plan_for, prepare_call, run_call, view_for
from .definition import LIBRARY, by_name, is_batched, is_transform_traced, is_transformed, is_watched
from .dispatch.checkpoints import follow_checkpoints
from .dispatch.config import BackendChoice, blocks, parse_choice
from .dispatch.plan import Plan
from .dispatch.selection import choice_in_force, record, report_fallback
from .gradients import empty_gradients, empty_outputs, empty_statistic, narrow, spread
from .operators import count_backward_flop, count_forward_flop, define_counted
from .problem import (
    AttentionProblem,
    MaskChoice,
    MaskView,
    NeedsGrad,
    RawFlags,
    Repeats,
    TensorSpec,
    allowed_pairs,
    as_scores,
    replaced,
)
from .problem.inputs import Inputs
from .reference import positions
from .reference.dropout import draw_key, key_of_part
from .sequences import Sequences
from .validation import PreparedCall, describe, refuse_dtensors

if TYPE_CHECKING:
    from .validation import Mask

# The most bytes of the bias of one part, unless one entry of the batch needs more. Gradients have another tensor of
# this size.
WORKSPACE_BYTES = 256 * 2**20


class _Leaves(NamedTuple):
    """The tensors of a call that may have a gradient; its bias is made of the `factors`."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    factors: tuple[Tensor, ...]

    @staticmethod
    def of(tensors: Sequence[Any]) -> _Leaves:
        """Return the leaves of a flat sequence of them."""
        q, k, v, sink, *factors = tensors
        return _Leaves(q, k, v, sink, tuple(factors))

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self[:4], *self.factors)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]


@dataclass(eq=False)
class _Call:
    """Hold the settings of one call, and the plan of each size of a part.

    Attributes:
        raw_flags: as the caller passed them.
        requested: the backend in force.
        mask: a prepared mask. A bool mask is saved for the backward pass, so no attribute keeps it.
        maker: of the bias.
        scale: of the scores.
        entries: the most entries of a part.
        repeats: of a mask that some entries of the batch share.
        needs_grad: of the passes of a part, with the bias that is made; None where nothing needs a gradient.
        plans: by the number of entries of a part.
    """

    raw_flags: RawFlags
    requested: BackendChoice
    mask: Mask
    maker: Maker
    scale: float
    entries: int
    repeats: Repeats | None
    needs_grad: NeedsGrad | None
    plans: dict[int, Plan] = field(default_factory=dict)

    def parts(self, batch: int) -> Iterator[slice]:
        for first in range(0, batch, self.entries):
            yield slice(first, min(first + self.entries, batch))

    def bias(self, x: _Leaves) -> Made:
        return self.maker.prepare(x.factors, x.lengths, self.scale, self.entries)

    def sink_of(self, x: _Leaves, span: slice) -> Tensor | None:
        """Return the sink as a part takes it: in fp32 at least, if gradients of several parts are added."""
        is_whole = x.sink is None or span.stop - span.start == x.q.shape[0]
        return x.sink if is_whole or x.sink is None else x.sink.to(torch.promote_types(x.sink.dtype, torch.float32))

    def part_of(self, x: _Leaves, span: slice, scores: Tensor) -> PreparedCall:
        mask = self.mask if span.stop - span.start == x.q.shape[0] else _mask_of(self.mask, span)
        q, k, v = x.q[span], x.k[span], x.v[span]
        return PreparedCall(q, k, v, mask, scores, self.sink_of(x, span), self.raw_flags, repeats=self.repeats)


def _mask_of(mask: Any, span: slice) -> Any:
    """Return the mask of some entries of the batch; one that all share stays."""
    if mask is None or mask.shape[0] == 1:
        return mask
    if isinstance(mask, Tensor):
        return mask[span]
    # A prepared mask is made of tensors that start on 16 bytes, as its kernels expect.
    tensors = [x[span] for x in mask.tensors]
    return mask._with_tensors([x if x.data_ptr() % 16 == 0 else x.clone() for x in tensors], leading=None)


def attend_made(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: MadeBias,
    sink: Tensor | None,
    sequences: Sequences | None,
    raw_flags: RawFlags,
    backend: BackendChoice,
) -> tuple[Tensor, ...]:
    """Return what `run_call` does, of a call that makes its bias."""
    refuse_dtensors(q, k, v, mask, None, sink)
    bias, q, k, v = follow_made(bias, q, k, v, mask, sequences, raw_flags)
    factors = [x for term in bias.terms for _, x in term.named_tensors]
    tensors = (q, k, v, *factors, sink, *getattr(mask, "tensors", (mask,)))
    is_dual, has_parts = forward_ad._current_level >= 0, _runs_in_parts(bias, q, k, raw_flags)
    # A trace would keep the parts of its own batch.
    is_plain = not (is_watched(*tensors) or q.is_meta or torch.jit.is_tracing())
    if has_parts and not is_plain and not is_dual and _has_operator(mask, backend):
        return _through_operator(q, k, v, mask, bias, sink, raw_flags, backend)
    if not has_parts or not is_plain or is_dual:
        return run_call(prepare_call(q, k, v, mask, bias, sink, sequences, raw_flags), backend)
    follow_checkpoints()
    call, x, mask_tensor = _prepared(q, k, v, mask, bias, sink, raw_flags, backend)
    leading = tuple(q.shape[:-3]) if q.dim() > 4 else None
    if call.needs_grad is None:
        results, *_ = _forward(call, x, mask_tensor, None)
    else:
        results = _Attention.apply(call, *x.flat, mask_tensor)
    if len(results) > 1:
        results = (results[0], narrow(results[1], q.dtype), *results[2:])
    return results if leading is None else tuple(each.view(*leading, *each.shape[1:]) for each in results)


def describe_made(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: MadeBias,
    sink: Tensor | None,
    sequences: Sequences | None,
    raw_flags: RawFlags,
) -> tuple[AttentionProblem, tuple[str, ...]]:
    """Describe what backends get of a call that makes its bias, a part of its batch; and tell how many parts there are.

    Nothing is computed.
    """
    bias, q, k, v = follow_made(bias, q, k, v, mask, sequences, raw_flags)
    folded = prepare_call(q, k, v, mask, None, sink, None, raw_flags)
    problem, _, _ = describe(folded)
    call, x, _ = _prepared(q, k, v, mask, bias, sink, raw_flags, "auto")
    maker, (rows, keys), batch = call.maker, x.lengths, problem.batch
    heads, dtype, noun = maker.heads(x.factors), maker.dtype(x.factors), maker.noun
    needs = problem.needs_grad if call.needs_grad is None else call.needs_grad
    if not _runs_in_parts(bias, q, k, raw_flags):
        if raw_flags.softcap != 0 and not maker.has_softcap:
            heads, dtype = problem.num_heads, torch.promote_types(dtype, torch.float32)
            flags = replaced(problem.flags, softmax_scale=0.0, softcap=0.0)
            reaches = needs.q or needs.k or needs.bias
            problem, needs = replaced(problem, flags=flags), replaced(needs, q=False, k=False, bias=reaches)
        entries, pitch = batch, keys
        told, size = f"makes the {noun} in PyTorch, a tensor of", ""
    else:
        entries, pitch = call.entries, pitch_of(keys)
        parts = -(-batch // max(entries, 1))
        told = f"runs {parts} part{'s' * (parts > 1)} of {entries} of {batch} entries; their {noun} take"
        size = "MiB"
    made = 1 if maker.is_shared(x.factors) else entries
    scores = TensorSpec((made, heads, rows, keys), (heads * rows * pitch, rows * pitch, pitch, 1), dtype)
    mebibytes = made * maker.bytes_of_entry(x.factors, x.lengths) / 2**20
    told += f" {mebibytes:.1f} {size}" if size else f" {tuple(scores.shape)}"
    spec = problem.mask
    if spec is not None and spec.shape[0] == batch:
        spec = spec._replace(shape=(entries, *spec.shape[1:]))
    problem = replaced(problem, batch=entries, mask=spec, bias=scores, needs_grad=needs)
    return problem, (*folded.copies, told)


def _runs_in_parts(bias: MadeBias, q: Tensor, k: Tensor, raw_flags: RawFlags) -> bool:
    """Return whether a call that nothing watches runs in parts of the batch."""
    has_scores = q.numel() > 0 and k.numel() > 0
    fits_softcap = raw_flags.softcap == 0 or not isinstance(bias, Projected)
    return has_scores and fits_softcap and not raw_flags.return_probs


def _maker_of(bias: MadeBias, q: Tensor, k: Tensor) -> tuple[Maker, list[Tensor]]:
    """Return the maker of the bias of a call, and its factors, with the batch dims folded."""
    lengths = q.shape[-3], k.shape[-3]
    return MAKERS[type(bias).__name__].of(bias, tuple(q.shape[:-3]), lengths)


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: MadeBias,
    sink: Tensor | None,
    raw_flags: RawFlags,
    backend: BackendChoice,
) -> tuple[_Call, _Leaves, Tensor | None]:
    """Fold the batch dims of a call, and choose its parts; a bool mask is returned by itself."""
    maker, factors = _maker_of(bias, q, k)
    folded = prepare_call(q, k, v, mask, None, sink, None, raw_flags)
    mask = folded.mask
    if isinstance(mask, Tensor):
        mask = as_scores(mask) if 2 <= mask.dim() <= 4 else mask
        fitting = ({1, k.shape[-2], q.shape[-2]}, {1, q.shape[-3]}, {1, k.shape[-3]})
        if mask.dim() != 4 or not all(size in fits for size, fits in zip(mask.shape[1:], fitting, strict=True)):
            describe(folded)  # the error names the shape of the whole mask
    x = _Leaves(folded.q, folded.k, folded.v, sink, tuple(factors))
    batch = folded.q.shape[0]
    is_shared = mask is not None and getattr(mask, "shape", (batch,))[0] not in (1, batch)
    entries = batch if is_shared else _entries_of(x, maker)
    needs = None
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in x.flat):
        needs = Inputs(*x[:3], sink=sink).requires_grad._replace(bias=any(t.requires_grad for t in factors))
    repeats = folded.repeats if is_shared else None
    requested, scale = choice_in_force(backend), scale_of(q, raw_flags)
    call = _Call(raw_flags, requested, mask, maker, scale, entries, repeats, needs)
    return call, x, mask if isinstance(mask, Tensor) else None


def _entries_of(x: _Leaves, maker: Maker) -> int:
    """Return how many entries of the batch a part has; all parts but the last are equal, and within the workspace."""
    batch = x.q.shape[0]
    if x.q.numel() == 0 or x.k.numel() == 0 or maker.is_shared(x.factors):
        return batch
    most = max(1, WORKSPACE_BYTES // maker.bytes_of_entry(x.factors, x.lengths))
    return -(-batch // -(-batch // most))


def _key_at(dropout: Tensor | None, span: slice) -> Tensor | None:
    """Return the dropout key of a part, which drops what the whole batch drops there."""
    return None if dropout is None else key_of_part(dropout, entry=span.start)


def _forward(
    call: _Call, x: _Leaves, mask: Tensor | None, dropout: Tensor | None
) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]], Tensor | None]:
    """Return the results of a call, the tensors of the mask of each part, and the key of dropout."""
    made_bias, results, views = call.bias(x), [], []
    packed: dict[MaskChoice, MaskView] = {}
    is_shared = call.mask is None or call.mask.shape[0] == 1
    for span in call.parts(x.q.shape[0]):
        part = call.part_of(x, span, made_bias.scores(span))
        plan, part_mask, bias = plan_for(part, call.requested, blocks.now, call.needs_grad)
        if span.start == 0:
            if plan.falls_back:
                report_fallback(plan.described)
            if blocks.now.records is not None:
                record(plan)
            if dropout is None and plan.described.flags.dropout_p > 0:
                dropout = draw_key(x.q.device)
        call.plans[span.stop - span.start] = plan
        view = packed.get(plan.choice) or view_for(part, plan, part_mask, bias)
        if is_shared and not view.fresh:  # packed once; counters, and keys in an order, are of one part
            packed[plan.choice] = view
        inputs = Inputs(part.q, part.k, part.v, view, bias, part.sink, None, _key_at(dropout, span))
        if plan.is_differentiable:
            made = (plan.run_forward or forward_of(plan.forward, plan.problem))(inputs)
        else:
            made = run_forward(plan, inputs)
        results.append(made)
        views.append(view.tensors)
    return tuple(joined(each) for each in zip(*results, strict=True)), views, dropout


class _Attention(torch.autograd.Function):
    """Compute a call in parts, and its gradients likewise; it saves the factors of the bias, and not the bias."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> tuple[Tensor, ...]:
        x, mask = _Leaves.of(tensors[:-1]), tensors[-1]
        results, views, dropout = _forward(call, x, mask, None)
        call.mask = None if mask is not None else call.mask  # saved below
        ctx.call, ctx.num_views, ctx.num_leaves = call, [len(each) for each in views], len(x.flat)
        ctx.num_results = len(results)
        flat = [tensor for each in views for tensor in each]
        ctx.save_for_backward(*x.flat, mask, dropout, *results, *flat)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *sent: Tensor | None) -> tuple[Tensor | None, ...]:
        call, number, leaves = ctx.call, ctx.num_results, ctx.num_leaves
        saved = ctx.saved_tensors
        x, (mask, dropout), first = _Leaves.of(saved[:leaves]), saved[leaves : leaves + 2], leaves + 2
        results = saved[first : first + number]
        needs = ctx.needs_input_grad[1 : 1 + leaves]
        if all(each is None for each in sent) or not any(needs):
            return (None,) * (2 + leaves)
        if torch.is_grad_enabled() or is_batched(*sent):
            return None, *_differentiate_again(call, x, mask, dropout, sent), None
        rest = iter(saved[first + number :])
        views = [tuple(next(rest) for _ in range(count)) for count in ctx.num_views]
        return None, *_backward(call, x, dropout, results, views, needs, sent), None


def _backward(
    call: _Call,
    x: _Leaves,
    dropout: Tensor | None,
    results: tuple[Tensor, ...],
    views: list[tuple[Tensor, ...]] | None,
    needs: Sequence[bool],
    sent: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the leaves; without the masks of a forward pass, parts are planned here."""
    made_bias, parts, dsink = call.bias(x), [], None
    assert call.needs_grad is not None
    for n, span in enumerate(call.parts(x.q.shape[0])):
        entries, scores = span.stop - span.start, made_bias.scores(span)
        if views is None:
            part = call.part_of(x, span, scores)
            plan, part_mask, part_bias = plan_for(part, call.requested, blocks.now, call.needs_grad)
            mask = view_for(part, plan, part_mask, part_bias)
        else:
            plan = call.plans[entries]
            mask = MaskView(plan.choice.form, views[n]) if views[n] else MaskView()
        inputs = Inputs(
            x.q[span], x.k[span], x.v[span], mask, scores, call.sink_of(x, span), None, _key_at(dropout, span)
        )
        back = [None if each is None else each[span] for each in sent]
        made = [each[span] for each in results]
        if plan.backward is None:
            dq, dk, dv, ds, dsink_part = _recompute(plan, inputs, back)
        else:
            place = made_bias.place(entries) if call.needs_grad.bias else None
            dq, dk, dv, ds, dsink_part = _run_backward(plan, inputs, made, back, place)
        if dsink_part is not None:
            dsink = dsink_part if dsink is None else dsink + dsink_part
        if ds is not None:
            made_bias.add_gradient(ds, span, needs[4:])
        parts.append((dq, dk, dv))
    dq, dk, dv = [None if each[0] is None else joined(each) for each in zip(*parts, strict=True)]
    factors = made_bias.gradients(needs[4:])
    return dq, dk, dv, None if dsink is None or x.sink is None else dsink.to(x.sink.dtype), *factors


def _run_backward(
    plan: Plan, x: Inputs, made: list[Tensor], sent: list[Tensor | None], place: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Run the backward pass of a part, which may store the gradient of its bias at `place`."""
    has_entropy = plan.saved_layout.has_entropy
    dout = torch.zeros_like(made[0]) if sent[0] is None else sent[0]
    kept = [*made[:2], x.q, x.k, x.v, x.bias, x.sink, *x.others]
    if has_entropy:
        kept.append(made[-1])
    dentropy = sent[-1] if has_entropy else None
    return differentiate(plan, dout, sent[1], *kept, dentropy=dentropy, dbias_out=place)


def _recompute(plan: Plan, x: Inputs, sent: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a part on a backend that PyTorch differentiates, through another forward pass."""
    needs, before = plan.problem.needs_grad, (x.q, x.k, x.v, x.bias, x.sink)
    leaves = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(before, needs, strict=True)]
    q, k, v, bias, sink = leaves
    assert q is not None and k is not None and v is not None
    with torch.enable_grad():
        inputs = x._replace(q=q, k=k, v=v, bias=bias, sink=sink)
        results = (plan.run_forward or forward_of(plan.forward, plan.problem))(inputs)
    return tuple(_pull(results, sent, leaves, create_graph=False))


def _pull(
    results: tuple[Tensor, ...], sent: Sequence[Tensor | None], leaves: Sequence[Tensor | None], create_graph: bool
) -> list[Tensor | None]:
    """Return the gradients of those leaves that require one: zeros where none of `sent` reaches them."""
    pairs = [(out, g) for out, g in zip(results, sent, strict=True) if g is not None and out.requires_grad]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    made: list[Tensor | None] = [None] * len(wanted)
    if pairs:
        outs, gradients = zip(*pairs, strict=True)
        made = list(torch.autograd.grad(outs, wanted, gradients, create_graph=create_graph, allow_unused=True))
    rest = iter(torch.zeros_like(t) if g is None else g for g, t in zip(made, wanted, strict=True))
    return [next(rest) if t is not None and t.requires_grad else None for t in leaves]


def _differentiate_again(
    call: _Call,
    x: _Leaves,
    mask: Tensor | None,
    dropout: Tensor | None,
    sent: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Return the gradients as differentiable functions, of a call with a tensor of all scores."""
    bias = call.maker.bias(x.factors)
    mask_of_call = call.mask if mask is None else mask
    with torch.enable_grad(), positions.without_autocast(x.q):
        prepared = prepare_call(x.q, x.k, x.v, mask_of_call, bias, x.sink, None, call.raw_flags)
        results = run_call(replaced(prepared, repeats=call.repeats), call.requested, dropout)
    with positions.without_autocast(x.q):
        return _pull(results, [narrow(each, x.q.dtype) for each in sent], x.flat, create_graph=torch.is_grad_enabled())


# The operators, for calls that a compiler or a dispatch mode sees. `maker` is a name of `MAKERS`, and `terms` are the
# settings of its terms. `backend` is a name, or two with a comma between. lse is fp64, as kernels keep
# it with a bias.
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] factors"
_NUMBERS = (
    "str maker, SymInt[] terms, float softmax_scale, float softcap, SymInt left, "
    "SymInt right, bool deterministic, float dropout_p, bool max_scores, bool entropy, str backend"
)
_FORWARD_SCHEMA = (
    f"({_TENSORS}, Tensor? mask, Tensor? dropout, {_NUMBERS}, int needs) "
    "-> (Tensor out, Tensor lse, Tensor max_scores, Tensor entropies)"
)
_BACKWARD_SCHEMA = (
    f"(Tensor dout, Tensor? dlse, Tensor? dentropy, {_TENSORS}, Tensor? mask, Tensor? dropout, Tensor out, Tensor lse, "
    f"Tensor entropies, {_NUMBERS}, int needs) -> Tensor[]"
)


def _bits(flags: Sequence[bool]) -> int:
    return sum(int(flag) << place for place, flag in enumerate(flags))


def _leaves_of(a: Any) -> tuple[_Leaves, list[bool]]:
    """Return the leaves of an operator, and whether each of them needs a gradient."""
    x = _Leaves(a.q, a.k, a.v, a.sink, tuple(a.factors))
    return x, [bool(a.needs >> place & 1) for place in range(len(x.flat))]


def _maker_of_operator(a: Any) -> Maker:
    settings = zip(a.terms[::3], a.terms[1::3], a.terms[2::3], strict=True)
    maker: Maker = MAKERS[a.maker](tuple(Term(zero, clamps == 1, by_keys == 1) for zero, clamps, by_keys in settings))
    return maker


def _has_operator(mask: Any, backend: BackendChoice) -> bool:
    """Return whether a watched call may be one operator: transforms see the operations of PyTorch."""
    is_traced = is_transformed() or is_transform_traced()
    return not is_traced and backend != "reference" and (mask is None or isinstance(mask, Tensor))


def _through_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: MadeBias,
    sink: Tensor | None,
    raw_flags: RawFlags,
    backend: BackendChoice,
) -> tuple[Tensor, ...]:
    """Run a watched call as one operator."""
    leading = q.dim() - 3
    folded = prepare_call(q, k, v, mask, None, sink, None, raw_flags)
    problem, scores_mask, _ = describe(folded)
    if problem.partly_shared:
        return run_call(prepare_call(q, k, v, mask, bias, sink, None, raw_flags), backend)
    maker, factors = _maker_of(bias, q, k)
    settings = (maker.name, [x for zero, *flags in maker.terms for x in (zero, *map(int, flags))])
    flags, requested = problem.flags, choice_in_force(backend)
    name = requested if isinstance(requested, str) else ",".join(requested)
    dropout = draw_key(q.device) if flags.dropout_p > 0 else None
    x = _Leaves(folded.q, folded.k, folded.v, sink, tuple(factors))
    numbers = (flags.softmax_scale, flags.softcap, flags.left, flags.right, flags.deterministic, flags.dropout_p)
    needs = _bits([t is not None and t.requires_grad and torch.is_grad_enabled() for t in x.flat])
    asked = (flags.max_scores, flags.entropy)
    out, lse, *more = _forward_operator(*x[:4], factors, scores_mask, dropout, *settings, *numbers, *asked, name, needs)
    results = (out, narrow(lse, q.dtype), *[each for each, is_asked in zip(more, asked, strict=True) if is_asked])
    return results if leading == 1 else tuple(each.view(*q.shape[:-3], *each.shape[1:]) for each in results)


def _read(a: Any) -> tuple[_Call, _Leaves, list[bool]]:
    """Return the call of an operator, its leaves, and whether each of them needs a gradient."""
    (x, needed), maker = _leaves_of(a), _maker_of_operator(a)
    window = (a.left, -1 if a.right == 0 else a.right)
    raw_flags = RawFlags(
        is_causal=a.right == 0,
        softmax_scale=a.softmax_scale,
        softcap=a.softcap,
        window_size=window,
        deterministic=a.deterministic,
        return_lse=True,
        dropout_p=a.dropout_p,
        max_scores=a.max_scores,
        entropy=a.entropy,
    )
    q, k, v, sink, *factors = needed
    needs = NeedsGrad(q, k, v, any(factors), sink) if any(needed) else None
    settings = (maker, a.softmax_scale, _entries_of(x, maker), None, needs)
    return _Call(raw_flags, parse_choice(a.backend), a.mask, *settings), x, needed


def _run_forward_operator(a: Any) -> tuple[Tensor, ...]:
    call, x, _ = _read(a)
    (out, lse, *more), _, _ = _forward(call, x, a.mask, a.dropout)
    rest = iter(more)
    return out, lse.double(), *(next(rest) if asked else lse.new_empty(0) for asked in (a.max_scores, a.entropy))


def _run_backward_operator(a: Any) -> list[Tensor]:
    call, x, needed = _read(a)
    results, sent = [a.out, a.lse], [a.dout, a.dlse]
    if a.entropy:
        results.append(a.entropies)
        sent.append(a.dentropy)
    made = _backward(call, x, a.dropout, tuple(results), None, needed, tuple(sent))
    return [
        (torch.zeros_like(t) if g is None else g).contiguous()
        for t, g, need in zip(x.flat, made, needed, strict=True)
        if need and t is not None
    ]


def _forward_fake(a: Any) -> tuple[Tensor, ...]:
    out, lse = empty_outputs(a.q, a.v, wide_lse=True)
    statistics = (empty_statistic(lse, a.q.dtype) if each else lse.new_empty(0) for each in (a.max_scores, a.entropy))
    return out, lse, *statistics


def _backward_fake(a: Any) -> list[Tensor]:
    x, needed = _leaves_of(a)
    return empty_gradients(x.flat, needed)


def _forward_flop(a: Any) -> int:
    """Return the FLOP of attention, and of what makes the bias."""
    return count_forward_flop(_pairs(a), a.q.shape[3], a.v.shape[3]) + _pairs(a) * _maker_of_operator(a).flop(a.factors)


def _backward_flop(a: Any) -> int:
    """Return the FLOP of the gradients, and of what makes the bias again."""
    _, needed = _leaves_of(a)
    attends = count_backward_flop(_pairs(a), a.q.shape[3], a.v.shape[3], (*needed[:3], any(needed[4:])))
    return attends + _pairs(a) * _maker_of_operator(a).flop(a.factors, needed[4:])


def _pairs(a: Any) -> int:
    batch, seqlen_q, heads, _ = a.q.shape
    return batch * heads * allowed_pairs(seqlen_q, a.k.shape[1], (a.left, a.right))


_forward_operator = define_counted(
    "made_bias_forward", _FORWARD_SCHEMA, _run_forward_operator, _forward_fake, _forward_flop
)
_backward_operator = define_counted(
    "made_bias_backward", _BACKWARD_SCHEMA, _run_backward_operator, _backward_fake, _backward_flop
)
_read_arguments: Any = by_name(_FORWARD_SCHEMA)(lambda arguments: arguments)
_NUM_TENSORS = 7  # of the forward operator: q, k, v, sink, factors, mask and dropout


def _keep_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = _read_arguments(*inputs)
    out, lse, _, entropies = output
    ctx.save_for_backward(a.q, a.k, a.v, a.sink, a.mask, a.dropout, out, lse, entropies, *a.factors)
    ctx.numbers, ctx.num_inputs, ctx.has_entropy = inputs[_NUM_TENSORS:-1], len(inputs), a.entropy
    ctx.set_materialize_grads(False)


def _differentiate_operator(ctx: Any, *sent: Tensor | None) -> tuple[Any, ...]:
    if torch.is_grad_enabled() or is_batched(*sent):
        raise NotImplementedError(
            "a call that makes its bias in a graph, an exported program or a dispatch mode has no second derivative "
            "and no batched gradients; call attention outside of it"
        )
    q, k, v, sink, mask, dropout, *made, entropies = ctx.saved_tensors[:9]
    factors, needs = list(ctx.saved_tensors[9:]), ctx.needs_input_grad
    needed = [*needs[:4], *needs[4]]
    dout, dlse, _, dentropy = sent
    if dout is None and dlse is None and (dentropy is None or not ctx.has_entropy):
        return (None,) * 4 + ([None] * len(factors),) + (None,) * (ctx.num_inputs - 5)
    dout = torch.zeros_like(made[0]) if dout is None else dout
    dentropy = dentropy if ctx.has_entropy else None
    tensors = (q, k, v, sink, factors, mask, dropout, *made, entropies)
    gradients = spread(_backward_operator(dout, dlse, dentropy, *tensors, *ctx.numbers, _bits(needed)), needed)
    return *gradients[:4], list(gradients[4:]), *(None,) * (ctx.num_inputs - 5)


torch.library.register_autograd(
    "flash_dmattn::made_bias_forward", _differentiate_operator, setup_context=_keep_operator, lib=LIBRARY
)
