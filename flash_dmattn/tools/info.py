"""`python -m flash_dmattn info`: installed versions, the backends that work here, and the settings."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from .._version import __version__
from ..backends.cuda.extension import BUILD_COMMAND, build_info, find, not_built
from ..dispatch.config import choice, disabled, fallback, invariant, process, similar
from . import require_torch

Report = dict[str, Any]

PREFIX = "FLASH_DMATTN_"
# Variables of this package, and of the build of its extension.
OURS = (
    "FLASH_DMATTN_BACKEND",
    "FLASH_DMATTN_DISABLE",
    "FLASH_DMATTN_FALLBACK",
    "FLASH_DMATTN_INVARIANT",
    "FLASH_DMATTN_PROFILE",
    "FLASH_DMATTN_RULES",
    "FLASH_DMATTN_BUILD_CUDA",
    "FLASH_DMATTN_DTYPES",
    "FLASH_DMATTN_HEAD_DIMS",
    "FLASH_DMATTN_RACECHECK",
)
# The same, and variables of libraries that the backends use.
ENVIRONMENT = (*OURS, "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")


def add_parser(commands: Any) -> None:
    """Add the subcommand to the parser of the command line."""
    parser = commands.add_parser(
        "info",
        help="versions, GPUs, backends and settings; --verify computes with each backend",
        description="Print versions, GPUs, settings and what each backend needs. Works where torch does not.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else on stdout")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run a small forward and backward per backend and feature against the formula in fp64; exit 1 on failure",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if --verify finds a wrong result, otherwise 0."""
    report = collect()
    if not arguments.json:
        print(render(report, shutil.get_terminal_size().columns if sys.stdout.isatty() else None), flush=True)
    passed = True
    if arguments.verify:
        require_torch("info --verify")
        from . import verify

        outcomes = verify.verify(sys.stderr if arguments.json else sys.stdout)
        report["verify"] = [outcome.to_dict() for outcome in outcomes]
        passed = all(outcome.passed for outcome in outcomes)
    if arguments.json:
        print(json.dumps(report, indent=2))
    return 0 if passed else 1


def collect() -> Report:
    """Collect the report, as plain data."""
    torch = _imported("torch")
    if "error" not in torch:
        torch["cuda"] = importlib.import_module("torch").version.cuda
    driver, devices = find_driver()
    backends = _backends() if "error" not in torch else {}
    return {
        "flash_dmattn": {"version": __version__, "path": str(Path(__file__).resolve().parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": platform.platform(),
        "torch": torch,
        "triton": _imported("triton"),
        "extension": _extension(),
        "driver": driver,
        "gpus": devices if "error" in torch else _gpus(devices),
        "settings": _settings(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "profiles": _profiles() if "error" not in torch else {},
        "backends": backends,
    }


def _profiles() -> Report:
    """Return for each architecture of this machine's CPU and GPUs its profile, or why none is used."""
    from ..dispatch import profiles

    report: Report = {}
    for arch in profiles.arches_here():
        there = profiles.find(arch)
        made = None if there.profile is None else there.profile.made
        # On Hopper the built-in rules decide, unless FLASH_DMATTN_RULES=profile.
        decides = there.profile is not None and (arch != "sm_90" or process.rules == "profile")
        report[arch] = {"path": there.path, "made": made, "reason": there.reason, "decides": decides}
    return report


def _imported(name: str) -> Report:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken installation may raise any exception, which the report has to show
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        return {"error": "not installed" if is_missing else f"{type(error).__name__}: {error}"}
    return {"version": getattr(module, "__version__", "unknown")}


def _extension() -> Report:
    """Return the build record of the compiled extension, without loading it, or why there is none."""
    try:
        path = find()
        if path is not None:
            return {"path": str(path), **build_info(path)}
        reason, output = not_built() or ("", "")
        return {"error": f"not built: {reason}" if reason else "not built", "output": output}
    except Exception as error:  # as in _imported
        return {"error": f"{type(error).__name__}: {error}"}


def find_driver() -> tuple[Report, list[Report]]:
    """Return the NVIDIA driver and its GPUs, from nvidia-smi, which works without torch."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"error": "nvidia-smi is not on PATH"}, []
    query = "--query-gpu=driver_version,name,compute_cap,memory.total"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"nvidia-smi does not run: {error}"}, []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    if done.returncode != 0 or not all(len(row) == 4 for row in rows) or not rows:
        return {"error": f"nvidia-smi says: {(done.stdout + done.stderr).strip()[:200]}"}, []
    devices = [
        {"name": name, "capability": capability, "memory_gib": round(float(mib) / 1024, 1), "seen_by_torch": False}
        for _, name, capability, mib in rows
    ]
    return {"version": rows[0][0]}, devices


def _gpus(seen_by_driver: list[Report]) -> list[Report]:
    import torch

    if not torch.cuda.is_available():
        return seen_by_driver
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "seen_by_torch": True,
        }
        for gpu in gpus
    ]


def _settings() -> Report:
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in OURS)
    ends = [name.removeprefix(PREFIX) for name in OURS]
    return {
        "default_backend": choice(),
        "disabled": list(disabled()),
        "fallback": fallback(),
        "invariant": invariant(),
        "error": process.environment_error,
        "unknown": {name: similar(name.removeprefix(PREFIX), ends) for name in unknown},
    }


def _backends() -> dict[str, Report]:
    from ..dispatch.registry import BACKENDS

    off = disabled()
    report: dict[str, Report] = {}
    for name, backend in BACKENDS.items():
        availability = backend.probe()
        exception = availability.exception
        report[name] = {
            "usable": availability.usable and name not in off,
            "disabled": name in off,
            "reason": availability.reason,
            "hint": availability.hint,
            "exception": None if exception is None else f"{type(exception).__name__}: {exception}",
        }
    return report


def render(report: Report, columns: int | None = None) -> str:
    """Format the report as an aligned table; values longer than the width `columns` continue on the next line."""

    def version(part: Report) -> str:
        return part.get("version") or f"cannot be used: {part['error']}"

    torch = version(report["torch"])
    if "error" not in report["torch"]:
        torch += f" (CUDA {report['torch']['cuda']})" if report["torch"]["cuda"] else " (built without CUDA)"
    gpus = [
        f"{index}: {gpu['name']}, sm_{gpu['capability'].replace('.', '')}, {gpu['memory_gib']} GiB"
        + ("" if gpu["seen_by_torch"] else ", seen by the driver but not by torch")
        for index, gpu in enumerate(report["gpus"])
    ]
    settings = report["settings"]
    unknown = [
        f"{name} is read by nothing" + (f"; did you mean {PREFIX}{meant}?" if meant else "")
        for name, meant in settings["unknown"].items()
    ]
    default = settings["default_backend"]
    rows = [
        ("flash_dmattn", f"{report['flash_dmattn']['version']}, {report['flash_dmattn']['path']}"),
        ("python", f"{report['python']['version']}, {report['python']['executable']}"),
        ("system", report["system"]),
        ("torch", torch),
        ("triton", version(report["triton"])),
        *_spread("extension", _extension_lines(report["extension"])),
        ("driver", report["driver"].get("version") or f"none: {report['driver']['error']}"),
        *_spread("GPUs", gpus or ["none"]),
        ("", ""),
        ("default backend", default if isinstance(default, str) else f"{default[0]} forward, {default[1]} backward"),
        ("disabled", ", ".join(settings["disabled"]) or "none"),
        ("fallback", settings["fallback"]),
        ("invariant", "on" if settings["invariant"] else "off"),
        *([("error", settings["error"])] if settings["error"] else []),
        *_spread("unknown", unknown),
        *_spread("environment", [f"{name}={value}" for name, value in report["environment"].items()] or ["none set"]),
        *_spread("profile", _profile_lines(report["profiles"])),
        ("", ""),
        *_backend_rows(report["backends"]),
    ]
    width = max(len(name) for name, _ in rows)
    if columns is not None:
        room = max(30, columns - width - 2)
        rows = [
            (name if place == 0 else "", line)
            for name, value in rows
            for place, line in enumerate(textwrap.wrap(value, room, break_on_hyphens=False) or [""])
        ]
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in rows)


def _extension_lines(build: Report) -> list[str]:
    if "error" in build:
        output = [f"| {line}" for line in build.get("output", "").splitlines()]
        return [f"none: {build['error']}", *output, f"build it in a checkout: {BUILD_COMMAND}"]
    return [
        f"{build['version']} for {', '.join(build['arches'])} and torch >= {build['torch_target']}, built by nvcc "
        f"{build['nvcc']} from commit {build['commit'][:12]}, {build['path']}"
    ]


def _profile_lines(profiles: Report) -> list[str]:
    """Return for each architecture the profile that auto uses, or the command that makes one."""
    lines = []
    for arch, profile in profiles.items():
        if profile["made"] is None:
            device = " --device cpu" if arch == "cpu" else ""
            text = f"none: {profile['reason']}; python -m flash_dmattn calibrate{device} makes one"
        else:
            text = f"{profile['path']}, made {profile['made']}"
        lines.append(f"{arch}: {text}" + ("" if arch != "sm_90" or profile["decides"] else "; built-in rules decide"))
    return lines


def _backend_rows(backends: dict[str, Report]) -> list[tuple[str, str]]:
    if not backends:
        return [("backends", "none can be used without torch")]
    rows: list[tuple[str, str]] = []
    for name, backend in backends.items():
        if backend["usable"]:
            rows.append((f"backend {name}", "usable"))
            continue
        reasons = ["it is switched off"] if backend["disabled"] else []
        if backend["reason"]:
            reasons.append(backend["reason"] + (f" ({backend['hint']})" if backend["hint"] else ""))
        rows.append((f"backend {name}", "not usable: " + "; ".join(reasons)))
        if backend["exception"] is not None:
            rows.append(("", backend["exception"].splitlines()[0]))
    return rows


def _spread(name: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(name if index == 0 else "", line) for index, line in enumerate(lines)]
