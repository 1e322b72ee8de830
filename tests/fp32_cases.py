"""Calls in fp32 that lose accuracy if a product of fp32 numbers is made of too few pieces, or summed too coarsely."""

from __future__ import annotations

import torch
from accuracy import Results, assert_accurate, error, oracle
from cases import APART, DEVICE, ROWS, SMALL, Case, Inputs

FULL, SHARED = ("B", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk")
PLAIN = Case(batch=1, seqlen_q=40, seqlen_k=70, num_heads=2, num_heads_k=2, head_dim=24, dtype=torch.float32, seed=1)
LONG = 16384 if DEVICE == "cuda" else 600  # an error that a sum over keys makes at each step grows with their number

CASES = {
    **{f"head dim {dim}": PLAIN.with_(head_dim=dim, bias=FULL) for dim in (24, 40, 48, 64, 96)},
    "head dims of k and v": PLAIN.with_(head_dim=48, head_dim_v=32),
    "groups, causal": PLAIN.with_(num_heads_k=1, is_causal=True, dlse=True),
    "shared bias": PLAIN.with_(batch=3, bias=SHARED),
    "bias per key": PLAIN.with_(bias=("B", "1", "1", "Lk")),
    "bias per query": PLAIN.with_(bias=("B", "Hq", "Lq", "1")),
    "logits of 30": PLAIN.with_(logits=10.0),
    "bias of blocks": PLAIN.with_(bias=FULL, bias_kind="blocks"),
    "empty rows": PLAIN.with_(mask=FULL, mask_kind="empty_rows", bias=FULL),
    "softcap": PLAIN.with_(softcap=3.0, logits=4.0),
    "small scores under a softcap": PLAIN.with_(softcap=300.0),  # 300 tanh(s / 300)
    "dropout": PLAIN.with_(dropout_p=0.3),
    **{data: PLAIN.with_(data=data, bias=SHARED) for data in (*ROWS, "size 1e20", "size 1e-20")},
    "many keys of one sign": PLAIN.with_(data="one sign", seqlen_k=LONG, needs_grad=("q", "k", "v")),
    "many queries of one sign": PLAIN.with_(data="one sign", seqlen_q=LONG, needs_grad=("q", "k", "v")),
    "inf in v": PLAIN.with_(data="seen inf v"),
    "tiny": PLAIN.with_(data="size 1e-36"),
    "great rows, product 0": PLAIN.with_(data=APART),  # the product of their sizes is infinite
}
# Stored pieces differ from computed ones only in how tiles are loaded.
STORED = ("head dim 24", "head dim 96", "head dims of k and v", "groups, causal", "shared bias", *ROWS, "inf in v")
# Two pieces of bfloat16 have 16 bits, and one piece has an error of 2e-3. The interpreter cuts what a GPU rounds.
TWO_OF_BFLOAT16, ERROR_OF_BFLOAT16 = ("head dim 40", "groups, causal", "shared bias", "rows 1e-6"), 1e-4
# Products of rows are normal numbers of fp32, and products of their sizes are 0; pieces of bfloat16 end before.
SMALL_ROWS = PLAIN.with_(data=SMALL)
# The last piece of such numbers lies beyond the range of bfloat16: 1e-36 is 2^-120. Torch's own kernel has two pieces.
TINY, TINY_OF_TORCH = 1e-4, 1e-3


def assert_right(results: Results, case: Case, inputs: Inputs, backend: str) -> None:
    """Hold the results of a backend against fp64: near the end of the range by a bound, else by the rule of fp32."""
    if case != CASES["tiny"]:
        assert_accurate(results, case, inputs)
        return
    assert_right_to(results, case, inputs, TINY_OF_TORCH if backend == "sdpa" and DEVICE == "cuda" else TINY)


def assert_right_to(results: Results, case: Case, inputs: Inputs, bound: float) -> None:
    """Hold the results against fp64 by a bound on their relative errors."""
    for name, exact in oracle(case, inputs).items():
        got = results[name]
        assert (got is None) == (exact is None)
        off = 0.0 if got is None or exact is None else error(got, exact)
        assert off <= bound, f"{name}: error {off:.1e}, limit {bound:.0e}"
