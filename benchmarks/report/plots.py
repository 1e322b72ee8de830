"""Plots of a suite's results, PNG and SVG: times of each group of calls, memory, training steps, errors."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import machine as machines
from . import summary
from .text import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]

# Okabe and Ito's colours, which stay apart for every common form of colour blindness; ours are the warm ones. A system
# has its colour and marker in every plot.
STYLES = {
    "cuda": ("#D55E00", "o"),
    "triton": ("#E69F00", "s"),
    "flex": ("#CC79A7", "D"),
    "eager": ("#882255", "v"),
    "reference": ("#661100", "P"),
    "sdpa-cudnn": ("#0072B2", "^"),
    "sdpa-flash": ("#009E73", "<"),
    "sdpa-mem": ("#56B4E9", ">"),
    "sdpa-math": ("#999999", "x"),
    "flexattention": ("#332288", "p"),
    "fa4": ("#117733", "*"),
    "cuequivariance": ("#44AA99", "d"),
    "flash-dmattn-1": ("#000000", "h"),
}
# Systems far behind the others would stretch the axes; the tables have them.
IN_PLOTS = tuple(name for name in STYLES if name not in ("eager", "reference", "sdpa-math"))
PANELS = ("forward", "backward")
# Inches: pages show a picture 700 to 900 pixels wide, where the text of a wider one would be too small to read.
WIDTH = 8.0
# Dots beyond this many times our time lie at it; a floor further left is left out.
FARTHEST = 20.0
NEAREST = 0.1
# One call of each kind, and the best known peers: the table and the plot of README.md.
KINDS = ("dense-d128", "causal-d128", "bias-bhll-d64", "bias-1hll-d64", "topk-8k", "blocks")
PEERS = ("fa4", "sdpa-cudnn", "flexattention")


def write(content: Record, folder: Path) -> list[Path]:
    """Write every plot of a suite; return the files."""
    rows = [row for row in content["rows"] if "error" not in row]
    figures: dict[str, Figure] = {}
    if content["suite"] == "performance":
        chosen = [row for row in rows if row["name"] in KINDS]
        if chosen:
            figures["performance-ratios"] = ratios(chosen, content)
        for group in dict.fromkeys(row["group"] for row in rows):
            some = [row for row in rows if row["group"] == group]
            swept = len(some) > 1 and all(isinstance(row["x"], (int, float)) for row in some)
            drawn = curves(some, content) if swept else ratios(some, content, shown(some), floor=True)
            figures[f"performance-{group.replace(' ', '-')}"] = drawn
    elif content["suite"] == "memory" and rows:
        figures["memory"] = memory(rows, content)
    elif content["suite"] == "model" and rows:
        figures["model"] = model(rows, content)
    elif rows:
        figures["equivalence"] = errors(rows, content)
    written = []
    for name, figure in figures.items():
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            # No date, so that the same results give the same file.
            figure.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
            written.append(path)
    return written


def shown(rows: list[Record]) -> list[str]:
    """Return the systems of a plot; all that there are where else none of ours would be among them, as on a CPU."""
    present = {name: is_ours for name, is_ours in summary.systems_of(rows).items() if any(has_result(rows, name))}
    chosen = [name for name in IN_PLOTS if name in present]
    return chosen if any(present[name] for name in chosen) else list(present)


def has_result(rows: list[Record], system: str) -> Iterator[bool]:
    """For each of a system's lines in performance or memory, whether there is anything to draw."""
    for row in rows:
        for line in (line for line in row["systems"] if line["system"] == system):
            yield bool(line.get("peaks")) or any(column["forward"] for column in line.get("columns", {}).values())


def time_of(line: Record, name: str) -> tuple[float, bool] | None:
    """Return milliseconds of a pass with the mask charged, and whether its results are wrong."""
    column = line["columns"].get("call")
    if column is None or column[name] is None:
        return None
    return column[name]["ms"], bool(column["wrong"])


def prepared_time_of(line: Record, name: str) -> float | None:
    """Return milliseconds of a pass with the mask prepared beforehand."""
    column = line["columns"].get("prepared")
    return None if column is None or column[name] is None or column["wrong"] else column[name]["ms"]


def _figure(width: float, height: float) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"  # the same names in an SVG each time
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _finish(figure: Figure, content: Record, notes: str) -> Figure:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = max(1, min(len(labels), int(figure.get_figwidth() / 1.6)))
    figure.legend(handles, labels, loc="outside upper center", frameon=False, ncols=columns, fontsize=9)
    said = [textwrap.fill(text, int(16 * figure.get_figwidth())) for text in (machines.line(content["machine"]), notes)]
    figure.supxlabel("\n".join(said), fontsize=8.5)
    return figure


def _panels(rows: list[Record]) -> list[str]:
    return [name for name in PANELS if any(name in row["floor_ms"] for row in rows)]


def ratios(rows: list[Record], content: Record, systems: Sequence[str] = PEERS, floor: bool = False) -> Figure:
    """Draw a row for each call, a mark for each system: its time divided by ours, a panel for each pass."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panels = _panels(rows)
    figure = _figure(WIDTH, 0.62 * len(rows) + 2.0)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, name in zip(all_axes, panels, strict=True):
        axes.axvline(1.0, color="black", lw=1.2)
        mine = [summary.ours(row, name) for row in rows]
        for index, system in enumerate(systems):
            color, marker = STYLES.get(system, ("#BBBBBB", "o"))
            points = [
                (min(their / our.ms, FARTHEST), place + 0.5 * ((index + 0.5) / len(systems) - 0.5))
                for place, (row, our) in enumerate(zip(rows, mine, strict=True))
                if (their := _time(row, system, name)) is not None and our is not None
            ]
            axes.plot(*_split(points), linestyle="", color=color, marker=marker, ms=8, label=label(system), zorder=3)
        if floor:
            points = [
                (row["floor_ms"][name] / our.ms, float(place))
                for place, (row, our) in enumerate(zip(rows, mine, strict=True))
                if our is not None and name in row["floor_ms"]
            ]
            points = [(x, y) for x, y in points if x > NEAREST]
            axes.plot(*_split(points), linestyle="", color="black", marker="|", ms=14, mew=1.6, label="floor")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 5, 10, 20]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        low, high = axes.get_xlim()
        axes.set_xlim(min(0.7, low), min(max(2.3, high), 1.12 * FARTHEST))
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("time / time of flash_dmattn")
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    names = [f"{textwrap.fill(row['what'], 34)}\n{row['shape']}" for row in rows]
    all_axes[0].set_yticks(range(len(rows)), names, fontsize=8)
    all_axes[0].set_ylim(len(rows) - 0.5, -0.5)
    notes = "below each call its B,Hq,Hk,L,D; right of the line flash_dmattn is faster; no mark: not served, or wrong"
    if any(max(line.get_xdata(), default=0.0) == FARTHEST for axes in all_axes for line in axes.lines):
        notes += f"; a mark at {FARTHEST:g}: {FARTHEST:g} or more"
    if floor:
        notes += f"; a row without a floor: below {NEAREST:g}"
    return _finish(figure, content, notes)


def _time(row: Record, system: str, name: str) -> float | None:
    """Return the time of a pass with right results: ours with its mask charged, a peer's as README counts it."""
    for line in (line for line in row["systems"] if line["system"] == system and line["ours"]):
        timed = time_of(line, name)
        return None if timed is None or timed[1] else timed[0]
    return summary.time_of(row, system, name)


def _log_scale(axes: Axes) -> None:
    """Plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _grid(axes: Axes) -> None:
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def curves(rows: list[Record], content: Record) -> Figure:
    """Draw milliseconds over what is swept, a curve for each system; the floor dotted, prepared masks dashed."""
    systems, panels = shown(rows), _panels(rows)
    rows = sorted(rows, key=lambda row: row["x"])
    figure = _figure(WIDTH, 5.0)
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for system in systems:
            color, marker = STYLES.get(system, ("#BBBBBB", "o"))
            times: list[tuple[float, float]] = []
            prepared: list[tuple[float, float]] = []
            for row in rows:
                for line in (line for line in row["systems"] if line["system"] == system):
                    timed, alone = time_of(line, name), prepared_time_of(line, name)
                    if timed is not None and not timed[1]:
                        times.append((row["x"], timed[0]))
                    if alone is not None and row["has_mask"]:
                        prepared.append((row["x"], alone))
            axes.plot(*_split(times), color=color, marker=marker, ms=5, lw=1.5, label=label(system))
            if prepared:
                axes.plot(*_split(prepared), color=color, marker=marker, ms=3, lw=1.0, linestyle="--")
        floor = [(row["x"], row["floor_ms"][name]) for row in rows if name in row["floor_ms"]]
        axes.plot(*_split(floor), color="black", linestyle=":", label="floor")
        _log_scale(axes)
        axes.set_xscale("log", base=2 if rows[0]["x"] >= 1 else 10)
        ticks = [row["x"] for row in rows]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.xaxis.minorticks_off()
        axes.set_xlabel(_axis(rows[0]["group"]))
        axes.set_ylabel(f"{name}, milliseconds")
        _grid(axes)
    ends = [f"{row['shape']} {row['what']}" for row in (rows[0], rows[-1])]
    notes = f"B,Hq,Hk,L,D {' to '.join(dict.fromkeys(ends))}"
    if any(row["has_mask"] for row in rows):
        notes += "; dashed: mask prepared beforehand"
    return _finish(figure, content, notes)


def _axis(group: str) -> str:
    names = {"length": "queries and keys", "density": "fraction of the blocks kept"}
    return names.get(group, group)


def _split(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def memory(rows: list[Record], content: Record) -> Figure:
    """Bars of peak MiB above the inputs over forward and backward, with what any system returns as a line."""
    systems = shown(rows)
    figure = _figure(WIDTH, 5.0)
    axes = figure.subplots()
    width = 0.86 / max(1, len(systems))
    for index, system in enumerate(systems):
        offset = (index - (len(systems) - 1) / 2) * width
        color = STYLES.get(system, ("#BBBBBB", "o"))[0]
        axes.bar(float("nan"), float("nan"), color=color, label=label(system))
        for place, row in enumerate(rows):
            for line in (line for line in row["systems"] if line["system"] == system and line["peaks"]):
                if line["peaks"]["both"] is not None:
                    axes.bar(place + offset, line["peaks"]["both"], width, color=color)
    for place, row in enumerate(rows):
        axes.hlines(row["returned_mb"], place - 0.45, place + 0.45, color="black", linestyle=":")
    axes.plot([], [], color="black", linestyle=":", label="out and gradients")
    _log_scale(axes)
    axes.set_ylabel("peak of forward and backward, MiB above the inputs")
    axes.set_xticks(range(len(rows)), [f"{row['name']}\n{row['shape']}" for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    _grid(axes)
    return _finish(figure, content, "lower is better")


def model(rows: list[Record], content: Record) -> Figure:
    """Bars of milliseconds of a training step, what it takes without attention grey, and of its peak memory."""
    places = [(row, line) for row in rows for line in row["systems"] if line["step"] is not None]
    figure = _figure(WIDTH, 4.6)
    times, memory = figure.subplots(1, 2)
    for place, (row, line) in enumerate(places):
        color = STYLES.get(line["system"], ("#BBBBBB", "o"))[0]
        hatch = "////" if line["wrong"] else None
        bare = row["without_attention"]["ms"] if row["without_attention"] else 0.0
        times.bar(place, min(bare, line["step"]["ms"]), color="#CCCCCC")
        rest = max(0.0, line["step"]["ms"] - bare)
        times.bar(place, rest, bottom=bare, color=color, hatch=hatch, edgecolor="white", lw=0.3)
        times.annotate(f"{line['step']['ms']:.0f}", (place, line["step"]["ms"]), ha="center", va="bottom", fontsize=8)
        memory.bar(place, line["peak_mb"] / 1024, color=color)
    names = [label(line["system"]) + (f"\n{row['name']}" if len(rows) > 1 else "") for row, line in places]
    for axes, said in ((times, "training step, milliseconds"), (memory, "peak of a step, GiB above the parameters")):
        axes.set_xticks(range(len(places)), names, rotation=20, ha="right")
        axes.set_ylabel(said)
        _grid(axes)
    times.bar(float("nan"), float("nan"), color="#CCCCCC", label="all but attention")
    times.bar(float("nan"), float("nan"), color="#666666", label="attention, in the colour of its system")
    return _finish(figure, content, f"{rows[0]['shape']} {rows[0]['what']}; lower is better; hatched: wrong")


def errors(rows: list[Record], content: Record) -> Figure:
    """Draw every error divided by its limit, a column for each system, a point for each tensor of each case."""
    systems = list(summary.systems_of(rows))
    figure = _figure(WIDTH, 5.2)
    axes = figure.subplots()
    tensors = list(dict.fromkeys(name for row in rows for name in row["limits"]))
    for index, tensor in enumerate(tensors):
        points = [
            (systems.index(line["system"]) + (index - (len(tensors) - 1) / 2) * 0.13, x / row["limits"][tensor])
            for row in rows
            for line in row["systems"]
            for name, x in line.get("errors", {}).items()
            if name == tensor and x is not None
        ]
        color, marker = list(STYLES.values())[index]
        axes.plot(*_split(points), linestyle="", marker=marker, ms=4, color=color, alpha=0.7, label=tensor)
    axes.axhline(1.0, color="black", linestyle=":", label="limit")
    _log_scale(axes)
    axes.set_ylabel("error / largest error the rule permits")
    axes.set_xticks(range(len(systems)), [label(name) for name in systems], rotation=20, ha="right")
    axes.set_xlim(-0.6, len(systems) - 0.4)
    _grid(axes)
    return _finish(figure, content, "a point for each tensor of each case; NaN and infinity are in the table alone")
