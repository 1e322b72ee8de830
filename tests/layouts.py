"""Awkward memory layouts of the same values: NaN margins, transposes, absurd strides, odd offsets."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
from cases import Inputs
from torch import Tensor


def nan_margins(x: Tensor) -> Tensor:
    """The same values inside a larger buffer, NaN (True for a mask) on every side and between the rows."""
    return _framed(x, 1, 1)


def aligned_margins(x: Tensor) -> Tensor:
    """The same with rows that start on 8 elements, and so are read by wide loads and by TMA."""
    return _framed(x, 8, 8 + -x.shape[-1] % 8)


def _framed(x: Tensor, before: int, after: int) -> Tensor:
    # Margins of so many elements around a row; of one row, head or batch around those.
    sizes = [size + 2 for size in x.shape[:-1]] + [before + x.shape[-1] + after]
    frame = torch.full(sizes, _poison(x), dtype=x.dtype, device=x.device)
    places = [slice(1, 1 + size) for size in x.shape[:-1]] + [slice(before, before + x.shape[-1])]
    return frame[tuple(places)].copy_(x)


def _poison(x: Tensor) -> float:
    return True if x.dtype == torch.bool else torch.nan


def transposed(x: Tensor) -> Tensor:
    """The same values with the dimensions stored in reverse order."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def heads_first(x: Tensor) -> Tensor:
    """The same values stored as (B, H, L, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x


def offset(x: Tensor, elements: int) -> Tensor:
    """The same values that many elements into their storage, which ends with them; NaN (True for a mask) before.

    On a CPU a read 16 bytes beyond its end ends the process.
    """
    size = elements + x.numel()
    buffer = _before_a_wall(size, x.dtype) if x.device.type == "cpu" and size else x.new_empty(size)
    return buffer.fill_(_poison(x))[elements:].view(x.shape).copy_(x)


def _before_a_wall(size: int, dtype: torch.dtype) -> Tensor:
    """A vector on 16 bytes, with memory behind it that nobody may read."""
    needed = 16 * math.ceil(size * dtype.itemsize / 16)
    wall = mmap.PAGESIZE * math.ceil(needed / mmap.PAGESIZE)
    memory = mmap.mmap(-1, wall + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    no_access = 0
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + wall), mmap.PAGESIZE, no_access) == 0
    return torch.frombuffer(memory, dtype=dtype, count=size, offset=wall - needed)


def unbacked(elements: int, dtype: torch.dtype) -> Tensor:
    """A vector of any length whose memory is backed where it is touched."""
    unreserved = 0x4000  # MAP_NORESERVE of Linux, which the mmap module does not name before Python 3.11
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize + 2**16, flags), dtype=dtype)


def absurd_strides(x: Tensor) -> Tensor:
    """The same values, with a huge odd stride on every dimension of size 1: no address is ever computed from it."""
    strides = [987654321 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides, x.storage_offset()) if x.numel() else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan_margins": nan_margins,
    "aligned_margins": aligned_margins,
    "transposed": transposed,
    "heads_first": heads_first,
    "offset_by_one": partial(offset, elements=1),  # no row is aligned
    "absurd_strides": absurd_strides,
}


def rearranged(inputs: Inputs, layout: Callable[[Tensor], Tensor]) -> Inputs:
    """All tensors of a call in another layout."""
    changed = {f.name: x if x is None else layout(x) for f in fields(inputs) for x in [getattr(inputs, f.name)]}
    return replace(inputs, **changed)
