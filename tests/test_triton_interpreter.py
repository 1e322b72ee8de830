"""The Triton kernels in Triton's interpreter: random calls in fp32 and fp16, in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from cases import DEVICE

SCRIPT = Path(__file__).with_name("interpreted_triton.py")
CASES = 40

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves"),
]


@pytest.mark.parametrize("seed", range(8))
def test_random_calls(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(seed), str(CASES)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{CASES} passed, 0 failed" in done.stdout
