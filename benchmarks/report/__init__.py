"""Tables and plots of a folder of results, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..results import SUITES, load
from . import plots, tables


def write(folder: Path, suites: Sequence[str] = SUITES) -> list[Path]:
    """Write <suite>.md and the plots, as PNG and SVG, of every suite with a row; return what was written.

    Without matplotlib there are no plots.
    """
    written = []
    for suite in suites:
        path = folder / f"{suite}.json"
        if not path.exists():
            continue
        content = load(path)
        if not content["rows"]:
            continue
        page = folder / f"{suite}.md"
        page.write_text(tables.page(content), encoding="utf-8")
        written.append(page)
        if find_spec("matplotlib") is not None:
            written += plots.write(content, folder)
    return written
