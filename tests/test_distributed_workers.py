"""Context parallelism over gloo, two and four processes, in fp64 against one call in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_calls import BIASES, MASKS, ParallelCase, Unlucky
from distributed_workers import workers

from flash_dmattn.distributed import SequenceLayout

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-10
P = ParallelCase

CASES = {
    **{f"bias {name}": P(bias=name, causal=True, lse=True, seed=i) for i, name in enumerate(BIASES)},
    **{
        f"mask {name}": P(mask=name, bias="keys" if "topk" in name else "none", causal=True, lse=True, seed=20 + i)
        for i, name in enumerate(MASKS)
    },
    "window": P(window=(5, 3), bias="full", lse=True),
    "left window, groups": P(window=(6, -1), bias="group", groups=2),
    "right window": P(window=(-1, 2), bias="keys", mask="prepared"),
    "narrow window": P(window=(0, 0), mask="full", bias="shared"),
    "far window": P(window=(20, 3), bias="full", mask="prepared", seqlen_q=1024, seqlen_k=1024, heads=2, batch=1),
    "far window, keys": P(window=(20, 3), bias="sharded", seqlen_q=1024, seqlen_k=1024, heads=2, batch=1, groups=2),
    "softcap, scale": P(softcap=2.0, scale=0.7, causal=True, bias="full", lse=True),
    "sink": P(sink=True, causal=True, bias="full", lse=True),
    "sink, reduced": P(sink=True, mask="full", reduce=True, groups=2),
    "reduced bias": P(bias="head", causal=True, reduce=True, lse=True),
    "reduced keys": P(bias="keys", causal=True, reduce=True, groups=2, lse=True),
    "sharded, groups": P(bias="sharded", mask="sharded", groups=2, lse=True),
    "empty rows": P(mask="full", empty=True, bias="full", lse=True),
    "empty rows, sink": P(mask="full", empty=True, sink=True, lse=True),
    "more keys": P(seqlen_q=16, seqlen_k=48, causal=True, bias="full", lse=True),
    "fewer keys, rows without": P(seqlen_q=48, seqlen_k=16, causal=True, bias="full", lse=True, sink=True),
    "cross, sharded": P(seqlen_q=16, seqlen_k=32, bias="sharded", mask="prepared", layout="contiguous"),
    "contiguous": P(layout="contiguous", causal=True, bias="full"),
    "balanced": P(layout="balanced", mask="prepared", bias="full", lse=True),
    "balanced, keys": P(layout="balanced", mask="keys", bias="sharded", causal=True),
    "dims": P(dim=8, dim_v=3, causal=True, bias="query", lse=True),
    "one key-value head": P(heads=4, heads_k=1, causal=True, bias="keys"),
    "heads alike": P(heads=4, heads_k=4, groups=4, causal=True, bias="full", mask="group"),
    "only dbias": P(needs=("bias",), causal=True, bias="full"),
    "only dq": P(needs=("q",), causal=True, bias="keys"),
    "only dk": P(needs=("k",), causal=True, bias="full", groups=2),
    "only dv, sharded": P(needs=("v", "bias"), bias="sharded"),
    "no gradient": P(needs=(), causal=True, bias="sharded", mask="prepared"),
    "exchange": P(exchange=torch.float64, causal=True),
    "prepared, groups": P(causal=True, lse=True, groups=2, bias="full", mask="prepared"),
    "only dbias, sharded": P(needs=("bias",), bias="sharded"),
    "ulysses, only dv": P(strategy="ulysses", heads=4, heads_k=4, needs=("v",), lse=True),
    "ulysses, shared head, sums": P(
        strategy="ulysses", heads=4, heads_k=1, bias="sharded", sink=True, reduce=True, lse=True
    ),
    "ulysses": P(strategy="ulysses", causal=True, lse=True, heads=8, heads_k=4, bias="keys"),
    "ulysses, window": P(strategy="ulysses", window=(4, 1), heads=8, heads_k=8, bias="keys_of_q", mask="keys"),
    "ulysses, shared heads": P(strategy="ulysses", causal=True, heads=8, heads_k=2, bias="keys", lse=True),
    "ulysses, one head": P(strategy="ulysses", causal=True, heads=4, heads_k=1, bias="head", reduce=True, lse=True),
    "ulysses, sharded": P(strategy="ulysses", causal=True, heads=4, heads_k=4, bias="sharded", mask="sharded"),
    "ulysses, sink": P(strategy="ulysses", heads=4, heads_k=4, sink=True, lse=True, softcap=3.0),
    "ulysses, cross": P(strategy="ulysses", heads=4, heads_k=4, seqlen_q=16, seqlen_k=48, causal=True),
    "auto": P(strategy="auto", heads=8, heads_k=8, causal=True, bias="head", lse=True),
    "auto, rows": P(strategy="auto", heads=8, heads_k=8, causal=True, bias="full"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_call_over_processes_equals_one_call(name: str, size: int) -> None:
    for rank, errors in enumerate(workers(size).run("distributed_calls.compared", CASES[name])):
        assert max(errors.values()) < TOLERANCE, (rank, errors)


WINDOWED = P(window=(20, 0), seqlen_q=1024, seqlen_k=1024, heads=2, heads_k=2, lse=True)
# Calls in which ranks send each other the keys that are read, and no others.
IN_PARTS: dict[str, ParallelCase] = {
    "plain": replace(WINDOWED, causal=True),
    "contiguous": replace(WINDOWED, layout="contiguous", window=(100, 7)),
    "balanced": replace(WINDOWED, layout="balanced", bias="keys"),
    "bias of pairs": replace(WINDOWED, bias="full", mask="full", batch=1),
    "groups of heads": replace(WINDOWED, heads=4, heads_k=2, groups=2, bias="group", batch=1),
    "sharded": replace(WINDOWED, bias="sharded", mask="sharded"),
    "sharded, contiguous": replace(WINDOWED, bias="sharded_one", layout="contiguous", window=(200, 1)),
    "mask, prepared": replace(WINDOWED, mask="prepared", batch=1),
    "sharded and summed": replace(WINDOWED, bias="sharded", reduce=True, sink=True),
    "bias of heads, summed": replace(WINDOWED, bias="head", reduce=True),
    "empty rows": replace(WINDOWED, mask="shared", empty=True, batch=1),
    "more keys": replace(WINDOWED, seqlen_q=512, seqlen_k=2048, batch=1),
    "fewer keys, rows without": replace(WINDOWED, seqlen_q=1536, seqlen_k=1024, batch=1),
    "other keys": replace(WINDOWED, seqlen_q=768, seqlen_k=1024, layout="contiguous", window=(0, 0)),
    "only dv": replace(WINDOWED, needs=("v",), dim_v=8),
    "only dk": replace(WINDOWED, needs=("k",)),
    "no gradient": replace(WINDOWED, needs=()),
    "wide exchange": replace(WINDOWED, exchange=torch.float64, dim=8, dim_v=3),
}
OVER_A_MESH = {"mesh": (2, 2), "strategy": "auto", "heads": 4, "heads_k": 2, "groups": None, "reduce": True}
IN_PARTS_OVER_A_MESH = {
    f"{name}, mesh": replace(IN_PARTS[name], **OVER_A_MESH)  # type: ignore[arg-type]
    for name in ("plain", "sharded", "bias of pairs", "groups of heads")
}


@pytest.mark.parametrize(
    "case, size",
    [
        *(pytest.param(case, size, id=f"{name}-{size}") for name, case in IN_PARTS.items() for size in (2, 4)),
        *(pytest.param(case, 4, id=name) for name, case in IN_PARTS_OVER_A_MESH.items()),
    ],
)
def test_parts_give_the_results_of_one_process_and_the_bits_of_all_keys(case: ParallelCase, size: int) -> None:
    for rank, (errors, equal) in enumerate(workers(size).run("distributed_calls.compared_in_parts", case)):
        assert max(errors.values()) < TOLERANCE, (rank, errors)
        assert all(equal.values()), (rank, equal)


M = (2, 2)
ON_A_MESH = {
    "plain": P(mesh=M, strategy="auto", causal=True, lse=True),
    "bias of pairs": P(mesh=M, strategy="auto", causal=True, bias="full", mask="full", lse=True, reduce=True),
    "bias of groups": P(mesh=M, strategy="auto", bias="group", mask="shared", heads=8, heads_k=4, groups=2),
    "bias of keys": P(mesh=M, strategy="auto", causal=True, bias="keys", mask="keys", lse=True),
    "bias sharded": P(mesh=M, strategy="auto", bias="sharded", mask="sharded", reduce=True),
    "bias of one head": P(mesh=M, strategy="auto", bias="one_head", window=(9, 4)),
    "summed": P(mesh=M, strategy="auto", bias="keys_of_q", reduce=True, sink=True, lse=True),
    "sink": P(mesh=M, strategy="auto", sink=True, lse=True, causal=True),
    "shared heads": P(mesh=M, strategy="auto", heads=4, heads_k=1, causal=True, dim=8, dim_v=4, lse=True),
    "prepared": P(mesh=M, strategy="auto", mask="prepared_keys", causal=True, seqlen_q=16, seqlen_k=48),
    "outer of one": P(mesh=(1, 4), strategy="auto", heads=8, heads_k=8, bias="head", causal=True, lse=True),
    "inner of one": P(mesh=(4, 1), strategy="auto", bias="full", causal=True),
    "contiguous": P(mesh=M, strategy="auto", layout="contiguous", bias="query", lse=True),
}


@pytest.mark.parametrize("name", ON_A_MESH)
def test_a_call_over_a_mesh_of_two_dims_equals_one_call(name: str) -> None:
    for rank, errors in enumerate(workers(4).run("distributed_calls.compared", ON_A_MESH[name])):
        assert max(errors.values()) < TOLERANCE, (rank, errors)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_mistake_of_one_rank_of_a_mesh_raises_on_all(rank: int) -> None:
    case = P(mesh=M, strategy="auto", mask="full")
    assert_all_raise(case, rank, 4, {"mask": "wrong"}, {}, "ValueError", f"rank {rank}: mask has shape")
    message = differing("softmax_scale", "0.5", "0.1", rank, 4)
    assert_all_raise(case, rank, 4, {"scale": 0.1}, {}, "ValueError", message)


FORMS = {
    "tiles": P(mask="prepared", causal=True, bias="full", lse=True),
    "tiles of key-value heads": P(mask="prepared_group", causal=True, groups=2),
    "tiles made in the call": P(mask="full", groups=2, window=(9, 2)),
    "intervals": P(mask="prepared_keys", causal=True, seqlen_q=128, seqlen_k=128),
    "intervals made in the call": P(mask="keys", causal=True, seqlen_q=128, seqlen_k=128, groups=2, bias="keys"),
    "keys": P(mask="prepared_keys", causal=True),
    "keys, sharded": P(mask="sharded", causal=True, window=(7, 0)),
    "tiles, sent in parts": replace(WINDOWED, mask="prepared", heads=4, groups=2),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_a_backend_that_reads_prepared_masks_gets_those_of_its_slices(name: str, size: int) -> None:
    answers = workers(size).run("distributed_calls.compared_by_unpacking", FORMS[name])
    assert all(max(errors.values()) < TOLERANCE for errors, _ in answers), answers
    forms = set().union(*(one for _, one in answers))
    assert forms <= {"tiles", "intervals", "keys"} and name.split()[0].strip(",") in forms, forms


NARROW = {"dtype": torch.bfloat16, "dim": 16, "dim_v": 16}
REPEATED = {
    "parts": replace(WINDOWED, **NARROW),  # type: ignore[arg-type]
    "parts, sharded": replace(WINDOWED, layout="balanced", bias="sharded", **NARROW),  # type: ignore[arg-type]
    "parts, fp32 exchange": replace(WINDOWED, exchange=torch.float32, **NARROW),  # type: ignore[arg-type]
    "fp32 exchange": P(dtype=torch.bfloat16, exchange=torch.float32),
    "bias in 16 bits": P(dtype=torch.bfloat16, bias="sharded"),
    "bias in 16 bits, no gradient": P(needs=(), bias="sharded", dtype=torch.bfloat16),
    "groups": P(causal=True, bias="full", groups=2, dtype=torch.bfloat16, seqlen_q=128, seqlen_k=128, dim=16, dim_v=16),
    "summed": P(bias="head", reduce=True, sink=True, dtype=torch.float32, lse=True),
    "sharded": P(bias="sharded", mask="prepared", dtype=torch.float32, layout="balanced"),
    "ulysses": P(strategy="ulysses", heads=4, heads_k=4, dtype=torch.float16, causal=True),
}


@pytest.mark.parametrize("name", REPEATED)
def test_results_are_equal_bit_by_bit_from_run_to_run(name: str) -> None:
    assert workers(4).run("distributed_calls.repeated", REPEATED[name]) == [True] * 4


def test_every_rank_has_the_same_bits_of_a_summed_gradient() -> None:
    case = P(bias="head", reduce=True, causal=True, dtype=torch.float32, lse=True)
    first, *others = workers(4).run("distributed_calls.gradient_of_bias", case)
    assert all(torch.equal(first, x) for x in others)


D = "float64"
# Each changes the case or the keywords of one rank. The error is a kind and what that rank says, or an argument, what
# the other ranks have, and what that rank has.
MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "batch": ({"batch": 3}, ("q", D + " (2, {rows}, 4, 4)", D + " (3, {rows}, 4, 4)")),
    "query heads": ({"heads": 8}, ("q", D + " (2, {rows}, 4, 4)", D + " (2, {rows}, 8, 4)")),
    "key-value heads": ({"heads_k": 1}, ("k", "(2, {rows}, 2, 4)", "(2, {rows}, 1, 4)")),
    "dim of values": ({"dim_v": 5}, ("v", "(2, {rows}, 2, 4)", "(2, {rows}, 2, 5)")),
    "dtype": ({"dtype": torch.float32}, ("q", D + " (2, {rows}, 4, 4)", "float32 (2, {rows}, 4, 4)")),
    "length": ({"seqlen_q": 64}, ("q", D + " (2, {rows}, 4, 4)", D + " (2, {twice}, 4, 4)")),
    "order of positions": ({"layout": "contiguous"}, ("layout", "{zigzag}", "{contiguous}")),
    "causality": ({"causal": False}, ("is_causal", "True", "False")),
    "window": ({"window": (3, -1)}, ("window_size", "(-1, -1)", "(3, -1)")),
    "no mask": ({"mask": "none"}, ("mask", "(2, 4, {rows}, 32)", "None")),
    "prepared mask": ({"mask": "prepared"}, ("mask", "(2, 4, {rows}, 32)", "prepared")),
    "no bias": ({"bias": "none"}, ("bias", D + " (1, 4, 1, 1)", "None")),
    "dtype of bias": ({"bias_dtype": torch.float32}, ("bias", D + " (1, 4, 1, 1)", "float32 (1, 4, 1, 1)")),
    "sink": ({"sink": True}, ("sink", "None", D)),
    "gradients": ({"needs": ("q",)}, ("requires_grad", "q, k, v, bias", "q")),
    "no gradient": ({"needs": ()}, ("requires_grad", "q, k, v, bias", "nothing")),
    "lse": ({"return_lse": False}, ("return_lse", "True", "False")),
    "softcap": ({"softcap": 9.0}, ("softcap", "1.0", "9.0")),
    "scale": ({"scale": 0.1}, ("softmax_scale", "0.5", "0.1")),
    "deterministic": ({"deterministic": True}, ("deterministic", "False", "True")),
    "head groups": ({"groups": 2}, ("head_groups", "1", "2")),
    "sums": ({"reduce": True}, ("reduce_bias_grad", "False", "True")),
    "exchange": ({"exchange": torch.float64}, ("exchange_dtype", "None", "torch.float64")),
    "other backend": ({"backend": "unpacking"}, ("backends", "('eager', 'eager')", "('unpacking', 'unpacking')")),
    "layout": ({"layout": SequenceLayout.zigzag(16, 1)}, ("ValueError", "layout is for 1 ranks; it needs")),
    "shape of mask": ({"mask": "wrong"}, ("ValueError", "mask has shape")),
    "dtype of mask": ({"mask": "numbers"}, ("TypeError", "mask has dtype float64; it needs bool")),
    "dropout": ({"dropout_p": 0.1}, ("ValueError", "dropout_p is 0.1; context_parallel_attention has no dropout")),
    "strategy": ({"strategy": "ulysses"}, ("ValueError", "strategy is 'ulysses', and a mask or bias has rows")),
    "groups of no heads": ({"groups": 3}, ("ValueError", "head_groups is 3; it needs to divide the 2 key-value heads")),
    "unfit backend": ({"backend": "triton"}, ("BackendUnsupportedError", "backend 'triton' does not support this")),
    "unknown backend": ({"backend": "fast"}, ("ValueError", "backend 'fast' is unknown")),
    "no memory": ({"exchange_dtype": Unlucky()}, ("RuntimeError", "no memory")),
}


def differing(name: str, theirs: str, own: str, rank: int, size: int) -> str:
    """Say which ranks have which value of an argument."""
    others = [str(r) for r in range(size) if r != rank]
    parts = [f"{theirs} on rank{'s' * (size > 2)} {', '.join(others)}", f"{own} on rank {rank}"]
    said = " and ".join(parts if rank else parts[::-1])
    return f"{name} is {said}; context_parallel_attention needs the same on every rank"


def assert_all_raise(
    case: ParallelCase, rank: int, size: int, change: dict[str, Any], keywords: dict[str, Any], kind: str, message: str
) -> None:
    """All ranks raise one error, twice, and compute good calls after each."""
    answers = workers(size).run("distributed_calls.mistaken", case, rank, change, keywords)
    ((name, said),) = answers[0][0]
    assert name == kind and message in said and all(raised == answers[0][0] for raised, _ in answers), answers
    assert max(error for _, error in answers) < TOLERANCE, answers


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_raises_on_all(name: str, size: int) -> None:
    mistake, (what, *values) = MISTAKES[name]
    case, rank = P(mask="full", bias="head", causal=True, softcap=1.0, backend="eager"), size // 2
    fields = {key: value for key, value in mistake.items() if key in vars(case) and not key == "layout" == name}
    keywords = {key: value for key, value in mistake.items() if key not in fields}
    if len(values) == 1:
        assert_all_raise(case, rank, size, fields, keywords, what, f"rank {rank}: {values[0]}")
        return
    sizes = {"rows": 32 // size, "twice": 64 // size}
    layouts = {kind: getattr(SequenceLayout, kind)(32, size) for kind in ("zigzag", "contiguous")}
    message = differing(what, *(value.format(**sizes, **layouts) for value in values), rank, size)
    assert_all_raise(case, rank, size, fields, keywords, "ValueError", message)


def test_another_strategy_and_another_order_of_keys_raise_on_all() -> None:
    message = differing("strategy", "gather", "ulysses", 1, 2)
    assert_all_raise(P(heads_k=4), 1, 2, {"strategy": "ulysses"}, {}, "ValueError", message)
    zigzag, contiguous = SequenceLayout.zigzag(32, 2), SequenceLayout.contiguous(32, 2)
    message = differing("layout_k", str(zigzag), str(contiguous), 1, 2)
    assert_all_raise(P(causal=True), 1, 2, {}, {"layout_k": contiguous}, "ValueError", message)


def test_nothing_is_compared_under_fake_tensors() -> None:
    assert workers(2).run("distributed_calls.under_fake_tensors") == [((1, 8, 2, 4), ("ValueError", True))] * 2


def test_a_mistake_after_many_good_calls_raises_on_all() -> None:
    case = P(causal=True, needs=(), seqlen_q=8, seqlen_k=8, batch=1, heads=2)
    message = differing("is_causal", "True", "False", 1, 2)
    assert workers(2).run("distributed_calls.mistaken_after_many", case, 1000) == [("ValueError", message)] * 2


IN_BACKWARD = {
    "gather": (P(causal=True, bias="full"), ("order", "forward")),
    "sharded": (P(bias="sharded", sink=True, reduce=True), ("order", "forward", "gradients")),
    "window": (P(bias="sharded", window=(20, 3), seqlen_q=1024, seqlen_k=1024), ("order", "forward", "gradients")),
    "summed": (P(bias="head", reduce=True), ("order", "gradients")),
    "ulysses": (P(strategy="ulysses", heads_k=4), ("order", "forward", "gradients")),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name, mistake", [(name, mistake) for name in IN_BACKWARD for mistake in IN_BACKWARD[name][1]])
def test_another_backward_pass_on_one_rank_raises_on_all(name: str, mistake: str, size: int) -> None:
    answers = workers(size).run("distributed_calls.mistaken_in_backward", IN_BACKWARD[name][0], mistake)
    (kind, said), _ = answers[0]
    others = f"rank{'s' * (size > 2)} {', '.join(str(rank) for rank in range(size - 1))}"
    what, theirs, own = "step", r"backward of call \d+", r"backward of call \d+"
    if mistake == "forward":
        own = "forward"
    elif (name, mistake) == ("ulysses", "gradients"):  # v of the second layer was not asked for, and the first is next
        what, theirs, own = "traded", "v", "q"
    assert kind == "ValueError" and {raised for raised, _ in answers} == {(kind, said)}, answers
    assert re.match(rf"{what} is {theirs} on {others} and {own} on rank {size - 1}; context", said), said
    assert max(error for _, error in answers) < TOLERANCE, answers


@pytest.mark.parametrize(
    "name, bias, shapes",
    [
        ("gather", "none", ("q", "(2, 16, 4, 4)", "(3, 16, 4, 4)")),
        ("ulysses", "none", ("q", "(2, 16, 4, 4)", "(3, 16, 4, 4)")),
        ("sharded", "sharded", ("mask or bias of keys", "(2, 4, 1, 16)", "(3, 4, 1, 16)")),
    ],
    ids=["gather", "ulysses", "sharded"],
)
def test_a_mistake_in_a_compiled_call_raises_on_all(name: str, bias: str, shapes: tuple[str, str, str]) -> None:
    case = P(strategy="ulysses" if name == "ulysses" else "gather", heads_k=4, causal=True, bias=bias)
    answers = workers(2).run("distributed_calls.mistaken_when_compiled", case, {"batch": 3})
    what, *values = shapes
    message = differing(what, *(f"float64 {shape}" for shape in values), 1, 2)
    assert answers == [[("ValueError", message)] * 2] * 2


def test_a_group_without_a_cpu_backend_compares_on_the_host_and_keeps_nothing() -> None:
    assert workers(2).run("distributed_calls.compared_on_a_device_group") == [(["ValueError"] * 2, 2, 0)] * 2


COMPILED = {
    **{f"parts, {name}": IN_PARTS[name] for name in ("plain", "sharded", "groups of heads")},
    "mesh": P(mesh=M, strategy="auto", causal=True, bias="full", lse=True),
    "gather": P(causal=True, bias="full", mask="full", groups=2, lse=True),
    "summed": P(bias="head", reduce=True, mask="prepared", sink=True, lse=True),
    "sharded": P(bias="sharded", mask="sharded", window=(5, 2)),
    "ulysses": P(strategy="ulysses", heads=4, heads_k=2, bias="keys", causal=True, lse=True),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_call_compiles_to_one_graph(name: str) -> None:
    size = 2 if COMPILED[name].mesh is None else 4
    assert max(workers(size).run("distributed_calls.compiled", COMPILED[name])) < TOLERANCE


def test_operators_are_what_they_say() -> None:
    checked: set[str] = set()
    for case in (case for case in COMPILED.values() if case.mesh is None):
        for names in workers(2).run("distributed_calls.check_operators", case):
            checked |= set(names)
    assert {"gather_forward", "gather_backward", "move_keys", "sum_over_ranks", "trade_heads"} <= checked


@pytest.mark.parametrize("causal", [False, True])
def test_ranks_together_have_the_flop_of_one_call(causal: bool) -> None:
    counts = workers(2).run(
        "distributed_calls.counted_flop", P(causal=causal, dim=8, dim_v=4, seqlen_k=48, bias="full")
    )
    pairs = 2 * 4 * (sum(48 - 32 + i + 1 for i in range(32)) if causal else 32 * 48)
    assert counts[0] == counts[1] and sum(counts) == pairs * 2 * ((8 + 4) + (8 + 4 + 4 + 8 + 8))


def test_the_program_of_gpu_tests_runs_on_a_cpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["tests/gpu_distributed.py", "--random", "2", "--match", "o"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed   eager   top-k mask, bias of keys: eager" in done.stdout and "random 1" in done.stdout
    assert done.stdout.splitlines()[-1] == "| mistakes of one rank | 1 | 0 | 0 |"
    assert done.stdout.splitlines()[-2].endswith("| 0 | 0 |")
