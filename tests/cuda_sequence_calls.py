"""Random calls with sequences as the CUDA kernels take them."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from sequence_calls import SequenceCall, draw

LENGTHS = (0, 1, 31, 32, 33, 64, 127, 128, 129, 200, 300)
LONG, FEW = (1024, 1100), (1, 40, 129)  # queries for blocks of three consumers, beside so many keys
LAYOUTS = ("packed", "packed", "padded", "paged", "paged_packed")
PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (16, 64)


def drawn(number: int) -> SequenceCall:
    """The call of a number, most of them as the kernels of sequences take one."""
    rng = random.Random(number)
    lengths, lengths_k = (LONG, FEW) if number % 16 == 15 else (LENGTHS, None)
    call = draw(number, rng.choice(LAYOUTS), lengths, (torch.bfloat16,), HEAD_DIMS, lengths_k, PAGE_SIZES)
    flags = dict(call.flags)
    if flags["window_size"] is not None and rng.random() < 0.6:
        flags["window_size"] = tuple(20 * side if side > 0 else side for side in flags["window_size"])
    if rng.random() < 0.8:
        flags["softcap"] = 0.0
    return replace(call, mask=None if rng.random() < 0.9 else call.mask, flags=flags)
