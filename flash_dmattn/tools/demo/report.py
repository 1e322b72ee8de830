"""What the demo prints: headings, tables and progress, by rich on a terminal and as plain text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

Progress = Callable[[int, float, float], None]

PROGRESS_LINES = 10


class Report:
    """Printing to standard output, pretty where that is a terminal and rich is installed.

    >>> Report(pretty=False).table("Sizes", ("name", "bytes"), [("a", "1"), ("bc", "20")])
    <BLANKLINE>
    Sizes
      name  bytes
      ----  -----
      a         1
      bc       20
    """

    def __init__(self, pretty: bool | None = None) -> None:
        self.pretty = (sys.stdout.isatty() and find_spec("rich") is not None) if pretty is None else pretty

    def line(self, text: str = "") -> None:
        """Print a line as it is, whatever characters it has."""
        print(text, flush=True)

    def heading(self, text: str) -> None:
        """Print a heading, with an empty line before it."""
        if self.pretty:
            from rich.console import Console
            from rich.text import Text

            Console().print(Text(f"\n{text}", style="bold"))
        else:
            self.line(f"\n{text}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: the first column to the left, the others to the right, a last column of reasons to the left.

        Args:
            title: heading above it.
            columns: names; "why" and "result" are columns of text.
            rows: as many cells as columns, each.
        """
        if self.pretty:
            self._rich_table(title, columns, rows)
            return
        self.heading(title)
        cells = [list(columns), *(list(row) for row in rows)]
        widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
        cells.insert(1, ["-" * width for width in widths])
        for row in cells:
            aligned = (
                cell.ljust(width) if _is_text(columns, c) else cell.rjust(width)
                for c, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            self.line("  " + "  ".join(aligned).rstrip())

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Progress]:
        """Show how far a training of `total` steps is; yields a function of (step, its loss, last held-out loss)."""
        if self.pretty:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[losses]}"),
            )
            with Bar(*columns) as bar:
                task = bar.add_task(title, total=total, losses="")
                yield lambda step, loss, held_out: bar.update(task, completed=step, losses=_losses(loss, held_out))
            return
        started = time.perf_counter()
        every = max(1, total // PROGRESS_LINES)

        def plain(step: int, loss: float, held_out: float) -> None:
            if step % every == 0 or step == total:
                seconds = time.perf_counter() - started
                self.line(f"  {title}  {step:>{len(str(total))}}/{total}  {_losses(loss, held_out)}  {seconds:5.1f} s")

        yield plain

    def _rich_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if _is_text(columns, index) else "right", overflow="fold")
        for row in rows:
            # Text, not str: a reason may hold brackets, which rich would read as markup.
            table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        console = Console()
        console.print()
        console.print(table)


def _is_text(columns: Sequence[str], index: int) -> bool:
    return index == 0 or columns[index] in ("why", "result", "dtype")


def _losses(loss: float, held_out: float) -> str:
    return f"loss {loss:.3f}  held-out {held_out:.3f}"


def _style(cell: str) -> str:
    if cell.startswith("pass"):
        return "green"
    return "bold red" if cell.startswith("FAIL") else ""
