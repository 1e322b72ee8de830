"""Times attention with products by distance, or values by position, in 16 bits: `python -m benchmarks.positions`.

Calls have the sizes of Parakeet, Conformers, Enformer, DeBERTa v2 and Wav2Vec2-BERT, with a mask of padding, and of
Point Transformer V3. Ways: "plain" is our call without positions; "ours" has a `Projected`, or for points three
`Relative` with positions; "tensor" makes the dense bias as the models do, by a product and `rel_shift` or a gather, for
`F.scaled_dot_product_attention`. Both passes are timed in turns, and each way
tells its peak memory without inputs and outputs, and the largest error of out and its gradients against fp64, in two
batch entries. Then come the kernels of a part by themselves, in milliseconds and in picoseconds a score.

    python -m benchmarks.positions                        # a GPU: two to three minutes
    python -m benchmarks.positions --calls parakeet       # one row
    python -m benchmarks.positions --quick                # small sizes, on a CPU too
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_dmattn
from flash_dmattn import projected
from flash_dmattn.bias_makers import ProjectedMaker, RelativeMaker, Term
from flash_dmattn.biases import Projected, Relative

from . import machine
from .timing import Runner, leave_default_stream, measure


class Sizes(NamedTuple):
    """Sizes of a call; a table of `reach` clamps distances beyond it, and 0 is a row for every distance.

    Tables of `axes` have a value for each head and difference of coordinates, and no row.
    """

    batch: int
    heads: int
    length: int
    dim: int
    dim_v: int = 0
    reach: int = 0
    dropout: float = 0.0
    both_sides: bool = False
    axes: int = 0


CALLS = {
    "parakeet": Sizes(16, 8, 1500, 128),
    "conformer L": Sizes(32, 8, 750, 64),
    "enformer": Sizes(4, 8, 1536, 64, 192, dropout=0.05),
    "deberta v2": Sizes(32, 12, 512, 64, reach=511, both_sides=True),
    "wav2vec2-bert": Sizes(8, 16, 1500, 64, reach=36),
    "point transformer v3": Sizes(100, 4, 1024, 16, reach=32, axes=3),
    "long, wide": Sizes(4, 8, 4096, 128),
}


class Call(NamedTuple):
    """The tensors of a call; `names` are those with a gradient, in order."""

    sizes: Sizes
    leaves: dict[str, Tensor]
    mask: Tensor | None
    dout: Tensor
    coordinates: Tensor  # (batch, length, axes)

    def bias(self) -> Projected | Relative:
        reach, x = self.sizes.reach, self.leaves
        if self.sizes.axes:
            made: Relative | None = None
            for values, axis in zip(x["table"].unbind(0), (-self.coordinates).unbind(2), strict=True):
                made = Relative(values, reach, "clamp", (axis, axis), made)
            assert made is not None
            return made
        if not reach:
            return Projected(x["x"], x["table"], self.sizes.length - 1)
        plus = Projected(x["k"], x["other"], reach, "clamp", "keys") if self.sizes.both_sides else None
        return Projected(x["x"], x["table"], reach, "clamp", plus=plus)


def make(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Call:
    """Draw a call; a quarter of the keys of every second entry is padding, except among points.

    Points are in the order of a curve, so that steps from one to the next are small.
    """
    random = torch.Generator(device).manual_seed(0)
    batch, heads, length, dim, dim_v, reach, *_ = sizes

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype).requires_grad_()

    rows = 2 * (reach or length - 1) + 1
    leaves = {name: leaf(batch, length, heads, dim) for name in ("q", "k", *("x",) * (not sizes.axes))}
    leaves |= {"v": leaf(batch, length, heads, dim_v or dim)}
    leaves["table"] = leaf(sizes.axes, heads, rows) if sizes.axes else leaf(heads, rows, dim)
    if sizes.both_sides:
        leaves["other"] = leaf(heads, rows, dim)
    used = torch.where(torch.arange(batch, device=device) % 2 == 0, length, length - length // 4)
    mask = None if sizes.axes else (torch.arange(length, device=device) < used[:, None])[:, None, None]
    steps = torch.randint(-1, 2, (batch, length, sizes.axes), generator=random, device=device)
    return Call(sizes, leaves, mask, leaf(batch, length, heads, dim_v or dim).detach(), 3 * steps.cumsum(1))


def plain(c: Call) -> Tensor:
    x = c.leaves
    return flash_dmattn.attention(x["q"], x["k"], x["v"], c.mask, dropout_p=c.sizes.dropout)


def ours(c: Call) -> Tensor:
    x = c.leaves
    return flash_dmattn.attention(x["q"], x["k"], x["v"], c.mask, c.bias(), dropout_p=c.sizes.dropout)


def shifted(x: Tensor, table: Tensor, reach: int, is_mirrored: bool = False) -> Tensor:
    """The products of every score as the models make them: by rel_shift, or by a gather where distances are clamped."""
    length = x.shape[1]
    made = x.transpose(1, 2) @ table.transpose(1, 2)  # (B, H, L, n)
    if not reach:
        moved = F.pad(made, (1, 0)).view(*made.shape[:2], -1, length)
        return moved[:, :, 1:].view(made.shape)[..., :length]
    at = torch.arange(length, device=x.device)
    place = (reach + (at - at[:, None]) * (-1 if is_mirrored else 1)).clamp(0, 2 * reach)
    gathered = made.gather(-1, place.expand(*made.shape[:2], -1, -1))
    return gathered.transpose(2, 3) if is_mirrored else gathered


def looked_up(c: Call) -> Tensor:
    """The sum of the values of each axis as Point Transformer V3 makes it, by index_select."""
    axes, reach, table = c.sizes.axes, c.sizes.reach, c.leaves["table"]
    difference = (c.coordinates[:, :, None] - c.coordinates[:, None]).clamp(-reach, reach)
    rows = difference + reach + torch.arange(axes, device=table.device) * (2 * reach + 1)
    joined = table.transpose(1, 2).flatten(0, 1)
    return joined.index_select(0, rows.flatten()).view(*rows.shape, -1).sum(3).permute(0, 3, 1, 2)


def tensor(c: Call) -> Tensor:
    x, scale = c.leaves, c.sizes.dim**-0.5
    q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
    if c.sizes.axes:
        return F.scaled_dot_product_attention(q, k, v, looked_up(c)).transpose(1, 2)
    assert c.mask is not None
    bias = shifted(x["x"], x["table"], c.sizes.reach)
    if c.sizes.both_sides:
        bias = bias + shifted(x["k"], x["other"], c.sizes.reach, is_mirrored=True)
    bias = (bias * scale).masked_fill(~c.mask, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=c.sizes.dropout).transpose(1, 2)


WAYS: dict[str, Callable[[Call], Tensor]] = {"plain": plain, "ours": ours, "tensor": tensor}


def gradients(c: Call, out: Tensor) -> list[Tensor | None]:
    leaves = list(c.leaves.values())
    return list(torch.autograd.grad(out, leaves, c.dout, retain_graph=True, allow_unused=True))


def error_of(c: Call, way: Callable[[Call], Tensor]) -> float:
    """The largest error of out and the gradients against a tensor in fp64, in the first two entries."""
    few = {name: x if name in ("table", "other") else x[:2] for name, x in c.leaves.items()}
    results = []
    for dtype, run in ((torch.float64, tensor), (c.dout.dtype, way)):
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in few.items()}
        mask, sizes = None if c.mask is None else c.mask[:2], c.sizes._replace(batch=2, dropout=0.0)
        part = Call(sizes, leaves, mask, c.dout[:2].to(dtype), c.coordinates[:2])
        out = run(part)
        results.append([out.detach(), *gradients(part, out)])
    pairs = [(a, b) for a, b in zip(*results, strict=True) if a is not None and b is not None]
    return max(float((b.double() - a).norm() / a.norm()) for a, b in pairs)


def time_call(name: str, c: Call, device: torch.device) -> None:
    """Print a row for each way: milliseconds of both passes, peak memory, and errors."""
    forward = {way: Runner(partial(run, c)) for way, run in WAYS.items()}
    with torch.no_grad():
        measure(list(forward.values()), device, rep_ms=100, least=5, most=100)
    outs = {way: run(c) for way, run in WAYS.items()}
    backward = {way: Runner(partial(gradients, c, out)) for way, out in outs.items()}
    measure(list(backward.values()), device, rep_ms=100, least=5, most=100)
    del outs
    for way, run in WAYS.items():
        times = [statistics.median(each[way].ms) if each[way].ms else float("nan") for each in (forward, backward)]
        peak = 0.0
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            made = gradients(c, run(c))
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            del made
        off = "" if way == "plain" else f"{error_of(c, run):.1e}"
        failed = [str(each[way].error)[:60] for each in (forward, backward) if each[way].error is not None]
        print(
            f"| {name} | {way} | {times[0]:.3f} | {times[1]:.3f} | {peak:.0f} | {off}{' '.join(failed)} |", flush=True
        )


def time_kernels(name: str, c: Call, device: torch.device) -> None:
    """Print a row for each kernel of a part: the scores, the gradient of content, and of the table."""
    if c.sizes.axes:
        time_gathers(name, c, device)
        return
    x, sizes = {key: t.detach() for key, t in c.leaves.items()}, c.sizes
    clamps, zero = bool(sizes.reach), sizes.reach or sizes.length - 1
    leaves = projected._Leaves(x["q"], x["k"], x["v"], None, (x["x"], x["table"]))
    maker = ProjectedMaker((Term(zero, clamps),))
    entries = projected._entries_of(leaves, maker)
    bias: Any = maker.prepare(leaves.factors, leaves.lengths, sizes.dim**-0.5, entries)
    (products,) = bias.each  # few clamped rows have others
    part = x["x"][:entries]
    ds = products.scores(part)
    place = products.place(entries)
    ds = ds if place is None else place.copy_(ds)
    runners = {
        "scores": Runner(lambda: products.scores(part)),
        "gradient of content": Runner(lambda: products.gradients(ds, part, True, False)),
        "gradient of table": Runner(lambda: products.gradients(ds, part, False, True)),
    }
    time_parts(name, c, entries, runners, device)


def time_gathers(name: str, c: Call, device: torch.device) -> None:
    """Print a row for the bias by position of a part, and for the gradient of its tables."""
    bias: Any = c.bias()
    lengths = (c.sizes.length, c.sizes.length)
    maker, factors = RelativeMaker.of(bias, (c.sizes.batch,), lengths)
    factors = [x.detach() for x in factors]
    q, k, v = (c.leaves[key].detach() for key in "qkv")
    leaves = projected._Leaves(q, k, v, None, tuple(factors))
    entries = projected._entries_of(leaves, maker)
    made, span = maker.prepare(factors, lengths, 1.0, entries), slice(0, entries)
    scores, place = made.scores(span), made.place(entries)
    ds = scores if place is None else place.copy_(scores)
    runners = {
        "values": Runner(lambda: made.scores(span)),
        "gradient of the tables": Runner(lambda: made.add_gradient(ds, span, [True] * len(factors))),
    }
    time_parts(name, c, entries, runners, device)


def time_parts(name: str, c: Call, entries: int, runners: dict[str, Runner], device: torch.device) -> None:
    """Print a row for each kernel of a part."""
    measure(list(runners.values()), device, rep_ms=50, least=5, most=100)
    scores = entries * c.sizes.heads * c.sizes.length**2
    for kernel, runner in runners.items():
        ms = statistics.median(runner.ms)
        print(f"| {name} | {kernel}, {entries} entries | {ms:.3f} | {ms * 1e9 / scores:.2f} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time every call; return 1 where ours has more than twice the error of the tensor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=tuple(CALLS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    leave_default_stream(device)
    print(machine.line(machine.describe(device)))
    chosen = {name: CALLS[name] for name in args.calls}
    if args.quick:
        chosen = {
            name: sizes._replace(batch=2, heads=2, length=sizes.length // 16, dim=16, dim_v=24 if sizes.dim_v else 0)
            for name, sizes in chosen.items()
        }
    print(
        "| call | way | forward, ms | backward, ms | peak, MiB | largest error |\n| --- | --- | --- | --- | --- | --- |"
    )
    agreed = True
    for name, sizes in chosen.items():
        c = make(sizes, device, dtype)
        time_call(name, c, device)
        agreed = agreed and error_of(c, ours) <= 2 * error_of(c, tensor)
    print("\n| call | kernel | ms | ps a score |\n| --- | --- | --- | --- |")
    for name, sizes in chosen.items():
        time_kernels(name, make(sizes, device, dtype), device)
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
