"""The launch of one kernel with everything decided but its tensors, and such launches remembered."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_dmattn.remembered import Remembered


def ceil_div(total: int, size: int) -> int:
    """How many of a size cover a total.

    As `triton.cdiv`, which is made for kernels: called by the host it takes as long as an allocation. A plan is made
    once, but a mask is packed by new numbers each time.
    """
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is not less than a number, 1 at least; as `triton.next_power_of_2`, likewise."""
    return 1 << (number - 1).bit_length()


def is_current_device(x: Tensor) -> bool:
    """Whether Triton, which launches on the current device, would launch on the tensor's."""
    # Not torch.cuda.current_device: it looks first whether CUDA is initialised, as it is where there is such a tensor.
    return not x.is_cuda or x.get_device() == torch._C._cuda_getDevice()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device the current one, where it is not."""
    return contextlib.nullcontext() if is_current_device(x) else torch.cuda.device(x.device)


# The first driver whose graphs hold launches that begin before the one ahead of them has ended: that of CUDA 12.3.
FIRST_TO_OVERLAP = 12030


@functools.cache
def driver_overlaps() -> bool:
    """Whether launches may overlap, in graphs too; where there is no driver, nothing is launched, and they may."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    version = ctypes.c_int()
    return driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= FIRST_TO_OVERLAP


class Descriptor(NamedTuple):
    """How a tensor becomes a descriptor of the tensor memory accelerator: the argument it is, and its view."""

    slot: int
    shape: list[int]
    strides: list[int]
    block: list[int]


def by_name(kernel: Any, shared: Mapping[str, Any], **own: Any) -> tuple[Any, ...]:
    """Put numbers and constants in the order of a kernel's arguments, where they follow its tensors.

    Args:
        kernel: the kernel.
        shared: values for several kernels. This one takes the names that it has.
        own: values for this kernel alone. They overrule shared ones.
    """
    values, names = {**shared, **own}, kernel.arg_names
    names = names[next(i for i, name in enumerate(names) if name in values) :]
    if unknown := own.keys() - set(names):
        raise TypeError(f"{kernel.__name__} has no arguments {sorted(unknown)}")
    return tuple([values[name] for name in names])


class Launch:
    """One kernel with everything decided but its tensors: `launch(*tensors)`, in the order of the kernel's arguments.

    It is for one device, the current one at every call.

    From the second call on the compiled kernel is called directly. Triton's own look-up of it, by type, alignment and
    value of every argument, takes longer than everything else on the way; here a plan is only found by calls that agree
    in all of them. Nor does a call go through `compiled[grid]`, which makes a record of each for hooks, set or not, and
    asks the driver of each tensor whether its memory is the GPU's: a backend's rules have seen to that.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        rest: tuple[Any, ...],
        options: dict[str, int] | None = None,
        descriptors: Sequence[Descriptor] = (),
    ) -> None:
        self.kernel, self.grid, self.rest = kernel, (programs, 1, 1), rest
        self.options = options or {}
        self.descriptors = tuple(descriptors)
        self.compiled: Any = None  # stays so in the interpreter, which compiles nothing
        self.device = 0
        # What a call without descriptors needs of the compiled kernel and the driver, looked up once.
        self.at_once: tuple[Any, ...] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        if self.at_once is None or _hooks_are_set():
            self._launch_by_triton(tensors)
            return
        run, stream_of, function, metadata = self.at_once
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        run(*self.grid, stream_of(self.device), function, metadata, None, None, None, *addresses, *self.rest)

    def _launch_by_triton(self, tensors: Sequence[Tensor | None]) -> None:
        arguments: list[Any] = [*tensors]
        for slot, shape, strides, block in self.descriptors:
            arguments[slot] = TensorDescriptor(arguments[slot], shape, strides, block)
        if self.compiled is not None:
            self.compiled[self.grid](*arguments, *self.rest)
            return
        self.compiled = self.kernel[self.grid](*arguments, *self.rest, **self.options)
        if self.compiled is not None:
            active, compiled = driver.active, self.compiled
            self.device = active.get_current_device()
            if not self.descriptors:
                run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
                self.at_once = run, active.get_current_stream, function, metadata


def _hooks_are_set() -> bool:
    """Whether someone, a profiler say, is to be told of launches; a chain of no hooks is told nothing."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    return leave is not None and bool(getattr(leave, "calls", True))


_launches: Remembered[Launch] = Remembered(4096)


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
        _launches.find(key, lambda: Launch(kernel, programs, (*numbers, *constants), options))(*tensors)
