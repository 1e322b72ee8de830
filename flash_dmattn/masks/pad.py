"""`torch.nn.functional.pad` of a mask, whose dims may be empty."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def pad(x: torch.Tensor, counts: tuple[int, ...], value: int = 0) -> torch.Tensor:
    """As `F.pad(x, counts, value=value)`, counts not negative: PyTorch 2.9 refuses to pad a tensor with an empty dim.

    >>> pad(torch.ones(2, 0, dtype=torch.bool), (0, 3)).tolist()
    [[False, False, False], [False, False, False]]
    """
    if x.numel() > 0:
        return F.pad(x, counts, value=value)
    shape = list(x.shape)
    for dim, (before, after) in enumerate(zip(counts[::2], counts[1::2], strict=True), start=1):
        shape[-dim] += before + after
    return x.new_full(shape, value)
