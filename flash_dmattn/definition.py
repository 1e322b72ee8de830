"""Registers functions as operators of torch, one graph node for each call, and detects which calls need them."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import profiler

T = TypeVar("T")

LIBRARY = torch.library.Library("flash_dmattn", "FRAGMENT")


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator and its fake, which must not communicate between ranks; return a function that calls it."""
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_dmattn::{name}", fake, lib=LIBRARY)
    # The overload packets resolve overloads on every call; `.default` skips that.
    operator: Callable[..., Any] = getattr(torch.ops.flash_dmattn, name).default
    return operator


def by_name(schema: str) -> Callable[[Callable[[Any], T]], Callable[..., T]]:
    """Return a decorator: the function gets one object with the arguments of the schema as attributes."""
    arguments = torch._C.parse_schema(f"operator{schema}").arguments
    read: Any = namedtuple("Arguments", [each.name for each in arguments])  # type: ignore[misc]

    def wrap(function: Callable[[Any], T]) -> Callable[..., T]:
        # torch's FLOP counter also passes the results of the operator, as `out_val`.
        return lambda *arguments, out_val=None: function(read(*arguments))

    return wrap


def unless_watched(operator: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the operator if the call is watched, and otherwise its implementation directly.

    Use it only for operators without gradients. Only the first tensor is checked, so all tensors need to be of the same
    kind (subclass, transform, compiler). Under a profiler it calls the operator, so that the operator is shown; on meta
    tensors it does so to run the fake.
    """

    def run(tensor: Tensor, *others: object) -> Any:
        is_shown = is_watched(tensor) or tensor.is_meta or profiler._is_profiler_enabled
        return (operator if is_shown else function)(tensor, *others)

    return run


def assume_constant(function: T) -> T:
    """Decorate a function that Dynamo must not trace: it runs the function while tracing, and keeps the result.

    This is `torch.compiler.assume_constant_result`, which would import Dynamo.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 (a function has no such attribute for mypy)
    return function


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is running, such as grad, vmap or jvp; False inside compilers."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(*tensors: Tensor) -> bool:
    """Return whether a tensor belongs to a transform of `torch.func`; it ends with the transform, so cache nothing."""
    for x in tensors:  # a loop, as in `is_watched`
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return True
    return False


def outside_of_transforms() -> AbstractContextManager[None]:
    """Suspend all transforms that run: tensors made inside belong to no transform, and may be cached."""
    context: AbstractContextManager[None] = torch._C._DisableFuncTorch() if is_transformed() else nullcontext()
    return context


def unwrapped(x: Tensor) -> Tensor:
    """Return the plain tensor inside of the wrappers that transforms of `torch.func` put around it."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def listed(x: Tensor) -> list[Any]:
    """Return `x.tolist()`, also inside of a transform, where torch before 2.11 refuses it."""
    with outside_of_transforms():
        values: list[Any] = unwrapped(x).tolist()
    return values


def is_mapped(x: Tensor) -> bool:
    """Return whether a tensor has the values of all calls that a `torch.vmap` maps; compilers cannot tell."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def is_transform_traced() -> bool:
    """Return whether a compiler traces a transform of `torch.func`."""
    if not torch.compiler.is_compiling():
        return False
    # Not by `is None`, which Dynamo answers with False.
    return isinstance(torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter)


def is_nested_gradient_traced() -> bool:
    """Return whether a compiler traces `torch.func.grad` or vjp inside of another transform."""
    if not is_transform_traced():
        return False
    innermost = retrieve_current_functorch_interpreter()
    return bool(innermost.key() == torch._C._functorch.TransformType.Grad and innermost.level() > 1)


def is_jvp_innermost() -> bool:
    """Return whether the innermost transform that is running is `torch.func.jvp`, or none is; compilers cannot tell."""
    if torch.compiler.is_compiling():
        return True
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is None or innermost.key() == torch._C._functorch.TransformType.Jvp


def distinct(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments; in a graph a repeated tensor becomes a view, because Dynamo cannot trace it twice.

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


_running: dict[int, Callable[..., tuple[Tensor | None, ...]]] = {}  # the functions of `one_by_one` that run now, by id


def _run_one(dout: Tensor, dlse: Tensor | None, dentropy: Tensor | None, function_id: int) -> tuple[Tensor, ...]:
    return tuple(dout.new_empty(0) if x is None else x for x in _running[function_id](dout, dlse, dentropy))


LIBRARY.define(
    "one_by_one(Tensor dout, Tensor? dlse, Tensor? dentropy, int function_id)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("one_by_one", _run_one, "CompositeImplicitAutograd")  # autograd records the operations inside


def is_batched(*gradients: Tensor | None) -> bool:
    """Return whether tensors hold a batch of gradients, as `autograd.grad(is_grads_batched=True)` makes them.

    These tensors are older than `torch.func`, and are no subclass. Kernels cannot use them, because they have no data
    pointer; most operators have no rule for them.
    """
    if torch.compiler.is_compiling():
        return False
    for x in gradients:  # every backward pass comes here, and a loop is faster than a generator
        if x is not None and torch._C._functorch.is_legacy_batchedtensor(x):
            return True
    return False


def one_by_one(
    function: Callable[..., tuple[Tensor | None, ...]], dout: Tensor, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Call a function for each dout, dlse and dentropy of a batch of gradients, and batch its five results.

    torch supports such a batch in one way only: for an operator that takes and returns single tensors, it loops over
    the batch, on any device and thread. So the function runs inside an operator. An operator cannot take a function,
    so it takes the id of the function, which `_running` maps to it.
    """
    latest: list[tuple[Tensor | None, ...]] = []  # tells which results are None, which an operator cannot return

    def run(*gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        latest[:] = [function(*gradients)]
        return latest[0]

    _running[id(run)] = run
    try:
        results = torch.ops.flash_dmattn.one_by_one.default(dout, *others, id(run))
    finally:
        del _running[id(run)]
    return tuple(None if one is None else x for one, x in zip(latest[0], results, strict=True))


def each_call(size: int, in_dims: Sequence[Any], arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the arguments of each call that `torch.vmap` maps; a list of tensors has a list of dims."""

    def at(x: Any, dim: Any, index: int) -> Any:
        if isinstance(dim, (list, tuple)):
            return [at(*each, index) for each in zip(x, dim, strict=True)]
        return x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x

    for index in range(size):
        yield [at(x, dim, index) for x, dim in zip(arguments, in_dims, strict=True)]


def stacked(each: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Stack the results of mapped calls; return them and their mapped dims, as a rule of vmap does."""
    results = tuple(None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True))
    return results, tuple(None if x is None else 0 for x in results)


def map_each(name: str, operator: Callable[..., Any]) -> None:
    """Register a rule by which `torch.vmap` loops over calls of an operator that returns a tuple or list of tensors."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        made = [operator(*each) for each in each_call(info.batch_size, in_dims, arguments)]
        kind = type(made[0])
        results, dims = stacked(made)
        return kind(results), kind(dims)

    torch.library.register_vmap(f"flash_dmattn::{name}", rule, lib=LIBRARY)


def is_watched(*tensors: object) -> bool:
    """Return whether a call has to go through its operator.

    A compiler, a dispatch mode, a functorch transform or a tensor subclass needs to see the operator. Otherwise its
    implementation is called directly, which saves the dispatcher's time. An argument that is neither None nor a tensor
    counts as a subclass.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:  # `is_transformed`, inlined for speed
        return True
    for x in tensors:  # every call comes here, and a generator takes twice as long as a loop
        if x is not None and type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return True
    return False


def is_dtensor(x: object) -> bool:
    """Return whether an argument is a DTensor, without the import of DTensor: who has one has imported it."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def dtensor_module() -> Any:
    """Return the module `distributed.dtensor`, which runs calls with DTensors and is a layer above `attention`."""
    return _load_dtensor()


def set_dtensor_loader(load: Callable[[], Any]) -> None:
    """Set the function that imports `dtensor_module`; called by `flash_dmattn/__init__.py`, which may import all."""
    global _load_dtensor
    _load_dtensor = load


def _load_dtensor() -> Any:
    raise AssertionError("flash_dmattn has not been imported")
