"""SMs that the CUDA kernels leave to others which run beside them, such as collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import backend


@contextmanager
def sm_margin(number: int) -> Iterator[None]:
    """Leave `number` SMs free in the calls that this thread makes meanwhile; of no effect without the extension.

    Blocks of persistent kernels hold their SMs to the end of a pass. A collective that is launched after them waits for
    one, so nothing overlaps. Results may differ in rounding from those without a margin: keys are split, and sums are
    shared out, by the number of SMs.

    Args:
        number: of SMs, 0 or more; at least one stays.

    Example:
        >>> with sm_margin(8):
        ...     pass
    """
    if not backend.probe().usable:
        yield
        return
    set_margin = torch.ops.flash_dmattn.cuda_set_sm_margin.default
    before = set_margin(number)
    try:
        yield
    finally:
        set_margin(before)
