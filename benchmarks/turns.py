"""Turns of processes that share a GPU: they prepare cases side by side, and time them one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

Alone = Callable[[], bool]  # waits, and returns whether other processes may have used the GPU until then


class Turns:
    """Locks of one GPU in the folder of a run; every process of the run has them.

    Nobody times while another process prepares, and nobody begins to prepare while another waits to time or times. So
    all prepare one case each, then all time, and the next round begins.

    Args:
        folder: where the files of the locks are made.
        gpu: what tells the GPU from others of the machine.
    """

    def __init__(self, folder: Path, gpu: str) -> None:
        # Processes that wait or time share the first lock. Processes that prepare share the second; one that times has
        # it alone.
        self._waiting, self._busy = ((folder / f"{name}-{gpu}.lock").open("a") for name in ("waiting", "busy"))

    @contextmanager
    def case(self) -> Iterator[Alone]:
        """Prepare a case; the function that is yielded waits until this process may time it."""
        from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock  # Windows has none

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


def turns_of(device: torch.device, folder: Path, processes: int) -> Callable[[], AbstractContextManager[Alone]]:
    """Return what a process enters for each case: turns where several processes of the run may share its GPU."""
    if device.type == "cuda" and processes > 1:
        return Turns(folder, str(torch.cuda.get_device_properties(device).uuid)).case
    return lambda: nullcontext(at_once)


def at_once() -> bool:
    """Wait for nothing: no other process shares the device."""
    return False
