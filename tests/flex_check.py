"""Check the flex backend on a GPU: random calls, forward and backward, against the formula in fp64.

    python tests/flex_check.py                    # compile counts, memory, 112 calls of 16 classes, then sequences
    python tests/flex_check.py --only sequences   # these alone: 84 calls of 12 classes, memory, no synchronisation
    python tests/flex_check.py --device cpu       # on FlexAttention's own dense formula, to try the script itself

A class is what is compiled once: dtype, heads, head dims, broadcast forms, flags. Its calls differ in lengths, batch,
window, mask, values and empty rows. A tensor passes where err(x) = |x - x64| / |x64| is at most 1.5 times the error of
the plain formula in the same dtype, plus 1e-5; the figures printed are err / that bound, so at most 1. Exit code 1 if
any is larger, is NaN, or if a count or a limit is not what it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flex_sequence_classes as of_sequences  # noqa: E402
from sequence_calls import assert_accurate, run, spoiled  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.problem import dtype_name  # noqa: E402
from flash_dmattn.reference import formula, yardstick  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


class Class(NamedTuple):
    """One class of calls; a form has "b", "h" (Hq heads) or "k" (Hk heads), "i", "j" for the dims it has."""

    dtype: torch.dtype
    heads: tuple[int, int]
    dims: tuple[int, int]
    lengths: tuple[str, str]
    mask: str | None
    bias: str | None
    needs_grad: str
    flags: str

    def __str__(self) -> str:
        mask, bias = (form if form is None else form or "1" for form in (self.mask, self.bias))
        return (
            f"{dtype_name(self.dtype)} H{self.heads[0]}/{self.heads[1]} D{self.dims[0]}/{self.dims[1]} "
            f"L {self.lengths[0]}/{self.lengths[1]} mask {mask} bias {bias} d[{self.needs_grad}] {self.flags}"
        )


# Every dtype, GQA of 1, 2, 3, 4 and 8, head dims that are and are not powers of 2, all lengths that choose another
# kernel (short ones decode), every dim broadcast and not, each flag, subsets of the gradients. A bias that is broadcast
# over keys goes with lse: without, its gradient is 0 but for rounding, and a relative error says nothing.
CLASSES = (
    Class(BF16, (4, 2), (64, 64), ("long", "long"), "bkij", "kj", "qkvb", "causal"),
    Class(FP32, (4, 2), (64, 64), ("long", "long"), "bkij", "kj", "qkvb", "causal lse"),
    Class(BF16, (4, 4), (128, 128), ("long", "long"), "bij", "bhij", "qkvb", "lse"),
    Class(FP32, (6, 2), (32, 48), ("long", "long"), "hij", "bki", "qkvb", "softcap causal lse"),
    Class(BF16, (8, 1), (96, 64), ("long", "long"), "j", "hij", "qkvb", "window lse"),
    Class(BF16, (6, 2), (80, 128), ("long", "short"), "i", "ij", "b", "softcap"),
    Class(FP32, (4, 4), (128, 64), ("short", "long"), "bkij", "bj", "qkvb", "causal window lse"),
    Class(BF16, (8, 2), (64, 64), ("short", "long"), "bj", "kj", "qkvb", "causal lse"),
    Class(BF16, (4, 1), (192, 128), ("long", "long"), "ij", "h", "kvb", "scale causal lse"),
    Class(FP32, (2, 2), (16, 16), ("long", "long"), None, "", "qkvb", "lse causal"),
    Class(BF16, (4, 2), (256, 256), ("long", "long"), "bkij", "hj", "qkvb", "causal"),
    Class(BF16, (4, 2), (64, 64), ("one", "long"), "bkj", "bkj", "qkvb", "causal lse"),
    Class(BF16, (4, 2), (64, 64), ("long", "long"), None, None, "qkv", "causal window lse"),
    Class(FP32, (3, 1), (72, 40), ("long", "one"), "bi", "bk", "qkvb", "lse"),
    Class(BF16, (4, 2), (64, 64), ("long", "long"), "", "bhi", "qb", "window softcap lse"),
    Class(BF16, (4, 2), (128, 128), ("long", "long"), "bkij", "bhij", "", "causal softcap"),
)
LENGTHS = {"one": (1, 1), "short": (2, 128), "long": (129, 700)}


class Call(NamedTuple):
    """The tensors and flags of one call; `leaves` are those of q, k, v, bias that take a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    flags: dict[str, Any]


def shape_of(form: str, batch: int, heads: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """The 4-D shape of a mask or bias form."""
    head = heads[0] if "h" in form else heads[1] if "k" in form else 1
    return batch if "b" in form else 1, head, seqlen_q if "i" in form else 1, seqlen_k if "j" in form else 1


def draw(kind: Class, rng: random.Random, device: str) -> Call:
    """A random call of a class."""
    torch.manual_seed(rng.randrange(2**31))
    batch = rng.randint(2, 3)
    seqlen_q, seqlen_k = (rng.randint(*LENGTHS[name]) for name in kind.lengths)
    if rng.random() < 0.25 and kind.lengths == ("long", "long"):
        seqlen_q, seqlen_k = (128 * rng.randint(2, 5) for _ in range(2))
    (heads, heads_k), (dim, dim_v) = kind.heads, kind.dims
    shapes = ((seqlen_q, heads, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v))
    q, k, v = (torch.randn(batch, *shape, device=device).to(kind.dtype) for shape in shapes)
    mask = bias = None
    sizes = (batch, kind.heads, seqlen_q, seqlen_k)
    if kind.mask is not None:
        mask = torch.rand(shape_of(kind.mask, *sizes), device=device) < rng.choice((0.02, 0.3, 0.9))
        if mask.numel() == 1:
            mask.fill_(rng.random() < 0.8)
        if mask.shape[2] > 8:
            mask[:, :, rng.randrange(mask.shape[2])] = False
            if mask.shape[3] > 260:
                mask[:, :, :128, 128:256] = False
                mask[:, :, 128:256, :128] = True
    if kind.bias is not None:
        bias = torch.randn(shape_of(kind.bias, *sizes), device=device) * rng.choice((0.5, 3.0))
        if bias.shape[3] > 8:
            bias[..., rng.randrange(bias.shape[3])] = -torch.inf
        bias = bias.to(rng.choice((kind.dtype, FP32)) if "b" not in kind.needs_grad else kind.dtype)
    flags: dict[str, Any] = {"is_causal": "causal" in kind.flags}
    if "window" in kind.flags:
        flags["window_size"] = (rng.randint(0, 400), rng.choice((0, 20)))
    if "softcap" in kind.flags:
        flags["softcap"] = 2.5
    if "scale" in kind.flags:
        flags["softmax_scale"] = 0.21
    return Call(q, k, v, mask, bias, flags)


def leaves_of(call: Call, needs_grad: str, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Fresh q, k, v, bias, in another dtype where one is given, requiring the gradients in `needs_grad`."""
    tensors = (call.q, call.k, call.v, call.bias)
    return [
        x if x is None else x.detach().to(dtype or x.dtype).requires_grad_(name in needs_grad)
        for name, x in zip("qkvb", tensors, strict=True)
    ]


def results(
    out: Tensor, lse: Tensor | None, leaves: list[Tensor | None], seed: int, at_empty_rows: float = 0.0
) -> dict[str, Tensor]:
    """Out, lse and every gradient, for the same random dout and dlse in every dtype.

    What arrives for the lse of an empty row must change nothing: flex is given inf there, the formula 0.
    """
    found = {"out": out} if lse is None else {"out": out, "lse": lse}
    wanted = {f"d{n}": x for n, x in zip("qkvb", leaves, strict=True) if x is not None and x.requires_grad}
    generator = torch.Generator(out.device).manual_seed(seed)
    incoming = {}
    for name, y in found.items():
        gradient = torch.randn(y.shape, generator=generator, device=y.device)
        if name == "out":  # rounded to 16 bits first, so that every dtype receives the same
            gradient = gradient.bfloat16()
        else:
            gradient = gradient.masked_fill(y == -torch.inf, at_empty_rows)
        if y.requires_grad:
            incoming[name] = gradient.to(y.dtype)
    if wanted:
        gradients = torch.autograd.grad([found[n] for n in incoming], list(wanted.values()), list(incoming.values()))
        found |= dict(zip(wanted, gradients, strict=True))
    return {name: x.detach() for name, x in found.items()}


def plain_results(kind: Class, call: Call, seed: int) -> dict[str, Tensor]:
    """Out, lse and every gradient, by plain PyTorch in the dtype of the call."""
    out, lse = formula.attention(call.q, call.k, call.v, call.mask, call.bias, **call.flags)
    found = {"out": out, "lse": lse} if "lse" in kind.flags else {"out": out}
    generator = torch.Generator(out.device).manual_seed(seed)
    # Drawn as in `results`, in the order out, lse.
    dout = torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator, device=out.device) if "lse" in found else None
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    gradients = yardstick.gradients(dout, dlse, call.q, call.k, call.v, call.mask, call.bias, **call.flags)
    named = {f"d{n}": g for n, g in zip("qkvb", gradients, strict=True) if g is not None and n in kind.needs_grad}
    return found | named


def error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact| over finite elements; an infinity or a NaN in another place is an infinite error."""
    finite = exact.isfinite()
    if not torch.equal(x.double()[~finite], exact[~finite]) or not x[finite].isfinite().all():
        return float("inf")
    size = exact[finite].norm()
    difference = (x.double() - exact)[finite].norm()
    return float(difference / size) if size > 0 else float(difference)


def ratios(kind: Class, call: Call, seed: int) -> dict[str, float]:
    """err / bound of each tensor of one call."""
    leaves: list[Any] = leaves_of(call, kind.needs_grad)
    returns_lse = "lse" in kind.flags
    q, k, v, bias = leaves
    output = flash_dmattn.attention(
        q, k, v, call.mask, bias, return_lse=returns_lse, backend="flex", deterministic=False, **call.flags
    )
    given_out, given_lse = output if isinstance(output, tuple) else (output, None)
    found = results(given_out, given_lse, leaves, seed, at_empty_rows=torch.inf)
    exact_leaves: list[Any] = leaves_of(call, kind.needs_grad, torch.float64)
    q, k, v, bias = exact_leaves
    out, lse = formula.attention(q, k, v, call.mask, bias, **call.flags)
    exact = results(out, lse if returns_lse else None, exact_leaves, seed)
    plain = plain_results(kind, call, seed)
    return {
        name: error(x, exact[name]) / (yardstick.RATIO * error(plain[name], exact[name]) + yardstick.FLOOR)
        for name, x in found.items()
    }


def graphs_compiled() -> int:
    """Graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def check_classes(per_class: int, seed: int, device: str, budget: float, skip: int) -> tuple[int, float, bool]:
    """Run every class from number `skip` on; the number of calls, the worst ratio, and whether all ran and passed."""
    rng = random.Random(seed)
    start, done, worst, passed = time.perf_counter(), 0, 0.0, True
    for number, kind in enumerate(CLASSES):
        seeds = [rng.randrange(2**31) for _ in range(per_class)]
        if number < skip:
            continue
        if time.perf_counter() - start > budget:
            print(f"time budget of {budget:.0f} s spent: {len(CLASSES) - number} classes were not run", flush=True)
            return done, worst, False
        before, first_call = graphs_compiled(), 0.0
        seen: dict[str, float] = {}
        class_start = time.perf_counter()
        for index, call_seed in enumerate(seeds):
            call = draw(kind, random.Random(call_seed), device)
            try:
                found = ratios(kind, call, call_seed)
            except Exception as failure:  # a class that cannot run is a result, and the others still count
                print(f"  FAILED {kind}, call {index}, seed {call_seed}: {type(failure).__name__}: {failure}"[:3000])
                passed = False
                break
            if index == 0:
                first_call = time.perf_counter() - class_start
            done += 1
            for name, ratio in found.items():
                seen[name] = max(seen.get(name, 0.0), ratio)
                if not ratio <= 1.0:
                    lengths = (call.q.shape[0], call.q.shape[1], call.k.shape[1])
                    print(f"  FAILED {name} {ratio:.3g}: {kind}, (B, Lq, Lk) {lengths} {call.flags}, seed {call_seed}")
                    passed = False
        worst = max(worst, *seen.values()) if seen else worst
        figures = " ".join(f"{name} {ratio:.2f}" for name, ratio in seen.items())
        print(
            f"[{number + 1:2}/{len(CLASSES)}] {time.perf_counter() - start:5.0f} s  {kind}\n"
            f"        graphs {graphs_compiled() - before}, first call {first_call:.1f} s, err / bound: {figures}",
            flush=True,
        )
    return done, worst, passed


def attend(batch: int, seqlen: int, heads: int, device: str, masks: int, backward: bool = True) -> float:
    """Seconds per call after the first, of calls that differ in mask alone, with a per-key bias that learns."""
    shape = (batch, seqlen, heads, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=BF16).requires_grad_(backward) for _ in range(3))
    bias = torch.randn(1, heads, 1, seqlen, device=device, dtype=BF16).requires_grad_(backward)
    seconds = []
    for index in range(masks):
        mask = torch.rand(1, 1, seqlen, seqlen, device=device) < (index + 1) / (masks + 1)
        synchronize(device)
        start = time.perf_counter()
        out = flash_dmattn.attention(q, k, v, mask, bias, is_causal=True, backend="flex")
        assert isinstance(out, Tensor)
        if backward:
            out.sum().backward()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[(len(seconds) - 1) // 2]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def check_counts(device: str) -> bool:
    """Fifty masks of one shape compile once; report the time of a small call."""
    passed = True
    for backward, name in ((True, "forward + backward"), (False, "forward")):
        before = graphs_compiled()
        with torch.set_grad_enabled(backward):
            median = attend(2, 300, 4, device, 50, backward)
        graphs = graphs_compiled() - before
        passed &= graphs == 1
        print(f"50 masks of one shape, {name}: {graphs} graph compiled, median call {1e6 * median:.0f} us", flush=True)
    return passed


def check_memory() -> bool:
    """A bias of (1, H, 1, L) makes no (B, H, L, L) buffer in either pass."""
    batch, seqlen, heads = 1, 4096, 16
    dense = 2 * batch * heads * seqlen * seqlen
    attend(batch, seqlen, heads, "cuda", 2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(batch, seqlen, heads, "cuda", 2)
    peak = torch.cuda.max_memory_allocated() - before
    megabytes = f"{peak / 2**20:.0f} MB; bf16 scores alone would be {dense / 2**20:.0f} MB"
    print(f"peak of a call at L {seqlen}, H {heads}: {megabytes}", flush=True)
    return peak < dense


def check_sequences(per_class: int, seed: int, device: str, budget: float, skip: int) -> tuple[int, bool]:
    """The same of classes of sequences, with NaN in all rows of none; the number of calls, and whether all passed."""
    rng = random.Random(seed)
    start, done, passed = time.perf_counter(), 0, True
    for number, kind in enumerate(of_sequences.CLASSES):
        seeds = [rng.randrange(2**31) for _ in range(per_class)]
        if number < skip:
            continue
        if time.perf_counter() - start > budget:
            left = len(of_sequences.CLASSES) - number
            print(f"time budget of {budget:.0f} s spent: {left} classes of sequences were not run", flush=True)
            return done, False
        before = graphs_compiled()
        for index, call_seed in enumerate(seeds):
            call = of_sequences.draw(kind, random.Random(call_seed), device)
            try:
                results = {name: None if x is None else x.cpu() for name, x in run(spoiled(call), "flex").items()}
                assert_accurate(results, call)
            except Exception as failure:
                print(f"  FAILED {kind}, call {index}, seed {call_seed}: {type(failure).__name__}: {failure}"[:3000])
                passed = False
                if not isinstance(failure, AssertionError):
                    break
            done += 1
        print(
            f"[{number + 1:2}/{len(of_sequences.CLASSES)}] {time.perf_counter() - start:5.0f} s  {kind}\n"
            f"        graphs {graphs_compiled() - before}",
            flush=True,
        )
    return done, passed


def check_sequence_memory() -> bool:
    """A call of many sequences never waits for the host, and makes no tensor of all queries by all keys."""
    edges = torch.arange(0, 65537, 4096, device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(65536, 4, 64, device="cuda", dtype=BF16).requires_grad_() for _ in range(3))
    bias = torch.randn(4, 1, 65536, device="cuda", dtype=BF16).requires_grad_()
    for turn in ("compiles", "counts"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error" if turn == "counts" else "default")
        try:
            sequences = flash_dmattn.Sequences.packed(edges, max_seqlen_q=4096)
            out = flash_dmattn.attention(q, k, v, None, bias, is_causal=True, sequences=sequences, backend="flex")
            assert isinstance(out, Tensor)
            out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    print(f"peak of 16 sequences of 4096: {peak:.0f} MB; a bool for each pair of tokens would be 4096 MB", flush=True)
    return peak < 1024


def main() -> int:
    """Run everything; 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--per-class", type=int, default=7, help="calls of each class (default 7: 112 in all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no new class is begun")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first classes, so many")
    parser.add_argument("--only", choices=("dense", "sequences"), help="leave out the other classes")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu, FlexAttention's dense formula"
    print(f"torch {torch.__version__}, {name}; seed {options.seed}", flush=True)
    fixture = contextlib.nullcontext()
    if options.device == "cpu":
        from flex_fixture import eager_flex

        fixture = eager_flex()
    verdict: dict[str, bool] = {}
    done, classes, worst = 0, 0, 0.0
    given = (options.per_class, options.seed, options.device, options.budget, options.skip)
    with fixture:
        if options.only != "sequences":
            verdict["compile counts"] = check_counts(options.device)
            verdict["memory"] = options.device == "cpu" or check_memory()
            done, worst, verdict["accuracy"] = check_classes(*given)
            classes += len(CLASSES)
        if options.only != "dense":
            verdict["memory of sequences"] = options.device == "cpu" or check_sequence_memory()
            of_lengths, verdict["sequences"] = check_sequences(*given)
            done, classes = done + of_lengths, classes + len(of_sequences.CLASSES)
    failed = [what for what, passed in verdict.items() if not passed]
    print(
        f"{'FAILED: ' + ', '.join(failed) if failed else 'passed'}: {done} calls of {classes} classes, "
        f"worst err / bound of dense ones {worst:.3f} (at most 1), {graphs_compiled()} graphs compiled"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
