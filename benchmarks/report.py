"""What a run of `benchmarks.peers` found, as text, as a Markdown page and as a plot.

python -m benchmarks.report benchmarks/results/peers.json    # peers.md and peers.png beside it
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PASSES = ("forward", "backward")
# What the column has to say of a pair.
PAIRED = ["`cuda` is its own forward pass and the backward pass of triton."]

# Okabe and Ito's colours, which stay apart for every common form of colour blindness. Ours are the strong ones.
OURS = ("#D55E00", "#E69F00", "#882255", "#CC79A7")
PEERS = ("#0072B2", "#56B4E9", "#009E73", "#999999", "#000000")


def machine_line(machine: Record) -> str:
    return ", ".join(f"{name} {value}" if name != "device" else value for name, value in machine.items())


def heading(record: Record) -> str:
    """What a workload is, in two lines."""
    counts, floor, tiled = (record[key] for key in ("counts", "floor_ms", "tile_floor_ms"))
    return (
        f"{record['name']}: B,Hq,Hk,L,D {record['shape']}, {record['what']}\n"
        f"    density {counts['density']:.4f}, active tiles {counts['active_tiles']:.4f}, "
        f"empty rows {counts['empty_rows']}, floor {ms_pair(floor)} ms, on whole tiles {ms_pair(tiled)} ms"
    )


def errors_text(line: Record) -> str:
    """The relative errors of a system's results; None stands for one that is NaN or infinite."""
    return ", ".join(f"{name} {'NaN' if x is None else format(x, '.1e')}" for name, x in line["errors"].items())


def ms_pair(pair: Record) -> str:
    return f"{pair['forward']:.3f} / {pair['backward']:.3f}"


def line_text(line: Record) -> str:
    """One system's result on one line of a terminal."""
    if line["reason"]:
        return f"    {line['system']:18} {line['reason']}"
    forward, backward = (line[name] for name in PASSES)
    return (
        f"    {line['system']:18} {forward['ms']:9.4f} {backward['ms']:9.4f} ms ({forward['how']}, {backward['how']})  "
        f"{forward['tflops']:4.0f} {backward['tflops']:4.0f} TFLOP/s  {forward['of_floor']:4.0%} "
        f"{backward['of_floor']:4.0%} of floor  {line['peak_mb']:6.0f} MB  first call {line['first_call_s']:.0f} s  "
        f"{errors_text(line)}{'  WRONG: ' + ', '.join(line['wrong']) if line['wrong'] else ''}"
    )


def failures(result: Record) -> list[str]:
    """The lines of ours that failed or are not accurate enough."""
    found = []
    for record in result["workloads"]:
        for line in record["lines"]:
            if not line["ours"] or not (line["reason"] or line["wrong"]):
                continue
            limits = ", ".join(f"{name} {record['limits'][name]:.1e}" for name in line["wrong"])
            said = f"errors {errors_text(line)}; the accuracy rule permits {limits}"
            found.append(f"{record['name']}, {line['system']}: {line['reason'] or said}")
    return found


def fastest_peer(record: Record, name: str) -> float | None:
    """Milliseconds of the fastest peer with right results in one pass."""
    times = [line[name]["ms"] for line in record["lines"] if line[name] and not line["ours"] and not line["wrong"]]
    return min(times, default=None)


def against_peers(record: Record) -> str:
    """How many times faster than the fastest right peer each of ours is, forward / backward, on one line."""
    best = {name: fastest_peer(record, name) for name in PASSES}
    timed = [line for line in record["lines"] if line["ours"] and line["forward"] is not None]
    return "; ".join(f"{line['system']} {' / '.join(_ratios(line, best))}" for line in timed)


def _ratios(line: Record, best: dict[str, float | None]) -> list[str]:
    return [f"{peer / line[name]['ms']:.2f}" if peer else "-" for name, peer in best.items()]


def columns(result: Record) -> list[str]:
    """The systems, ours first, in the order of their first appearance."""
    lines = [line for record in result["workloads"] for line in record["lines"]]
    return list(dict.fromkeys(line["system"] for line in sorted(lines, key=lambda line: not line["ours"])))


def markdown(result: Record) -> str:
    """The whole page: an overview, then each workload in full."""
    names = columns(result)
    page = ["# Our backends beside their peers", "", f"{machine_line(result['machine'])}.", ""]
    page += [
        "Median milliseconds, forward / backward, bf16. `-`: it failed or has no kernel for it, and the workload's own",
        "table says why. A result marked * is wrong. docs/benchmarks.md says how all this is measured.",
        *PAIRED * any(name.startswith("cuda") for name in names),
        "",
        *_table(["workload", "B,Hq,Hk,L,D", *names, "floor"], _overview(result, names)),
    ]
    if result["left_out"]:
        page += ["", f"Left out, the time being spent: {', '.join(result['left_out'])}."]
    for record in result["workloads"]:
        title, _, numbers = heading(record).partition("\n")
        page += ["", f"## {title}", "", f"{numbers.strip()}.", ""]
        head = ["system", "ms", "20 to 80 %", "timed by", "times the fastest peer", "TFLOP/s", "of the floor"]
        page += _table([*head, "peak MB", "first call s", "relative errors", "note"], _details(record))
    return "\n".join(page) + "\n"


def _table(head: list[str], rows: Iterator[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]


def _overview(result: Record, names: list[str]) -> Iterator[list[str]]:
    for record in result["workloads"]:
        by_name = {line["system"]: line for line in record["lines"]}
        cells = []
        for name in names:
            line = by_name.get(name)
            timed = line is not None and line["forward"] is not None
            cells.append(ms_pair({p: line[p]["ms"] for p in PASSES}) + "*" * bool(line["wrong"]) if timed else "-")
        yield [f"{record['name']}: {record['what']}", record["shape"], *cells, ms_pair(record["floor_ms"])]


def _details(record: Record) -> Iterator[list[str]]:
    best = {name: fastest_peer(record, name) for name in PASSES}
    for line in record["lines"]:
        note = line["reason"] or (f"wrong: {', '.join(line['wrong'])}" if line["wrong"] else "")
        if line["forward"] is None:
            yield [line["system"], *[""] * 9, note]
            continue
        timed = [line[name] for name in PASSES]
        yield [
            line["system"],
            " / ".join(f"{x['ms']:.4f}" for x in timed),
            " / ".join(f"{x['p20']:.4f}-{x['p80']:.4f}" for x in timed),
            " / ".join(x["how"] for x in timed),
            " / ".join(_ratios(line, best)) if line["ours"] else "",
            " / ".join(f"{x['tflops']:.0f}" for x in timed),
            " / ".join(f"{x['of_floor']:.0%}" for x in timed),
            f"{line['peak_mb']:.0f}",
            f"{line['first_call_s']:.1f}",
            errors_text(line),
            note,
        ]


def plot(result: Record, path: Path) -> None:
    """Bars of milliseconds per workload and system, a panel for each pass; wrong results are hatched."""
    from matplotlib.figure import Figure

    names, records = columns(result), result["workloads"]
    is_ours = {line["system"]: line["ours"] for record in records for line in record["lines"]}
    palettes = {True: iter(OURS), False: iter(PEERS)}
    colors = {name: next(palettes[is_ours[name]], "#BBBBBB") for name in names}
    figure = Figure(figsize=(max(8.0, 1.5 * len(records) + 2), 9), dpi=120, layout="constrained")
    width = 0.84 / max(1, len(names))
    for axes, name in zip(figure.subplots(2, 1), PASSES, strict=True):
        for index, system in enumerate(names):
            offset = (index - (len(names) - 1) / 2) * width
            for place, record in enumerate(records):
                for line in record["lines"]:
                    if line["system"] == system and line[name] is not None:
                        hatch = "////" if line["wrong"] else None
                        axes.bar(place + offset, line[name]["ms"], width, color=colors[system], hatch=hatch)
            axes.bar(math.nan, math.nan, color=colors[system], label=system)
        for place, record in enumerate(records):
            axes.hlines(record["floor_ms"][name], place - 0.45, place + 0.45, color="black", linestyle=":")
        axes.plot([], [], color="black", linestyle=":", label="floor")
        axes.set_yscale("log")
        times = [line[name]["ms"] for record in records for line in record["lines"] if line[name] is not None]
        # The floor of the smallest calls is far below what a launch takes: it may lie outside the picture.
        axes.set_ylim(bottom=0.5 * min(times, default=1.0))
        axes.set_ylabel(f"{name}, milliseconds")
        axes.set_xticks(range(len(records)), [record["name"] for record in records], rotation=20, ha="right")
        axes.set_xlim(-0.6, len(records) - 0.4)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", frameon=False, ncols=len(names) + 1, fontsize=9)
    figure.supxlabel(f"{machine_line(result['machine'])}; lower is better; hatched: wrong results", fontsize=9)
    figure.savefig(path)


def write(result: Record, folder: Path) -> None:
    """Write peers.md, and peers.png where anything was timed."""
    (folder / "peers.md").write_text(markdown(result), encoding="utf-8")
    if result["workloads"]:
        plot(result, folder / "peers.png")


def main(arguments: list[str]) -> int:
    """Write page and plot beside the file of results that is named."""
    if len(arguments) != 1:
        print("name one peers.json, as in: python -m benchmarks.report benchmarks/results/peers.json", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    write(json.loads(path.read_text(encoding="utf-8")), path.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
