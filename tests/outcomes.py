"""How a script that runs many calls in a process of its own says what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

import flash_dmattn

PROGRESS = 20  # calls


def served(outcome_of: Callable[[int], str | None], numbers: Iterable[int], count: int) -> Iterator[str | None]:
    """Outcomes of the first `count` of the numbered calls that no rule refuses."""
    for number in numbers:
        try:
            outcome = outcome_of(number)
        except flash_dmattn.BackendUnsupportedError:
            continue
        yield outcome
        count -= 1
        if count == 0:
            return


def report(outcomes: Iterator[str | None]) -> int:
    """Print the failures, None being none, and a line of counts; returns the exit status of the script."""
    torch.set_num_threads(1)
    passed = failed = 0
    for outcome in outcomes:
        passed, failed = passed + (outcome is None), failed + (outcome is not None)
        if outcome is not None:
            print(outcome, flush=True)
        if (passed + failed) % PROGRESS == 0:  # a process that is ended says how far it came
            print(f"{passed} passed, {failed} failed so far", flush=True)
    print(f"{passed} passed, {failed} failed")
    return min(failed, 100)
