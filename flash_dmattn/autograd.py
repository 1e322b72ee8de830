"""The autograd functions of a call, for all backends that have a backward pass.

`Attention` is the autograd function of a call. `TransformedAttention` is its twin for compilers and for transforms of
`torch.func`, which need a `setup_context`. `AttentionBackward` is the autograd function of a backward pass: it gives
the second derivative, or refuses it. In forward mode `TangentAttention` computes a call with its tangents, and
`TangentGradients` the gradients of a loss that contains tangents.

Under `torch.vmap` both passes run once, with the mapped dim folded into the batch: see `MappedCall`. Mapped calls run
one by one if each has its own sink or needs its own gradient of the sink, because a batch has one sink per head. Calls
with sequences or dropout also do, because they number the entries within each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad, profiler

from . import operators
from .definition import (
    LIBRARY,
    by_name,
    distinct,
    each_call,
    is_batched,
    is_jvp_innermost,
    is_nested_gradient_traced,
    is_transformed,
    is_watched,
    one_by_one,
    stacked,
)
from .dispatch.plan import Plan, backward_pass, tangent_gradients_pass, tangents_pass, with_strides
from .dispatch.selection import (
    FORWARD_MODE,
    SECOND_DERIVATIVE,
    TANGENT_GRADIENT,
    choice_in_force,
    record,
    report_last_resort,
    select_backward,
    select_pair,
    select_second_derivative,
    select_tangent_gradients,
    select_tangents,
)
from .gradients import narrow
from .problem import AttentionProblem, Gradients, MappedCall, MaskChoice, NeedsGrad, RowEntropy
from .problem.inputs import Inputs, as_arrived, make_saved_layout, result_in_rows
from .reference.tangents import Cotangents, Tangents

NUM_INPUTS = len(NeedsGrad._fields)


def attend(plan: Plan, x: Inputs) -> tuple[Tensor, ...]:
    """Return the results of a call, recorded by autograd if gradients may be needed: see `protocol.Forward`."""
    results: tuple[Tensor, ...]
    if forward_ad._current_level >= 0:
        return _attend_in_forward_mode(plan, x)
    if plan.run_forward is None:  # the call may be watched
        if not is_transformed():
            record(plan)
        # Not `is_exporting()`, which is True for Dynamo of torch 2.11 in every graph.
        is_exported = torch.compiler._is_exporting_flag or torch.jit.is_tracing()
        if is_exported or (plan.backward is None and not is_transformed()):
            # An exported or traced program keeps the operator only, whose derivative is registered below.
            return run_forward(plan, x)
        if is_nested_gradient_traced():
            # Dynamo drops the gradient of the gradient of every autograd function.
            raise NotImplementedError(
                "torch.compile traces torch.func.grad of attention inside of another transform, of which it keeps no "
                'derivative; call attention(..., backend="reference"), or transform outside of torch.compile'
            )
        if torch.compiler.is_compiling() or is_transformed():
            results = TransformedAttention.apply(plan, *distinct(x.q, x.k, x.v, x.bias, x.sink, *x.others))
            return results
    elif plan.backward is None:
        return run_forward(plan, x)
    q, k, v, _, bias, sink, *_ = x
    bias, sink = None if bias is None else _unwrapped(bias), None if sink is None else _unwrapped(sink)
    try:
        results = _record(_unwrapped(q), _unwrapped(k), _unwrapped(v), bias, sink, plan, x)
    except RuntimeError as error:
        if "nference tensors cannot be saved" in str(error):
            _refuse_inference(x, error)
        raise
    return results


def _attend_in_forward_mode(plan: Plan, x: Inputs) -> tuple[Tensor, ...]:
    """Return (out, lse) inside of `torch.func.jvp`, or of `forward_ad.dual_level`.

    If the tangents of this call are known, one pass computes everything. Other transforms may run inside of jvp, and a
    gradient of dual tensors is a dual tensor: these calls use an autograd function that has a jvp.
    """
    results: tuple[Tensor, ...]
    _refuse_aux_in_forward_mode(plan)
    is_plain = not (is_transformed() or torch.compiler.is_compiling())
    is_recorded = is_plain and any(x.needs_grad)
    if is_jvp_innermost() and not is_recorded:
        primals, tangents = _take_apart(x)
        if any(t is not None for t in tangents) and not is_batched(*tangents):
            attend = _attend_below_jvp if is_transformed() else _attend_with_tangents
            out, lse, tout, tlse = attend(plan, primals, tangents)
            return forward_ad.make_dual(out, tout), forward_ad.make_dual(lse, tlse)
    results = DualAttention.apply(plan, *distinct(x.q, x.k, x.v, x.bias, x.sink, *x.others))
    return results


def _refuse_aux_in_forward_mode(plan: Plan) -> None:
    for name in ("max_scores", "entropy"):
        if getattr(plan.problem.flags, name):
            raise NotImplementedError(
                f"{name} is set in forward mode (torch.func.jvp, forward_ad), where calls return out and lse alone; "
                'call attention(..., backend="reference"), or ask for it in a call outside of forward mode'
            )


def _attend_below_jvp(plan: Plan, x: Inputs, tangents: Tangents) -> tuple[Tensor, ...]:
    """Return out, lse and their tangents inside of `torch.func.jvp`, computed one level below, outside of the jvp.

    An autograd function inside of jvp would do the same, but torch creates a class for each of its calls.
    """
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()

    def below(*tensors: Tensor | None) -> tuple[Any, ...]:
        # A tensor that has outlived another transform has no level, which torch asserts.
        inside = (None if t is None else _unwrapped(t) for t in tensors)
        return tuple(None if t is None else torch._C._functorch._unwrap_for_grad(t, level) for t in inside)

    inputs, inner_tangents = (
        plan.saved_layout.inputs(*below(x.q, x.k, x.v, x.bias, x.sink, *x.others)),
        Tangents(*below(*tangents)),
    )
    with interpreter.lower():
        results = _attend_with_tangents(plan, inputs, inner_tangents)
    return tuple(torch._C._functorch._wrap_for_grad(t, level) for t in results)


def _attend_with_tangents(plan: Plan, x: Inputs, tangents: Tangents) -> tuple[Tensor, ...]:
    """Return out, lse and their tangents, recorded by autograd; the inputs have no tangents of their own."""
    # With gradients, Dynamo breaks the graph here: it traces no function with a jvp, and inside of jvp it cannot know
    # whether a tensor needs a gradient.
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return _run_tangents(plan, x, tangents)
    results: tuple[Tensor, ...] = TangentAttention.apply(plan, x.q, x.k, x.v, x.bias, x.sink, *tangents, *x.others)
    return results


def run_forward(plan: Plan, x: Inputs) -> tuple[Tensor, ...]:
    """Run the forward pass; for a watched call, or under a profiler, through the operator."""
    if plan.run_forward is None or profiler._is_profiler_enabled:
        backward = "" if plan.backward is None else plan.backward.name
        return operators.forward(plan.problem, plan.forward.name, backward, x)
    return plan.run_forward(x)


def differentiate(
    plan: Plan,
    dout: Tensor,
    dlse: Tensor | None,
    *kept: Any,
    dentropy: Tensor | None = None,
    dbias_out: Tensor | None = None,
) -> Gradients:
    """Return the five gradients from the saved tensors; autograd records them if a second derivative may be needed.

    A pass that autograd does not record stores dbias in `dbias_out`, if its backend can (`Backend.stores_dbias`).
    """
    dlse = narrow(dlse, dout.dtype)
    watched = is_watched(dout, dlse, dentropy, *kept)
    if is_batched(dout, dlse, dentropy):
        each = lambda dout, dlse, dentropy: differentiate(plan, dout, dlse, *kept, dentropy=dentropy)
        return one_by_one(each, dout, dlse, dentropy)
    if torch.is_grad_enabled() or (watched and is_transformed()):
        function = AttentionBackward
        if forward_ad._current_level >= 0:
            _refuse_aux_in_forward_mode(plan)
            function = DualAttentionBackward
        gradients: Gradients = function.apply(plan, dout, dlse, dentropy, *kept)
        return gradients
    return _run_backward(plan, dout, dlse, dentropy, kept, watched, dbias_out)


def _run_backward(
    plan: Plan,
    dout: Tensor,
    dlse: Tensor | None,
    dentropy: Tensor | None,
    kept: Sequence[Any],
    watched: bool,
    dbias_out: Tensor | None = None,
) -> Gradients:
    """Run the backward pass, as `run_forward` does; return five gradients, None for each that is not needed."""
    entropy = None
    if plan.saved_layout.has_entropy:
        entropy = None if dentropy is None else RowEntropy(kept[-1], dentropy)
        kept = kept[:-1]
    run: Any = plan.run_backward
    backend, saved = plan.backward, plan.saved_layout.saved(*kept)
    assert backend is not None
    if run is None or watched or profiler._is_profiler_enabled:
        return operators.backward(plan.problem, backend.name, saved, dout, dlse, entropy)
    if not plan.lies_as_planned(saved):
        problem, saved = with_strides(plan.problem, saved)
        run = backward_pass(backend, problem)
    more: dict[str, Any] = {} if entropy is None else {"entropy": entropy}
    if dbias_out is not None and backend.stores_dbias:
        more["dbias_out"] = dbias_out
    gradients = run(saved, dout, dlse, **more) if more else run(saved, dout, dlse)
    return gradients if len(gradients) == 5 else (*gradients, None)


def _refuse_inference(x: Inputs, error: RuntimeError) -> NoReturn:
    """Name the tensors of inference mode that a backward pass would need."""
    named = [(name, [getattr(x, name)]) for name in ("q", "k", "v", "bias", "sink")]
    named += [("mask", list(x.mask.tensors)), ("sequences", [] if x.sequences is None else list(x.sequences))]
    made = " and ".join(name for name, tensors in named if any(t is not None and t.is_inference() for t in tensors))
    raise RuntimeError(
        f"{made or 'an argument'} made in torch.inference_mode() cannot be saved for a backward pass; make it outside "
        "of inference mode, where clone() of a tensor does, or call under torch.no_grad()"
    ) from error


def _keep(ctx: Any, plan: Plan, x: Inputs, results: tuple[Tensor, ...]) -> None:
    """Save the tensors for the backward pass; lse is saved instead of an (Lq, Lk) matrix."""
    entropies = results[-1:] if plan.saved_layout.has_entropy else ()
    ctx.save_for_backward(results[0], results[1], x.q, x.k, x.v, x.bias, x.sink, *x.others, *entropies)
    ctx.set_materialize_grads(False)  # an unused lse must not cost a dlse of zeros
    ctx.plan = plan


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: Tensor | None) -> Gradients:
    """Return the five gradients from the gradients of the results; maximum scores have no gradient."""
    dentropy = others[-1] if ctx.plan.saved_layout.has_entropy else None
    if dout is None and dlse is None and dentropy is None:
        return None, None, None, None, None
    kept = ctx.saved_tensors
    return differentiate(ctx.plan, torch.zeros_like(kept[0]) if dout is None else dout, dlse, *kept, dentropy=dentropy)


def _gradients_in_forward_mode(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *kept: Any) -> Gradients:
    """Return the five gradients that autograd asks for.

    Inside of jvp `requires_grad` is False for inputs that do need a gradient, so the plan does not know of them.
    """
    plan, needs_grad = ctx.plan, NeedsGrad(*ctx.needs_input_grad[1 : 1 + NUM_INPUTS])
    if not any(needs_grad) or (dout is None and dlse is None):
        return None, None, None, None, None
    if needs_grad != plan.problem.needs_grad:
        plan = _replan(plan, plan.problem._replace(needs_grad=needs_grad))
    return differentiate(plan, torch.zeros_like(kept[0]) if dout is None else dout, dlse, *kept)


class Attention(torch.autograd.Function):
    """Compute the results of a call, with the gradients of the contract.

    Its `forward` takes `ctx`, which is 11 us faster in torch than a separate `setup_context`. Tensors without gradients
    are saved, but are no inputs of the function, which also saves time.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, plan: Plan, x: Inputs
    ) -> tuple[Tensor, ...]:
        """Run the forward pass on x, which holds the same tensors."""
        results = run_forward(plan, x)
        _keep(ctx, plan, x, results)
        return results

    @staticmethod
    def backward(ctx: Any, *sent: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass, differentiable again under create_graph=True."""
        return *_gradients(ctx, *sent), None, None


# `Attention.apply` as C++ defines it. The Python method in front of it looks for transforms of `torch.func`, which
# takes as long as an allocation; `attend` has ruled out transforms. It also unwraps tensors that have outlived a
# transform, which `_unwrapped` does here.
_record = super(torch.autograd.Function, Attention).apply
_unwrapped = torch._C._functorch.unwrap_if_dead


class TransformedAttention(torch.autograd.Function):
    """Compute the results under transforms of `torch.func` and compilers, which need every tensor as an input.

    After the plan it takes the arguments of `SavedLayout.inputs`.
    """

    @staticmethod
    def forward(plan: Plan, *inputs: Any) -> tuple[Tensor, ...]:
        record(plan)
        return run_forward(plan, plan.saved_layout.inputs(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *tensors = inputs
        ctx.num_others = len(tensors) - NUM_INPUTS
        _keep(ctx, plan, plan.saved_layout.inputs(*tensors), output)

    @staticmethod
    def backward(ctx: Any, *sent: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx, *sent), *(None,) * ctx.num_others

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, *tensors: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Run one forward pass for all mapped calls, or one for each."""
        (q, k, v, bias, sink, *others), dims = tensors, in_dims[1:]
        if dims[4] is not None or _runs_one_by_one(plan):
            return stacked([_attend_alone(plan, *each) for each in each_call(info.batch_size, dims, tensors)])
        # The inputs show which gradients will be needed; the sink is the same for all calls.
        needs_grad, mapped = Inputs(q, k, v, bias=bias, sink=sink).needs_grad, (q, k, v, bias)
        call = MappedCall(
            info.batch_size, dims[:4], dims[5:], plan.problem, mapped, others, needs_grad, _reads_repeats(plan)
        )
        replanned = _replan(plan, call.problem)
        results = attend(replanned, replanned.saved_layout.inputs(*call.inputs, sink, *call.mask))
        return tuple(call.split(x) for x in results), (0,) * len(results)


class DualAttention(TransformedAttention):
    """`TransformedAttention` with a jvp, which `torch.compile` refuses to trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        TransformedAttention.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *sent: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse = sent  # calls in forward mode have no other results
        gradients = _gradients_in_forward_mode(ctx, dout, dlse, *ctx.saved_tensors)
        return None, *gradients, *(None,) * ctx.num_others

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        x, _ = _take_apart(ctx.plan.saved_layout.inputs(*ctx.saved_tensors[2:]))
        return _attend_with_tangents(ctx.plan, x, Tangents(*tangents[:NUM_INPUTS]))[2:]


class TangentAttention(torch.autograd.Function):
    """Compute (out, lse, tout, tlse): a call in forward mode, with the gradients of all of them.

    Its arguments after the plan are the five inputs, their tangents, and the other tensors of the call.
    """

    @staticmethod
    def forward(plan: Plan, *tensors: Any) -> tuple[Tensor, ...]:
        return _run_tangents(plan, *_apart(plan, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, *tensors = inputs
        ctx.save_for_backward(*output[:2], *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass of the call, or the pass that differentiates tangents, if the loss contains them."""
        plan, (out, lse, *tensors), needs_grad = ctx.plan, ctx.saved_tensors, tuple(ctx.needs_input_grad[1:])
        others = (None,) * (len(tensors) - 2 * NUM_INPUTS)
        if all(x is None for x in cotangents):
            return (None,) * (1 + len(tensors))
        if cotangents[2] is None and cotangents[3] is None:
            x, _ = _apart(plan, tensors)
            inputs = (x.q, x.k, x.v, x.bias, x.sink, *x.others)
            gradients = _gradients_in_forward_mode(ctx, *cotangents[:2], out, lse, *inputs)
            return None, *gradients, *(None,) * NUM_INPUTS, *others
        needed = needs_grad[: 2 * NUM_INPUTS]
        dout, dlse, dtout, dtlse = cotangents
        cotangents = dout, narrow(dlse, out.dtype), dtout, narrow(dtlse, out.dtype)
        return None, *TangentGradients.apply(plan, needed, *cotangents, lse, *tensors), *others

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError(
            "attention has no forward-mode derivative of its tangents (torch.func.jvp of jvp, jacfwd of jacfwd); "
            'take jacfwd of jacrev, as torch.func.hessian does, or call attention(..., backend="reference")'
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, *tensors: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        each = []
        for call_tensors in each_call(info.batch_size, in_dims[1:], tensors):
            x, tangents = _apart(plan, call_tensors)
            replanned = _replan(plan, plan.problem._replace(needs_grad=x.needs_grad))
            each.append(_attend_with_tangents(replanned, x, tangents))
        return stacked(each)


def _apart(plan: Plan, tensors: Sequence[Any]) -> tuple[Inputs, Tangents]:
    """Read the arguments of `TangentAttention` after the plan."""
    inputs, tangents, others = tensors[:NUM_INPUTS], tensors[NUM_INPUTS : 2 * NUM_INPUTS], tensors[2 * NUM_INPUTS :]
    return plan.saved_layout.inputs(*inputs, *others), Tangents(*tangents)


def _take_apart(x: Inputs) -> tuple[Inputs, Tangents]:
    """Return the inputs of a call without their tangents, and the tangents."""
    duals: list[Any] = [None if t is None else forward_ad.unpack_dual(t) for t in (x.q, x.k, x.v, x.bias, x.sink)]
    primals: list[Any] = [None if dual is None else dual.primal for dual in duals]
    tangents = Tangents(*(None if dual is None else dual.tangent for dual in duals))
    return x._replace(**dict(zip(NeedsGrad._fields, primals, strict=True))), tangents


def _run_tangents(plan: Plan, x: Inputs, tangents: Tangents) -> tuple[Tensor, ...]:
    problem = plan.problem
    backend = select_tangents(problem, plan.forward)
    report_last_resort(plan, FORWARD_MODE, backend, plan.forward)
    record(replace(plan, forward=backend))
    is_shown = problem.device == "meta" or profiler._is_profiler_enabled or is_batched(*tangents)
    if is_shown or is_watched(*x[:3], *tangents):
        return operators.tangents(problem, backend.name, x, tangents)
    return tangents_pass(backend, problem)(x, tangents)


class TangentGradients(torch.autograd.Function):
    """Compute the gradients of out, lse and their tangents; they have no derivatives in turn.

    Its arguments after the plan and the needed gradients, ten flags, are the gradients of the results, lse, the inputs,
    their tangents, and the other tensors of the call.
    """

    @staticmethod
    def forward(plan: Plan, needs_grad: tuple[bool, ...], *tensors: Any) -> tuple[Tensor | None, ...]:
        if is_batched(*tensors):
            raise NotImplementedError(
                "attention has no gradients of tangents in a batch (is_grads_batched=True, vectorize=True); "
                "ask for one after the other, or take torch.func.hessian, or torch.func.vmap of torch.func.vjp"
            )
        sent, lse = Cotangents(*tensors[:4]), tensors[4]
        tangents = Tangents(*tensors[5 + NUM_INPUTS : 5 + 2 * NUM_INPUTS])
        x = plan.saved_layout.inputs(*tensors[5 : 5 + NUM_INPUTS], *tensors[5 + 2 * NUM_INPUTS :])
        problem = plan.problem
        backend = select_tangent_gradients(problem, select_tangents(problem, plan.forward), plan.requested)
        report_last_resort(plan, TANGENT_GRADIENT, backend, plan.forward)
        if is_watched(*x[:3], *tangents, *sent) or profiler._is_profiler_enabled:
            return operators.tangent_gradients(problem, backend.name, x, tangents, lse, sent, needs_grad)
        both = tangent_gradients_pass(backend, problem, needs_grad)(x, tangents, lse, sent)
        return (*both[0], *both[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save no tensors: there are no derivatives."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(_NO_THIRD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(_NO_THIRD)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, needs_grad: tuple[bool, ...], *tensors: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        each = [
            TangentGradients.apply(plan, needs_grad, *call) for call in each_call(info.batch_size, in_dims[2:], tensors)
        ]
        return stacked(each)


_NO_THIRD = (
    "a gradient of attention that contains tangents has no derivative; "
    'call attention(..., backend="reference"), which has derivatives of every order'
)


class AttentionBackward(torch.autograd.Function):
    """Compute the gradients of a call as an autograd function, so that they have a derivative.

    It takes the arguments of `differentiate`, with the gradient of entropies after dlse.
    """

    @staticmethod
    def forward(
        plan: Plan, dout: Tensor, dlse: Tensor | None, dentropy: Tensor | None, *kept: Any
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass; no (Lq, Lk) matrix is saved for the second derivative."""
        return _run_backward(plan, dout, dlse, dentropy, kept, is_watched(dout, dlse, dentropy, *kept))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, *tensors: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """Run one backward pass for all mapped calls, or one for each."""
        (dout, dlse, dentropy, out, lse, q, k, v, bias, sink, *others), dims = tensors, in_dims[1:]
        needs_grad = plan.problem.needs_grad
        if dims[9] is not None or needs_grad.sink or _runs_one_by_one(plan):
            calls = each_call(info.batch_size, dims, tensors)
            return stacked([differentiate(plan, *call[:2], *call[3:], dentropy=call[2]) for call in calls])
        entropies = [others.pop()] if plan.saved_layout.has_entropy else []
        mapped, where = (q, k, v, bias), (dims[5:9], dims[10 : 10 + len(others)])
        repeats = _reads_repeats(plan)
        call = MappedCall(info.batch_size, *where, plan.problem, mapped, others, needs_grad, repeats, is_backward=True)
        if plan.backward is not None and plan.backward.accepts(call.problem, "backward"):
            replanned = replace(plan, problem=call.problem, run_forward=None, run_backward=None)
        else:
            replanned = _replan(plan, call.problem)
        dout, out, lse = (call.fold(x, dim) for x, dim in zip((dout, out, lse), (dims[0], *dims[3:5]), strict=True))
        dlse, dentropy = (
            None if x is None else call.fold(x, dim) for x, dim in zip((dlse, dentropy), dims[1:3], strict=True)
        )
        kept = (*call.inputs, sink, *call.mask, *[call.fold(x, dims[-1]) for x in entropies])
        *gradients, _ = differentiate(replanned, dout, dlse, out, lse, *kept, dentropy=dentropy)
        split = (call.split, call.split, call.split, call.split_bias)
        results = (*(None if x is None else back(x) for x, back in zip(gradients, split, strict=True)), None)
        return results, tuple(None if x is None else 0 for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save the inputs of the gradients, without out and lse, which are computed from them again."""
        ctx.plan, dout, dlse, dentropy, _, _, *tensors = inputs
        ctx.save_for_backward(dout, dlse, dentropy, *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate the gradient formula of the backend, or for auto of eager; p is an (Lq, Lk) matrix there."""
        plan: Plan = ctx.plan
        problem, arrival = plan.problem, plan.problem.arrival
        assert plan.backward is not None
        backend = select_second_derivative(problem, plan.backward, plan.requested)
        report_last_resort(plan, SECOND_DERIVATIVE, backend, plan.backward)
        formula = backend.differentiable_backward
        assert formula is not None
        num_inputs = 3 + NUM_INPUTS
        inputs, others = ctx.saved_tensors[:num_inputs], ctx.saved_tensors[num_inputs:]
        no_inputs = others[:-1] if plan.saved_layout.has_entropy else others
        present = [x for x in inputs if x is not None]

        def gradients_needed(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            arguments: list[Any] = [None if x is None else next(rest) for x in inputs]
            dout, dlse, dentropy, *with_gradients = arguments
            x = plan.saved_layout.inputs(*with_gradients, *no_inputs).in_rows(arrival)
            sent = (dout, dlse) if dentropy is None else (dout, dlse, dentropy)
            gradients = formula(problem, x, *(result_in_rows(each, arrival) for each in sent))
            pairs = zip(as_arrived(gradients, arrival), problem.needs_grad, strict=False)
            return tuple(g for g, needed in pairs if needed and g is not None)

        # torch.func.vjp, unlike autograd.grad, also works under torch.func transforms.
        pull = torch.func.vjp(gradients_needed, *present)[1]
        second = iter(pull(tuple(g for g, needed in zip(cotangents, problem.needs_grad, strict=True) if needed)))
        ddout, ddlse, ddentropy, *input_gradients = (None if x is None else next(second) for x in inputs)
        return None, ddout, ddlse, ddentropy, None, None, *input_gradients, *(None,) * len(others)


class DualAttentionBackward(AttentionBackward):
    """`AttentionBackward` with a jvp, which `torch.compile` refuses to trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        AttentionBackward.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, _plan: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the tangents of the gradients: the gradients of <tout, dout> + <tlse, dlse>, and of their tangents."""
        plan: Plan = ctx.plan
        saved = [None if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
        dout, dlse, _dentropy, _out, lse, *tensors = saved
        inputs, others = tensors[:NUM_INPUTS], tensors[NUM_INPUTS:]
        tdout, tdlse, _tdentropy, _tout, _tlse, *input_tangents = tangents[: 5 + NUM_INPUTS]
        needs_grad = (*plan.problem.needs_grad, *(False,) * NUM_INPUTS)
        sent = (tdout, tdlse, dout, dlse)
        gradients: Gradients = TangentGradients.apply(plan, needs_grad, *sent, lse, *inputs, *input_tangents, *others)
        return gradients[:NUM_INPUTS]


def _runs_one_by_one(plan: Plan) -> bool:
    """Return whether mapped calls cannot be folded into one: sequences and dropout number the entries of each call."""
    return plan.saved_layout.has_dropout or plan.saved_layout.num_sequence_tensors > 0


def _attend_alone(plan: Plan, *tensors: Any) -> tuple[Tensor, ...]:
    """Return the results of one mapped call; its inputs show which gradients it needs."""
    inputs = plan.saved_layout.inputs(*tensors)
    return attend(_replan(plan, plan.problem._replace(needs_grad=inputs.needs_grad)), inputs)


def _reads_repeats(plan: Plan) -> bool:
    """Return whether masks and biases for only a part of a mapped batch are supported; else they are expanded."""
    backends = (plan.forward, plan.backward)
    return choice_in_force(plan.requested) == "auto" or all(x is None or x.repeats_entries for x in backends)


def _replan(plan: Plan, problem: AttentionProblem) -> Plan:
    """Choose backends for a call that a transform has changed; its mask keeps the form that it has."""
    forward, backward = select_pair(problem, plan.requested)
    replanned = replace(
        plan,
        described=problem,
        problem=problem,
        forward=forward,
        backward=backward,
        run_forward=None,
        run_backward=None,
    )
    return paired_for_tangents(replanned) if forward.is_differentiable else replanned


def paired_for_tangents(plan: Plan) -> Plan:
    """Return the plan for forward mode; a backend that PyTorch differentiates in reverse mode only is replaced."""
    problem = plan.problem
    forward = select_tangents(problem, plan.forward)
    backward = None
    if any(problem.needs_grad):
        backward = select_backward(problem, forward.name)
    return replace(
        plan, forward=forward, backward=backward, is_differentiable=False, run_forward=None, run_backward=None
    )


_read_operator: Any = by_name(operators.FORWARD_SCHEMA)(lambda arguments: arguments)


def _keep_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the tensors for the backward pass of an exported operator, and choose its backend."""
    arguments = _read_operator(*inputs)
    problem, x = operators.read_call(arguments)
    problem = problem._replace(needs_grad=x.requires_grad)
    # It is unknown whether lse will have a gradient.
    chosen = select_backward(problem._replace(return_lse=True), arguments.backward or arguments.backend)
    # The forward pass has run, so its backend does not matter here. The operator receives its mask in the form for its
    # passes.
    plan = Plan(problem, problem, chosen, chosen, "auto", MaskChoice(x.mask.form), make_saved_layout(problem))
    _keep(ctx, plan, x, output)
    # An argument that is a list has a list of gradients.
    lists = {name: each for name, each in arguments._asdict().items() if isinstance(each, (list, tuple))}
    ctx.gradients = dict.fromkeys(arguments._fields) | {name: [None] * len(each) for name, each in lists.items()}


def _differentiate_operator(ctx: Any, *sent: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of all arguments of the forward operator, in the order and the lists of its schema."""
    gradients = dict(zip(NeedsGrad._fields, _gradients(ctx, *sent), strict=True))
    return tuple((ctx.gradients | gradients).values())


torch.library.register_autograd(
    "flash_dmattn::attention_forward", _differentiate_operator, setup_context=_keep_operator, lib=LIBRARY
)
