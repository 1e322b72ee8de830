"""Summarises a row of performance: the time of the choice of "auto", and of the fastest peer with right results."""

from __future__ import annotations

from typing import Any, NamedTuple

Record = dict[str, Any]


class Time(NamedTuple):
    """A system, and the milliseconds of one of its passes."""

    ms: float
    system: str


class Standing(NamedTuple):
    """One pass of one case: our time with and without mask building, the fastest peer without it, and the floor."""

    row: Record
    name: str
    ours: Time
    prepared: Time | None
    peer: Time | None
    floor_ms: float

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the fastest peer; None where no peer has a right result."""
        return None if self.peer is None else self.peer.ms / self.ours.ms

    @property
    def prepared_ratio(self) -> float | None:
        """The same where our mask is made beforehand, too."""
        return None if self.peer is None or self.prepared is None else self.peer.ms / self.prepared.ms


def is_right(column: Record) -> bool:
    """Return whether a column's times may be compared with others."""
    return not column["failed"] and not column["wrong"]


def time_of(row: Record, system: str, name: str) -> float | None:
    """Return the least time of a peer in a pass, its mask prepared beforehand where that is faster, or None."""
    times = [
        column[name]["ms"]
        for line in row["systems"]
        if line["system"] == system
        for column in line["columns"].values()
        if column[name] is not None and is_right(column)
    ]
    return min(times, default=None)


def fastest_peer(row: Record, name: str) -> Time | None:
    """Return the fastest peer with right results in one pass, its mask prepared beforehand where that is faster."""
    times = [
        Time(column[name]["ms"], line["system"])
        for line in row["systems"]
        if not line["ours"]
        for column in line["columns"].values()
        if column[name] is not None and is_right(column)
    ]
    return min(times, default=None)


def ours(row: Record, name: str, prepared: bool = False) -> Time | None:
    """Return the time of what "auto" takes for a pass, with the mask as a bool tensor or prepared beforehand."""
    forward, backward = row["auto"]
    for line in row["systems"]:
        column = line["columns"].get("prepared" if prepared and row["has_mask"] else "call")
        if not line["ours"] or column is None or column[name] is None or not is_right(column):
            continue
        pair = line["backends"]
        fits = {
            "forward": pair[0] == forward,
            "backward": pair[-1] == backward,
            "step": pair[0] == forward and pair[-1] == backward,
        }
        if fits[name]:
            return Time(column[name]["ms"], line["system"])
    return None


def standings(rows: list[Record], names: tuple[str, ...] = ("forward", "backward")) -> list[Standing]:
    """Return every pass of every row that "auto" was timed in."""
    result = []
    for row in (row for row in rows if "error" not in row):
        for name in (name for name in names if name in row["floor_ms"]):
            mine = ours(row, name)
            if mine is not None:
                alone, peer = ours(row, name, prepared=True), fastest_peer(row, name)
                result.append(Standing(row, name, mine, alone, peer, row["floor_ms"][name]))
    return result


def systems_of(rows: list[Record]) -> dict[str, bool]:
    """Return the systems of all rows in order of appearance, and whether they are ours."""
    return {line["system"]: line["ours"] for row in rows for line in row["systems"]}
