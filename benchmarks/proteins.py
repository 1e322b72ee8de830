"""Trains attention modules of protein models in fp32, three ways: `python -m benchmarks.proteins`.

The modules have the formulas and the sizes of Boltz and Protenix: attention of a triangle, of tokens with a pair bias,
and of samples that share a pair bias. "plain" multiplies, adds bias and padding and takes the softmax, as those
projects do; "sdpa" adds both for `F.scaled_dot_product_attention`; "ours" is the call that our adapters make. All have
the same weights, and the same data at each step. The table has milliseconds of a step with its optimizer, the peak
memory, the first and the last loss, and how far the losses of all steps are from those of "plain". Exit status 1 if
those of "ours" are further off than both ten times those of "sdpa" and 1e-5.

    python -m benchmarks.proteins                      # a GPU: 200 steps, under a minute
    python -m benchmarks.proteins --precision high     # with TF32 allowed: another limit, 1e-2
    python -m benchmarks.proteins --quick              # small sizes, on a CPU too
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_dmattn
from flash_dmattn.dispatch.config import Decision
from flash_dmattn.integrations import attend

HIDDEN = -1e9  # what the projects add at keys that are padding
WARM = 5  # steps that are not timed
LIMITS = {"highest": 1e-5, "high": 1e-2}

# out (B, H, L, D) of q, k, v, a bias (1, H, L, L), and what is added for padding, (B or 1, 1, 1, L) or None.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, padding: Tensor | None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    scores = scores if padding is None else scores + padding
    return scores.softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, padding: Tensor | None) -> Tensor:
    added = bias if padding is None else bias + padding
    return F.scaled_dot_product_attention(q, k, v, added.expand(q.shape[0], -1, -1, -1))


def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, padding: Tensor | None) -> Tensor:
    masks = [] if padding is None else [padding]
    return attend(q, k, v, [bias], masks=masks, rest="none", dtype=torch.float32)


WAYS: dict[str, Attend] = {"plain": plain, "sdpa": sdpa, "ours": ours}


class Sizes(NamedTuple):
    """Sizes of a module: `rows` that are attended at once, or None for the rows of the pairs themselves."""

    length: int
    rows: int | None
    heads: int
    head_dim: int
    pair_dim: int
    padded: bool


MODULES = {
    "boltz triangle": Sizes(256, None, 4, 32, 128, True),
    "boltz tokens": Sizes(512, 1, 16, 24, 128, True),
    "protenix tokens": Sizes(512, 8, 16, 48, 128, False),
}


class GatedAttention(nn.Module):
    """Attention with a gate, whose bias is a projection of pairs; x is (rows, L, C), pairs are (L, L, pair_dim)."""

    def __init__(self, sizes: Sizes, attention: Attend) -> None:
        super().__init__()
        self.sizes, self.attention = sizes, attention
        width, inner = width_of(sizes), sizes.heads * sizes.head_dim
        self.norm, self.pair_norm = nn.LayerNorm(width), nn.LayerNorm(sizes.pair_dim)
        self.q, self.k, self.v, self.gate = (nn.Linear(width, inner, bias=n in (0, 3)) for n in range(4))
        self.pairs, self.out = nn.Linear(sizes.pair_dim, sizes.heads, bias=False), nn.Linear(inner, width)

    def forward(self, x: Tensor, pairs: Tensor, padding: Tensor | None) -> Tensor:
        normal = self.norm(x)
        shape = (self.sizes.heads, self.sizes.head_dim)
        q, k, v = (each(normal).unflatten(-1, shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        bias = self.pairs(self.pair_norm(pairs)).permute(2, 0, 1)[None]
        out = self.attention(q, k, v, bias, padding).transpose(1, 2).flatten(2)
        return x + self.out(self.gate(normal).sigmoid() * out)


def width_of(sizes: Sizes) -> int:
    """Return the channels of what a module attends; a triangle attends pairs."""
    return sizes.pair_dim if sizes.rows is None else sizes.heads * sizes.head_dim


class Training(NamedTuple):
    """One way of a module: the loss of each step, milliseconds of a step, GiB at the peak, our backends."""

    losses: Tensor
    milliseconds: float
    memory: float
    backends: str


def train(sizes: Sizes, attention: Attend, steps: int, device: torch.device) -> Training:
    """Train a module on random data, the same weights and data in each way."""
    torch.manual_seed(0)
    module = GatedAttention(sizes, attention).to(device)
    teacher = nn.Linear(width_of(sizes), width_of(sizes)).to(device).requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    random = torch.Generator(device).manual_seed(1)
    used = torch.arange(sizes.length, device=device) < (3 * sizes.length // 4 if sizes.padded else sizes.length)
    padding = torch.where(used, 0.0, HIDDEN)[None, None, None] if sizes.padded else None
    losses = torch.empty(steps, device=device)
    decisions: list[Decision] = []
    started = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        if step == WARM:
            wait(device)
            started = time.perf_counter()
        pairs = torch.randn(sizes.length, sizes.length, sizes.pair_dim, generator=random, device=device)
        x = pairs
        if sizes.rows is not None:
            x = torch.randn(sizes.rows, sizes.length, width_of(sizes), generator=random, device=device)
        with flash_dmattn.config(record=decisions):
            loss = (module(x, pairs, padding) - teacher(x).tanh())[:, used].square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    wait(device)
    milliseconds = 1e3 * (time.perf_counter() - started) / max(steps - WARM, 1)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    backends = sorted({f"{d.forward}/{d.backward}" for d in decisions})
    return Training(losses.double().cpu(), milliseconds, memory, " ".join(backends) or "-")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(name: str, sizes: Sizes, steps: int, limit: float, device: torch.device) -> bool:
    """Train a module in each way, print a row for each, and return whether the losses of ours are as those of plain."""
    first, apart = None, {}
    for way, attention in WAYS.items():
        trained = train(sizes, attention, steps, device)
        first = trained.losses if first is None else first
        apart[way] = ((trained.losses - first).abs() / first).max().item()
        is_wrong = way == "ours" and not apart[way] <= max(limit, 10 * apart["sdpa"])
        print(
            f"| {name} | {way} | {trained.milliseconds:.2f} | {trained.memory:.2f} | {trained.losses[0]:.6f} | "
            f"{trained.losses[-1]:.6f} | {apart[way]:.1e}{' WRONG' if is_wrong else ''} | {trained.backends} |",
            flush=True,
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return apart["ours"] <= max(limit, 10 * apart["sdpa"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train every module; return 1 where the losses of ours differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=tuple(MODULES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precision", choices=LIMITS, default="highest", help="torch's float32 matmul precision")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    device, before = torch.device(args.device), torch.get_float32_matmul_precision()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, fp32, precision {args.precision}, {args.steps} steps")
    print("| module | attention | step, ms | peak, GiB | first loss | last loss | losses apart | our backends |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    torch.set_float32_matmul_precision(args.precision)
    try:
        chosen = {name: MODULES[name] for name in args.modules}
        if args.quick:
            chosen = {name: x._replace(length=x.length // 16, heads=2, pair_dim=32) for name, x in chosen.items()}
        agreed = [compare(*row, args.steps, LIMITS[args.precision], device) for row in chosen.items()]
    finally:
        torch.set_float32_matmul_precision(before)
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
