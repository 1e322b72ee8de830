"""Context parallelism over gloo, two and four processes, in fp64 against one call in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distributed_calls import BIASES, MASKS, ParallelCase
from distributed_workers import workers

TOLERANCE = 1e-10
P = ParallelCase

CASES = {
    **{f"bias {name}": P(bias=name, causal=True, lse=True, seed=i) for i, name in enumerate(BIASES)},
    **{f"mask {name}": P(mask=name, causal=True, lse=True, seed=20 + i) for i, name in enumerate(MASKS)},
    "window": P(window=(5, 3), bias="full", lse=True),
    "left window, groups": P(window=(6, -1), bias="group", groups=2),
    "right window": P(window=(-1, 2), bias="keys", mask="prepared"),
    "narrow window": P(window=(0, 0), mask="full", bias="shared"),
    "softcap, scale": P(softcap=2.0, scale=0.7, causal=True, bias="full", lse=True),
    "sink": P(sink=True, causal=True, bias="full", lse=True),
    "sink, reduced": P(sink=True, mask="full", reduce=True, groups=2),
    "reduced bias": P(bias="head", causal=True, reduce=True),
    "reduced keys": P(bias="keys", causal=True, reduce=True, groups=2, lse=True),
    "sharded, groups": P(bias="sharded", mask="sharded", groups=2, lse=True),
    "empty rows": P(mask="full", empty=True, bias="full", lse=True),
    "empty rows, sink": P(mask="full", empty=True, sink=True, lse=True),
    "more keys": P(seqlen_q=16, seqlen_k=48, causal=True, bias="full", lse=True),
    "fewer keys, rows without": P(seqlen_q=48, seqlen_k=16, causal=True, bias="full", lse=True, sink=True),
    "cross, sharded": P(seqlen_q=16, seqlen_k=32, bias="sharded", mask="prepared", layout="contiguous"),
    "contiguous": P(layout="contiguous", causal=True, bias="full"),
    "balanced": P(layout="balanced", mask="prepared", bias="full", lse=True),
    "balanced, keys": P(layout="balanced", mask="keys", bias="sharded", causal=True),
    "dims": P(dim=8, dim_v=3, causal=True, bias="query"),
    "one key-value head": P(heads=4, heads_k=1, causal=True, bias="keys"),
    "heads alike": P(heads=4, heads_k=4, groups=4, causal=True, bias="full", mask="group"),
    "only dbias": P(needs=("bias",), causal=True, bias="full"),
    "only dq": P(needs=("q",), causal=True, bias="keys"),
    "only dk": P(needs=("k",), causal=True, bias="full", groups=2),
    "only dv, sharded": P(needs=("v", "bias"), bias="sharded"),
    "no gradient": P(needs=(), causal=True, bias="sharded", mask="prepared"),
    "fp32 exchange is refused in fp64 no": P(exchange=torch.float64, causal=True),
    "ulysses": P(strategy="ulysses", causal=True, lse=True, heads=8, heads_k=4, bias="keys"),
    "ulysses, window": P(strategy="ulysses", window=(4, 1), heads=8, heads_k=8, bias="keys_of_q", mask="keys"),
    "ulysses, shared heads": P(strategy="ulysses", causal=True, heads=8, heads_k=2, bias="keys", lse=True),
    "ulysses, one head": P(strategy="ulysses", causal=True, heads=4, heads_k=1, bias="head", reduce=True),
    "ulysses, sharded": P(strategy="ulysses", causal=True, heads=4, heads_k=4, bias="sharded", mask="sharded"),
    "ulysses, sink": P(strategy="ulysses", heads=4, heads_k=4, sink=True, lse=True, softcap=3.0),
    "ulysses, cross": P(strategy="ulysses", heads=4, heads_k=4, seqlen_q=16, seqlen_k=48, causal=True),
    "auto": P(strategy="auto", heads=8, heads_k=8, causal=True, bias="head"),
    "auto, rows": P(strategy="auto", heads=8, heads_k=8, causal=True, bias="full"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_call_over_processes_equals_one_call(name: str, size: int) -> None:
    for rank, errors in enumerate(workers(size).run("distributed_calls.compared", CASES[name])):
        assert max(errors.values()) < TOLERANCE, (rank, errors)
