"""One planted fault: a line of the product changed, and the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault of one line.

    `before` stands exactly once in `file`; the fault puts `after` in its place. `tests` are arguments of pytest, one
    each: files or node ids. They must not depend on random draws to see the fault: each draws its data from a fixed
    seed, and would fail with any other.
    """

    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
