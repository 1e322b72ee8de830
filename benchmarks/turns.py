"""Turns of processes that share a GPU: they prepare cases side by side, and time them one after another.

A case without memory beside other processes comes last, when every process has ended its other cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

Alone = Callable[[], bool]  # waits, and returns whether other processes may have used the GPU until then


class Turns:
    """Locks of one GPU in the folder of a run; every process of the run has them.

    Nobody times while another process prepares, and nobody begins to prepare while another waits to time or times. So
    all prepare one case each, then all time, and the next round begins. A process that has ended its cases calls `last`
    or drops its turns, for which others may wait.

    Args:
        folder: where the files of the locks are made.
        gpu: what tells the GPU from others of the machine.
    """

    def __init__(self, folder: Path, gpu: str) -> None:
        from fcntl import LOCK_SH, flock  # Windows has none

        # Processes that wait or time share the first lock. Processes that prepare share the second; one that times has
        # it alone. The third is shared by all that have cases left.
        files = ((folder / f"{name}-{gpu}.lock").open("a") for name in ("waiting", "busy", "cases"))
        self._waiting, self._busy, self._cases = files
        flock(self._cases, LOCK_SH)

    @contextmanager
    def case(self) -> Iterator[Alone]:
        """Prepare a case; the function that is yielded waits until this process may time it."""
        from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock

        is_alone = False

        def alone() -> bool:
            nonlocal is_alone
            if not is_alone:
                torch.cuda.empty_cache()  # other processes still prepare
                flock(self._waiting, LOCK_SH)
                flock(self._busy, LOCK_UN)
                flock(self._busy, LOCK_EX)
                is_alone = True
            return True

        flock(self._waiting, LOCK_EX)
        flock(self._busy, LOCK_SH)
        flock(self._waiting, LOCK_UN)
        try:
            yield alone
        finally:
            flock(self._busy, LOCK_UN)
            flock(self._waiting, LOCK_UN)

    @contextmanager
    def last(self) -> Iterator[None]:
        """Wait until every process has ended its cases, and have the GPU alone: one process at a time comes here."""
        from fcntl import LOCK_EX, LOCK_UN, flock

        flock(self._cases, LOCK_UN)
        flock(self._cases, LOCK_EX)
        try:
            yield
        finally:
            flock(self._cases, LOCK_UN)


def turns_of(device: torch.device, folder: Path, processes: int) -> Turns | None:
    """Return the turns of a process; None unless several processes of the run may share its GPU."""
    if device.type == "cuda" and processes > 1:
        return Turns(folder, str(torch.cuda.get_device_properties(device).uuid))
    return None


def at_once() -> bool:
    """Wait for nothing: no other process shares the device."""
    return False
