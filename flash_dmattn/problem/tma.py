"""What Hopper's tensor memory accelerator (TMA) can read."""

from __future__ import annotations

from collections.abc import Sequence


def fits_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether Hopper's copy engine, the TMA, can read a 4-D tensor that starts on 16 bytes: rows of unit stride.

    Args:
        shape, strides: of the tensor, strides in elements; that of one of the first three dims is never taken where its
            size is 1.
        itemsize: bytes of an element.
    """
    units = [stride * itemsize for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return strides[3] == 1 and all(0 < unit < 2**40 and unit % 16 == 0 for unit in units)
