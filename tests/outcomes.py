"""How a script that runs many calls in a process of its own says what came of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable

import torch

import flash_dmattn

PROGRESS_SECONDS = 5.0


def outcome_of(check: Callable[[], object], told: str) -> str | None:
    """None if a check of a call passes; otherwise the call in words, and what failed, so that others still run.

    Raises:
        flash_dmattn.BackendUnsupportedError: a rule refuses the call.
    """
    try:
        check()
    except flash_dmattn.BackendUnsupportedError:
        raise
    except Exception:
        return f"{told}\n{traceback.format_exc(limit=-4)}"[:3000]
    return None


def report(outcomes: Iterable[str | None]) -> int:
    """Print the failures, None being none, and a line of counts; returns the exit status of the script."""
    torch.set_num_threads(1)
    passed = failed = 0
    told = time.monotonic()
    for outcome in outcomes:
        passed, failed = passed + (outcome is None), failed + (outcome is not None)
        if outcome is not None:
            print(outcome, flush=True)
        if time.monotonic() - told > PROGRESS_SECONDS:  # a process that is ended says how far it came
            print(f"{passed} passed, {failed} failed so far", flush=True)
            told = time.monotonic()
    print(f"{passed} passed, {failed} failed")
    return min(failed, 100)
