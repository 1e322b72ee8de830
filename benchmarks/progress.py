"""How far a run is: a bar of rich on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol


class Progress(Protocol):
    """The display that a run reports to."""

    def case(self, name: str) -> None:
        """A case begins."""

    def line(self, text: str) -> None:
        """Print a line above the bar."""

    def done(self) -> None:
        """The case that was begun is done."""


class Lines:
    """Plain lines: the number of the case, and how long it took."""

    def __init__(self, total: int, before: int) -> None:
        self.total, self.index = total, before
        self.name, self.started = "", 0.0

    def case(self, name: str) -> None:
        self.name, self.started = name, time.perf_counter()
        print(f"[{self.index + 1}/{self.total}] {name}", flush=True)

    def line(self, text: str) -> None:
        print(text, flush=True)

    def done(self) -> None:
        self.index += 1
        print(f"    {time.perf_counter() - self.started:.1f} s", flush=True)


@contextmanager
def progress(title: str, total: int, before: int = 0) -> Iterator[Progress]:
    """Show progress over `total` cases; `before` are already done."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield Lines(total, before)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(title, total=total, completed=before)

        class Rich:
            """A bar at the bottom of the terminal."""

            def case(self, name: str) -> None:
                bar.update(task, description=f"{title}: {name}")

            def line(self, text: str) -> None:
                bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

            def done(self) -> None:
                bar.advance(task)

        yield Rich()
