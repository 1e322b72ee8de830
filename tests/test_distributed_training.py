"""The example of FSDP2 with context parallelism: two processes lose what one does."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from distributed_workers import torchrun

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/distributed_training.py"


def test_losses_are_those_of_one_process() -> None:
    printed = torchrun(4, "tests/run_and_exit.py", EXAMPLE, "--steps", "6", "--dp", "2")
    head, _, *table = printed.splitlines()
    assert head == "2 x 2 ranks: batch x sequence of 128"
    rows = [[float(cell) for cell in line.split()] for line in table]
    assert [row[0] for row in rows] == list(range(6))
    assert all(abs(row[3]) < 2e-5 and abs(row[1] - row[2]) < 2e-5 for row in rows)
    assert rows[-1][1] < rows[0][1] - 0.3  # it learns, so that a wrong step would show


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [([], None, "start it with torchrun --nproc-per-node 2"), (["--dp", "3"], "4", "it needs to divide the 4 ranks")],
)
def test_refused(
    arguments: list[str],
    ranks: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if ranks is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / EXAMPLE))["main"](arguments)
    assert message in capsys.readouterr().err
