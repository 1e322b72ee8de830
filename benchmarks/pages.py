"""Generates the figures of README.md and docs/benchmarks.md from a full run on a GPU; none is typed by hand.

A generated part is a section, from its heading to the next heading of the same rank.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

from . import machine as machines
from .report.plots import KINDS, PEERS
from .report.summary import Standing, ours, standings, time_of
from .report.tables import MODEL_HEAD, model_rows, prepared_cell, table
from .report.text import label, mb, ms
from .results import SUITES, load, missing

Record = dict[str, Any]
README_SECTION = "## Speed"
# One call of each kind, and the peers that a reader looks for.
DOCS_SECTION = "## Where we stand"
# The first line of both, for people who open the page to edit it.
WRITTEN_BY = "<!-- Written by `python -m benchmarks report --pages`, up to the next heading of this rank. -->"
# The memory that the predecessor's authors report for its backward pass on "predecessor", before and after a change.
REPORTED_MB = (448, 320)
# By as much the same kernel moves from process to process.
LEVEL = 0.03
# The share of cases that a full run may lack; the page names them.
MOST_MISSING = 0.05


def full_run(results: Path) -> Path | None:
    """Return the folder of the full run on a GPU: one whose performance has nearly every case and is no quick one."""
    for path in sorted(results.glob("*/performance.json")):
        content = load(path)
        is_full = len(missing(content)) <= MOST_MISSING * len(content["planned"])
        measured = content["machine"]["kind"] == "cuda" and not machines.is_proxy(content["machine"])
        if measured and not content["settings"]["quick"] and is_full:
            return path.parent
    return None


def write(root: Path, folder: Path) -> list[Path]:
    """Write the sections of both pages from the run in a folder below `root`; return the files."""
    files = {
        root / "README.md": (README_SECTION, readme_section(folder, root)),
        root / "docs" / "benchmarks.md": (DOCS_SECTION, docs_section(folder, root)),
    }
    for path, (heading, body) in files.items():
        path.write_text(replace_section(path.read_text(encoding="utf-8"), heading, body), encoding="utf-8")
    return list(files)


def replace_section(page: str, heading: str, body: str) -> str:
    """Return a page with the text of one section replaced.

    Raises:
        ValueError: the page has no such heading.
    """
    match = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"there is no section {heading!r} to write to")
    tail = "\n" if page[match.end() :] else ""
    return f"{page[: match.start()]}{heading}\n\n{body.strip()}\n{tail}{page[match.end() :]}"


def readme_section(folder: Path, root: Path) -> str:
    """Make the section of README.md: one call of each kind, by "auto" and by the best known peers."""
    content = load(folder / "performance.json")
    rows = [row for row in content["rows"] if row["name"] in KINDS and "error" not in row]
    where = folder.relative_to(root).as_posix()
    machine = content["machine"]
    lines = [
        WRITTEN_BY,
        "",
        *wrapped(
            f"Milliseconds, forward / backward, bf16, on an {machine['device']} with torch {machine['torch']}. Ours is "
            '`backend="auto"` with a dense bool mask, whose packing is timed. A peer gets its own form of the mask '
            "beforehand, and its time counts only where its results are right; - stands for a call that it does not "
            "serve or gets wrong. Mask prepared: ours with its mask made beforehand, too. All outputs were checked in "
            "the same run."
        ),
        "",
        *_peers_table(rows),
        *_fp32_lines(folder, root),
        "",
        *wrapped(
            f"More: [every case]({where}/performance.md), and [how it is measured, and where we are ahead or behind]"
            "(docs/benchmarks.md)."
        ),
    ]
    return "\n".join(lines)


def _fp32_lines(folder: Path, root: Path) -> list[str]:
    """Compare a call of AlphaFold 3 in fp32, of a run of the fp32 cases in the folder of the full run plus "-fp32"."""
    other = folder.with_name(f"{folder.name}-fp32")
    rows = load(other / "performance.json")["rows"] if (other / "performance.json").exists() else []
    row = next((row for row in rows if row["name"] == "fp32-af3-8" and "error" not in row), None)
    if row is None:
        return []
    passes = ("forward", "backward")
    mine = " / ".join(ms(timing and timing.ms) for timing in (ours(row, name) for name in passes))
    peers = {line["system"] for line in row["systems"] if not line["ours"]}
    others = [f"{label(peer)} {' / '.join(ms(time_of(row, peer, name)) for name in passes)}" for peer in sorted(peers)]
    places = [place(s) for s in standings(rows)]
    counts = ", ".join(f"{places.count(x)} {x}" for x in ("ahead", "level", "behind", "alone") if x in places)
    text = (
        f"In fp32 under torch's default precision, tokens of AlphaFold 3 ({row['shape']}, "
        f"{row['what'].partition('highest, ')[2]}): ours {mine}, "
        f"{', '.join(others)}. The [{len(places)} passes in fp32]"
        f"({other.relative_to(root).as_posix()}/performance.md) beside the fastest peer: {counts}."
    )
    return ["", *wrapped(text)]


def folder_of(suite: str, folder: Path) -> Path | None:
    """Return the folder with the results of a suite: the folder of the full run, else another one, or None."""
    for each in (folder, *sorted(folder.parent.glob("*"))):
        if (each / f"{suite}.json").exists():
            return each
    return None


def docs_section(folder: Path, root: Path) -> str:
    """Make the section of docs/benchmarks.md: ahead, behind and by how much; memory; accuracy."""
    content = load(folder / "performance.json")
    where = f"../{folder.relative_to(root).as_posix()}"
    all_standings = standings(content["rows"])
    places = {suite: folder_of(suite, folder) for suite in SUITES}
    left = [*missing(content), *(row["name"] for row in content["rows"] if row.get("error"))]
    slower = sorted((s for s in all_standings if place(s) == "behind"), key=lambda s: s.ratio or 0.0)
    lines = [
        WRITTEN_BY,
        "",
        f"{machines.line(content['machine'])}.",
        "",
        *wrapped(" ".join([verdict(all_standings), *([f"Not reached: {', '.join(left)}."] if left else [])])),
        "",
        "All figures:",
        "",
        *(f"* [{suite}](../{at.relative_to(root).as_posix()}/{suite}.md)" for suite, at in places.items() if at),
        "",
        *_groups_table(all_standings),
        "",
        f"![time of each system divided by ours, a row for each workload]({where}/performance-workload.png)",
        "",
        "### Behind",
        "",
        *(_ratio_table(slower) if slower else ["Nowhere."]),
    ]
    parts = (("model", _model_lines), ("memory", _memory_lines), ("equivalence", _equivalence_lines))
    for suite, part in parts:
        at = places[suite]
        if at is None:
            continue
        heading, *body = part(record := load(at / f"{suite}.json"))
        elsewhere = [] if at == folder else ["", f"{machines.line(record['machine'])}."]
        lines += ["", heading, *elsewhere, *body]
    return "\n".join(lines)


def place(s: Standing) -> str:
    """Where we are: "ahead" of the fastest peer, "level", "behind", or "alone" where none has a right result."""
    if s.ratio is None:
        return "alone"
    return "level" if abs(s.ratio - 1.0) <= LEVEL else "ahead" if s.ratio > 1.0 else "behind"


def verdict(all_standings: list[Standing]) -> str:
    """Ahead, level, behind and alone in one sentence for each pass."""
    said = []
    for name in ("forward", "backward"):
        places = [place(s) for s in all_standings if s.name == name]
        if not places:
            continue
        counted = ", ".join(f"{places.count(x)} {x}" for x in ("ahead", "level", "behind") if x in places)
        alone = f"; in {places.count('alone')} no peer has a right result" if "alone" in places else ""
        said.append(f"The {name} passes of {len(places)} cases: {counted or 'none compared'}{alone}.")
    said.append(f"Level is within {LEVEL:.0%}, by which the same kernel moves between runs.")
    return " ".join(said)


def _groups_table(all_standings: list[Standing]) -> list[str]:
    """By group of cases and pass: how many are ahead, level and behind, and the ratios."""
    body = []
    for group in dict.fromkeys(s.row["group"] for s in all_standings):
        for name in ("forward", "backward"):
            some = [s for s in all_standings if s.row["group"] == group and s.name == name]
            if not some:
                continue
            places = [place(s) for s in some]
            counts = [str(places.count(x)) for x in ("ahead", "level", "behind", "alone")]
            ratios = [s.ratio for s in some if s.ratio is not None]
            prepared = [s.prepared_ratio for s in some if s.prepared_ratio is not None]
            spread = [f"{of(ratios):.2f}" if ratios else "-" for of in (min, statistics.median, max)]
            spread += [f"{min(prepared):.2f}" if prepared else "-"]
            shares = [s.floor_ms / s.ours.ms for s in some]
            body.append([group, name, *counts, *spread, f"{min(shares):.0%} to {max(shares):.0%}"])
    head = ["cases", "pass", "ahead", "level", "behind", "no peer", "times as fast, least", "median", "most"]
    head += ["least, mask prepared"]
    return table([*head, "of the floor"], body)


def _peers_table(rows: list[Record]) -> list[str]:
    ran = {line["system"] for row in rows for line in row["systems"]}
    peers = [peer for peer in PEERS if peer in ran]
    body = []
    for row in rows:
        passes = [name for name in ("forward", "backward") if name in row["floor_ms"]]
        mine = " / ".join(ms(timing and timing.ms) for timing in (ours(row, name) for name in passes))
        others = [" / ".join(ms(time_of(row, peer, name)) for name in passes) for peer in peers]
        others = ["-" if set(cell) <= set("-/ ") else cell for cell in others]
        body.append([row["what"], row["shape"], mine, prepared_cell(row), *others])
    return table(["call", "B,Hq,Hk,L,D", "ours", "mask prepared", *map(label, peers)], body)


def _ratio_table(some: list[Standing]) -> list[str]:
    body = [
        [
            s.row["name"],
            s.row["what"],
            s.row["shape"],
            s.name,
            ms(s.ours.ms),
            f"{ms(s.peer.ms)} ({label(s.peer.system)})",
            f"{s.ratio:.2f}",
            ms(s.prepared.ms) if s.prepared and s.row["has_mask"] else "",
            f"{s.prepared_ratio:.2f}" if s.prepared_ratio and s.row["has_mask"] else "",
            f"{s.floor_ms / s.ours.ms:.0%}",
        ]
        for s in some
        if s.peer is not None
    ]
    head = ["case", "call", "B,Hq,Hk,L,D", "pass", "ours, ms", "fastest peer, ms", "times as fast"]
    return table([*head, "mask prepared, ms", "times as fast", "of the floor"], body)


def _model_lines(content: Record) -> list[str]:
    lines = ["### A training step"]
    for row in (row for row in content["rows"] if "error" not in row):
        lines += [
            "",
            *wrapped(
                f"{row['shape']}, {row['what']}, {row['parameters'] / 1e6:.0f} million parameters: forward and "
                "backward, the masks and what a system makes of them beforehand and not timed. Attention is what the "
                "step takes beyond the same decoder without it. Loss and gradients were checked in the same run by "
                "the accuracy rule over the whole model, and are right except where it says FAILED."
            ),
            "",
            *table([*MODEL_HEAD, "note"], [[*cells, note] for cells, note in model_rows(row)]),
        ]
    return lines


def _memory_lines(content: Record) -> list[str]:
    lines = ["### Memory", ""]
    for row in (row for row in content["rows"] if row["name"] == "predecessor"):
        peaks = {line["system"]: line["peaks"] for line in row["systems"] if line["peaks"]}
        ours = [f"{label(n)} {mb(p['backward'])}" for n, p in peaks.items() if p["backward"] is not None]
        lines += wrapped(
            f"flash-dmattn 1.x reports that the backward pass of one call came from {REPORTED_MB[0]} to "
            f"{REPORTED_MB[1]} MB ({row['shape']}, {row['what']}). MiB that the backward pass of that call adds: "
            f"{', '.join(ours)}."
        )
        lines.append("")
    names = list(dict.fromkeys(line["system"] for row in content["rows"] for line in row["systems"]))
    body = []
    for row in (row for row in content["rows"] if "error" not in row):
        by_name = {line["system"]: line["peaks"] or {} for line in row["systems"]}
        cells = [mb(by_name.get(name, {}).get("both")) for name in names]
        body.append([row["name"], row["what"], row["shape"], *cells, mb(row["returned_mb"])])
    return lines + table(["case, MiB of both", "call", "B,Hq,Hk,L,D", *map(label, names), "out, gradients"], body)


def _equivalence_lines(content: Record) -> list[str]:
    counts = {"ours": [0, 0], "peers": [0, 0]}
    for row in content["rows"]:
        for line in row["systems"]:
            if line["verdict"] in ("pass", "fail"):
                some = counts["ours" if line["ours"] else "peers"]
                some[0] += line["verdict"] == "pass"
                some[1] += 1
    (ours, our_runs), (peers, peer_runs) = counts.values()
    return [
        "### Accuracy",
        "",
        *wrapped(
            f"Over {len(content['rows'])} forms of call, our backends meet the accuracy rule in {ours} of {our_runs} "
            f"runs, the peers in {peers} of {peer_runs} runs that they have kernels for."
        ),
    ]


def wrapped(text: str) -> list[str]:
    """Return lines of at most 120 characters."""
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
