"""The profile in force on this machine: where it lies, whether it speaks of this GPU and these versions; read once."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from .._version import __version__
from ..problem import device_arch, sm_number
from .config import process
from .profile import Profile, ProfileError, read
from .registry import choices_changed

COMMAND = "python -m flash_dmattn calibrate"
LEAST_ARCH = 80  # of the Triton kernels


class Found(NamedTuple):
    """What was found for an architecture: a profile, or in `reason` why none is in force; `path` is "" without one."""

    path: str
    profile: Profile | None
    reason: str = ""


_found: dict[str, Found] = {}


def find(arch: str) -> Found:
    """The profile of this machine's GPU of an architecture, read at the first question; never raises."""
    if arch not in _found:
        _found[arch] = _look(arch)
    return _found[arch]


def forget() -> None:
    """Read profiles again when they are next asked for, and choose the backends of every call anew."""
    _found.clear()
    choices_changed()


def folder() -> Path:
    """Where profiles lie: flash_dmattn in the user's folder of caches."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # Not a relative one: the specification of these folders says to ignore it.
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "flash_dmattn"


def path_of(gpu: str) -> Path:
    """The file of a GPU by its name: FLASH_DMATTN_PROFILE where that names a file, else one in `folder`."""
    if process.profile not in ("", "off"):
        return Path(process.profile).expanduser()
    return folder() / f"{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-')}.json"


def versions() -> dict[str, str]:
    """Versions that a profile depends on, by its fields; "" where Triton cannot be imported."""
    return {"library": __version__, "torch": str(torch.__version__), "triton": _triton_version()}


def _triton_version() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except Exception:  # a broken installation raises anything; the probe of the backend reports it
        return ""


def gpu_names(arch: str) -> list[str]:
    """The models of this machine's GPUs of an architecture."""
    if not torch.cuda.is_available():
        return []
    indices = [index for index in range(torch.cuda.device_count()) if device_arch(torch.device("cuda", index)) == arch]
    return sorted({torch.cuda.get_device_name(index) for index in indices})


def arches_here() -> list[str]:
    """The architectures of this machine's GPUs that a profile can be of."""
    if not torch.cuda.is_available():
        return []
    found = {device_arch(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    return sorted(arch for arch in found if (sm_number(arch) or 0) >= LEAST_ARCH)


def _look(arch: str) -> Found:
    if process.profile == "off":
        return Found("", None, "FLASH_DMATTN_PROFILE=off")
    if (sm_number(arch) or 0) < LEAST_ARCH:
        return Found("", None, f"profiles are of NVIDIA GPUs from sm_{LEAST_ARCH} on, and this is {arch}")
    try:
        # Before torch is asked for GPUs, which takes memory on them.
        if process.profile == "" and not any(folder().glob("*.json")):
            return Found("", None, f"there is none in {folder()}")
        names = gpu_names(arch)
        if len(names) != 1:
            what = f"several models of {arch}: {', '.join(names)}" if names else f"no GPU of {arch}"
            return Found("", None, f"this machine has {what}")
        path = path_of(names[0])
    except (OSError, RuntimeError) as error:  # no home, a folder that cannot be read, a driver that fails
        return Found("", None, f"it cannot be looked for: {error}")
    try:
        profile = read(path)
    except ProfileError as error:
        return Found(str(path), None, f"{path} {error}")
    for name, here in {"gpu": names[0], "arch": arch, **versions()}.items():
        if getattr(profile, name) != here:
            was = getattr(profile, name)
            what = {"gpu": "the GPU", "arch": "the architecture", "library": "flash_dmattn"}.get(name, name)
            return Found(str(path), None, f"{path} was made with {what} {was}, and here it is {here or 'not there'}")
    return Found(str(path), profile)
