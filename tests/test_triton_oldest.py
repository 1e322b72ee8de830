"""Triton: kernels of every kind compiled by the oldest version that is served, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# Where `make test` installs requirements-triton-3.5.txt.
OLDEST = Path(sys.prefix, "triton-3.5")
CODE = f"""
import triton
assert triton.__version__ == {OLDEST.name.partition("-")[2] + ".0"!r}, triton.__version__
from compile_everything import compile_all
from compiled_catalogue import SEQUENCES, catalogue, sample

everything = catalogue(["sm_90"], ["bf16"])
chosen = {{entry.label: entry for number in range(4) for entry in sample(everything, number)}}
chosen |= {{entry.label: entry for entry in everything if entry.variant.startswith(SEQUENCES)}}
results = compile_all(list(chosen.values()), workers=1)
failed = [result.line for result in results if result.kernel is None]
print(*failed, f"{{len(results)}} compiled", sep="\\n")
raise SystemExit(bool(failed))
"""


@pytest.mark.skipif(not (OLDEST / "triton").is_dir(), reason=f"{OLDEST} is empty: make test fills it")
def test_kernels_compile_with_the_oldest_version() -> None:
    """Of the language each version takes a little more, so what the newest compiles the oldest may not."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (OLDEST, TESTS.parent, TESTS)))
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=TESTS.parent, env=environment, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert int(done.stdout.splitlines()[-1].partition(" ")[0]) > 90, done.stdout
