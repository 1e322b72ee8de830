"""Calls a compiled kernel by the CUDA driver, with its numbers packed once.

Triton's own launcher reads every argument from Python at every launch, also the constants of the compiler: some 90
objects, which take most of the time of a launch. Here a launch writes its stream and the addresses of its tensors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

# The parts of `CUlaunchConfig`: six sizes and the bytes of shared memory, the stream, and attributes, here none.
_SIZES = struct.Struct("<7I4x")
_STREAM = _SIZES.size
_CONFIG = 56
# Fields of a kernel's metadata, for arguments and attributes that only Triton's launcher passes.
_EXTRAS = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")


class Block(NamedTuple):
    """The memory that one launch hands to the driver, which reads it before it returns.

    Attributes:
        buffer: the configuration of the launch, the addresses, then the numbers, in 8 bytes each.
        config, parameters: the address of the configuration, and the addresses of all arguments in their order.
    """

    buffer: bytearray
    config: ctypes.c_void_p
    parameters: ctypes.Array[ctypes.c_void_p]


class DriverCall(NamedTuple):
    """How a kernel is launched: `launch(config, function, parameters, None)` on a block that `fill` has completed.

    Threads may launch at once, so each launch takes a block out of `blocks`, or makes one, and puts it back.

    Attributes:
        launch: `cuLaunchKernelEx`.
        function: the kernel.
        fill: writes stream and addresses: fill(buffer, place, stream, *addresses).
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
    compiled: Any, names: Sequence[str], arguments: Sequence[Any], grid: tuple[int, int, int]
) -> DriverCall | None:
    """Plan the launches of a compiled kernel whose arguments differ in the addresses of tensors alone.

    None if the kernel has arguments or attributes that only Triton's launcher knows.
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
    pointers, others = count(_CONFIG, 8), count(_CONFIG + 8 * num_pointers, 8)
    places = [next(pointers if kind[0] == "*" else others) for kind, _ in passed]
    # A kernel may have two more pointers at the end, to scratch memory. It has none here.
    places += [next(others)] * 2
    sizes = _SIZES.pack(*grid, 32 * metadata.num_warps, 1, 1, metadata.shared)
    template = b"".join([sizes, bytes(_CONFIG - _STREAM + 8 * num_pointers), *filter(None, numbers), bytes(8)])

    def make() -> Block:
        buffer = bytearray(template)
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        addresses = [start + place for place in places]
        return Block(buffer, ctypes.c_void_p(start), (ctypes.c_void_p * len(addresses))(*addresses))

    fill = struct.Struct(f"<Q{_CONFIG - _STREAM - 8}x{num_pointers}Q").pack_into
    return DriverCall(_driver().cuLaunchKernelEx, ctypes.c_void_p(compiled.function), fill, _STREAM, [], make)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the type of each argument that the compiled kernel has, and its value."""
    if isinstance(kind, tuple):
        for each, x in zip(kind, value, strict=True):
            yield from flat(each, x)
    elif kind != "constexpr":
        yield kind, value


def _packed(kind: str, value: Any) -> bytes | None:
    """Return a number in 8 bytes, or None for an unknown type; the driver reads as many of them as the argument has."""
    if kind in ("fp32", "fp64"):
        return struct.pack("<f4x" if kind == "fp32" else "<d", value)
    return (int(value) % 2**64).to_bytes(8, "little") if kind[0] in "iu" and kind[1:].isdigit() else None
