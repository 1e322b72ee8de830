"""Every check that needs a GPU, side by side on one machine: `python tests/gpu_checks.py --help`.

    python tests/gpu_checks.py                      # all of it; the same command goes on where the last one stopped
    python tests/gpu_checks.py --only bf16 random --budget 500
    python tests/gpu_checks.py --only racecheck --racecheck-extension build/race/_C.abi3.so
    python tests/gpu_checks.py --forced                # triton as for sm_80, sm_86, sm_89 and sm_120, on a Hopper GPU
    python tests/gpu_checks.py --forced sm_80 --only bf16 gpu

Parts run at the same time as far as there are cores for their workers, the longest first, each on the GPU that has the
fewest. Each writes a log, and checks.json in the same folder says after every part what has come of it at this commit.
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
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.files import write_whole  # noqa: E402

PASSED, FAILED, UNFINISHED = 0, 1, 3
TOOLS = ("memcheck", "initcheck", "racecheck")
SANITIZED = {"triton": 40, "cuda": 190}  # at least as many as there are calls in kernel_calls.py
SANITIZED_AT_ONCE = 10
SECONDS_TO_REPORT = 10
# Random calls of `run_calls.py`: the first of each process, and how many. Triton compiles most of its calls anew, some
# six seconds each, so the numbers of triton are what 64 cores do in about as long as the suites take.
CALLS = {
    ("dense", "cuda"): (range(10000, 18000, 1000), 250),
    ("intervals", "cuda"): (range(1000, 5000, 1000), 250),
    ("intervals", "triton"): (range(5000, 9000, 1000), 25),
    ("short", "cuda"): (range(0, 8000, 1000), 60),
    ("short", "triton"): (range(20000, 30000, 1000), 15),
    ("sequences", "cuda"): (range(0, 8000, 1000), 250),
    ("sequences", "triton"): (range(10000, 22000, 1000), 25),
    ("trees", "triton"): (range(0, 8000, 1000), 20),
    ("trees", "eager"): (range(0, 2000, 1000), 200),
    ("tangents", "triton"): (range(0, 8000, 1000), 25),
}
SANITIZED_INTERVALS = 5
SHARED_SUITE = tuple(f"tests/test_{name}.py" for name in ("calls", "edges"))
# Files that run whole, with their workers and seconds; of random calls a part, for Triton compiles most of them anew.
GROUPS = {
    "serving": (4, 180, ("append", "trees", "nn", "sequence_pack")),
    "layouts": (8, 300, ("sequences", "cuda_sequences", "sequence_tiles", "triton_sequences")),
    "dropout": (3, 120, ("dropout", "cuda_dropout", "sinks")),
    "ways": (2, 60, ("plans", "heads_first", "cuda_dbias_out", "cuda_decoding", "cuda_parts")),
    "forward_ways": (2, 60, ("cuda_one_mask_row", "cuda_held_bias", "cuda_relative")),
    "found": (2, 60, ("find_intervals", "interval_mask", "lists", "safety")),
}
# GPUs whose kernels a Hopper GPU runs (tests/forced_arch.py), and the parts that run triton so. Some run in so many
# shares of one core each, so that a short run ends some of each for all GPUs. Others run whole, with so many workers
# and few random calls. Large sizes, which no architecture decides, and the memory checkers are left out.
FORCED = ("sm_80", "sm_86", "sm_89", "sm_120")
FORCED_SHARED = {"random": 50, "fp32": 45, "bf16": 45, "gpu": 24}
FORCED_WHOLE = {"layouts": 4, "serving": 2, "dropout": 2, "bugs": 1}
SHARE_SECONDS = 90
FORCED_PROCESSES, FORCED_CALLS = 2, 12  # that draw random calls of each kind, and how many calls each
FORCED_EXAMPLES = "4"
# initcheck does not see what TMA stores, and reports each copy of it to the host. So it checks what kernels read, and
# leaves copies alone: what they bring back is compared with fp64 in the same calls.
FLAGS_OF_TOOL = {"initcheck": ("--check-api-memory-access", "no")}


class Part(NamedTuple):
    """One process: `slots` of the machine's cores are kept for it, and `seconds` is what an H200 machine took."""

    name: str
    command: tuple[str, ...]
    slots: int
    seconds: int
    environment: dict[str, str] = {}
    needs_racecheck_build: bool = False


def pytest_part(name: str, files: Sequence[str], slots: int, seconds: int, chosen: str = "", **env: str) -> Part:
    """Some tests, in as many workers as it has slots."""
    select = ("-k", chosen) if chosen else ()
    flags = ("-q", "-rf", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(slots if slots > 1 else 0))
    return Part(name, (sys.executable, "-m", "pytest", *flags, *select, *files), slots, seconds, env)


def sanitizer_parts() -> list[Part]:
    """A part for each tool and ten of the calls of a backend, and some for random calls with interval masks."""
    parts = []
    for tool in TOOLS:
        for backend, first in (("cuda", 0), ("cuda", 100), ("cuda", 200), ("triton", 300)):
            script = ("tests/run_calls.py", backend, "intervals", str(first), str(SANITIZED_INTERVALS), "cpu")
            parts.append(_sanitized(f"{tool}-intervals-{backend}-{first}", tool, backend, script))
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_find_intervals.py")
        parts.append(_sanitized(f"{tool}-found", tool, "triton", command))
        for backend, calls in SANITIZED.items():
            for first in range(0, calls, SANITIZED_AT_ONCE):
                script = ("tests/run_calls.py", backend, "kernels", str(first), str(SANITIZED_AT_ONCE), "cpu")
                parts.append(_sanitized(f"{tool}-{backend}-{first}", tool, backend, script))
    return parts


def _sanitized(name: str, tool: str, backend: str, script: Sequence[str]) -> Part:
    flags = ("--tool", tool, "--error-exitcode", "1", *FLAGS_OF_TOOL.get(tool, ()))
    check = ("compute-sanitizer", *flags, sys.executable, *script)
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Part(name, check, 1, 120, alone, tool == "racecheck" and backend != "triton")


def all_parts() -> list[Part]:
    """Everything docs/testing.md names, in the order in which it starts: the longest first."""
    kernels = "triton or cuda"
    # cuda has no fp32 kernels. triton's differ between fp16 and bf16 in a type alone; random calls draw both.
    dtypes = {
        "fp32": ("float32", "triton", 440),
        "bf16": ("bfloat16", kernels, 440),
        "fp16": ("float16", "cuda", 150),
    }
    command = (sys.executable, "-m", "flash_dmattn")
    parts = [
        pytest_part("random", ["tests/test_random.py"], 10, 420, f"kernels and ({kernels})"),
        *(
            pytest_part(name, SHARED_SUITE, 8, seconds, chosen, FLASH_DMATTN_TEST_DTYPE=dtype)
            for name, (dtype, chosen, seconds) in dtypes.items()
        ),
        pytest_part("gradients", ["tests/test_cuda_backward.py"], 14, 300),
        pytest_part("parts", ["tests/test_cuda_kv_splits.py", "tests/test_cuda_rare.py"], 2, 40),
        pytest_part("gpu", ["tests/test_gpu.py"], 4, 160, kernels),
        pytest_part("bugs", ["tests/test_predecessor_bugs.py"], 2, 60, kernels),
        *(
            pytest_part(name, [f"tests/test_{each}.py" for each in files], slots, seconds, FLASH_DMATTN_EXAMPLES="24")
            for name, (slots, seconds, files) in GROUPS.items()
        ),
        pytest_part("sizes", ["tests/test_gpu_sizes.py", "tests/test_cuda_pack.py"], 2, 100),
        *(
            Part(f"{features}-{backend}-{first}", (sys.executable, *script), 1, 150)
            for (features, backend), (firsts, count) in CALLS.items()
            for first in firsts
            for script in [("tests/run_calls.py", backend, features, str(first), str(count))]
        ),
        Part("verify", (*command, "info", "--verify"), 1, 200),
        Part("demo", (*command, "demo", "--quick"), 1, 100),
        *sanitizer_parts(),
    ]
    return sorted(parts, key=lambda part: -part.seconds)


def forced_parts(parts: Sequence[Part], archs: Sequence[str]) -> list[Part]:
    """The parts of triton, with its kernels made for other GPUs: first the first share of each part for every GPU."""
    rounds: list[list[Part]] = []

    def add(share: int, part: Part) -> None:
        rounds.extend([] for _ in range(share + 1 - len(rounds)))
        rounds[share].append(part)

    processes = Counter[str]()
    for part in parts:
        files = [word for word in part.command if word.startswith("tests/")]
        if part.name in FORCED_SHARED:
            chosen = "kernels and triton" if part.name == "random" else "triton"
            for share in range(FORCED_SHARED[part.name]):
                variables = {**part.environment, "FLASH_DMATTN_SHARE": f"{share}/{FORCED_SHARED[part.name]}"}
                add(share, pytest_part(f"{part.name}-{share}", files, 1, SHARE_SECONDS, chosen, **variables))
        if part.name in FORCED_WHOLE:
            slots = FORCED_WHOLE[part.name]
            variables = {**part.environment, "FLASH_DMATTN_EXAMPLES": FORCED_EXAMPLES}
            add(0, pytest_part(part.name, files, slots, part.seconds // 3, "triton", **variables))
        kind, backend, _ = (*part.name.split("-"), "", "")[:3]
        if backend == "triton" and kind not in TOOLS and processes[kind] < FORCED_PROCESSES:
            command = (*part.command[:-1], str(FORCED_CALLS))
            add(processes[kind], part._replace(command=command, seconds=SHARE_SECONDS))
            processes[kind] += 1
    add(0, pytest_part("instructions", ["tests/test_forced_arch.py"], 1, 20, "on_the_card"))
    return [
        part._replace(
            name=f"{arch}-{part.name}",
            environment={**part.environment, "TRITON_OVERRIDE_ARCH": arch.replace("_", "")},
        )
        for each in rounds
        for part in each
        for arch in archs
    ]


@dataclass
class Board:
    """The outcome of each part at one commit, kept in a file."""

    path: Path
    commit: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, commit: str) -> Board:
        """Load the board of this commit; results of another commit are forgotten."""
        board = cls(path, commit)
        if path.exists():
            content = json.loads(path.read_text())
            if content["commit"] == commit:
                board.rows = content["parts"]
        return board

    def add(self, part: Part, status: str, seconds: float, last_line: str) -> None:
        """Write down a part that has ended."""
        self.rows[part.name] = {"status": status, "seconds": round(seconds), "last_line": last_line}
        write_whole(self.path, json.dumps({"commit": self.commit, "parts": self.rows}, indent=1))

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
        slots: how many may be taken at once; a part that needs more runs alone.
        deadline: on the monotonic clock; what still runs then is ended.
        where: the folder to run a part in, by name; the repository for others.
        gpus: how many GPUs share the parts.
    """
    waiting = [part for part in parts if not board.has(part)]
    running: list[Running] = []
    while running or (waiting and time.monotonic() < deadline):
        if time.monotonic() < deadline:
            for part in list(waiting):
                taken = [sum(each.part.slots for each in running if each.gpu == gpu) for gpu in range(gpus)]
                if not running or sum(taken) + part.slots <= slots:
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
    counts = dict.fromkeys(("passed", "failed", "left"), 0)
    for part in parts:
        status = board.rows.get(part.name, {}).get("status", "late")
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
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                part.command,
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


def count_gpus() -> int:
    import torch  # here, for --list needs none

    return torch.cuda.device_count()


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
    parts = all_parts() if chosen.forced is None else forced_parts(all_parts(), chosen.forced or FORCED)
    parts = [part for part in parts if not chosen.only or any(name in part.name for name in chosen.only)]
    if chosen.racecheck_extension is None:
        parts = [part for part in parts if not part.needs_racecheck_build]
    if chosen.list:
        for part in parts:
            print(f"{part.name:28} {part.slots:2} workers, some {part.seconds} s")
        return PASSED
    gpus = count_gpus()
    if gpus == 0:  # the tests would skip, and pass
        parser.error("torch finds no GPU, and every part needs one; --list prints them")
    if shutil.which("compute-sanitizer") is None and any(part.command[0] == "compute-sanitizer" for part in parts):
        print("left out: memcheck, initcheck and racecheck (compute-sanitizer, of the CUDA toolkit, is not installed)")
        parts = [part for part in parts if part.command[0] != "compute-sanitizer"]
    chosen.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + chosen.budget
    board = Board.load(chosen.out / "checks.json", chosen.commit or commit_of(ROOT))
    with tempfile.TemporaryDirectory() as copy:
        where: dict[str, Path] = {}
        if chosen.racecheck_extension is not None:
            tree = Path(copy) / "tree"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build"))
            shutil.copy(chosen.racecheck_extension, tree / "flash_dmattn" / "_C.abi3.so")
            where = {part.name: tree for part in parts if part.needs_racecheck_build}
        return run(parts, board, chosen.out, slots=chosen.slots, deadline=deadline, where=where, gpus=gpus)


if __name__ == "__main__":
    sys.exit(main())
