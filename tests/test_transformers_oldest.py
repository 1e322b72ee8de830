"""transformers: the same tests with the oldest version that is served, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from oldest_versions import TESTS, folder, run_with

OLDEST = folder("transformers-5.0")


@pytest.mark.skipif(not (OLDEST / "transformers").is_dir(), reason=f"{OLDEST} is empty: make test fills it")
def test_with_the_oldest_version() -> None:
    files = sorted(file for file in TESTS.glob("test_transformers_*.py") if file != Path(__file__).resolve())
    assert len(files) >= 5
    run_with(OLDEST, "-c", "import transformers; assert transformers.__version__ == '5.0.0'")
    printed = run_with(OLDEST, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, files))
    summary = printed.strip().splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 300, summary
