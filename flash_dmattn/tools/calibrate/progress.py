"""How far a run is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 24


class Progress:
    """Steps done of all, what is being done, and the seconds since the start.

    Args:
        stream: what it is written to.
        total: number of steps.
        clock: seconds that only grow.
    """

    def __init__(self, stream: TextIO, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.total, self.clock = stream, total, clock
        self.done, self.started, self.on_terminal = 0, clock(), stream.isatty()

    def step(self, what: str) -> None:
        """A step begins; the one before it is done."""
        seconds = self.clock() - self.started
        filled = WIDTH * self.done // max(1, self.total)
        text = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {self.done:2}/{self.total}  {seconds:4.0f} s  {what}"
        # The rest of the line before is blanked.
        self.stream.write(f"\r{text:<79}" if self.on_terminal else f"{text}\n")
        self.stream.flush()
        self.done = min(self.done + 1, self.total)

    def skip(self, steps: int) -> None:
        """Steps are left out."""
        self.done = min(self.done + steps, self.total)

    def close(self) -> None:
        """End the line of the bar."""
        if self.on_terminal:
            self.stream.write("\n")
            self.stream.flush()
