"""Times numbers about the probabilities in 16 bits, beside the forward pass: `python -m benchmarks.statistics`.

The first rows are both passes on triton, with the largest scores and with the entropies. Then come forward passes with
the largest scores on the backend that "auto" takes, and sums of the probability that each key receives. The last row is
the teacher of a selector, a quarter of 1,128,1,32768 in lists of 2048 keys. Calls of a row are timed in turns. Each
number is compared with fp64: of one head, or of some rows of lists.

    python -m benchmarks.statistics                # a GPU: two minutes
    python -m benchmarks.statistics --only sums    # the rows with this word in their name
    python -m benchmarks.statistics --quick        # small sizes, on a CPU too

Exit status: 1 if an error is above 1e-3 of the largest number.
"""

from __future__ import annotations

import argparse
import statistics as numbers
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn import AuxRequest, attention, statistics
from flash_dmattn.masks import PreparedMask

from . import machine
from .timing import Runner, leave_default_stream, measure

LIMIT = 1e-3
BYTES_A_MS = 3e9  # that an H200 reads, from far more than its L2
_CHUNK = 512  # queries of the oracle


class Line(NamedTuple):
    """One timed call: `goal` is its largest share of the first line of the row, or None; `error` its error, or None."""

    name: str
    run: Callable[[], object]
    goal: float | None = None
    error: Callable[[], float] | None = None


class Row(NamedTuple):
    """Calls that are timed in turns; `floor` are milliseconds to compare the first line with, 0 for none."""

    name: str
    lines: list[Line]
    floor: float = 0.0


def drawn(device: torch.device, *shapes: tuple[int, ...], grad: bool = False) -> list[Tensor]:
    random = torch.Generator(device).manual_seed(0)
    made = [torch.randn(shape, generator=random, device=device).to(torch.bfloat16) for shape in shapes]
    return [x.requires_grad_() for x in made] if grad else made


def probabilities(q: Tensor, k: Tensor, is_causal: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks of queries of the first head, with their scores and log(p) in fp64."""
    (_, rows, _, dim), (_, keys, _, _) = q.shape, k.shape
    column = torch.arange(keys, device=q.device)
    for first in range(0, rows, _CHUNK):
        chunk = slice(first, min(first + _CHUNK, rows))
        s = q[0, chunk, 0].detach().double() @ k[0, :, 0].detach().double().mT * dim**-0.5
        if is_causal:
            last = torch.arange(first, chunk.stop, device=q.device) + (keys - rows)
            s = s.masked_fill(column > last[:, None], -torch.inf)
        yield chunk, s, s.log_softmax(-1)


def off(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def error_of_rows(q: Tensor, k: Tensor, is_causal: bool, run: Callable[[], tuple[Tensor, ...]], name: str) -> float:
    """The error of the largest scores, or of the entropies, of the first head."""
    exact = []
    for _, s, logs in probabilities(q, k, is_causal):
        exact.append(s.amax(-1) if name == "max" else -(logs.exp() * logs.clamp(min=-1e4)).sum(-1))
    return off(run()[1][0, 0], torch.cat(exact))


def passes(device: torch.device, sizes: tuple[int, ...], is_causal: bool, backend: Any, entropy: bool) -> list[Row]:
    """Both passes without a number, with the largest scores, and with entropies, which have a gradient.

    Without `entropy` it is the forward pass, with the largest scores.
    """
    q, k, v = drawn(device, sizes, sizes, sizes, grad=True)
    shared: dict[str, Any] = {"is_causal": is_causal, "backend": backend}
    named = f"{','.join(map(str, sizes))}{', causal' if is_causal else ''} on {backend}"
    dout, sent = torch.randn_like(q), torch.randn(sizes[0], sizes[2], sizes[1], device=device)

    def call(**asked: bool) -> tuple[Tensor, ...]:
        if not asked:
            return (attention(q, k, v, **shared),)
        out, aux = attention(q, k, v, return_aux=AuxRequest(**asked), **shared)
        return out, aux.entropy if "entropy" in asked else aux.max_scores

    def without_graph(**asked: bool) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return call(**asked)

    def gradients(**asked: bool) -> Callable[[], object]:
        results = [x for x in call(**asked) if x.requires_grad]
        sends = [dout, sent][: len(results)]
        return lambda: torch.autograd.grad(results, (q, k, v), sends, retain_graph=True)

    ways: list[tuple[str, dict[str, bool], float | None]] = [("without", {}, None)]
    ways.append(("max", {"max_scores": True}, 1.01 if entropy else 1.02))
    if entropy:
        ways.append(("entropy", {"entropy": True}, 1.03))
    forward = []
    for name, asked, goal in ways:
        run = partial(without_graph, **asked)
        error = partial(error_of_rows, q, k, is_causal, run, name) if asked else None
        forward.append(Line(name, run, goal, error))
    if not entropy:
        return [Row(f"forward {named}", forward)]
    backward = [Line(name, gradients(**asked), goal) for name, asked, goal in ways]
    return [Row(f"forward {named}", forward), Row(f"backward {named}", backward)]


def sums(device: torch.device, sizes: tuple[int, ...], queries: int) -> Row:
    """Sums by key of (B, L, Hq, Hk, D), of all queries or of the last ones."""
    batch, length, heads, heads_k, dim = sizes
    q, k = drawn(device, (batch, length, heads, dim), (batch, length, heads_k, dim))
    q = q[:, length - queries :]
    _, lse = attention(q, k, k, is_causal=True, return_lse=True)

    def run(**named: Any) -> Tensor:
        return statistics.key_sums(q, k, lse, is_causal=True, **named)

    def error() -> float:
        exact = torch.zeros(length, dtype=torch.float64, device=device)
        for _, _, logs in probabilities(q, k, True):
            exact += logs.exp().sum(0)
        return off(run(heads="q")[0, 0], exact)

    def error_of_groups() -> float:
        return off(run()[0, 0], run(heads="q")[0, : heads // heads_k].double().sum(0))

    weights = torch.rand(batch, heads, queries, device=device)
    few = queries < length
    lines = [
        Line("forward pass", lambda: attention(q, k, k, is_causal=True)),
        Line("key_sums", run, None if few else 0.6, error_of_groups),
        Line("key_sums, weights", partial(run, weights=weights)),
        Line("key_sums, heads q", partial(run, heads="q"), error=error),
    ]
    if few:  # the bound is reading k
        lines = [*lines[1:], lines[0]]
    floor = 1.3 * k.numel() * k.element_size() / BYTES_A_MS if few else 0.0
    return Row(f"sums {','.join(map(str, sizes))}, {queries} queries", lines, floor)


def teacher(device: torch.device, sizes: tuple[int, ...]) -> Row:
    """The teacher of (queries, keys, heads, D, Dv, K), with values that are part of the keys."""
    rows, keys, heads, dim, dim_v, number = sizes
    q, k = drawn(device, (1, rows, heads, dim), (1, keys, 1, dim))
    chosen = [
        torch.rand(len(part), keys, device=device).topk(number).indices for part in torch.arange(rows).split(1024)
    ]
    index = torch.cat(chosen).sort(-1).values
    lists = PreparedMask.from_lists(index, seqlen_q=rows, seqlen_k=keys)
    v = k[..., :dim_v]
    _, lse = attention(q, k, v, lists, return_lse=True)

    def error() -> float:
        some = torch.arange(0, rows, max(1, rows // 8), device=device)
        own = k[0, index[some], 0].double()
        s = torch.einsum("rhd,rkd->rhk", q[0, some].double(), own) * dim**-0.5
        return off(statistics.list_sums(q, k, lse, lists)[0, 0, some], s.softmax(-1).sum(1))

    lines = [
        Line("forward pass", lambda: attention(q, k, v, lists)),
        Line("list_sums", lambda: statistics.list_sums(q, k, lse, lists), 0.6, error),
    ]
    return Row(f"teacher {','.join(map(str, sizes))}", lines)


def rows_of(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what makes the rows, by name; no tensor exists before its row is timed."""
    length, backend = (128, "auto") if quick else (4096, "triton")
    heads = 4 if quick else 16
    made: dict[str, Callable[[], list[Row]]] = {
        f"{name} {dim} {is_causal}": partial(passes, device, (2, length, heads, dim), is_causal, each, name == "passes")
        for name, each, dims in (("passes", backend, (64, 128)), ("largest", "auto", (64, 128, 256)))
        for dim in dims
        for is_causal in (False, True)
    }
    wide, snap = (256, 512) if quick else (16384, 32768)
    for sizes, queries in (
        ((1, wide, 16, 16, 128), wide),
        ((1, wide, 16, 16, 64), wide),
        ((1, wide, 32, 8, 128), wide),
        ((4, wide // 4, 16, 16, 256), wide // 4),
        ((1, snap, 32, 8, 128), 64),
        ((1, snap, 16, 1, 128), 64),
    ):
        made[f"sums {sizes} {queries}"] = lambda sizes=sizes, queries=queries: [sums(device, sizes, queries)]  # type: ignore[misc]
    quarter = (32, 64, 4, 24, 16, 16) if quick else (8192, 32768, 128, 576, 512, 2048)
    made["teacher"] = lambda: [teacher(device, quarter)]
    return made


def show(row: Row, device: torch.device) -> float:
    """Time and print a row; return the largest error."""
    runners = [Runner(line.run) for line in row.lines]
    measure(runners, device, rep_ms=200, least=5, most=100)
    times = [numbers.median(runner.ms) if runner.ms else float("nan") for runner in runners]
    worst = 0.0
    for line, runner, ms in zip(row.lines, runners, times, strict=True):
        error = float("nan") if line.error is None or runner.error is not None else line.error()
        worst = max(worst, error) if error == error else worst
        first = times[0] if not row.floor else row.floor
        goal = "1" if row.floor and line is row.lines[0] else "" if line.goal is None else f"{line.goal:g}"
        share, said = f"{ms / first:.3f}", "" if line.error is None else f"{error:.1e}"
        failed = "" if runner.error is None else f" {runner.error}"[:80]
        print(f"| {row.name} | {line.name} | {ms:.4f} | {share} | {goal} | {said}{failed} |", flush=True)
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="WORD", help="rows with this word in their name: passes, largest, sums or teacher"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    leave_default_stream(device)
    print(machine.line(machine.describe(device)))
    print("| call | with | ms | of the first line, or of 1.3 times reading k | goal | largest error |")
    print("| --- | --- | --- | --- | --- | --- |")
    worst = 0.0
    for name, make in rows_of(device, args.quick).items():
        if args.only is None or args.only in name:
            worst = max([worst, *(show(row, device) for row in make())])
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
