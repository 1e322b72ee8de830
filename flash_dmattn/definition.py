"""How functions of the library become operators of torch, which are one node of a graph each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

LIBRARY = torch.library.Library("flash_dmattn", "FRAGMENT")


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator and its fake; return what calls it.

    Args:
        name: in `torch.ops.flash_dmattn`.
        schema: of its arguments and results.
        function: what it runs, on every device.
        fake: the same on tensors without values, sending nothing.
    """
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_dmattn::{name}", fake, lib=LIBRARY)
    # The overload packets resolve overloads on every call; `.default` skips that.
    operator: Callable[..., Any] = getattr(torch.ops.flash_dmattn, name).default
    return operator


def unless_watched(operator: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """What calls the function behind an operator where nothing watches, and the operator elsewhere.

    For operators that take no gradient, whose tensors are all made from the first of them. A profiler shows what goes
    through the dispatcher, and on meta tensors an operator runs its fake.
    """

    def run(tensor: Tensor, *others: object) -> Any:
        is_shown = is_watched(tensor) or tensor.is_meta or profiler._is_profiler_enabled
        return (operator if is_shown else function)(tensor, *others)

    return run


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is running: grad, vmap, jvp and what is made of them; compilers undo them."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def distinct(*arguments: Any) -> tuple[Any, ...]:
    """The same arguments; in a graph each tensor is another object, as Dynamo traces no function that takes one twice.

    >>> x = torch.ones(2)
    >>> distinct(x, None, x)[2] is x
    True
    """
    if not torch.compiler.is_compiling():
        return arguments
    return tuple(
        x.view_as(x) if isinstance(x, Tensor) and any(x is earlier for earlier in arguments[:place]) else x
        for place, x in enumerate(arguments)
    )


_calls: dict[int, Callable[..., tuple[Tensor | None, ...]]] = {}  # that run at the moment


def _call_one(dout: Tensor, dlse: Tensor | None, call: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(0) if x is None else x for x in _calls[call](dout, dlse))


LIBRARY.define("one_by_one(Tensor dout, Tensor? dlse, int call) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.impl("one_by_one", _call_one, "CompositeImplicitAutograd")  # what runs in it is recorded as ever


def is_batched(*gradients: Tensor | None) -> bool:
    """Whether gradients are several in one, as `autograd.grad(is_grads_batched=True)` makes them.

    They come from before `torch.func`, and are no subclass: many operators have no rule for them, kernels no pointer.
    """
    if torch.compiler.is_compiling():
        return False
    for x in gradients:  # a plain loop, on the path of every backward pass
        if x is not None and torch._C._functorch.is_legacy_batchedtensor(x):
            return True
    return False


def one_by_one(
    function: Callable[[Tensor, Tensor | None], tuple[Tensor | None, ...]], dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Call a function with each dout and dlse of batched ones, and batch its five results, too.

    torch does so with every operator that takes and returns single tensors, whatever the device and thread. So the
    function goes through one, by its number.
    """
    latest: list[tuple[Tensor | None, ...]] = []

    def call(dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        latest[:] = [function(dout, dlse)]
        return latest[0]

    _calls[id(call)] = call
    try:
        results = torch.ops.flash_dmattn.one_by_one.default(dout, dlse, id(call))
    finally:
        del _calls[id(call)]
    return tuple(None if one is None else x for one, x in zip(latest[0], results, strict=True))


def is_watched(*tensors: object) -> bool:
    """Whether anything needs to see an operator: a compiler, a dispatch mode, a functorch transform, a tensor subclass.

    Where nothing does, the function behind an operator is called in its place, with arguments of the same types, which
    saves the dispatcher's way into Python and back. What is neither None nor a tensor counts as a subclass.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:  # as `is_transformed`, on the path of every call
        return True
    for x in tensors:  # a plain loop: a generator costs twice as much on this path
        if x is not None and type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return True
    return False
