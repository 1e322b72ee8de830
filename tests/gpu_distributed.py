"""Context parallelism on GPUs (NCCL), or on a CPU (gloo): every result under the rule of accuracy, bits repeated.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \\
        torchrun --nproc-per-node 2 tests/gpu_distributed.py
    CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 tests/gpu_distributed.py --random 4   # small sizes, on a CPU

One line for each case and backend, a table at the end. Exit status: 0; 1 where a case failed; 2 where it did not start
(torchrun makes 1 of it). Where `--seconds` run out, the last line says how to go on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accuracy import GRADIENTS, assert_accurate  # noqa: E402
from cases import Inputs, Numbers  # noqa: E402
from distributed_calls import (  # noqa: E402
    SMALL,
    P,
    ParallelCase,
    draw,
    draw_parallel,
    is_partial,
    mistaken,
    parallel,
)
from draws import Features  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.scale.measure import captured  # noqa: E402
from flash_dmattn import BackendUnsupportedError  # noqa: E402
from flash_dmattn.biases import ListBias  # noqa: E402
from flash_dmattn.distributed import SequenceLayout, context_parallel_attention  # noqa: E402
from flash_dmattn.distributed import call as parallel_call  # noqa: E402
from flash_dmattn.masks import PreparedMask, causal_mask, document_mask, sliding_window_mask  # noqa: E402

# Multicast of NVLink, in whichever way it would be used: it stays off on shared machines.
REQUIRED = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

Strategy = Literal["gather", "ulysses"]
MISTAKES = "mistakes of one rank"
GRAPHS = "CUDA graphs"


def missing_of(environment: Mapping[str, str]) -> list[str]:
    """List the settings that NCCL needs before it starts, and that are missing."""
    return [f"{name}={value}" for name, value in REQUIRED.items() if environment.get(name) != value]


def named_cases(large: bool, size: int) -> dict[str, ParallelCase]:
    """The calls that the library is about, causal, in bf16, for `size` ranks."""
    length, dim = (2048, 128) if large else (64, 16)
    base = P(is_causal=True, dlse=True, dtype=torch.bfloat16, seqlen_q=length, seqlen_k=length, batch=1, num_heads=8)
    base = base.with_(head_dim=dim)
    # Intervals of every rank begin at multiples of 16.
    dropped = base.with_(dropout_p=0.1, head_dim=64 if large else dim, seqlen_q=max(length, 32 * size))
    dropped = dropped.with_(seqlen_k=dropped.seqlen_q)
    # Documents end inside of blocks of 16, and one is empty; entries end on some rank, on the last, or have nothing.
    cut = (0, 3, 3, length // 3, dropped.seqlen_q)
    short, longer = (length // 3, length, 0), (length, length // 2, 5)
    uneven = {"seqlen_q": 24 * size, "seqlen_k": 24 * size, "mask": "full", "bias": "full"}
    wide, documents = Numbers(("1", "Hq", "1"), 2 * length - 1, length - 1, "error"), (0, 3, length // 3, length)
    return {
        "causal": base,
        "top-k mask, bias of keys": base.with_(mask="topk", bias="keys", reduce=True),
        "top-k mask, bias sharded": base.with_(mask="topk", bias="sharded"),
        "prepared top-k mask": base.with_(mask="prepared_topk", bias="keys", groups=2, reduce=True),
        "bias of pairs": base.with_(bias="full"),
        "bias of pairs, groups": base.with_(bias="full", groups=2),
        "bias shared by the batch": base.with_(bias="shared", batch=2),
        "bias shared by heads": base.with_(bias="one_head", is_causal=False),
        "mask of keys": base.with_(mask="keys", batch=2),
        "prepared mask of keys": base.with_(mask="prepared_keys", batch=2, layout="contiguous"),
        "empty rows": base.with_(mask="full", mask_kind="empty_rows", is_causal=False),
        "window": base.with_(window_size=(length // 4, -1)),
        "window, keys of neighbours": base.with_(
            window_size=(length // 16, -1), bias="sharded", mask="sharded", batch=2
        ),
        "window, layout of neighbours": base.with_(window_size=(length // 16, 3), layout="contiguous", groups=2),
        "window, balanced": base.with_(window_size=(length // 8, -1), layout="balanced", mask="prepared", bias="full"),
        "window, mesh": base.with_(window_size=(length // 16, -1), strategy="auto", mesh=(size, 1)),
        "fp32 exchange": base.with_(exchange=torch.float32),
        "head slopes, summed": base.with_(bias="keys_of_q", reduce=True),
        "more keys": base.with_(seqlen_k=2 * length, bias="full"),
        "sink": base.with_(sink="normal", reduce=True),
        "ulysses": base.with_(strategy="ulysses", bias="keys", reduce=True),
        "ulysses, shared heads": base.with_(strategy="ulysses", num_heads_k=1, mask="keys"),
        "mesh, heads": base.with_(strategy="auto", mesh=(1, size), mask="keys"),
        "mesh, keys": base.with_(strategy="auto", mesh=(size, 1), mask="prepared_keys", sink="normal", reduce=True),
        "balanced": base.with_(layout="balanced", mask="prepared", bias="full"),
        "bias by distance": base.with_(relative=Numbers(("1", "Hq", "1"), 257, 128, "clamp"), reduce=True),
        "bias by distance, all": base.with_(relative=wide, is_causal=False, reduce=True, groups=2),
        "bias by distance, ulysses": base.with_(relative=wide, strategy="ulysses", num_heads_k=8, reduce=True),
        "band": base.with_(relative=Numbers(("1", "Hq", "Lq"), 33, 32, "zero")),
        "lists": base.with_(lists=("B", "1")),
        "lists, values": base.with_(lists=("B", "1"), relative=Numbers(("B", "Hk", "Lq"), 48, 0, "")),
        "lists, window": base.with_(lists=("B", "1"), window_size=(length // 8, -1)),
        "dropout": dropped.with_(bias="full", sink="normal", reduce=True),
        "dropout, window": dropped.with_(window_size=(length // 16, -1), groups=2, mask="prepared", batch=2),
        "dropout, wide heads": dropped.with_(head_dim=dim, bias="keys", reduce=True, layout="contiguous"),
        "dropout, ulysses": dropped.with_(strategy="ulysses", num_heads_k=1),
        "dropout, mesh": dropped.with_(strategy="auto", mesh=(1, size), mask="keys"),
        "documents": base.with_(documents=documents, layout="balanced", bias="keys_of_q", reduce=True),
        "documents, all keys of each": base.with_(documents=documents, layout="contiguous", is_causal=False),
        "documents, ulysses": base.with_(documents=documents, strategy="ulysses", num_heads_k=8),
        "documents, distances": base.with_(documents=documents, relative=wide, reduce=True),
        "documents, dropout": dropped.with_(documents=cut, layout="balanced", bias="keys_of_q", reduce=True),
        "documents, dropout, all keys": dropped.with_(documents=cut, is_causal=False, sink="normal", reduce=True),
        "documents, dropout, window": dropped.with_(documents=cut, window_size=(length // 8, -1), layout="contiguous"),
        "documents, dropout, ulysses": dropped.with_(documents=cut, strategy="ulysses", num_heads_k=8),
        "documents, dropout, mesh": dropped.with_(documents=cut, strategy="auto", mesh=(size, 1)),
        "dropout, rows inside of a block": base.with_(dropout_p=0.1, head_dim=64 if large else dim, **uneven),
        "padded": base.with_(batch=3, lengths=(short, short), bias="keys_of_q", reduce=True, layout="balanced"),
        "padded, bias of pairs": base.with_(batch=3, lengths=(short, short), bias="full"),
        "padded, shared bias": base.with_(batch=3, lengths=(short, short), bias="shared", bias_dtype=torch.float32),
        "padded, sink": base.with_(batch=3, lengths=((), short), sink="normal", reduce=True, is_causal=False),
        "padded, window": base.with_(batch=3, lengths=(short, short), window_size=(length // 8, -1)),
        "padded, mask": base.with_(batch=3, lengths=((), short), mask="full", layout="contiguous"),
        "padded, distances": base.with_(batch=3, lengths=(short, short), relative=wide, reduce=True),
        "padded, more keys": base.with_(batch=3, seqlen_k=2 * length, lengths=(short, longer), groups=2),
        "padded, ulysses": base.with_(batch=3, lengths=(short, short), strategy="ulysses", num_heads_k=8),
        "padded, mesh": base.with_(batch=3, lengths=(short, short), strategy="auto", mesh=(1, size)),
        "padded, dropout": dropped.with_(batch=3, lengths=(short, short)),
    }


def random_case(seed: int, large: bool) -> ParallelCase:
    """A call drawn from its number."""
    unit = 256 if large else 16
    lengths = tuple(unit * n for n in range(1, 6))
    features: Features = {
        "seqlen_q": lengths,
        "seqlen_k": lengths,
        "head_dim": (64, 128) if large else (16,),
        "head_dim_v": (0,),
        "group": (1, 2, 4),
        "dtype": (torch.bfloat16,),
        "mask_kind": ("random",),
        "bias_kind": ("normal",),
        "data": (),
        "window_size": (None, None, (unit, 3), (-1, 5), (2 * unit, -1)),
        "needs_grad": (("q", "k", "v", "bias"),),
        "dlse": (True,),  # without it gradients of one value per query are zeros, and no relative error is small
    }
    case = draw_parallel(seed, {**SMALL, **features})
    case = case.with_(reduce=case.reduce or case.sink is not None)
    # A partial gradient of a bias is rounded to its dtype on each rank.
    return case.with_(bias_dtype=torch.float32) if is_partial(case, "dbias") else case


def put_together(case: ParallelCase, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    layout, layout_k = case.layouts(dist.get_world_size())
    bias, gathered = case.bias_letters or ("1",) * 4, {}
    for name, x in results.items():
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        if name in ("out", "dq", "lse"):
            gathered[name] = layout.unshard(parts, 2 if name == "lse" else 1)
        elif name in ("dk", "dv"):
            gathered[name] = layout_k.unshard(parts, 1)
        elif name == "dbias" and bias[2] == "Lq":
            gathered[name] = layout.unshard(parts, 2)
        elif name == "dbias" and bias[3] == "Ls":
            gathered[name] = layout_k.unshard(parts, 3)
        elif is_partial(case, name):
            gathered[name] = torch.stack(parts).double().sum(0).to(x.dtype)
        else:
            assert all(torch.equal(parts[0], other) for other in parts), f"{name} differs between ranks"
            gathered[name] = x
    return gathered


def as_masked(case: ParallelCase, x: Inputs, got: dict[str, Tensor]) -> tuple[ParallelCase, Inputs, dict[str, Tensor]]:
    """Return a call with lists or sequences, and its results, as one with a mask and a bias, which the rule knows."""
    if case.documents:
        lengths = torch.tensor(case.documents, device=case.device).diff()
        mask = document_mask(torch.repeat_interleave(torch.arange(len(lengths), device=case.device), lengths))
        return case.with_(documents=(), dropped=case.documents), replace(x, mask=mask), got
    if case.lengths[1]:
        mask = torch.zeros(case.batch, 1, case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=case.device)
        queries, keys = case.lengths
        for entry, (seqlen_q, seqlen_k) in enumerate(zip(queries or (case.seqlen_q,) * case.batch, keys, strict=True)):
            pairs, sizes = mask[entry, :, :seqlen_q, :seqlen_k], (seqlen_q, seqlen_k)
            pairs[:] = sliding_window_mask(*sizes, case.window_size or (-1, -1), device=case.device)[0]
            pairs &= causal_mask(*sizes, device=case.device)[0] if case.is_causal else True
        mask = mask if x.mask is None else mask & x.mask
        return case.with_(lengths=((), ()), is_causal=False, window_size=None), replace(x, mask=mask), got
    if case.lists is None:
        return case, x, got
    lists = PreparedMask.from_lists(x.mask, seqlen_k=case.seqlen_k)  # type: ignore[arg-type]
    x = replace(x, mask=lists.dense())
    if x.bias is None or case.relative is None:
        return case.with_(lists=None), x, got
    letters = (*case.relative.letters[:2], "Lq", "Lk")
    if "dbias" in got:
        got = {**got, "dbias": ListBias(got["dbias"]).dense(lists)}
    x = replace(x, bias=ListBias(x.bias).dense(lists))
    return case.with_(lists=None, relative=None, bias=letters), x, got


def judge(case: ParallelCase) -> tuple[str, str]:
    """Say what is wrong with a call, or nothing; and which checks were left out."""
    x = draw(case)
    got = put_together(case, parallel(case, x))
    plain, masked, got = as_masked(case, x, got)
    names = ("out", "lse", *GRADIENTS, *(("dsink",) if case.sink else ()))
    try:
        assert_accurate({name: got.get(name) for name in names}, plain, masked)
    except AssertionError as error:
        return " ".join(str(error).split("\n")[1:]).strip() or str(error), ""
    try:
        first, second = (parallel(case, x, deterministic=True) for _ in range(2))
        with patch.object(parallel_call, "CLEAR_SHARE", -1.0):  # all keys sent to all, where windows leave but some
            every_key = parallel(case, x, deterministic=True)
    except BackendUnsupportedError:
        return "", ", which refuses deterministic=True"
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    if not differing:
        differing = [
            f"{name} from {name} where all keys are sent"
            for name in first
            if not torch.equal(first[name], every_key[name])
        ]
    return f"bits differ in {', '.join(differing)}" if differing else "", ""


def outcome(case: ParallelCase, backend: Any) -> tuple[str, str]:
    """("passed", "failed" or "refused", what there is to say), the same on every rank."""
    choices = [backend, ("cuda", "triton")] if backend == "cuda" else [backend]
    for choice in choices:
        note = ""
        try:
            said, note = judge(case.with_(backend=choice))
        except BackendUnsupportedError as error:
            refusal = next(line.strip() for line in str(error).splitlines() if line.startswith("  - "))
            continue
        except Exception as error:  # of one rank or all: the others of the run are still worth having
            said = f"{type(error).__name__}: {error}"
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, said)
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(everywhere) if text]
        name = choice if isinstance(choice, str) else "/".join(choice)
        return ("failed", f"{name}: {wrong[0]}") if wrong else ("passed", name + note)
    return "refused", refusal


def failed_together(case: ParallelCase) -> tuple[str, str]:
    """Judge whether each mistake of the last rank raises the same error on all ranks, before and after good calls."""
    rank = dist.get_world_size() - 1
    for change in ({"is_causal": not case.is_causal}, {"batch": case.batch + 1}, {"backend": "unknown"}):
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mistaken(case, rank, change, {})[0])
        if len(everywhere[0]) != 1 or any(said != everywhere[0] for said in everywhere):
            return "failed", f"{change}: {everywhere}"
    return "passed", "the same error on all ranks"


def replayed(device: str, strategy: Strategy, dropout_p: float) -> tuple[str, str]:
    """Judge whether a CUDA graph of a step, with its collectives, has the bits of the step at other inputs."""
    size, rank = dist.get_world_size(), dist.get_rank()
    layout, group = SequenceLayout.zigzag(2048, size), dist.group.WORLD
    q, k, v = (
        torch.zeros(1, 2048 // size, 8, 64, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)
    )
    flags: dict[str, Any] = {"group": group, "layout": layout, "strategy": strategy, "is_causal": True}
    flags |= {"dropout_p": dropout_p, "backend": "triton" if dropout_p else "auto"}

    def step() -> list[Tensor]:
        out = context_parallel_attention(q, k, v, **flags, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    graph, results = captured(step)
    for seed in range(2):
        for number, x in enumerate((q, k, v)):
            x.data.normal_(generator=torch.Generator(device).manual_seed(100 * rank + 10 * number + seed))
        torch.manual_seed(seed + rank)
        graph.replay()
        first = [x.clone() for x in results]
        graph.replay()
        draws_anew = not torch.equal(first[0], results[0])
        torch.manual_seed(seed + rank)
        same = all(torch.equal(x, y) for x, y in zip(first, step(), strict=True))
        everywhere: list[Any] = [None] * size
        dist.all_gather_object(everywhere, same and draws_anew == (dropout_p > 0))
        if not all(everywhere):
            return "failed", f"{strategy}, dropout {dropout_p}: other bits with inputs {seed}, right: {everywhere}"
    return "passed", f"the bits of the step, {strategy}, dropout {dropout_p}"


def main() -> int:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=40, help="how many calls to draw")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--match", default="", help="only cases with this in their name")
    parser.add_argument(
        "--skip", type=int, default=0, help="how many of the cases to leave out, as a line at the end says"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after so many")
    parser.add_argument("--backends", nargs="+", default=None, help="instead of cuda and triton, or eager on a CPU")
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    missing = missing_of(os.environ)
    if on_gpus and missing:
        print(f"not started: set {' '.join(missing)}, which keep NVLink multicast off", flush=True)
        return 2
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    started = time.monotonic()
    if on_gpus:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    cases = named_cases(on_gpus, dist.get_world_size())
    for seed in range(options.first, options.first + options.random):
        cases[f"random {seed}"] = random_case(seed, on_gpus)
    backends = options.backends or (("cuda", "triton") if on_gpus else ("eager",))
    counts: Counter[tuple[str, str]] = Counter()
    left = -1
    for number, (name, case) in enumerate(cases.items()):
        if options.match not in name or number < options.skip:
            continue
        late = [time.monotonic() - started > options.seconds]  # on the first rank, whose word counts
        dist.broadcast_object_list(late)
        if late[0]:
            left = number
            break
        for backend in backends:
            here = case.with_(device=f"cuda:{torch.cuda.current_device()}" if on_gpus else "cpu")
            verdict, text = outcome(here, backend)
            counts[backend, verdict] += 1
            if dist.get_rank() == 0:
                print(f"{verdict:8} {backend:7} {name}: {text}", flush=True)
                if verdict == "failed":
                    print(f"         {here}", flush=True)
    if options.match in MISTAKES and left < 0 and dist.get_world_size() > 1:
        device = f"cuda:{torch.cuda.current_device()}" if on_gpus else "cpu"
        verdict, text = failed_together(P(is_causal=True, dtype=torch.bfloat16, head_dim=64, device=device))
        counts[MISTAKES, verdict] += 1
        if dist.get_rank() == 0:
            print(f"{verdict:8} {MISTAKES}: {text}", flush=True)
    if options.match in GRAPHS and left < 0 and on_gpus:
        for strategy, dropout_p in product(get_args(Strategy), (0.0, 0.2)):
            verdict, text = replayed(f"cuda:{torch.cuda.current_device()}", strategy, dropout_p)
            counts[GRAPHS, verdict] += 1
            if dist.get_rank() == 0:
                print(f"{verdict:8} {GRAPHS}: {text}", flush=True)
    if dist.get_rank() == 0:
        print(f"\n{dist.get_world_size()} ranks, {torch.cuda.get_device_name() if on_gpus else 'CPU'}")
        print("| backend | passed | refused | failed |\n| --- | --- | --- | --- |")
        for backend in (*backends, MISTAKES, *((GRAPHS,) if on_gpus else ())):
            print(f"| {backend} | {' | '.join(str(counts[backend, v]) for v in ('passed', 'refused', 'failed'))} |")
        if left >= 0:
            print(f"stopped after {options.seconds:.0f} s: go on with --skip {left}")
    failed = any(verdict == "failed" for _, verdict in counts) or not counts
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of gloo that outlives the interpreter, in one run of ten, would end it by a signal
