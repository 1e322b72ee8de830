"""The oldest versions of transformers and Triton that are served, where `make test` has installed them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# Each `requirements-NAME.txt` is installed in a folder of its own.
TRANSFORMERS, TRITON = Path(sys.prefix, "transformers-5.0"), Path(sys.prefix, "triton-3.5")


def run_with(oldest: Path, *command: str) -> str:
    """Run Python with the folder `oldest` before what is installed; return its output, or fail with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (oldest, TESTS.parent, TESTS)))
    environment["FLASH_DMATTN_SAMPLE"] = "12"
    done = subprocess.run(
        [sys.executable, *command], cwd=TESTS.parent, env=environment, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.skipif(not (TRANSFORMERS / "transformers").is_dir(), reason=f"{TRANSFORMERS} is empty: make test fills it")
def test_transformers() -> None:
    """The same tests as with the newest version, with at most twelve cases of each: what differs shows in few."""
    files = sorted(TESTS.glob("test_transformers_*.py"))
    assert len(files) >= 5
    run_with(TRANSFORMERS, "-c", "import transformers; assert transformers.__version__ == '5.0.0'")
    printed = run_with(TRANSFORMERS, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, files))
    summary = printed.strip().splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 150, summary


COMPILE = """
import triton
assert triton.__version__ == "3.5.0", triton.__version__
from compile_everything import compile_all
from compiled_catalogue import SEQUENCES, catalogue, sample

everything = catalogue(["sm_90"], ["bf16"])
of_sequences = [entry for entry in everything if entry.variant.startswith(SEQUENCES)]
chosen = {entry.label: entry for some in (everything, of_sequences) for entry in sample(some)}
results = compile_all(list(chosen.values()), workers=1)
failed = [result.line for result in results if result.kernel is None]
print(*failed, f"{len(results)} compiled", sep="\\n")
raise SystemExit(bool(failed))
"""


@pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"{TRITON} is empty: make test fills it")
def test_triton() -> None:
    """Each kernel compiles, and once more for sequences: a later language takes what the oldest may not."""
    printed = run_with(TRITON, "-c", COMPILE)
    assert int(printed.splitlines()[-1].partition(" ")[0]) >= 24, printed
