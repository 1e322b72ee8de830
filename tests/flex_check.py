"""Check the flex backend on a GPU: random calls, forward and backward, against the formula in fp64.

    python tests/flex_check.py                    # compile counts, memory, 112 calls of 16 classes, then sequences
    python tests/flex_check.py --only sequences   # these alone: 84 calls of 12 classes, memory, no synchronisation
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
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import accuracy  # noqa: E402
import sequence_calls  # noqa: E402
from cases import Case, Inputs  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn import Sequences  # noqa: E402
from flash_dmattn.problem import dtype_name  # noqa: E402
from flash_dmattn.reference import formula  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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


def letters(form: str | None) -> tuple[str, ...] | None:
    """The shape of a mask or a bias as `Case` has it."""
    if form is None:
        return None
    heads = "Hq" if "h" in form else "Hk" if "k" in form else "1"
    return "B" if "b" in form else "1", heads, "Lq" if "i" in form else "1", "Lk" if "j" in form else "1"


def draw(kind: Class, rng: random.Random, device: str) -> tuple[Case, Inputs]:
    """Draw a call of a class; large masks have tiles without a pair, and tiles of pairs alone."""
    seqlen_q, seqlen_k = (rng.randint(*LENGTHS[name]) for name in kind.lengths)
    if rng.random() < 0.25 and kind.lengths == ("long", "long"):
        seqlen_q, seqlen_k = (128 * rng.randint(2, 5) for _ in range(2))
    case = Case(
        batch=rng.randint(2, 3),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=kind.heads[0],
        num_heads_k=kind.heads[1],
        head_dim=kind.dims[0],
        head_dim_v=kind.dims[1],
        dtype=kind.dtype,
        bias_dtype=kind.dtype if "b" in kind.needs_grad else rng.choice((kind.dtype, FP32)),
        mask=letters(kind.mask),
        mask_kind="random" if kind.mask is None or "i" not in kind.mask else rng.choice(("random", "empty_rows")),
        bias=letters(kind.bias),
        bias_kind=rng.choice(("normal", "inf")) if kind.bias is not None and "j" in kind.bias else "normal",
        is_causal="causal" in kind.flags,
        window_size=(rng.randint(0, 400), rng.choice((0, 20))) if "window" in kind.flags else None,
        softcap=2.5 if "softcap" in kind.flags else 0.0,
        softmax_scale=0.21 if "scale" in kind.flags else None,
        needs_grad=tuple("bias" if name == "b" else name for name in kind.needs_grad),
        dlse="lse" in kind.flags,
        seed=rng.randrange(2**31),
    )
    inputs = case.build(device)
    mask = inputs.mask
    if mask is not None and mask.shape[2] > 8 and mask.shape[3] > 260:
        mask[:, :, :128, 128:256] = False
        mask[:, :, 128:256, :128] = True
    return case, inputs


def check(kind: Class, rng: random.Random, device: str) -> None:
    """Run one call of a class; without a gradient of lse, lse is not returned either."""
    case, inputs = draw(kind, rng, device)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, **flags: Any) -> Any:
        call = {**flags, "backend": "flex", "deterministic": False}
        if case.dlse:
            return flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, **call)
        lse = formula.attention(
            *(x.detach() for x in (q, k, v)), mask, None if bias is None else bias.detach(), **flags
        )[1]
        return flash_dmattn.attention(q, k, v, mask, bias, **call), lse

    accuracy.assert_accurate(accuracy.run(attention, case, inputs), case, inputs)


class SequenceClass(NamedTuple):
    """One class of calls.

    A form is a word and letters: "position" with "b" (one for each sequence), "i", "j"; "rows", of packed queries, with
    "j"; "keys", packed. Each may have "h" (Hq heads) or "k" (Hk heads).
    """

    dtype: torch.dtype
    heads: tuple[int, int]
    dims: tuple[int, int]
    layout: str
    mask: str | None
    bias: str | None
    needs_grad: tuple[str, ...]
    flags: str

    def __str__(self) -> str:
        return (
            f"{self.layout} {dtype_name(self.dtype)} H{self.heads[0]}/{self.heads[1]} D{self.dims[0]}/{self.dims[1]} "
            f"mask {self.mask} bias {self.bias} d[{' '.join(self.needs_grad)}] {self.flags}"
        )


ALL, QKV = ("q", "k", "v", "bias"), ("q", "k", "v")
# Sinks in fp32 alone: beside 16 bits out is rounded once more, which the rule of accuracy does not know.
SEQUENCE_CLASSES = (
    SequenceClass(BF16, (4, 2), (64, 64), "packed", None, None, QKV, "causal"),
    SequenceClass(BF16, (4, 2), (64, 64), "packed", None, "position hij", ALL, "causal lse"),
    SequenceClass(FP32, (4, 4), (64, 64), "packed", "rows kj", "keys h", (*ALL, "sink"), "causal lse sink"),
    SequenceClass(FP16, (6, 2), (80, 64), "packed", "position bij", "rows kj", ALL, "window lse"),
    SequenceClass(BF16, (4, 1), (128, 128), "packed", "keys ", "position bkij", ALL, "softcap causal lse"),
    SequenceClass(BF16, (4, 4), (64, 64), "packed", "rows ", "position hj", ALL, "lse"),
    SequenceClass(FP32, (4, 2), (32, 48), "packed", "position bhj", "rows h", (*ALL, "sink"), "window lse sink"),
    SequenceClass(BF16, (8, 2), (64, 64), "padded", None, "position ij", ALL, "causal lse"),
    SequenceClass(BF16, (4, 2), (64, 64), "padded", "position bij", None, QKV, "causal"),
    SequenceClass(FP32, (2, 2), (16, 16), "padded", "position bi", "position bhij", (*ALL, "sink"), "lse sink"),
    SequenceClass(BF16, (4, 2), (64, 64), "packed", "rows kj", "rows hj", (), "causal lse"),
    SequenceClass(BF16, (8, 1), (64, 64), "one query", None, "position hj", (), "causal lse"),
)
SEQUENCE_LENGTHS = (0, 1, 31, 64, 127, 128, 129, 200, 300, 520)


def shape_of(form: str, call: dict[str, int], heads: tuple[int, int]) -> tuple[int, ...]:
    """The shape of a form; `call` has number, most_q, most_k, tokens_q and tokens_k."""
    word, letters = form.split(" ")
    h = heads[0] if "h" in letters else heads[1] if "k" in letters else 1
    if word == "keys":
        return h, 1, call["tokens_k"]
    j = call["most_k"] if "j" in letters else 1
    if word == "rows":
        return h, call["tokens_q"], j
    return call["number"] if "b" in letters else 1, h, call["most_q"] if "i" in letters else 1, j


def draw_sequences(kind: SequenceClass, rng: random.Random, device: str) -> sequence_calls.SequenceCall:
    """A random call of a class: another number of sequences, other lengths, rows of no sequence in half of them."""
    torch.manual_seed(rng.randrange(2**31))
    number = rng.randint(2, 6)
    used_q = [1 if kind.layout == "one query" else rng.choice(SEQUENCE_LENGTHS) for _ in range(number)]
    used_k = [rng.choice(SEQUENCE_LENGTHS) for _ in range(number)]
    used_q[0], used_k[0] = max(used_q[0], 1), max(used_k[0], 31)
    spare = rng.random() < 0.5
    slots_q, slots_k = ([n + (rng.choice((0, 1, 40)) if spare else 0) for n in side] for side in (used_q, used_k))
    edges_q, edges_k = ([0, *accumulate(side)] for side in (slots_q, slots_k))
    most = {"most_q": max(2, *used_q), "most_k": max(used_k) + rng.choice((0, 8))}

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if kind.layout == "packed":
        tokens = {"tokens_q": edges_q[-1] + 3, "tokens_k": edges_k[-1] + 5}
        sequences = Sequences.packed(
            table(edges_q),
            table(edges_k),
            max_seqlen_q=most["most_q"],
            max_seqlen_k=most["most_k"],
            seqlens_q=table(used_q),
            seqlens_k=table(used_k),
        )
        shape_q, shape_k = (tokens["tokens_q"],), (tokens["tokens_k"],)
        firsts_q, firsts_k = edges_q, edges_k
    else:
        most["most_q"] = 1 if kind.layout == "one query" else most["most_q"]
        tokens = {"tokens_q": 0, "tokens_k": 0}
        sequences = Sequences.padded(table(used_k), table(used_q))
        shape_q, shape_k = (number, most["most_q"]), (number, most["most_k"])
        firsts_q = firsts_k = [0] * number
    (heads, heads_k), (dim, dim_v) = kind.heads, kind.dims

    def normal(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    sizes = {"number": number} | most | tokens
    mask = bias = None
    if kind.mask is not None:
        mask = torch.rand(shape_of(kind.mask, sizes, kind.heads), device=device) < rng.choice((0.3, 0.9))
    if kind.bias is not None:
        bias = normal(*shape_of(kind.bias, sizes, kind.heads))
    flags: dict[str, Any] = {"is_causal": "causal" in kind.flags, "window_size": None, "softmax_scale": None}
    flags |= {"softcap": 2.5 if "softcap" in kind.flags else 0.0, "dropout_p": 0.0}
    if "window" in kind.flags:
        flags["window_size"] = (rng.randint(0, 300), rng.choice((0, 20)))
    lse_shape = (heads, *shape_q) if len(shape_q) == 1 else (number, heads, shape_q[1])
    return sequence_calls.SequenceCall(
        normal(*shape_q, heads, dim),
        normal(*shape_k, heads_k, dim),
        normal(*shape_k, heads_k, dim_v),
        mask,
        bias,
        normal(heads) if "sink" in kind.flags else None,
        sequences,
        tuple(zip(firsts_q, used_q, firsts_k, used_k, strict=False)),
        flags,
        normal(*shape_q, heads, dim_v),
        normal(*lse_shape, dtype=FP32) if "lse" in kind.flags else None,
        kind.needs_grad,
        str(kind),
    )


def check_sequences(kind: SequenceClass, rng: random.Random, device: str) -> None:
    """Run one call of a class of sequences, with NaN in all rows of none."""
    call = draw_sequences(kind, rng, device)
    results = sequence_calls.run(sequence_calls.spoiled(call), "flex")
    sequence_calls.assert_accurate({name: None if x is None else x.cpu() for name, x in results.items()}, call)


def graphs_compiled() -> int:
    """Graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def check_classes(
    classes: Sequence[Any], check: Callable[[Any, random.Random, str], None], options: argparse.Namespace
) -> tuple[int, bool]:
    """Run calls of every class from number `skip` on; the number of calls, and whether all ran and passed."""
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
        before = graphs_compiled()
        for index, seed in enumerate(seeds):
            try:
                check(kind, random.Random(seed), options.device)
            except Exception as failure:  # a class that cannot run is a result, and the others still count
                print(f"  FAILED {kind}, call {index}, seed {seed}: {type(failure).__name__}: {failure}"[:3000])
                passed = False
                if not isinstance(failure, AssertionError):
                    break
            done += 1
        print(
            f"[{number + 1:2}/{len(classes)}] {time.perf_counter() - start:5.0f} s  {kind}\n"
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
    parser.add_argument("--per-class", type=int, default=7, help="calls of each class (default 7: 112 in all)")
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
            calls, verdict["accuracy"] = check_classes(CLASSES, check, options)
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
