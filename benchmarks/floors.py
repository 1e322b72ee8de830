"""The least time that the arithmetic and the memory traffic of a call take on one H200, and what a time says of both.

    floor = max(FLOP / 790e12, bytes / 4.3e12) seconds

FLOP are those of the allowed pairs alone: 4 D a pair for the forward (q k^T, p v), 10 D for the backward (s and dp
again, dq, dk, dv). Bytes are those of every tensor that the pass has to read or write, each once.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .workloads import Inputs

# Measured on the H200: a large bf16 matrix product, and a copy (bytes read and bytes written).
FLOPS, BANDWIDTH = 790e12, 4.3e12


class Floor(NamedTuple):
    """Of one pass: the FLOP of its pairs, the bytes it must move, and the milliseconds that these take at least."""

    flop: float
    moved: float

    @property
    def ms(self) -> float:
        return 1e3 * max(self.flop / FLOPS, self.moved / BANDWIDTH)


def _size(x: Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()


def floors(inputs: Inputs, pairs: float, *, reads_mask: bool) -> tuple[Floor, Floor]:
    """The floors of forward and backward.

    Args:
        inputs: the call.
        pairs: allowed (query, key) pairs over batch and query heads.
        reads_mask: the forward is given the bool tensor. A mask prepared beforehand is not charged, nor is any mask in
            the backward: what a kernel has to know of it can be arbitrarily little.
    """
    q, k, v, dout, mask, bias, is_causal = inputs
    batch, seqlen, heads, head_dim = q.shape
    lse = 4 * batch * heads * seqlen
    operands = _size(q) + _size(k) + _size(v) + _size(bias)
    read = _size(mask) if reads_mask else 0
    if mask is not None and mask.shape[2] > 1 and is_causal:
        read = read * (seqlen + 1) // (2 * seqlen)  # nothing above the diagonal has to be looked at
    forward = operands + _size(dout) + lse + read
    backward = 2 * operands + 2 * _size(dout) + lse  # out and dout are read, and a gradient is written per operand
    return Floor(4.0 * head_dim * pairs, forward), Floor(10.0 * head_dim * pairs, backward)
