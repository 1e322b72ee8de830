"""`python -m flash_dmattn explain`: which backend a call would run on, from shapes given as words."""

from __future__ import annotations

import argparse
import json
from typing import Any

from . import require_torch


def add_parser(commands: Any) -> None:
    """Add the subcommand to the parser of the command line."""
    parser = commands.add_parser(
        "explain",
        help="which backend a call would run on, and why not another",
        description="Say which backend a call would run on, and every reason why not another. Allocates nothing, so "
        "the shapes may be as large as you like and the GPU need not be in this machine.",
    )
    parser.add_argument(
        "--q",
        type=sizes,
        required=True,
        metavar="B,Lq,H,D",
        help="shape of q: batch (or more dims of it), queries, heads, head dim",
    )
    parser.add_argument("--kv-heads", type=count, metavar="Hk", help="heads of k and v (default: those of q)")
    parser.add_argument("--seqlen-k", type=count, metavar="Lk", help="number of keys (default: that of queries)")
    parser.add_argument("--head-dim-v", type=count, metavar="Dv", help="head dim of v (default: that of q)")
    parser.add_argument("--dtype", default="bf16", metavar="NAME", help="fp16, bf16, fp32 or fp64 (default: bf16)")
    parser.add_argument("--arch", metavar="NAME", help="cpu, sm_80, sm_90, ... (default: this machine's GPU, or cpu)")
    parser.add_argument("--mask", type=sizes, metavar="B,H,Lq,Lk", help="shape of a boolean mask, each size 1 or full")
    parser.add_argument("--bias", type=sizes, metavar="B,H,Lq,Lk", help="shape of a bias, each size 1 or full")
    parser.add_argument("--bias-dtype", metavar="NAME", help="dtype of the bias (default: that of q)")
    parser.add_argument("--sink", action="store_true", help="an attention sink for each head")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="dropout of the probabilities")
    parser.add_argument("--grad", action="store_true", help="dq, dk and dv, and dsink of a sink, are needed")
    parser.add_argument("--bias-grad", action="store_true", help="dbias is needed")
    parser.add_argument("--causal", action="store_true", help="causal, aligned bottom-right")
    parser.add_argument("--window", type=window, metavar="L,R", help="sliding window, -1 is unlimited on that side")
    parser.add_argument("--softcap", type=float, default=0.0, metavar="X", help="softcap of the scores (default: off)")
    parser.add_argument("--softmax-scale", type=float, metavar="X", help="factor on the scores (default: D ** -0.5)")
    parser.add_argument("--deterministic", action="store_true", help="bitwise equal from run to run, or a refusal")
    parser.add_argument("--return-lse", action="store_true", help="lse is returned")
    parser.add_argument("--return-probs", action="store_true", help="the probabilities are returned")
    parser.add_argument(
        "--backend", default="auto", metavar="NAME", help="auto, a backend, or forward,backward (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, fail=parser.error)


def sizes(text: str) -> tuple[int, ...]:
    """Read "2,4096,16,64"."""
    return tuple(_integers(text, "integers separated by commas", lowest=0))


def count(text: str) -> int:
    """Read one size."""
    found = _integers(text, "one integer", lowest=0)
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} needs to be one integer")
    return found[0]


def window(text: str) -> tuple[int, int]:
    """Read "left,right"; -1 is unlimited."""
    found = _integers(text, "two integers separated by a comma, left and right", lowest=-1)
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(found)} integers; it needs two, left and right, as 128,0")
    return found[0], found[1]


def _integers(text: str, what: str, lowest: int) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} needs to be {what}") from None
    if min(found) < lowest:
        raise argparse.ArgumentTypeError(f"{text!r} has {min(found)}; it needs integers of at least {lowest}")
    return found


def join_window(words: list[str]) -> list[str]:
    """Join "--window -1,0" to "--window=-1,0": argparse takes a word that begins with a dash for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--window":
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; 0 whatever it says, 2 where no such call can exist."""
    require_torch("explain")
    from ...dispatch.config import parse_choice
    from ...explanation import explain_problem

    try:
        if arguments.bias_grad and arguments.bias is None:
            raise ValueError("--bias-grad is given without --bias; it needs the shape of a bias, as --bias 1,16,1,4096")
        explanation = explain_problem(
            arguments.q,
            kv_heads=arguments.kv_heads,
            seqlen_k=arguments.seqlen_k,
            head_dim_v=arguments.head_dim_v,
            dtype=arguments.dtype,
            device=arguments.arch or arch_here(),
            mask=arguments.mask,
            bias=arguments.bias,
            bias_dtype=arguments.bias_dtype,
            grad=arguments.grad,
            bias_grad=arguments.bias_grad,
            is_causal=arguments.causal,
            softmax_scale=arguments.softmax_scale,
            softcap=arguments.softcap,
            window_size=arguments.window,
            deterministic=arguments.deterministic or None,
            return_lse=arguments.return_lse,
            return_probs=arguments.return_probs,
            backend=parse_choice(arguments.backend),
            sink=arguments.sink,
            dropout_p=arguments.dropout,
        )
    except (ValueError, TypeError) as error:
        arguments.fail(" ".join(str(error).split()))
    print(json.dumps(explanation.to_dict(), indent=2) if arguments.json else explanation)
    return 0


def arch_here() -> str:
    """The architecture of this machine's first GPU, or "cpu"."""
    import torch

    from ...problem import device_arch

    return device_arch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
