"""Causal top-k attention by length: making the mask, forward and backward, beside what peers take for such rows.

python -m benchmarks.long_context --out FILE.json              # on a GPU: the table, and the file
python -m benchmarks.long_context --plot FILE.json             # anywhere: FILE.png and FILE.svg

Ours takes an `IntervalMask`, made from one score per key; FlexAttention a BlockMask of the same intervals, made
beforehand; cuDNN attends to all keys of the prefix, with k and v repeated for all query heads. Sampled rows of each
output that has the mask are compared with the formula in fp64, and gradients of FlexAttention with ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared.storage import IntervalMask

from .files import write_whole
from .report.plots import STYLES
from .timing import Runner, gradients, leave_default_stream, measure

Row = dict[str, Any]

HEADS, KEY_HEADS, HEAD_DIM, KEPT = 16, 4, 128, 1024
LENGTHS = tuple(1 << n for n in range(12, 21))
# The longest rows of a peer: FlexAttention makes its mask from all pairs, cuDNN computes them.
LONGEST = {"cuda": 1 << 20, "sdpa-cudnn": 1 << 16, "flexattention": 1 << 15}
SAMPLED_ROWS = 16
# The largest relative error of a bf16 output; rounding alone makes 2e-3.
MOST_ERROR = 1e-2
LABELS = {
    "cuda": "flash_dmattn, making the mask included",
    "sdpa-cudnn": "cuDNN, every key of the prefix",
    "flexattention": "FlexAttention, its mask made beforehand",
}


class Inputs:
    """The tensors of one length."""

    def __init__(self, length: int, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(length)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=random)

        self.length = length
        self.q, self.k, self.v = (normal(1, length, n, HEAD_DIM) for n in (HEADS, KEY_HEADS, KEY_HEADS))
        self.scores = normal(1, KEY_HEADS, 1, length, dtype=torch.float32)
        self.dout = normal(1, length, HEADS, HEAD_DIM)
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v, self.scores)]


def bind_ours(inputs: Inputs, mask: IntervalMask) -> Callable[[], Tensor]:
    """Return the call on the cuda backend."""

    def call() -> Tensor:
        out = flash_dmattn.attention(inputs.q, inputs.k, inputs.v, mask, inputs.scores, backend="cuda")
        assert isinstance(out, Tensor)
        return out

    return call


def bind_flex(inputs: Inputs, mask: IntervalMask) -> Callable[[], Tensor]:
    """Return the same mask and bias as a mask_mod and a score_mod that read them."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # else the compiled backward refuses retain_graph=True
    start, stop, group = mask.start[0], mask.stop[0], HEADS // KEY_HEADS

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= start[h // group, j]) & (i < stop[h // group, j])

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + inputs.scores[0, h // group, 0, j]

    blocks = create_block_mask(allows, 1, HEADS, inputs.length, inputs.length, device=inputs.q.device, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        out: Tensor = compiled(q, k, v, score_mod=biased, block_mask=blocks, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def bind_cudnn(inputs: Inputs, mask: IntervalMask) -> Callable[[], Tensor]:
    """Causal attention to every key, with as many key heads as query heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = inputs.q.detach().transpose(1, 2)
    k, v = (x.detach().transpose(1, 2).repeat_interleave(HEADS // KEY_HEADS, 1) for x in (inputs.k, inputs.v))
    inputs.leaves = [x.requires_grad_() for x in (q, k, v)]

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    return call


BIND = {"cuda": bind_ours, "flexattention": bind_flex, "sdpa-cudnn": bind_cudnn}


def error_of_rows(inputs: Inputs, mask: IntervalMask, out: Tensor) -> float:
    """Return the largest relative error of sampled rows of an output."""
    worst, step = 0.0, max(1, inputs.length // SAMPLED_ROWS)
    for row in range(step - 1, inputs.length, step):
        allowed = mask.dense(row, row + 1)[0, :, 0]
        for head in range(KEY_HEADS):
            keys = allowed[head].nonzero()[:, 0]
            k, v = (x.detach()[0, keys, head].double() for x in (inputs.k, inputs.v))
            first = head * (HEADS // KEY_HEADS)
            q = inputs.q.detach()[0, row, first : first + HEADS // KEY_HEADS].double()
            scores = q @ k.T * HEAD_DIM**-0.5 + inputs.scores.detach()[0, head, 0, keys].double()
            want = scores.softmax(-1) @ v
            row_out = out[0, row, first : first + HEADS // KEY_HEADS].double()
            worst = max(worst, float((row_out - want).norm() / want.norm()))
    return worst


def run(length: int, system: str, device: torch.device, wanted: list[Tensor] | None) -> tuple[Row, list[Tensor] | None]:
    """Time one system at one length; also its gradients, if others are to be held against them."""
    inputs = Inputs(length, device)

    def make() -> IntervalMask:
        made = PreparedMask.from_topk(inputs.scores.detach(), KEPT, is_causal=True, reorder=True)
        assert isinstance(made, IntervalMask)
        return made

    mask = make()
    making = Runner(make)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call = BIND[system](inputs, mask)
    with torch.no_grad():
        error = None if system == "sdpa-cudnn" else error_of_rows(inputs, mask, call())
    out = call()
    grads = list(gradients(out, inputs.leaves, inputs.dout))
    peak = torch.cuda.max_memory_allocated() - before
    off = None
    if wanted is not None and system == "flexattention":
        off = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(grads, wanted, strict=True))

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    runners = {"forward": Runner(forward), "backward": Runner(lambda: gradients(out, inputs.leaves, inputs.dout))}
    if system == "cuda":
        runners["making"] = making
    measure(list(runners.values()), device, rep_ms=100, least=3, most=50)
    row: Row = {"length": length, "system": system, "error_of_rows": error, "gradients_off": off}
    for name, runner in runners.items():
        if runner.error is not None:
            raise runner.error
        row[name] = statistics.median(runner.ms)
    row["peak_mib"] = round(peak / 2**20)
    for name in ("error_of_rows", "gradients_off"):
        if row[name] is not None and not row[name] < MOST_ERROR:
            row["wrong"] = f"{name} is {row[name]:.1e}"
    return row, grads if system == "cuda" and length <= LONGEST["flexattention"] else None


def table(rows: list[Row]) -> str:
    """Return the results, a line for each length and system."""
    lines = ["| keys | system | making | forward | backward | MiB at the peak | error of rows, gradients beside ours |"]
    lines.append("| --- " * 7 + "|")
    for row in rows:
        times = [f"{row[name]:.3g}" if name in row else "-" for name in ("making", "forward", "backward")]
        errors = [
            f"{row[name]:.0e}" if row.get(name) is not None else "-" for name in ("error_of_rows", "gradients_off")
        ]
        said = row.get("wrong") or row.get("failed") or ", ".join(errors)
        lines.append(
            f"| {row['length']} | {row['system']} | {' | '.join(times)} | {row.get('peak_mib', '-')} | {said} |"
        )
    return "\n".join(lines)


def plot(file: Path) -> list[Path]:
    """Draw the results of a file beside it."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flash_dmattn"
    from matplotlib import pyplot

    content = json.loads(file.read_text(encoding="utf-8"))
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 4.2), sharey=True, layout="constrained")
    for axes, direction in zip(panels, ("forward", "backward"), strict=True):
        for system, name in LABELS.items():
            rows = [row for row in content["rows"] if row["system"] == system and direction in row]
            color, marker = STYLES[system]
            times = [row[direction] + (row.get("making", 0.0) if direction == "forward" else 0.0) for row in rows]
            axes.plot([row["length"] for row in rows], times, color=color, marker=marker, label=name)
        axes.set(xscale="log", yscale="log", xlabel="queries and keys", title=direction)
        lengths = sorted({row["length"] for row in content["rows"]})
        axes.set_xticks(lengths, [f"{n >> 10}k" if n < 1 << 20 else f"{n >> 20}M" for n in lengths], fontsize=9)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(frameon=False, fontsize=8.5, loc="upper left")
    ends = "a line ends at the longest rows that were timed: FlexAttention lists all pairs, cuDNN computes them"
    figure.supxlabel(ends, fontsize=9)
    figure.suptitle(
        f"Causal top-{KEPT} attention, {HEADS} heads on {KEY_HEADS}, head dim {HEAD_DIM}, {content['device']}"
    )
    written = []
    for suffix in ("png", "svg"):
        path = file.with_suffix(f".{suffix}")
        # No date, so that the same results give the same file.
        figure.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
        written.append(path)
    pyplot.close(figure)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("long-context.json"), help="the file to write")
    parser.add_argument("--plot", type=Path, help="draw the results of this file, and measure nothing")
    parser.add_argument("--most", type=int, default=LENGTHS[-1], help="the longest row to time")
    args = parser.parse_args()
    if args.plot is not None:
        print(*plot(args.plot), sep="\n")
        return 0
    if not torch.cuda.is_available():
        print("long_context: torch finds no GPU on this machine.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    leave_default_stream(device)
    rows: list[Row] = []
    content = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    wanted: dict[int, list[Tensor]] = {}
    # Peers last: compiling takes minutes, and what is there is written after every row.
    for system, longest in LONGEST.items():
        for length in (n for n in LENGTHS if n <= min(longest, args.most)):
            try:
                row, grads = run(length, system, device, wanted.get(length))
                if grads is not None:
                    wanted[length] = grads
            except Exception as failure:  # of a peer, say: the others still count
                row = {"length": length, "system": system, "failed": f"{type(failure).__name__}: {failure}"[:200]}
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
            write_whole(args.out, json.dumps(content, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
    print(table(rows))
    return int(any("wrong" in row or (row["system"] == "cuda" and "failed" in row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
