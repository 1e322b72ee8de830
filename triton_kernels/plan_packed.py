"""The launch that stores the pieces of k and v, or also of q and dout, before kernels that read them in many tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from .kernel_launch import Launch, by_name
from .pieces import Packing, pack_pieces_kernel

_ROWS = 32  # of a program
_DTYPES = {"fp16x3": torch.float16, "bf16x3": torch.bfloat16}


def packed_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of a piece of a (B, L, H, D) tensor: rows begin at multiples of 16 bytes."""
    _, seqlen, num_heads, head_dim = x.shape
    width = -(-head_dim // 8) * 8
    return seqlen * num_heads * width, num_heads * width, width


def plan_pieces(precision: str, *tensors: Tensor) -> Callable[..., list[Tensor]]:
    """Plan the pieces of k and v, or of k, v, q and dout: run(*tensors)."""
    dtype, programs, packings, numbers = _DTYPES[precision], 0, [], []
    for x in tensors:
        batch, seqlen, num_heads, head_dim = x.shape
        strides = packed_strides(x)
        packings.append(Packing(programs, batch, seqlen, num_heads, head_dim, *x.stride()[:3], strides[2]))
        programs += triton.cdiv(seqlen * num_heads, _ROWS) * batch
        # Two pieces, and sizes in fp32: two numbers of 16 bits for each row.
        numbers.append(2 * batch * strides[0] + (2 * batch * seqlen * num_heads if precision == "fp16x3" else 0))
    rest: list[Tensor | Packing | None] = [None] * (4 - len(tensors))
    launch = Launch(
        pack_pieces_kernel,
        programs,
        by_name(
            pack_pieces_kernel,
            dict(zip(("packing_k", "packing_v", "packing_q", "packing_dout"), [*packings, *rest], strict=True)),
            BLOCK=_ROWS,
            BLOCK_D=max(16, triton.next_power_of_2(tensors[0].shape[3])),
            BLOCK_DV=max(16, triton.next_power_of_2(tensors[1].shape[3])),
            PRECISION=precision,
        ),
    )

    def run(*tensors: Tensor) -> list[Tensor]:
        made = [torch.empty(n, dtype=dtype, device=tensors[0].device) for n in numbers]
        launch(*tensors, *rest, *made, *rest)
        return made

    return run
