"""Calls that are alike, found by one look-up: their description, and the backends that serve them.

Describing a call and choosing its backends takes the host longer than a small call takes a GPU. Both follow from what a
key holds, which is no tensor: a call that agrees with an earlier one in all of it has been validated with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..backends.protocol import AnyBackend, KernelBackend
from ..definition import is_watched
from ..problem import AttentionProblem
from ..remembered import Remembered
from .checkpoints import follow_checkpoints
from .config import BackendChoice, blocks, process
from .registry import BACKENDS, on_change
from .selection import Selection, choice_in_force, falls_back

if TYPE_CHECKING:
    from ..masks import PreparedMask, SequenceTileMask, TreeMask

Key = tuple[Any, ...]


class CallClass(NamedTuple):
    """What the calls of a class have in common."""

    problem: AttentionProblem
    forward: AnyBackend
    backward: KernelBackend | None
    ready: dict[Any, Any]  # what `flash_dmattn.direct` decides once, by the form of the mask and the choice of the call


# A program that decodes meets a new class of calls with each length, and asks for none of them again.
_classes: Remembered[CallClass] = Remembered(1024)


def forget() -> None:
    """Describe and choose anew in the next call of every class: there are other backends now, or other rules."""
    _classes.clear()


on_change.append(forget)


def look_up(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None,
    bias: Tensor | None,
    flags: tuple[Any, ...],
    backend: BackendChoice,
    sink: Tensor | None = None,
) -> tuple[Key | None, CallClass | None]:
    """The key of a call, None where it has to be looked at itself, and what is remembered under it.

    Args:
        flags: the other arguments of `describe`, in its order.

    A call has no key where its sizes may be symbols, and where it is recorded. Nor has it one where only validation can
    name what is wrong: q, k or v is None, a tensor has no strides, something cannot be hashed.
    """
    window_size = flags[3]
    is_prepared = not (mask is None or isinstance(mask, Tensor))
    if (
        is_watched(q, k, v, bias, sink, *(getattr(mask, "tensors", (mask,)) if is_prepared else (mask,)))
        or (around := blocks.now).records is not None
        or not (window_size is None or type(window_size) is tuple)
        or q is None
        or k is None
        or v is None
    ):
        return None, None
    try:
        tensors = (
            tensor_key(q),
            tensor_key(k),
            tensor_key(v),
            None if mask is None else mask.call_key if is_prepared else tensor_key(mask),  # type: ignore[union-attr, arg-type]
            None if bias is None else tensor_key(bias),
            None if sink is None else tensor_key(sink),
        )
    except RuntimeError:  # a sparse or a nested tensor has no strides
        return None, None
    kinds = tuple(map(type, flags if window_size is None else (*flags, *window_size)))  # True == 1 == 1.0
    follow_checkpoints()
    try:
        key = (
            *tensors,
            flags,
            kinds,
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            # Settings one by one, as they lie: what is chosen from them is the same where they are.
            backend,
            around.backend,
            around.disabled,
            process.default_backend,
            process.disabled,
            BACKENDS.version,
        )
        return key, _classes.get(key)
    except TypeError:  # a list in the place of a number or of a name has no hash
        return None, None


def remember(key: Key, problem: AttentionProblem, selection: Selection, backend: BackendChoice) -> CallClass | None:
    """Let later calls of the class do without a description and a choice of their own; None where they may not.

    Not where "auto" falls back to eager: every such call warns or is refused, as the policy is at its time.
    """
    if type(problem.seqlen_q) is not int or falls_back(problem, choice_in_force(backend), selection):
        return None  # under torch.jit.trace sizes are tensors
    return _classes.keep(key, CallClass(problem, *selection, {}))


def tensor_key(x: Tensor) -> Key:
    """Tell classes of calls apart by this of a tensor."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.layout  # tensors of mkldnn have strides, too
