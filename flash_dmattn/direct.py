"""Calls that nothing watches: an `autograd.Function` with the least on the way to kernels, ready for a class of calls.

A call comes here that has been remembered, so no compiler, dispatch mode, transform of `torch.func`, tensor subclass or
fake tensor is about. Its gradients are those of `Attention`; where something has come to watch the backward pass, it
goes the way of `Attention` too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from .autograd import Attention, Passes, differentiate, run_forward
from .backends.direct import DirectBackward, DirectForward
from .backends.protocol import is_composite, provided
from .definition import is_batched
from .dispatch.call_cache import CallClass
from .dispatch.config import BackendChoice
from .dispatch.selection import choice_in_force
from .operators import is_watched
from .problem import MaskView

Strides = tuple[tuple[int, ...] | None, ...]


class Ready(NamedTuple):
    """What the calls of a class run, decided with the first of them.

    Attributes:
        passes: as `Attention` has them.
        forward, backward: the passes that backends made ready; None where they had nothing to decide beforehand.
        strides: of q, k, v and bias as the backward pass was made ready for, and of a dense mask.
    """

    passes: Passes
    forward: DirectForward | None
    backward: DirectBackward | None
    strides: Strides


def is_ready(found: CallClass | None) -> bool:
    """Whether a call of a class goes this way; a profiler is shown what goes through the dispatcher."""
    return found is not None and not profiler._is_profiler_enabled and found.problem.device != "meta"


def ready_for(found: CallClass, mask: MaskView, requested: BackendChoice, number_of_sequence_tensors: int) -> Ready:
    """What a class of calls of a pair of backends runs.

    Args:
        found: the class.
        mask: of the call, as backends receive it.
        requested: the `backend` of the call.
        number_of_sequence_tensors: of calls with sequences, which stand behind those of the mask.
    """
    key = (mask.form, requested)
    ready: Ready | None = found.ready.get(key)
    if ready is None:
        ready = found.ready[key] = _ready(found, mask, requested, number_of_sequence_tensors)
    return ready


def _ready(found: CallClass, mask: MaskView, requested: BackendChoice, number_of_sequence_tensors: int) -> Ready:
    problem, forward, backward = found.problem, found.forward, found.backward
    assert not is_composite(forward)
    behind = (number_of_sequence_tensors, problem.dropout_p > 0)
    passes = Passes(problem, forward, backward, mask.form, choice_in_force(requested), *behind)
    make_forward, make_backward = provided(forward, "direct_forward"), provided(backward, "direct_backward")
    first = None if make_forward is None else make_forward(problem, mask)
    second = None if make_backward is None else make_backward(problem, mask)
    of_bias = None if problem.bias is None else problem.bias.strides
    strides = (problem.q_strides, problem.k_strides, problem.v_strides, of_bias)
    dense = mask.dense
    return Ready(passes, first, second, (*strides, None if dense is None else dense.stride()))


def attend_directly(
    ready: Ready,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    mask: tuple[Tensor, ...],
    dropout: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, recorded where it has gradients."""
    if ready.passes.backward is None:
        return run_ready(ready, q, k, v, bias, sink, mask, dropout)
    results: tuple[Tensor, Tensor] = DirectAttention.apply(q, k, v, bias, sink, ready, mask, dropout)
    return results


def run_ready(
    ready: Ready,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    mask: tuple[Tensor, ...],
    dropout: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse), by the pass that was made ready, or by that of the pair."""
    if ready.forward is not None:
        return ready.forward(q, k, v, bias, sink, mask, dropout)
    passes = ready.passes
    behind = passes.split(mask if dropout is None else (*mask, dropout))
    return run_forward(passes.forward, passes.problem, q, k, v, bias, sink, *behind)


class DirectAttention(torch.autograd.Function):
    """`Attention` of calls that nothing watches.

    torch takes 11 us less to run a `forward` that receives `ctx` than one beside a `setup_context`, which transforms of
    `torch.func` need. The mask and the key of dropout take no gradient, and are saved without being inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        ready: Ready,
        mask: tuple[Tensor, ...],
        dropout: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass, and keep what the backward pass reads, in the order of `Attention`."""
        out, lse = run_ready(ready, q, k, v, bias, sink, mask, dropout)
        if dropout is not None:
            mask = (*mask, dropout)
        ctx.save_for_backward(q, k, v, bias, sink, out, lse, *mask)
        ctx.set_materialize_grads(False)  # an unused lse must not cost a dlse of zeros
        ctx.ready = ready
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass as it was made ready, or as `Attention` does."""
        saved = ctx.saved_tensors
        q, k, v, bias, sink, out, lse, *mask = saved
        ready: Ready = ctx.ready
        if dout is None:
            if dlse is None:
                return None, None, None, None, None, None, None, None
            dout = torch.zeros_like(out)
        run, passes = ready.backward, ready.passes
        if run is None or not is_as_made(ready.strides, dout, dlse, saved):
            found = differentiate(dout, dlse, q, k, v, bias, sink, out, lse, passes, *mask)
            return *found, None, None, None
        dropout = mask.pop() if passes.has_dropout else None
        gradients = run(dout, dlse, q, k, v, bias, sink, out, lse, tuple(mask), dropout)
        if sink is None:
            return *gradients, None, None, None, None
        return *gradients, None, None, None


def is_as_made(strides: Strides, dout: Tensor, dlse: Tensor | None, saved: tuple[Any, ...]) -> bool:
    """Whether a backward pass can run as it was made ready.

    Nothing has come to watch it, and saved tensors lie as the class has them: hooks on them may bring copies back.
    """
    is_shown = is_watched(dout, dlse, *saved) or profiler._is_profiler_enabled
    if torch.is_grad_enabled() or is_shown or is_batched(dout, dlse):
        return False
    q, k, v, bias, _, out, lse, *mask = saved
    if (
        q.stride() != strides[0]
        or k.stride() != strides[1]
        or v.stride() != strides[2]
        or not (bias is None or bias.stride() == strides[3])
        or not (out.is_contiguous() and lse.is_contiguous())
    ):
        return False
    if strides[4] is not None:
        return mask[0].stride() == strides[4]
    for x in mask:
        if not x.is_contiguous():
            return False
    return True


# Messages of torch name a function, and these are the words that they have for `Attention`.
DirectAttention._backward_cls.__name__ = Attention._backward_cls.__name__
# What the engine calls; torch's own looks first which of two names the function has for its backward pass.
DirectAttention._backward_cls.apply = DirectAttention.backward  # type: ignore[attr-defined]
