"""Random calls with sequences on a GPU: `python tests/gpu_sequence_calls.py KIND BACKEND FIRST COUNT`.

KIND is "sequences" or "trees". Runs COUNT of the calls of `sequence_calls.py` or `tree_calls.py`, from number FIRST on,
that the backend takes, each held against the fp64 formula. A script: nearly each call of Triton compiles kernels of its
own, so several processes share the work.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial

import cuda_sequence_calls
import sequence_calls
import torch
import tree_calls
from cases import DEVICE
from outcomes import report, served
from sequence_calls import SequenceCall, assert_accurate, run

import flash_dmattn

KINDS = {"sequences": sequence_calls, "trees": tree_calls}
BY_PYTORCH = ("eager", "reference")  # they have no tiles: short rows will do, in fp64 too


def call_of(kind: str, backend: str, number: int) -> SequenceCall:
    """The call of a number, as the backend's kernels take most of them."""
    if kind == "sequences" and backend == "cuda":
        return cuda_sequence_calls.drawn(number)
    calls = KINDS[kind]
    if backend in BY_PYTORCH:
        return calls.draw(number)
    wide = {"head_dims": (320, 512), "dtypes": (torch.bfloat16, torch.float16)}
    return calls.draw(number, **calls.ON_GPU | (wide if backend == "triton" and number % 8 == 7 else {}))


def failure_of(kind: str, backend: str, number: int) -> str | None:
    """Run a call; None where every result is as it has to be.

    Raises:
        flash_dmattn.BackendUnsupportedError: a rule refuses it.
    """
    call = call_of(kind, backend, number)
    try:
        assert_accurate(run(call, backend), call)
    except flash_dmattn.BackendUnsupportedError:
        raise
    except Exception as failure:  # the other calls still count
        return f"number {number}: {call.told}\n{type(failure).__name__}: {failure}"[:2000]
    return None


if __name__ == "__main__":
    if DEVICE == "cpu" and sys.argv[2] not in BY_PYTORCH:  # its rules would refuse them all, without an end
        sys.exit(f"{sys.argv[2]} needs a GPU, and torch finds none")
    numbers = itertools.count(int(sys.argv[3]))
    sys.exit(report(served(partial(failure_of, *sys.argv[1:3]), numbers, int(sys.argv[4]))))
