"""Runs of the benchmarks without a GPU: going on where one stopped, budgets, errors, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_systems import CPU, MACHINE, plain, spoiled, times

from benchmarks import cli, dispatch, machine, results, runner, tiles
from benchmarks.cases import Case
from benchmarks.floors import Rates
from benchmarks.inputs import Inputs
from benchmarks.suites import performance


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> runner.Options:
    """Three cases of 64 keys, two systems."""
    monkeypatch.setattr(runner, "CPU_SEQLEN", 64)
    chosen = ["causal-gqa", "bias-bhll-d64", "decode-8k"]
    real = runner.cases_of

    def some(suite: str, only: list[str] | None = None, quick: bool = False) -> list[Case]:
        return [case for case in real(suite, only, quick) if suite != "performance" or case.name in chosen]

    monkeypatch.setattr(runner, "cases_of", some)
    monkeypatch.setattr(performance, "FULL", performance.Effort(1.0, 1, 1))
    return runner.Options(device=CPU, out=tmp_path, machine=MACHINE, systems=["eager", "sdpa-math"])


def names_in(path: Path) -> list[str]:
    return [row["name"] for row in results.load(path)["rows"]]


def test_an_interrupted_run_goes_on(tiny: runner.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = runner.make_row

    def interrupted(suite: str, case: Case, *rest: object) -> results.Record:
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(case.name)
        return real(suite, case, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "make_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run("performance", tiny)
    path = tiny.out / "performance.json"
    assert names_in(path) == ["causal-gqa"] and results.missing(results.load(path)) == ["bias-bhll-d64", "decode-8k"]
    ran.clear()
    monkeypatch.setattr(
        runner, "make_row", lambda suite, case, *rest: ran.append(case.name) or real(suite, case, *rest)
    )
    assert runner.run("performance", tiny) == runner.PASSED
    assert ran == ["bias-bhll-d64", "decode-8k"]
    assert names_in(path) == ["causal-gqa", "bias-bhll-d64", "decode-8k"]
    assert runner.run("performance", tiny) == runner.PASSED and len(ran) == 2


def test_only_some_cases_and_then_the_rest(tiny: runner.Options) -> None:
    from dataclasses import replace

    assert runner.run("performance", replace(tiny, only=["decode"])) == runner.PASSED
    assert names_in(tiny.out / "performance.json") == ["decode-8k"]
    assert runner.run("performance", tiny) == runner.PASSED
    assert names_in(tiny.out / "performance.json") == ["causal-gqa", "bias-bhll-d64", "decode-8k"]


def test_budget(tiny: runner.Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No case is begun that may not end in time: the longest so far took 30 s."""
    from dataclasses import replace

    clock = iter([0.0, 30.0, 40.0])
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    made = {"group": "g", "shape": "s", "what": "w", "error": "none", "systems": []}
    monkeypatch.setattr(runner, "make_row", lambda suite, case, *rest: {"name": case.name, **made})
    assert runner.run("performance", replace(tiny, deadline=60.0)) == runner.UNFINISHED
    assert names_in(tiny.out / "performance.json") == ["causal-gqa"]
    assert "2 of 3 cases are left; the same command goes on with bias-bhll-d64" in capsys.readouterr().out


def test_rows_of_another_run_are_not_mixed(tiny: runner.Options) -> None:
    from dataclasses import replace

    only = replace(tiny, only=["decode"])
    runner.run("performance", only)
    later = replace(only, machine={**MACHINE, "commit": "def"})
    with pytest.raises(results.OtherRun, match=r"commit abc there, def here\); --fresh replaces it"):
        runner.run("performance", later)
    with pytest.raises(results.OtherRun, match="systems"):
        runner.run("performance", replace(only, systems=["eager"]))
    measured_anew = replace(only, machine={**MACHINE, "rates": Rates(2e12, 1e11, "measured")._asdict()})
    assert runner.run("performance", measured_anew) == runner.PASSED
    assert runner.run("performance", replace(later, fresh=True)) == runner.PASSED
    assert results.load(tiny.out / "performance.json")["machine"]["commit"] == "def"


def test_a_case_that_cannot_be_made_is_a_row(tiny: runner.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(case: Case, device: torch.device) -> Inputs:
        raise torch.OutOfMemoryError("no memory for the inputs")

    monkeypatch.setattr(performance, "make_inputs", no_memory)
    assert runner.run("performance", tiny) == runner.PASSED
    row = results.load(tiny.out / "performance.json")["rows"][0]
    assert row["error"] == "OutOfMemoryError: no memory for the inputs"
    written = cli.write(tiny.out, ["performance"])
    assert "no memory for the inputs" in written[0].read_text()


def test_exit_status_of_a_wrong_result(tiny: runner.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = plain("eager", spoiled, is_ours=True)
    monkeypatch.setattr(runner.systems, "available", lambda names, device: ([wrong], {"fa4": "not here"}))
    assert runner.run("performance", tiny) == runner.FAILED
    assert results.load(tiny.out / "performance.json")["left_out"] == {"fa4": "not here"}


def test_a_file_is_whole_or_the_one_before(tmp_path: Path) -> None:
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
    kept.path.write_text('{"schema": 0}')
    with pytest.raises(results.OtherRun, match="schema 0, and this version reads 1"):
        results.load(kept.path)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every suite, quick, on a CPU, with what it writes."""
    monkeypatch.setattr(runner, "CPU_SEQLEN_QUICK", 64)
    command = ["all", "--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    assert cli.main([*command, "--only", "topk", "form-full", "predecessor"]) == 0
    said = capsys.readouterr().out
    assert "[1/" in said and "cuda is left out: its kernels run on GPUs" in said
    wanted = {"performance": ["topk-8k"], "equivalence": ["form-full", "form-topk"], "model": ["decoder-topk-8k"]}
    for suite, cases in wanted.items():
        assert names_in(tmp_path / f"{suite}.json") == cases
        assert (tmp_path / f"{suite}.md").exists()
    row = results.load(tmp_path / "performance.json")["rows"][0]
    assert {line["system"] for line in row["systems"]} == {"eager", "sdpa-flash", "sdpa-math", "flexattention"}
    assert times(row, "eager")["step"]["ms"] > 0 and times(row, "flexattention")["forward"]["ms"] > 0
    assert times(row, "flexattention")["reason"] == "backward: FlexAttention has no backward pass on CPU"
    forward = ["performance", "forward", "--device", "cpu", "--out", str(tmp_path / "f"), "--systems", "eager"]
    monkeypatch.setattr(runner, "CPU_SEQLEN", 64)
    assert cli.main([*forward, "--only", "causal-gqa"]) == 0
    alone = times(results.load(tmp_path / "f" / "performance.json")["rows"][0], "eager")
    assert alone["forward"]["ms"] > 0 and alone["backward"] is None and alone["step"] is None
    decode = ["performance", "decode", "--device", "cpu", "--out", str(tmp_path / "d"), "--systems", "eager"]
    assert cli.main(decode) == 0
    assert names_in(tmp_path / "d" / "performance.json") == ["decode-8k", "decode-64k", "decode-keys-64k"]


def test_wrong_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["memory", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "--device cuda: torch finds no GPU on this machine.\n"
    assert cli.main(["performance", "--only", "nothing", "never"]) == 2
    assert "no case has a name or group with nothing or never in it" in capsys.readouterr().err
    assert cli.main(["sweep", "tiles", "d128"]) == cli.main(["sweep", "strips"]) == 2
    with pytest.raises(SystemExit):
        cli.main([])
    monkeypatch.setattr(cli, "run_suites", lambda given: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["memory"]) == 3
    assert cli.main(["list"]) == 0
    said = capsys.readouterr().out
    assert "topk-16k" in said and "flash-dmattn-1" in said


def test_the_machine() -> None:
    found = machine.describe(CPU, "abc")
    assert found["kind"] == "cpu" and found["commit"] == "abc" and found["torch"] == torch.__version__
    # What they are is the machine's affair: a busy one may compute less than it copies.
    assert found["rates"]["source"] == "measured" and min(found["rates"]["flop"], found["rates"]["bytes"]) > 0
    assert machine.slug({"device": "NVIDIA H200"}) == "nvidia-h200"
    assert machine.line(MACHINE) == "CPU, torch 2, commit abc"


def test_tiles_propose_rows_of_the_table() -> None:
    tile, reason = tiles.proposal("d64", "forward", [(1.2, (64, 128, 4, 3)), (1.3, (128, 64, 4, 3))])
    assert reason == "1.200 ms, d64 of benchmarks/tiles.py; 1.300 for (128, 64, 4, 3)"
    source = tiles.TABLE.read_text(encoding="utf-8")
    changed = tiles.rewritten(source, "_SM90", "forward", 64, (1, 2, 3, 4), reason)
    new = [line for line in changed.splitlines() if line not in source.splitlines()]
    assert new == [f"        64: Tile(1, 2, 3, 4),  # {reason}"]
    with pytest.raises(ValueError, match="has no row 7 for 'forward'"):
        tiles.rewritten(source, "_SM90", "forward", 7, tile, reason)
    assert all(
        list(tiles.candidates(case, kernel)) for case in tiles.CASES.values() for kernel in tiles.kernels_of(case)
    )


def test_dispatch(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert cli.main(["dispatch", "--rounds", "2", "--calls", "2"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("eager")]
    assert len(lines) == 2
    for line in lines:
        whole, bare, added = map(float, line[-3:])
        assert whole > 0 and bare > 0 and added == pytest.approx(whole - bare, abs=0.11)
    threads = torch.get_num_threads()
    try:
        assert cli.main(["dispatch", "--kinds", "--rounds", "1", "--calls", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line[:30].strip() for line in lines] == list(dispatch.kinds(CPU))
    assert all(float(number) > 0 for line in lines for number in line[30:].split())
    forward, bare = dispatch.pairs("eager", CPU)["forward, no grad"]
    assert forward().shape == bare()[0].shape == dispatch.SHAPE  # type: ignore[attr-defined, index]
