"""Interval masks in a call: what the dense mask gives, on every backend; who receives them, and what explain says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import needs_inductor, refusal_of
from flex_fixture import eager_flex
from mask_forms import DENSE, HK, HQ, LK, LQ, PREPARED, B, D, assert_same, both_registered, leaves, results
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flash_dmattn
from flash_dmattn import call, masks
from flash_dmattn.dispatch import config, selection
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.explanation import explain_description, explain_problem
from flash_dmattn.masks import PreparedMask, topk_mask
from flash_dmattn.masks.prepared.storage import IntervalMask


@pytest.fixture(autouse=True)
def untouched_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("default_backend", "auto"), ("disabled", ())):
        monkeypatch.setattr(config.process, name, value)
    monkeypatch.setattr(selection, "_warned", set())
    with both_registered():
        yield


def scores_of(*shape: int) -> Tensor:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    scores[..., ::9] = -torch.inf
    return scores


# With the mask that each stands for.
TOPK = scores_of(1, HK, 1, LK)
START = torch.arange(LK).expand(B, HQ, LK) % 97
MASKS: dict[str, tuple[IntervalMask, Tensor]] = {
    "top-k, a head each": (
        PreparedMask.from_topk(TOPK, 20, is_causal=True, seqlen_q=LQ, reorder=True),
        topk_mask(TOPK, 20, is_causal=True, seqlen_q=LQ),
    ),
    "top-k without causality": (
        PreparedMask.from_topk(TOPK, 20, seqlen_q=LQ),
        topk_mask(TOPK, 20, seqlen_q=LQ).expand(-1, -1, LQ, -1),
    ),
    "intervals of a batch": (
        PreparedMask.from_intervals(START, START + 40, LQ),
        (torch.arange(LQ)[:, None] >= START[..., None, :]) & (torch.arange(LQ)[:, None] < START[..., None, :] + 40),
    ),
    "a window": (
        PreparedMask.from_intervals([0], torch.full((LK,), LQ), LQ, window_size=(30, 2)),
        masks.sliding_window_mask(LQ, LK, (30, 2)),
    ),
    "none allowed": (PreparedMask.from_intervals([0] * LK, [0], LQ), torch.zeros(1, 1, LQ, LK, dtype=torch.bool)),
}
NAMES = ("eager", "reference", "flex", PREPARED.backend.name, DENSE.backend.name, (PREPARED.backend.name, "eager"))


@pytest.mark.parametrize("backend", NAMES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_interval_mask_gives_what_the_dense_mask_gives(kind: str, backend: Any) -> None:
    prepared, dense = MASKS[kind]
    if backend == "flex":
        arguments = leaves(torch.float32)
        with eager_flex():
            actual = results(arguments, prepared, backend=backend)
        assert_same(actual, results(arguments, dense, backend="reference"), rtol=1e-4, atol=1e-4)
        return
    expected = results(leaves(), dense, backend="reference")
    assert_same(results(leaves(), prepared, backend=backend), expected)
    band = {"is_causal": prepared.is_causal, "window_size": prepared.window_size}
    assert_same(results(leaves(), prepared, backend=backend, **band), expected)


def test_on_eager_bit_by_bit() -> None:
    prepared, dense = MASKS["top-k, a head each"]
    actual, expected = (results(leaves(), mask, backend="eager") for mask in (prepared, dense))
    assert_same(actual, expected)
    assert all(torch.equal(x, y) for x, y in zip(actual, results(leaves(), prepared, backend="eager"), strict=True))


@pytest.mark.parametrize("seqlen_q", [0, 1])
def test_decoding(seqlen_q: int) -> None:
    arguments = leaves(seqlen_q=seqlen_q)
    prepared = PreparedMask.from_topk(TOPK, 20, is_causal=True, seqlen_q=seqlen_q, reorder=True)
    dense = topk_mask(TOPK, 20, is_causal=True, seqlen_q=seqlen_q)
    expected = results(arguments, dense, backend="reference")
    for backend in ("eager", PREPARED.backend.name):
        assert_same(results(arguments, prepared, backend=backend), expected)


# The views that backends receive, and what explain says about them


@pytest.mark.parametrize(
    ("backend", "received"),
    [
        (PREPARED.backend.name, ["intervals", "intervals"]),
        (DENSE.backend.name, ["dense", "dense"]),
        ((PREPARED.backend.name, DENSE.backend.name), ["tiles", "dense"]),
    ],
)
def test_what_a_forward_and_its_backward_receive(backend: Any, received: list[str]) -> None:
    results(leaves(), MASKS["top-k, a head each"][0], backend=backend)
    assert PREPARED.received + DENSE.received == received


def test_a_forward_pass_alone_receives_the_intervals() -> None:
    q, k, v, bias = (x.detach() for x in leaves())
    flash_dmattn.attention(q, k, v, MASKS["a window"][0], bias, backend=PREPARED.backend.name)
    assert PREPARED.received == ["intervals"]


def test_explain_says_what_is_unpacked() -> None:
    q, k, v, bias = leaves()
    prepared = MASKS["top-k, a head each"][0]
    explanation = flash_dmattn.explain(q, k, v, prepared, bias)
    unpacked = prepared.unpacked()
    assert explanation.problem.mask_form == "intervals"
    assert explanation.problem.mask == (tuple(unpacked.shape), unpacked.stride(), torch.bool)
    assert f", prepared mask (1, {HK}, {LQ}, {LK}), bias " in str(explanation.problem)
    assert ", causal, " in str(explanation.problem)
    notes = {verdict.backend: verdict.notes for verdict in explanation.verdicts}
    unpacks = "unpacks the prepared mask to a dense bool tensor of 0.0 MB"
    assert notes["reference"] == notes[DENSE.backend.name] == (unpacks,)
    assert notes["eager"] == notes[PREPARED.backend.name] == ()


@pytest.mark.parametrize("bias", [None, (1, 4, 1, 16384), (1, 16, 16384, 16384)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "unpacked"), [(16384, "1024.0"), (1, "0.1")])
def test_explain_of_a_long_call_on_a_gpu(seqlen_q: int, unpacked: str, bias: tuple[int, ...] | None) -> None:
    """A call with an interval mask of key-value heads, as `explain` describes it."""
    if bias is not None:
        bias = (*bias[:2], min(bias[2], seqlen_q), bias[3])
    shape = {"mask": (1, 4, seqlen_q, 16384), "seqlen_k": 16384, "kv_heads": 4, "device": "sm_90", "bias": bias}
    problem = explain_problem((1, seqlen_q, 16, 64), mask_prepared=True, **shape).problem
    verdicts = explain_description(problem._replace(mask_form="intervals"), "auto").verdicts
    notes = {verdict.backend: verdict.notes[:1] for verdict in verdicts if not verdict.reasons}
    unpacks = f"unpacks the prepared mask to a dense bool tensor of {unpacked} MB"
    assert notes["reference"] == (unpacks,) and notes["eager"] == ()
    for backend in {"cuda", "triton"} & notes.keys():
        follows = bias is None or bias[2] == 1
        assert follows == notes[backend][0].startswith("in a mask's order of keys, if it has one, copies k and v")
        assert follows != notes[backend][0].startswith("takes keys in their own order: a bias of one value per query")


def test_the_fallback_unpacks_no_intervals() -> None:
    workspace_bytes = BACKENDS["eager"].workspace_bytes
    assert workspace_bytes is not None
    shape = {"mask": (1, 1, 4096, 4096), "dtype": "fp64", "device": "sm_80"}
    dense = explain_problem((1, 4096, 2, 64), **shape).problem
    assert workspace_bytes(dense._replace(mask_form="intervals")) == workspace_bytes(dense)


def test_alike_calls_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    describe = call.describe
    monkeypatch.setattr(
        call, "describe", lambda *arguments, **named: (calls.append(1), describe(*arguments, **named))[1]
    )
    q, k, v, bias = (x.detach() for x in leaves())
    for scores in (TOPK, -TOPK, TOPK + 1):
        prepared = PreparedMask.from_topk(scores, 20, is_causal=True, seqlen_q=LQ)
        actual = flash_dmattn.attention(q, k, v, prepared, bias)
        assert_same([actual], [flash_dmattn.attention(q, k, v, prepared.dense(), bias, backend="reference")])
    assert len(calls) == 2  # that with an interval mask, and the reference with a dense one
    flash_dmattn.attention(q, k, v, PreparedMask.from_topk(TOPK, 20, is_causal=True, seqlen_q=LQ, reorder=True), bias)
    assert len(calls) == 3


@pytest.mark.parametrize("function", [flash_dmattn.attention, flash_dmattn.explain])
@pytest.mark.parametrize(
    ("mask", "flags", "text"),
    [
        (
            PreparedMask.from_topk(TOPK, 3, is_causal=True),
            {},
            "mask was prepared for seqlen_q 150; it needs that of the call",
        ),
        (
            PreparedMask.from_topk(TOPK[..., 1:], 3, seqlen_q=LQ),
            {},
            "mask was prepared for seqlen_k 149; it needs that of the",
        ),
        (
            PreparedMask.from_topk(scores_of(1, 3, 1, LK), 3, seqlen_q=LQ),
            {},
            "mask has shape (1, 3, 140, 150), read as",
        ),
        (
            PreparedMask.from_topk(TOPK, 3, seqlen_q=LQ).to("meta"),
            {},
            "mask is on meta; it needs to be on the device of q, cpu",
        ),
        (
            PreparedMask.from_topk(TOPK, 3, seqlen_q=LQ),
            {"is_causal": True},
            "is_causal is True, but mask was prepared with",
        ),
        (
            MASKS["a window"][0],
            {"window_size": (30, 3)},
            "window_size is (30, 3), but mask was prepared with",
        ),
    ],
)
def test_mask_of_another_call_is_refused(function: Any, mask: IntervalMask, flags: dict[str, Any], text: str) -> None:
    q, k, v, bias = leaves()
    good = lambda: flash_dmattn.attention(q, k, v, MASKS["a window"][0], bias)
    assert text in str(refusal_of(lambda: function(q, k, v, mask, bias, **flags), good, ValueError))


# Transforms and torch.compile


def test_functional_gradient_vmap_and_second_derivative() -> None:
    prepared, dense = MASKS["top-k, a head each"]

    def loss(*tensors: Tensor, mask: Any = prepared, backend: str = "eager") -> Tensor:
        q, k, v, bias = tensors
        return flash_dmattn.attention(q, k, v, mask, bias, backend=backend).sin().sum()

    arguments = leaves()
    expected = torch.autograd.grad(loss(*arguments, mask=dense, backend="reference"), arguments, create_graph=True)
    actual = torch.autograd.grad(loss(*arguments), arguments, create_graph=True)
    assert_same([*actual], [*expected])
    second = (torch.autograd.grad(sum(g.sin().sum() for g in first), arguments) for first in (actual, expected))
    assert_same(*([*x] for x in second))
    plain = [x.detach() for x in arguments]
    assert_same(list(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*plain)), list(expected))
    of_bias = torch.func.vmap(lambda bias: loss(*plain[:3], bias))
    assert_same([of_bias(torch.stack([plain[3]] * 2))[1]], [loss(*plain, mask=dense, backend="reference")])


@pytest.mark.parametrize("backend", ["eager", PREPARED.backend.name])
@pytest.mark.parametrize("inside", [True, False])
def test_one_graph(inside: bool, backend: str) -> None:
    """The mask made in the graph from the bias, or outside of it."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Any = None) -> tuple[Tensor, Tensor]:
        if inside:
            mask = PreparedMask.from_topk(bias, 20, is_causal=True, seqlen_q=q.shape[1], local=3, reorder=True)
        return flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, backend=backend)

    torch._dynamo.reset()
    arguments = leaves()
    prepared = PreparedMask.from_topk(arguments[3], 20, is_causal=True, seqlen_q=LQ, local=3, reorder=True)
    expected = results(arguments, prepared.dense(), backend="reference")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        out, lse = compiled(*arguments, *(() if inside else (prepared,)))
        total = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()
        assert_same([out, lse, *torch.autograd.grad(total, arguments)], expected)


def test_a_graph_of_any_length() -> None:
    """Whether an order pays is decided by sizes, which are symbols here."""
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        mask = PreparedMask.from_topk(bias, 20, is_causal=True, mask=bias > -1)
        return flash_dmattn.attention(q, k, v, mask, bias)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (130, 200, 33):
        q, k, v = torch.randn(3, 2, length, 4, 16).unbind()
        arguments = q, k, v, torch.randn(2, 4, 1, length)
        assert_same([compiled(*arguments)], [call(*arguments)], rtol=1e-5, atol=1e-5)


def test_another_mask_compiles_nothing_and_takes_effect() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    q, k, v, bias = (x.detach() for x in leaves())
    compiled = torch.compile(lambda m: flash_dmattn.attention(q, k, v, m, bias), backend=counter, fullgraph=True)
    for scores in (TOPK, -TOPK):
        prepared = PreparedMask.from_topk(scores, 20, is_causal=True, seqlen_q=LQ)
        assert_same([compiled(prepared)], [flash_dmattn.attention(q, k, v, prepared.dense(), bias)])
    assert counter.frame_count == 1


@needs_inductor
def test_the_graph_that_makes_a_mask_on_inductor() -> None:
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        mask = PreparedMask.from_topk(bias, 20, is_causal=True, seqlen_q=q.shape[1], reorder=True)
        return flash_dmattn.attention(q, k, v, mask, bias, backend="eager")

    arguments = leaves(torch.float32)
    actual, expected = torch.compile(call, fullgraph=True)(*arguments), call(*arguments)
    assert_same([actual], [expected], rtol=1e-5, atol=1e-5)
    assert tuple(actual.shape) == (B, LQ, HQ, D)
