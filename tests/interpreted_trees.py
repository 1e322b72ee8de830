"""Run the Triton kernels with trees of new tokens in its interpreter: `python interpreted_trees.py <first> <calls>`.

As `interpreted_sequences.py`. With a chain as its tree each call has the bits of causality.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace

import interpreted_triton as base
import torch
from outcomes import report
from sequence_calls import assert_accurate, run, spoiled
from tree_calls import as_chain, draw

LAYOUTS = ("packed", "padded", "paged", "paged", "paged_packed")
LENGTHS_K = (0, 1, 17, 32, 33, 70, 130)


def outcomes(first: int, count: int) -> Iterator[str | None]:
    """What came of each call: None, or why it failed."""
    for number in range(first, first + count):
        rng = random.Random(number)
        # Every other one has a draft behind many keys, whose parts programs share.
        lengths = {"lengths": (1, 3, 5)} if number % 2 else {"lengths": (0, 1, 5, 17, 33)}
        layout = rng.choice(LAYOUTS)
        call = draw(number, layout, dtypes=base.EVERY_DTYPE, head_dims=(4, 16, 20), lengths_k=LENGTHS_K, **lengths)
        call = spoiled(call)
        base.set_up(rng.choice(base.TILES), 1, 0)
        base._allocated.clear()
        try:
            assert_accurate(run(call, "triton"), call)
            chain, causal = (run(replace(each, needs_grad=()), "triton") for each in as_chain(call))
            for name in ("out", "lse"):
                assert torch.equal(chain[name], causal[name]), f"{name} of a chain is not that of causality"
            base.assert_margins()
            yield None
        except Exception:  # the other calls still count
            yield f"{call.told}, {layout}\n{traceback.format_exc(limit=-3)}"[:3000]


if __name__ == "__main__":
    base.admit_cpu()
    torch.empty, torch.empty_like = base.guarded_empty, lambda x: base.guarded_empty(x.shape, dtype=x.dtype)
    sys.exit(report(outcomes(int(sys.argv[1]), int(sys.argv[2]))))
