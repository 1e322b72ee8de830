"""The tables of planted faults still fit the tree: their texts are found, and so are their tests.

The faults themselves are planted by `python tests/mutants/run.py`, which takes an hour.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutants.fault import Fault
from mutants.run import AREAS, ROOT, faults_of, judge, place_of, planted

EVERY = [(area, fault) for area in AREAS for fault in faults_of(area)]


@pytest.mark.parametrize("area, fault", EVERY, ids=[f"{area}: {fault.what}" for area, fault in EVERY])
def test_a_fault_fits_the_tree(area: str, fault: Fault) -> None:
    assert place_of(fault).replace(fault.before, fault.after) != place_of(fault)
    assert fault.tests
    for test in fault.tests:
        file, *names = test.partition("[")[0].split("::")  # of a class too
        text = (ROOT / file).read_text()
        for name in names:
            assert re.search(rf"(def|class) {re.escape(name)}[(:]", text), f"{file} has no {name}"


def test_there_are_sixty_faults_and_no_two_alike() -> None:
    assert len(EVERY) >= 60
    assert len({(f.file, f.before, f.after) for _, f in EVERY}) == len({(a, f.what) for a, f in EVERY}) == len(EVERY)


TREE = {
    "product.py": "def double(x):\n    return 2 * x\n",
    "test_product.py": "import product\n\ndef test_double():\n    assert product.double(3) == 6\n",
    "test_loose.py": "import product\n\ndef test_double():\n    assert product.double(0) == 0\n",
    "test_wrong.py": "def test_wrong():\n    assert False\n",
    "pytest.ini": "[pytest]\npythonpath = .\n",
}


@pytest.mark.parametrize(
    "before, test, verdict, detail",
    [
        ("2 * x", "test_product.py::test_double", "killed", "FAILED test_product.py::test_double"),
        ("2 * x", "test_loose.py", "survived", "1 passed"),
        ("2 * x", "test_wrong.py", "error", "without the fault: failed"),
        ("2 * x", "test_product.py::test_gone", "error", "without the fault: error, pytest ended with 4"),
        ("4 * x", "test_product.py", "error", "product.py has 0 times, and not once: '4 * x'"),
    ],
)
def test_what_the_runner_says(before: str, test: str, verdict: str, detail: str, tmp_path: Path) -> None:
    for name, text in TREE.items():
        (tmp_path / name).write_text(text)
    fault = Fault("a factor", "product.py", before, "3 * x", (test,))
    outcome = judge("front_end", fault, tmp_path, {})
    assert outcome.verdict == verdict and detail in outcome.detail, outcome
    assert (tmp_path / "product.py").read_text() == TREE["product.py"]


def test_a_planted_fault_goes_when_its_tests_raise(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(KeyError), planted(Fault("a value", "a.py", "x = 1", "x = 2", ()), tmp_path):
        assert (tmp_path / "a.py").read_text() == "x = 2\n"
        raise KeyError
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
