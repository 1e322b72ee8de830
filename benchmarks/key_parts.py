"""The forward pass of cuda where several blocks share the keys of a piece of work: its time by the number of parts.

    python -m benchmarks.key_parts
    python -m benchmarks.key_parts --only bias decode

Parts are those of `KEY_PARTS` in flash_dmattn/backends/cuda/backend.py: 1, none; 0, as csrc/api/num_splits.h
estimates. All numbers of a call are timed in turns, and compared with the result of 1; exit status 1 where one is off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.masks import prepare_mask

from .suites.trial import stream_of
from .timing import Runner, measure

PARTS = (1, 0, 2, 3, 4, 6, 8, 16, 32)
TOLERANCE = 1e-2  # of the norm of out: its rounding to 16 bits is 2e-3


class Call(NamedTuple):
    """Sizes, whether there is a bias per score, and the share of 128-key tiles that a mask keeps."""

    batch: int
    heads: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    has_bias: bool = False
    density: float | None = None


CALLS = {
    "bias D64 2k": Call(4, 16, 16, 2048, 2048, 64, has_bias=True),
    "bias D128 4k": Call(1, 16, 16, 4096, 4096, 128, has_bias=True),
    "dense D64 4k": Call(4, 32, 32, 4096, 4096, 64),
    "dense D128 4k": Call(4, 16, 16, 4096, 4096, 128),
    "blocks 0.1": Call(1, 16, 4, 16384, 16384, 128, density=0.1),
    "few heads D128": Call(1, 4, 4, 1024, 8192, 128),
    "few heads D64": Call(1, 8, 8, 512, 8192, 64),
    "few heads, bias D64": Call(1, 8, 8, 1024, 4096, 64, has_bias=True),
    "decode D128": Call(1, 32, 8, 1, 65536, 128),
}


def attend(call: Call) -> Callable[[int], Tensor]:
    """The call as a function of the number of parts."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q = normal(call.batch, call.seqlen_q, call.heads, call.head_dim)
    k, v = (normal(call.batch, call.seqlen_k, call.heads_k, call.head_dim) for _ in range(2))
    bias = normal(call.batch, call.heads, call.seqlen_q, call.seqlen_k) if call.has_bias else None
    mask = None
    if call.density is not None:
        tiles = torch.rand(call.batch, call.heads_k, call.seqlen_q // 128, call.seqlen_k // 128, device="cuda")
        mask = prepare_mask((tiles < call.density).repeat_interleave(128, 2).repeat_interleave(128, 3))

    def run(key_parts: int) -> Tensor:
        cuda.KEY_PARTS = key_parts
        out = flash_dmattn.attention(q, k, v, mask, bias, backend="cuda")
        assert isinstance(out, Tensor)
        return out

    return run


def main(only: list[str]) -> int:
    """Print a line of milliseconds for each call."""
    status = 0
    print(f"{'parts':22}", *(f"{parts:>8}" for parts in PARTS))
    for name, call in CALLS.items():
        if only and not any(word in name for word in only):
            continue
        run = attend(call)
        whole = run(1).double()
        for parts in PARTS:
            off = ((run(parts).double() - whole).norm() / whole.norm()).item()
            if not off < TOLERANCE:
                print(f"{name}: off by {off:.1e} in {parts} parts")
                status = 1
        runners = [Runner(lambda run=run, parts=parts: run(parts)) for parts in PARTS]  # type: ignore[misc]
        measure(runners, torch.device("cuda"), rep_ms=100, least=20, most=300)
        cells = [f"{r.summary()['ms']:8.4f}" if r.error is None else f"{type(r.error).__name__:>8.8}" for r in runners]
        print(f"{name:22}", *cells, flush=True)
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="calls whose name contains one of these")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the kernels run on a GPU, and torch finds none")
    with stream_of(torch.device("cuda")):  # small calls are captured
        sys.exit(main(given.only))
