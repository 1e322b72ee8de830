"""The JSON file of one suite's results; it is complete after every row, and a run can continue from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from . import machine as machines
from .files import write_whole

Record = dict[str, Any]
SCHEMA = 1
SUITES = ("equivalence", "performance", "memory", "model")  # a file each


class OtherRun(Exception):
    """The file holds rows of another machine, commit or choice of systems."""


class Results:
    """Rows by the name of their case, kept in a file. Several processes of one run may add rows to it.

    Args:
        path: the file; its folder is made.
        head: what the rows have in common: "suite", "machine", "settings", "planned".
        fresh: start anew, whatever the file has.

    Raises:
        OtherRun: the file has rows that do not belong to this run, and `fresh` is not set.
    """

    def __init__(self, path: Path, head: Record, *, fresh: bool = False) -> None:
        self.path = path
        self.content: Record = {"schema": SCHEMA, **head, "rows": []}
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists():
            stored = load(path)
            differs = [name for name, pair in _compared(stored, self.content).items() if pair[0] != pair[1]]
            if differs:
                pairs = _compared(stored, self.content)
                said = "; ".join(f"{name} {pairs[name][0]} there, {pairs[name][1]} here" for name in differs)
                raise OtherRun(f"{path} is of another run ({said}); --fresh replaces it")
            self.content["rows"] = stored["rows"]

    def __contains__(self, name: str) -> bool:
        return any(row["name"] == name for row in self.content["rows"])

    def add(self, row: Record) -> None:
        """Take a row, in the place that the plan gives it, and write the file."""
        with self._changes() as content:
            planned = content["planned"]
            rows = [row, *(old for old in content["rows"] if old["name"] != row["name"])]
            content["rows"] = sorted(rows, key=lambda row: planned.index(row["name"]))

    def leave_out(self, reasons: dict[str, str]) -> None:
        """Write why systems do not run on this machine."""
        with self._changes() as content:
            content["left_out"] = reasons

    @contextmanager
    def _changes(self) -> Iterator[Record]:
        """Yield the content, with the rows that other processes have added, and write the file.

        The file is replaced at once, so that an interruption leaves the old one.
        """
        with FileLock(self.path.with_suffix(".lock")):
            if self.path.exists():
                self.content["rows"] = load(self.path)["rows"]
            yield self.content
            write_whole(self.path, json.dumps(rounded(self.content), indent=1, allow_nan=False) + "\n")


def rounded(x: Any) -> Any:
    """Round numbers to six significant digits; more digits of a time or an error are noise."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value) for value in x]
    return float(f"{x:.6g}") if isinstance(x, float) else x


def load(path: Path) -> Record:
    content: Record = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise OtherRun(f"{path} has schema {content.get('schema')!r}, and this version reads {SCHEMA}")
    return content


def missing(content: Record) -> list[str]:
    """Return the planned cases that have no row."""
    done = {row["name"] for row in content["rows"]}
    return [name for name in content["planned"] if name not in done]


def _compared(stored: Record, wanted: Record) -> dict[str, tuple[Any, Any]]:
    pairs: dict[str, tuple[Any, Any]] = {}
    for part in ("machine", "settings"):
        read = machines.identity if part == "machine" else dict
        old, new = read(stored[part]), read(wanted[part])
        pairs |= {name: (old.get(name), new.get(name)) for name in {**old, **new}}
    return pairs
