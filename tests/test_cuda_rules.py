"""The rules of the cuda backend on calls that are described for a Hopper GPU: what it says, and who serves the rest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_forms import schedule_of
from hypothesis import given
from hypothesis import strategies as st
from out_of_tree import replaced

import flash_dmattn
from flash_dmattn.backends.cuda import passes
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.backend import BACKEND as cuda
from flash_dmattn.backends.cuda.operands import Kernels
from flash_dmattn.backends.protocol import Availability, Rule
from flash_dmattn.biases import ByDistance
from flash_dmattn.dispatch import config
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import MaskView, SequenceSpec
from flash_dmattn.problem.inputs import Inputs

Q = (2, 4096, 16, 64)
PER_SCORE = (2, 16, 4096, 4096)
GRADIENTS = {"grad": True}
DBIAS = {"bias": PER_SCORE, "bias_grad": True}


@pytest.fixture(autouse=True)
def on_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every instance is built, cuda and triton work, and nobody has chosen a backend."""
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    for name, value in (("default_backend", "auto"), ("disabled", ()), ("fallback", "warn")):
        monkeypatch.setattr(config.process, name, value)
    works = lambda: Availability(True)
    with replaced("cuda", probe=works), replaced("triton", probe=works):
        yield


def explained(**changes: Any) -> flash_dmattn.explanation.Explanation:
    """A bf16 call on sm_90 without mask, bias and gradients, but for the changes, also of strides.

    `lists`: how many queries share a list, and the keys of an entry.
    """
    bias_strides, k_strides, lists = (changes.pop(name, None) for name in ("bias_strides", "k_strides", "lists"))
    explanation = explain_problem(**{"q": Q, "device": "sm_90", **changes})
    if bias_strides is k_strides is lists is None:
        return explanation
    problem = explanation.problem
    if lists is not None:
        flags = problem.flags._replace(block_q=lists[0], block_k=lists[1], list_size=4)
        problem = problem._replace(mask_form="lists", flags=flags)
    if bias_strides is not None:
        problem = problem._replace(bias=problem.bias._replace(strides=bias_strides))
    if k_strides is not None:
        problem = problem._replace(k_strides=k_strides)
    return flash_dmattn.explanation.explain_description(problem, changes.get("backend", "auto"))


# Eight packed sequences of up to 2048 tokens.
PACKED = {"q": (1, 8192, 16, 64), "sequences": SequenceSpec("packed", 8, 8192, 8192, 2048, 2048)}
SHORT_PACKED = {"q": (1, 8192, 16, 64), "sequences": SequenceSpec("packed", 128, 8192, 8192, 64, 64)}

RELATIVE = {"bias": (16, 257), "by_distance": ByDistance(128, "clamp", False)}

# More calls than the examples of the rules.
NEVER_TAKEN = (
    ("head_dim", {"q": (2, 4096, 16, 128), "head_dim_v": 132}),
    ("arch", {"device": "sm_80", **GRADIENTS, "bias": (1, 16, 1, 4096), "bias_grad": True}),
)
# Its forward pass serves these, its backward pass does not, for this reason.
NEVER_DIFFERENTIATED = (
    ("tile_bias_rows", {"bias": PER_SCORE, "bias_strides": (2**28, 2**24, 1, 2**12), **GRADIENTS}),
    # Its gradient has the shape of what was expanded.
    ("expanded_dbias", {**DBIAS, "bias_strides": (2**16, 2**12, 0, 1)}),
    ("expanded_dbias", {**DBIAS, "bias_strides": (2**16, 2**12, 1, 0)}),
    ("expanded_dbias", {"bias": (1, 16, 4096, 4096), "bias_strides": (2**16, 2**12, 1, 0), "bias_grad": True}),
    (
        "dbias_rows",
        {"bias": (1, 1, 4096, 4095), "bias_strides": (2**24, 2**24, 2**12, 1), "seqlen_k": 4095, "bias_grad": True},
    ),
    # A bias is copied if it is small compared with q, k, v and out, and shared; or if it has a value for each score and
    # short rows.
    ("dbias_rows", {"q": (64, 129, 16, 64), "bias": (64, 16, 129, 129), "bias_grad": True, "softcap": 5.0}),
    ("tile_bias_rows", {"q": (8, 1025, 16, 64), "bias": (8, 16, 1025, 1025), **GRADIENTS}),
    ("tile_bias_rows", {"bias": (1, 16, 4096, 4095), "seqlen_k": 4095, **GRADIENTS}),
    ("tile_bias_rows", {"q": (1, 905, 16, 64), "bias": (1, 1, 905, 905), **GRADIENTS}),
    ("tile_bias_rows", {"q": (64, 577, 16, 64), "bias": (64, 1, 577, 577), **GRADIENTS}),
    ("tile_bias_rows", {"q": (8, 577, 16, 64), "bias": (1, 16, 577, 577), **GRADIENTS}),
    (
        "dbias_rows",
        {"q": (64, 196, 12, 64), "bias": (64, 1, 196, 196), "bias_strides": (39200, 39200, 200, 1), "bias_grad": True},
    ),
    (
        "dbias_rows",
        {"q": (64, 577, 16, 64), "bias": (64, 1, 577, 577), "bias_strides": (0, 0, 584, 1), "bias_grad": True},
    ),
)
DIFFERENTIATED = (
    GRADIENTS,
    {**RELATIVE, **GRADIENTS, "kv_heads": 4, "mask": (1, 1, 4096, 4096), "sink": True, "deterministic": True},
    {**PACKED, **GRADIENTS, "is_causal": True, "kv_heads": 4},
    {**PACKED, **GRADIENTS, "bias": (16, 8192, 2048), "bias_grad": True},
    {**PACKED, **GRADIENTS, "bias": (1, 1, 2048, 2048), "bias_grad": True, "sink": True},
    {**PACKED, **GRADIENTS, "bias": (16, 1, 8192), "bias_dtype": "fp32", "bias_grad": True},
    {**SHORT_PACKED, **GRADIENTS, "window_size": (8, 0)},
    DBIAS,
    {"q": (256, 129, 32, 24), "bias": (256, 32, 129, 129), "bias_grad": True},
    {"q": (2, 4096, 16, 192), "head_dim_v": 128, **GRADIENTS},
    {"q": (2, 4096, 16, 256), "bias": (1, 16, 4096, 4096), "bias_grad": True, **GRADIENTS},
    {**DBIAS, **GRADIENTS, "softmax_scale": -0.3, "is_causal": True},
    {**DBIAS, "bias_strides": (0, 0, 2**12, 1)},
    {**DBIAS, "deterministic": True},
    {"q": (2048, 49, 6, 32), "bias": (1, 6, 49, 49), "bias_grad": True, **GRADIENTS},
    {"q": (128, 197, 12, 64), "bias": (1, 12, 197, 197), "bias_grad": True, "mask": (128, 1, 1, 197), **GRADIENTS},
    {"q": (10, 577, 16, 64), "bias": (1, 16, 577, 577), "bias_grad": True, "is_causal": True, "deterministic": True},
    {"q": (10, 577, 16, 64), "bias": (10, 16, 577, 577), "bias_strides": (0, 1, 16 * 577, 16), **GRADIENTS},
    {"bias": (1, 16, 4096, 4096), "bias_grad": True},
    {"bias": (2, 1, 4096, 4096), "bias_grad": True, "is_causal": True, "deterministic": True},
    {"bias": (2, 1, 4096, 4096), "bias_strides": (0, 0, 2**12, 1), "bias_grad": True, **GRADIENTS},
    {"bias": (1, 1, 4096, 4096), "bias_grad": True, **GRADIENTS, "mask": (2, 16, 4096, 4096)},
    {"kv_heads": 4, "bias": (2, 4, 4096, 4096), "bias_grad": True, **GRADIENTS},
    {**GRADIENTS, "kv_heads": 4, "deterministic": True},
    {"bias": (1, 1, 4096, 4096), **GRADIENTS, "kv_heads": 2},
    {"bias": (2, 16, 4096, 4095), "bias_strides": (2**28, 2**24, 2**12, 1), "seqlen_k": 4095, **GRADIENTS},
    {"bias": PER_SCORE, "bias_dtype": "fp32", "bias_strides": (2**12, 1, 0, 2**13), **GRADIENTS},
    {**DBIAS, "bias_dtype": "fp32", **GRADIENTS, "is_causal": True},
    {"q": (8, 512, 16, 48), "bias": (1, 16, 512, 512), "bias_dtype": "fp32", "bias_grad": True, "deterministic": True},
    {"bias": PER_SCORE, "bias_dtype": "fp32", "bias_strides": (2**28, 2**24, 2**12 + 4, 1), **GRADIENTS},
    {"q": (256, 129, 32, 24), "bias": (256, 32, 129, 129), "bias_dtype": "fp32", "bias_grad": True},
    {"q": (128, 197, 12, 64), "bias": (1, 12, 197, 197), "bias_dtype": "fp32", "bias_grad": True, **GRADIENTS},
    {"bias": (2, 4, 1, 4095), "bias_dtype": "fp32", "bias_grad": True, "kv_heads": 4, "seqlen_k": 4095, **GRADIENTS},
    {"bias": (1, 16, 4096, 1), "bias_dtype": "fp16", "bias_grad": True},
    {"q": (2, 4096, 16, 8), "head_dim_v": 128, "mask": (1, 1, 4096, 4096), "mask_prepared": True, **GRADIENTS},
    {"q": (0, 64, 16, 64), "seqlen_k": 0, **GRADIENTS},
    {"q": (2, 1, 16, 64), "seqlen_k": 33, **GRADIENTS},
    {"deterministic": True, "kv_heads": 4, "bias": (2, 4, 1, 4096), "bias_grad": True},
    {"softcap": 1.0, "bias": (1, 16, 1, 4096), "bias_grad": True},
    {"softcap": 30.0, **DBIAS, **GRADIENTS, "is_causal": True},
    {"softcap": 30.0, "bias": (1, 1, 4096, 4096), "bias_grad": True, "mask": (2, 16, 4096, 4096), **GRADIENTS},
    {"softcap": 50.0, "q": (2, 4096, 16, 256), "kv_heads": 8, "window_size": (4096, 0), **GRADIENTS},
    {"softcap": 1.0, "q": (2, 4096, 16, 192), "head_dim_v": 128, "bias": (1, 16, 1, 4096), "bias_grad": True},
    {"softcap": 30.0, "q": (2, 4096, 16, 256), **DBIAS, **GRADIENTS, "is_causal": True, "deterministic": True},
    {"softcap": 30.0, "q": (2, 4096, 16, 192), "bias": (1, 1, 4096, 4096), "bias_grad": True, **GRADIENTS},
)
TAKEN = (
    {},
    {**PACKED, "softcap": 30.0, "deterministic": True, "window_size": (8, 0)},
    {"dtype": "fp16", "bias": (2, 16, 4096, 4096), "bias_dtype": "fp32"},
    {"bias": (1, 1, 1, 4096), "bias_dtype": "fp16"},
    {"bias": (2, 16, 4096, 1), "softcap": 30.0},
    {**RELATIVE, "kv_heads": 4, "softcap": 30.0, "mask": (1, 1, 4096, 4096), "sink": True},
    {**RELATIVE, "bias": (2, 1, 257), "bias_dtype": "fp32", "q": (2, 1, 16, 120), "window_size": (9, 0)},
    {"mask": (1, 1, 4096, 4096), "mask_prepared": True, "is_causal": True},
    {"mask": (2, 16, 4096, 1)},
    {"q": (2, 4096, 16, 192), "head_dim_v": 128, "kv_heads": 4, "window_size": (100, 0)},
    {"q": (2, 4096, 16, 8), "head_dim_v": 256, "softmax_scale": -1.0},
    {"q": (0, 64, 16, 64), "seqlen_k": 0, "return_lse": True, "deterministic": True},
)


@pytest.mark.parametrize(("code", "call"), NEVER_TAKEN)
def test_what_it_does_not_take(code: str, call: dict[str, Any]) -> None:
    assert [reason.code for reason in explained(**call).verdicts[0].reasons] == [code]


@pytest.mark.parametrize("call", TAKEN, ids=str)
def test_what_it_takes(call: dict[str, Any]) -> None:
    explanation = explained(**call, backend="cuda")
    assert explanation.verdicts[0].accepts
    assert (explanation.forward, explanation.backward) == ("cuda", None)
    pair = explained(**call, grad=True, bias_grad="bias" in call, backend=("cuda", "triton"))
    assert (pair.forward, pair.backward) == ("cuda", "triton")


@pytest.mark.parametrize(("code", "call"), NEVER_DIFFERENTIATED, ids=str)
def test_what_it_does_not_differentiate(code: str, call: dict[str, Any]) -> None:
    """Triton does then: by itself under auto, and in the pair that the error of a call by name speaks of."""
    for backend in ("auto", ("cuda", "triton")):
        explanation = explained(**call, backend=backend)
        assert (explanation.forward, explanation.backward, explanation.error) == ("cuda", "triton", None)
    (reason,) = explained(**call).verdicts[0].reasons
    assert reason.code == code
    refused = explained(**call, backend="cuda").error
    assert refused is not None and refused.startswith("backend 'cuda' does not support this call: ")
    assert 'backend=("cuda", "triton") runs its forward pass and the backward pass of the other' in refused


@pytest.mark.parametrize("call", DIFFERENTIATED, ids=str)
def test_what_it_differentiates(call: dict[str, Any]) -> None:
    explanation = explained(**call, backend="cuda")
    assert (explanation.forward, explanation.backward, explanation.error) == ("cuda", "cuda", None)


FLOATS = {"bias": PER_SCORE, "bias_dtype": "fp32", **GRADIENTS}


@pytest.mark.parametrize(
    ("code", "call"),
    (
        ("tile_bias_dtype", {**FLOATS, "bias_dtype": "fp16"}),
        ("tile_bias_dtype", {**FLOATS, "softcap": 30.0}),
        ("tile_bias_dtype", {**FLOATS, "q": (2, 4096, 16, 72)}),
        ("tile_bias_rows", {**FLOATS, "bias_strides": (2**28, 2**24, 2**12 + 2, 1)}),
    ),
    ids=str,
)
def test_a_bias_of_another_dtype_that_it_does_not_differentiate(code: str, call: dict[str, Any]) -> None:
    pair = explained(**call, backend=("cuda", "triton"))
    assert (pair.forward, pair.backward, pair.error) == ("cuda", "triton", None)
    reasons = explained(**call, backend="cuda").verdicts[0].reasons
    assert [reason.code for reason in reasons if reason.code != "bias_copies"] == [code]


def test_auto_takes_a_bias_in_fp32_whose_tiles_it_reads() -> None:
    call = {"q": (8, 512, 16, 48), "bias": (1, 16, 512, 512), "bias_dtype": "fp32", "bias_grad": True, **GRADIENTS}
    others = ({**call, "q": (8, 512, 16, 128)}, {**call, "bias_strides": (2**22, 2**18, 514, 1)})
    assert [(explained(**each).forward, explained(**each).backward) for each in (call, *others)] == [
        ("cuda", "cuda"),
        *2 * [("triton", "triton")],
    ]


@pytest.mark.parametrize(
    ("backend", "shape", "keys"),
    (
        ("triton", (256, 64, 16, 16), 64),  # sequences, queries, heads and heads of keys; keys
        ("cuda", (205, 80, 16, 16), 80),
        ("triton", (512, 32, 32, 8), 32),
        ("triton", (8, 16, 32, 8), 1024),
        ("cuda", (8, 17, 32, 8), 1024),
        ("triton", (8, 17, 32, 8), 1000),
        ("triton", (8, 64, 16, 16), 8192),
        ("triton", (8, 1, 64, 1), 8192),
        ("cuda", (8, 2, 64, 1), 8192),
    ),
    ids=str,
)
@pytest.mark.parametrize("layout", ("packed", "paged"))
def test_sequences_of_few_queries(layout: Any, backend: str, shape: tuple[int, ...], keys: int) -> None:
    """auto takes cuda from 65 queries on, and over long keys from 65 rows of all heads of a group on."""
    number, queries, heads, heads_k = shape
    packs = layout == "packed"
    sizes = (number * queries, number * keys) if packs else (queries, keys)
    spec = SequenceSpec(layout, number, *sizes, queries, keys, page_size=0 if packs else 128)
    call = {
        "q": (1 if packs else number, sizes[0], heads, 128),
        "kv_heads": heads_k,
        "sequences": spec,
        "seqlen_k": keys,
    }
    e = explained(**call, is_causal=True)
    assert e.forward == backend
    if packs:
        with_gradients = explained(**call, is_causal=True, **GRADIENTS)
        assert with_gradients.forward == with_gradients.backward == ("cuda" if queries > 64 else "triton")


def test_auto_takes_triangle_attention_of_several_examples() -> None:
    """Each example is a part, with a bias of its own; one that all examples share has its gradient by triton."""
    triangle: dict[str, Any] = {"q": (2, 256, 256, 4, 32), "mask": (2, 256, 1, 1, 256), "grad": True}
    e = explain_problem(**triangle, bias=(2, 1, 4, 256, 256), bias_grad=True)
    assert (e.forward, e.backward) == ("cuda", "cuda")
    verdict = next(v for v in e.verdicts if v.backend == "cuda")
    assert "computes the batch in 2 parts, one after the other: a part of it shares bias" in verdict.notes
    e = explain_problem(**triangle, bias=(1, 256, 4, 256, 256), bias_grad=True)
    assert e.backward == "triton"
    verdict = next(v for v in e.verdicts if v.backend == "cuda")
    assert [reason.code for reason in verdict.reasons] == ["shared_bias"]


@pytest.mark.parametrize("call", (GRADIENTS, DBIAS, {"mask": (1, 1, 4096, 4096), **GRADIENTS}), ids=str)
def test_its_backward_pass_completes_the_forward_pass_of_another(call: dict[str, Any]) -> None:
    for other in ("triton", "eager"):
        explanation = explained(**call, backend=(other, "cuda"))
        assert (explanation.forward, explanation.backward) == (other, "cuda")


def test_without_triton_gradients_are_those_of_torch() -> None:
    with flash_dmattn.config(disabled="triton"):
        explanation = explained(**GRADIENTS, seqlen_k=32)
    assert (explanation.forward, explanation.backward) == ("cuda", "sdpa")


@pytest.mark.parametrize("call", ({"dtype": "fp32"}, {"q": (2, 4096, 16, 100)}), ids=str)
def test_triton_serves_what_it_refuses(call: dict[str, Any]) -> None:
    explanation = explained(**call, **GRADIENTS)
    assert (explanation.forward, explanation.backward) == ("triton", "triton")


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule.code) for rule in cuda.auto_rules])
def test_what_auto_leaves_to_triton(rule: Rule) -> None:
    explanation = explained(**rule.example, **GRADIENTS)
    forward = "triton" if "forward" in rule.passes else "cuda"
    assert (explanation.forward, explanation.backward) == (forward, "triton")
    # So few keys leave the backward pass to triton in any call.
    codes = [each.code for each in explanation.verdicts[0].preferences]
    assert codes == [rule.code, *["few_keys"] * (rule.code in ("short_mask", "narrow_heads"))]
    assert explained(**rule.example, backend="cuda").forward == "cuda"


def few_queries(sizes: tuple[int, int, int, int, int], queries: int, window: int | None) -> dict[str, Any]:
    """A causal call of (batch, heads, key heads, keys, head dim); a window holds so many keys."""
    batch, heads, heads_k, keys, dim = sizes
    band = {"is_causal": True, "window_size": (-1 if window is None else window - 1, -1)}
    return {"q": (batch, queries, heads, dim), "kv_heads": heads_k, "seqlen_k": keys, **band}


SEVERAL = few_queries((8, 32, 8, 8192, 128), 4, None)
WINDOWED = few_queries((8, 32, 8, 8192, 128), 1, 1024)


@pytest.mark.parametrize("call", (SEVERAL, WINDOWED), ids=("several", "windowed"))
@pytest.mark.parametrize(
    ("change", "chosen"),
    (
        ({}, "cuda"),
        ({"is_causal": False}, "cuda"),
        ({"dtype": "fp16", "return_lse": True}, "cuda"),
        ({"q_dim": 96}, "cuda"),
        ({"q_dim": 136}, "triton"),
        ({"kv_heads": 16}, "triton"),
        ({"kv_heads": 32}, "triton"),
        ({"seqlen_k": 1023}, "triton"),
        ({"softcap": 30.0}, "triton"),
        ({"sink": True}, "triton"),
        ({"mask": (8, 1, 1, 8192)}, "triton"),
        ({"bias": (8, 8, 1, 8192)}, "triton"),
        (GRADIENTS, "triton"),
        ({"k_strides": (8192 * 1028, 1028, 128, 1)}, "triton"),  # copied: rows of 2056 bytes
        ({"queries": 0}, "triton"),
        ({"queries": 65}, "triton"),
    ),
    ids=str,
)
def test_few_queries_go_to_cuda_for_no_more_than_was_timed(
    call: dict[str, Any], change: dict[str, Any], chosen: str
) -> None:
    change = dict(change)
    batch, queries, heads, dim = call["q"]
    call = {**call, "q": (batch, change.pop("queries", queries), heads, change.pop("q_dim", dim)), **change}
    assert explained(**call).forward == chosen


ORDERED = {**DBIAS, **GRADIENTS, "deterministic": True}
ODD = {**ORDERED, "q": (64, 300, 16, 64), "seqlen_k": 384, "bias": (64, 16, 300, 384)}
FEW_TILES = {"q": (1, 256, 8, 64), "seqlen_k": 4096, "bias": (1, 8, 256, 4096)}
HALF_TILE = {"q": (8, 64, 16, 64), "seqlen_k": 4096}
GROUPED_SUMS = {"is_causal": True, "kv_heads": 4, **GRADIENTS}
Taken = tuple[dict[str, Any], str, str | None]
# A call, and the backends that auto takes for its two passes. Figures: docs/notes/cuda.md.
WHOM_AUTO_TAKES: dict[str, tuple[Taken, ...]] = {
    "large calls": (
        (GRADIENTS, "cuda", "cuda"),
        (DBIAS, "cuda", "cuda"),
        ({"mask": (1, 1, 4096, 4096), **GRADIENTS}, "cuda", "cuda"),
        ({"bias": (1, 16, 4096, 4096), "bias_grad": True, "is_causal": True, **GRADIENTS}, "cuda", "cuda"),
        ({"q": (2, 4096, 16, 128), **DBIAS, "is_causal": True, **GRADIENTS}, "cuda", "cuda"),
        ({"q": (2, 4096, 16, 256), **DBIAS, **GRADIENTS, "is_causal": True}, "cuda", "cuda"),
        ({"softcap": 30.0, **DBIAS, **GRADIENTS, "deterministic": True}, "cuda", "cuda"),
        ({"q": (2, 4096, 16, 256), "softcap": 30.0, **ORDERED}, "cuda", "cuda"),
    ),
    "half a tile of queries": (
        (HALF_TILE, "triton", None),
        ({**HALF_TILE, "q": (32, 64, 16, 64), **GRADIENTS}, "cuda", "cuda"),
        ({**HALF_TILE, "bias": (8, 16, 64, 4096)}, "cuda", None),
        ({**HALF_TILE, "bias": (8, 16, 64, 4096), "bias_grad": True, **GRADIENTS}, "cuda", "cuda"),
        ({**HALF_TILE, "mask": (8, 1, 1, 4096)}, "cuda", None),
        ({**HALF_TILE, "q": (8, 63, 16, 64), **GRADIENTS}, "triton", "triton"),
        ({**HALF_TILE, "seqlen_k": 128, **GRADIENTS}, "triton", "triton"),
    ),
    "short rows": (
        ({"q": (256, 256, 4, 32), "bias": (1, 4, 256, 256)}, "cuda", None),
        ({"q": (512, 128, 4, 32), "bias": (1, 4, 128, 128)}, "triton", None),
        ({"q": (256, 256, 4, 32), "bias": (1, 4, 256, 256), "bias_grad": True, **GRADIENTS}, "cuda", "cuda"),
        ({"q": (128, 200, 8, 32), "bias": (1, 8, 200, 200)}, "cuda", None),
        ({"q": (2048, 49, 6, 32), "bias": (1, 6, 49, 49), "bias_grad": True, **GRADIENTS}, "triton", "triton"),
        ({"q": (128, 128, 12, 64), "mask": (128, 1, 1, 128), **GRADIENTS}, "triton", "triton"),
        ({"q": (128, 128, 12, 64), "mask": (128, 1, 1, 128), "mask_prepared": True}, "cuda", None),
    ),
    # Blocks share the keys of few tiles: not with few keys, a mask, a window or wide heads.
    "few tiles": (
        (FEW_TILES, "cuda", None),
        ({**FEW_TILES, "seqlen_k": 4088, "bias": (1, 8, 256, 4088)}, "triton", None),
        ({**FEW_TILES, "window_size": (9, 0)}, "triton", None),
        ({**FEW_TILES, "q": (1, 256, 8, 256)}, "triton", None),
        ({"q": (1, 128, 4, 128), "seqlen_k": 8192}, "cuda", None),
        ({"q": (1, 128, 4, 128), "seqlen_k": 8192, "mask": (1, 1, 128, 8192)}, "triton", None),
        ({"q": (1, 128, 3, 128), "seqlen_k": 8192}, "triton", None),
        ({"q": (1, 128, 4, 64), "seqlen_k": 8192}, "triton", None),
    ),
    # Half as many long rows are work enough.
    "long rows": (
        ({"q": (1, 2048, 16, 64)}, "cuda", None),
        ({"q": (1, 2048, 15, 64)}, "triton", None),
        ({"q": (1, 2048, 16, 64), "seqlen_k": 2047}, "triton", None),
    ),
    # Several queries: from 2^24 numbers of keys in sight on, if heads of a group become rows.
    "several queries": (
        ({**SEVERAL, "q": (8, 4, 32, 64)}, "cuda", None),
        ({**SEVERAL, "window_size": (4096, 0)}, "cuda", None),
        ({**SEVERAL, "window_size": (1020, 0)}, "cuda", None),
        ({**SEVERAL, "window_size": (1019, 0)}, "triton", None),
        ({**SEVERAL, "window_size": (-1, 3), "is_causal": False}, "cuda", None),
        ({**SEVERAL, "seqlen_k": 1024}, "cuda", None),
        (few_queries((32, 32, 8, 2048, 128), 16, None), "cuda", None),
        (few_queries((4, 64, 8, 4096, 128), 8, None), "cuda", None),
        (few_queries((4, 32, 8, 8192, 32), 16, None), "cuda", None),
        (few_queries((8, 40, 8, 4096, 128), 16, None), "cuda", None),
        (few_queries((8, 40, 8, 4095, 128), 16, None), "triton", None),
        (few_queries((16, 32, 8, 16384, 128), 64, None), "cuda", None),
        (few_queries((16, 32, 8, 16384, 128), 65, None), "triton", None),
        (few_queries((16, 32, 16, 16384, 128), 8, None), "triton", None),
    ),
    # One query: what is in sight counts, not what a window could hold.
    "one query": (
        ({**WINDOWED, "window_size": (1022, -1)}, "triton", None),
        ({**WINDOWED, "window_size": (1022, 500), "is_causal": False}, "triton", None),
        ({**WINDOWED, "window_size": (4096, 0), "seqlen_k": 1000}, "triton", None),
        ({**WINDOWED, "window_size": (126, 0), "q": (64, 1, 32, 128)}, "triton", None),
        ({**WINDOWED, "window_size": (4095, 0), "q": (1, 1, 24, 128), "kv_heads": 4}, "triton", None),
        (few_queries((8, 32, 8, 8192, 128), 1, None), "triton", None),
        (few_queries((1, 32, 8, 8192, 128), 1, 4096), "cuda", None),
        (few_queries((1, 32, 8, 8192, 128), 1, 1024), "triton", None),
        (few_queries((64, 64, 8, 8192, 64), 1, 128), "cuda", None),
        (few_queries((8, 16, 16, 8192, 128), 1, 4096), "triton", None),
    ),
    # delta is taken from out in 16 bits, whose rounding few keys do not average out.
    "windows of few keys": (
        ({"window_size": (31, 0), **GRADIENTS}, "cuda", "triton"),
        ({"window_size": (32, 0), **GRADIENTS}, "cuda", "cuda"),
        ({"window_size": (16, 15), **GRADIENTS}, "cuda", "triton"),
        ({"window_size": (16, 16), **GRADIENTS}, "cuda", "cuda"),
        ({"window_size": (31, 9), "is_causal": True, **GRADIENTS}, "cuda", "triton"),
        ({"window_size": (3, -1), **GRADIENTS}, "cuda", "cuda"),
        ({"window_size": (-1, 3), **GRADIENTS}, "cuda", "cuda"),
    ),
    # The forward pass of cuda, and the backward pass of triton where it is faster: both read the same lse.
    "sums of few keys": (
        ({"q": (64, 256, 16, 128), **GRADIENTS}, "cuda", "triton"),
        ({"q": (64, 256, 16, 96), **GRADIENTS}, "cuda", "cuda"),
        ({"q": (32, 256, 16, 128), **GRADIENTS}, "cuda", "cuda"),  # 1024 tiles
        ({"q": (16, 4096, 16, 128), "seqlen_k": 256, **GRADIENTS}, "cuda", "cuda"),  # not timed
        ({"q": (64, 256, 16, 128), "softcap": 30.0, **GRADIENTS}, "cuda", "cuda"),
        ({"q": (64, 256, 16, 128), "window_size": (200, -1), **GRADIENTS}, "cuda", "cuda"),
        ({"q": (64, 256, 16, 128), "mask": (64, 1, 256, 256), **GRADIENTS}, "cuda", "cuda"),
        ({"q": (64, 256, 16, 128), "bias": (1, 16, 256, 256), **GRADIENTS}, "cuda", "cuda"),
        ({"q": (40, 384, 16, 128), **GRADIENTS}, "cuda", "cuda"),
        ({"q": (40, 384, 16, 128), **GROUPED_SUMS}, "cuda", "triton"),
        ({"q": (40, 640, 16, 128), **GROUPED_SUMS}, "cuda", "cuda"),
        ({"q": (16, 512, 16, 128), **DBIAS, "bias": (16, 16, 512, 512), **GRADIENTS}, "cuda", "triton"),
        ({"q": (16, 512, 16, 128), **DBIAS, "bias": (1, 16, 512, 512), **GRADIENTS}, "cuda", "cuda"),
        ({"q": (4, 4096, 16, 128), **DBIAS, "bias": (4, 16, 4096, 4096), **GRADIENTS}, "cuda", "cuda"),
    ),
    # At head dim 64 by pairs of tiles of keys, where there are enough of them, it is faster than triton.
    "a whole dbias in a fixed order": (
        (ORDERED, "cuda", "cuda"),
        ({**ORDERED, "q": (2, 4096, 16, 128)}, "cuda", "triton"),
        ({**ORDERED, "kv_heads": 8}, "cuda", "triton"),  # works are of key-value heads
        (ODD, "cuda", "triton"),  # the last block has one tile, and takes as long
        ({**ODD, "seqlen_k": 512, "bias": (64, 16, 300, 512)}, "cuda", "cuda"),
    ),
}


@pytest.mark.parametrize(
    ("call", "forward", "backward"),
    [pytest.param(*one, id=f"{subject}: {one[0]}") for subject, calls in WHOM_AUTO_TAKES.items() for one in calls],
)
def test_whom_auto_takes(call: dict[str, Any], forward: str, backward: str | None) -> None:
    explanation = explained(**call)
    assert (explanation.forward, explanation.backward) == (forward, backward)


def test_triton_says_where_it_computes_out_once_more() -> None:
    def notes(**call: Any) -> list[tuple[str, ...]]:
        return [verdict.notes for verdict in explained(**call).verdicts if verdict.backend == "triton"]

    ((note,),) = notes(window_size=(31, 0), **GRADIENTS)
    assert note == "for the gradients copies q, k, v to fp32 and computes out anew: few keys feel its rounding"
    assert (
        notes(window_size=(32, 0), **GRADIENTS) == notes(window_size=(31, 0)) == notes(seqlen_k=32, **GRADIENTS) == [()]
    )
    ((precision,),) = notes(window_size=(31, 0), dtype="fp32", **GRADIENTS)
    assert precision.startswith("multiplies in float32 by three products")


@pytest.mark.parametrize("is_disabled", (False, True), ids=("triton does not work", "triton is disabled"))
def test_what_is_left_to_triton_is_cudas_without_it(is_disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before eager, in either pass: a preference says who is faster, not who is right."""
    with ExitStack() as changes:
        if is_disabled:
            monkeypatch.setattr(config.process, "disabled", ("triton", "flex"))
        else:
            for name in ("triton", "flex"):
                changes.enter_context(replaced(name, probe=lambda: Availability(False, "no Triton")))
            monkeypatch.setattr("flash_dmattn.explanation.gpu_names", lambda arch: ["a GPU of this machine"])
        for rule in cuda.auto_rules:
            actual = explained(**rule.example, **GRADIENTS)
            refused = cuda.broken_rules(actual.problem, ("backward",))
            assert (actual.forward, actual.backward) == ("cuda", "eager" if refused else "cuda"), rule
            assert ("auto uses it only because no other backend accepts this call: " in str(actual)) is not bool(
                refused
            )
        assert explained(device="sm_80").forward == "sdpa"


def test_a_build_of_some_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger instance serves lesser head dims; what none serves goes to triton, and the built ones are named."""
    instances = frozenset({"forward_d128_bf16", "forward_d192_128_bf16"})
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: instances)
    for dim, chosen in ((64, "cuda"), (128, "cuda"), (256, "triton")):
        assert explained(q=(2, 4096, 16, dim)).forward == chosen
    assert explained(q=(2, 4096, 16, 192), head_dim_v=128).forward == "cuda"
    (reason,) = explained(q=(2, 4096, 16, 192)).verdicts[0].reasons
    assert reason.text.endswith("up to 128 and 128 or 192 and 128")
    (reason,) = explained(dtype="fp16").verdicts[0].reasons
    assert reason.code == "head_dim" and "float16" in reason.text
    assert [reason.code for reason in explained(dtype="fp32").verdicts[0].reasons] == ["dtype"]
    assert explained(**GRADIENTS, backend="cuda").backward == "cuda"
    assert explained(**GRADIENTS, softcap=1.0).backward == "cuda"
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: frozenset({"forward_d128_fp16"}))
    (reason,) = explained(**GRADIENTS).verdicts[0].reasons
    assert reason.text.endswith("this build has no kernels of bfloat16")


@pytest.mark.parametrize(
    ("strides", "copied"),
    (
        ((4096 * 1024, 1024, 64, 1), False),
        ((4096 * 1028, 1028, 64, 1), True),  # rows of 2056 bytes
        ((4096 * 1024, 1024, 1, 16), True),
        ((0, 1024, 64, 1), True),  # expanded over the batch
    ),
)
def test_notes_name_the_tensors_that_are_copied(strides: tuple[int, ...], copied: bool) -> None:
    notes = cuda.notes(explained().problem._replace(k_strides=strides))
    assert [note.partition(",")[0] for note in notes] == ["copies k"] * copied


@pytest.mark.parametrize(
    ("bias", "strides", "said"),
    (
        ((1, 6, 49, 49), None, "copies bias, of strides (14406, 2401, 49, 1), into rows of 56 keys, 33 KB: TMA reads "),
        ((1, 1, 49, 49), None, "copies bias, of strides (2401, 2401, 49, 1), into rows of 56 keys, 6 KB: TMA reads "),
        ((1, 6, 49, 49), (6 * 49 * 56, 49 * 56, 56, 1), None),
        ((1, 6, 1, 49), None, None),
        (
            (2048, 6, 49, 49),
            None,
            "copies bias, of strides (14406, 2401, 49, 1), into rows of 56 keys, 65856 KB: TMA reads ",
        ),
    ),
)
def test_notes_tell_of_a_bias_that_is_copied(
    bias: tuple[int, ...], strides: tuple[int, ...] | None, said: str | None
) -> None:
    for gradients in ({}, GRADIENTS):
        notes = cuda.notes(explained(q=(2048, 49, 6, 32), bias=bias, bias_strides=strides, **gradients).problem)
        assert len(notes) == (said is not None) and all(note.startswith(said) for note in notes)


def test_two_key_tiles_are_certain_where_a_rule_counts_on_them() -> None:
    """`auto` does not know the number of SMs: where its rule counts on two tiles, every Hopper GPU has them."""
    counted_on = 0
    for batch, heads, seqlen_k in itertools.product((1, 2, 5, 8, 64), (1, 4, 12, 32), (128, 256, 1024, 4096, 65536)):
        sizes = {"q": (batch, 256, heads, 64), "seqlen_k": seqlen_k, "bias": (batch, heads, 256, seqlen_k)}
        problem = explained(**sizes, grad=True, bias_grad=True).problem
        if cuda_rules._has_two_key_tiles(problem):
            counted_on += 1
            assert all(schedule_of(problem, num_sms).has_two_key_tiles for num_sms in (78, 114, 132, 144)), problem
    assert counted_on > 10


def test_walks_behind_an_order_of_keys_are_cut() -> None:
    """Into parts of at most 32 tiles of queries, and at most eight of them; in a fixed order they stay whole.

    Work tiles have one query head each then: the kernel of the sums puts dk and dv in the order of keys.
    """
    for seqlen_q, parts in ((1, 1), (4096, 1), (4097, 2), (8192, 2), (8193, 3), (2**15, 8), (2**17, 8)):
        for kv_heads, seqlen_k in ((4, 300), (2, 300), (1, 10**5)):
            sizes = {"q": (2, seqlen_q, 4, 128), "kv_heads": kv_heads, "seqlen_k": seqlen_k}
            problem = explained(**sizes, mask=(1, 1, seqlen_q, seqlen_k), grad=True).problem
            for deterministic in (False, True):
                inputs = problem._replace(flags=problem.flags._replace(deterministic=deterministic))
                actual = schedule_of(inputs, has_key_order=True)
                works = 2 * 4 * -(-seqlen_k // 128)
                assert actual.num_work_tiles == (works if deterministic else works * parts), (inputs, actual)
                assert (actual.full_group_pairs, actual.summed_pairs) == (0, 2 * kv_heads)
                assert schedule_of(inputs).num_work_tiles <= works


# Batch, heads, length, and the rest of a call; how many pairs have work tiles of all heads of a group, on 132 SMs.
GROUPS = (
    ((64, 16, 256), {"kv_heads": 4, "is_causal": True}, "all"),  # 512 short walks
    ((64, 16, 256), {"kv_heads": 4}, "all"),
    ((2, 16, 4096), {"kv_heads": 4}, "all"),  # 256 tiles nearly fill two waves
    ((5, 16, 4096), {"kv_heads": 4}, "some"),  # 640 leave a seventh of the fifth wave, of 16384 queries, without work
    ((1, 16, 4096), {"kv_heads": 4, "is_causal": True}, "none"),  # SMs would wait for the longest
    ((1, 16, 4096), {"kv_heads": 4, "window_size": (255, 0)}, "all"),  # of as many tiles, but of short walks
    ((16, 16, 512), {"kv_heads": 1, "is_causal": True}, "none"),  # half of the SMs, with walks of 16 heads
    ((64, 16, 256), {"kv_heads": 1, "dim": 64}, "all"),  # of two tiles of keys, whose dq is complete
    ((5, 16, 512), {"kv_heads": 4, "bias": (5, 16, 512, 512)}, "all"),  # dbias is stored: memory is waited for
    ((5, 16, 512), {"kv_heads": 4, "bias": (1, 16, 512, 512)}, "none"),
    ((34, 16, 1024), {"kv_heads": 4, "mask": (34, 1, 1024, 1024)}, "all"),  # 8 tiles for each SM
    ((17, 16, 1024), {"kv_heads": 4, "mask": (17, 1, 1024, 1024)}, "some"),
    ((2, 16, 4096), {"kv_heads": 4, "mask": (2, 1, 4096, 4096)}, "none"),  # walks may differ
    ((32, 16, 256), {"kv_heads": 4, "mask": (32, 1, 256, 256)}, "all"),
    ((128, 16, 512), {"kv_heads": 16, "is_causal": True}, "all"),  # no groups, nothing to add
)


@pytest.mark.parametrize(("size", "call", "expected"), GROUPS)
def test_which_work_tiles_have_whole_groups(size: tuple[int, int, int], call: dict[str, Any], expected: str) -> None:
    """As measured: docs/notes/cuda_tried.md, "Head groups"."""
    batch, heads, length = size
    sizes = {**call, "bias_grad": True} if "bias" in call else dict(call)
    problem = explained(q=(batch, length, heads, sizes.pop("dim", 128)), seqlen_k=length, **sizes, grad=True).problem
    actual, pairs = schedule_of(problem), batch * call["kv_heads"]
    assert {pairs: "all", 0: "none"}.get(actual.full_group_pairs, "some") == expected, actual
    assert actual.summed_pairs == pairs - (0 if actual.blocks_decide else actual.full_group_pairs)


# Batch, heads, length, and the rest of a call; whether blocks decide which key blocks have whole groups, on 132 SMs.
DECISIONS = (
    ((1, 16, 8192), {"kv_heads": 4, "mask": (1, 1, 8192, 8192)}, True),
    ((1, 16, 8192), {"kv_heads": 4, "mask": (1, 4, 8192, 8192)}, True),
    ((1, 16, 8192), {"kv_heads": 4, "mask": (1, 16, 8192, 8192)}, False),  # heads of a group have their own
    ((1, 16, 8192), {"kv_heads": 16, "mask": (1, 1, 8192, 8192)}, False),  # no groups
    ((1, 16, 8192), {"kv_heads": 4, "is_causal": True}, False),  # no mask: the host knows the walks
    ((4, 32, 16384), {"kv_heads": 8, "mask": (1, 1, 16384, 16384)}, True),  # one walk may take as long as all others
    ((64, 16, 512), {"kv_heads": 4, "mask": (64, 1, 512, 512)}, False),  # none can: the longest is of 4 tiles
    ((1, 16, 512), {"kv_heads": 4, "mask": (1, 1, 512, 512)}, False),  # 16 tiles: any walk is too long for a group
)


@pytest.mark.parametrize(("size", "call", "decide"), DECISIONS)
def test_under_which_masks_blocks_decide(size: tuple[int, int, int], call: dict[str, Any], decide: bool) -> None:
    batch, heads, length = size
    problem = explained(q=(batch, length, heads, 128), seqlen_k=length, **call, grad=True).problem
    assert schedule_of(problem).blocks_decide == decide
    ordered = schedule_of(problem._replace(flags=problem.flags._replace(deterministic=True)))
    assert not ordered.blocks_decide  # additions in a fixed order


# Head dims of q and v, heads, length, and the rest of a call; keys of a work tile on 132 SMs.
TILES_OF_KEYS = (
    ((192, 128), (16, 1024), {}, 64),  # 128 work tiles of 128 keys: fewer than SMs
    ((192, 128), (16, 2048), {}, 128),
    ((192, 128), (16, 2048), {"kv_heads": 4, "window_size": (100, 0)}, 128),
    ((160, 40), (16, 2048), {"bias": (1, 16, 2048, 1)}, 128),  # by the same kernel; a bias that only shifts lse
    ((192, 128), (16, 2048), {"bias": (1, 16, 1, 2048)}, 64),
    ((192, 128), (16, 2048), {"mask": (1, 1, 2048, 2048)}, 64),
    ((192, 128), (16, 2048), {"softcap": 2.0}, 64),
    ((192, 192), (16, 2048), {}, 64),
    ((256, 128), (16, 2048), {}, 64),
)


@pytest.mark.parametrize(("head_dims", "size", "call", "keys"), TILES_OF_KEYS, ids=str)
def test_keys_of_a_work_tile_of_wide_heads(
    head_dims: tuple[int, int], size: tuple[int, int], call: dict[str, Any], keys: int
) -> None:
    heads, length = size
    q = (1, length, heads, head_dims[0])
    problem = explained(q=q, head_dim_v=head_dims[1], is_causal="mask" not in call, **call, grad=True).problem
    assert schedule_of(problem).block_n == keys


# Batch, heads, length; chunks of a bias that batch entries share, one for each head, and of one that heads share too.
CHUNKS = (
    ((256, 4, 256), 8, 33),  # 128 and 132 work tiles
    ((2048, 6, 49), 22, 132),
    ((128, 12, 197), 5, 33),
    ((32, 12, 512), 2, 8),  # 192 tiles alone are two waves, half of one idle
    ((64, 8, 1024), 1, 2),
    ((16, 16, 2048), 1, 1),
    ((3, 2, 200), 1, 1),
)


@pytest.mark.parametrize(("sizes", "head_chunks", "shared_chunks"), CHUNKS, ids=str)
def test_chunks_of_a_gradient_that_batch_entries_share(
    sizes: tuple[int, int, int], head_chunks: int, shared_chunks: int
) -> None:
    batch, heads, length = sizes
    for bias_heads, chunks in ((heads, head_chunks), (1, shared_chunks)):
        bias = (1, bias_heads, length, length)
        actual = schedule_of(explained(q=(batch, length, heads, 32), bias=bias, bias_grad=True, **GRADIENTS).problem)
        assert (actual.writer, actual.chunks) == ("shared_dbias", chunks)
        rows = bias_heads * length * (length + -length % 8)
        assert actual.slot_floats == (0 if chunks == 1 and length % 8 == 0 else rows)


@given(
    batch=st.integers(3, 4096),
    heads=st.sampled_from((1, 6, 16)),
    lengths=st.tuples(st.integers(2, 3000), st.integers(2, 3000)),
    num_sms=st.sampled_from((78, 114, 132)),
    is_causal=st.booleans(),
)
def test_chunks_have_room_and_work(
    batch: int, heads: int, lengths: tuple[int, int], num_sms: int, is_causal: bool
) -> None:
    seqlen_q, seqlen_k = lengths
    call = {"q": (batch, seqlen_q, heads, 64), "seqlen_k": seqlen_k, "bias": (1, 1, seqlen_q, seqlen_k)}
    actual = schedule_of(explained(**call, bias_grad=True, is_causal=is_causal).problem, num_sms)
    assert actual.chunks >= 1 and (actual.slot_floats > 0) == (actual.chunks > 1 or seqlen_k % 8 > 0)
    if actual.chunks > 1:
        assert actual.chunks * actual.slot_floats * 4 <= 2**26, "slots take more than 64 MiB"
        assert actual.chunks * 4 <= batch * heads, "a chunk has less than four heads"
        tiles = -(-seqlen_q // 128) * -(-seqlen_k // 128)
        assert tiles * actual.chunks <= 8 * num_sms


def draw_in_the_mode(rng: random.Random, dim: int) -> dict[str, Any]:
    """Draw a call of the class that cuda has: batch, heads, lengths, layout and gradients."""
    batch, heads_k, group = rng.randint(1, 64), rng.choice((1, 2, 8)), rng.choice((1, 3, 4))
    queries, keys = (rng.choice((1, 2, 32, 64, 256, rng.randint(1, 20_000))) for _ in "qk")
    layout = rng.choice(("dense", "packed", "padded", "paged"))
    call = {"kv_heads": heads_k, "is_causal": rng.random() < 0.5, "grad": layout != "paged" and rng.random() < 0.5}
    entries, rows = (1, batch * queries) if layout == "packed" else (batch, queries)
    page = {"page_size": rng.choice((16, 64, 256))} if layout == "paged" else {}
    if layout != "dense":
        all_keys = batch * keys if layout == "packed" else keys
        call["sequences"] = SequenceSpec(layout, batch, rows, all_keys, queries, keys, **page)  # type: ignore[arg-type]
        keys = page.get("page_size", all_keys)
    return {**call, "q": (entries, rows, heads_k * group, dim), "seqlen_k": keys}


@pytest.mark.parametrize("dim", (64, 128))
def test_in_the_invariant_mode_no_length_decides(dim: int) -> None:
    """The backend and all of the schedule that changes bits are the same, on GPUs of every size."""
    rng = random.Random(dim)
    with flash_dmattn.config(invariant=True):
        for _ in range(150):
            call = draw_in_the_mode(rng, dim)
            explanation = explained(**call)
            problem = explanation.problem
            assert (explanation.forward, explanation.backward) == ("cuda", "cuda" if call["grad"] else None), problem
            if call["grad"] and problem.sequences is None:
                schedule = schedule_of(problem, rng.randint(1, 148))
                assert (schedule.block_n, schedule.summed_pairs) == (128, 0) and not schedule.completes_dq, problem
                assert schedule.is_ordered


@pytest.mark.parametrize("window", ((-1, 0), (100, 0)))
def test_in_the_invariant_mode_keys_stay_where_they_are(window: tuple[int, int]) -> None:
    """One query of few heads: no keys are left out before its window, and no blocks of threads share the others."""
    calls: list[tuple[Any, ...]] = []
    kernels = Kernels(
        lambda *call: calls.append(call), lambda *call: None, lambda *call: [], lambda *call: torch.empty(0)
    )
    q, k = (torch.empty(1, rows, heads, 64, dtype=torch.bfloat16, device="meta") for rows, heads in ((1, 4), (5000, 2)))
    for is_invariant in (False, True):
        with flash_dmattn.config(invariant=is_invariant):
            problem = explained(q=tuple(q.shape), kv_heads=2, seqlen_k=5000, window_size=window).problem
        with mock.patch.object(passes, "kernels", lambda: kernels):
            passes.plan_forward(problem)(Inputs(q, k, k, MaskView(), None, None))
    keys, splits = [call[1].shape[1] for call in calls], [call[12] for call in calls]
    assert keys == [101 if window[0] > 0 else 5000, 5000] and splits == [0, 1]


OTHER_CLASSES: dict[str, dict[str, Any]] = {
    "a mask": {"mask": (2, 1, 4096, 4096)},
    "a bias": {"bias": (2, 16, 1, 4096)},
    "a softcap": {"softcap": 20.0},
    "a window of at most 32 keys": {"window_size": (31, 0)},
    "head dims whose kernels are not those of sequences": {"q": (2, 4096, 16, 96)},
    "odd head dims": {"q": (2, 4096, 16, 100)},
    "fp32": {"dtype": "fp32"},
    "another GPU": {"device": "sm_80"},
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_other_classes_of_the_invariant_mode_are_tritons(name: str) -> None:
    with flash_dmattn.config(invariant=True):
        explanation = explained(**OTHER_CLASSES[name], **GRADIENTS)
        assert (explanation.forward, explanation.backward) == ("triton", "triton")
        assert explained(**OTHER_CLASSES[name], backend="cuda").error is not None
        assert explained(window_size=(32, 0), **GRADIENTS).forward == "cuda"


def test_a_layout_that_cuda_refuses_leaves_its_class_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would run it with other bits than cuda has in other layouts. A caller may want triton for all of them."""
    pages = {"seqlen_k": 48, "sequences": SequenceSpec("paged", 8, 1, 4096, 1, 4096, page_size=48)}
    call = {"q": (8, 1, 16, 64), **pages}
    assert explained(**call).forward == "triton"
    with flash_dmattn.config(invariant=True):
        error = explained(**call).error
        assert error is not None and "cuda: pages have 48 keys" in error
        assert "triton: config(invariant=True) is in force, and calls of this class have the bits of cuda" in error
        assert explained(**call, backend="triton").forward == "triton"
        assert explained(**call, softcap=20.0).forward == "triton"
        with flash_dmattn.config(disabled="cuda"):
            assert explained(**call).forward == "triton"


def test_price_and_order_of_the_invariant_mode_are_explained() -> None:
    with flash_dmattn.config(invariant=True):
        text = str(explained(is_causal=True, **GRADIENTS))
    assert "backend='auto' runs cuda" in text and "is invariant: a row's bits depend on the row alone" in text
    assert "without it cuda forward, cuda backward would run" in text
