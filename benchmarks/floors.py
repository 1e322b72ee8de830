"""The least time that the arithmetic and the memory traffic of a call take on a device.

    floor = max(FLOP / rate of a large product, bytes / rate of a copy)

Only allowed pairs count as FLOP: 2 D + 2 Dv a pair for the forward pass (q k^T, p v), 6 D + 4 Dv for the backward pass
(s and dp again, dq, dk, dv). Every tensor that the pass has to read or write counts its bytes once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Inputs


class Rates(NamedTuple):
    """FLOP a second of a large bf16 matrix product, and bytes read and written a second by a copy."""

    flop: float
    bytes: float
    source: str


# Measured once, with cold and hot clocks alike; a device that is not here is measured at the start of each run.
KNOWN = {"NVIDIA H200": Rates(790e12, 4.3e12, "known")}


class Floor(NamedTuple):
    """The FLOP of the allowed pairs of one pass, and the bytes that it must move."""

    flop: float
    moved: float

    def ms(self, rates: Rates) -> float:
        """Return the milliseconds that these take at least."""
        return 1e3 * max(self.flop / rates.flop, self.moved / rates.bytes)


def _size(x: Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()


def floors(inputs: Inputs, pairs: float, *, reads_mask: bool) -> dict[str, Floor]:
    """Return the floors of forward, backward and of both, the step.

    Args:
        inputs: the call.
        pairs: allowed (query, key) pairs over batch and query heads.
        reads_mask: the forward is given the bool tensor. A mask prepared beforehand is not charged, nor is any mask in
            the backward: what a kernel has to know of it can be arbitrarily little.
    """
    q, k, v, dout, mask, bias, is_causal = inputs[:7]
    batch, seqlen, heads, head_dim = q.shape
    head_dim_v = v.shape[3]
    lse = 4 * batch * heads * seqlen
    operands = _size(q) + _size(k) + _size(v) + _size(bias)
    needed = _size(q) + attended_keys(inputs) * (_size(k) + _size(v) + _size(bias))
    read = _size(mask) if reads_mask else 0
    if mask is not None and mask.shape[2] > 1 and is_causal:
        read = read * (seqlen + 1) // (2 * seqlen)  # nothing above the diagonal has to be looked at
    forward = Floor((2.0 * head_dim + 2.0 * head_dim_v) * pairs, needed + _size(dout) + lse + read)
    # out and dout are read, and a gradient is written per operand.
    backward = Floor((6.0 * head_dim + 4.0 * head_dim_v) * pairs, needed + operands + 2 * _size(dout) + lse)
    step = Floor(forward.flop + backward.flop, forward.moved + backward.moved)
    return {"forward": forward, "backward": backward, "step": step}


def attended_keys(inputs: Inputs) -> float:
    """Return the fraction of keys, over batch and key-value heads, that some query attends to.

    It is counted for masks with one row for all queries. For other masks it is taken as 1, because nearly every key
    has such a query.
    """
    mask, heads_k = inputs.mask, inputs.k.shape[2]
    if mask is None or mask.shape[2] > 1:
        return 1.0
    group_mask = mask if mask.shape[1] in (1, heads_k) else mask.unflatten(1, (heads_k, -1)).any(2)
    return float(group_mask.double().mean())


def rates_of(device: torch.device, name: str) -> Rates:
    """Return the rates of a device: known by its name, or measured now, in less than a second."""
    if name in KNOWN:
        return KNOWN[name]
    size = 4096 if device.type == "cuda" else 512
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    source = torch.empty(size * size * 16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _best_seconds(lambda: x @ x, device)
    copy = _best_seconds(lambda: target.copy_(source), device)
    return Rates(2.0 * size**3 / product, 2.0 * source.numel() / copy, "measured")


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best
