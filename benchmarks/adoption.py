"""Run the tests of another project without and with its adapter, and print both counts.

    python -m benchmarks.adoption openfold --checkout PATH [-- ARGUMENTS OF PYTEST]

PATH is a checkout of the project, or the folder that its package is installed in, if that has tests. The project has to
be importable. `flash_dmattn.integrations.projects` has the files that are run; docs/adoption.md has results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from flash_dmattn import config
from flash_dmattn.dispatch.config import Decision
from flash_dmattn.integrations.projects import PROJECTS

WAYS = ("without", "with")


class Outcomes:
    """A plugin of pytest that counts tests by their outcome, and sub-tests as pytest-subtests does."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the call of a test; its set-up or tear-down only where that is the outcome."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.outcome == "failed":
                self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be imported as a failure, and one that is skipped as a whole as one test."""
        if report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.outcome == "failed":
                self.failed.append(report.nodeid)


def run_tests(project: str, way: str, arguments: list[str], target: Path) -> None:
    """Run the tests in this process, and write what came of them."""
    import pytest

    outcomes = Outcomes()
    decisions: list[Decision] = []
    if way == "with":
        importlib.import_module(f"flash_dmattn.integrations.{project}").enable()
    with config(record=decisions):
        pytest.main(["-q", *arguments], plugins=[outcomes])
    result = {"counts": outcomes.counts, "failed": outcomes.failed, "calls": len(decisions)}
    target.write_text(json.dumps(result))


def compare(project: str, checkout: Path, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Run the tests both ways, each in a process of its own."""
    row = PROJECTS[project]
    files = [name for name in row.tests if (checkout / name).exists()]
    missing = sorted(set(row.tests) - set(files))
    if missing:
        print(f"{checkout} has none of: {', '.join(missing)}")
    if not files:
        raise SystemExit(f"{checkout} has no tests that reach the adapter of {row.package}")
    results = {}
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "result.json"
            # The file, not the module: a checkout may have a folder `benchmarks` of its own.
            command = (sys.executable, str(Path(__file__).resolve()), project, "--way", way, "--target", str(target))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            subprocess.run([*command, "--", *files, *arguments], cwd=checkout, env=environment, check=False)
            if not target.exists():
                raise SystemExit(f"the tests of {row.package} {way} the adapter ended before they were counted")
            results[way] = json.loads(target.read_text())
    return results


def main() -> int:
    """Compare, and print; 1 where a test fails with the adapter and not without it, or where it was never reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=[name for name, row in PROJECTS.items() if row.tests])
    parser.add_argument("--checkout", type=Path, help="the folder that has the project's tests")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a process that runs them
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if options.way is not None:
        sys.path[0] = str(Path.cwd())  # the checkout, in the place of this folder
        run_tests(options.project, options.way, arguments, options.target)
        return 0
    if options.checkout is None:
        parser.error("--checkout is needed: a folder that has the project's tests")
    results = compare(options.project, options.checkout, arguments)
    for way, result in results.items():
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(result["counts"].items()))
        print(f"{way:<8} {counts}; {result['calls']} calls of flash_dmattn")
    new = sorted(set(results["with"]["failed"]) - set(results["without"]["failed"]))
    for name in new:
        print(f"fails with the adapter alone: {name}")
    return int(bool(new) or results["with"]["calls"] == 0)


if __name__ == "__main__":
    sys.exit(main())
