"""Times the invariant mode, on the backend of a class and on triton, beside auto and triton without it.

Calls are in bf16 with head dim 128, 16 heads or 32 on 8. Training rows time forward and backward passes, decoding rows
a forward pass of one query each over pages. Ways take turns in one process; a price is the median of the mode, as auto
runs it, divided by the median of another way. docs/invariance.md has the goals.

    python -m benchmarks.invariance                       # a GPU: about two minutes
    python -m benchmarks.invariance --calls causal        # rows whose names have this word
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences

from . import machine
from .timing import Runner, gradients, leave_default_stream, measure

WAYS = ("auto", "triton", "mode", "mode on triton")


class Call(NamedTuple):
    """One row: the arguments of `attention`, the tensors that need gradients, and the goal beside auto."""

    arguments: dict[str, Any]
    leaves: tuple[Tensor, ...]
    goal: float


def _rows(device: torch.device, *shape: int, is_leaf: bool = True) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(is_leaf)


def training(device: torch.device, goal: float, heads_k: int = 16, bias: tuple[int, ...] = (), **more: Any) -> Call:
    """Return a training step of 2 sequences of 8192 tokens."""
    heads = 32 if heads_k == 8 else 16
    q, k, v = _rows(device, 2, 8192, heads, 128), *(_rows(device, 2, 8192, heads_k, 128) for _ in range(2))
    added = _rows(device, *bias) if bias else None
    leaves = (q, k, v) if added is None else (q, k, v, added)
    return Call({"q": q, "k": k, "v": v, "bias": added, **more}, leaves, goal)


def mask_of_tiles(device: torch.device) -> Tensor:
    """Return a mask that allows three tenths of the tiles of 128 x 128 pairs."""
    tiles = torch.rand(64, 64, device=device) < 0.3
    return tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)


def packed(device: torch.device) -> Call:
    """Return a training step of 16 documents in a row of 16384 tokens."""
    lengths = torch.tensor([3000, 1024, 500, 64, 2048, 128, 1500, 700, 900, 33, 2200, 1300, 411, 1000, 576, 1000])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device=device, dtype=torch.int32)
    leaves = tuple(_rows(device, int(lengths.sum()), 16, 128) for _ in "qkv")
    most = int(lengths.max())
    sequences = Sequences.packed(cu, max_seqlen_q=most, max_seqlen_k=most)
    names = dict(zip("qkv", leaves, strict=True))
    return Call({**names, "is_causal": True, "sequences": sequences}, leaves, 1.05)


def decoding(device: torch.device, batch: int, length: int, goal: float, queries: int = 1) -> Call:
    """Return one step of `batch` requests of so many keys each, in pages of 128."""
    pages = -(-length // 128)
    table = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages)
    q = _rows(device, batch, queries, 32, 128, is_leaf=False)
    k, v = (_rows(device, batch * pages, 128, 8, 128, is_leaf=False) for _ in range(2))
    cache = Sequences.paged(table, torch.full((batch,), length, device=device, dtype=torch.int32))
    return Call({"q": q, "k": k, "v": v, "is_causal": True, "sequences": cache}, (), goal)


CALLS: dict[str, Callable[[torch.device], Call]] = {
    "plain": lambda d: training(d, 1.05),
    "causal": lambda d: training(d, 1.05, is_causal=True),
    "packed": packed,
    "groups": lambda d: training(d, 1.10, 8, is_causal=True),
    "mask of tiles": lambda d: training(d, 1.30, mask=mask_of_tiles(d)),
    "bias per key": lambda d: training(d, 1.25, bias=(2, 16, 1, 8192)),
    "bias per score": lambda d: training(d, 1.25, bias=(2, 16, 8192, 8192)),
    "decoding 64 x 4k": lambda d: decoding(d, 64, 4096, 1.15),
    "decoding 8 x 34k": lambda d: decoding(d, 8, 34 * 1024, 1.15),
    "decoding 1 x 8k": lambda d: decoding(d, 1, 8192, 2.0),
    "chunks of 64, 8 x 8k": lambda d: decoding(d, 8, 8192, 1.15, 64),
}  # fmt: skip


def run_of(call: Call, way: str) -> Callable[[], object]:
    """Return one pass, or with gradients both, of a call in one way."""
    block: Any = flash_dmattn.config(invariant=True) if way.startswith("mode") else nullcontext()
    backend: Any = "triton" if way.endswith("triton") else "auto"

    def run() -> object:
        with block:
            out = flash_dmattn.attention(**call.arguments, backend=backend)
        return gradients(out, call.leaves, out) if call.leaves else out

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each call; the exit status is 1 where one of them has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", default="", help="only rows whose names have this word")
    parser.add_argument("--rep-ms", type=float, default=300.0, help="milliseconds of runs of each way")
    chosen = parser.parse_args(arguments)
    device, failed = torch.device("cuda"), False
    leave_default_stream(device)
    print(machine.line(machine.describe(device)))
    print("| call | auto ms | triton ms | mode ms | mode on triton ms | of auto | goal | of triton |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, make in CALLS.items():
        if chosen.calls not in name:
            continue
        call = make(device)
        runners = [Runner(run_of(call, way)) for way in WAYS]
        measure(runners, device, rep_ms=chosen.rep_ms, least=5, most=200)
        errors = [f"{way}: {r.error}" for way, r in zip(WAYS, runners, strict=True) if r.error is not None]
        if errors:
            failed = True
            print(f"| {name} | failed: {'; '.join(errors)[:300]} |")
            continue
        auto, triton, mode, on_triton = (statistics.median(r.ms) for r in runners)
        times = f"{auto:.3f} | {triton:.3f} | {mode:.3f} | {on_triton:.3f}"
        print(f"| {name} | {times} | {mode / auto:.2f} | {call.goal:.2f} | {mode / triton:.2f} |", flush=True)
        del call, runners
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
