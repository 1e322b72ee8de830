"""The launch of one kernel with everything decided but its tensors, and such launches remembered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# A program that meets more classes of calls than this forgets them and starts again.
MAX_REMEMBERED = 4096

T = TypeVar("T")


def remembered(table: dict[tuple[Any, ...], T], key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """What a table has for a class of calls, made at the first of them."""
    found = table.get(key)
    if found is None:
        if len(table) >= MAX_REMEMBERED:
            table.clear()
        found = table[key] = make()
    return found


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


class Descriptor(NamedTuple):
    """How a tensor becomes a descriptor of the tensor memory accelerator: the argument it is, and its view."""

    slot: int
    shape: list[int]
    strides: list[int]
    block: list[int]


class Launch:
    """One kernel with everything decided but its tensors: `launch(*tensors)`, in the order of the kernel's arguments.

    From the second call on the compiled kernel is called directly. Triton's own look-up of it, by type, alignment and
    value of every argument, takes longer than everything else on the way; here a plan is only found by calls that agree
    in all of them.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, int] | None = None,
        descriptors: Sequence[Descriptor] = (),
    ) -> None:
        self.kernel, self.grid, self.rest = kernel, (programs, 1, 1), (*numbers, *constants)
        self.options = options or {}
        self.descriptors = tuple(descriptors)
        self.run: Any = None

    def __call__(self, *tensors: Tensor | None) -> None:
        arguments: Any = tensors
        if self.descriptors:
            arguments = list(tensors)
            for slot, shape, strides, block in self.descriptors:
                arguments[slot] = TensorDescriptor(arguments[slot], shape, strides, block)
        if self.run is not None:
            self.run(*arguments, *self.rest)
        else:
            compiled = self.kernel[self.grid](*arguments, *self.rest, **self.options)
            self.run = compiled and compiled[self.grid]  # the interpreter compiles nothing


_launches: dict[tuple[Any, ...], Launch] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor],
    numbers: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
) -> None:
    """Launch a kernel on its tensors' device as a `Launch` remembered by these numbers, dtypes and alignments."""
    found = tuple([(x.dtype, x.data_ptr() % 16) for x in tensors])
    key = (id(kernel), tensors[0].device.index, programs, numbers, constants, num_warps, found)
    options = {"num_warps": num_warps}
    with on_device(tensors[0]):
        remembered(_launches, key, lambda: Launch(kernel, programs, numbers, constants, options))(*tensors)
