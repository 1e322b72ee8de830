"""The host code of the CUDA extension against the headers of other versions of torch, on request.

Every build of the extension compiles the same code against the headers of the installed version.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest
from by_path import load

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# Folders `torch/include` of other versions, separated as in PATH: docs/building.md says where to get them.
VARIABLE = "FLASH_DMATTN_TEST_TORCH_INCLUDES"


build_cuda = load(CSRC / "build_cuda.py")
REASONS = "; ".join(build_cuda.reasons_not_to_build())
pytestmark = pytest.mark.skipif(bool(REASONS), reason=f"the CUDA extension cannot be built here: {REASONS}")
HOST_SOURCES = [source for source in build_cuda.SOURCES if source.endswith(".cpp")]


INCLUDES = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the headers that a build writes."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "build_info.h").write_text(
        '#define FLASH_DMATTN_BUILD_INFO_PREFIX ""\n#define FLASH_DMATTN_BUILD_INFO ""\n'
    )
    units = build_cuda.instances_header()
    (folder / "build_instances.h").write_text(units)
    return folder


@pytest.mark.skipif(not INCLUDES, reason=f"{VARIABLE} names no folder of headers")
@pytest.mark.parametrize("source", HOST_SOURCES)
@pytest.mark.parametrize("include", INCLUDES or [Path()], ids=str)
def test_host_code_compiles(include: Path, source: str, generated: Path) -> None:
    assert (include / "torch" / "csrc" / "stable" / "library.h").is_file(), f"{include} has no headers of torch"
    folders = (generated, include, sysconfig.get_path("include"))
    command = [build_cuda.find_nvcc(), *shlex.split(" ".join(build_cuda.FLAGS)), "-Xcompiler", "-fsyntax-only"]
    command += [word for folder in folders for word in ("-isystem", str(folder))]
    command += ["-c", str(CSRC / source), "-o", str(generated / "nothing.o")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
