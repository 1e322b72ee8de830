"""The command line of the benchmarks.

    python -m benchmarks all                           # every suite, then the report; goes on where it stopped
    python -m benchmarks performance --quick           # a few cases, for less long, into build/benchmarks
    python -m benchmarks performance forward --only topk density --systems cuda triton flexattention
    python -m benchmarks performance decode
    CUDA_VISIBLE_DEVICES=1 python -m benchmarks performance --share 2/4   # one of four processes of a run
    python -m benchmarks equivalence --device cpu
    python -m benchmarks memory
    python -m benchmarks model                         # the training step of a decoder
    python -m benchmarks sweep tiles d128 --write      # tiles of the Triton kernels; proposes rows of their table
    python -m benchmarks sweep strips                  # the same for the packing of masks
    python -m benchmarks steps                         # training steps of other projects' models, on a GPU
    python -m benchmarks --as sm_80 performance        # kernels made for an A100, on a Hopper GPU: a proxy
    python -m benchmarks report                        # tables and plots of all results; --pages for README and docs
    python -m benchmarks list

A run writes DIR/<suite>.json after every case, and at its end tables and plots. The same command continues where the
last one stopped, if device, versions and commit are the same. docs/benchmarks.md explains the results.

Exit status: 0. 1 if one of our backends failed or breaks the accuracy rule. 2 for a wrong command, or if results of
another run are in the way. 3 if the budget ended before the cases did.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import dispatch, forced_arch, machine, mask_pack, pages, runner, steps, tiles
from .cases import PASSES, cases_of
from .report import write
from .results import SUITES, OtherRun
from .systems import ALL, DEFAULT

ROOT = Path(__file__).resolve().parent.parent
DECODE = "decode"
# Quick results are for looking at, not for the repository.
QUICK_RESULTS = ROOT / "build" / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments choose, and return the exit status."""
    args = parser().parse_args(arguments)
    if args.forced is not None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            print(f"--as {args.forced}: it needs a Hopper GPU (sm_90), and torch finds none.", file=sys.stderr)
            return runner.USAGE
        os.environ[forced_arch.VARIABLE] = args.forced.replace("_", "")  # processes that compile inherit it
    forced_arch.force_from_environment()
    try:
        status: int = args.run(args)
    except OtherRun as other:
        print(other, file=sys.stderr)
        return runner.USAGE
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where this one stopped", file=sys.stderr)
        return runner.UNFINISHED
    return status


def parser() -> argparse.ArgumentParser:
    """Return the parser, whose subcommands set `run`."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    said = "times on a Hopper GPU what is compiled for this one: a proxy for the order of kernels, not for their speed"
    top.add_argument("--as", dest="forced", choices=forced_arch.names(), metavar="ARCH", help=said)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    says = {
        "equivalence": "errors of every output of every system beside fp64 and beside plain PyTorch",
        "performance": "times of forward, backward, training step and decoding, beside the floor",
        "memory": "peak memory above the inputs",
        "model": "the training step of a decoder, with the attention of every system",
        "all": "the four of them, then the report",
    }
    for name, help_text in says.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if name == "performance":
            kinds = [*PASSES, DECODE]
            said = f"of {', '.join(kinds)}; default: all that each case has"
            command.add_argument("passes", nargs="*", choices=[*kinds, []], metavar="PASS", help=said)
        _add_run_options(command)
        command.set_defaults(run=run_suites, suites=list(SUITES) if name == "all" else [name])
    sweep = commands.add_parser("sweep", help="search the best tiles, and propose rows of their table")
    searches = sweep.add_subparsers(required=True, metavar="WHAT")
    tiles.add_parser(searches)
    mask_pack.add_parser(searches)
    dispatch.add_parser(commands)
    steps.add_parser(commands)
    report = commands.add_parser("report", help="tables and plots from the JSON alone")
    report.add_argument("folders", nargs="*", type=Path, help="default: every folder of benchmarks/results")
    report.add_argument("--pages", action="store_true", help="and the figures of README.md and docs/benchmarks.md")
    report.set_defaults(run=run_report)
    listing = commands.add_parser("list", help="the cases of every suite, and the systems")
    listing.set_defaults(run=print_list)
    return top


def _add_run_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--quick", action="store_true", help="a few cases, for less long; always anew, into build/benchmarks")
    add("--only", nargs="+", metavar="NAME", help="cases whose name or group contains one of these")
    known = [system.name for system in ALL]
    add("--systems", nargs="+", choices=known, metavar="NAME", help=f"of {', '.join(known)}")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")
    add("--budget", type=float, metavar="SECONDS", help="start no case that may not end within this time")
    add("--out", type=Path, metavar="DIR", help="folder of the results (default: benchmarks/results/<device>)")
    add("--commit", help="what is timed, where git cannot tell")
    add(
        "--share",
        type=_share,
        default=(1, 1),
        metavar="I/N",
        help="of N processes of one run the I-th; all take about as long",
    )
    said = "compile everything before the cases run (default), without running any, or as each case needs it"
    add("--compile", choices=("first", "only", "not"), default="first", help=said)
    add("--fresh", action="store_true", help="start anew, whatever there is")


def _share(text: str) -> tuple[int, int]:
    """Read "2/4"."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}; it needs I/N with 1 <= I <= N, such as 2/4")
    return int(index), int(count)


def run_suites(args: argparse.Namespace) -> int:
    """Run the suites that were named, each followed by its tables and plots."""
    started = time.monotonic()
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no GPU on this machine.", file=sys.stderr)
        return runner.USAGE
    if args.only is not None and not any(cases_of(suite, args.only, args.quick) for suite in args.suites):
        known = "; python -m benchmarks list prints them"
        print(f"no case has a name or group with {' or '.join(args.only)} in it{known}", file=sys.stderr)
        return runner.USAGE
    passes = [name for name in getattr(args, "passes", []) if name != DECODE]
    if passes != getattr(args, "passes", []) and not passes:
        args.only = [DECODE]  # a group of cases with only a forward pass
    if kind == "cpu" and args.forced is not None:
        print(f"--as {args.forced}: it is for a GPU, and --device is cpu.", file=sys.stderr)
        return runner.USAGE
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    described = machine.describe(device, args.commit)
    options = runner.Options(
        device=device,
        out=args.out or (QUICK_RESULTS if args.quick else runner.PUBLISHED) / machine.slug(described),
        machine=described,
        only=args.only,
        systems=args.systems or (list(forced_arch.SYSTEMS) if machine.is_proxy(described) else None),
        passes=passes or PASSES,
        quick=args.quick,
        deadline=None if args.budget is None else started + args.budget,
        share=args.share,
        compiles=args.compile,
        fresh=args.fresh or args.quick,
    )
    statuses = []
    for suite in args.suites:
        if args.only is None or cases_of(suite, args.only, args.quick):
            statuses.append(runner.run(suite, options))
    for path in write(options.out, args.suites):
        print(f"written: {path}")
    return runner.UNFINISHED if runner.UNFINISHED in statuses else max(statuses)


def run_report(args: argparse.Namespace) -> int:
    """Write tables and plots of the folders, and the pages if asked for."""
    published = runner.PUBLISHED
    folders = args.folders or sorted({path.parent for suite in SUITES for path in published.glob(f"*/{suite}.json")})
    if not folders and not args.pages:
        print(f"no results are under {published}; python -m benchmarks all makes them", file=sys.stderr)
        return runner.UNFINISHED
    for folder in folders:
        for path in write(folder):
            print(f"written: {path}")
    if args.pages:
        full = pages.full_run(published)
        if full is None:
            print(f"no full run on a GPU is under {published}: the pages stay as they are", file=sys.stderr)
            return runner.UNFINISHED
        for path in pages.write(ROOT, full):
            print(f"written: {path}")
    return runner.PASSED


def print_list(args: argparse.Namespace) -> int:
    for suite in SUITES:
        print(suite)
        for case in cases_of(suite):
            print(f"    {case.name:26}{case.group:18}{case.shape:26}{case.what}{' (quick)' if case.quick else ''}")
    print("systems")
    for system in ALL:
        print(f"    {system.name:18}{', '.join(suite for suite in SUITES if system.name in DEFAULT[suite])}")
    return runner.PASSED
