"""Long runs of random calls: they go on where they were, and a call that fails becomes the simplest one that does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_the_page_says_what_the_files_say() -> None:
    page = reliability.PAGE.read_text()
    assert reliability.written(page) == page
    for make in (reliability.random_calls, reliability.gpu_suite, reliability.their_tests, reliability.drawn_faults):
        assert len({line.count(" | ") for line in make() if line.startswith("|")}) == 1
