"""Plant each fault of the tables in a copy of this tree, run its tests there, and print which faults they noticed.

    python tests/mutants/run.py                  # all of them: about an hour on two cores
    python tests/mutants/run.py --only eager nn  # some areas
    python tests/mutants/run.py --match lse      # those with this word in their description

The tests of a fault have to pass without it first. A fault is killed when one of its tests then fails, or does not end;
it survives when all pass. Anything else, such as a copy that does not compile, is an error. Exit status: 0 when every
fault was killed, 1 when one survived, 2 on an error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.fault import Fault  # noqa: E402

AREAS = (
    *("front_end", "profile", "eager", "masks", "nn", "integrations"),
    *("triton", "sequences", "flex", "dropout", "sdpa", "distributed", "dtensor", "csrc", "build"),
)
SECONDS = 900  # a fault that makes its tests hang is killed after as many
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
# csrc runs on the emulated GPU, built anew for each fault; head dims 32, 64, 96 and 128 reach what the faults change.
EMULATED = Path("build") / "emulated.so"
EMULATE = (sys.executable, "tests/emulation/build.py", str(EMULATED), "--head-dims", "32,64,96,128", "--dtypes", "bf16")


Result = TypeVar("Result")


class Outcome(NamedTuple):
    """What came of one fault: `verdict` is "killed", "survived" or "error", `detail` the reason in one line."""

    area: str
    fault: Fault
    verdict: str
    detail: str
    seconds: float


def faults_of(area: str) -> tuple[Fault, ...]:
    """The table of one area, `tests/mutants/<area>.py`."""
    table: tuple[Fault, ...] = importlib.import_module(f"mutants.{area}").FAULTS
    return table


def place_of(fault: Fault, root: Path = ROOT) -> str:
    """The text of the file of a fault.

    Raises:
        ValueError: the text that the fault replaces does not stand there exactly once.
    """
    text = (root / fault.file).read_text()
    count = text.count(fault.before)
    if count != 1:
        raise ValueError(f"{fault.file} has {count} times, and not once: {fault.before!r}")
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


def run_tests(area: str, tests: tuple[str, ...], root: Path) -> tuple[str, str]:
    """("passed", "failed" or "error", the line that says why) for these tests in the tree at `root`."""
    environment = {**os.environ, "CI": "true", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(root)  # a script that tests start would import what is installed, without the fault
    if area == "csrc":
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
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1:
        return "failed", failures[0] if failures else last_line(done.stdout)
    if done.returncode == 0 and " passed" in last_line(done.stdout):
        return "passed", last_line(done.stdout)
    return "error", f"pytest ended with {done.returncode}: {last_line(done.stdout + done.stderr)}"


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def try_without(area: str, tests: tuple[str, ...], root: Path, sound: dict[tuple[str, ...], str]) -> None:
    """Run these tests in the tree at `root` as it is, unless `sound` has them already: what was wrong, or ""."""
    if tests not in sound:
        said, detail = run_tests(area, tests, root)
        sound[tests] = "" if said == "passed" else f"without the fault: {said}, {detail}"


def judge(area: str, fault: Fault, root: Path, sound: dict[tuple[str, ...], str]) -> Outcome:
    """Plant one fault in the tree at `root` and run its tests; `sound` as `try_without` leaves it."""
    start = time.monotonic()
    try:
        place_of(fault, root)
        try_without(area, fault.tests, root, sound)
        if sound[fault.tests]:
            return Outcome(area, fault, "error", sound[fault.tests], time.monotonic() - start)
        with planted(fault, root):
            said, detail = run_tests(area, fault.tests, root)
    except ValueError as error:
        said, detail = "error", str(error)
    verdict = {"passed": "survived", "failed": "killed", "error": "error"}[said]
    return Outcome(area, fault, verdict, detail, time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=AREAS, default=AREAS, metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--match", default="", metavar="WORD", help="only faults with this word in their description")
    parser.add_argument("--jobs", type=int, default=2, help="copies to work in at once (2)")
    given = parser.parse_args()
    work = [(area, fault) for area in given.only for fault in faults_of(area) if given.match in fault.what]
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copies: Queue[Path] = Queue()
        sound: dict[tuple[str, ...], str] = {}
        for number in range(given.jobs):
            copy_tree(Path(folder) / str(number))
            copies.put(Path(folder) / str(number))

        def in_a_copy(do: Callable[..., Result], area: str, what: object) -> Result:
            root = copies.get()
            try:
                return do(area, what, root, sound)
            finally:
                copies.put(root)

        outcomes = []
        with ThreadPoolExecutor(given.jobs) as pool:
            # All of them first: between two faults the extension of csrc would be built once more without one.
            tests = list(dict.fromkeys((area, fault.tests) for area, fault in work))
            list(pool.map(lambda item: in_a_copy(try_without, *item), tests))
            for outcome in pool.map(lambda item: in_a_copy(judge, *item), work):
                outcomes.append(outcome)
                print(
                    f"{len(outcomes):3d}/{len(work)}  {outcome.verdict:8}  {outcome.seconds:5.0f} s  "
                    f"{outcome.area:14}{outcome.fault.what}",
                    flush=True,
                )
                if outcome.verdict != "killed":
                    print(f"         {outcome.fault.file}: {outcome.detail}", flush=True)
    print(f"\n{'area':14}{'faults':>7}{'killed':>8}{'survived':>10}{'errors':>8}{'seconds':>9}")
    for area in (*given.only, "all"):
        rows = [o for o in outcomes if area in (o.area, "all")]
        counts = [sum(o.verdict == verdict for o in rows) for verdict in ("killed", "survived", "error")]
        print(f"{area:14}{len(rows):7}{counts[0]:8}{counts[1]:10}{counts[2]:8}{sum(o.seconds for o in rows):9.0f}")
    verdicts = {outcome.verdict for outcome in outcomes}
    return 2 if "error" in verdicts else 1 if "survived" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
