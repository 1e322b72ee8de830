"""Long runs of random calls: they go on where they were, and a call that fails becomes the simplest one that does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import draws
import fuzz
import pytest
import reliability
import run_calls
import torch
from cases import Case
from draws import Drawn, simpler
from run_calls import Check


def failing(drawn: Drawn) -> Check:
    """A check that fails where the call is causal and has more than two queries."""

    def run() -> None:
        assert not (drawn.case.is_causal and drawn.case.seqlen_q > 2), "wrong"

    def steps() -> Iterator[Check]:
        yield from map(failing, simpler(drawn))

    return Check(repr(drawn), run, steps)


def test_shrink_leaves_what_a_failure_needs() -> None:
    case = Case(3, 129, 77, 6, 3, 64, mask=("B", "1", "Lq", "Lk"), is_causal=True, softcap=5.0, sink="huge", dlse=True)
    check = failing(Drawn(case, "transposed", prepared=True, offset=1, deterministic=True))
    outcome = fuzz.fails(check)
    assert outcome is not None and fuzz.fails(failing(Drawn(Case()))) is None
    told = repr(Drawn(Case(1, 3, 1, 1, 1, 64, is_causal=True, needs_grad=())))
    assert fuzz.shrink(check, outcome).startswith(told)


def test_a_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three calls, then five more; two processes have numbers of their own, and one tally."""
    nothing = fuzz.Tally(tmp_path / "none.json")
    one, two = tmp_path / "whole.0.json", tmp_path / "whole.1.json"
    for file, calls, part in ((one, 3, 0), (one, 8, 0), (one, 8, 0), (two, 4, 1)):
        assert fuzz.run(["eager"], fuzz.Tally(file), calls, 600, part, 2, nothing)
    assert fuzz.Tally(one).of("eager", "dense")["next"] == 4  # calls 0 and 2
    assert fuzz.Tally(two).of("eager", "dense")["next"] == 3
    total = fuzz.Tally(tmp_path / "whole.json")
    fuzz.take_in(total)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.json"]
    lines = fuzz.Tally(total.file).content["places"]["eager"]
    assert sum(line["passed"] for line in lines.values()) == 12
    third = fuzz.Tally(tmp_path / "three.json")
    assert fuzz.run(["eager"], third, 1, 600, 1, 2, total) and third.of("eager", "dense")["next"] == 4 + 1 + 2
    assert fuzz.table(total).count("| 0 |") >= 4
    fuzz.Tally(total.file, "c1").save()
    named = fuzz.Tally(total.file, "c2").content["commit"].split(", ")
    assert named[-2:] == ["c1", "c2"] and len(set(named)) == len(named)  # all commits that it counts


def test_calls_that_are_not_centred_have_numbers_and_a_command_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every call that is drawn has such data, and a record of its kind."""
    monkeypatch.setattr(draws, "UNCENTRED", draws.UNCENTRED)
    drawn: list[Case] = []

    def run(place: object, kind: str, number: int) -> tuple[Check, str | None]:
        drawn.append(draws.draw_small(number).case)
        return failing(Drawn(drawn[-1])), "wrong"

    monkeypatch.setattr(fuzz, "run_number", run)
    monkeypatch.setitem(fuzz.KINDS, "eager", ("appends", "dense"))
    command = ["fuzz.py", "eager", "--calls", "40", "--data", "uncentred", "--part", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "all.json")])
    assert fuzz.main() == 1
    assert [*fuzz.Tally(tmp_path / "all.0.json").content["places"]["eager"]] == ["dense, uncentred"]
    assert all((case.data == "centred") == (case.dtype == torch.float64) for case in drawn)
    assert "python tests/run_calls.py eager dense 7 1 --data uncentred" in capsys.readouterr().out
    for case in drawn:
        steps = [x.case for x in simpler(Drawn(case))]
        assert case.data == "centred" or case.with_(data="centred") in steps
        for x in steps:
            x.build("cpu")


def test_a_call_that_a_rule_refuses_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([None, (None, None), None, (None, None), (None, "wrong")])
    monkeypatch.setattr(fuzz, "run_number", lambda *_: next(said))
    monkeypatch.setitem(fuzz.KINDS, "eager", ("dense",))
    tally = fuzz.Tally(tmp_path / "one.json")
    assert fuzz.run(["eager"], tally, 2, 600, 0, 1, fuzz.Tally(tmp_path / "none.json"))
    line = tally.of("eager", "dense")
    assert (line["passed"], line["refused"], line["next"]) == (2, 2, 4)


def test_a_run_that_is_interrupted_keeps_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(place: object, kind: str, number: int) -> tuple[None, None]:
        if number == 3:
            raise KeyboardInterrupt
        return None, None

    monkeypatch.setattr(fuzz, "run_number", interrupted)
    monkeypatch.setitem(fuzz.KINDS, "eager", ("dense",))
    command = ["fuzz.py", "eager", "--calls", "9", "--part", "0", "--out", str(tmp_path / "all.json")]
    monkeypatch.setattr(sys, "argv", command)
    assert fuzz.main() == 130 and capsys.readouterr().out.startswith("3 passed, 0 refused, 0 failed; ")
    assert fuzz.Tally(tmp_path / "all.0.json").of("eager", "dense")["passed"] == 3


def test_each_process_starts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        started.append(" ".join(command[command.index(word) + 1] for word in ("--part", "--data")))
        return SimpleNamespace(wait=lambda: 0, returncode=0)

    monkeypatch.setattr(subprocess, "Popen", start)
    command = ["fuzz.py", "eager", "--calls", "4", "--processes", "2", "--commit", "c1", "--data", "uncentred"]
    monkeypatch.setattr(draws, "UNCENTRED", draws.UNCENTRED)
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "all.json")])
    assert fuzz.main() == 0 and started == ["0 uncentred", "1 uncentred"]


def test_a_failure_is_told_with_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(is_causal=True, seqlen_q=9)
    monkeypatch.setitem(run_calls.FEATURES, "dense", lambda place, number: failing(Drawn(case)))
    monkeypatch.setitem(fuzz.KINDS, "eager", ("dense",))
    tally = fuzz.Tally(tmp_path / "one.json")
    assert not fuzz.run(["eager"], tally, 1, 600, 7, 1, fuzz.Tally(tmp_path / "none.json"))
    said = capsys.readouterr().out
    assert "python tests/run_calls.py eager dense 7 1" in said and "the simplest call that fails" in said
    assert fuzz.Tally(tally.file).of("eager", "dense")["failed"] == [7] and "| 7 |" in fuzz.table(tally)


def test_a_call_that_finds_no_memory_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that share a GPU take it from each other."""
    said = iter(["number 3\ntorch.OutOfMemoryError: CUDA out of memory.", None])
    monkeypatch.setattr(fuzz, "run_number", lambda *_: (None, next(said)))
    line = {"next": 3, "passed": 0, "refused": 0, "failed": []}
    assert [fuzz.run_one(None, "cuda", "dense", line, 1) for _ in range(2)] == [None, None]  # type: ignore[arg-type]
    assert line == {"next": 5, "passed": 1, "refused": 0, "failed": [], "no memory": 1}


def test_every_kind_of_result_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = {"file": "a.py", "what": "line 1, and/or: a | b -> c"}
    faults = [{**what, "verdict": verdict} for verdict in ("survived", "killed", "")]
    faults.append({**what, "verdict": "equal", "by": "c is a | b"})
    counts = {"passed": 1500, "failed": 1, "left out": 3, "late": 2}
    files = {
        "fuzz-x.json": {
            "places": {"cuda": {"dense": {"next": 3, "passed": 1200, "refused": 1, "no memory": 4, "failed": [7]}}},
            **{"commit": "c1", "date": "2030-01-01", "device": "a GPU"},
        },
        "checks-x.json": {"commit": "c1", "parts": {"bf16": {"status": "passed"}, "fp32": {"status": "late"}}},
        "peers-x.json": {"checkout": "f1", "commit": "c1", "device": "a GPU", "tests": {"test_a": counts}},
        "faults-1.json": {"drawn": "4 of seed 1", "faults": faults},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(reliability, "RESULTS", tmp_path)
    page = reliability.written(reliability.PAGE.read_text())
    for row in (
        "| a GPU | cuda | dense | 1,200 | 1 | 4 | dense 7 | c1, 2030-01-01 |",
        "| GPU, commit c1 | 2 | 1 | 0 | 1 |",
        "| `test_a` | 1,500 | 0 | 1 | 0 | 3 | 2 |",
        "| all, of its commit f1; a GPU, commit c1 | 1,500 | 0 | 1 | 0 | 3 | 2 |",
        "| 4 of seed 1 | 1 | 1 | 50.0 % | 1 | 1 |",
        "* a.py, `line 1, and/or: a | b -> c`",
        "* a.py, `line 1, and/or: a | b -> c`: c is a | b.",
    ):
        assert row in page.splitlines(), row


def test_the_page_says_what_the_files_say() -> None:
    page = reliability.PAGE.read_text()
    assert reliability.written(page) == page
    for make in (reliability.random_calls, reliability.gpu_suite, reliability.their_tests, reliability.drawn_faults):
        assert len({line.count(" | ") for line in make() if line.startswith("|")}) == 1
