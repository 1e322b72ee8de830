"""Time what `attention()` adds to its backend on the smallest calls, (1, 8, 2, 16), on the host alone.

The bare backend is its two passes, planned beforehand. Rounds of both alternate and the best of each counts: rounds are
short, so that some of them find a busy machine idle.

`--kinds` times other calls, of (2, 256, 4, 64): with masks, biases and sequences. It times a forward pass without
gradients, and a step, which is forward and backward. SDPA and an `autograd.Function` that does nothing stand beside
them; the latter is the floor of a step in Python.

`--forms` prints a table of every form of mask, bias, sequences and lists at some lengths. Its columns are the host's
time, also as a multiple of a plain call of the shape, launches, operations of torch (allocations, views, kernels), and
the GPU's time. Without a GPU, `--emulated` names an extension that `tests/emulation/build.py` has
built. Its kernels are counted and left out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import DeviceType

import flash_dmattn
from flash_dmattn.dispatch import packers
from flash_dmattn.dispatch.config import parse_choice
from flash_dmattn.dispatch.plan import backward_pass, forward_pass
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import operators
from flash_dmattn.problem.inputs import Inputs, Saved

GOAL_US = 15.0
SHAPE = (1, 8, 2, 16)
CANDIDATES = ("cuda", "triton", "eager")
BATCH, LENGTH, HEADS, HEAD_DIM = OF_KINDS = (2, 256, 4, 64)
LENGTHS, ENTRIES, TIMED_S = "128,1024,8192", 32, 1.0
Call = Callable[..., torch.Tensor]


def best_us(
    functions: Sequence[Callable[[], object]], rounds: int, calls: int, seconds: float = float("inf")
) -> list[float]:
    """Return the least time of one call of each function, in microseconds, over alternating rounds.

    No round begins after so many seconds.
    """
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    for number in range(rounds):
        if number > 0 and time.perf_counter() > end:
            break
        for i, function in enumerate(functions):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / calls * 1e6)
    return best


def pairs(name: str, device: torch.device) -> dict[str, list[Callable[[], object]]]:
    """By pass, the call and the bare backend; a pass that the backend refuses is missing."""
    backend, choice = BACKENDS[name], parse_choice(name)
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    q, k, v, dout = torch.randn(4, *SHAPE, device=device, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    alone = flash_dmattn.explain(q, k, v).problem
    problem = flash_dmattn.explain(*leaves).problem

    def forward() -> object:
        return flash_dmattn.attention(q, k, v, backend=choice)

    def bare_forward() -> object:
        return forward_pass(backend, alone)(Inputs(q, k, v))

    def both() -> object:
        return torch.autograd.grad(flash_dmattn.attention(*leaves, backend=choice), leaves, dout)

    def bare_both() -> object:
        inputs = Inputs(q, k, v)
        out, lse = forward_pass(backend, problem)(inputs)
        return backward_pass(backend, problem)(Saved(inputs, out, lse), dout, None)

    functions: dict[str, list[Callable[[], object]]] = {}
    if backend.accepts(alone, "forward"):
        functions["forward, no grad"] = [forward, bare_forward]
        if backend.accepts(problem, "backward"):
            functions["forward + backward"] = [both, bare_both]
    return functions


class _Nothing(torch.autograd.Function):
    """A function in Python that allocates its result and its gradients, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def kinds(device: torch.device) -> dict[str, tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]]:
    """By name, the inputs of a kind of call, and the call of them."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = torch.randn(3, *OF_KINDS, device=device, dtype=dtype)
    tokens = tuple(x.flatten(0, 1) for x in (q, k, v))
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, dtype=dtype)
    lengths = torch.tensor([LENGTH, LENGTH // 2], device=device, dtype=torch.int32)
    keys = (torch.arange(LENGTH, device=device) < lengths[:, None])[:, None, None]
    causal = torch.ones(LENGTH, LENGTH, device=device, dtype=torch.bool).tril()
    pairs = causal ^ (torch.rand(LENGTH, LENGTH, device=device) < 0.1)
    edges = torch.tensor([0, LENGTH // 2, BATCH * LENGTH], device=device, dtype=torch.int32)
    packed = flash_dmattn.Sequences.packed(edges, max_seqlen_q=2 * LENGTH)
    padded = flash_dmattn.Sequences.padded(seqlens_q=lengths, seqlens_k=lengths)
    prepared = PreparedMask.from_mask(pairs)
    heads_first = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))

    def ours(*inputs: torch.Tensor, **others: Any) -> torch.Tensor:
        return cast(torch.Tensor, flash_dmattn.attention(*inputs, **others))

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "plain": ((q, k, v), ours),
        "bias": ((q, k, v, bias), lambda q, k, v, bias: ours(q, k, v, bias=bias)),
        "mask of pairs": ((q, k, v), lambda *x: ours(*x, pairs)),
        "mask of keys (B, 1, 1, L)": ((q, k, v), lambda *x: ours(*x, keys)),
        "prepared mask": ((q, k, v), lambda *x: ours(*x, mask=prepared)),
        "padded sequences": ((q, k, v), lambda *x: ours(*x, sequences=padded)),
        "packed sequences": (tokens, lambda *x: ours(*x, sequences=packed)),
        "packed sequences, made anew": (
            tokens,
            lambda *x: ours(*x, sequences=flash_dmattn.Sequences.packed(edges, max_seqlen_q=2 * LENGTH)),
        ),
        "a function that does nothing": ((q, k, v), _Nothing.apply),
        "SDPA": (heads_first, sdpa),
        "SDPA, mask of keys": (heads_first, lambda q, k, v: sdpa(q, k, v, attn_mask=keys)),
    }


def forward_of(inputs: tuple[torch.Tensor, ...], call: Call) -> Callable[[], object]:
    return lambda: call(*inputs)


def step_of(inputs: tuple[torch.Tensor, ...], call: Call) -> Callable[[], object]:
    """Return a forward pass and its backward pass, with gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    dout = torch.randn_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, dout)


def run_kinds(options: argparse.Namespace, device: torch.device) -> int:
    print(f"microseconds of the host for q, k, v of {OF_KINDS} on {device.type}, backend {options.backend!r}")
    print(f"{'':30}{'forward':>10}{'step':>10}")
    calls = kinds(device)
    with flash_dmattn.config(backend=options.backend):
        once = best_us([forward_of(*one) for one in calls.values()], options.rounds, options.calls)
        both = best_us([step_of(*one) for one in calls.values()], options.rounds, options.calls)
    for name, *taken in zip(calls, once, both, strict=True):
        print(f"{name:30}{taken[0]:10.1f}{taken[1]:10.1f}")
    return 0


class Form(NamedTuple):
    """A call, and the name of the form without a mask that its host time is compared with."""

    inputs: tuple[torch.Tensor, ...]
    call: Call
    plain: str


def forms(device: torch.device, length: int) -> dict[str, Form]:
    """By name, forms of causal calls with 2 heads on 1 of 64, and of padded calls of many entries."""
    dtype = torch.bfloat16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    q, k, v = draw(1, length, 2, 64), draw(1, length, 1, 64), draw(1, length, 1, 64)
    entries = draw(ENTRIES, length, 2, 64), draw(ENTRIES, length, 2, 64), draw(ENTRIES, length, 2, 64)
    kept = torch.rand(1, 1, 1, length, device=device) < 0.125
    lengths = torch.linspace(length / 4, length, ENTRIES, device=device).int()
    padding = (torch.arange(length, device=device) < lengths[:, None])[:, None, None]
    pairs = torch.rand(1, 1, length, length, device=device) < 0.5
    per_key = torch.randn(1, 2, 1, length, device=device)
    edges = torch.tensor([0, length // 2, length], device=device, dtype=torch.int32)
    make_packed = lambda: flash_dmattn.Sequences.packed(edges, max_seqlen_q=length)
    packed, padded = make_packed(), flash_dmattn.Sequences.padded(seqlens_q=lengths, seqlens_k=lengths)
    block = min(128, length)
    listed = {
        size: PreparedMask.from_lists(
            torch.arange(length, device=device)[:: min(size, length), None] // size,
            seqlen_q=length,
            seqlen_k=length,
            block_size=size,
            is_causal=True,
        )
        for size in (1, block)
    }
    prepared = {
        "pairs": PreparedMask.from_mask(pairs, is_causal=True),
        "keys": PreparedMask.from_mask(kept, seqlen_q=length, is_causal=True),
    }

    def causal(*inputs: Any, **others: Any) -> torch.Tensor:
        return cast(torch.Tensor, flash_dmattn.attention(*inputs, is_causal=True, **others))

    def unlimited(*inputs: Any, **others: Any) -> torch.Tensor:
        return cast(torch.Tensor, flash_dmattn.attention(*inputs, **others))

    def biased(mask: Any) -> Call:
        return lambda q, k, v, bias: causal(q, k, v, mask, bias)

    with_bias, tokens = (q, k, v, per_key), (q[0], k[0], v[0])
    return {
        "plain": Form((q, k, v), causal, "plain"),
        "bias per key": Form(with_bias, biased(None), "bias per key"),
        "bias per score": Form((q, k, v, draw(1, 2, length, length)), biased(None), "bias per key"),
        "mask of keys": Form((q, k, v), lambda *x: causal(*x, kept), "plain"),
        "mask of keys, bias per key": Form(with_bias, biased(kept), "bias per key"),
        "mask of pairs": Form((q, k, v), lambda *x: causal(*x, pairs), "plain"),
        "prepared keys": Form((q, k, v), lambda *x: causal(*x, prepared["keys"]), "plain"),
        "prepared keys, bias per key": Form(with_bias, biased(prepared["keys"]), "bias per key"),
        "prepared pairs": Form((q, k, v), lambda *x: causal(*x, prepared["pairs"]), "plain"),
        "lists of keys": Form((q, k, v), lambda *x: causal(*x, listed[1]), "plain"),
        "lists of blocks": Form((q, k, v), lambda *x: causal(*x, listed[block]), "plain"),
        "packed": Form(tokens, lambda *x: causal(*x, sequences=packed), "plain"),
        "packed, made anew": Form(tokens, lambda *x: causal(*x, sequences=make_packed()), "plain"),
        f"{ENTRIES} entries": Form(entries, unlimited, f"{ENTRIES} entries"),
        "padding": Form(entries, lambda *x: unlimited(*x, padding), f"{ENTRIES} entries"),
        "padded sequences": Form(entries, lambda *x: unlimited(*x, sequences=padded), f"{ENTRIES} entries"),
    }


class Trace(NamedTuple):
    """Counts of a call: launches, operations of torch that no other one asks for, and microseconds of the GPU."""

    launches: int
    operations: int
    gpu_us: float


def trace(function: Callable[[], object], count: Callable[[], int] | None) -> Trace:
    """Run a function once under torch's profiler; `count` counts launches where there is no GPU."""
    function()  # allocates, and finds what is decided once
    with torch.profiler.profile() as profile:
        # The profiler's flag would have calls go through their operators, for it to show them.
        torch.autograd.profiler._is_profiler_enabled = False
        before = 0 if count is None else count()
        function()
        launched = 0 if count is None else count() - before
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events: list[Any] = list(profile.events() or ())
    is_torch = lambda event: event is not None and event.name.startswith("aten::")
    operations = sum(is_torch(event) and not is_torch(event.cpu_parent) for event in events)
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    return Trace(launched or len(on_gpu), operations, sum(event.time_range.elapsed_us() for event in on_gpu))


def leave_kernels_out(path: Path) -> Callable[[], int]:
    """Have the backend cuda run an emulated extension without its kernels; return a function that counts launches."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    emulated: Any = importlib.import_module("emulated_cuda")
    emulated.admit_cpu(path)
    emulated.configure(num_sms=132)
    # The others are Triton's.
    names = ("pack_tiles", "row_intervals", "tiles_of_lists", "interval_tiles", "topk_intervals", "key_order")
    made = packers.around_extension(torch.ops.flash_dmattn)
    packer = operators.PYTORCH._replace(**{name: getattr(made, name) for name in names})
    operators.register(lambda tensor: packer)

    def count() -> int:
        return cast(int, emulated.launches(leaves_out=True))

    count()
    return count


def run_forms(options: argparse.Namespace, device: torch.device) -> int:
    count = None if options.emulated is None else leave_kernels_out(options.emulated)
    print(
        f"microseconds of the host, forward and step, backend {options.backend!r}, on {device.type}; x: times plain\n"
    )
    names = ("form", "length", "forward", "step", "x", "x", "launches", "operations", "GPU forward", "GPU step")
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    with flash_dmattn.config(backend=options.backend):
        for length in map(int, options.lengths.split(",")):
            plain: dict[str, list[float]] = {}
            for name, (inputs, call, kind) in forms(device, length).items():
                try:
                    with torch.no_grad():
                        call(*inputs)
                    passes = forward_of(inputs, call), step_of(inputs, call)
                except flash_dmattn.BackendUnsupportedError:
                    continue
                traced = [trace(each, count) for each in passes]
                times = [best_us([each], options.rounds, options.calls, TIMED_S)[0] for each in passes]
                plain.setdefault(name, times)
                ratios = [f"{own / other:.2f}" for own, other in zip(times, plain[kind], strict=True)]
                counts = [f"{first} / {second}" for first, second in zip(*(each[:2] for each in traced), strict=True)]
                on_gpu = [f"{each.gpu_us:.0f}" if device.type == "cuda" else "-" for each in traced]
                row = (name, str(length), *(f"{each:.1f}" for each in times), *ratios, *counts, *on_gpu)
                print(f"| {' | '.join(row)} |", flush=True)
    return 0


def run(args: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    if args.forms:
        return run_forms(args, device)
    if args.kinds:
        return run_kinds(args, device)
    print(f"microseconds of the host for q, k, v of {SHAPE}; goal for forward: at most {GOAL_US:.0f} added")
    print(f"{'':30}{'attention()':>12}{'backend':>10}{'added':>8}")
    for name in CANDIDATES:
        if not BACKENDS[name].probe().usable or (device.type == "cpu" and name != "eager"):
            continue
        for which, functions in pairs(name, device).items():
            ours, bare = best_us(functions, args.rounds, args.calls)
            print(f"{name + ', ' + which:30}{ours:12.1f}{bare:10.1f}{ours - bare:8.1f}")
    return 0


def add_parser(commands: Any) -> None:
    command = commands.add_parser("dispatch", help="what attention() adds to its backend, on the host")
    command.add_argument("--rounds", type=int, default=1000)
    command.add_argument("--calls", type=int, default=10, help="calls in one round")
    command.add_argument("--kinds", action="store_true", help="kinds of calls, with masks and sequences, beside SDPA")
    command.add_argument(
        "--forms", action="store_true", help="a table of every form of mask, bias, sequences and lists"
    )
    command.add_argument("--lengths", default=LENGTHS, help="of --forms, separated by commas")
    command.add_argument("--emulated", type=Path, help="of --forms: an emulated extension, whose kernels are left out")
    command.add_argument("--backend", default="auto", help="of --kinds and --forms")
    command.set_defaults(run=run)
