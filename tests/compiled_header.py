"""Headers of csrc that include no CUDA and no torch, compiled alone: tests ask them, and copy no rule of theirs."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"


def compiled(source: str) -> ctypes.CDLL:
    """A library of this C++, which may include headers by their path below csrc; skips the test without a compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "source.cpp").write_text(source)
        library = Path(folder) / "source.so"
        flags = ("-std=c++17", "-shared", "-fPIC", f"-I{CSRC}")
        subprocess.run([compiler, *flags, f"{folder}/source.cpp", "-o", library], check=True)
        return ctypes.CDLL(str(library))  # stays loaded when the file is gone
