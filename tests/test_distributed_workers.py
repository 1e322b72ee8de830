"""Context parallelism over gloo, two and four processes, in fp64 against one call in one process."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from cases import DEVICE, Numbers
from conftest import needs_triton
from distributed_calls import BIASES, DISTANCES, ENTRIES, MASKS, P, ParallelCase, Unlucky, draw_parallel
from distributed_workers import torchrun, workers

from flash_dmattn.distributed import SequenceLayout

TOLERANCE = 1e-10

L = partial(P, lists=("B", "1"))
# Calls whose intervals begin at multiples of 16 on 4 ranks, with dropout. The generators of ranks differ.
DROPPED = partial(P, dropout_p=0.3, seqlen_q=128, seqlen_k=128, batch=1)
IN_ONE = partial(P, documents=(0, 3, 8, 17, 32), batch=1)
# Padded entries; the last one has nothing else.
SHORT = partial(P, batch=3, lengths=((20, 32, 0), (20, 20, 0)))
U, OVER = partial(P, strategy="ulysses"), partial(P, mesh=(2, 2), strategy="auto")

CASES = {
    **{f"bias {name}": P(bias=name, is_causal=True, dlse=True, seed=i) for i, name in enumerate(BIASES)},
    **{
        f"mask {name}": P(mask=name, bias="keys" if "topk" in name else "none", is_causal=True, dlse=True, seed=20 + i)
        for i, name in enumerate(MASKS)
    },
    **{
        name: P(relative=numbers, is_causal=i % 2 == 0, mask=("none", "full")[i % 3 == 0], dlse=True, seed=40 + i)
        for i, (name, numbers) in enumerate(DISTANCES.items())
    },
    "lists": L(dlse=True, is_causal=True),
    "lists, values": L(relative=ENTRIES["B", "Hk", "Lq"], is_causal=True, dlse=True, sink="normal"),
    "lists of groups, cross": L(
        lists=("1", "Hk"), relative=ENTRIES["1", "Hq", "R"], groups=2, seqlen_q=16, seqlen_k=48, is_causal=True
    ),
    "lists of blocks": L(blocks=(1, 4), relative=ENTRIES["1", "Hq", "R"], window_size=(9, 4), layout="balanced"),
    "lists for blocks": L(blocks=(4, 8), relative=ENTRIES["B", "1", "R"], is_causal=True, layout="contiguous"),
    "lists for blocks, values of rows": L(blocks=(2, 1), relative=ENTRIES["B", "Hk", "Lq"], softcap=2.0),
    "documents": IN_ONE(is_causal=True, dlse=True),
    "documents, without causality": IN_ONE(
        documents=(0, 1, 8, 8, 32), used=(1, 7, 0, 21), sink="normal", layout="contiguous", bias="keys_of_q"
    ),
    "documents, window": IN_ONE(
        window_size=(5, 2), relative=DISTANCES["relative as long as the keys of a rank"], dlse=True
    ),
    "documents, band": IN_ONE(relative=DISTANCES["band of groups"], is_causal=True, groups=2, layout="balanced"),
    "documents, relative": IN_ONE(relative=Numbers(("1", "Hq", "1"), 29, 14, "error"), dlse=True),
    "documents, sharded bias": IN_ONE(documents=(0, 16, 32), bias=("1", "Hk", "1", "Ls"), window_size=(-1, 1)),
    "documents, prepared": IN_ONE(prepared=True, batch=2, is_causal=True, bias="full", dlse=True),
    "documents, used in part": IN_ONE(used=(2, 5, 0, 9), is_causal=True, dlse=True),
    "documents of no position": IN_ONE(documents=(0, 32), used=(0,), is_causal=True),
    "ulysses, documents": IN_ONE(strategy="ulysses", num_heads_k=4, is_causal=True, dlse=True, bias="keys_of_q"),
    "documents, dropout": IN_ONE(dropout_p=0.3, is_causal=True, dlse=True, bias="keys_of_q", sink="normal"),
    "documents, dropout, without causality": IN_ONE(
        documents=(0, 1, 8, 8, 32), used=(1, 7, 0, 21), sink="normal", layout="contiguous", bias="query", dropout_p=0.3
    ),
    "documents, dropout, window": IN_ONE(
        documents=(0, 7, 7, 300, 320), seqlen_q=320, seqlen_k=320, window_size=(40, 3), dropout_p=0.3, dlse=True
    ),
    "documents, dropout, band": IN_ONE(
        relative=DISTANCES["band of groups"], is_causal=True, groups=2, layout="balanced", dropout_p=0.3, reduce=True
    ),
    "documents, dropout, relative": IN_ONE(relative=Numbers(("1", "Hq", "1"), 29, 14, "error"), dropout_p=0.3),
    "documents, dropout, sharded": IN_ONE(documents=(0, 16, 32), bias="sharded", window_size=(-1, 1), dropout_p=0.3),
    "documents, dropout, of no position": IN_ONE(documents=(0, 32), used=(0,), is_causal=True, dropout_p=0.3),
    "ulysses, documents, dropout": IN_ONE(
        strategy="ulysses", num_heads_k=4, is_causal=True, dlse=True, bias="keys_of_q", dropout_p=0.3, sink="normal"
    ),
    "ulysses, documents, relative": IN_ONE(
        strategy="ulysses", num_heads_k=4, relative=Numbers(("1", "Hq", "1"), 29, 14, "error"), used=(2, 5, 9, 15)
    ),
    "ulysses, documents of no position": IN_ONE(strategy="ulysses", num_heads_k=4, documents=(0, 32), used=(0,)),
    "padded": SHORT(is_causal=True, dlse=True, bias="full", sink="normal"),
    "padded, queries without keys": SHORT(lengths=((), (20, 0, 3)), bias="shared", sink="normal", dlse=True, groups=2),
    "padded, equal lengths": SHORT(
        batch=4, lengths=((9, 9, 9, 5),) * 2, bias="shared", mask="group", layout="contiguous", window_size=(6, 2)
    ),
    "padded, cross": SHORT(seqlen_q=16, seqlen_k=48, lengths=((16, 3, 7), (48, 1, 0)), is_causal=True, bias="query"),
    "padded, keys": SHORT(bias="sharded", mask="sharded", reduce=True, layout="balanced", dlse=True, softcap=2.0),
    "padded, one for all keys": SHORT(bias="keys_of_q", mask="keys", reduce=True, lengths=((), (1, 30, 32))),
    "padded, relative": SHORT(relative=Numbers(("B", "Hk", "1"), 51, 31, "error"), is_causal=True, reduce=True),
    "padded, clamped": SHORT(relative=Numbers(("1", "Hq", "1"), 9, 6, "clamp"), window_size=(-1, 3), dlse=True),
    "padded, band": SHORT(relative=DISTANCES["band"], layout="balanced", dlse=True),
    "padded, band for all": SHORT(relative=DISTANCES["band of groups"], is_causal=True),
    "padded, only dbias": SHORT(needs_grad=("bias",), bias="one_head"),
    "padded, no gradient": SHORT(needs_grad=(), bias="one_head", is_causal=True),
    "padded, nothing": SHORT(lengths=((0, 0, 0), (0, 3, 0)), bias="full", dlse=True),
    "padded, dropout": SHORT(
        lengths=((45, 64, 0), (45, 50, 9)), seqlen_q=64, seqlen_k=64, dropout_p=0.3, bias="full", is_causal=True
    ),
    "ulysses, padded": SHORT(strategy="ulysses", num_heads_k=4, bias="keys", mask="keys", is_causal=True, dlse=True),
    "ulysses, padded, dropout": SHORT(
        strategy="ulysses", num_heads_k=4, dropout_p=0.3, sink="normal", relative=DISTANCES["relative"], reduce=True
    ),
    "ulysses, one document": IN_ONE(strategy="ulysses", num_heads_k=4, is_causal=True, documents=(0, 32)),
    "dropout": DROPPED(is_causal=True, bias="full", sink="normal", dlse=True, batch=2),
    "dropout, groups, cross": DROPPED(
        seqlen_k=160, groups=2, window_size=(40, 9), mask="prepared", layout="contiguous"
    ),
    "dropout, rows inside of a block": P(
        dropout_p=0.3, mask="full", bias="full", sink="normal", dlse=True, is_causal=True, groups=2
    ),
    "dropout, band inside of a block": P(dropout_p=0.3, relative=DISTANCES["band"], window_size=(9, 3), seqlen_k=40),
    "dropout, lists": DROPPED(lists=("B", "1"), relative=ENTRIES["B", "Hk", "Lq"], is_causal=True),
    "ulysses, dropout": U(dropout_p=0.3, num_heads=8, num_heads_k=4, bias="keys", is_causal=True, dlse=True),
    "relative, groups, cross": P(
        relative=DISTANCES["relative, clamped"], seqlen_q=16, seqlen_k=48, groups=2, reduce=True, layout="balanced"
    ),
    "ulysses, relative": U(num_heads_k=4, relative=DISTANCES["relative"], is_causal=True, reduce=True, dlse=True),
    "ulysses, clamped, few heads": U(num_heads_k=2, relative=DISTANCES["relative, clamped"], window_size=(9, 3)),
    **{f"drawn {number}": draw_parallel(number) for number in range(24)},
    "far window": P(
        window_size=(20, 3), bias="full", mask="prepared", seqlen_q=1024, seqlen_k=1024, num_heads=2, batch=1
    ),
    "far window, keys": P(
        window_size=(20, 3), bias="sharded", seqlen_q=1024, seqlen_k=1024, num_heads=2, batch=1, groups=2
    ),
    "rows without keys": P(seqlen_q=48, seqlen_k=16, is_causal=True, bias="full", dlse=True, sink="normal"),
    "only dbias, sharded": P(needs_grad=("bias",), bias="sharded"),
    "no gradient": P(needs_grad=(), is_causal=True, bias="sharded", mask="prepared"),
    "ulysses, only dv": U(num_heads_k=4, needs_grad=("v",), dlse=True),
    "ulysses, shared head, sums": U(num_heads_k=1, bias="sharded", sink="normal", reduce=True, dlse=True),
    "ulysses": U(is_causal=True, dlse=True, num_heads=8, num_heads_k=4, bias="keys"),
    "ulysses, window": U(window_size=(4, 1), num_heads=8, num_heads_k=8, bias="keys_of_q", mask="keys"),
    "ulysses, shared heads": U(is_causal=True, num_heads=8, num_heads_k=2, bias="keys", dlse=True),
    "ulysses, one head": U(is_causal=True, num_heads_k=1, bias="head", reduce=True, dlse=True),
    "ulysses, sharded": U(is_causal=True, num_heads_k=4, bias="sharded", mask="sharded"),
    "ulysses, sink": U(num_heads_k=4, sink="normal", dlse=True, softcap=3.0),
    "ulysses, cross": U(num_heads_k=4, seqlen_q=16, seqlen_k=48, is_causal=True),
    "auto": P(strategy="auto", num_heads=8, num_heads_k=8, is_causal=True, bias="head", dlse=True),
    "auto, rows": P(strategy="auto", num_heads=8, num_heads_k=8, is_causal=True, bias="full"),
}


ON_A_MESH = {
    "plain": OVER(is_causal=True, dlse=True),
    "bias of pairs": OVER(is_causal=True, bias="full", mask="full", dlse=True, reduce=True),
    "bias of groups": OVER(bias="group", mask="shared", num_heads=8, num_heads_k=4, groups=2),
    "bias of keys": OVER(is_causal=True, bias="keys", mask="keys", dlse=True),
    "bias sharded": OVER(bias="sharded", mask="sharded", reduce=True),
    "bias of one head": OVER(bias="one_head", window_size=(9, 4)),
    "summed": OVER(bias="keys_of_q", reduce=True, sink="normal", dlse=True),
    "sink": OVER(sink="normal", dlse=True, is_causal=True),
    "shared heads": OVER(num_heads_k=1, is_causal=True, head_dim=8, head_dim_v=4, dlse=True),
    "prepared": OVER(mask="prepared_keys", is_causal=True, seqlen_q=16, seqlen_k=48),
    "outer of one": P(mesh=(1, 4), strategy="auto", num_heads=8, num_heads_k=8, bias="head", is_causal=True, dlse=True),
    "relative, summed": OVER(relative=DISTANCES["relative"], is_causal=True, reduce=True, dlse=True),
    "relative": OVER(relative=DISTANCES["relative, clamped"], seqlen_k=48),
    "documents": OVER(documents=(0, 3, 8, 17, 32), batch=1, is_causal=True, dlse=True),
    "documents, trailing": OVER(
        documents=(0, 16, 32), used=(16, 15), batch=1, window_size=(4, 4), bias="keys_of_q", reduce=True
    ),
    "lists": OVER(lists=("B", "1"), relative=ENTRIES["B", "Hk", "Lq"], is_causal=True, dlse=True),
    "band": OVER(relative=DISTANCES["band"], dlse=True, groups=2, num_heads=8, num_heads_k=4),
    "inner of one": P(mesh=(4, 1), strategy="auto", bias="full", is_causal=True),
    "contiguous": OVER(layout="contiguous", bias="query", dlse=True),
    "padded": OVER(batch=3, lengths=((20, 32, 0), (20, 20, 0)), is_causal=True, bias="full", dlse=True, dropout_p=0.2),
    "documents, dropout": OVER(documents=(0, 3, 8, 17, 32), batch=1, is_causal=True, dlse=True, dropout_p=0.3),
    "dropout": OVER(
        dropout_p=0.3, seqlen_q=128, seqlen_k=128, num_heads=8, num_heads_k=4, groups=2, bias="full", is_causal=True
    ),
}


@pytest.mark.parametrize(
    "case, size",
    [
        *(pytest.param(case, size, id=f"{name}-{size}") for name, case in CASES.items() for size in (2, 4)),
        *(pytest.param(case, 4, id=f"mesh, {name}") for name, case in ON_A_MESH.items()),
    ],
)
def test_a_call_over_processes_equals_one_call(case: ParallelCase, size: int) -> None:
    for rank, errors in enumerate(workers(size).run("distributed_calls.compared", case)):
        assert max(errors.values()) < TOLERANCE, (rank, errors)


WINDOWED = P(window_size=(20, 0), seqlen_q=1024, seqlen_k=1024, num_heads=2, num_heads_k=2, dlse=True)
IN_DOCUMENTS = WINDOWED.with_(
    window_size=None, layout="contiguous", batch=1, documents=(0, 250, 520, 620, 1024), used=(200, 262, 9, 380)
)
# Calls in which ranks send each other the keys that are read, and no others.
IN_PARTS: dict[str, ParallelCase] = {
    "plain": WINDOWED.with_(is_causal=True),
    "contiguous": WINDOWED.with_(layout="contiguous", window_size=(100, 7)),
    "balanced": WINDOWED.with_(layout="balanced", bias="keys"),
    "bias of pairs": WINDOWED.with_(bias="full", mask="full", batch=1),
    "relative": WINDOWED.with_(relative=DISTANCES["relative"], layout="balanced"),
    "documents": IN_DOCUMENTS.with_(is_causal=True, documents=(0, 200, 512, 520, 900, 1024), used=()),
    "documents, sharded": IN_DOCUMENTS.with_(bias="sharded", reduce=True, sink="normal"),
    "padded": WINDOWED.with_(batch=3, lengths=((1000, 3, 0), (900, 3, 7)), bias="sharded", reduce=True, sink="normal"),
    "documents, dropout": IN_DOCUMENTS.with_(is_causal=True, dropout_p=0.3, bias="sharded", reduce=True),
    "documents, window": IN_DOCUMENTS.with_(window_size=(40, 7), layout="zigzag"),
    "lists": WINDOWED.with_(lists=("B", "1"), relative=ENTRIES["B", "Hk", "Lq"], blocks=(1, 16)),
    "band": WINDOWED.with_(relative=DISTANCES["band"], batch=1),
    "groups of heads": WINDOWED.with_(num_heads_k=2, groups=2, bias="group", batch=1),
    "sharded": WINDOWED.with_(bias="sharded", mask="sharded"),
    "sharded, contiguous": WINDOWED.with_(bias="sharded_one", layout="contiguous", window_size=(200, 1)),
    "mask, prepared": WINDOWED.with_(mask="prepared", batch=1),
    "sharded and summed": WINDOWED.with_(bias="sharded", reduce=True, sink="normal"),
    "bias of heads, summed": WINDOWED.with_(bias="head", reduce=True),
    "empty rows": WINDOWED.with_(mask="shared", mask_kind="empty_rows", batch=1),
    "more keys": WINDOWED.with_(seqlen_q=512, seqlen_k=2048, batch=1),
    "fewer keys, rows without": WINDOWED.with_(seqlen_q=1536, seqlen_k=1024, batch=1),
    "other keys": WINDOWED.with_(seqlen_q=768, seqlen_k=1024, layout="contiguous", window_size=(0, 0)),
    "only dv": WINDOWED.with_(needs_grad=("v",), head_dim_v=8),
    "only dk": WINDOWED.with_(needs_grad=("k",)),
    "no gradient": WINDOWED.with_(needs_grad=()),
    "dropout": WINDOWED.with_(dropout_p=0.3, bias="sharded", batch=1),
    "wide exchange": WINDOWED.with_(exchange=torch.float64, head_dim=8, head_dim_v=3),
}
OVER_A_MESH = {"mesh": (2, 2), "strategy": "auto", "num_heads": 4, "num_heads_k": 2, "groups": None, "reduce": True}
IN_PARTS_OVER_A_MESH = {
    f"{name}, mesh": IN_PARTS[name].with_(**OVER_A_MESH)
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


@pytest.mark.parametrize("rank", [0, 3])
def test_a_mistake_of_one_rank_of_a_mesh_raises_on_all(rank: int) -> None:
    case = OVER(mask="full")
    assert_all_raise(case, rank, 4, {"mask": "wrong"}, {}, "ValueError", f"rank {rank}: mask has shape")
    message = differing("softmax_scale", "0.5", "0.1", rank, 4)
    assert_all_raise(case, rank, 4, {"softmax_scale": 0.1}, {}, "ValueError", message)


FORMS = {
    "tiles": P(mask="prepared", is_causal=True, bias="full", dlse=True),
    "tiles of key-value heads": P(mask="prepared_group", is_causal=True, groups=2),
    "tiles made in the call": P(mask="full", groups=2, window_size=(9, 2)),
    "intervals": P(mask="prepared_keys", is_causal=True, seqlen_q=128, seqlen_k=128),
    "intervals made in the call": P(mask="keys", is_causal=True, seqlen_q=128, seqlen_k=128, groups=2, bias="keys"),
    "keys": P(mask="prepared_keys", is_causal=True),
    "tiles of padded entries": SHORT(mask="group", lengths=((20, 20, 0), (32, 32, 9)), groups=2, bias="shared"),
    "keys, sharded": P(mask="sharded", is_causal=True, window_size=(7, 0)),
    "tiles, sent in parts": WINDOWED.with_(mask="prepared", num_heads=4, groups=2),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_a_backend_that_reads_prepared_masks_gets_those_of_its_slices(name: str, size: int) -> None:
    answers = workers(size).run("distributed_calls.compared_by_unpacking", FORMS[name])
    assert all(max(errors.values()) < TOLERANCE for errors, _ in answers), answers
    forms = set().union(*(one for _, one in answers))
    assert forms <= {"tiles", "intervals", "keys"} and name.split()[0].strip(",") in forms, forms


NARROW = {"dtype": torch.bfloat16, "head_dim": 16}
REPEATED = {
    "parts": WINDOWED.with_(**NARROW),
    "parts, sharded": WINDOWED.with_(layout="balanced", bias="sharded", **NARROW),
    "parts, fp32 exchange": WINDOWED.with_(exchange=torch.float32, **NARROW),
    "fp32 exchange": P(dtype=torch.bfloat16, exchange=torch.float32),
    "bias in 16 bits": P(dtype=torch.bfloat16, bias="sharded"),
    "bias in 16 bits, no gradient": P(needs_grad=(), bias="sharded", dtype=torch.bfloat16),
    "groups": P(
        is_causal=True,
        bias="full",
        groups=2,
        dtype=torch.bfloat16,
        seqlen_q=128,
        seqlen_k=128,
        head_dim=16,
        head_dim_v=16,
    ),
    "summed": P(bias="head", reduce=True, sink="normal", dtype=torch.float32, dlse=True),
    "sharded": P(bias="sharded", mask="prepared", dtype=torch.float32, layout="balanced"),
    "ulysses": U(num_heads_k=4, dtype=torch.float16, is_causal=True),
    "relative": P(relative=DISTANCES["relative"], reduce=True, dtype=torch.bfloat16, is_causal=True),
    "band": P(relative=DISTANCES["band"], dtype=torch.bfloat16, layout="balanced"),
    "lists": L(relative=ENTRIES["B", "Hk", "Lq"], dtype=torch.bfloat16, is_causal=True),
    "documents": IN_ONE(dtype=torch.bfloat16, is_causal=True, bias="keys_of_q", reduce=True),
    "dropout": DROPPED(dtype=torch.bfloat16, is_causal=True, bias="full"),
    "padded": SHORT(dtype=torch.bfloat16, is_causal=True, bias="shared", dlse=True),
    "documents, dropout": IN_ONE(dtype=torch.bfloat16, is_causal=True, bias="keys_of_q", dropout_p=0.3),
}


@pytest.mark.parametrize("name", REPEATED)
def test_results_are_equal_bit_by_bit_from_run_to_run(name: str) -> None:
    assert workers(4).run("distributed_calls.repeated", REPEATED[name]) == [True] * 4


@pytest.mark.parametrize("strategy, backend", [("ulysses", "eager"), ("ulysses", "sdpa"), ("gather", "eager")])
def test_second_derivatives(strategy: str, backend: str) -> None:
    """Only heads that are traded have one, and the others say so."""
    for result in workers(2).run("distributed_calls.second_derivative", strategy, backend):
        if (strategy, backend) == ("ulysses", "eager"):
            assert isinstance(result, float) and result < 1e-10
        else:
            assert isinstance(result, str) and result.startswith(
                "context_parallel_attention has no second derivative with strategy='gather'; "
                if strategy == "gather"
                else "backend 'sdpa' has no second derivative of attention; "
            )
            assert 'backend="eager"' in result and "attention(" not in result


def test_every_rank_has_the_same_bits_of_a_summed_gradient() -> None:
    case = P(bias="head", reduce=True, is_causal=True, dtype=torch.float32, dlse=True)
    first, *others = workers(4).run("distributed_calls.gradient_of_bias", case)
    assert all(torch.equal(first, x) for x in others)


D = "float64"
# Each changes the case or the keywords of one rank. The error is a kind and what that rank says, or an argument, what
# the other ranks have, and what that rank has.
MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "batch": ({"batch": 3}, ("q", D + " (2, {rows}, 4, 4)", D + " (3, {rows}, 4, 4)")),
    "query heads": ({"num_heads": 8}, ("q", D + " (2, {rows}, 4, 4)", D + " (2, {rows}, 8, 4)")),
    "key-value heads": ({"num_heads_k": 1}, ("k", "(2, {rows}, 2, 4)", "(2, {rows}, 1, 4)")),
    "dim of values": ({"head_dim_v": 5}, ("v", "(2, {rows}, 2, 4)", "(2, {rows}, 2, 5)")),
    "dtype": ({"dtype": torch.float32}, ("q", D + " (2, {rows}, 4, 4)", "float32 (2, {rows}, 4, 4)")),
    "length": ({"seqlen_q": 64}, ("q", D + " (2, {rows}, 4, 4)", D + " (2, {twice}, 4, 4)")),
    "order of positions": ({"layout": "contiguous"}, ("layout", "{zigzag}", "{contiguous}")),
    "causality": ({"is_causal": False}, ("is_causal", "True", "False")),
    "window": ({"window_size": (3, -1)}, ("window_size", "(-1, -1)", "(3, -1)")),
    "no mask": ({"mask": "none"}, ("mask", "(2, 4, {rows}, 32)", "None")),
    "prepared mask": ({"mask": "prepared"}, ("mask", "(2, 4, {rows}, 32)", "prepared")),
    "no bias": ({"bias": "none"}, ("bias", D + " (1, 4, 1, 1)", "None")),
    "dtype of bias": ({"bias_dtype": torch.float32}, ("bias", D + " (1, 4, 1, 1)", "float32 (1, 4, 1, 1)")),
    "sink": ({"sink": "normal"}, ("sink", "None", D)),
    "gradients": ({"needs_grad": ("q",)}, ("requires_grad", "q, k, v, bias", "q")),
    "no gradient": ({"needs_grad": ()}, ("requires_grad", "q, k, v, bias", "nothing")),
    "lse": ({"return_lse": False}, ("return_lse", "True", "False")),
    "softcap": ({"softcap": 9.0}, ("softcap", "1.0", "9.0")),
    "scale": ({"softmax_scale": 0.1}, ("softmax_scale", "0.5", "0.1")),
    "deterministic": ({"deterministic": True}, ("deterministic", "False", "True")),
    "head groups": ({"groups": 2}, ("head_groups", "1", "2")),
    "sums": ({"reduce": True}, ("reduce_bias_grad", "False", "True")),
    "exchange": ({"exchange": torch.float64}, ("exchange_dtype", "None", "torch.float64")),
    "other backend": ({"backend": "unpacking"}, ("backends", "('eager', 'eager')", "('unpacking', 'unpacking')")),
    "layout": ({"layout": SequenceLayout.zigzag(16, 1)}, ("ValueError", "layout is for 1 ranks; it needs")),
    "shape of mask": ({"mask": "wrong"}, ("ValueError", "mask has shape")),
    "dtype of mask": ({"mask": "numbers"}, ("TypeError", "mask has dtype float64; it needs bool")),
    "dropout": ({"dropout_p": 0.1}, ("dropout_p", "0.0", "0.1")),
    "dropout of prepared rows": (
        {"dropout_p": 0.1, "mask": "prepared"},
        ("ValueError", "layout has an interval from"),
    ),
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
    return f"{name} is {said}; it needs to be the same on every rank"


def assert_all_raise(
    case: ParallelCase, rank: int, size: int, change: dict[str, Any], keywords: dict[str, Any], kind: str, message: str
) -> None:
    """All ranks raise one error, twice, and compute good calls after each."""
    answers = workers(size).run("distributed_calls.mistaken", case, rank, change, keywords)
    ((name, said),) = answers[0][0]
    assert name == kind and message in said and all(raised == answers[0][0] for raised, _ in answers), answers
    assert max(error for _, error in answers) < TOLERANCE, answers


@pytest.mark.parametrize(("name", "size"), zip(MISTAKES, itertools.cycle((4, 2))))
def test_a_mistake_of_one_rank_raises_on_all(name: str, size: int) -> None:
    mistake, (what, *values) = MISTAKES[name]
    case, rank = P(mask="full", bias="head", is_causal=True, softcap=1.0, backend="eager"), size // 2
    fields = {key: value for key, value in mistake.items() if key in vars(case) and not key == "layout" == name}
    keywords = {key: value for key, value in mistake.items() if key not in fields}
    if len(values) == 1:
        assert_all_raise(case, rank, size, fields, keywords, what, f"rank {rank}: {values[0]}")
        return
    sizes = {"rows": 32 // size, "twice": 64 // size}
    layouts = {kind: getattr(SequenceLayout, kind)(32, size) for kind in ("zigzag", "contiguous")}
    message = differing(what, *(value.format(**sizes, **layouts) for value in values), rank, size)
    assert_all_raise(case, rank, size, fields, keywords, "ValueError", message)


def test_other_values_on_one_rank_raise_on_all() -> None:
    """They may be values of distances, of documents or of lists."""
    case, other = P(relative=DISTANCES["relative"], is_causal=True), DISTANCES["relative"]._replace(zero=47)
    message = differing("bias.zero, bias.outside", "(48, 'error')", "(47, 'error')", 1, 2)
    assert_all_raise(case, 1, 2, {"relative": other}, {}, "ValueError", message)
    short = "rank 1: bias has values for distances -20 to 28; it needs those of the call, -31 to 0"
    other = DISTANCES["relative"]._replace(zero=20, number=49)
    assert_all_raise(case, 1, 2, {"relative": other}, {}, "ValueError", short)
    short, long = "(0, 3, 3, 8, 8, 17, 17, 32)", "(0, 3, 3, 9, 9, 17, 17, 32)"
    change = {"documents": (0, 3, 9, 17, 32)}
    assert_all_raise(IN_ONE(), 1, 2, change, {}, "ValueError", differing("documents", short, long, 1, 2))
    past = "rank 1: sequences end at 40; ranks that share a sequence need the bounds of all of it, up to 32"
    assert_all_raise(IN_ONE(), 1, 2, {"documents": (0, 3, 40)}, {}, "ValueError", past)
    message = differing("dropout_p", "0.3", "0.2", 1, 2)
    assert_all_raise(DROPPED(batch=2), 1, 2, {"dropout_p": 0.2}, {}, "ValueError", message)
    message = differing("dropout_p", "0.0", "0.3", 1, 2)
    assert_all_raise(IN_ONE(), 1, 2, {"dropout_p": 0.3}, {}, "ValueError", message)
    used, other = (20, 20, 32, 20, 0, 0), (20, 20, 32, 19, 0, 0)
    message = differing("lengths", str(used), str(other), 1, 2)
    assert_all_raise(SHORT(), 1, 2, {"lengths": (used[::2], other[1::2])}, {}, "ValueError", message)
    said = "rank 1: seqlens_k has 33; it needs at most the 32 positions of the whole sequence"
    assert_all_raise(SHORT(), 1, 2, {"lengths": ((), (20, 33, 0))}, {}, "ValueError", said)
    assert_all_raise(
        SHORT(), 1, 2, {"lengths": ((), ())}, {}, "ValueError", differing("sequences", "padded", "None", 1, 2)
    )
    case = L(relative=ENTRIES["B", "Hk", "Lq"])
    message = differing("lists", "(1, 1, 7)", "(1, 2, 7)", 1, 2)
    assert_all_raise(case, 1, 2, {"blocks": (1, 2)}, {}, "ValueError", message)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gathered_tensor_is_the_whole_one_and_its_gradient_a_sum(size: int, dtype: torch.dtype) -> None:
    for result, gradient, (kind, said), again in workers(size).run("distributed_calls.gathered", dtype):
        assert result and gradient and again
        assert kind == "ValueError" and said.startswith(f"gathered is {str(dtype).removeprefix('torch.')} (3, ")


@pytest.mark.parametrize("size", [2, 4])
def test_a_bias_beside_values_of_lists_is_summed_over_ranks(size: int) -> None:
    message = differing("gradient of bias.bias", "True", "False", size - 1, size)
    for first, second, said in workers(size).run("distributed_calls.summed_beside_values"):
        assert max(first, second) < TOLERANCE and said == ("ValueError", message)


def test_another_strategy_and_another_order_of_keys_raise_on_all() -> None:
    message = differing("strategy", "gather", "ulysses", 1, 2)
    assert_all_raise(P(num_heads_k=4), 1, 2, {"strategy": "ulysses"}, {}, "ValueError", message)
    zigzag, contiguous = SequenceLayout.zigzag(32, 2), SequenceLayout.contiguous(32, 2)
    message = differing("layout_k", str(zigzag), str(contiguous), 1, 2)
    assert_all_raise(P(is_causal=True), 1, 2, {}, {"layout_k": contiguous}, "ValueError", message)


def test_nothing_is_compared_under_fake_tensors() -> None:
    assert workers(2).run("distributed_calls.under_fake_tensors") == [((1, 8, 2, 4), ("ValueError", True))] * 2


def test_a_mistake_after_many_good_calls_raises_on_all() -> None:
    case = P(is_causal=True, needs_grad=(), seqlen_q=8, seqlen_k=8, batch=1, num_heads=2)
    message = differing("is_causal", "True", "False", 1, 2)
    assert workers(2).run("distributed_calls.mistaken_after_many", case, 1000) == [("ValueError", message)] * 2


IN_BACKWARD = {
    "gather": (P(is_causal=True, bias="full"), ("order", "forward")),
    "sharded": (P(bias="sharded", sink="normal", reduce=True), ("order", "forward", "gradients")),
    "window": (P(bias="sharded", window_size=(20, 3), seqlen_q=1024, seqlen_k=1024), ("order", "forward", "gradients")),
    "summed": (P(bias="head", reduce=True), ("order", "gradients")),
    "ulysses": (P(strategy="ulysses", num_heads_k=4), ("order", "forward")),
}


@pytest.mark.parametrize(
    ("name", "mistake", "size"),
    [
        (name, mistake, 4 if name in ("sharded", "summed") else 2)
        for name, (_, mistakes) in IN_BACKWARD.items()
        for mistake in mistakes
    ],
)
def test_another_backward_pass_on_one_rank_raises_on_all(name: str, mistake: str, size: int) -> None:
    answers = workers(size).run("distributed_calls.mistaken_in_backward", IN_BACKWARD[name][0], mistake)
    (kind, said), _ = answers[0]
    others = f"rank{'s' * (size > 2)} {', '.join(str(rank) for rank in range(size - 1))}"
    what, theirs, own = "step", r"backward of call \d+", r"backward of call \d+"
    if mistake == "forward":
        own = "forward"
    assert kind == "ValueError" and {raised for raised, _ in answers} == {(kind, said)}, answers
    assert re.match(rf"{what} is {theirs} on {others} and {own} on rank {size - 1}; it needs", said), said
    assert max(error for _, error in answers) < TOLERANCE, answers


@pytest.mark.parametrize(
    "name, bias, shapes",
    [
        ("gather", "none", ("q", "(2, 16, 4, 4)", "(3, 16, 4, 4)")),
        ("ulysses", "none", ("q", "(2, 16, 4, 4)", "(3, 16, 4, 4)")),
        ("sharded", "sharded", ("gathered", "(2, 4, 1, 16)", "(3, 4, 1, 16)")),
    ],
    ids=["gather", "ulysses", "sharded"],
)
def test_a_mistake_in_a_compiled_call_raises_on_all(name: str, bias: str, shapes: tuple[str, str, str]) -> None:
    case = P(strategy="ulysses" if name == "ulysses" else "gather", num_heads_k=4, is_causal=True, bias=bias)
    answers = workers(2).run("distributed_calls.mistaken_when_compiled", case, {"batch": 3})
    what, *values = shapes
    message = differing(what, *(f"float64 {shape}" for shape in values), 1, 2)
    assert answers == [[("ValueError", message)] * 2] * 2


def test_a_group_without_a_cpu_backend_compares_on_the_host_and_keeps_nothing() -> None:
    assert workers(2).run("distributed_calls.compared_on_a_device_group") == [(["ValueError"] * 2, 2, 0)] * 2


COMPILED = {
    **{f"parts, {name}": IN_PARTS[name] for name in ("plain", "sharded")},
    "mesh": OVER(is_causal=True, bias="full", dlse=True),
    "gather": P(is_causal=True, bias="full", mask="full", groups=2, dlse=True),
    "relative": P(relative=DISTANCES["relative"], is_causal=True, reduce=True, dlse=True),
    "lists": L(relative=ENTRIES["B", "Hk", "Lq"], is_causal=True, dlse=True),
    "documents": IN_ONE(batch=2, prepared=True, is_causal=True, bias="head"),
    "summed": P(bias="head", reduce=True, mask="prepared", sink="normal", dlse=True),
    "sharded": P(bias="sharded", mask="sharded", window_size=(5, 2)),
    "ulysses": P(strategy="ulysses", num_heads=4, num_heads_k=2, bias="keys", is_causal=True, dlse=True),
    "dropout": DROPPED(is_causal=True, dlse=True),
    "dropout, ulysses": U(dropout_p=0.3, num_heads_k=4),
    "dropout, rows inside of a block": P(dropout_p=0.3, mask="full", bias="full", is_causal=True),
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
    assert {
        "gather_forward",
        "gather_backward",
        "move_keys",
        "sum_over_ranks",
        "trade_heads",
        "share_dropout_key",
    } <= checked


@pytest.mark.parametrize("causal", [False, True])
def test_ranks_together_have_the_flop_of_one_call(causal: bool) -> None:
    counts = workers(2).run(
        "distributed_calls.counted_flop", P(is_causal=causal, head_dim=8, head_dim_v=4, seqlen_k=48, bias="full")
    )
    pairs = 2 * 4 * (sum(48 - 32 + i + 1 for i in range(32)) if causal else 32 * 48)
    assert counts[0] == counts[1] and sum(counts) == pairs * 2 * ((8 + 4) + (8 + 4 + 4 + 8 + 8))


def test_padding_has_no_flop() -> None:
    case = P(head_dim=8, head_dim_v=4, lengths=((10, 32), (7, 20)))
    pairs = 4 * (10 * 7 + 32 * 20)
    counts = workers(2).run("distributed_calls.counted_flop", case)
    assert sum(counts) == pairs * 2 * ((8 + 4) + (8 + 4 + 4 + 8 + 8))


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_triton_drops_for_ranks_what_eager_drops_in_one_process() -> None:
    assert "3 of 3 passed" in torchrun(2, "tests/interpreted_distributed.py")


def test_the_program_of_gpu_tests_runs_on_a_cpu() -> None:
    printed = torchrun(2, "tests/gpu_distributed.py", "--random", "2", "--match", "o")
    assert "passed   eager   top-k mask, bias of keys: eager" in printed and "random 1" in printed
    assert printed.splitlines()[-1] == "| mistakes of one rank | 1 | 0 | 0 |"
    assert printed.splitlines()[-2].endswith("| 0 | 0 |")
