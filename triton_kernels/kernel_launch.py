"""`Launch`: one kernel with all arguments fixed except its tensors; and a cache of launches.

A launch calls the CUDA driver with numbers that were packed once. Triton's own launcher converts every argument from
Python at every launch, also the constants of the compiler: some 90 objects, which take most of its time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_dmattn.caches import ClockCache

_runtime = knobs.runtime


def ceil_div(total: int, size: int) -> int:
    """Divide and round up.

    Plans, which are made once, use `triton.cdiv`. Packing a mask computes its sizes in every call, and on the host
    `triton.cdiv`, which is written for kernels, takes as long as an allocation.
    """
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 not below `number`, at least 1; faster than `triton.next_power_of_2`."""
    return 1 << (number - 1).bit_length()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device the current one, where Triton launches, unless it already is."""
    # torch.cuda.current_device would first check that CUDA is initialised. A CUDA tensor shows that it is.
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def run_on(x: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with the tensor's device as the current one; without a context manager if it already is."""
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return function(*arguments)
    return function(*arguments)


# CUDA_ERROR_INVALID_CONTEXT, a status of the CUDA driver.
INVALID_CONTEXT = 201
# CUDA 12.3 is the first driver whose graphs may contain launches that overlap (programmatic dependent launch).
FIRST_TO_OVERLAP = 12030


@functools.cache
def driver_overlaps() -> bool:
    """Return whether launches may overlap, in CUDA graphs too; True without a driver, where nothing is launched."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    version = ctypes.c_int()
    return driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= FIRST_TO_OVERLAP


class Descriptor(NamedTuple):
    """How a tensor becomes a TMA descriptor: `slot` is its index among the arguments, the rest its view and block."""

    slot: int
    shape: list[int]
    strides: list[int]
    block: list[int]


def by_name(kernel: Any, shared: Mapping[str, Any], **own: Any) -> tuple[Any, ...]:
    """Order values as a kernel takes them after its tensors; `own` values override shared ones."""
    values, names = {**shared, **own}, kernel.arg_names
    names = names[next(i for i, name in enumerate(names) if name in values) :]
    if unknown := own.keys() - set(names):
        raise TypeError(f"{kernel.__name__} has no arguments {sorted(unknown)}")
    return tuple([values[name] for name in names])


# The layout of `CUlaunchConfig`: six sizes and the bytes of shared memory, the stream, and attributes, here none.
_SIZES = struct.Struct("<7I4x")
_STREAM = _SIZES.size
_CONFIG = 56
# Fields of a kernel's metadata, for arguments and attributes that only Triton's launcher passes.
_EXTRAS = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")


class Block(NamedTuple):
    """The memory that one launch passes to the driver, which no longer needs it when it returns.

    Attributes:
        buffer: the configuration of the launch, the addresses, then the numbers, in 8 bytes each.
        config: its address.
        parameters: the addresses of all arguments, in their order.
    """

    buffer: bytearray
    config: ctypes.c_void_p
    parameters: ctypes.Array[ctypes.c_void_p]


class DriverCall(NamedTuple):
    """How a kernel is launched: `launch(config, function, parameters, None)` on a block that `fill` has completed.

    Threads may launch concurrently, so each launch takes a block out of `blocks`, or makes one, and puts it back.

    Attributes:
        launch: `cuLaunchKernelEx`.
        function: the kernel.
        fill: writes stream, addresses and numbers: fill(buffer, place, stream, *addresses, *numbers).
        place: where they begin.
        blocks: blocks that no launch is using.
        make: makes a block.
    """

    launch: Callable[..., int]
    function: ctypes.c_void_p
    fill: Callable[..., None]
    place: int
    blocks: list[Block]
    make: Callable[[], Block]


def plan_driver_call(
    compiled: Any, names: Sequence[str], arguments: Sequence[Any], grid: tuple[int, int, int], sent: int = 0
) -> DriverCall | None:
    """Plan the launches of a compiled kernel whose arguments differ in addresses, and in the first `sent` numbers.

    Return None if the kernel has arguments or attributes that only Triton's launcher knows.
    """
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or any(getattr(metadata, name, None) for name in _EXTRAS):
        return None
    kinds = compiled.src.signature
    passed = [pair for name, x in zip(names, arguments, strict=True) for pair in flat(kinds[name], x)]
    numbers = [_packed(kind, x) for kind, x in passed if kind[0] != "*"]
    if None in numbers:
        return None
    num_pointers = len(passed) - len(numbers)
    # A 32-bit argument is packed in 32 bits, so that a larger number is an error and not truncated.
    codes = "".join("i4x" if kind == "i32" else "q" for kind in [kind for kind, _ in passed if kind[0] != "*"][:sent])
    pointers, others = count(_CONFIG, 8), count(_CONFIG + 8 * num_pointers, 8)
    places = [next(pointers if kind[0] == "*" else others) for kind, _ in passed]
    # Triton's `CudaLauncher` (triton/backends/nvidia/driver.py) hands every kernel two more pointers, `global_scratch`
    # and `profile_scratch`. Triton launches kernels with scratch memory (_EXTRAS), so here both are null.
    places += [next(others)] * 2
    sizes = _SIZES.pack(*grid, 32 * metadata.num_warps, 1, 1, metadata.shared)
    template = b"".join([sizes, bytes(_CONFIG - _STREAM + 8 * num_pointers), *filter(None, numbers), bytes(8)])

    def make() -> Block:
        buffer = bytearray(template)
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        addresses = [start + place for place in places]
        return Block(buffer, ctypes.c_void_p(start), (ctypes.c_void_p * len(addresses))(*addresses))

    fill = struct.Struct(f"<Q{_CONFIG - _STREAM - 8}x{num_pointers}Q{codes}").pack_into
    return DriverCall(_driver().cuLaunchKernelEx, ctypes.c_void_p(compiled.function), fill, _STREAM, [], make)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _error_of(status: int) -> str:
    """Return the driver's message for a status."""
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return f"error {status}, {(text.value or b'unknown').decode()}"


def flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the type of each argument that the compiled kernel has, and its value."""
    if isinstance(kind, tuple):
        for each, x in zip(kind, value, strict=True):
            yield from flat(each, x)
    elif kind != "constexpr":
        yield kind, value


def _packed(kind: str, value: Any) -> bytes | None:
    """Return a number in 8 bytes, or None for an unknown type; the driver uses the bytes of the argument's type."""
    if kind in ("fp32", "fp64"):
        return struct.pack("<f4x" if kind == "fp32" else "<d", value)
    return (int(value) % 2**64).to_bytes(8, "little") if kind[0] in "iu" and kind[1:].isdigit() else None


class Launch:
    """One kernel with all arguments fixed except its tensors: `launch(*tensors)`, in the order of its arguments.

    A kernel may also take numbers that differ from launch to launch, after its tensors; its `do_not_specialize` names
    them. A `Launch` belongs to one device, which must be the current one at every call.

    From the second call on it skips Triton's look-up by type, alignment and value of every argument, which takes longer
    than the rest of the launch. The look-up is not needed, because only calls that agree in all of these use the same
    `Launch`. On NVIDIA GPUs it calls the driver (`plan_driver_call`). On other GPUs it calls the compiled kernel with
    addresses. With a tensor the kernel would check its device, which the rules of the backend have already done.
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
        self.by_driver: DriverCall | None = None
        # The compiled kernel and the functions of the driver that a launch without descriptors calls, looked up once.
        self.at_once: tuple[Any, ...] | None = None

    def __call__(self, *tensors: Tensor | int | None) -> None:
        by_driver, enter, leave = self.by_driver, _runtime.launch_enter_hook, _runtime.launch_exit_hook
        # A hook, for example of a profiler, is called only by Triton's launcher. Without hooks it is None, or an empty
        # chain.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or self.at_once is None:
            self._launch_by_triton(tensors)
            return
        run, stream_of, function, metadata = self.at_once
        stream = stream_of(self.device)
        if by_driver is None:
            values = [x if x is None or isinstance(x, int) else x.data_ptr() for x in tensors]
            run(*self.grid, stream, function, metadata, None, None, None, *values, *self.rest)
            return
        launch, kernel, fill, place, blocks, make = by_driver
        try:
            block = blocks.pop()
        except IndexError:
            block = make()
        buffer, config, parameters = block
        fill(buffer, place, stream, *[x if isinstance(x, int) else x.data_ptr() for x in tensors if x is not None])
        status = launch(config, kernel, parameters, None)
        blocks.append(block)
        if status == INVALID_CONTEXT:  # a thread without a context, to which Triton gives one
            self._launch_by_triton(tensors)
        elif status != 0:
            raise RuntimeError(f"the CUDA driver did not launch {self.kernel.__name__}: {_error_of(status)}")

    def _launch_by_triton(self, tensors: Sequence[Tensor | int | None]) -> None:
        arguments: list[Any] = [*tensors]
        for slot, shape, strides, block in self.descriptors:
            arguments[slot] = TensorDescriptor(arguments[slot], shape, strides, block)
        arguments += self.rest
        if self.compiled is not None:
            self.compiled[self.grid](*arguments)
            return
        self.compiled = self.kernel[self.grid](*arguments, **self.options)
        if self.compiled is not None:
            active, compiled = driver.active, self.compiled
            self.device = active.get_current_device()
            if not self.descriptors:
                run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
                self.at_once = run, active.get_current_stream, function, metadata
                if active.get_current_target().backend == "cuda":
                    sent = sum(isinstance(x, int) for x in tensors)
                    self.by_driver = plan_driver_call(compiled, self.kernel.arg_names, arguments, self.grid, sent)


_launches: ClockCache[Launch] = ClockCache(4096)


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor],
    numbers: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
) -> None:
    """Launch a kernel on the device of its tensors; numbers, dtypes and alignments key the `Launch` that is reused."""
    types = tuple([(x.dtype, x.data_ptr() % 16) for x in tensors])
    key = (id(kernel), tensors[0].device.index, programs, numbers, constants, num_warps, types)
    options = {"num_warps": num_warps}
    with on_device(tensors[0]):
        _launches.get_or_make(key, lambda: Launch(kernel, programs, (*numbers, *constants), options))(*tensors)
