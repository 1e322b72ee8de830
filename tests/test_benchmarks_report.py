"""Reports of the benchmarks' JSON: who is ahead, tables, plots, and the generated sections of the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli, pages, runner
from benchmarks.report import summary, tables, text
from benchmarks.results import SUITES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]

MACHINE = {
    **{"device": "NVIDIA H200", "kind": "cuda", "driver": "580", "torch": "2.11", "commit": "abc"},
    "rates": {"flop": 790e12, "bytes": 4.3e12, "source": "known"},
}


def timed(ms: float) -> Record:
    spread = {"p20": 0.9 * ms, "p80": 1.1 * ms, "min": 0.8 * ms, "runs": 9, "how": "events", "host_us": 42.0}
    return {"ms": ms, **spread, "tflops": 100 / ms, "of_floor": 0.1 / ms}


def column(forward: float | None, backward: float | None = None, **rest: Any) -> Record:
    call: Record = {"reason": "", "failed": False, "first_call_s": 1.5, "peak_mb": 12.0, "errors": {"out": 2e-3}}
    times = {"forward": forward, "backward": backward, "step": None}
    return {**call, "wrong": [], **{name: x and timed(x) for name, x in times.items()}, **rest}


def line(system: str, call: Record, prepared: Record | None = None, backends: tuple[str, ...] = ()) -> Record:
    columns = {"call": call} | ({} if prepared is None else {"prepared": prepared})
    return {"system": system, "ours": bool(backends), "backends": list(backends), "columns": columns}


def row(
    name: str, *lines: Record, group: str = "workload", x: Any = None, auto: tuple[str, ...] = ("cuda", "triton")
) -> Record:
    counts = {"pairs": 1, "density": 0.25, "active_tiles": 0.5, "empty_rows": 3}
    floor = {"forward": 0.1, "backward": 0.2, "step": 0.3}
    made = {"name": name, "group": group, "x": x, "shape": "1,2,1,64,16", "what": f"call {name}", "has_mask": True}
    made |= {"auto": list(auto), "counts": counts, "floor_ms": floor, "tile_floor_ms": floor, "limits": {"out": 5e-3}}
    return {**made, "systems": list(lines)}


def content(*rows: Record, suite: str = "performance", **rest: Any) -> Record:
    head = {"schema": 1, "suite": suite, "machine": MACHINE, "settings": {"quick": False}, "left_out": {}}
    return {**head, "planned": [row["name"] for row in rows], "rows": list(rows), **rest}


MIXED = row(
    "mixed",
    line("cuda", column(0.5, 2.0), column(0.25, 2.0), ("cuda", "triton")),
    line("triton", column(0.4, 1.9), None, ("triton", "triton")),
    line("sdpa-cudnn", column(0.9, 1.0), column(0.8, 1.5)),
    line("sdpa-mem", column(0.1, 0.1, wrong=["dq"])),
    line("flexattention", column(None, None, reason="RuntimeError: a | b", failed=True)),
)
ALONE = row("alone", line("triton", column(1.0, 1.0), None, ("triton", "triton")), auto=("triton", "triton"))
LEVEL = row("level", line("triton", column(1.0), None, ("triton",)), line("fa4", column(1.02)), auto=("triton", None))
DENSITIES = [
    row(
        f"density-{x}",
        line("cuda", column(x), column(x / 2), ("cuda", "cuda")),
        line("fa4", column(2 * x)),
        group="density",
        x=x,
        auto=("cuda", "cuda"),
    )
    for x in (0.1, 1.0)
]
FAILED_ROW = {"name": "none", "group": "workload", "shape": "1", "what": "w", "error": "no memory", "systems": []}
PERFORMANCE = content(MIXED, ALONE, LEVEL, *DENSITIES, FAILED_ROW, left_out={"fa4": "not installed"})


def test_standings() -> None:
    mixed, alone, level = (summary.standings([x]) for x in (MIXED, ALONE, LEVEL))
    # Ours is the choice of auto with its mask charged; a peer's mask is not. Wrong and failed systems do not count.
    assert mixed[0].ours == (0.5, "cuda") and mixed[0].peer == (0.8, "sdpa-cudnn")
    assert mixed[1].ours == (2.0, "cuda") and mixed[1].peer == (1.0, "sdpa-cudnn")
    assert [s.ratio for s in mixed] == [pytest.approx(1.6), 0.5]
    assert mixed[0].prepared == (0.25, "cuda") and mixed[0].prepared_ratio == pytest.approx(3.2)
    assert [s.ratio for s in alone] == [None, None]
    assert [pages.place(s) for s in (*mixed, *alone, *level)] == ["ahead", "behind", "alone", "alone", "level"]
    # The backward pass of auto, where its forward is of another system.
    crossed = {**MIXED, "auto": ["triton", "triton"]}
    assert [s.ours for s in summary.standings([crossed])] == [(0.4, "triton"), (2.0, "cuda")]
    wrong = row("wrong", line("cuda", column(0.1, wrong=["out"]), None, ("cuda", "triton")))
    assert summary.standings([wrong, FAILED_ROW]) == []


def test_a_page_says_what_failed_and_what_is_left() -> None:
    page = tables.page(PERFORMANCE)
    assert "| RuntimeError: a / b |" in page and "wrong: dq" in page  # a bar would be a column
    assert "no memory" in page and "Left out: FlashAttention-4: not installed." in page
    assert "| call mixed | 1,2,1,64,16 | 0.250 / 2.00 |" in page and "| call alone | 1,2,1,64,16 | - / - |" in page
    assert "Not run yet: later." in tables.page({**PERFORMANCE, "planned": [*PERFORMANCE["planned"], "later"]})
    said = text.row("performance", MIXED)
    assert "cuda, prepared" in said and "WRONG: dq" in said and "RuntimeError: a | b" in said
    assert "SDPA" not in said and "    no memory" in text.row("performance", FAILED_ROW)


def saved(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "performance.json").write_text(json.dumps(PERFORMANCE))
    return folder


def test_report_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "PUBLISHED", tmp_path / "results")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert cli.main(["report"]) == 3
    assert f"no results are under {tmp_path / 'results'}; python -m benchmarks all" in capsys.readouterr().err
    assert cli.main(["report", "--pages"]) == 3
    assert "the pages stay as they are" in capsys.readouterr().err
    proxy = saved(tmp_path / "results" / "a-proxy") / "performance.json"
    machine = {**PERFORMANCE["machine"], "device": "NVIDIA H100 as sm_80, a proxy"}
    proxy.write_text(json.dumps({**PERFORMANCE, "machine": machine}))
    assert cli.main(["report", "--pages"]) == 3, "a proxy is no figure of the pages"
    folder = saved(tmp_path / "results" / "nvidia-h200")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("## Speed\n\nold\n")
    (tmp_path / "docs" / "benchmarks.md").write_text("## Where we stand\n\nold\n")
    assert cli.main(["report", "--pages"]) == 0
    assert (folder / "performance.md").read_text() == tables.page(PERFORMANCE)
    assert "old" not in (tmp_path / "README.md").read_text()
    said = " ".join((tmp_path / "docs" / "benchmarks.md").read_text().split())
    assert f"Not reached: {FAILED_ROW['name']}." in said


def test_committed_pages_are_of_the_committed_run() -> None:
    """README.md, docs/benchmarks.md and the tables show the committed JSON."""
    folder = pages.full_run(RESULTS)
    if folder is None:
        pytest.skip(f"no full run on a GPU is under {RESULTS.relative_to(ROOT)}")
    for suite in SUITES:
        path = folder / f"{suite}.json"
        if path.exists():
            assert (folder / f"{suite}.md").read_text(encoding="utf-8") == tables.page(json.loads(path.read_text()))
    sections = {
        "README.md": (pages.README_SECTION, pages.readme_section(folder, ROOT)),
        "docs/benchmarks.md": (pages.DOCS_SECTION, pages.docs_section(folder, ROOT)),
    }
    for page, (heading, body) in sections.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert pages.replace_section(text, heading, body) == text, f"run: python -m benchmarks report --pages ({page})"
