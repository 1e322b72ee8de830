"""Calls of ranks on the Triton kernels, in Triton's interpreter, which drop what eager drops in one process.

Documents cross ranks, so that rows of zeros go before slices, and all parts of a dropout key are used.

    torchrun --nproc-per-node 2 tests/interpreted_distributed.py
"""

from __future__ import annotations

import os

import interpreter  # before Triton
import torch
import torch.distributed as dist
from distributed_calls import FULL, P, compared

# One error of fp32 in a sum of a few; another probability that is dropped is far beyond.
TOLERANCE = 1e-5
DROPPED = P(dtype=torch.float32, head_dim=16, dropout_p=0.3, is_causal=True, dlse=True, sink="normal", backend="triton")
CASES = (
    DROPPED.with_(documents=(0, 3, 3, 20, 37, 64), seqlen_q=64, seqlen_k=64, batch=1, bias="keys_of_q"),
    DROPPED.with_(mask=FULL, bias=FULL),  # intervals begin inside of a block
    DROPPED.with_(batch=3, lengths=((20, 32, 0), (20, 20, 3)), bias="shared"),
)


def main() -> None:
    """Run all cases, and say on the first rank how many passed."""
    interpreter.admit_cpu()
    interpreter.set_up()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    largest = torch.tensor([max(compared(case).values()) for case in CASES])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{int((largest < TOLERANCE).sum())} of {len(CASES)} passed, errors {largest.tolist()}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # as gpu_distributed.py does
