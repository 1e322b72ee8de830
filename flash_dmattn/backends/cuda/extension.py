"""The compiled extension flash_dmattn._C: where it is, what it was built for, and loading it where that fits."""

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
# For a person who has none, in a checkout; -v is what makes pip show the progress.
BUILD_COMMAND = "FLASH_DMATTN_BUILD_CUDA=force python -m pip install --no-build-isolation -v ."

# What stands before the JSON in the file; csrc/build_cuda.py writes it.
_PREFIX = b"FLASH_DMATTN_BUILD_INFO "
# Written by setup.py where a build ends without the extension.
_NOT_BUILT = Path(__file__).resolve().parents[2] / "_C.not_built.txt"
_KEYS = ("version", "torch_target", "torch_built_with", "python", "arches", "instances", "nvcc", "flags", "commit")


class ExtensionMismatchError(ImportError):
    """The extension was built for another flash_dmattn or torch than those that are installed; it is not loaded."""


class NotBuilt(NamedTuple):
    """Why a build ended without the extension; `output` is the last that a compiler said, empty where none ran."""

    reason: str
    output: str


def not_built() -> NotBuilt | None:
    """Why this installation has no extension, as its build wrote it; None where no build did."""
    if not _NOT_BUILT.is_file():
        return None
    reason, _, output = _NOT_BUILT.read_text(encoding="utf-8", errors="replace").partition("\n")
    return NotBuilt(reason, output.strip())


def find() -> Path | None:
    """The file of the extension, or None where this installation has none."""
    spec = importlib.util.find_spec(NAME)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def build_info(path: Path) -> dict[str, Any]:
    """What an extension was built from and for, read from the file without loading it.

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
            found = json.loads(data[start : data.find(b"\0", start)])
    except ValueError as error:  # an empty file, which cannot be mapped, or a record that is cut off or damaged
        raise ExtensionMismatchError(f"the record of its build in {path} cannot be read: {error}") from error
    missing = [key for key in _KEYS if key not in found]
    if missing:
        raise ExtensionMismatchError(f"the record of its build in {path} does not name {', '.join(missing)}")
    return found


def mismatch(info: dict[str, Any]) -> str:
    """Why an extension with this record cannot be loaded here, as a sentence; empty where it can."""
    import torch
    from packaging.version import Version

    if info["version"] != __version__:
        return f"it was built for flash_dmattn {info['version']}, and this is {__version__}"
    # A nightly build of the target is older than the target by name alone.
    if Version(torch.__version__).release < Version(info["torch_target"]).release:
        return f"it needs torch {info['torch_target']} or later, and this is {torch.__version__}"
    if torch.version.cuda is None:
        return f"it needs a torch that is built with CUDA, and {torch.__version__} is not"
    return ""


def load() -> ModuleType:
    """Import the extension, which registers its operators, once its record is seen to fit.

    Raises:
        ModuleNotFoundError: this installation has no extension.
        ExtensionMismatchError: it was built for something else, with a sentence that says what.
        ImportError: the system cannot load it.
    """
    path = find()
    if path is None:
        raise ModuleNotFoundError(f"the CUDA extension {NAME} is not in this installation", name=NAME)
    reason = mismatch(build_info(path))
    if reason:
        raise ExtensionMismatchError(f"the CUDA extension {path} does not fit: {reason}")
    return importlib.import_module(NAME)
