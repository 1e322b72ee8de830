"""Plant faults in copies of this tree, one at a time, run their tests there, and print which faults survive.

    python tests/mutants/run.py                              # the written faults, faults.py
    python tests/mutants/run.py --only csrc triton_kernels   # faults of some files or folders
    python tests/mutants/run.py --match lse                  # faults with this word in their description
    python tests/mutants/run.py --draw 50 --seed 1           # faults drawn from the syntax trees, draw.py

The tests of a fault have to pass without it first. A fault is killed when one of its tests then fails, or does not end;
it survives when all pass. A copy that does not compile, or has none of the tests, is an error.
The exit status is 0 when every fault was killed, 1 when one survived, 2 on an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import pytest  # noqa: E402
from mutants.draw import QUICK, draw  # noqa: E402
from mutants.faults import FAULTS, Fault  # noqa: E402

SECONDS = 900  # a fault that makes its tests hang is killed after as many
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
# csrc runs on the emulated GPU, built anew for each fault; head dims 32, 64, 96 and 128 reach what the faults change.
EMULATED = Path("build") / "emulated.so"
EMULATE = (sys.executable, "tests/emulation/build.py", str(EMULATED), "--head-dims", "32,64,96,128", "--dtypes", "bf16")


class Outcome(NamedTuple):
    """The end of one fault: `verdict` is "killed", "survived" or "error", `detail` the reason in one line."""

    fault: Fault
    verdict: str
    detail: str
    seconds: float


def place_of(fault: Fault, root: Path = ROOT) -> str:
    """The text of the file of a fault.

    Raises:
        ValueError: the file is not there, or does not have the text that the fault replaces exactly once.
    """
    if not (root / fault.file).is_file():
        raise ValueError(f'the fault "{fault.what}" has no file {fault.file}: it needs another row, or none')
    text = (root / fault.file).read_text()
    count = text.count(fault.before)
    if count != 1:
        raise ValueError(
            f'the fault "{fault.what}" does not apply: {fault.file} has its text {count} times; '
            f"it needs to be there once: {fault.before!r}"
        )
    return text


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """The fault in the tree at `root`, for the time of the block."""
    path, text = root / fault.file, place_of(fault, root)
    path.write_text(text.replace(fault.before, fault.after))
    try:
        yield
    finally:
        path.write_text(text)


def copy_tree(folder: Path) -> None:
    """Copy what git tracks or would track, and the compiled extension where there is one."""
    listed = subprocess.run(
        ("git", "ls-files", "-co", "--exclude-standard"), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in (*listed.split("\n"), "flash_dmattn/_C.abi3.so"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(tests: tuple[str, ...], root: Path, *, emulated: bool = False) -> tuple[str, str]:
    """("passed", "failed" or "error", the line that says why) for these tests in the tree at `root`.

    The quick suite comes last, and of each of its tests a sample.
    """
    nearest = tuple(test for test in tests if test != QUICK)
    said = _run_tests(nearest, root, emulated=emulated)
    return _run_tests((QUICK,), root, FLASH_DMATTN_SAMPLE="12") if QUICK in tests and said[0] == "passed" else said


def _run_tests(tests: tuple[str, ...], root: Path, *, emulated: bool = False, **variables: str) -> tuple[str, str]:
    environment = {**os.environ, "CI": "true", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(root)  # a script that tests start would import what is installed, without the fault
    environment |= variables
    if emulated:
        built = subprocess.run(EMULATE, cwd=root, capture_output=True, text=True)
        if built.returncode != 0:
            return "error", "the emulated extension does not compile: " + last_line(built.stdout + built.stderr)
        environment["FLASH_DMATTN_EMULATED"] = str(root / EMULATED)
    try:
        done = subprocess.run(
            (*PYTEST, *tests), cwd=root, capture_output=True, text=True, env=environment, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "failed", f"does not end in {SECONDS} s"
    if done.returncode == 0 and " passed" in last_line(done.stdout):
        return "passed", last_line(done.stdout)
    if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "error", f"no test ran: {last_line(done.stdout)}"
    # The package may not even be imported.
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "failed", failures[0] if failures else last_line(done.stdout + done.stderr)


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class Judge:
    """Copies of the tree to plant faults in, and the tests that have passed there without one."""

    def __init__(self, folder: Path, copies: int) -> None:
        self._free: Queue[Path] = Queue()
        self._sound: dict[tuple[str, ...], str] = {}
        for number in range(copies):
            copy_tree(folder / str(number))
            self._free.put(folder / str(number))

    def try_without(self, fault: Fault) -> None:
        """Run the tests of a fault in a tree without it, once for all faults with these tests."""
        root = self._free.get()
        try:
            self._sound[fault.tests] = try_without(fault, root)
        finally:
            self._free.put(root)

    def judge(self, fault: Fault) -> Outcome:
        """Plant the fault in a copy and run its tests."""
        root = self._free.get()
        try:
            return judge(fault, root, self._sound[fault.tests])
        finally:
            self._free.put(root)


def needs_emulation(fault: Fault) -> bool:
    """Whether the tests of a fault run on the emulated GPU."""
    return fault.file.startswith("csrc/")


def try_without(fault: Fault, root: Path) -> str:
    """Run the tests of a fault in a tree without it: the reason why they do not pass, or ""."""
    said, detail = run_tests(fault.tests, root, emulated=needs_emulation(fault))
    return "" if said == "passed" else f"without the fault: {said}, {detail}"


def judge(fault: Fault, root: Path, unsound: str = "") -> Outcome:
    """Plant a fault in the tree at `root` and run its tests; `unsound` is what `try_without` says of them."""
    start = time.monotonic()
    said, detail = "error", unsound
    if not unsound:
        try:
            with planted(fault, root):
                said, detail = run_tests(fault.tests, root, emulated=needs_emulation(fault))
        except ValueError as error:
            detail = str(error)
    verdict = {"passed": "survived", "failed": "killed", "error": "error"}[said]
    return Outcome(fault, verdict, detail, time.monotonic() - start)


def judge_all(faults: list[Fault], jobs: int) -> Iterator[Outcome]:
    """Judge faults in this many copies of the tree at a time."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = Judge(Path(folder), jobs)
        # Tests without a fault come first: between two faults, the extension of csrc would be built once more for them.
        list(pool.map(copies.try_without, {fault.tests: fault for fault in faults}.values()))
        yield from pool.map(copies.judge, faults)


def table_of(outcomes: list[Outcome]) -> str:
    """A table of the faults that were not killed."""
    rows = [f"| {o.fault.file} | {o.fault.what.replace('|', chr(92) + '|')} | {o.detail} |" for o in outcomes]
    return "\n".join(("| file | fault | tests |", "| --- | --- | --- |", *rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATH", help="only faults of files that begin so")
    parser.add_argument("--match", default="", metavar="WORD", help="only faults with this word in their description")
    parser.add_argument("--draw", type=int, metavar="N", help="draw N faults in the place of those that are written")
    parser.add_argument("--seed", type=int, default=0, help="of --draw")
    parser.add_argument("--jobs", type=int, default=2, help="copies to work in at once (2)")
    parser.add_argument("--out", type=Path, help="write every outcome to this JSON file, after each fault")
    options = parser.parse_args()
    only = tuple(options.only)
    faults = list(FAULTS) if options.draw is None else draw(options.draw, options.seed, only)
    faults = [fault for fault in faults if options.match in fault.what and fault.file.startswith(only)]
    outcomes: list[Outcome] = []
    for outcome in judge_all(faults, options.jobs):
        outcomes.append(outcome)
        fault = outcome.fault
        place = f"{len(outcomes):3d}/{len(faults)}  {outcome.verdict:8}  {outcome.seconds:5.0f} s"
        print(f"{place}  {fault.file}: {fault.what}", flush=True)
        if options.out is not None:
            name = "written by hand" if options.draw is None else f"{options.draw} of seed {options.seed}"
            rows = [{"file": o.fault.file, "what": o.fault.what, "verdict": o.verdict} for o in outcomes]
            options.out.write_text(json.dumps({"drawn": name, "faults": rows}, indent=1))
    left = [outcome for outcome in outcomes if outcome.verdict != "killed"]
    print(f"\n{len(outcomes) - len(left)} of {len(outcomes)} faults were killed")
    if left:
        print(table_of(left))
    return 2 if any(o.verdict == "error" for o in left) else 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
