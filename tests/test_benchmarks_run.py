"""Runs of the benchmarks without a GPU: one run of each suite and its rows, going on with one, and the command line."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_systems import BROKEN, CPU, EAGER, LATE, MACHINE, MATH, NAN, PEER, REFUSES, WRONG, times

from benchmarks import cli, dispatch, pages, results, runner, turns
from benchmarks.cases import Case
from benchmarks.floors import Rates
from benchmarks.report import plots, tables, text
from benchmarks.suites import equivalence, model, performance

ONE_CASE = {"performance": "topk-8k", "equivalence": "form-topk", "memory": "memory-bias-1hll", "model": "decoder"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, results.Record], dict[str, int]]]:
    """(content, exit status) of each suite: one run on one small case, of systems of every kind."""
    folder = tmp_path_factory.mktemp("results")
    chosen = [EAGER, MATH, WRONG, NAN, BROKEN, LATE, REFUSES, PEER]
    statuses = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "CPU_SEQLEN", 128)
        patch.setattr(performance, "FULL", performance.Effort(1.0, 2, 3))
        patch.setattr(runner.systems, "available", lambda names, device: (chosen, {"fa4": "not here"}))
        for suite, case in ONE_CASE.items():
            options = runner.Options(device=CPU, out=folder, machine=MACHINE, only=[case])
            statuses[suite] = runner.run(suite, options)
    yield {suite: results.load(folder / f"{suite}.json") for suite in ONE_CASE}, statuses


@pytest.fixture
def rows(ran: tuple[dict[str, results.Record], dict[str, int]]) -> dict[str, results.Record]:
    return {suite: content["rows"][0] for suite, content in ran[0].items()}


def test_a_run_names_the_suites_that_failed(ran: Any) -> None:
    contents, statuses = ran
    assert statuses == dict.fromkeys(ONE_CASE, runner.FAILED)
    for content in contents.values():
        assert content["left_out"] == {"fa4": "not here"} and len(content["rows"]) == 1


def test_performance_row(rows: dict[str, results.Record]) -> None:
    row = rows["performance"]
    assert row["auto"] == ["eager", "eager"] and row["has_mask"]
    eager, math = times(row, "eager"), times(row, "sdpa-math", "prepared")
    assert eager["wrong"] == math["wrong"] == []
    assert times(row, "wrong")["wrong"] == ["out", "dq", "dk", "dv", "dbias"]
    assert times(row, "broken")["reason"] == "RuntimeError: no kernel for this call"
    assert times(row, "broken")["forward"] is None
    late = times(row, "late")
    assert late["failed"] and late["reason"].endswith("RuntimeError: a call too many")
    for name, flop in (("forward", 4), ("backward", 10), ("step", 14)):
        timed = eager[name]
        assert timed["tflops"] == pytest.approx(flop * 32 * row["counts"]["pairs"] / timed["ms"] / 1e9, rel=1e-4)
        assert timed["of_floor"] == pytest.approx(row["floor_ms"][name] / timed["ms"], rel=1e-4)
        assert 2 <= timed["runs"] <= 3
    # A prepared mask is not read as bools: a smaller floor where the bytes decide.
    assert eager["peak_mb"] > 0 and row["tile_floor_ms"]["forward"] >= row["floor_ms"]["forward"]
    said = performance.failures(row)  # a peer that is wrong is none
    assert {line.split(": ")[0].removesuffix(" (prepared)") for line in said} == {
        f"topk-8k, {name}" for name in ("wrong", "nan", "broken")
    }
    assert said[0].startswith("topk-8k, wrong: out 5.0e-02 above ") and "out NaN above " in "".join(said)
    assert "topk-8k, broken: RuntimeError: no kernel for this call" in said


def test_equivalence_row(rows: dict[str, results.Record]) -> None:
    row = rows["equivalence"]
    assert {line["system"]: line["verdict"] for line in row["systems"]} == {
        **{"eager": "pass", "sdpa-math": "pass", "wrong": "fail", "nan": "fail", "peer": "fail"},
        **{"broken": "failed", "late": "pass", "no": "refused"},
    }
    eager, math = row["systems"][:2]
    assert list(eager["errors"]) == ["out", "lse", "dq", "dk", "dv", "dbias"] == list(row["limits"])
    assert all(eager["errors"][name] <= row["limits"][name] for name in row["limits"])
    # Two that are right are about as far from each other as the less accurate one is from fp64.
    assert 0.5 < eager["from_plain"]["out"] / row["plain"]["out"] < 1.5
    assert math["errors"]["out"] < 5e-3
    failed = [said.split(":")[0] for said in equivalence.failures(row)]
    assert failed == [f"form-topk, {name}" for name in ("wrong", "nan", "broken")]


def test_memory_row(rows: dict[str, results.Record]) -> None:
    row = rows["memory"]
    peaks = {line["system"]: line["peaks"] for line in row["systems"]}
    assert 0 < row["returned_mb"] <= peaks["eager"]["both"] and peaks["broken"] is None


def test_model_row(rows: dict[str, results.Record]) -> None:
    row = rows["model"]
    lines = {line["system"]: line for line in row["systems"]}
    right, nan, broken = lines["eager"], lines["nan"], lines["broken"]
    assert right["errors"].keys() == row["limits"].keys() == {"loss", "dwq", "dbias"} and not right["wrong"]
    assert right["step"]["ms"] > 0 and row["without_attention"]["ms"] > 0 and right["peak_mb"] > 0
    assert row["limits"]["loss"] == pytest.approx(model.LOSS_LIMIT, rel=1e-4)
    assert row["limits"]["dbias"] == pytest.approx(1.5 * row["plain"]["dbias"] + 1e-5, rel=1e-3)
    assert "dbias" in lines["wrong"]["wrong"] and lines["wrong"]["step"] and "dwq" in lines["peer"]["wrong"]
    assert nan["wrong"] == ["loss", "dwq", "dbias"] and nan["errors"]["loss"] is None
    assert broken["reason"] == "RuntimeError: no kernel for this call" and broken["step"] is None
    assert lines["no"]["reason"] == "it is no part of models"
    said = [line.split(": ")[0] for line in model.failures(row)]
    assert said == [f"{row['name']}, {name}" for name in ("wrong", "nan", "broken")]


def test_pages_and_plots_of_a_run(ran: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contents, _ = ran
    for suite, content in contents.items():
        page, (row,) = tables.page(content), content["rows"]
        assert row["name"] in page and "no kernel for this call" in page
        assert "no kernel for this call" in text.row(suite, row)
        assert {path.suffix for path in plots.write(content, tmp_path)} == {".png", ".svg"}
    page = tables.page(contents["model"])
    assert "`auto` takes eager and eager." in page and "| no attention | " in page
    row = contents["model"]["rows"][0]
    right = next(line for line in page.splitlines() if line.startswith("| eager |"))
    timed, bare = row["systems"][0]["step"]["ms"], row["without_attention"]["ms"]
    assert right.split(" | ")[1:5:2] == [text.ms(timed), text.ms(timed - bare)]
    lines = pages._model_lines(contents["model"])
    assert lines[0] == "### A training step" and right in lines
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))


# Going on with a run


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> runner.Options:
    """Three cases whose rows cost nothing."""
    chosen = ["causal-gqa", "bias-bhll-d64", "decode-8k"]
    real = runner.cases_of

    def some(suite: str, only: list[str] | None = None, quick: bool = False) -> list[Case]:
        return [case for case in real(suite, only, quick) if case.name in chosen]

    def row(suite: str, case: Case, *rest: object) -> results.Record:
        return {"name": case.name, "group": "g", "shape": "s", "what": "w", "error": "none", "systems": []}

    monkeypatch.setattr(runner, "cases_of", some)
    monkeypatch.setattr(runner, "make_row", row)
    return runner.Options(device=CPU, out=tmp_path, machine=MACHINE, systems=["eager", "sdpa-math"])


def names_in(path: Path) -> list[str]:
    return [row["name"] for row in results.load(path)["rows"]]


def test_an_interrupted_run_goes_on(tiny: runner.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = runner.make_row

    def interrupted(suite: str, case: Case, *rest: Any) -> results.Record:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(case.name)
        return real(suite, case, *rest)

    monkeypatch.setattr(runner, "make_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run("performance", tiny)
    path = tiny.out / "performance.json"
    assert names_in(path) == ["causal-gqa"] and results.missing(results.load(path)) == ["bias-bhll-d64", "decode-8k"]
    monkeypatch.setattr(runner, "make_row", real)
    assert runner.run("performance", replace(tiny, only=["decode"])) == runner.PASSED
    assert names_in(path) == ["causal-gqa", "decode-8k"]
    assert runner.run("performance", tiny) == runner.PASSED
    assert names_in(path) == ["causal-gqa", "bias-bhll-d64", "decode-8k"]


def test_rows_of_another_run_are_not_mixed(tiny: runner.Options) -> None:
    runner.run("performance", tiny)
    later = replace(tiny, machine={**MACHINE, "commit": "def"})
    with pytest.raises(results.OtherRun, match=r"commit abc there, def here\); --fresh replaces it"):
        runner.run("performance", later)
    with pytest.raises(results.OtherRun, match="systems"):
        runner.run("performance", replace(tiny, systems=["eager"]))
    measured_anew = replace(tiny, machine={**MACHINE, "rates": Rates(2e12, 1e11, "measured")._asdict()})
    assert runner.run("performance", measured_anew) == runner.PASSED
    assert runner.run("performance", replace(later, fresh=True)) == runner.PASSED
    assert results.load(tiny.out / "performance.json")["machine"]["commit"] == "def"


def test_processes_on_one_gpu_time_one_after_another(tmp_path: Path) -> None:
    """Locks belong to the open files of each, so that threads stand for processes."""
    changes = threading.Lock()
    preparing: set[int] = set()
    timing: set[int] = set()
    most_at_once, wrong, timed = 0, [], []

    def process(index: int) -> None:
        nonlocal most_at_once
        turn = turns.Turns(tmp_path, "GPU-0").case
        for case in range(4):
            with turn() as alone:
                with changes:
                    wrong.extend([f"{index} prepares while {timing} time"] if timing else [])
                    preparing.add(index)
                    most_at_once = max(most_at_once, len(preparing))
                time.sleep(0.01 * (1 + index))
                with changes:
                    preparing.remove(index)
                alone()
                with changes:
                    wrong.extend([f"{index} times beside {preparing | timing}"] * bool(preparing | timing))
                    timing.add(index)
                time.sleep(0.005)
                with changes:
                    timing.remove(index)
                    timed.append((index, case))

    threads = [threading.Thread(target=process, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and len(timed) == 12
    assert most_at_once == 3, "cases are prepared side by side"


def test_benchmarks_start_without_triton() -> None:
    """Windows and macOS have none."""
    program = "import sys; sys.modules['triton'] = None; from benchmarks import cli; sys.exit(cli.main(['list']))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0 and "dense-d128" in done.stdout, done.stderr


def test_a_file_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"machine": MACHINE, "settings": {}, "planned": ["b", "a"]}
    kept = results.Results(tmp_path / "deep" / "x.json", head)
    kept.add({"name": "a"})
    kept.add({"name": "b"})
    kept.add({"name": "a", "again": True})
    assert results.load(kept.path)["rows"] == [{"name": "b"}, {"name": "a", "again": True}]
    with pytest.raises(ValueError):
        kept.add({"name": "b", "value": float("nan")})
    assert results.rounded({"a": [1.23456789, 7, True, "x"]}) == {"a": [1.23457, 7, True, "x"]}
    assert results.load(kept.path)["rows"] == [{"name": "b"}, {"name": "a", "again": True}]

    def ended(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", ended)
        kept.add({"name": "b", "again": True})
    assert results.load(kept.path)["rows"] == [{"name": "b"}, {"name": "a", "again": True}]
    assert not list(kept.path.parent.glob("*.unfinished"))
    kept.path.write_text('{"schema": 0}')
    with pytest.raises(results.OtherRun, match="schema 0, and this version reads 1"):
        results.load(kept.path)


# The command line


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One suite, quick, with all systems that a CPU has."""
    monkeypatch.setattr(runner, "CPU_SEQLEN_QUICK", 64)
    command = ["performance", "forward", "--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    assert cli.main([*command, "--only", "topk"]) == 0
    said = capsys.readouterr().out
    assert "[1/" in said and "cuda is left out: its kernels run on GPUs" in said
    assert names_in(tmp_path / "performance.json") == ["topk-8k"] and (tmp_path / "performance.md").exists()
    (row,) = results.load(tmp_path / "performance.json")["rows"]
    assert {line["system"] for line in row["systems"]} == {"auto", "eager", "sdpa-flash", "sdpa-math", "flexattention"}
    assert times(row, "eager")["forward"]["ms"] > 0 and times(row, "flexattention")["forward"]["ms"] > 0
    assert times(row, "flexattention")["reason"] == "backward: FlexAttention has no backward pass on CPU"
    assert times(row, "eager")["backward"] is None and times(row, "eager")["step"] is None


def test_dispatch(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert cli.main(["dispatch", "--rounds", "2", "--calls", "2"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("eager")]
        assert cli.main(["dispatch", "--kinds", "--rounds", "1", "--calls", "1"]) == 0
        kinds = capsys.readouterr().out.splitlines()[2:]
        assert cli.main(["dispatch", "--forms", "--lengths", "8,16", "--rounds", "1", "--calls", "1"]) == 0
        table = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    finally:
        torch.set_num_threads(threads)
    assert len(lines) == 2
    for line in lines:
        full, bare, added = map(float, line[-3:])
        assert full > 0 and bare > 0 and added == pytest.approx(full - bare, abs=0.11)
    assert [line[:30].strip() for line in kinds] == list(dispatch.kinds(CPU))
    assert all(float(number) > 0 for line in kinds for number in line[30:].split())
    assert [(row[0].strip("| "), row[1]) for row in table] == [
        (x, n) for n in ("8", "16") for x in dispatch.forms(CPU, 8)
    ]
    for row in table:
        numbers = [float(number) for column in row[2:8] for number in column.split(" / ")]
        assert len(numbers) == 8 and min(numbers[:4]) > 0 and numbers[7] > numbers[6] > 0
        assert numbers[4:6] == [0, 0] and row[8:] == ["-", "- |"]
    forward, bare = dispatch.pairs("eager", CPU)["forward, no grad"]
    assert forward().shape == bare()[0].shape == dispatch.SHAPE  # type: ignore[attr-defined, index]
