"""The command line: `python -m flash_dmattn info | explain | calibrate | demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from ._version import __version__
from .dispatch.config import process
from .tools import PROGRAM, info, require_torch, run_piped
from .tools.cli import add_calibrate, add_explain, join_window


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. Each subcommand sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = OneLineParser(prog=PROGRAM, description="Attention with arbitrary masks and differentiable biases.")
    parser.add_argument("--version", action="version", version=f"flash_dmattn {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command")
    info.add_parser(commands)
    add_explain(commands)
    add_calibrate(commands)
    # Only to list the command; the demo parses its own arguments.
    commands.add_parser("demo", help="train a small language model with dynamic-mask attention", add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0 done, 1 failed; invalid arguments exit with 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    computes = words[:1] in (["explain"], ["calibrate"], ["demo"]) or "--verify" in words
    if computes and process.environment_error is not None:
        sys.exit(f"{PROGRAM} {words[0]}: error: {process.environment_error}")
    if words[:1] == ["demo"]:
        require_torch("demo")
        from .tools.demo import main as demo

        return demo(words[1:])
    parser = build_parser()
    arguments = parser.parse_args(join_window(words))
    if arguments.command is None:
        parser.print_help()
        return 0
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(run_piped(main))
