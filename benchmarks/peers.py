"""Our backends beside their peers: one run, the same inputs, every result checked before it is timed.

    python -m benchmarks.peers                               # all workloads, about four minutes on an H200
    python -m benchmarks.peers --quick                       # one workload of each kind, timed for less long
    python -m benchmarks.peers --only keys topk --backends triton
    python -m benchmarks.peers --list                        # the workloads; needs no GPU

Writes peers.json after every workload, and peers.md and peers.png at the end, to --out; `python -m benchmarks.report`
makes the last two of any peers.json. docs/benchmarks.md says how to read them. Exit status 0; 1 where one of our
backends failed or is less accurate than the accuracy rule demands; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flash_dmattn.selection import BACKENDS, probe

from . import report
from .compare import Record, compare
from .workloads import WORKLOADS, Workload

OURS = ("cuda", "triton")
REP_MS, QUICK_REP_MS = 40.0, 15.0
ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads whose name contains one of these")
    what = f"ours, by name (default: what works here of {', '.join(OURS)})"
    parser.add_argument("--backends", nargs="+", choices=tuple(BACKENDS), metavar="BACKEND", help=what)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no workload after this time")
    parser.add_argument("--quick", action="store_true", help="one workload of each kind, timed for less long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of what is written")
    parser.add_argument("--commit", help="what was timed, where git cannot tell")
    parser.add_argument("--list", action="store_true", help="print the workloads and stop")
    given = parser.parse_args(arguments)
    chosen = choose(given.only, given.quick)
    if not chosen:
        parser.error(f"no workload has a name with {' or '.join(given.only)} in it; --list prints them")
    if given.list:
        print("\n".join(f"{w.name:16}{w.shape:22}{w.what}" for w in chosen))
        return 0
    if not torch.cuda.is_available():
        print("benchmarks.peers times GPU kernels, and torch finds no GPU on this machine.", file=sys.stderr)
        return 2
    backends = given.backends or usable()
    return run(chosen, backends, QUICK_REP_MS if given.quick else REP_MS, given.budget, given.out, given.commit)


def usable() -> list[str]:
    """Our kernel backends that work here; says why another does not."""
    found = {name: probe(name) for name in OURS}
    for name, availability in found.items():
        if not availability.usable:
            print(f"{name} is left out: {availability.reason}", flush=True)
    return [name for name, availability in found.items() if availability.usable]


def choose(only: list[str] | None, quick: bool) -> list[Workload]:
    """The workloads with a name that contains one of `only`; with `quick`, of those the ones marked so."""
    named = [w for w in WORKLOADS if only is None or any(part in w.name for part in only)]
    return [w for w in named if w.quick] if quick else named


def run(
    chosen: list[Workload], backends: list[str], rep_ms: float, budget: float | None, out: Path, commit: str | None
) -> int:
    """Compare on every workload that starts within the budget; return the exit status."""
    started = time.monotonic()
    device = torch.device("cuda")
    result: Record = {"machine": machine(device, commit), "backends": backends, "workloads": [], "left_out": []}
    print(report.machine_line(result["machine"]), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for workload in chosen:
        if budget is not None and time.monotonic() - started > budget:
            result["left_out"].append(workload.name)
            continue
        result["workloads"].append(compare(workload, backends, rep_ms, device))
        torch.cuda.empty_cache()
        (out / "peers.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"    {time.monotonic() - started:.0f} s so far", flush=True)
    if result["left_out"]:
        print(f"left out, the budget of {budget:.0f} s being spent: {', '.join(result['left_out'])}")
    (out / "peers.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report.write(result, out)
    print(f"written: {out}/peers.json, peers.md, peers.png")
    failures = report.failures(result)
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def machine(device: torch.device, commit: str | None) -> dict[str, str]:
    """Device and versions."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": triton.__version__,
        "commit": commit or _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def _output(program: str, *arguments: str) -> str:
    """What a program prints; "unknown" where it is not installed or refuses."""
    if shutil.which(program) is None:
        return "unknown"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
