"""Results in words: one row on a terminal, and the cells that tables share."""

from __future__ import annotations

import math
from typing import Any

Record = dict[str, Any]
PASSES = ("forward", "backward", "step")
LABELS = {
    "cuda": "cuda",
    "triton": "triton",
    "flex": "flex",
    "auto": "auto",
    "eager": "eager",
    "reference": "reference",
    "sdpa-cudnn": "SDPA, cuDNN",
    "sdpa-flash": "SDPA, flash",
    "sdpa-mem": "SDPA, mem-efficient",
    "sdpa-math": "SDPA, math",
    "flexattention": "FlexAttention",
    "fa4": "FlashAttention-4",
    "cuequivariance": "cuEquivariance",
    "flash-dmattn-1": "flash-dmattn 1.x",
}


def label(system: str) -> str:
    """Return the name of a system in tables and plots."""
    return LABELS.get(system, system)


def ms(x: float | None) -> str:
    """Return milliseconds to three digits."""
    if x is None:
        return "-"
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 1 else f"{x:.3f}"


def mb(x: float | None) -> str:
    """MiB, with a decimal below ten."""
    return "-" if x is None else f"{x:.1f}" if x < 10 else f"{x:.0f}"


def errors(values: Record) -> str:
    """Return relative errors; None stands for one that is NaN or infinite."""
    return ", ".join(f"{name} {'NaN' if x is None else format(x, '.1e')}" for name, x in values.items())


def row(suite: str, record: Record) -> str:
    """Return a row on a few lines of a terminal."""
    head = f"    {record['shape']}, {record['what']}"
    if "error" in record:
        return f"{head}\n    {record['error']}"
    said = {"equivalence": _equivalence, "performance": _performance, "memory": _memory, "model": _model}
    lines = said[suite](record)
    return "\n".join([head, *(f"    {line}" for line in lines)])


def _equivalence(record: Record) -> list[str]:
    return [
        f"{line['system']:16}{line['verdict']:9}{errors(line.get('errors', {}))}  {line['reason']}".rstrip()
        for line in record["systems"]
    ]


def _performance(record: Record) -> list[str]:
    floor = "  ".join(f"{name} {ms(x)}" for name, x in record["floor_ms"].items())
    counts = record["counts"]
    lines = [f"density {counts['density']:.4f}, active tiles {counts['active_tiles']:.4f}, floor {floor} ms"]
    for line in record["systems"]:
        for mode, column in line["columns"].items():
            name = line["system"] + ("" if mode == "call" else f", {mode}")
            times = "".join(f"{ms(column[p] and column[p]['ms']):>9}" for p in PASSES)
            wrong = f"WRONG: {', '.join(column['wrong'])}" if column["wrong"] else ""
            memory = "" if column["peak_mb"] is None else f"{mb(column['peak_mb'])} MB"
            first = column["first_call_s"]
            compiled = "" if first is None or first < 1 else f"first call {first:.0f} s "
            worst = max((math.inf if x is None else x for x in column["errors"].values()), default=None)
            off = "" if worst is None else f"error {worst:.1e} "
            lines.append(f"{name:26}{times} ms  {memory:10} {off}{compiled}{wrong}{column['reason']}".rstrip())
    if "seconds" in record:
        lines.append("seconds: " + ", ".join(f"{name} {x:.1f}" for name, x in record["seconds"].items()))
    return lines


def failed(line: Record) -> str:
    """Return the note of a system in a model: that its row failed and by what, or what else there is to say."""
    lines = [f"FAILED: {', '.join(line['wrong'])}"] if line["wrong"] else []
    if line["reason"]:
        lines.append(f"FAILED: {line['reason']}" if line["failed"] else line["reason"])
    return "; ".join(lines)


def _model(record: Record) -> list[str]:
    bare = record["without_attention"]
    lines = [f"{'without attention':18}{ms(bare and bare['ms']):>9} ms"]
    for line in record["systems"]:
        memory = "" if line["peak_mb"] is None else f"{mb(line['peak_mb'])} MB"
        time = ms(line["step"] and line["step"]["ms"])
        lines.append(f"{line['system']:18}{time:>9} ms  {memory:10} {errors(line['errors'])}  {failed(line)}".rstrip())
    return lines


def _memory(record: Record) -> list[str]:
    lines = [f"inputs {mb(record['inputs_mb'])} MB, out and gradients {mb(record['returned_mb'])} MB"]
    for line in record["systems"]:
        peaks = line["peaks"] or {}
        numbers = "".join(f"{mb(peaks.get(name)):>9}" for name in ("forward", "backward", "both"))
        lines.append(f"{line['system']:16}{numbers} MB  {line['reason']}".rstrip())
    return lines
