"""Device, driver, versions and commit: what a run is of, and what has to be the same for one to be resumed."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from . import forced_arch
from .floors import rates_of

ROOT = Path(__file__).resolve().parent.parent
PROXY = ", a proxy"
PEER_PACKAGES = ("flash-attn-4", "cuequivariance-torch")


def describe(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Return the machine as results have it; `commit` names what runs where git cannot tell."""
    on_gpu = device.type == "cuda"
    description: dict[str, Any] = {"device": device_name(device), "kind": device.type}
    if on_gpu:
        query = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        description |= {"driver": query.partition("\n")[0], "cuda": str(torch.version.cuda)}
        description["cudnn"] = str(torch.backends.cudnn.version())
    else:
        description["threads"] = torch.get_num_threads()
    description["torch"] = torch.__version__
    for package in ("triton", *PEER_PACKAGES):
        version = _version(package)
        if version is not None:
            description[package] = version
    description["commit"] = commit or commit_of(ROOT)
    card = torch.cuda.get_device_properties(device).name if on_gpu else "CPU"
    description["rates"] = rates_of(device, card)._asdict()
    return description


def device_name(device: torch.device) -> str:
    """Return the name that results have for a device, which says where they are a proxy for another GPU."""
    if device.type != "cuda":
        return "CPU"
    name: str = torch.cuda.get_device_properties(device).name
    arch = forced_arch.forced()
    return name if arch is None else f"{name} as {arch}{PROXY}"


def is_proxy(machine: dict[str, Any]) -> bool:
    """Return whether results are a proxy for another GPU."""
    return str(machine["device"]).endswith(PROXY)


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, marked where files differ from it; "unknown" where git cannot tell."""
    return _output("git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")


def identity(machine: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs must have in common to share a table: everything except measured rates."""
    return {name: value for name, value in machine.items() if name != "rates"}


def line(machine: dict[str, Any]) -> str:
    """On one line, for headings."""
    plain = {name: value for name, value in identity(machine).items() if name not in ("device", "kind")}
    return ", ".join([machine["device"], *(f"{name} {value}" for name, value in plain.items())])


def slug(machine: dict[str, Any]) -> str:
    """Return the name of the folder of its results: "nvidia-h200", "cpu"."""
    return re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(program: str, *arguments: str) -> str:
    """Return the output of a program; "unknown" if it is not installed or fails."""
    if shutil.which(program) is None:
        return "unknown"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
