"""Eager attention on the CPU against F.scaled_dot_product_attention: time with mask and bias, memory at 16k.

python -m benchmarks.eager_cpu           # B1 H8 L2048 D64 fp32, dense mask and bias, all four gradients
python -m benchmarks.eager_cpu --long    # and the peak memory at L 16384, which SDPA's math path cannot run
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dmattn.reference import eager

BATCH, HEADS, HEAD_DIM = 1, 8, 64
SCALE = HEAD_DIM**-0.5


def inputs(seqlen: int, heads_of_bias: int, bias_rows: int) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, dout (B, L, H, D), a random mask (B, 1, L, L) and a bias, made without temporaries."""
    q, k, v, dout = torch.randn(4, BATCH, seqlen, HEADS, HEAD_DIM)
    # Random, so that no chunk is empty and both sides do all the work.
    mask = torch.empty(BATCH, 1, seqlen, seqlen, dtype=torch.bool).bernoulli_(0.7)
    mask[..., 0] = True  # SDPA gives NaN for an empty row
    bias = torch.randn(BATCH, heads_of_bias, bias_rows, seqlen)
    return q, k, v, dout, mask, bias


def best(run: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several runs in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def compare(seqlen: int, repeats: int) -> None:
    """Print forward, backward and their sum for both, with the ratio."""
    q, k, v, dout, mask, bias = inputs(seqlen, HEADS, seqlen)
    out, lse = eager.forward(q, k, v, mask, bias, softmax_scale=SCALE)

    def forward() -> object:
        return eager.forward(q, k, v, mask, bias, softmax_scale=SCALE)

    def backward() -> object:
        return eager.backward(dout, None, q, k, v, mask, bias, out, lse, softmax_scale=SCALE)

    dense = bias.masked_fill(~mask, -torch.inf).requires_grad_()
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*leaves, attn_mask=dense)

    def sdpa_backward() -> float:
        result = sdpa()
        return best(lambda: torch.autograd.grad(result, [*leaves, dense], dout.transpose(1, 2)), 1)

    ours = best(forward, repeats), best(backward, repeats)
    theirs = best(sdpa, repeats), min(sdpa_backward() for _ in range(repeats))
    threads = torch.get_num_threads()
    print(f"B{BATCH} H{HEADS} L{seqlen} D{HEAD_DIM} fp32, mask (B,1,L,L), bias (B,H,L,L), {threads} threads")
    print(f"{'':10}{'eager ms':>10}{'SDPA math ms':>14}{'ratio':>8}")
    rows = (("forward", ours[0], theirs[0]), ("backward", ours[1], theirs[1]), ("sum", sum(ours), sum(theirs)))
    for name, mine, other in rows:
        print(f"{name:10}{mine:10.1f}{other:14.1f}{mine / other:8.2f}")


def peak(seqlen: int, bias_rows: int) -> None:
    """Print seconds and peak memory above the inputs of one forward and backward, in this process."""
    q, k, v, dout, mask, bias = inputs(seqlen, 1, bias_rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    out, lse = eager.forward(q, k, v, mask, bias, softmax_scale=SCALE)
    eager.backward(dout, None, q, k, v, mask, bias, out, lse, softmax_scale=SCALE)
    seconds = time.perf_counter() - start
    above = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    shape = tuple(bias.shape)
    print(f"L{seqlen} bias {shape}: {seconds:.1f} s, peak {above / 2**20:.2f} GB above the inputs, outputs included")


def main() -> None:
    """Run the table, and with --long each memory figure in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also the peak memory at L 16384")
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", type=int, nargs=2, metavar=("SEQLEN", "BIAS_ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        peak(*arguments.peak)
        return
    compare(arguments.seqlen, arguments.repeats)
    if arguments.long:
        for bias_rows in (16384, 1):
            command = [sys.executable, __file__, "--peak", "16384", str(bias_rows)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
