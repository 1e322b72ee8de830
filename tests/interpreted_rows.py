"""Compare bits of rows in many surroundings, in Triton's interpreter: `python interpreted_rows.py [all]`.

Each class is in some of the surroundings, with `all` in every one.
`invariant_rows.py` draws the calls, here for small tiles and spans. Products are taken as tensor cores take them,
because a product of BLAS depends on the rows beside it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from unittest import mock

import interpreter
import torch
from interpreter import InterpreterBuilder, Tile, dot_of_tensor_cores, set_up
from invariant_rows import SURROUNDINGS, Class, draw_sequence, unequal
from outcomes import report

from flash_dmattn.backends.triton import passes
from flash_dmattn.triton_kernels import plan_forward

TILE, SPAN = Tile(32, 64, 4, 1), 128
PLAIN = Class(head_dim=32, group=2, heads_k=1, dtype=torch.float16)
CLASSES = {
    "causal": PLAIN,
    "window": Class(32, 1, 1, torch.float16, is_causal=False, window=(60, 0), softcap=5.0),
    "whole": Class(32, 1, 2, torch.float16, is_causal=False, scale=-0.2, sink=True),
    "mask": Class(32, 1, 1, torch.float16, is_causal=False, mask=True),
    "bias per key": Class(32, 2, 1, torch.float16, bias="key"),
    "bias per score": Class(32, 1, 1, torch.float16, bias="score", mask=True, sink=True),
}
LENGTHS = {"mask": 256}  # two tiles that may be full
# One query, whose heads of a group are rows of a tile; a chunk that reaches into the second span, and begins elsewhere
# in its tile.
SEEDS = {("causal", "as_chunk"): 2, ("window", "as_chunk"): 9}
# Surroundings that may change the bits of a class, by what decides its order.
SOME = {
    "causal": ("packed", "paged", "as_chunk"),
    "window": ("paged", "as_chunk"),
    "whole": ("in_batch", "fewer_heads"),
    "mask": ("packed", "as_chunk", "other_rows"),
    "bias per key": ("packed", "paged"),
    "bias per score": ("padded", "other_rows"),
}


def outcome(name: str, surrounding: str, num_sms: int, seed: int) -> str | None:
    set_up(TILE, num_sms=num_sms)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    wanted, result = SURROUNDINGS[surrounding](draw_sequence(CLASSES[name], LENGTHS.get(name, 150), "cpu"), rng)
    counts = unequal(wanted, result)
    return f"{name}, {surrounding}, {num_sms} SMs: {counts}" if any(counts.values()) else None


def outcomes(every: bool) -> Iterator[str | None]:
    """Outcomes of classes in surroundings; SMs decide how many programs share the keys."""
    for name in CLASSES:
        for place, surrounding in enumerate(SURROUNDINGS):
            if every or surrounding in SOME[name]:
                yield outcome(name, surrounding, (1, 64)[place % 2], SEEDS.get((name, surrounding), place))


if __name__ == "__main__":
    interpreter.admit_cpu()
    with (
        mock.patch.object(passes, "GROUP_ROWS_FROM", 1),
        mock.patch.object(plan_forward, "SPAN", SPAN),
        mock.patch.object(InterpreterBuilder, "create_dot", dot_of_tensor_cores),
    ):
        sys.exit(report(outcomes("all" in sys.argv[1:])))
