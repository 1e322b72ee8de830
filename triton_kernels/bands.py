"""Biases of one value for each query and distance, which clamp: of a few entries of the batch, and their gradient.

Most scores of a row are beyond an end of its values: there the bias repeats one value, and the gradient is a sum of ds.
All sums have a fixed order, which does not depend on the number of entries in the workspace.
"""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dmattn.reference import distances
from flash_dmattn.reference.positions import PITCH

from .kernel_launch import ceil_div, launch
from .positions import Workspace


@triton.jit
def band_kernel(
    values, work, length, others, number, zero, vectors,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write work[pair, i, j] = values[pair, i, zero + j - i], with the first or the last value beyond the ends."""
    program = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(length, BLOCK_M), tl.cdiv(others, BLOCK_N)
    pair = (program // (blocks_m * blocks_n)).to(tl.int64)
    i = program // blocks_n % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = program % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.minimum(tl.maximum(zero + j[None, :] - i[:, None], 0), number - 1)
    is_score = (i < length)[:, None] & (j < others)[None, :]
    row = pair * length + i
    made = tl.load(values + row[:, None] * number + place, mask=is_score, other=0.0)
    line = work + row[:, None] * (vectors * VECTOR)
    tl.store(line + j[None, :], made.to(work.dtype.element_ty), mask=is_score)


@triton.jit
def band_gradient_kernel(
    ds, dvalues, ds_strides, heads, length, others, number, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dvalues[pair, i, p], the sum of ds[pair, i, j] over the keys that have value p."""
    program = tl.program_id(0)
    blocks_m = tl.cdiv(length, BLOCK_M)
    pair = (program // blocks_m).to(tl.int64)
    i = program % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (i < length)[:, None]
    line = ds + pair // heads * ds_strides[0] + pair % heads * ds_strides[1] + i.to(tl.int64)[:, None] * ds_strides[2]
    column = tl.arange(0, BLOCK_N)[None, :]
    first, last = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, others, BLOCK_N):
        j = start + column
        gradient = tl.load(line + j * ds_strides[3], mask=is_row & (j < others), other=0.0).to(tl.float32)
        place = tl.minimum(tl.maximum(zero + j - i[:, None], 0), number - 1)
        first += tl.sum(tl.where(place == 0, gradient, 0.0), 1)
        last += tl.sum(tl.where(place == number - 1, gradient, 0.0), 1)
    out = dvalues + (pair * length + i)[:, None] * number
    for start in tl.range(0, number, BLOCK_N):
        place = start + column
        j = place - zero + i[:, None]
        inner = tl.load(line + j * ds_strides[3], mask=is_row & (j >= 0) & (j < others), other=0.0).to(tl.float32)
        made = tl.where(place == number - 1, last[:, None], inner)
        made = tl.where(place == 0, first[:, None], made)
        tl.store(out + place, made, mask=is_row & (place < number))


class Bands(distances.Bands):
    """The clamped band of one call, in a workspace."""

    @cached_property
    def work(self) -> Workspace:
        """The tensors of this call."""
        return Workspace(self.entries, self.heads, self.dtype, self.device)

    @property
    def near_zero(self) -> int:
        """The index of distance 0; at most as far from the values as all of the call, so that places have 32 bits."""
        length, others = self.lengths
        return min(max(self.zero - (others - length), -others), self.number + length)

    def scores(self, values: Tensor) -> Tensor:
        """Return the bias of some entries, (entries, heads, Lq, Lk), from values (entries, heads, Lq, n)."""
        length, others = self.lengths
        work, block_m, block_n = self.work.rows("bias", len(values), length, others), 16, 128
        programs = len(values) * self.heads * ceil_div(length, block_m) * ceil_div(others, block_n)
        numbers = (length, others, self.number, self.near_zero, work.stride(2) // PITCH)
        launch(band_kernel, programs, (values.contiguous(), work), numbers, (block_m, block_n, PITCH), num_warps=4)
        return work

    def place(self, entries: int) -> Tensor:
        """Return where a backward pass may store the gradient of the bias of so many entries."""
        return self.work.rows("ds", entries, *self.lengths)

    def gradient(self, ds: Tensor) -> Tensor:
        """Return the gradient of the values of some entries, (entries, heads, Lq, n) in fp32, from ds."""
        length, others = self.lengths
        made = torch.empty(len(ds), self.heads, length, self.number, dtype=torch.float32, device=ds.device)
        numbers = (ds.stride(), self.heads, length, others, self.number, self.near_zero)
        programs = len(ds) * self.heads * ceil_div(length, 16)
        launch(band_gradient_kernel, programs, (ds, made), numbers, (16, 128), num_warps=4)
        return made
