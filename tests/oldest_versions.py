"""Commands that find the oldest version of a package that is served, where `make test` has installed it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Where the packages of `requirements-NAME.txt` are, each such file in a folder of its own."""
    return Path(sys.prefix, name)


def run_with(oldest: Path, *command: str) -> str:
    """Run Python with the folder `oldest` before what is installed; return its output, or fail with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (oldest, TESTS.parent, TESTS)))
    done = subprocess.run(
        [sys.executable, *command], cwd=TESTS.parent, env=environment, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    return done.stdout
