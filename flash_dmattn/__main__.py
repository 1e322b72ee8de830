"""The command line: `python -m flash_dmattn info | explain | calibrate | demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ._version import __version__
from .dispatch.config import process
from .tools import PROGRAM, info, require_torch, run_piped


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that prints errors as one line on stderr, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments in the parser of the subcommand, which knows the arguments to list."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}; {' '.join(self.format_usage().split())}")
        return parsed, rest


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. Each subcommand sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = OneLineParser(prog=PROGRAM, description="Attention with arbitrary masks and differentiable biases.")
    parser.add_argument("--version", action="version", version=f"flash_dmattn {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command")
    info.add_parser(commands)
    _add_explain(commands)
    _add_calibrate(commands)
    # Only to list the command: the demo has another parser.
    commands.add_parser(
        "demo", help="train with a learned pair bias and learned top-k keys; check gradients", add_help=False
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0 done, 1 failed; invalid arguments exit with 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    computes = words[:1] in (["explain"], ["calibrate"], ["demo"]) or "--verify" in words
    if computes and process.environment_error is not None:
        sys.exit(f"{PROGRAM} {words[0]}: error: {process.environment_error}")
    if words[:1] == ["demo"]:
        require_torch("demo")
        from .examples.demo import main as demo

        return demo(words[1:])
    parser = build_parser()
    arguments = parser.parse_args(_join_window(words))
    if arguments.command is None:
        parser.print_help()
        return 0
    return int(arguments.run(arguments))


def _add_explain(commands: Any) -> None:
    """Add `explain` to the parser of the command line; `explain_problem` has the same names of arguments."""
    parser = commands.add_parser(
        "explain",
        help="which backend a call would run on, and why not another",
        description="Say which backend a call would run on, and every reason why not another. Allocates nothing, so "
        "the shapes may be as large as you like and the GPU need not be in this machine.",
    )
    add = parser.add_argument
    shape = "B,H,Lq,Lk"
    about_q = "shape of q: batch (or more dims of it), queries, heads, head dim"
    add("--q", type=_sizes, required=True, metavar="B,Lq,H,D", help=about_q)
    add("--kv-heads", type=_count, metavar="Hk", help="heads of k and v (default: those of q)")
    add("--seqlen-k", type=_count, metavar="Lk", help="number of keys (default: that of queries)")
    add("--head-dim-v", type=_count, metavar="Dv", help="head dim of v (default: that of q)")
    add("--dtype", default="bf16", metavar="NAME", help="fp16, bf16, fp32 or fp64 (default: bf16)")
    add("--arch", dest="device", metavar="NAME", help="cpu, sm_80, sm_90, ... (default: this machine's GPU, or cpu)")
    add("--mask", type=_sizes, metavar=shape, help="shape of a boolean mask, each size 1 or full")
    add("--bias", type=_sizes, metavar=shape, help="shape of a bias, each size 1 or full")
    add("--bias-dtype", metavar="NAME", help="dtype of the bias (default: that of q)")
    add("--sink", action="store_true", help="an attention sink for each head")
    add("--dropout", dest="dropout_p", type=float, default=0.0, metavar="P", help="dropout of the probabilities")
    add("--grad", action="store_true", help="dq, dk and dv, and dsink of a sink, are needed")
    add("--bias-grad", action="store_true", help="dbias is needed")
    add("--causal", dest="is_causal", action="store_true", help="causal, aligned bottom-right")
    add(
        "--window", dest="window_size", type=_window, metavar="L,R", help="sliding window, -1 is unlimited on that side"
    )
    add("--softcap", type=float, default=0.0, metavar="X", help="softcap of the scores (default: off)")
    add("--softmax-scale", type=float, metavar="X", help="factor on the scores (default: D ** -0.5)")
    add("--deterministic", action="store_const", const=True, help="bitwise equal from run to run, or a refusal")
    add("--return-lse", action="store_true", help="lse is returned")
    add("--return-probs", action="store_true", help="the probabilities are returned")
    add("--backend", default="auto", metavar="NAME", help="auto, a backend, or forward,backward (default: auto)")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_explain, fail=parser.error)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_integers(text, "integers separated by commas", lowest=0))


def _count(text: str) -> int:
    numbers = _integers(text, "one integer", lowest=0)
    if len(numbers) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} needs to be one integer")
    return numbers[0]


def _window(text: str) -> tuple[int, int]:
    sides = _integers(text, "two integers separated by a comma, left and right", lowest=-1)
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(sides)} integers; it needs two, left and right, as 128,0")
    return sides[0], sides[1]


def _integers(text: str, what: str, lowest: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} needs to be {what}") from None
    if min(numbers) < lowest:
        raise argparse.ArgumentTypeError(f"{text!r} has {min(numbers)}; it needs integers of at least {lowest}")
    return numbers


def _join_window(words: list[str]) -> list[str]:
    """Join "--window -1,0" to "--window=-1,0", because argparse takes "-1,0" for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--window":
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


def _explain(arguments: argparse.Namespace) -> int:
    """Print the explanation; return 0 whatever it says, and exit with 2 if such a call is invalid."""
    require_torch("explain")
    import torch

    from .dispatch.config import parse_choice
    from .explanation import explain_problem
    from .problem import device_arch

    call = {name: x for name, x in vars(arguments).items() if name not in ("command", "run", "fail", "json")}
    here = "cuda" if torch.cuda.is_available() else "cpu"
    call["device"] = call["device"] or device_arch(torch.device(here))
    try:
        if call["bias_grad"] and call["bias"] is None:
            raise ValueError("--bias-grad is given without --bias; it needs the shape of a bias, as --bias 1,16,1,4096")
        call["backend"] = parse_choice(call["backend"])
        explanation = explain_problem(**call)
    except (ValueError, TypeError) as error:
        arguments.fail(" ".join(str(error).split()).replace("device is", "--arch is", 1))
    print(json.dumps(explanation.to_dict(), indent=2) if arguments.json else explanation)
    return 0


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="time the backends on this machine's GPU or CPU, so that auto takes the fastest",
        description="Check triton, flex, sdpa and eager against the formula on this machine's GPU, or sdpa and eager "
        "on its CPU, time them on a table of calls, and write a profile to the user's folder of caches (or to "
        "FLASH_DMATTN_PROFILE). From then on auto takes the fastest that was right. With --tiles it times tiles of the "
        "Triton kernels instead.",
    )
    parser.add_argument(
        "--seconds",
        type=_at_least(1),
        default=120,
        metavar="N",
        help="about how long it may take; what is not reached is left out (default: 120)",
    )
    parser.add_argument(
        "--device", type=_gpu_or_cpu, default=0, metavar="N", help='index of the GPU, or "cpu" (default: 0)'
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--tiles",
        action="store_true",
        help="check and time up to three tiles of each Triton kernel, and add the fastest to the profile; a second run "
        "goes on where the first one ended",
    )
    instead.add_argument(
        "--share",
        metavar="FILE",
        help="write the profile to a file for others with such a GPU, without names of paths; nothing is measured",
    )
    parser.set_defaults(run=_calibrate)


def _at_least(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} needs to be an integer of at least {lowest}")
        return int(text)

    return parse


def _gpu_or_cpu(text: str) -> int | str:
    if text != "cpu" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} needs to be the index of a GPU, from 0, or cpu")
    return text if text == "cpu" else int(text)


def _calibrate(arguments: argparse.Namespace) -> int:
    require_torch("calibrate")
    from .tools import calibrate, calibrate_tiles

    if arguments.share is not None:
        return calibrate.share(arguments.device, arguments.share)
    return (calibrate_tiles if arguments.tiles else calibrate).run(arguments.device, arguments.seconds)


if __name__ == "__main__":
    sys.exit(run_piped(main))
