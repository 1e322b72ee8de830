"""Calls with sequences on the emulated GPU of `emulation/`: `python emulated_sequences.py FILE FIRST COUNT`.

As `emulated_cuda.py`, whose GPU it takes. Runs COUNT of the random calls of `sequence_calls.py` from number FIRST on,
those that the kernels take, with NaN in every row of no sequence.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import emulated_cuda as emulated
from cuda_sequence_calls import drawn
from outcomes import report, served
from sequence_calls import assert_accurate, run, spoiled

import flash_dmattn
from flash_dmattn.backends.cuda import passes


def failure_of(number: int) -> str | None:
    """Run a call; None where every result is as it has to be.

    Raises:
        flash_dmattn.BackendUnsupportedError: a rule refuses it.
    """
    call, rng = drawn(number), random.Random(f"machine {number}")
    passes.NUM_DBIAS_CHUNKS = rng.choice(emulated.NUM_DBIAS_CHUNKS)
    num_sms = rng.choice(emulated.NUM_SMS)
    try:
        emulated.configure(num_sms, number)
        assert_accurate(run(spoiled(call), "cuda"), call)
    except flash_dmattn.BackendUnsupportedError:
        raise
    except Exception as failure:  # the other calls still count
        where = f"SMs {num_sms}, {passes.NUM_DBIAS_CHUNKS} chunks, {call.flags}, gradients of {call.needs_grad}"
        return f"{call.told}, {where}\n{type(failure).__name__}: {failure}"[:2000]
    return None


def random_calls(first: int, count: int) -> Iterator[str | None]:
    """Outcomes of the calls that are not refused."""
    return served(failure_of, itertools.count(first), count)


if __name__ == "__main__":
    emulated.admit_cpu(Path(sys.argv[1]))
    sys.exit(report(random_calls(int(sys.argv[2]), int(sys.argv[3]))))
