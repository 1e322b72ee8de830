"""Planted faults: written ones still fit the tree, drawn ones parse, and the runner judges both.

The faults themselves are planted by `python tests/mutants/run.py`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from mutants.draw import QUICK, changes_in, draw, find_tests, sources
from mutants.faults import FAULTS, Fault
from mutants.run import ROOT, Copy, Outcome, Record, place_of, planted, steps_of, table_of


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.file}: {fault.what}" for fault in FAULTS])
def test_a_fault_fits_the_tree(fault: Fault) -> None:
    assert place_of(fault).replace(fault.before, fault.after) != place_of(fault)
    assert fault.tests
    for test in fault.tests:
        file, *names = test.partition("[")[0].split("::")
        assert (ROOT / file).is_file(), f'the fault "{fault.what}" names the tests {file}, which are not there'
        text = (ROOT / file).read_text()
        for name in names:
            has_it = re.search(rf"(def|class) {re.escape(name)}[(:]", text)
            assert has_it, f'the fault "{fault.what}" names the test {name}, which {file} does not have'


def test_written_faults_differ() -> None:
    assert len(FAULTS) >= 50
    assert len({(f.file, f.before, f.after) for f in FAULTS}) == len({(f.file, f.what) for f in FAULTS}) == len(FAULTS)


def test_drawn_faults_parse_and_change_the_tree() -> None:
    assert draw(20, 3, "reference/") == draw(20, 3, "reference/") != draw(20, 4, "reference/")
    assert {fault.file for fault in draw(20, 0, "reference/")} <= set(sources("reference/"))
    for fault in draw(50, 0, ("flash_dmattn/masks/", "triton_kernels/")):
        assert fault.before == (ROOT / fault.file).read_text()
        assert ast.dump(ast.parse(fault.after)) != ast.dump(ast.parse(fault.before)), fault.what


def test_every_file_of_the_package_has_tests_for_drawn_faults() -> None:
    assert all(len(find_tests(file)) > 1 for file in sources())


def test_every_kind_of_change() -> None:
    text = '''
def f(a: Literal[1], b=2):
    """A text."""
    if a < b and c(a, "é", key=b):
        c(a, b)
        raise ValueError(1 + a)
    return (a + b, True, f"{a + 1}")
'''
    changed = {}
    for change in changes_in(text):
        encoded = text.encode()
        changed.setdefault(change.kind, []).append(
            (encoded[change.start : change.stop].decode(), change.after)  # in bytes, and é is two of them
        )
    assert changed == {
        "constant": [("2", "3"), ("True", "False")],
        "condition negated": [('a < b and c(a, "é", key=b)', "(not (a < b and c(a, 'é', key=b)))")],
        "and/or": [('a < b and c(a, "é", key=b)', "(a < b or c(a, 'é', key=b))")],
        "comparison": [("a < b", "(a <= b)")],
        "arguments swapped": [('c(a, "é", key=b)', "c('é', a, key=b)"), ("c(a, b)", "c(b, a)")],
        "call dropped": [("c(a, b)", "pass")],
        "result dropped": [('return (a + b, True, f"{a + 1}")', "return None")],
        "last item dropped": [('(a + b, True, f"{a + 1}")', "((a + b, True))")],
        "operator": [("a + b", "(a - b)")],
    }


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
        ("2 * x", "test_wrong.py", "survived", "1 deselected"),
        ("4 * x", "test_product.py", "error", 'the fault "a factor" does not apply: product.py has its text 0 times'),
    ],
)
def test_verdicts(before: str, test: str, verdict: str, detail: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for name, text in TREE.items():
        (tmp_path / "tree" / name).write_text(text)
    copy = Copy(tmp_path / "tree", set())
    outcome = copy.judge(Fault("a factor", "product.py", before, "3 * x", (test,)), (test,))
    assert outcome.verdict == verdict and detail in outcome.detail, outcome
    assert copy.broken == ({"test_wrong.py::test_wrong"} if test == "test_wrong.py" else set())
    assert (tmp_path / "tree" / "product.py").read_text() == TREE["product.py"]


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    """A fault survives when all of its steps passed and one of them had a test; steps run once."""
    tests = ("tests/test_masks.py", "tests/test_triton_interpreter.py", QUICK)
    faults = [Fault(what, "a.py", "x", "y", tests) for what in ("one", "two", "three")]
    short, quick, long = steps_of(faults[0])
    assert (short, quick, long) == (tests[:1], tests[2:], tests[1:2])
    record = Record(faults, "a draw", tmp_path / "faults.json")
    record.add(0, long, Outcome("killed", "FAILED there"))
    record.add(0, short, Outcome("survived", "3 passed"))  # this step had begun before
    for step in (short, quick):
        record.add(1, step, Outcome("survived", "3 passed"))
    for step in (short, quick, long):
        record.add(2, step, Outcome("survived", "3 skipped"))
    record.add(1, long, Outcome("late", ""))
    record = Record(faults, "a draw", tmp_path / "faults.json")
    assert record.left() == [(2, 1, long)]
    record.add(1, long, Outcome("survived", "3 skipped"))
    assert [row["verdict"] for row in record.rows] == ["killed", "survived", "error"]
    assert "| a.py | two | 3 passed |" in table_of(record.rows)


def test_a_planted_fault_goes_when_its_tests_raise(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(KeyError), planted(Fault("a value", "a.py", "x = 1", "x = 2", ()), tmp_path):
        assert (tmp_path / "a.py").read_text() == "x = 2\n"
        raise KeyError
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
