"""The contract of gradients, shared by every backend with a backward pass of its own.

`Attention` is the autograd function of a call. `TransformedAttention` is its twin for compilers and for transforms of
`torch.func`, which need a `setup_context`. `AttentionBackward` is the autograd function of a backward pass: it gives
the second derivative, or refuses it.

Under `torch.vmap` both passes run once, with the mapped dim folded into the batch: see `MappedCall`. Mapped calls run
one by one if each has its own sink or needs its own gradient of the sink, because a batch has one sink per head. Calls
with dropout also run one by one, because random numbers go by the number of an entry within its call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from . import operators
from .definition import distinct, is_batched, is_transformed, is_watched, one_by_one
from .dispatch.plan import Plan, backward_pass, laid_anew, make_plan
from .dispatch.selection import choice_in_force, select_backward, select_pair
from .problem import AttentionProblem, Flags, Gradients, MappedCall, NeedsGrad
from .problem.inputs import Inputs, Saved


def attend(plan: Plan, x: Inputs) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call, recorded by autograd if gradients may be needed."""
    if torch.compiler.is_exporting() or (plan.backward is None and not is_transformed()):
        # An exported program keeps the operator only, whose derivative is registered below.
        return run_forward(plan, x)
    results: tuple[Tensor, Tensor]
    if torch.compiler.is_compiling() or is_transformed():
        results = TransformedAttention.apply(*distinct(x.q, x.k, x.v, x.bias, x.sink, plan, *x.others))
    else:
        results = Attention.apply(x.q, x.k, x.v, x.bias, x.sink, plan, x)
    return results


def run_forward(plan: Plan, x: Inputs) -> tuple[Tensor, Tensor]:
    """Run the forward pass; for a watched call, or under a profiler, through the operator."""
    if plan.run_forward is None or profiler._is_profiler_enabled:
        backward = "" if plan.backward is None else plan.backward.name
        return operators.forward(plan.problem, plan.forward.name, backward, x)
    out, lse = plan.run_forward(x)
    return out, lse


def run_backward(plan: Plan, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Run the backward pass; return five gradients, None for each that is not needed."""
    backend, x = plan.backward, saved.inputs
    assert backend is not None
    run = plan.run_backward
    if run is None or profiler._is_profiler_enabled or is_watched(dout, dlse, *x[:3], *x[4:6], *saved[1:], *x.others):
        return operators.backward(plan.problem, backend.name, saved, dout, dlse)
    if not plan.lies_as_planned(saved):
        problem, saved = laid_anew(plan.problem, saved)
        run = backward_pass(backend, problem)
    gradients = run(saved, dout, dlse)
    return gradients if len(gradients) == 5 else (*gradients, None)


def differentiate(plan: Plan, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Return the five gradients, recorded by autograd if a second derivative may be needed."""
    if is_batched(dout, dlse):
        return one_by_one(lambda dout, dlse: differentiate(plan, saved, dout, dlse), dout, dlse)
    if torch.is_grad_enabled() or is_transformed():
        x = saved.inputs
        tensors = (x.q, x.k, x.v, x.bias, x.sink, saved.out, saved.lse)
        gradients: Gradients = AttentionBackward.apply(dout, dlse, *tensors, plan, *x.others)
        return gradients
    return run_backward(plan, saved, dout, dlse)


def _keep(ctx: Any, plan: Plan, x: Inputs, out: Tensor, lse: Tensor) -> None:
    """Save what the backward pass reads; lse is saved in the place of an (Lq, Lk) matrix."""
    ctx.save_for_backward(x.q, x.k, x.v, x.bias, x.sink, out, lse, *x.others)
    ctx.set_materialize_grads(False)  # an unused lse must not cost a dlse of zeros
    ctx.plan = plan


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
    """Return the five gradients of a saved call."""
    if dout is None and dlse is None:
        return None, None, None, None, None
    q, k, v, bias, sink, out, lse, *others = ctx.saved_tensors
    plan: Plan = ctx.plan
    saved = Saved(plan.parts.inputs(q, k, v, bias, sink, tuple(others)), out, lse)
    return differentiate(plan, saved, torch.zeros_like(out) if dout is None else dout, dlse)


class Attention(torch.autograd.Function):
    """Compute (out, lse), with the gradients of the contract.

    Its `forward` takes `ctx`, which is 11 us faster in torch than a separate `setup_context`. Tensors without gradients
    are saved, but are no inputs of the function, which also saves time.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, plan: Plan, x: Inputs
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass."""
        # autograd passes q, k, v, bias and sink without their history; the tensors in x still have theirs.
        x = Inputs(q, k, v, x.mask, bias, sink, x.sequences, x.dropout)
        out, lse = run_forward(plan, x)
        _keep(ctx, plan, x, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass, differentiable again under create_graph=True."""
        return *_gradients(ctx, dout, dlse), None, None


class TransformedAttention(torch.autograd.Function):
    """Compute (out, lse) under transforms of `torch.func` and compilers, which need every tensor as an input."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, plan: Plan, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass."""
        return run_forward(plan, plan.parts.inputs(q, k, v, bias, sink, others))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the backward pass reads."""
        q, k, v, bias, sink, plan, *others = inputs
        ctx.num_others = len(others)
        _keep(ctx, plan, plan.parts.inputs(q, k, v, bias, sink, tuple(others)), *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass."""
        return *_gradients(ctx, dout, dlse), *(None,) * (1 + ctx.num_others)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        plan: Plan,
        *others: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Run one forward pass for all mapped calls, or one for each."""
        if in_dims[4] is not None or _runs_one_by_one(plan):
            calls = _each_call(info.batch_size, in_dims, (q, k, v, bias, sink, plan, *others))
            results = [_attend_alone(plan, tensors, rest) for *tensors, plan, rest in calls]
            return tuple(torch.stack(x) for x in zip(*results, strict=True)), (0, 0)
        call = MappedCall(
            info.batch_size,
            in_dims[:4],
            in_dims[6:],
            plan.problem,
            (q, k, v, bias),
            others,
            repeats=_reads_repeats(plan),
            needs_dsink=sink is not None and sink.requires_grad,
        )
        anew = _chosen_anew(plan, call.problem)
        out, lse = attend(anew, anew.parts.inputs(*call.inputs, sink, call.mask))
        return (call.split(out), call.split(lse)), (0, 0)


class AttentionBackward(torch.autograd.Function):
    """Compute the gradients of a call as an autograd function, so that they have a derivative."""

    @staticmethod
    def forward(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        plan: Plan,
        *others: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass; no (Lq, Lk) matrix is saved for the second derivative."""
        return run_backward(plan, Saved(plan.parts.inputs(q, k, v, bias, sink, others), out, lse), dout, dlse)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        plan: Plan,
        *others: Tensor,
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """Run one backward pass for all mapped calls, or one for each."""
        needs_grad = plan.problem.needs_grad
        if in_dims[6] is not None or needs_grad.sink or _runs_one_by_one(plan):
            arguments = (dout, dlse, q, k, v, bias, sink, out, lse, plan, *others)
            each = [
                differentiate(plan, Saved(plan.parts.inputs(*inputs, rest), out, lse), dout, dlse)
                for dout, dlse, *inputs, out, lse, plan, rest in _each_call(info.batch_size, in_dims, arguments)
            ]
            results = tuple(None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True))
            return results, tuple(None if x is None else 0 for x in results)
        call = MappedCall(
            info.batch_size,
            in_dims[2:6],
            in_dims[10:],
            plan.problem,
            (q, k, v, bias),
            others,
            repeats=_reads_repeats(plan),
            needs_grad=needs_grad,
        )
        if plan.backward is not None and plan.backward.accepts(call.problem, "backward"):
            anew = plan._replace(problem=call.problem, run_forward=None, run_backward=None)
        else:
            anew = _chosen_anew(plan, call.problem)
        dout, out, lse = (
            call.fold(x, dim) for x, dim in zip((dout, out, lse), (in_dims[0], *in_dims[7:9]), strict=True)
        )
        dlse = None if dlse is None else call.fold(dlse, in_dims[1])
        saved = Saved(anew.parts.inputs(*call.inputs, sink, call.mask), out, lse)
        *gradients, _ = differentiate(anew, saved, dout, dlse)
        split = (call.split, call.split, call.split, call.split_bias)
        results = (*(None if x is None else back(x) for x, back in zip(gradients, split, strict=True)), None)
        return results, tuple(None if x is None else 0 for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save the inputs of the gradients, without out and lse, which are computed from them again."""
        dout, dlse, q, k, v, bias, sink, _, _, ctx.plan, *others = inputs
        ctx.save_for_backward(dout, dlse, q, k, v, bias, sink, *others)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate the gradient formula of the backend, if it has one; it recomputes p as an (Lq, Lk) matrix."""
        plan: Plan = ctx.plan
        problem, backend = plan.problem, plan.backward
        assert backend is not None
        formula = backend.differentiable_backward
        if formula is None:
            raise NotImplementedError(
                f"backend {backend.name!r} has no second derivative of attention; "
                'call attention(..., backend="eager"), which has one'
            )
        dout, dlse, q, k, v, bias, sink, *others = ctx.saved_tensors
        named = {"dout": dout, "dlse": dlse, "q": q, "k": k, "v": v, "bias": bias, "sink": sink}
        present = [name for name, x in named.items() if x is not None]
        needs_grad = problem.needs_grad

        def gradients_needed(*tensors: Tensor) -> tuple[Tensor, ...]:
            at: dict[str, Any] = dict(zip(present, tensors, strict=True))
            x = plan.parts.inputs(at["q"], at["k"], at["v"], at.get("bias"), at.get("sink"), tuple(others))
            x = x.turned() if problem.heads_first else x
            gradients = formula(problem, x, at["dout"], at.get("dlse"))
            if problem.heads_first:
                gradients = *(None if g is None else g.transpose(1, 2) for g in gradients[:3]), *gradients[3:]
            return tuple(g for g, needed in zip(gradients, needs_grad, strict=False) if needed and g is not None)

        # torch.func.vjp, unlike autograd.grad, also works under torch.func transforms.
        pull = torch.func.vjp(gradients_needed, *(named[name] for name in present))[1]
        second = pull(tuple(g for g, needed in zip(cotangents, needs_grad, strict=True) if needed))
        by_name = dict(zip(present, second, strict=True))
        rest = (None,) * (3 + len(others))
        return by_name["dout"], by_name.get("dlse"), *(by_name.get(name) for name in NeedsGrad._fields), *rest


def _runs_one_by_one(plan: Plan) -> bool:
    """Return whether mapped calls cannot be folded into one: sequences and dropout number the entries of each call."""
    return plan.parts.has_dropout or plan.parts.num_sequence_tensors > 0


def _each_call(size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each call that `torch.vmap` maps; all from the plan on become (plan, others)."""
    for index in range(size):
        own = [
            x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x
            for x, dim in zip(arguments, in_dims, strict=True)
        ]
        place = next(place for place, x in enumerate(own) if isinstance(x, Plan))
        yield *own[:place], own[place], tuple(own[place + 1 :])


def _attend_alone(plan: Plan, tensors: Sequence[Any], others: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one mapped call; its own inputs tell which gradients it needs."""
    needs_grad = NeedsGrad(*(x is not None and x.requires_grad for x in tensors))
    anew = _chosen_anew(plan, plan.problem._replace(needs_grad=needs_grad if torch.is_grad_enabled() else NeedsGrad()))
    q, k, v, bias, sink = tensors
    return attend(anew, anew.parts.inputs(q, k, v, bias, sink, others))


def _reads_repeats(plan: Plan) -> bool:
    """Return whether a mapped call may have masks and biases that part of its batch shares; else they are expanded."""
    backends = (plan.forward, plan.backward)
    return choice_in_force(plan.requested) == "auto" or all(x is None or x.repeats_entries for x in backends)


def _chosen_anew(plan: Plan, problem: AttentionProblem) -> Plan:
    """Choose backends for a call that `torch.vmap` has folded; its mask keeps the form that it has."""
    forward, backward = select_pair(problem, plan.requested)
    return plan._replace(problem=problem, forward=forward, backward=backward, run_forward=None, run_backward=None)


def _keep_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward pass of an exported operator reads, and choose its backend."""
    x, flags = operators.read_inputs(inputs[: operators.NUM_INPUTS]), Flags(*inputs[operators.NUM_INPUTS : -2])
    tensors = (x.q, x.k, x.v, x.bias, x.sink)
    needs_grad = NeedsGrad(*(t is not None and t.requires_grad for t in tensors))
    problem = operators.describe_operands(x, flags, needs_grad)
    # Nobody knows whether lse will have a gradient.
    chosen = select_backward(problem._replace(return_lse=True), inputs[-1] or inputs[-2])
    # The forward pass has run, so its backend does not matter here.
    plan = make_plan(
        problem, chosen, chosen, "auto", sequences=x.sequences, has_dropout=x.dropout is not None, with_passes=False
    )
    # The operator received its mask in the form that its passes read.
    plan = plan._replace(problem=problem, parts=plan.parts._replace(mask_form=x.mask.form))
    _keep(ctx, plan, x, *output)
    ctx.lists = [None if t is None else [None] * len(t) for t in (inputs[3], inputs[7])]


def _differentiate_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of all arguments of the forward operator, in the order and the lists of its schema."""
    dq, dk, dv, dbias, dsink = _gradients(ctx, dout, dlse)
    mask, sequences = ctx.lists
    return dq, dk, dv, mask, None, dbias, dsink, sequences, None, *(None,) * (operators.NUM_FLAGS + 2)


torch.library.register_autograd(
    "flash_dmattn::attention_forward", _differentiate_operator, setup_context=_keep_operator, lib=operators.LIBRARY
)
