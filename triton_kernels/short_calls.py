"""Which calls have rows that are short enough for one tile, and the tiles of their kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flash_dmattn.problem import AttentionProblem, MaskForm, MaskView, device_arch

from .gpus import LIKE_HOPPER

# Not fp32: its products run outside the tensor cores, and registers cannot hold tiles of whole rows.
DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
MASK_FORMS: frozenset[MaskForm] = frozenset({"none", "dense", "tiles", "intervals"})


class ShortTile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its loop."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Return the options that Triton compiles with: only warps, since stages are an argument of the kernel."""
        return {"num_warps": self.num_warps}


class ShortCall(NamedTuple):
    """The properties of a call that decide whether it has short rows, and which tiles it takes."""

    arch: str
    seqlen_q: int
    seqlen_k: int
    group: int
    head_dim: int  # the larger of both
    dtype: torch.dtype
    mask_form: MaskForm

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: MaskView, arch: str | None = None) -> ShortCall:
        """Describe the tensors of a call; `arch` replaces the architecture of their device."""
        (_, seqlen_q, num_heads, head_dim), (_, seqlen_k, num_heads_k, head_dim_v) = q.shape, v.shape
        dims, group = max(head_dim, head_dim_v), num_heads // num_heads_k
        return cls(arch or device_arch(q.device), seqlen_q, seqlen_k, group, dims, q.dtype, mask.form)

    @classmethod
    def described(cls, p: AttentionProblem) -> ShortCall:
        """Describe a call from its `AttentionProblem`."""
        dims, group = max(p.head_dim, p.head_dim_v), p.num_heads // p.num_heads_k
        return cls(p.arch, p.seqlen_q, p.seqlen_k, group, dims, p.dtype, p.mask_form)

    def serves_forward(self) -> bool:
        """Return whether the forward kernel of short rows serves the call."""
        return self.dtype in DTYPES and self.mask_form in MASK_FORMS and forward_tile(self) is not None

    def serves_backward(self) -> bool:
        """Return whether the backward kernel of short rows serves the call; it has no code for groups of heads."""
        served = self.dtype in DTYPES and self.mask_form in MASK_FORMS and self.group == 1
        return served and backward_tile(self) is not None


def _block(length: int) -> int:
    return max(32, triton.next_power_of_2(length))  # at least 32, because masks have words of 32 bits


def _fits(call: ShortCall, length: int) -> bool:
    # Other GPUs have not been measured, and some have a fourth of the shared memory.
    is_large = call.arch in (*LIKE_HOPPER, "cpu")
    return length <= (128 if is_large else 64) and call.head_dim <= (128 if is_large else 64)


# Measured on an H200 (torch 2.11, Triton 3.6); docs/notes/short_rows.md has the cases, and the next best choices.
def forward_tile(call: ShortCall) -> ShortTile | None:
    """Return the tile of the forward kernel, or None if rows are too long."""
    if not _fits(call, call.seqlen_k):
        return None
    block_m, block_n = min(_block(call.seqlen_q), 64), _block(call.seqlen_k)
    num_warps = 4 if block_m == 64 else 2 if block_n == 128 else 1
    return ShortTile(block_m, block_n, num_warps, 1 if call.head_dim > 64 and block_n == 128 else 2)


def backward_tile(call: ShortCall) -> ShortTile | None:
    """Return the tile of the backward kernel, of whole rows and columns, or None if that is too large."""
    block_m, block_n = _block(call.seqlen_q), _block(call.seqlen_k)
    size = block_m * block_n
    if not _fits(call, max(call.seqlen_q, call.seqlen_k)) or (call.head_dim > 64 and size > 64 * 64):
        return None
    if size == 32 * 32:
        return ShortTile(block_m, block_n, 2 if call.head_dim <= 64 else 4, 2)
    if size <= 64 * 64:
        return ShortTile(block_m, block_n, 4, 2 if call.arch in LIKE_HOPPER else 1)
    return ShortTile(block_m, block_n, 8, 2)


# The tiles of two runs, of whole rows and of whole columns. With one tile of 128 x 128 and the sums of dbias in
# registers, an SM has room for one program, and is idle while that waits for its loads.
TWO_RUNS = ShortTile(64, 128, 4, 2), ShortTile(128, 64, 8, 2)
# The least number of heads, counted over batch entries, for two runs: with fewer the second run takes longer than it
# saves.
TWO_RUNS_FROM = 1024


def backward_tiles(call: ShortCall, sums_dbias: bool, heads: int) -> tuple[ShortTile, ...]:
    """Return the tile of each run of the backward kernel: one tile, or two."""
    tile = backward_tile(call)
    assert tile is not None
    is_large = tile.block_m == tile.block_n == 128
    return TWO_RUNS if is_large and sums_dbias and heads >= TWO_RUNS_FROM else (tile,)
