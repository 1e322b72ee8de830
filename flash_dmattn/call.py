"""One call: normalises its arguments, looks up or makes its plan, and runs the plan."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from .autograd import attend, differentiate, paired_for_tangents
from .backends.mask_choice import forward_of, view_of
from .biases import (
    Bias,
    ListBias,
    MadeBias,
    Projected,
    check_made,
    is_made,
    kind_of,
    lower,
    refuse_layouts,
    split,
)
from .caches import ClockCache
from .definition import is_transform_traced, is_transformed, is_watched
from .dispatch.checkpoints import follow_checkpoints
from .dispatch.config import BackendChoice, Blocks, blocks, invariant, process
from .dispatch.plan import Plan, make_plan
from .dispatch.registry import BACKENDS, on_change
from .dispatch.selection import (
    BackendUnsupportedError,
    choice_in_force,
    choose,
    falls_back,
    record,
    report_fallback,
    select_pair,
    without_order,
)
from .gradients import narrow
from .problem import (
    Arrival,
    Gradients,
    MaskView,
    NeedsGrad,
    RawFlags,
    allows_tf32,
    as_scores,
    fold_call,
    replaced,
)
from .problem.inputs import NO_MASK, Inputs, in_rows
from .reference.dropout import draw_key
from .sequences import Sequences
from .sequences.layout import check_and_describe
from .sequences.padding import Jagged
from .validation import (
    PreparedCall,
    autocast_dtype,
    cast_to,
    check_qkv,
    describe,
    follow_autocast,
    follows_warn_only,
    refuse_dtensors,
)

if TYPE_CHECKING:
    from .validation import Mask

# A decoding program makes a plan for each new length and never uses it again, so the cache is bounded.
plans: ClockCache[Plan] = ClockCache(1024)
on_change.append(plans.clear)


def prepare_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    sink: Tensor | None,
    sequences: Sequences | None,
    raw_flags: RawFlags,
    heads_first: bool = False,
) -> PreparedCall:
    """Normalise the arguments of `attention`; with `heads_first` q, k and v are (B, H, L, D)."""
    by_distance = jagged = leading = repeats = spec = sequence_view = None
    copies: tuple[str, ...] = ()
    arrival: Arrival = "heads_first" if heads_first else "rows"
    values: Any = bias
    is_list_bias = False
    if isinstance(bias, ListBias):
        values, is_list_bias = bias.with_bias(mask), True
    elif is_made(bias):
        bias, q, k, v = follow_made(bias, q, k, v, mask, sequences, raw_flags)
        q, k, values, raw_flags = lower(bias, q, k, raw_flags)
        copies = (f"makes the {kind_of(bias)} in PyTorch, a tensor of {tuple(values.shape)}",)
    elif bias is not None and not isinstance(bias, Tensor):
        values, by_distance = split(bias)
    if sequences is None and isinstance(q, Tensor):
        if q.is_nested:
            jagged = Jagged(q, k, v)
            q, k, v, sequences = jagged.q, jagged.k, jagged.v, jagged.sequences
        elif q.dim() > 4:
            has_rows = None if by_distance is None else by_distance.has_rows
            q, k, v, mask, values, leading, repeats, folded = fold_call(q, k, v, mask, values, has_rows, is_list_bias)
            copies += folded
    if sequences is not None:
        spec, sequence_view = check_and_describe(sequences, q, k, v, mask)
        arrival = "tokens" if spec.packs_queries else "rows"
    q, k, v = follow_autocast(q, k, v)
    if is_transform_traced():
        # For Dynamo the argument of a function below `torch.func.grad` needs no gradient. A view of it needs one.
        views: list[Any] = [x.view_as(x) if isinstance(x, Tensor) else x for x in (q, k, v, values, sink)]
        q, k, v, values, sink = views
    if arrival != "rows" and (torch.compiler.is_compiling() or is_transformed()):
        # The views are steps of the graph then, which compilers and transforms see.
        q, k, v, arrival = in_rows(q, arrival), in_rows(k, arrival), in_rows(v, arrival), "rows"
    # In the order of the fields: names would cost every call half a microsecond.
    # fmt: off
    return PreparedCall(
        q, k, v, mask, values, sink, raw_flags, arrival, repeats, leading,
        spec, sequence_view, jagged, copies, by_distance, is_list_bias,
    )
    # fmt: on


def follow_made(
    bias: MadeBias,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    sequences: Sequences | None,
    raw_flags: RawFlags,
) -> tuple[MadeBias, Tensor, Tensor, Tensor]:
    """Bring a bias that the call makes, q, k and v to the dtype of autocast, and check the bias with them."""
    refuse_layouts(bias, q, mask, sequences)
    if invariant():
        raise BackendUnsupportedError(
            f"bias is a {kind_of(bias)}, which PyTorch makes, in bits that depend on the batch, and "
            "config(invariant=True) is in force: pass a tensor as bias, or leave the mode"
        )
    q, k, v = follow_autocast(q, k, v)
    check_qkv(q, k, v)
    dtype = None if q.dtype == torch.float64 else autocast_dtype(q)  # which leaves fp64 as it is
    if dtype is not None and isinstance(bias, Projected):  # a part of the scores; other biases are not cast
        bias = bias.converted(lambda x: cast_to(x, dtype))
    check_made(bias, q, k, mask, raw_flags)
    return bias, q, k, v


def run_call(call: PreparedCall, backend: BackendChoice, dropout: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return out, lse, and the other requested results, in the shapes that `attention` documents.

    The other results are the maximum scores and entropies of rows, in this order, or the probabilities. The key of
    dropout is drawn here, unless the call repeats another one.
    """
    follow_checkpoints()
    active_blocks = blocks.now
    plan, mask, bias = plan_for(call, backend, active_blocks)
    problem = plan.described
    if plan.falls_back:
        report_fallback(problem)
    is_forward_mode = forward_ad._current_level >= 0
    if is_forward_mode and plan.is_differentiable and not plan.forward.has_forward_ad:
        plan = paired_for_tangents(plan)
    # Where torch transforms a call, another one may run, on other backends: `autograd` records the watched calls.
    is_final = plan.is_differentiable or (plan.run_forward is not None and not is_forward_mode)
    if is_final and active_blocks.records is not None:
        record(plan)
    if dropout is None and problem.flags.dropout_p > 0:
        dropout = draw_key(call.q.device)
    view = view_for(call, plan, mask, bias)
    inputs = Inputs(call.q, call.k, call.v, view, bias, call.sink, call.sequences, dropout)
    results: tuple[Tensor, ...]
    if plan.is_differentiable:
        # A plan has no passes if sizes may be symbols. Then the pass is planned for this call only.
        results = (plan.run_forward or forward_of(plan.forward, plan.problem))(inputs)
    else:
        results = attend(plan, inputs)
        if problem.return_lse:
            results = (results[0], narrow(results[1], problem.dtype), *results[2:])
    if call.leading is not None:
        return tuple(x.view(*call.leading, *x.shape[1:]) for x in results)
    if call.spec is not None and call.spec.packs_queries and call.arrival == "rows":
        results = tuple(x.squeeze(0) for x in results)
    return results if call.jagged is None else call.jagged.wrap(results)


def differentiate_call(
    call: PreparedCall, backend: BackendChoice, lse: Tensor, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad
) -> Gradients:
    """Return gradients of a call whose values are zeros from its lse, without its forward pass.

    dout is shaped as out, and dlse as lse; all have the batch dims and the layout of `call`. They are as `Flags.sums`
    needs them. The gradient of v has the dtype of dout. Autograd does not record the gradients.
    """
    follow_checkpoints()
    with torch.no_grad():
        plan, mask, bias = plan_for(call, backend, blocks.now, needs_grad, pairs_only=True)
        if plan.backward is None:
            name = plan.forward.name
            raise BackendUnsupportedError(
                f"backend {name!r} has no backward pass that starts from lse; pass backend='auto', or another one",
                backend=name,
            )
        if plan.falls_back:
            report_fallback(plan.described)
        inputs = Inputs(call.q, call.k, call.v, view_for(call, plan, mask, bias), bias, call.sink, call.sequences)
        v = inputs.v.to(dout.dtype)  # in fp32 also for calls in 16 bits, where dout is
        kept = (torch.zeros_like(dout), lse, inputs.q, inputs.k, v, inputs.bias, inputs.sink, *inputs.others)
        return differentiate(plan, dout, dlse, *kept)


def view_for(call: PreparedCall, plan: Plan, mask: Mask, bias: Tensor | None) -> MaskView:
    """Return the mask of a call in the form that its plan has chosen."""
    if mask is None:
        return NO_MASK
    if plan.view is not None and not profiler._is_profiler_enabled:  # a profiler shows the operators that pack
        return plan.view(mask, call.k, call.v, bias)
    return view_of(plan.described, plan.choice, mask, call.sequences)


def plan_for(
    call: PreparedCall,
    backend: BackendChoice,
    active_blocks: Blocks,
    needs_grad: NeedsGrad | None = None,
    pairs_only: bool = False,
) -> tuple[Plan, Mask, Tensor | None]:
    """Return the plan of a call with the settings of the active `with` blocks, and its mask and bias as 4-D views.

    With `needs_grad` it is planned for these gradients. With `pairs_only` auto takes no backend whose forward pass
    PyTorch differentiates.
    """
    key = _key(call, backend, active_blocks)
    if needs_grad is not None and key is not None:
        key = (needs_grad, pairs_only, *key)
    try:
        plan = None if key is None else plans.get(key)
    except TypeError:  # the key has no hash, because a list was passed for a number or a name
        key = plan = None
    if plan is not None:
        mask, bias = call.mask, call.bias
        mask = as_scores(mask) if isinstance(mask, Tensor) else mask
        return plan, mask, None if bias is None else as_scores(bias)
    if key is None:
        refuse_dtensors(call.q, call.k, call.v, call.mask, call.bias, call.sink)
    problem, mask, bias = describe(call)
    if needs_grad is not None:
        flags = replaced(problem.flags, sums=pairs_only)
        problem = replaced(problem, needs_grad=needs_grad, flags=flags)
    requested = choice_in_force(backend)
    if follows_warn_only(call, problem):
        problem = without_order(problem, requested)
    selection = (select_pair if pairs_only else choose)(problem, requested)
    # Sizes are tensors under torch.jit.trace, and symbols under compilers. Meta tensors have no values for a pass.
    is_plain = key is not None and type(problem.seqlen_q) is int
    is_last_resort, has_values = falls_back(problem, requested, selection), problem.device != "meta"
    plan = make_plan(problem, *selection, requested, call.arrival, is_last_resort, is_plain and has_values)
    if active_blocks.fallback is not None:
        plan = replace(plan, fallback=active_blocks.fallback)
    if is_plain and key is not None:
        plans.put(key, plan)
    return plan, mask, bias


def _key(call: PreparedCall, backend: BackendChoice, active_blocks: Blocks) -> tuple[Any, ...] | None:
    """Return everything that decides a plan, or None if the plan of this call must not be reused.

    It is None for a watched call, whose sizes may be symbols. It is also None if q, k or v is None or a tensor has no
    strides: the error of validation names the argument, which is clearer than an AttributeError here.
    """
    q, k, v, mask, bias, sink, flags, *_ = call
    if q is None or k is None or v is None:  # a caller without type hints
        return None  # type: ignore[unreachable]
    is_prepared = mask is not None and not isinstance(mask, Tensor)
    # An argument that is no mask goes on as it is, for validation to refuse.
    if is_watched(q, k, v, bias, sink, *(getattr(mask, "tensors", (mask,)) if is_prepared else (mask,))):
        return None
    window: Any = flags.window_size
    if window is not None and type(window) is not tuple:
        if type(window) is not list:
            return None
        window = tuple(window)
        flags = flags._replace(window_size=window)
    try:
        return (
            tensor_key(q),
            tensor_key(k),
            tensor_key(v),
            _mask_key(mask),
            None if bias is None else tensor_key(bias),
            None if sink is None else tensor_key(sink),
            flags,
            tuple(map(type, flags if window is None else (*flags, *window))),  # True == 1 == 1.0
            call.arrival,
            call.repeats,
            call.leading,
            call.spec,
            call.by_distance,
            call.is_list_bias,
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(),
            allows_tf32(q.dtype),
            # The settings themselves, and not the choice that follows from them, which takes longer to compute.
            backend,
            active_blocks.backend,
            active_blocks.disabled,
            active_blocks.fallback,
            active_blocks.invariant,
            process.invariant,
            process.default_backend,
            process.disabled,
            BACKENDS.version,
        )
    except RuntimeError:  # a sparse or a nested tensor has no strides
        return None


def _mask_key(mask: Mask) -> object:
    """Return the properties of a mask that distinguish classes of calls."""
    if mask is None or isinstance(mask, Tensor):
        return None if mask is None else tensor_key(mask)
    return mask._call_key


def tensor_key(x: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that distinguish classes of calls."""
    # The layout, too, because mkldnn tensors have strides like dense ones.
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.layout


def _outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function out of compiled graphs, which break around it; `fullgraph=True` is refused with this reason."""
    reason = f"attention in one graph needs torch 2.11 or later, and this is {torch.__version__}"
    outside = torch._disable_dynamo(function)

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        # Without a compiler the other one would import it.
        return (outside if "torch._dynamo" in sys.modules else function)(*arguments, **named)

    # As torch.compiler.disable(reason=...) does, without its import of dynamo.
    vars(run).update({"_torchdynamo_disable": True, "_torchdynamo_disable_msg": reason})
    return run


if torch.__version__ < "2.11":  # there, Dynamo does not support properties of a NamedTuple
    prepare_call, run_call = _outside_of_graphs(prepare_call), _outside_of_graphs(run_call)
    differentiate_call = _outside_of_graphs(differentiate_call)
