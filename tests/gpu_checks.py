"""Every check that needs a GPU, side by side on one machine: `python tests/gpu_checks.py --help`.

    python tests/gpu_checks.py                      # all of it; the same command goes on where the last one stopped
    python tests/gpu_checks.py --only bf16 calls --budget 500
    python tests/gpu_checks.py --only racecheck --racecheck-extension build/race/_C.abi3.so
    python tests/gpu_checks.py --forced                # triton as for sm_80, sm_86, sm_89 and sm_120, on a Hopper GPU
    python tests/gpu_checks.py --forced sm_80 --only bf16 gpu

Each part is a process for one core and some two minutes. They run at the same time as far as there are cores, each on
the GPU that has the fewest. Each writes a log. checks.json in the same folder says after every part what has come of it
at this commit, and fuzz.json counts the random calls; `reliability.py` reads both.
Exit status: 0; 1 where a part failed; 2 where there is no GPU; 3 where parts are left, the budget being spent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.files import write_whole  # noqa: E402

PASSED, FAILED, UNFINISHED = 0, 1, 3
TOOLS = ("memcheck", "initcheck", "racecheck")
SANITIZED = {"triton": 40, "cuda": 220}  # at least as many as there are calls in kernel_calls.py
SANITIZED_AT_ONCE = 10
SANITIZED_INTERVALS = 5
# Tests that memory checkers watch: the tools, the backend whose kernels run, seconds, and what pytest takes. Tests of
# cuda compare on the GPU, where racecheck warns of cuBLAS, and initcheck of reading what TMA has stored.
SANITIZED_TESTS = {
    "found": (TOOLS, "triton", 90, ("tests/test_find_intervals.py",)),
    "whole_tiles": (("memcheck",), "cuda", 180, ("tests/test_cuda_backward.py", "-k", "whole_tiles")),
}
SECONDS_TO_REPORT = 10
# Random calls of `fuzz.py`, 10,000 in all: by place how many processes draw them, how many calls that the place serves
# each, and in about how many seconds. Triton compiles most of its calls anew.
CALLS = {
    "cuda": (50, 180, 170),
    "triton": (28, 20, 170),
    "cuda:triton": (5, 18, 150),
    "triton:cuda": (5, 18, 150),
    "eager": (4, 65, 100),
}
CALLS_AT_ONCE = 10  # such processes on a GPU: their calls are large, and none knows what memory others hold
RECORD = "fuzz.json"


class Suite(NamedTuple):
    """Files of tests, in shares that take a core about so many seconds each.

    `forced` is the number of shares where triton runs as for another GPU; 0 leaves them out there.
    """

    files: tuple[str, ...]
    shares: int
    seconds: int
    chosen: str = ""
    forced: int = 0
    dtype: str = ""


KERNELS = "triton or cuda"
# cuda has no fp32 kernels. triton's differ between fp16 and bf16 only in a type; random calls draw both.
SUITES = {
    "sizes": Suite(("gpu_sizes", "cuda_pack"), 2, 100),
    "fp32": Suite(("calls", "edges"), 24, 150, "triton", 45, "float32"),
    "bf16": Suite(("calls", "edges"), 24, 150, KERNELS, 45, "bfloat16"),
    "fp16": Suite(("calls", "edges"), 8, 150, "cuda", 0, "float16"),
    "gradients": Suite(("cuda_backward",), 28, 150),
    "layouts": Suite(("sequences", "cuda_sequences", "sequence_tiles", "triton_sequences"), 12, 150, "", 4),
    "gpu": Suite(("gpu",), 6, 120, KERNELS, 24),
    "serving": Suite(("append", "trees", "nn", "sequence_pack"), 4, 150, "", 2),
    "dropout": Suite(("dropout", "cuda_dropout", "sinks"), 3, 120, "", 2),
    "bugs": Suite(("predecessor_bugs",), 1, 120, KERNELS, 1),
    "ways": Suite(("plans", "heads_first", "cuda_dbias_out", "cuda_decoding", "cuda_parts"), 1, 120),
    "forward_ways": Suite(("cuda_one_mask_row", "cuda_held_bias", "cuda_relative", "projected"), 2, 120),
    "found": Suite(("find_intervals", "interval_mask", "lists", "safety"), 4, 120),
    "parts": Suite(("cuda_kv_splits", "cuda_rare", "cuda_max_scores"), 1, 100),
}
# Random calls of a test of these files: `fuzz.py` draws more of the same.
EXAMPLES = "4"
# GPUs whose kernels a Hopper GPU runs. Large sizes, which no architecture decides, and memory checkers are left out.
FORCED = ("sm_80", "sm_86", "sm_89", "sm_120")
FORCED_SECONDS = 90
FORCED_CALLS = 12  # of each process that draws calls of triton
# initcheck does not see what TMA stores, and reports each copy of it to the host. So it checks what kernels read, and
# leaves copies alone: what they bring back is compared with fp64 in the same calls.
FLAGS_OF_TOOL = {"initcheck": ("--check-api-memory-access", "no")}


class Part(NamedTuple):
    """One process for one core; `seconds` is what an H200 machine took."""

    name: str
    command: tuple[str, ...]
    seconds: int
    environment: dict[str, str] = {}
    needs_racecheck_build: bool = False

    @property
    def draws(self) -> bool:
        """Whether it runs random calls, whose record lies in the folder of the logs: it goes on where it was ended."""
        return RECORD in self.command


def suite_parts(name: str, shares: int, seconds: int, chosen: str) -> list[Part]:
    """A part for each share of a suite, of the tests that -k chooses."""
    suite = SUITES[name]
    flags = ("-q", "-rf", "-p", "no:cacheprovider", "-p", "no:benchmark", *(("-k", chosen) if chosen else ()))
    command = (sys.executable, "-m", "pytest", *flags, *(f"tests/test_{file}.py" for file in suite.files))
    settings = {"FLASH_DMATTN_EXAMPLES": EXAMPLES}
    settings |= {"FLASH_DMATTN_TEST_DTYPE": suite.dtype} if suite.dtype else {}
    return [
        Part(f"{name}-{share}", command, seconds, {**settings, "FLASH_DMATTN_SHARE": f"{share}/{shares}"})
        for share in range(shares)
    ]


def calls_parts() -> list[Part]:
    """The processes that draw random calls; no two draw the same number."""
    places = [(place, index) for place, (processes, _, _) in CALLS.items() for index in range(processes)]
    parts = []
    for number, (place, index) in enumerate(places):
        _, calls, seconds = CALLS[place]
        which = ("--part", str(number), "--processes", str(len(places)), "--out", RECORD)
        command = (sys.executable, "tests/fuzz.py", place, "--calls", str(calls), *which)
        parts.append(Part(f"calls-{place.replace(':', '-')}-{index}", command, seconds))
    return parts


def sanitizer_parts() -> list[Part]:
    """A part for each tool and ten of the calls of a backend, others for random interval masks and for tests."""
    parts = []
    for tool in TOOLS:
        for backend, first in (("cuda", 0), ("cuda", 100), ("cuda", 200), ("triton", 300)):
            script = ("tests/run_calls.py", backend, "intervals", str(first), str(SANITIZED_INTERVALS), "cpu")
            parts.append(_sanitized(f"{tool}-intervals-{backend}-{first}", tool, backend, script))
        for name, (tools, backend, seconds, chosen) in SANITIZED_TESTS.items():
            if tool in tools:
                command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
                parts.append(_sanitized(f"{tool}-{name}", tool, backend, command)._replace(seconds=seconds))
        for backend, calls in SANITIZED.items():
            for first in range(0, calls, SANITIZED_AT_ONCE):
                script = ("tests/run_calls.py", backend, "kernels", str(first), str(SANITIZED_AT_ONCE), "cpu")
                parts.append(_sanitized(f"{tool}-{backend}-{first}", tool, backend, script))
    return parts


def _sanitized(name: str, tool: str, backend: str, script: Sequence[str]) -> Part:
    flags = ("--tool", tool, "--error-exitcode", "1", *FLAGS_OF_TOOL.get(tool, ()))
    check = ("compute-sanitizer", *flags, sys.executable, *script)
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Part(name, check, 90, alone, tool == "racecheck" and backend != "triton")


def all_parts() -> list[Part]:
    """Everything docs/testing.md names, as it starts: large sizes while memory is free, then the longest first."""
    command = (sys.executable, "-m", "flash_dmattn")
    parts = [part for name, suite in SUITES.items() for part in suite_parts(name, *suite[1:4])]
    parts += [
        Part("verify", (*command, "info", "--verify"), 200),
        Part("demo", (*command, "demo", "--quick"), 100),
        *calls_parts(),
        *sanitizer_parts(),
    ]
    return sorted(parts, key=lambda part: (not part.name.startswith("sizes-"), -part.seconds))


def forced_parts(archs: Sequence[str]) -> list[Part]:
    """The parts of triton, with its kernels made for other GPUs: first the first share of each part for every GPU."""
    suites = {name: suite for name, suite in SUITES.items() if suite.forced}
    each = [suite_parts(name, suite.forced, FORCED_SECONDS, "triton") for name, suite in suites.items()]
    draws = [part for part in calls_parts() if part.name.startswith("calls-triton-") and "triton" in part.command]
    number = draws[0].command.index("--calls") + 1
    each.append(
        [
            part._replace(command=(*part.command[:number], str(FORCED_CALLS), *part.command[number + 1 :]))
            for part in draws
        ]
    )
    files = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_forced_arch.py")
    each.append([Part("instructions", (*files, "-k", "on_the_card"), 20)])
    return [
        part._replace(
            name=f"{arch}-{part.name}",
            environment={**part.environment, "TRITON_OVERRIDE_ARCH": arch.replace("_", "")},
        )
        for shares in zip_longest(*each)
        for part in shares
        if part is not None
        for arch in archs
    ]


@dataclass
class Board:
    """The outcome of each part at one commit, kept in a file."""

    path: Path
    commit: str
    device: str = "GPU"
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, commit: str, device: str = "GPU") -> Board:
        """Load the board of this commit; results of another commit are forgotten, random calls among them."""
        board = cls(path, commit, device)
        if path.exists():
            content = json.loads(path.read_text())
            if content["commit"] == commit:
                board.rows = content["parts"]
        if not board.rows:
            for record in (*path.parent.glob(f"*{RECORD}"), *path.parent.glob("*fuzz.*.json")):
                record.unlink()
        return board

    def add(self, part: Part, status: str, seconds: float, last_line: str) -> None:
        """Write down a part that has ended."""
        self.rows[part.name] = {"status": status, "seconds": round(seconds), "last_line": last_line}
        content = {"commit": self.commit, "device": self.device, "parts": self.rows}
        write_whole(self.path, json.dumps(content, indent=1))

    def has(self, part: Part) -> bool:
        """Whether it need not run again; one that ran out of time does."""
        return self.rows.get(part.name, {}).get("status") == "passed"


@dataclass
class Running:
    """A part on its way."""

    part: Part
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    gpu: int


def run(
    parts: Sequence[Part],
    board: Board,
    folder: Path,
    *,
    slots: int,
    deadline: float,
    where: dict[str, Path],
    gpus: int = 1,
) -> int:
    """Run what the board has not; return the exit status.

    Args:
        parts: in the order in which they start.
        board: what is done already.
        folder: of the logs.
        slots: how many run at once, of random calls no more than `CALLS_AT_ONCE` on a GPU.
        deadline: on the monotonic clock; what still runs then is ended.
        where: the folder to run a part in, by name; the repository for others.
        gpus: how many GPUs share the parts.
    """
    waiting = [part for part in parts if not board.has(part)]
    running: list[Running] = []
    while running or (waiting and time.monotonic() < deadline):
        if time.monotonic() < deadline:
            left = deadline - time.monotonic()
            # Last what would not end in time, and would begin anew; a sort leaves the order of others.
            for part in sorted(waiting, key=lambda part: part.seconds > left and not part.draws):
                if len(running) >= slots:
                    break
                draws = [sum(each.gpu == gpu for each in running if each.part.draws) for gpu in range(gpus)]
                if part.draws and min(draws) >= CALLS_AT_ONCE:
                    continue
                taken = draws if part.draws else [sum(each.gpu == gpu for each in running) for gpu in range(gpus)]
                waiting.remove(part)
                running.append(start(part, folder, where.get(part.name, ROOT), taken.index(min(taken))))
        late = [each for each in running if each.process.poll() is None] if time.monotonic() >= deadline else []
        interrupt(late)
        for each in list(running):
            if each.process.poll() is None and each not in late:
                continue
            running.remove(each)
            finish(each, board, deadline + SECONDS_TO_REPORT if each in late else None)
        time.sleep(0.05)
    for part in waiting:  # the board names every part
        if part.name not in board.rows:
            board.add(part, "late", 0, "not started")
    counts = dict.fromkeys(("passed", "failed", "left"), 0)
    for part in parts:
        status = board.rows[part.name]["status"]
        counts["left" if status == "late" else status] += 1
    print(f"\n{len(parts)} parts: {', '.join(f'{count} {what}' for what, count in counts.items())}", flush=True)
    for line in forced_results(parts, board):
        print(line, flush=True)
    return FAILED if counts["failed"] else UNFINISHED if counts["left"] else PASSED


def forced_results(parts: Sequence[Part], board: Board) -> list[str]:
    """Add up the tests of each forced GPU, also of parts that ran out of time."""
    results: dict[str, Counter[str]] = {}
    for part in parts:
        row = board.rows.get(part.name)
        if row is not None and "TRITON_OVERRIDE_ARCH" in part.environment:
            counts = re.findall(r"(\d+) (passed|failed|skipped)", row["last_line"])
            each = results.setdefault(part.environment["TRITON_OVERRIDE_ARCH"], Counter())
            each.update({outcome: int(count) for count, outcome in counts})
    outcomes = ("passed", "failed", "skipped")
    return [f"{arch}: " + ", ".join(f"{each[x]} {x}" for x in outcomes) for arch, each in results.items()]


def start(part: Part, folder: Path, where: Path, gpu: int = 0) -> Running:
    log = folder / f"{part.name}.log"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = visible.split(",")[gpu] if visible else str(gpu)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": device, **part.environment}
    # A shell's background job ignores the signal that `interrupt` sends, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # The processes of several forced GPUs have the same numbers.
    record = str(folder / f"{environment.get('TRITON_OVERRIDE_ARCH', '')}{RECORD}")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [record if word == RECORD else word for word in part.command],
                cwd=where,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    return Running(part, process, log, time.monotonic(), gpu)


def interrupt(late: Sequence[Running]) -> None:
    """Ask parts to end; pytest then says what has failed so far."""
    for each in late:
        each.process.send_signal(signal.SIGINT)


def finish(each: Running, board: Board, end: float | None) -> None:
    """Write down and print what came of a part; of one that is late, what it has said until its end."""
    seconds = time.monotonic() - each.started
    if end is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(end - time.monotonic(), 0))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)  # its workers too
        each.process.wait()
    said = each.log.read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.strip()]
    status = "late" if end is not None else "passed" if each.process.returncode == 0 else "failed"
    last_line = lines[-1][:100] if lines else ""
    board.add(each.part, status, seconds, last_line)
    print(f"{status:10} {seconds:5.0f} s  {each.part.name:24} {last_line}", flush=True)


def find_gpus() -> list[str]:
    """Return the name of each GPU."""
    import torch  # here, for --list needs none

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def add_up_calls(folder: Path, commit: str) -> None:
    """Write the record of the random calls of all processes."""
    import fuzz  # here, for it imports torch

    record = folder / RECORD
    record.unlink(missing_ok=True)
    fuzz.merge(fuzz.tallies_beside(record), fuzz.Tally(record, commit))


def commit_of(folder: Path) -> str:
    """The commit that git names, or "unknown" where there is no repository."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts whose name contains one of these")
    parser.add_argument("--budget", type=float, default=3600, metavar="SECONDS", help="end what still runs then")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu_checks", metavar="DIR", help="logs and results"
    )
    parser.add_argument("--commit", default=None, help="what is checked, where git cannot tell")
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="cores to share out (default: all)")
    parser.add_argument(
        "--racecheck-extension",
        type=Path,
        metavar="FILE",
        help="the extension built with FLASH_DMATTN_RACECHECK=1; without it racecheck of cuda is left out",
    )
    parser.add_argument(
        "--forced",
        nargs="*",
        choices=FORCED,
        metavar="ARCH",
        help=f"run triton with its kernels made for these GPUs, on a Hopper one (default: {' '.join(FORCED)})",
    )
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    chosen = parser.parse_args(arguments)
    if chosen.slots < 1:
        parser.error(f"--slots is {chosen.slots}, and no part would start; it needs to be 1 or more")
    parts = all_parts() if chosen.forced is None else forced_parts(chosen.forced or FORCED)
    parts = [part for part in parts if not chosen.only or any(name in part.name for name in chosen.only)]
    if chosen.racecheck_extension is None:
        parts = [part for part in parts if not part.needs_racecheck_build]
    if chosen.list:
        for part in parts:
            print(f"{part.name:28} some {part.seconds} s")
        return PASSED
    gpus = find_gpus()
    if not gpus:  # the tests would skip, and pass
        parser.error("torch finds no GPU, and every part needs one; --list prints them")
    if shutil.which("compute-sanitizer") is None and any(part.command[0] == "compute-sanitizer" for part in parts):
        print("left out: memcheck, initcheck and racecheck (compute-sanitizer, of the CUDA toolkit, is not installed)")
        parts = [part for part in parts if part.command[0] != "compute-sanitizer"]
    folder = chosen.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + chosen.budget
    board = Board.load(folder / "checks.json", chosen.commit or commit_of(ROOT), gpus[0])
    with tempfile.TemporaryDirectory() as copy:
        where: dict[str, Path] = {}
        if chosen.racecheck_extension is not None:
            tree = Path(copy) / "tree"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build"))
            shutil.copy(chosen.racecheck_extension, tree / "flash_dmattn" / "_C.abi3.so")
            where = {part.name: tree for part in parts if part.needs_racecheck_build}
        status = run(parts, board, folder, slots=chosen.slots, deadline=deadline, where=where, gpus=len(gpus))
    if chosen.forced is None and any(part.draws for part in parts):
        add_up_calls(folder, board.commit)
    return status


if __name__ == "__main__":
    sys.exit(main())
