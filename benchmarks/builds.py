"""Compares builds of the CUDA extension: `python -m benchmarks.builds old.so new.so --only dense-d128 blocks`.

Each build times the cases in its own process, in a copy of the checkout with that file as the extension. Builds take
turns for several rounds, because the time of the same kernel varies by 3 to 4 % between processes. Each run checks its
results by the accuracy rule. The table has medians over the rounds, and the ratio of each build's time to the first
build's time.

Exit status: 0; 1 if a run failed, had a wrong result, or served no case.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .progress import progress
from .report.summary import time_of
from .report.tables import table
from .report.text import ms

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = "_C.abi3.so"
LEFT_OUT = (".git", ".venv", "build", "results", "*.so")
# (build, case, pass) -> milliseconds, of each round.
Times = dict[tuple[str, str, str], list[float]]


def copy_with(extension: Path, folder: Path) -> Path:
    """Return a copy of the checkout below a folder, with a file as its extension."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(extension, tree / "flash_dmattn" / EXTENSION)
    return tree


def time_build(tree: Path, out: Path, options: Sequence[str], system: str) -> dict[tuple[str, str], float]:
    """Return milliseconds by case and pass of one process.

    Raises:
        RuntimeError: the run failed, a result was wrong, or no case was served; what it printed is the message.
    """
    command = [sys.executable, "-m", "benchmarks", "performance", *options, "--systems", system, "--out", str(out)]
    done = subprocess.run(command, cwd=tree, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode} of {' '.join(command)}\n{done.stdout[-2000:]}")
    timings = {}
    for row in json.loads((out / "performance.json").read_text(encoding="utf-8"))["rows"]:
        for name in row["floor_ms"]:
            took = time_of(row, system, name)
            if took is not None:
                timings[row["name"], name] = took
    if not timings:
        raise RuntimeError(f"{system} served none of the cases\n{done.stdout[-2000:]}")
    return timings


def printed(times: Times, builds: Sequence[str]) -> list[str]:
    """Make the table: a row for each case and pass, with medians, and ratios to the time of the first build."""
    body = []
    for case, name in dict.fromkeys((case, name) for _, case, name in times):
        samples = [times.get((build, case, name)) for build in builds]  # None of a build that does not serve the case
        first, *others = medians = [None if taken is None else statistics.median(taken) for taken in samples]
        ratios = ["-" if first is None or other is None else f"{other / first:.3f}" for other in others]
        body.append([case, name, *map(ms, medians), *ratios])
    return table(["case", "pass", *builds, *(f"{build} / {builds[0]}" for build in builds[1:])], body)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the builds that the arguments name, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.builds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("builds", nargs="+", type=Path, metavar="FILE", help="extensions; a table names them by their file names")
    add("--only", nargs="+", metavar="NAME", help="cases whose name or group contains one of these (default: all)")
    add("--passes", nargs="+", default=[], metavar="PASS", help="of forward, backward, step (default: all)")
    add("--rounds", type=int, default=3, metavar="N", help="how often each build is timed (default: 3)")
    add("--system", default="cuda", help="what is timed (default: cuda)")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")
    args = parser.parse_args(arguments)
    builds = [path.stem for path in args.builds]
    if len(set(builds)) < len(builds):
        parser.error(f"two builds have one name, and the table would mix them: {', '.join(builds)}")
    for path in args.builds:
        if not path.is_file():
            parser.error(f"{path} is no file")
    options = [*args.passes, "--fresh", "--commit", "builds"]
    options += [] if args.only is None else ["--only", *args.only]
    options += [] if args.device is None else ["--device", args.device]
    times: Times = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {}
        for build, path in zip(builds, args.builds, strict=True):
            (folder / build).mkdir()
            trees[build] = copy_with(path, folder / build)
        with progress("builds", args.rounds * len(builds)) as shown:
            for _ in range(args.rounds):
                for build in builds:
                    shown.case(build)
                    try:
                        timings = time_build(trees[build], folder / build / "out", options, args.system)
                    except RuntimeError as failure:
                        print(f"{build}: {failure}", file=sys.stderr)
                        return 1
                    for (case, pass_name), took in timings.items():
                        times.setdefault((build, case, pass_name), []).append(took)
                    shown.done()
    print("\n".join(printed(times, builds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
