"""Builds of the extension beside each other: the table, a run on a CPU, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import builds

ON_CPU = ["--only", "heads-1", "--passes", "forward", "--rounds", "1", "--system", "eager", "--device", "cpu"]


def test_the_table_has_medians_and_their_ratios() -> None:
    times = {
        ("old", "dense", "forward"): [1.0, 9.0, 2.0],
        ("new", "dense", "forward"): [1.0, 1.0, 5.0],
        ("old", "dense", "backward"): [4.0],
        ("new", "dense", "backward"): [6.0],
    }
    assert builds.printed(times, ["old", "new"]) == [
        "| case | pass | old | new | new / old |",
        "| --- | --- | --- | --- | --- |",
        "| dense | forward | 2.00 | 1.00 | 0.500 |",
        "| dense | backward | 4.00 | 6.00 | 1.500 |",
    ]
    times["new", "wide", "forward"] = [3.0]  # for a head dim that the old build does not have
    assert builds.printed(times, ["old", "new"])[-1] == "| wide | forward | - | 3.00 | - |"


def test_a_copy_has_the_file_as_its_extension(tmp_path: Path) -> None:
    file = tmp_path / "new.so"
    file.write_text("an extension")
    tree = builds.copy_with(file, tmp_path)
    assert (tree / "flash_dmattn" / builds.EXTENSION).read_text() == "an extension"
    assert (tree / "benchmarks" / "cases.py").is_file() and not (tree / ".git").exists()


def test_a_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a system that needs no extension, so that an empty file will do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "old.so").touch()
    assert builds.main([str(tmp_path / "old.so"), *ON_CPU]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "[1/1] old" and said[2] == "| case | pass | old |"
    assert said[4].startswith("| heads-1 | forward | ")


def test_a_run_that_fails_says_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "copy_with", lambda extension, folder: tmp_path)  # where there are no benchmarks
    (tmp_path / "old.so").touch()
    assert builds.main([str(tmp_path / "old.so"), *ON_CPU]) == 1
    assert "No module named benchmarks" in capsys.readouterr().err


def test_a_build_that_serves_nothing_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an extension that cannot be loaded: its table would be empty."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "old.so").touch()
    assert builds.main([str(tmp_path / "old.so"), *ON_CPU, "--system", "cuda"]) == 1
    assert "old: cuda served none of the cases" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [(["a/x.so", "b/x.so"], "two builds have one name, and the table would mix them: x, x"), (["x.so"], "is no file")],
)
def test_refused(files: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        builds.main([str(tmp_path / file) for file in files])
    assert message in capsys.readouterr().err
