"""Plots of a suite's results, PNG and SVG: times of the workloads and of each sweep, memory, errors."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
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
            figures[f"performance-{group.replace(' ', '-')}"] = (curves if swept else bars)(some, content)
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
    """The systems of a plot; all that there are where else none of ours would be among them, as on a CPU."""
    present = {name: is_ours for name, is_ours in summary.systems_of(rows).items() if any(has_result(rows, name))}
    chosen = [name for name in IN_PLOTS if name in present]
    return chosen if any(present[name] for name in chosen) else list(present)


def has_result(rows: list[Record], system: str) -> Iterator[bool]:
    """For each of a system's lines in performance or memory, whether there is anything to draw."""
    for row in rows:
        for line in (line for line in row["systems"] if line["system"] == system):
            yield bool(line.get("peaks")) or any(column["forward"] for column in line.get("columns", {}).values())


def time_of(line: Record, name: str) -> tuple[float, bool] | None:
    """Milliseconds of a pass with the mask charged, and whether its results are wrong."""
    column = line["columns"].get("call")
    if column is None or column[name] is None:
        return None
    return column[name]["ms"], bool(column["wrong"])


def prepared_time_of(line: Record, name: str) -> float | None:
    """Milliseconds of a pass with the mask prepared beforehand."""
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
    figure.supxlabel(f"{machines.line(content['machine'])}\n{notes}", fontsize=8)
    return figure


def _panels(rows: list[Record]) -> list[str]:
    return [name for name in PANELS if any(name in row["floor_ms"] for row in rows)]


def bars(rows: list[Record], content: Record) -> Figure:
    """Bars of milliseconds per case and system, a panel for each pass, with the floor as a line."""
    systems, panels = shown(rows), _panels(rows)
    figure = _figure(max(8.0, 1.1 * len(rows) + 2), 3.6 * len(panels) + 1.4)
    width = 0.86 / max(1, len(systems))
    for axes, name in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        lowest = []
        for index, system in enumerate(systems):
            offset = (index - (len(systems) - 1) / 2) * width
            color = STYLES.get(system, ("#BBBBBB", "o"))[0]
            axes.bar(float("nan"), float("nan"), color=color, label=label(system))
            for place, row in enumerate(rows):
                for line in (line for line in row["systems"] if line["system"] == system):
                    timed, prepared = time_of(line, name), prepared_time_of(line, name)
                    if timed is not None:
                        hatch = "////" if timed[1] else None
                        axes.bar(place + offset, timed[0], width, color=color, hatch=hatch, edgecolor="white", lw=0.3)
                        lowest.append(timed[0])
                    if prepared is not None:
                        axes.plot(place + offset, prepared, marker="_", color="black", ms=260 * width / 4, mew=1.2)
        _floor_lines(axes, rows, name)
        _log_scale(axes)
        # The floor of the smallest calls is far below what a launch takes: there it may lie outside the picture.
        least = min(lowest, default=1.0)
        floors = [row["floor_ms"][name] for row in rows if name in row["floor_ms"]]
        axes.set_ylim(bottom=0.7 * min([least, *(x for x in floors if x > 0.1 * least)]))
        axes.set_ylabel(f"{name}, milliseconds")
        axes.set_xticks(range(len(rows)), [str(row["x"] or row["name"]) for row in rows], rotation=20, ha="right")
        axes.set_xlim(-0.6, len(rows) - 0.4)
        _grid(axes)
    notes = "lower is better; black dashes: mask prepared beforehand; hatched: wrong; no bar: no kernel, or it failed"
    return _finish(figure, content, notes)


def ratios(rows: list[Record], content: Record) -> Figure:
    """A row for each call, a dot for each peer: its time divided by ours, a panel for each pass."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panels = _panels(rows)
    figure = _figure(8.0, 0.62 * len(rows) + 1.7)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, name in zip(all_axes, panels, strict=True):
        axes.axvline(1.0, color="black", lw=1.2)
        mine = [summary.ours(row, name) for row in rows]
        for peer in PEERS:
            color, marker = STYLES[peer]
            theirs = [summary.time_of(row, peer, name) for row in rows]
            points = [
                (their / our.ms, float(place))
                for place, (their, our) in enumerate(zip(theirs, mine, strict=True))
                if their is not None and our is not None
            ]
            axes.plot(*_split(points), linestyle="", color=color, marker=marker, ms=9, label=label(peer))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        low, high = axes.get_xlim()
        axes.set_xlim(min(0.7, low), max(2.3, high))
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("time of the peer / time of flash_dmattn")
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    names = [f"{textwrap.fill(row['what'], 30)}\n{row['shape']}" for row in rows]
    all_axes[0].set_yticks(range(len(rows)), names, fontsize=8.5)
    all_axes[0].set_ylim(len(rows) - 0.5, -0.5)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", frameon=False, ncols=len(labels))
    said = "right of the line flash_dmattn is faster; no dot: the peer does not serve the call, or gets it wrong"
    figure.supxlabel(f"{content['machine']['device']}, bf16; below each call its B,Hq,Hk,L,D\n{said}", fontsize=8.5)
    return figure


def _floor_lines(axes: Axes, rows: list[Record], name: str) -> None:
    for place, row in enumerate(rows):
        if name in row["floor_ms"]:
            axes.hlines(row["floor_ms"][name], place - 0.45, place + 0.45, color="black", linestyle=":")
    axes.plot([], [], color="black", linestyle=":", label="floor")


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
    """Milliseconds over what is swept, a curve for each system, with the floor dotted and prepared masks dashed."""
    systems, panels = shown(rows), _panels(rows)
    rows = sorted(rows, key=lambda row: row["x"])
    figure = _figure(6.4 * len(panels), 5.6)
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
    figure = _figure(max(8.0, 2.0 * len(rows) + 2), 5.6)
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
    figure = _figure(max(8.0, 1.6 * len(places) + 2), 4.6)
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
    """Every error divided by its limit, a column for each system, a point for each tensor of each case."""
    systems = list(summary.systems_of(rows))
    figure = _figure(max(8.0, 1.1 * len(systems) + 2), 5.2)
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
