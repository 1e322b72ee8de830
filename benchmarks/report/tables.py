"""A suite's results as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .. import machine as machines
from ..results import missing
from . import summary, text
from .text import PASSES, label, mb, ms

Record = dict[str, Any]


def page(content: Record) -> str:
    bodies = {"equivalence": _equivalence, "performance": _performance, "memory": _memory, "model": _model}
    lines = [f"# {content['suite'].capitalize()}", "", f"{machines.line(content['machine'])}.", ""]
    lines += bodies[content["suite"]](content)
    reasons = content.get("left_out", {})
    if reasons:
        lines += ["", f"Left out: {'; '.join(f'{label(name)}: {reason}' for name, reason in reasons.items())}."]
    if missing(content):
        lines += ["", f"Not run yet: {', '.join(missing(content))}."]
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]


def _performance(content: Record) -> list[str]:
    rows = content["rows"]
    lines = [
        "Median milliseconds, bf16 where a call is not in fp32. Overview: forward / backward with the mask as a bool",
        "tensor, and what a system makes of it timed; `*` marks results that are wrong, `-` what was not timed: the",
        "tables below say why.",
        "Auto, mask prepared: what `auto` takes, with the mask made beforehand.",
        "docs/benchmarks.md says how all of it is measured.",
    ]
    names = list(summary.systems_of(rows))
    for group in dict.fromkeys(row["group"] for row in rows):
        some = [row for row in rows if row["group"] == group]
        used = [name for name in names if any(name == line["system"] for row in some for line in row["systems"])]
        lines += ["", f"## {group[0].upper()}{group[1:]}", ""]
        head = ["case", "call", "B,Hq,Hk,L,D", "auto, mask prepared", *map(label, used), "floor"]
        lines += table(head, _overview(some, used))
    for row in rows:
        lines += ["", f"### {row['name']}: {row['shape']}, {row['what']}", ""]
        if "error" in row:
            lines.append(f"{row['error']}")
            continue
        counts = row["counts"]
        floors, tiled = (" / ".join(ms(x) for x in row[key].values()) for key in ("floor_ms", "tile_floor_ms"))
        lines += [
            f"Density {counts['density']:.4f}, active tiles {counts['active_tiles']:.4f}, empty rows "
            f"{counts['empty_rows']}; floor {floors} ms, on whole tiles {tiled} ms; `auto` takes "
            f"{' and '.join(x for x in row['auto'] if x)}.",
            "",
        ]
        timed = [name for name in PASSES if name in row["floor_ms"]]
        columns = [f"{name} ms, mask building {how}" for name in timed for how in ("charged", "not charged")]
        head = ["system", *columns, "20 to 80 %", "timed by", "host us", "TFLOP/s", "of the floor", "peak MB"]
        lines += table([*head, "first call s", "relative errors", "note"], _details(row, timed))
    return lines


def _overview(rows: list[Record], names: list[str]) -> Iterator[list[str]]:
    for row in rows:
        by_name = {line["system"]: line for line in row["systems"]}
        cells = [_cell(by_name.get(name)) for name in names]
        floor = " / ".join(ms(row["floor_ms"][p]) for p in ("forward", "backward") if p in row.get("floor_ms", {}))
        yield [row["name"], row["what"], row["shape"], prepared_cell(row), *cells, floor or row.get("error", "")]


def prepared_cell(row: Record) -> str:
    """Forward / backward of what "auto" takes with its mask prepared; empty without a mask."""
    if "error" in row or not row["has_mask"]:
        return ""
    times = [summary.ours(row, name, prepared=True) for name in ("forward", "backward") if name in row["floor_ms"]]
    return " / ".join(ms(timing and timing.ms) for timing in times)


def _cell(line: Record | None) -> str:
    if line is None or line["columns"]["call"]["forward"] is None:
        return "-"
    column = line["columns"]["call"]
    times = [ms(column[name]["ms"]) if column[name] else "-" for name in ("forward", "backward")]
    return " / ".join(times) + "*" * bool(column["wrong"])


def _details(row: Record, timed: list[str]) -> Iterator[list[str]]:
    for line in row["systems"]:
        call, prepared = line["columns"]["call"], line["columns"].get("prepared")
        # Where there is nothing to prepare, nothing was charged either.
        alone = prepared if prepared is not None else None if row["has_mask"] else call
        times = []
        for name in timed:
            times += [ms(column and column[name] and column[name]["ms"]) for column in (call, alone)]
        columns = [call[name] for name in timed]

        def each(key: str, form: str, columns: list[Record | None] = columns) -> str:
            return " / ".join("-" if x is None or x[key] is None else format(x[key], form) for x in columns)

        spread = " / ".join("-" if x is None else f"{ms(x['p20'])}-{ms(x['p80'])}" for x in columns)
        notes = dict.fromkeys(_note(column) for column in line["columns"].values())
        yield [
            label(line["system"]) + _pair(line["backends"]),
            *times,
            spread,
            " / ".join("-" if x is None else x["how"] for x in columns),
            each("host_us", ".0f"),
            each("tflops", ".0f"),
            each("of_floor", ".0%"),
            mb(call["peak_mb"]),
            "-" if call["first_call_s"] is None else f"{call['first_call_s']:.1f}",
            text.errors(call["errors"]),
            "; ".join(note for note in notes if note),
        ]


def _pair(backends: list[str]) -> str:
    return f" (backward of {backends[1]})" if len(set(backends)) == 2 else ""


def _note(column: Record) -> str:
    wrong = f"wrong: {', '.join(column['wrong'])}" if column["wrong"] else ""
    return "; ".join(part for part in (wrong, column["reason"]) if part)


def _equivalence(content: Record) -> list[str]:
    rows = content["rows"]
    lines = [
        "Relative errors beside fp64, `||x - x64|| / ||x64||`, bf16. A system passes where each of its errors is at",
        "most 1.5 times that of plain PyTorch in the same dtype, plus 1e-5; peers are held to the same rule here, and",
        "** marks what breaks it. In brackets the distance from what plain PyTorch computes.",
        "",
        *table(["system", "pass", "fail", "failed", "refused", "worst error / limit"], _verdicts(rows)),
    ]
    for row in rows:
        lines += ["", f"## {row['name']}: {row['shape']}, {row['what']}", ""]
        if "error" in row:
            lines.append(row["error"])
            continue
        names = list(row["limits"])
        body = [
            ["plain PyTorch", "", *(f"{row['plain'][name]:.1e}" for name in names), ""],
            ["limit", "", *(f"{row['limits'][name]:.1e}" for name in names), ""],
        ]
        body += [
            [
                label(line["system"]) + _pair(line.get("backends", [])),
                line["verdict"],
                *(_error(line, name) for name in names),
                line["reason"],
            ]
            for line in row["systems"]
        ]
        lines += table(["system", "verdict", *names, "note"], body)
    return lines


def _error(line: Record, name: str) -> str:
    if name not in line.get("errors", {}):
        return "-"
    error, distance = (line[key][name] for key in ("errors", "from_plain"))
    mark = " **" if name in line["failing"] else ""
    return f"{_number(error)} ({_number(distance)}){mark}"


def _number(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.1e}"


def _verdicts(rows: list[Record]) -> Iterator[list[str]]:
    for name in summary.systems_of(rows):
        lines = [(row, line) for row in rows for line in row["systems"] if line["system"] == name]
        counts = [str(sum(line["verdict"] == v for _, line in lines)) for v in ("pass", "fail", "failed", "refused")]
        shares = [
            x / row["limits"][tensor]
            for row, line in lines
            for tensor, x in line.get("errors", {}).items()
            if x is not None
        ]
        yield [label(name), *counts, f"{max(shares):.2f}" if shares else "-"]


def _memory(content: Record) -> list[str]:
    lines = [
        "MiB above the inputs. Forward: while it runs and keeps what its backward needs. Backward: above what was",
        "there when it began. Both: over the two, out and gradients included.",
    ]
    for row in content["rows"]:
        lines += ["", f"## {row['name']}: {row['shape']}, {row['what']}", ""]
        if "error" in row:
            lines.append(row["error"])
            continue
        lines += [f"Inputs {mb(row['inputs_mb'])} MB, out and gradients {mb(row['returned_mb'])} MB.", ""]
        body = []
        for line in row["systems"]:
            peaks = line["peaks"] or {}
            numbers = [mb(peaks.get(name)) for name in ("forward", "backward", "both")]
            body.append([label(line["system"]) + _pair(line["backends"]), *numbers, line["reason"]])
        lines += table(["system", "forward", "backward", "both", "note"], body)
    return lines


MODEL_HEAD = ("system", "step ms", "20 to 80 %", "attention ms", "of the step", "peak MB", "masks MB")
MODEL_YARDSTICK = (("plain PyTorch", "plain"), ("limit", "limits"))


def model_rows(row: Record) -> Iterator[tuple[list[str], str]]:
    """Yield the cells of `MODEL_HEAD` and a note, for a decoder without attention, then for every system."""
    bare = row["without_attention"]
    if bare is not None:
        yield ["no attention", ms(bare["ms"]), f"{ms(bare['p20'])}-{ms(bare['p80'])}", "-", "-", "-", "-"], ""
    for line in row["systems"]:
        timed, cells = line["step"], ["-"] * 4
        if timed is not None:
            attention = None if bare is None else timed["ms"] - bare["ms"]
            share = "-" if attention is None else f"{attention / timed['ms']:.0%}"
            cells = [ms(timed["ms"]), f"{ms(timed['p20'])}-{ms(timed['p80'])}", ms(attention), share]
        memory = [mb(line[key]) for key in ("peak_mb", "masks_mb")]
        yield [label(line["system"]) + _pair(line["backends"]), *cells, *memory], text.failed(line)


def _model(content: Record) -> list[str]:
    lines = [
        "One training step, forward and backward without an optimizer, bf16, median milliseconds. The masks, and all",
        "that a system makes of them, are made beforehand and not timed. Attention: the step less that of the same",
        "decoder with q + k + v in its place. Peak: of a step, above parameters, masks and what was made of them.",
        "Errors are those of loss and gradients beside the same step in fp64; FAILED marks what disagrees with it.",
        "docs/benchmarks.md says how it is measured.",
    ]
    for row in content["rows"]:
        lines += ["", f"## {row['name']}: {row['shape']}, {row['what']}", ""]
        if "error" in row:
            lines.append(row["error"])
            continue
        names = list(row["limits"])
        lines += [
            f"{row['parameters']:,} parameters, loss {row['loss']:.4f}; `auto` takes "
            f"{' and '.join(x for x in row['auto'] if x)}.",
            "",
        ]
        lines += table([*MODEL_HEAD, "note"], [[*cells, note] for cells, note in model_rows(row)])
        body = [[said, "-", *(f"{row[key][name]:.1e}" for name in names)] for said, key in MODEL_YARDSTICK]
        for line in row["systems"]:
            first = "-" if line["first_call_s"] is None else f"{line['first_call_s']:.1f}"
            row_cells = (_number(line["errors"][name]) if name in line["errors"] else "-" for name in names)
            body.append([label(line["system"]), first, *row_cells])
        lines += ["", *table(["system", "first step s", *names], body)]
    return lines
