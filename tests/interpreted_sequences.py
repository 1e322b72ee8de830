"""Run the Triton kernels on sequences in Triton's interpreter: `python interpreted_sequences.py <first> <calls>`.

As `interpreted_triton.py`, whose guards it takes: outputs are NaN before and between margins. Rows of q, k, v
and dout that are of no sequence are NaN as well.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator

import interpreted_triton as base
import torch
from outcomes import report
from sequence_calls import assert_accurate, draw, run, spoiled

from flash_dmattn.triton_kernels import plan_sequences, plan_slots

LENGTHS = (0, 1, 5, 16, 17, 31, 32, 33, 40, 70)
SKEWED = (1, 1, 1, 1, 2, 2, 5, 100)  # so that a tile of packed rows is searched for
LAYOUTS = ("packed", "packed", "padded", "paged", "paged_packed")


def outcomes(first: int, count: int) -> Iterator[str | None]:
    """What came of each call: None, or why it failed."""
    for number in range(first, first + count):
        rng = random.Random(number)
        layout = rng.choice(LAYOUTS)
        lengths = SKEWED if layout == "packed" and number % 2 else LENGTHS
        dtypes, head_dims = ((torch.float16,), (264, 512)) if number % 10 == 7 else (base.EVERY_DTYPE, (4, 16, 20))
        call = draw(number, layout, lengths, dtypes, head_dims)
        settings = rng.choice(base.TILES), 1, 0
        num_sms = rng.choice(base.NUM_SMS)
        plan_sequences.chunks_of = lambda m, programs, _, slots, n=num_sms: plan_slots.chunks_of(m, programs, n, slots)
        base.set_up(*settings)
        base._allocated.clear()
        try:
            results = run(spoiled(call), "triton")
            base.assert_margins()
            assert_accurate(results, call)
            yield None
        except Exception:  # the other calls still count
            yield f"{call.told}, {settings}, {num_sms} SMs\n{traceback.format_exc(limit=-3)}"[:3000]


if __name__ == "__main__":
    base.admit_cpu()
    torch.empty, torch.empty_like = base.guarded_empty, lambda x: base.guarded_empty(x.shape, dtype=x.dtype)
    sys.exit(report(outcomes(int(sys.argv[1]), int(sys.argv[2]))))
