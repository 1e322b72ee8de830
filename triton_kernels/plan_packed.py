"""Launches that store the pieces of q, k, v or dout once, before kernels that read them in many tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from .kernel_launch import Launch, by_name
from .pieces import pack_pieces_kernel
from .tile_ops import Strides

_ROWS = 32  # of a program
_DTYPES = {"fp16x3": torch.float16, "bf16x3": torch.bfloat16}


def packed_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of a piece of a (B, L, H, D) tensor: rows begin at multiples of 16 bytes."""
    _, seqlen, num_heads, head_dim = x.shape
    width = -(-head_dim // 8) * 8
    return seqlen * num_heads * width, num_heads * width, width


def plan_pieces(x: Tensor, precision: str) -> Callable[[Tensor], Tensor]:
    """Plan the pieces of tensors like x: run(x)."""
    batch, seqlen, num_heads, head_dim = x.shape
    strides, dtype = packed_strides(x), _DTYPES[precision]
    # Two pieces, and sizes in fp32: two numbers of 16 bits for each row.
    number = 2 * batch * strides[0] + (2 * batch * seqlen * num_heads if precision == "fp16x3" else 0)
    rest = by_name(
        pack_pieces_kernel,
        {},
        x_strides=Strides(*x.stride()[:3]),
        packed_strides=Strides(*strides),
        batch=batch,
        num_heads=num_heads,
        seqlen=seqlen,
        head_dim=head_dim,
        BLOCK=_ROWS,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PRECISION=precision,
    )
    launch = Launch(pack_pieces_kernel, triton.cdiv(seqlen, _ROWS) * num_heads * batch, rest)

    def run(x: Tensor) -> Tensor:
        packed = torch.empty(number, dtype=dtype, device=x.device)
        launch(x, packed)
        return packed

    return run
