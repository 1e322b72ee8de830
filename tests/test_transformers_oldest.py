"""transformers: the same tests with the oldest version that is served, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# Where `make test` installs requirements-transformers-5.0.txt.
OLDEST = Path(sys.prefix, "transformers-5.0")


@pytest.mark.skipif(not (OLDEST / "transformers").is_dir(), reason=f"{OLDEST} is empty: make test fills it")
def test_with_the_oldest_version() -> None:
    files = sorted(file for file in TESTS.glob("test_transformers_*.py") if file != Path(__file__).resolve())
    assert len(files) >= 5
    code = f"import transformers; assert transformers.__version__ == {OLDEST.name.partition('-')[2] + '.0'!r}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(OLDEST), str(TESTS.parent)])
    for command in (["-c", code], ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, files)]):
        done = subprocess.run(
            [sys.executable, *command], cwd=TESTS.parent, env=environment, text=True, capture_output=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 300, summary
