"""The compiled extension flash_dmattn._C: finds it, checks the record of its build, and imports it if that matches."""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..._version import __version__

NAME = "flash_dmattn._C"
# Shown to users without an extension. It runs in a checkout; -v lets pip show the progress.
BUILD_COMMAND = "FLASH_DMATTN_BUILD_CUDA=force python -m pip install --no-build-isolation -v ."

# Marks the record of the build, in JSON, inside the file; csrc/build_cuda.py writes both.
_PREFIX = b"FLASH_DMATTN_BUILD_INFO "
# setup.py writes this file if a build ends without the extension.
_NOT_BUILT = Path(__file__).resolve().parents[2] / "_C.not_built.txt"
_KEYS = ("version", "torch_target", "torch_built_with", "python", "arches", "instances", "nvcc", "flags", "commit")


class ExtensionMismatchError(ImportError):
    """The extension was built for another version of flash_dmattn or torch, so it is not loaded."""


class NotBuilt(NamedTuple):
    """Why a build ended without the extension; `output` is the end of a compiler's output, empty if none ran."""

    reason: str
    output: str


def not_built() -> NotBuilt | None:
    """Return why this installation has no extension, from the record of its build; None without a record."""
    if not _NOT_BUILT.is_file():
        return None
    reason, _, output = _NOT_BUILT.read_text(encoding="utf-8", errors="replace").partition("\n")
    return NotBuilt(reason, output.strip())


def find() -> Path | None:
    """Return the file of the extension, or None if this installation has none."""
    spec = importlib.util.find_spec(NAME)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def build_info(path: Path) -> dict[str, Any]:
    """Read the record of the build of an extension from its file, without loading it.

    Args:
        path: the file, as `find` returns it.

    Returns:
        `version` of flash_dmattn, `torch_target` (the oldest torch that can load it), `torch_built_with`, `python`,
        `arches`, `instances` (the kernels it holds, as `forward_d128_bf16` or `backward_d64_fp16`), `nvcc`, `flags` and
        `commit`.

    Raises:
        ExtensionMismatchError: the file holds no such record.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = data.find(_PREFIX)
            if start < 0:
                raise ExtensionMismatchError(f"{path} holds no record of its build")
            start += len(_PREFIX)
            info = json.loads(data[start : data.find(b"\0", start)])
    except ValueError as error:  # an empty file, which cannot be mapped, or a record that is cut off or damaged
        raise ExtensionMismatchError(f"the record of its build in {path} cannot be read: {error}") from error
    missing = [key for key in _KEYS if key not in info]
    if missing:
        raise ExtensionMismatchError(f"the record of its build in {path} does not name {', '.join(missing)}")
    return info


def mismatch(info: dict[str, Any]) -> str:
    """Return why an extension with this record cannot be loaded here, as a sentence; empty if it can."""
    import torch
    from packaging.version import Version

    if info["version"] != __version__:
        return f"it was built for flash_dmattn {info['version']}, and this is {__version__}"
    # Compare releases only: a nightly build of the target sorts before the target, but can load it, too.
    if Version(torch.__version__).release < Version(info["torch_target"]).release:
        return f"it needs torch {info['torch_target']} or later, and this is {torch.__version__}"
    if torch.version.cuda is None:
        return f"it needs a torch that is built with CUDA, and {torch.__version__} is not"
    return ""


def load() -> ModuleType:
    """Import the extension, which registers its operators, if the record of its build matches."""
    path = find()
    if path is None:
        raise ModuleNotFoundError(f"the CUDA extension {NAME} is not in this installation", name=NAME)
    reason = mismatch(build_info(path))
    if reason:
        raise ExtensionMismatchError(f"the CUDA extension {path} does not fit: {reason}")
    return importlib.import_module(NAME)
