"""The table of a profile in words."""

from __future__ import annotations

from ...dispatch.preferences import MEASURED, judge
from ...dispatch.profiles import ROWS, Figures, Profile


def table(profile: Profile) -> str:
    """A line for each class of calls: milliseconds forward and backward of each backend, and which auto would take."""
    header = ("class of calls", *MEASURED, "auto takes")
    lines = [header, *(_line(profile, row.name, row.grad) for row in ROWS)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    notes = [f"{backend}: {why}" for backend, why in profile.wrong.items()]
    notes += [
        f"{backend}, {row}: {figures.error}"
        for row, found in profile.rows.items()
        for backend, figures in found.items()
        if figures.error
    ]
    return "\n".join(["milliseconds forward / backward", "", *text, *([""] if notes else []), *notes])


def _line(profile: Profile, row: str, grad: bool) -> tuple[str, ...]:
    found = profile.rows.get(row)
    if found is None:
        return row, *("-" for _ in MEASURED), "not reached"
    taken = " / ".join(dict.fromkeys(choice(profile, row, passes) for passes in ((False, True) if grad else (False,))))
    return row, *(_cell(found[backend]) for backend in MEASURED), taken


def _cell(figures: Figures) -> str:
    if figures.forward is None:
        return "failed"
    return f"{figures.forward:.3g}" + ("" if figures.backward is None else f" / {figures.backward:.3g}")


def choice(profile: Profile, row: str, with_gradients: bool) -> str:
    """The backend that auto takes in a row, if the rules of each accept the call."""
    found = judge(profile, (row,), with_gradients)
    if found is None:
        return "as without"
    if found.takes_triton and (found.before_flex or found.flex_failed):
        return "triton"
    return "eager" if found.flex_failed else "flex"
