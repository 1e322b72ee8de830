"""The launch of one kernel with everything decided but its tensors, and such launches remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# A program that meets more classes of calls than this forgets them and starts again.
MAX_REMEMBERED = 4096


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
    """Launch a kernel as its `Launch`, made at the first call with these numbers, dtypes and alignments."""
    found = tuple([(x.dtype, x.data_ptr() % 16) for x in tensors])
    key = (id(kernel), tensors[0].device.index, programs, numbers, constants, num_warps, found)
    remembered = _launches.get(key)
    if remembered is None:
        if len(_launches) >= MAX_REMEMBERED:
            _launches.clear()
        remembered = _launches[key] = Launch(kernel, programs, numbers, constants, {"num_warps": num_warps})
    remembered(*tensors)
