"""Compilation ahead of a run: every job is run in processes of its own, and whatever goes wrong there is only said."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import compiling
from benchmarks.cases import cases_of
from benchmarks.systems import Mode

QUICK = [case.reduced(128) for case in cases_of("performance", None, True)][:3]
JOBS = [compiling.Job(case, (("eager", (Mode(), Mode(prepared=True))),), torch.device("cpu")) for case in QUICK]


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def test_jobs_run_and_a_broken_one_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    broken = JOBS[0]._replace(case=replace(QUICK[0], name="negative", batch=-1))
    compiling.compile_ahead("memory", [*JOBS, broken], None)
    said = capsys.readouterr().out
    assert "[4/4]" in said
    for job in JOBS:
        assert f"] {job.case.name}\n" in said
    assert "negative\n    RuntimeError: " in said
    assert said.count("Error") == 1


def test_nothing_is_begun_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    compiling.compile_ahead("memory", JOBS, time.monotonic() - 1.0)
    assert capsys.readouterr().out == "    the budget is spent\n"


@pytest.mark.parametrize(("jobs", "cores"), [(JOBS[:2], 4), (JOBS, 2)])
def test_few_jobs_or_cores_are_not_worth_processes(
    jobs: list[compiling.Job], cores: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    compiling.compile_ahead("memory", jobs, None)
    assert capsys.readouterr().out == ""
