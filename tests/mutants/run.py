"""Plant faults in copies of this tree, one at a time, run their tests there, and print which faults survive.

    python tests/mutants/run.py                              # the written faults, faults.py
    python tests/mutants/run.py --only csrc triton_kernels   # faults of some files or folders
    python tests/mutants/run.py --match lse                  # faults with this word in their description
    python tests/mutants/run.py --draw 50 --seed 1           # faults drawn from the syntax trees, draw.py

A fault is killed when one of its tests fails with it and passes without it; it survives when all pass. A copy that does
not compile, or has none of the tests, is an error. Tests that fail without a fault are left out, and named.
The same command with the same `--out` goes on after the faults that are in this file.
The exit status is 0 when every fault was killed, 1 when one survived, 2 on an error or where the time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, PriorityQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
from mutants.draw import QUICK, draw  # noqa: E402
from mutants.faults import FAULTS, Fault  # noqa: E402

from benchmarks.files import write_whole  # noqa: E402

SECONDS = 900  # of one process; a fault that makes its tests hang is killed after as many
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
# csrc runs on the emulated GPU, built anew for each fault; head dims up to 192 reach what the faults change.
EMULATE = (sys.executable, "tests/emulation/build.py")
EMULATED_PARTS = ("--head-dims", "32,64,96,128,192", "--dtypes", "bf16")
# Files with these words take minutes, so they are processes of their own, after all others.
LONG = (
    *("interpreter", "compiled", "extension", "emulation", "_run", "demo", "training", "workers", "dtensor"),
    *("tangents", "triton_lists", "triton_sequences", "random"),
)
NOT_COPIED = (".git", ".gpu", ".venv*", "venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*_output")
OWN = ("HOME", "XDG_CACHE_HOME", "TMPDIR")
# Their entries are named by what was compiled, so a fault has entries of its own.
SHARED_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


class Outcome(NamedTuple):
    """The end of a fault, or of some of its tests: "killed", "survived", "error" or "late", and why in one line."""

    verdict: str
    detail: str


class Ran(NamedTuple):
    """The end of one process: its exit status, the line that says why, and the test that failed, where one did."""

    status: int
    line: str
    failed: str | None = None

    @property
    def is_passed(self) -> bool:
        """Whether no test failed; all may have been skipped or left out."""
        return self.status in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


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


def steps_of(fault: Fault) -> list[tuple[str, ...]]:
    """The tests of a fault by process: its short files, a sample of the quick suite, then its long files."""
    nearest = [test for test in fault.tests if test != QUICK]
    long = [test for test in nearest if any(word in test.partition("::")[0] for word in LONG)]
    short = tuple(test for test in nearest if test not in long)
    quick = [(QUICK,)] if QUICK in fault.tests else []
    return [*([short] if short else []), *quick, *((test,) for test in long)]


class Copy:
    """A copy of the tree to plant faults in, with a home of its own.

    Args:
        root: its folder.
        broken: tests that fail without a fault, of all copies.
    """

    def __init__(self, root: Path, broken: set[str]) -> None:
        self.root, self.broken = root, broken

    def judge(self, fault: Fault, tests: tuple[str, ...], is_over: Callable[[], bool] = lambda: False) -> Outcome:
        """Run some tests of a fault, and what fails without it; they are left out where they fail then, too.

        Args:
            fault: the fault.
            tests: its tests, or some of them.
            is_over: whether nobody waits for the outcome any more; it is "late" then.
        """
        is_emulated = fault.file.startswith("csrc/")
        while True:
            try:
                with planted(fault, self.root):
                    ran = self._run(tests, "planted.so" if is_emulated else None, is_over)
                if ran.is_passed:
                    return Outcome("survived", ran.line)
                if ran.failed in self.broken:  # another copy has found out meanwhile
                    continue
                again = tests if ran.failed is None else (ran.failed,)
                without = self._run(again, "sound.so" if is_emulated else None, is_over)
            except ValueError as error:
                return Outcome("error", str(error))
            if is_over():
                return Outcome("late", "the time is over")
            if without.is_passed and " passed" in without.line:
                return Outcome("killed", ran.line)
            if without.failed is None:  # nothing to leave out
                return Outcome("error", f"without the fault: {without.line}")
            self.broken.add(without.failed)

    def _run(self, tests: tuple[str, ...], emulated: str | None, is_over: Callable[[], bool]) -> Ran:
        environment = {**os.environ, "CI": "true", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        # First: a script that tests start would import what is installed.
        environment["PYTHONPATH"] = os.pathsep.join((str(self.root), os.environ.get("PYTHONPATH", "")))
        for name in (*OWN, *SHARED_CACHES):
            folder = self.root.parent if name in SHARED_CACHES else self.root
            environment[name] = f"{folder}.{name.lower()}"
            Path(environment[name]).mkdir(exist_ok=True)
        if QUICK in tests:
            environment["FLASH_DMATTN_SAMPLE"] = "12"
        if emulated is not None:
            environment["FLASH_DMATTN_EMULATED"] = str(self._emulate(emulated))
        without = [f"--deselect={test}" for test in sorted(self.broken)]
        with tempfile.TemporaryFile("w+") as said:  # a child that lives on would hold a pipe open
            process = subprocess.Popen(
                (*PYTEST, *without, *tests), cwd=self.root, stdout=said, stderr=said, env=environment,
                start_new_session=True,
            )  # fmt: skip
            end = time.monotonic() + SECONDS
            while process.poll() is None and time.monotonic() < end and not is_over():
                time.sleep(0.2)
            status = process.poll()
            end_group(process)
            if status is None:
                return Ran(1, f"does not end in {SECONDS} s")
            said.seek(0)
            text = said.read()
        failures = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if not failures:  # the package may not even be imported
            return Ran(status, last_line(text))
        return Ran(status, failures[0], failures[0].partition(" ")[2].partition(" - ")[0])

    def _emulate(self, name: str) -> Path:
        """Build the extension for the emulated GPU; the one without a fault is built once."""
        library = self.root / "build" / name
        if name == "planted.so" or not library.exists():
            command = (*EMULATE, str(library.relative_to(self.root)), *EMULATED_PARTS)
            built = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            if built.returncode != 0:
                raise ValueError(f"the emulated extension does not compile: {last_line(built.stdout + built.stderr)}")
        return library


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process, and all that it has started."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class Record:
    """The outcome of each fault, in a file where there is one: its verdict, and the steps that it survived so far."""

    def __init__(self, faults: list[Fault], name: str, file: Path | None) -> None:
        self.faults, self.name, self.file, self.broken = faults, name, file, set[str]()
        self._lock = Lock()
        self._begun = time.monotonic()
        known = json.loads(file.read_text())["faults"] if file is not None and file.exists() else []
        rows = {(row["file"], row["what"]): row for row in known}
        empty = {"verdict": "", "by": "", "survived": []}
        self.rows: list[dict[str, Any]] = [
            rows.get((fault.file, fault.what), {"file": fault.file, "what": fault.what, **empty, "survived": []})
            for fault in faults
        ]

    def left(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """(number of the step, number of the fault, tests) of all that has to run; steps come before later ones."""
        return [
            (step, number, tests)
            for number, (fault, row) in enumerate(zip(self.faults, self.rows))
            if not row["verdict"]
            for step, tests in enumerate(steps_of(fault))
            if " ".join(tests) not in row["survived"]
        ]

    def add(self, number: int, tests: tuple[str, ...], outcome: Outcome) -> None:
        """Write down what came of some tests of a fault, and say it where it is the end of the fault."""
        with self._lock:
            row, fault = self.rows[number], self.faults[number]
            if row["verdict"] or outcome.verdict == "late":
                return
            if outcome.verdict == "survived":
                row["survived"].append(" ".join(tests))
                row["by"] = max(row["by"], outcome.detail, key=lambda line: " passed" in line)
                if len(row["survived"]) == len(steps_of(fault)):
                    has_tests = " passed" in row["by"]
                    row.update(
                        verdict="survived" if has_tests else "error", **({} if has_tests else {"by": "no test ran"})
                    )
            else:
                row.update(verdict=outcome.verdict, by=outcome.detail)
            if row["verdict"]:
                done = sum(bool(row["verdict"]) for row in self.rows)
                place = f"{done:3d}/{len(self.rows)}  {time.monotonic() - self._begun:5.0f} s  {row['verdict']:8}"
                print(f"{place}  {fault.file}: {fault.what}", flush=True)
            if self.file is not None:
                write_whole(self.file, json.dumps({"drawn": self.name, "faults": self.rows}, indent=1))


def judge_all(record: Record, processes: int, seconds: float) -> None:
    """Run the tests of all faults, the nearest of each before the others, until all are judged or the time is over."""
    queue: PriorityQueue[tuple[int, int, tuple[str, ...]]] = PriorityQueue()
    for step in record.left():
        queue.put(step)
    end = time.monotonic() + seconds

    def work(root: Path) -> None:
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        copy = Copy(root, record.broken)
        while time.monotonic() < end:
            try:
                _, number, tests = queue.get_nowait()
            except Empty:
                return
            row = record.rows[number]
            if not row["verdict"]:
                over = partial(lambda row: bool(row["verdict"]) or time.monotonic() > end, row)
                record.add(number, tests, copy.judge(record.faults[number], tests, over))

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        threads = [Thread(target=work, args=(Path(folder) / "copies" / str(number),)) for number in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def table_of(rows: list[dict[str, Any]]) -> str:
    """A table of the faults that were not killed."""
    lines = [f"| {row['file']} | {row['what'].replace('|', chr(92) + '|')} | {row['by']} |" for row in rows]
    return "\n".join(("| file | fault | tests |", "| --- | --- | --- |", *lines))


def main() -> int:
    """Judge the faults of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATH", help="only faults of files that begin so")
    parser.add_argument("--match", default="", metavar="WORD", help="only faults with this word in their description")
    parser.add_argument("--draw", type=int, metavar="N", help="draw N faults in the place of those that are written")
    parser.add_argument("--seed", type=int, default=0, help="of --draw")
    parser.add_argument("--processes", type=int, default=2, help="copies to work in at once (2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many")
    parser.add_argument("--out", type=Path, help="write every outcome to this JSON file, and go on after those in it")
    options = parser.parse_args()
    only = tuple(options.only)
    faults = list(FAULTS) if options.draw is None else draw(options.draw, options.seed, only)
    faults = [fault for fault in faults if options.match in fault.what and fault.file.startswith(only)]
    name = "written by hand" if options.draw is None else f"{options.draw} of seed {options.seed}"
    record = Record(faults, name, options.out)
    judge_all(record, options.processes, options.seconds)
    verdicts = Counter(row["verdict"] for row in record.rows)
    print(f"\n{verdicts['killed']} of {len(faults)} faults were killed, {verdicts['']} are not judged yet")
    left = [row for row in record.rows if row["verdict"] in ("survived", "error")]
    if left:
        print(table_of(left))
    for test in sorted(record.broken):
        print(f"fails without a fault: {test}")
    return 2 if verdicts["error"] or verdicts[""] else 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
