"""What Hopper's tensor memory accelerator (TMA) can read."""

from __future__ import annotations

from collections.abc import Sequence


def fits_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether Hopper's copy engine, the TMA, can walk the first three dims of a tensor that starts on 16 bytes.

    Args:
        shape, strides: of the tensor, strides in elements; that of a dim of size 1 is never taken.
        itemsize: bytes of an element.
    """
    units = [stride * itemsize for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return all(0 < unit < 2**40 and unit % 16 == 0 for unit in units)
