"""The runner of the checks on a GPU, with parts that need none."""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzz
import gpu_checks
import pytest
from conftest import pytest_collection_modifyitems
from gpu_checks import FAILED, PASSED, UNFINISHED, Board, Part, all_parts, forced_parts, run

from flash_dmattn.triton_kernels.gpus import GPUS

ROOT = Path(__file__).resolve().parent.parent
FOREVER = time.monotonic() + 10**6


def part(name: str, code: str, *arguments: str, seconds: int = 0, **environment: str) -> Part:
    return Part(name, (sys.executable, "-c", code, *arguments), seconds, environment)


def go(parts: list[Part], folder: Path, deadline: float = FOREVER, slots: int = 2, commit: str = "a") -> int:
    board = Board.load(folder / "checks.json", commit)
    return run(parts, board, folder, slots=slots, deadline=deadline, where={})


def statuses(folder: Path) -> dict[str, str]:
    rows = json.loads((folder / "checks.json").read_text())["parts"]
    return {name: row["status"] for name, row in rows.items()}


def test_parts_pass_or_fail_with_their_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = part("good", "import os; print('hello', os.environ['WHO'])", WHO="you")
    assert go([good, part("bad", "print('it broke'); raise SystemExit(1)")], tmp_path) == FAILED
    assert statuses(tmp_path) == {"good": "passed", "bad": "failed"}
    assert (tmp_path / "good.log").read_text() == "hello you\n"
    printed = capsys.readouterr().out
    assert "it broke" in printed and "2 parts: 1 passed, 1 failed, 0 left" in printed


def test_what_passed_does_not_run_again_at_the_same_commit(tmp_path: Path) -> None:
    counting = part("counted", f"open({str(tmp_path / 'count')!r}, 'a').write('x')")
    for commit, runs in (("a", 1), ("a", 1), ("b", 2)):
        assert go([counting], tmp_path, commit=commit) == PASSED
        assert len((tmp_path / "count").read_text()) == runs


def test_what_is_late_is_ended_with_its_children_and_runs_again(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    parts = [part("slow", child), part("after it", "pass")]
    started = time.monotonic()
    assert go(parts, tmp_path, deadline=started + 1.0, slots=1) == UNFINISHED
    assert time.monotonic() - started < 20
    assert statuses(tmp_path) == {"slow": "late", "after it": "late"}
    assert go([part("slow", "pass"), parts[1]], tmp_path) == PASSED


def test_initcheck_leaves_copies_alone() -> None:
    """It would report each copy of what TMA stored."""
    commands = {each.name: each.command for each in all_parts()}
    assert "--check-api-memory-access no" in " ".join(commands["initcheck-cuda-0"])
    assert "--check-api-memory-access" not in " ".join(commands["memcheck-cuda-0"])


def test_every_file_it_names_is_there() -> None:
    parts = all_parts()
    assert len({each.name for each in parts}) == len(parts)
    named = {word for each in parts for word in each.command if word.startswith("tests/")}
    assert {
        "tests/fuzz.py",
        "tests/run_calls.py",
        "tests/test_gpu_sizes.py",
        "tests/test_cuda_backward.py",
    } <= named
    assert all((ROOT / name).exists() for name in named)
    assert [each.name for each in parts[:2]] == ["sizes-0", "sizes-1"], "while memory is free"
    assert [each.seconds for each in parts[2:]] == sorted((each.seconds for each in parts[2:]), reverse=True)
    numbers = [each.command[each.command.index("--part") + 1] for each in parts if each.draws]
    assert len(set(numbers)) == len(numbers) and len(set(gpu_checks.CALLS) - set(fuzz.KINDS)) == 0
    assert sum(processes * calls for processes, calls, _ in gpu_checks.CALLS.values()) == 10000


def test_forced_parts_run_triton_alone_as_for_the_other_gpu() -> None:
    parts = forced_parts(("sm_80", "sm_120"))
    names = [each.name.removeprefix("sm_80-") for each in parts[::2]]
    assert [f"sm_120-{name}" for name in names] == [each.name for each in parts[1::2]], "the GPUs take turns"
    firsts = {*(f"{name}-0" for name, suite in gpu_checks.SUITES.items() if suite.forced), "calls-triton-0"}
    assert {*firsts, "instructions"} == set(names[: len(firsts) + 1]), "some of each comes first"
    assert (
        len(set(names)) == len(names)
        and sum("calls-triton-" in name for name in names) == gpu_checks.CALLS["triton"][0]
    )
    for each in parts:
        assert each.environment["TRITON_OVERRIDE_ARCH"] == each.name.partition("-")[0].replace("_", "")
        words = " ".join(each.command)
        assert "or cuda" not in words and "fuzz.py cuda" not in words
        assert "triton" in words or each.name.endswith("-instructions")
    by_name = {each.name: each for each in parts}
    assert by_name["sm_80-bf16-1"].environment["FLASH_DMATTN_TEST_DTYPE"] == "bfloat16"
    shares = {each.environment["FLASH_DMATTN_SHARE"] for each in parts if "-bf16-" in each.name}
    assert shares == {f"{share}/{len(shares)}" for share in range(len(shares))} and len(shares) > 20
    assert set(gpu_checks.FORCED) == {gpu.arch for gpu in GPUS if gpu.standing == "forced"}


def test_shares_of_a_file_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [SimpleNamespace(nodeid=f"tests/test_a.py::test[{n}]", path=Path("test_a.py")) for n in range(200)]
    shares = []
    for share in ("0/3", "1/3", "2/3"):
        monkeypatch.setenv("FLASH_DMATTN_SHARE", share)
        items: list[Any] = list(every)
        pytest_collection_modifyitems(items)
        shares.append([item.nodeid for item in items])
    assert sorted(chain.from_iterable(shares)) == sorted(item.nodeid for item in every)
    assert all(len(every) / 6 < len(share) for share in shares)


def test_without_a_gpu_nothing_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_checks, "find_gpus", lambda: [])
    with pytest.raises(SystemExit) as ended:
        gpu_checks.main(["--out", str(tmp_path / "out")])
    assert ended.value.code == 2 and "torch finds no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
