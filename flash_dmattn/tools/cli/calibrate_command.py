"""`python -m flash_dmattn calibrate`: measure the backends on this machine's GPU, for auto to go by."""

from __future__ import annotations

import argparse
from typing import Any

from . import require_torch


def add_parser(commands: Any) -> None:
    """Add the subcommand to the parser of the command line."""
    parser = commands.add_parser(
        "calibrate",
        help="time the backends on this machine's GPU, so that auto takes the fastest",
        description="Check triton, flex and eager against the formula on this machine's GPU, time them on a table of "
        "calls, and write a profile to the user's folder of caches (or to FLASH_DMATTN_PROFILE). From then on auto "
        "takes triton where it was right and faster.",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=120,
        metavar="N",
        help="about how long it may take; what is not reached is left out (default: 120)",
    )
    parser.add_argument("--device", type=index, default=0, metavar="N", help="index of the GPU (default: 0)")
    parser.set_defaults(run=run, fail=parser.error)


def positive(text: str) -> int:
    """Read a number of seconds."""
    return _integer(text, lowest=1)


def index(text: str) -> int:
    """Read the index of a GPU."""
    return _integer(text, lowest=0)


def _integer(text: str, lowest: int) -> int:
    if not text.isdecimal() or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"{text!r} needs to be an integer of at least {lowest}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table and write the profile; 1 where there is no GPU to measure or nothing was measured."""
    require_torch("calibrate")
    from ..calibrate.command import run as calibrate

    return calibrate(arguments.device, arguments.seconds)
