"""Calls whose q, k and v are (B, H, L, D), as models hand them over: the way of `flash_dmattn.direct`, with less on it.

`attention` takes (B, L, H, D). A layer of a model would record three transpositions for it, and run three more in its
backward pass; here they are no steps of the graph, and where the kernels read addresses alone there are none.

A layer that is checkpointed runs twice, and has to save the same both times. So every call that may come here does, the
first of a class too, and where a profiler or a dispatch mode is to be shown operators they are run from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from .autograd import Attention, differentiate
from .backends.direct import DirectBackward, DirectForward
from .backends.protocol import is_composite, provided
from .direct import Ready, Strides, is_as_made, ready_for, run_ready
from .dispatch.call_cache import CallClass, look_up, remember, tensor_key
from .dispatch.checkpoints import follow_checkpoints
from .dispatch.config import blocks, process
from .dispatch.mask_view import mask_view
from .dispatch.registry import BACKENDS, on_change
from .dispatch.selection import choice_in_force, choose, falls_back, select
from .problem import MaskView
from .reference.dropout import draw_key
from .remembered import Remembered
from .validation import describe

if TYPE_CHECKING:
    from .masks import PreparedMask


class HeadsFirst(NamedTuple):
    """What the calls of a class run.

    Attributes:
        ready: the class as `flash_dmattn.direct` has it, of (B, L, H, D).
        forward, backward: passes that take (B, H, L, D); None where q, k and v are turned around for those of `ready`.
        strides: as in `Ready`, with q, k and v as they arrive.
    """

    ready: Ready
    forward: DirectForward | None
    backward: DirectBackward | None
    strides: Strides


_classes: Remembered[CallClass | Literal[False]] = Remembered(1024)  # False: its backend has no passes
on_change.append(_classes.clear)

_NO_MASK = MaskView()


def attend_heads_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None,
    bias: Tensor | None,
    is_causal: bool,
    softmax_scale: float | None,
    softcap: float,
    window_size: tuple[int, int] | None,
    sink: Tensor | None,
    dropout_p: float,
) -> Tensor | None:
    """out (B, Lq, Hq, Dv), contiguous, of a call without sequences; None where it has to go through `attention`.

    Args:
        q, k, v: (B, Hq, Lq, D), (B, Hk, Lk, D) and (B, Hk, Lk, Dv), in one dtype: autocast has been followed.
        mask, bias: 4-D, as all else as in `attention`.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return None
    for x in (q, k, v, bias, sink):
        # Nor wrappers that a transform has left behind, which `torch.autograd.Function.apply` would look for.
        if x is not None and ((type(x) is not Tensor and type(x) is not Parameter) or is_wrapped(x)):
            return None
    follow_checkpoints()
    around = blocks.now
    key = (
        *(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        *(q.requires_grad, k.requires_grad, v.requires_grad),
        None if mask is None else tensor_key(mask) if isinstance(mask, Tensor) else mask.call_key,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device, bias.requires_grad),
        None if sink is None else tensor_key(sink),
        *(is_causal, softmax_scale, softcap, window_size, dropout_p),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        around.backend,
        around.disabled,
        process.default_backend,
        process.disabled,
        BACKENDS.version,
    )
    found = _classes.get(key) if around.records is None else None
    if found is None:
        numbers = (is_causal, softmax_scale, softcap, window_size)
        found = _class_of(key, q, k, v, mask, bias, sink, numbers, dropout_p)
    if found is False:
        return None
    problem, forward, backward, _ = found
    view = _NO_MASK if mask is None else mask_view(problem, mask, forward, backward)
    passes = found.ready.get(view.form)
    if passes is None:
        passes = found.ready[view.form] = _heads_first(found, view)
    dropout = draw_key(q.device) if dropout_p > 0 else None
    if backward is None:
        return _forward(passes, q, k, v, bias, sink, view.tensors, dropout)[0]
    out: Tensor = _apply(q, k, v, bias, sink, passes, view.tensors, dropout)
    return out


def _class_of(
    key: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None,
    bias: Tensor | None,
    sink: Tensor | None,
    numbers: tuple[bool, float | None, float, tuple[int, int] | None],
    dropout_p: float,
) -> CallClass | Literal[False]:
    """The class of a call, described where it is the first; False where its backend has no passes."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    flags = (*numbers, None, False, False, None, None, dropout_p)
    place, found = look_up(q, k, v, mask, bias, flags, "auto", sink)
    if found is None:
        problem, _, _ = describe(q, k, v, mask, bias, *flags, sink)
        requested = choice_in_force("auto")
        selection = choose(problem, requested)
        if is_composite(selection.forward) or falls_back(problem, requested, selection):
            if place is not None:
                _classes.keep(key, False)
            return False  # `attention` chooses it again, and says so to whoever records or is warned
        selection = select(problem, "auto")
        if place is None:
            return CallClass(problem, *selection, {})
        found = remember(place, problem, selection, "auto")
        if found is None:
            return False
    # Passes of its own: the rest of the class has those of (B, L, H, D).
    return _classes.keep(key, False if is_composite(found.forward) else found._replace(ready={}))


def _heads_first(found: CallClass, view: MaskView) -> HeadsFirst:
    ready = ready_for(found._replace(ready={}), view, "auto", 0)
    forward, backward, problem = found.forward, found.backward, found.problem
    make_forward = provided(forward, "heads_first_forward")
    make_backward = provided(backward, "heads_first_backward")
    first = None if make_forward is None else make_forward(problem, view)
    second = None if make_backward is None else make_backward(problem, view)
    of_rows = ready.strides[:3]
    strides = tuple(None if x is None else (x[0], x[2], x[1], x[3]) for x in of_rows)
    return HeadsFirst(ready, first, second, (*strides, *ready.strides[3:]))


def _forward(
    passes: HeadsFirst,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    mask: tuple[Tensor, ...],
    dropout: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse), by operators where something is to be shown them."""
    ready = passes.ready
    is_shown = torch._C._len_torch_dispatch_stack() > 0 or profiler._is_profiler_enabled
    is_shown = is_shown or ready.passes.problem.device == "meta"
    if passes.forward is not None and not is_shown:
        return passes.forward(q, k, v, bias, sink, mask, dropout)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return run_ready(ready._replace(forward=None) if is_shown else ready, q, k, v, bias, sink, mask, dropout)


class HeadsFirstAttention(torch.autograd.Function):
    """out of `Attention`, for q, k and v with heads before rows; its gradients lie as they do."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        passes: HeadsFirst,
        mask: tuple[Tensor, ...],
        dropout: Tensor | None,
    ) -> Tensor:
        """Run the forward pass, and keep what the backward pass reads."""
        out, lse = _forward(passes, q, k, v, bias, sink, mask, dropout)
        if dropout is not None:
            mask = (*mask, dropout)
        ctx.save_for_backward(q, k, v, bias, sink, out, lse, *mask)
        ctx.passes = passes
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward pass as it was made ready, or as `Attention` does."""
        saved = ctx.saved_tensors
        q, k, v, bias, sink, out, lse, *mask = saved
        passes: HeadsFirst = ctx.passes
        ready = passes.ready
        of_call = ready.passes
        run = passes.backward
        as_made = is_as_made(passes.strides, dout, None, saved)
        if as_made and run is not None:
            dropout = mask.pop() if of_call.has_dropout else None
            found = run(dout, None, q, k, v, bias, sink, out, lse, tuple(mask), dropout)
            return (*found, None, None, None, None) if sink is None else (*found, None, None, None)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if as_made and ready.backward is not None:
            dropout = mask.pop() if of_call.has_dropout else None
            found = ready.backward(dout, None, q, k, v, bias, sink, out, lse, tuple(mask), dropout)
        else:
            found = differentiate(dout, None, q, k, v, bias, sink, out, lse, of_call, *mask)
        dq, dk, dv = (None if x is None else x.transpose(1, 2) for x in found[:3])
        return dq, dk, dv, found[3], found[4] if len(found) > 4 else None, None, None, None


# As in `flash_dmattn.direct`.
HeadsFirstAttention._backward_cls.__name__ = Attention._backward_cls.__name__
HeadsFirstAttention._backward_cls.apply = HeadsFirstAttention.backward  # type: ignore[attr-defined]
# What torch's own comes to where no transform is about and no tensor is a wrapper of one, as has been asked.
_apply: Any = super(torch.autograd.Function, HeadsFirstAttention).apply
