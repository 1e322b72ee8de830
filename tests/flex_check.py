"""Check the flex backend on a GPU: random calls, forward and backward, against the formula in fp64.

    python tests/flex_check.py                    # compile counts, memory, calls of dense classes, then of sequences
    python tests/flex_check.py --only sequences   # these alone, memory, no synchronisation
    python tests/flex_check.py --device cpu       # on FlexAttention's own dense formula, to try the script itself

A class is what is compiled once: dtype, heads, head dims, broadcast forms, flags. Its calls differ in lengths, batch,
window, mask, values and empty rows. Results pass by the rule of accuracy of the tests. Exit code 1 if any does not, or
if a count or a limit is not what it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import accuracy  # noqa: E402
import sequence_calls  # noqa: E402
from cases import ALL, Case, Inputs  # noqa: E402
from draws import BF16, FORMS, FP16, FP32, QKV, Features, draw  # noqa: E402
from kernel_calls import Reached, chosen  # noqa: E402
from sequence_cases import SequenceCase  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.reference import formula  # noqa: E402

# A class has one value of each. Short lengths decode. Without lse a bias that is broadcast over keys has a gradient of
# zero but for rounding, and a relative error says nothing there.
LENGTHS = {"one": (1, 1), "short": (2, 128), "long": (129, 700)}
CLASSES: Features = {
    "seqlen_q": ("one", "short", "long", "long"),
    "seqlen_k": ("one", "short", "long", "long"),
    "num_heads_k": (1, 2),
    "group": (1, 2, 3, 4, 8),
    "head_dim": (16, 32, 64, 64, 72, 80, 96, 128, 192, 256),
    "head_dim_v": (0, 0, 40, 48, 64, 128),
    "dtype": (BF16, BF16, FP32),
    "mask": (None, *FORMS),
    "bias": (None, *FORMS),
    "needs_grad": (ALL, ALL, ("bias",), QKV, ("k", "v", "bias"), ("q", "bias"), ()),
    "is_causal": (True, False),
    "softcap": (0.0, 0.0, 2.5),
    "softmax_scale": (None, None, 0.21),
    "window_size": (None, (300, 0)),
    "dlse": (True, True, False),
    "sink": (None,),
    "dropout_p": (0.0,),
    "logits": (1.0,),
}


def classes(count: int = 150) -> list[dict[str, Any]]:
    """Choose so many of random classes as it takes for every value of every field; of a form, for every letter."""
    candidates: list[tuple[Any, Reached]] = []
    for number in range(count):
        rng = random.Random(number)
        kind = {name: rng.choice(choices) for name, choices in CLASSES.items()}
        per_query = kind["bias"] is not None and kind["bias"][3] == "1"
        reached = {
            (name, at, letter)
            for name, value in kind.items()
            for at, letter in (enumerate(value) if name in ("mask", "bias") and value else [(0, value)])
        }
        flags = (kind["is_causal"], kind["softcap"] > 0, kind["window_size"] is None)
        reached |= {("lengths", kind["seqlen_q"], kind["seqlen_k"]), ("flags", *flags)}
        if not per_query or kind["dlse"]:
            candidates.append((kind, reached))
    return [kind for kind, _ in chosen(candidates)]


def call_of(kind: dict[str, Any], rng: random.Random, device: str) -> tuple[Case, Inputs]:
    """Draw a call of a class; large masks have tiles without a pair, and tiles of pairs alone."""
    lengths = {name: rng.randint(*LENGTHS[kind[name]]) for name in ("seqlen_q", "seqlen_k")}
    if rng.random() < 0.25 and kind["seqlen_q"] == kind["seqlen_k"] == "long":
        lengths = {name: 128 * rng.randint(2, 5) for name in lengths}
    anew: Features = {
        "batch": (2, 3),
        "mask_kind": ("random", "empty_rows") if kind["mask"] and kind["mask"][2] == "Lq" else ("random",),
        "bias_kind": ("normal", "inf") if kind["bias"] and kind["bias"][3] == "Lk" else ("normal",),
        "bias_dtype": (None,) if "bias" in kind["needs_grad"] else (None, FP32),
        "window_size": (kind["window_size"] and (rng.randint(0, 400), rng.choice((0, 20))),),
    }
    one = {name: (value,) for name, value in (kind | lengths).items()}
    case = draw(rng, one | anew, rng.randrange(2**31))
    inputs = case.build(device)
    mask = inputs.mask
    if mask is not None and mask.shape[2] > 8 and mask.shape[3] > 260:
        mask[:, :, :128, 128:256] = False
        mask[:, :, 128:256, :128] = True
    return case, inputs


def check(kind: dict[str, Any], rng: random.Random, device: str) -> str:
    """Run one call of a class, and return it in words; without a gradient of lse, lse is not returned either."""
    case, inputs = call_of(kind, rng, device)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, **flags: Any) -> Any:
        call = {**flags, "backend": "flex", "deterministic": False}
        if case.dlse:
            return flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, **call)
        tensors = [x if x is None else x.detach() for x in (q, k, v, mask, bias)]
        return flash_dmattn.attention(q, k, v, mask, bias, **call), formula.attention(*tensors, **flags)[1]

    accuracy.assert_accurate(accuracy.run(attention, case, inputs), case, inputs)
    return case.repro()


# Classes of sequences; sinks in fp32 alone: beside 16 bits out is rounded once more, which the rule of accuracy does
# not know. Lengths, slots and windows are drawn for each call.
LEAVES = sequence_calls.LEAVES
ONE = SequenceCase((), sink=None, needs_grad=LEAVES)
BARE = ONE.with_(dlse=False, needs_grad=QKV)
FP32_SINK = {"dtype": FP32, "sink": FP32}
SEQUENCE_CLASSES: tuple[tuple[SequenceCase, dict[str, Any]], ...] = (
    (BARE, {"is_causal": True}),
    (ONE.with_(bias=("1", "Hq", "Lq", "Lk")), {"is_causal": True}),
    (
        ONE.with_(heads=(4, 4), mask=("Hk", "Tq", "Lk"), bias=("Hq", "1", "Tk"), **FP32_SINK),
        {"is_causal": True},
    ),
    (
        ONE.with_(
            **{"dtype": FP16, "heads": (6, 2), "head_dims": (80, 64)},
            **{"mask": ("B", "1", "Lq", "Lk"), "bias": ("Hk", "Tq", "Lk")},
        ),
        {"window_size": (300, 0)},
    ),
    (
        ONE.with_(heads=(4, 1), head_dims=(128, 128), mask=("1", "1", "Tk"), bias=("B", "Hk", "Lq", "Lk"), dlse=False),
        {"is_causal": True, "softcap": 2.5},
    ),
    (ONE.with_(heads=(4, 4), mask=("1", "Tq", "1"), bias=("1", "Hq", "1", "Lk")), {}),
    (
        ONE.with_(head_dims=(32, 48), mask=("B", "Hq", "1", "Lk"), bias=("Hq", "Tq", "1"), **FP32_SINK),
        {"window_size": (300, 0)},
    ),
    (ONE.with_(layout="padded", heads=(8, 2), bias=("1", "1", "Lq", "Lk")), {"is_causal": True}),
    (BARE.with_(layout="padded", mask=("B", "1", "Lq", "Lk")), {"is_causal": True}),
    (
        ONE.with_(
            **{"layout": "padded", "heads": (2, 2), "head_dims": (16, 16), **FP32_SINK},
            **{"mask": ("B", "1", "Lq", "1"), "bias": ("B", "Hq", "Lq", "Lk")},
        ),
        {},
    ),
    (ONE.with_(mask=("Hk", "Tq", "Lk"), bias=("Hq", "Tq", "Lk"), needs_grad=()), {"is_causal": True}),
    # Sequences of one query each.
    (
        ONE.with_(layout="padded", heads=(8, 1), bias=("1", "Hq", "1", "Lk"), needs_grad=(), most=(1, 1)),
        {"is_causal": True},
    ),
)
SEQUENCE_LENGTHS = (0, 1, 31, 64, 127, 128, 129, 200, 300, 520)


def check_sequences(kind: tuple[SequenceCase, dict[str, Any]], rng: random.Random, device: str) -> str:
    """Run one call of a class: other lengths, rows of no sequence in half of them, and NaN in all of these."""
    case, flags = kind
    number, is_one = rng.randint(2, 6), case.most == (1, 1)
    lengths = [(1 if is_one else rng.choice(SEQUENCE_LENGTHS), rng.choice(SEQUENCE_LENGTHS)) for _ in range(number)]
    lengths[0] = max(lengths[0][0], 1), max(lengths[0][1], 31)
    most_q, most_k = (max(side) for side in zip(*lengths, strict=True))
    has_spare = rng.random() < 0.5
    if "window_size" in flags:
        flags = {"window_size": (rng.randint(0, 300), rng.choice((0, 20)))}
    call = case.with_(
        lengths=tuple(lengths),
        spare=tuple(rng.choice((0, 1, 40)) * has_spare for _ in lengths),
        trailing=(3, 5),
        most=(1 if is_one else max(2, most_q), most_k + rng.choice((0, 8))),
        allowed=rng.choice((0.3, 0.9)),
        seed=rng.randrange(2**31),
    ).build(device, **flags)
    results = sequence_calls.run(sequence_calls.spoiled(call), "flex")
    sequence_calls.assert_accurate({name: None if x is None else x.cpu() for name, x in results.items()}, call)
    return call.told


def graphs_compiled() -> int:
    """Graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def check_classes(
    classes: Sequence[Any], check: Callable[[Any, random.Random, str], str], options: argparse.Namespace
) -> tuple[int, bool]:
    """Run calls of every class from number `skip` on; return how many ran, and whether all did and passed."""
    rng = random.Random(options.seed)
    start, done, passed = time.perf_counter(), 0, True
    for number, kind in enumerate(classes):
        seeds = [rng.randrange(2**31) for _ in range(options.per_class)]
        if number < options.skip:
            continue
        if time.perf_counter() - start > options.budget:
            print(
                f"time budget of {options.budget:.0f} s spent: {len(classes) - number} classes were not run", flush=True
            )
            return done, False
        before, told = graphs_compiled(), ""
        for index, seed in enumerate(seeds):
            try:
                told = check(kind, random.Random(seed), options.device)
            except Exception as failure:  # a class that cannot run is a result, and the others still count
                print(f"  FAILED {kind}, call {index}, seed {seed}: {type(failure).__name__}: {failure}"[:3000])
                passed = False
                if not isinstance(failure, AssertionError):
                    break
            done += 1
        print(
            f"[{number + 1:2}/{len(classes)}] {time.perf_counter() - start:5.0f} s  {told}\n"
            f"        graphs {graphs_compiled() - before}",
            flush=True,
        )
    return done, passed


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
    parser.add_argument("--per-class", type=int, default=7, help="calls of each class (default 7)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no new class is begun")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first classes, so many")
    parser.add_argument("--only", choices=("dense", "sequences"), help="leave out the other classes")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu, FlexAttention's dense formula"
    print(f"torch {torch.__version__}, {name}; seed {options.seed}", flush=True)
    fixture: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.device == "cpu":
        from flex_fixture import eager_flex

        fixture = eager_flex()
    verdict: dict[str, bool] = {}
    done = 0
    with fixture:
        if options.only != "sequences":
            verdict["compile counts"] = check_counts(options.device)
            verdict["memory"] = options.device == "cpu" or check_memory()
            calls, verdict["accuracy"] = check_classes(classes(), check, options)
            done += calls
        if options.only != "dense":
            verdict["memory of sequences"] = options.device == "cpu" or check_sequence_memory()
            calls, verdict["sequences"] = check_classes(SEQUENCE_CLASSES, check_sequences, options)
            done += calls
    failed = [name for name, passed in verdict.items() if not passed]
    print(
        f"{'FAILED: ' + ', '.join(failed) if failed else 'passed'}: {done} calls, {graphs_compiled()} graphs compiled"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
