"""The static check of compiled kernels: it proves a sample of forms, finds planted faults, and says what is open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import needs_triton

pytestmark = needs_triton
pytest.importorskip("triton")
pytest.importorskip("z3", reason="needs z3-solver")

from bounds import QUESTIONS, Found, Verdict, asked, summed, worst  # noqa: E402
from bounds_faults import ARCH, ODD, PLANTED, Planted, dense, jobs_with, planted  # noqa: E402
from compiled_triton import Job, append_jobs, packing_jobs, piece_jobs  # noqa: E402
from reliability import bounds_of  # noqa: E402

# `python tests/bounds.py` answers for every form; each of these has what no other of them has.
SAMPLE: dict[str, Callable[[], list[Job]]] = {
    "windows, lists of kept keys": dense("64 keys", **ODD),
    "bool masks, a bias": dense("64 few pairs, full", **ODD),
    "a search in a loop": lambda: append_jobs(ARCH)[:1],
    "pieces": lambda: piece_jobs(ARCH)[:1],
}


@pytest.mark.parametrize("name", SAMPLE)
def test_every_access_of_a_form_is_proved(name: str) -> None:
    for job in SAMPLE[name]():
        result = asked(job)
        assert not result.lines
        assert result.accesses > result.unreached == 0


# Launches that take seconds to plan are left to `python tests/bounds.py --faults`.
QUICK = [fault for fault in PLANTED if fault.is_quick]


@pytest.mark.parametrize("fault", QUICK, ids=[fault.what for fault in QUICK])
def test_a_planted_fault_is_found(fault: Planted) -> None:
    with planted(fault):
        result = asked(jobs_with(fault)[0], questions=(fault.question,))
    assert result.verdicts[fault.question].word == "fault", result.lines


def test_planted_faults_fit_the_kernels() -> None:
    assert len(PLANTED) >= 20
    assert {fault.question for fault in QUICK} == {fault.question for fault in PLANTED} == set(QUESTIONS)
    for fault in PLANTED:
        with planted(fault):
            pass


def test_positions_that_are_counted_are_left_open() -> None:
    job = next(job for job in packing_jobs(ARCH) if job.name == "key_set")
    verdict = asked(job, questions=("outside",)).verdicts["outside"]
    assert verdict.word == "undecided"
    assert "a count of what is kept" in verdict.why


def test_a_form_counts_as_its_worst_launch() -> None:
    fault, proved, open_ = (Verdict(word, word) for word in ("fault", "proved", "undecided"))

    def launch(key: str, *verdicts: Verdict) -> Found:
        return Found(f"label {key}", "kernel", key, dict(zip(QUESTIONS, verdicts, strict=True)), 3, 0, 1.0)

    fine, half, wrong = (proved, proved, proved), (proved, open_, proved), (fault, proved, proved)
    kernels = summed([launch("a", *fine), launch("a", *half), launch("b", *wrong)])
    row = kernels["kernel"]
    assert (row["forms"], row["launches"]) == (2, 3)
    assert row["outside"] == {"proved": 1, "fault": 1}
    assert row["all"] == {"undecided": 1, "fault": 1}
    assert row["reasons"] == ["undecided"]
    assert len(row["faults"]) == 1
    assert any(line.endswith("| 1, 50.0 % | 1 |") for line in bounds_of(kernels))
    assert worst([proved, open_]).word == "undecided"
