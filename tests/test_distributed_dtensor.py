"""DTensors in `attention`: values, gradients and placements against one process, and refusals."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from distributed_workers import Workers, torchrun, workers
from dtensor_calls import Call

import flash_dmattn
from flash_dmattn import AuxRequest

LSE = (("return_lse", True),)
EIGHT: dict[str, Any] = {"seqlen_q": 8, "seqlen_k": 8}


@pytest.fixture
def four() -> Workers:
    """Four ranks, as a mesh of (2, 2) or two meshes of (2) that do the same."""
    return workers(4)


CALLS = {
    "batch": Call("S0", mask=(3, 1, 5, 7), mask_on="S0", bias=(3, 2, 5, 7), bias_on="S0", flags=LSE),
    "batch, shared bias": Call("S0", bias=(1, 2, 1, 7), bias_on="R", sink_on="R", flags=LSE),
    "batch, whole bias that is sliced": Call("S0", bias=(3, 1, 5, 7), bias_on="R", flags=LSE),
    "batch, mask and bias of two dims": Call("S0", mask=(5, 7), mask_on="R", bias=(5, 1), bias_on="R", flags=LSE),
    "batch, whole keys": Call("S0", k="R", mask=(3, 4, 5, 7), mask_on="R"),
    "a rank without entries": Call("S0", batch=(1,), bias=(1, 4, 5, 7), bias_on="R", sink_on="R"),
    "heads": Call("S2", mask=(3, 4, 5, 7), mask_on="S1", bias=(1, 4, 5, 7), bias_on="S1", sink_on="S0", flags=LSE),
    "heads, bias of key-value heads": Call("S2", bias=(3, 2, 1, 7), bias_on="S1", flags=LSE),
    "heads, bias of three dims": Call("S2", bias=(2, 1, 7), bias_on="S0", flags=LSE),
    "heads, bias of one head": Call("S2", bias=(3, 1, 5, 7), bias_on="R", flags=LSE),
    "heads, all else whole": Call("S2", k="R", bias=(2, 5, 7), bias_on="R", sink_on="R", flags=LSE),
    "replicas": Call("R", mask=(5, 7), mask_on="R", bias=(1, 1, 5, 7), bias_on="R", sink_on="R", flags=LSE),
    "batch and heads": Call(
        "S0 S2", mask=(3, 1, 5, 7), mask_on="S0 R", bias=(3, 4, 1, 7), bias_on="S0 S1", sink_on="R S0", flags=LSE
    ),
    "heads and batch": Call("S2 S0", bias=(1, 4, 5, 7), bias_on="S1 R", sink_on="R R", flags=LSE),
    "batch and heads, shared bias": Call("S0 S2", bias=(5, 7), bias_on="R R", flags=LSE),
    "batch and replicas": Call("S0 R", bias=(1, 2, 1, 7), bias_on="R R", sink_on="R R", flags=LSE),
    "batch twice": Call("S0 S0", bias=(3, 1, 1, 7), bias_on="S0 R", flags=LSE),
    "heads twice": Call("S2 S2", num_heads_k=4, bias=(4, 5, 7), bias_on="S0 S0", flags=LSE),
    "two batch dims": Call(
        "S1 S0", batch=(2, 3), mask=(2, 1, 1, 5, 7), mask_on="R S0", bias=(3, 4, 5, 7), bias_on="S0 R", flags=LSE
    ),
    "probabilities": Call(
        "S2", needs="", flags=(("backend", "reference"), ("return_lse", True), ("return_probs", True))
    ),
    "numbers about rows": Call("S0 S2", sink_on="R S0", flags=(("return_aux", AuxRequest(True, True, True)),)),
    "nothing asked about rows": Call("S0", flags=(("return_aux", AuxRequest()),)),
    "sequence": Call("S1", **EIGHT, mask=(3, 1, 8, 8), mask_on="S2", bias=(1, 4, 8, 8), bias_on="S2", flags=LSE),
    "sequence, shared bias": Call(
        "S1", seqlen_q=8, seqlen_k=12, bias=(1, 2, 1, 12), bias_on="R", sink_on="R", flags=LSE
    ),
    "sequence, all else whole": Call(
        "S1", k="R", **EIGHT, mask=(8, 8), mask_on="R", bias=(1, 4, 8, 8), bias_on="R", flags=LSE
    ),
    "sequence, bias and mask of the keys": Call(
        "S1", **EIGHT, mask=(3, 1, 1, 8), mask_on="S3", bias=(1, 2, 1, 8), bias_on="S3", flags=LSE
    ),
    "batch and sequence": Call(
        "S0 S1", **EIGHT, mask=(3, 1, 8, 8), mask_on="S0 S2", bias=(3, 1, 1, 8), bias_on="R R", sink_on="R R"
    ),
    "sequence and heads": Call("S1 S2", **EIGHT, bias=(3, 4, 8, 8), bias_on="S2 S1", sink_on="R S0", flags=LSE),
    "window and softcap": Call("S2", flags=(("softcap", 2.0), ("window_size", (3, 0)))),
    "gradient of the bias alone": Call("S0", bias=(1, 4, 5, 7), bias_on="R", needs="bias"),
    "gradient of the keys alone": Call("S0 S2", k="S0 R", needs="k"),
    "gradient of the sink alone": Call("S0 S2", sink_on="R R", needs="sink"),
}


def check(call: Call, results: dict[str, tuple[str, float]]) -> None:
    """Compare placements: out has the ones of q, lse has heads before rows, and a gradient the ones of its leaf."""
    rows, heads = (f"S{len(call.batch) + dim}" for dim in (0, 1))
    lse_on = " ".join({rows: heads, heads: rows}.get(place, place) for place in call.q.split())
    expected = {"out": call.q, "dbias": call.bias_on, "dsink": call.sink_on}
    expected |= dict.fromkeys(("lse", "probs", "max_scores", "entropy"), lse_on)
    expected |= {"dq": call.q, "dk": call.k or call.q, "dv": call.k or call.q}
    assert {name: placed for name, (placed, _) in results.items()} == {name: expected[name] for name in results}
    assert {name: far for name, (_, far) in results.items() if not far < 1e-10} == {}
    needed = {f"d{name}" for name in call.needs.split()} - ({"dbias"} if call.bias is None else set())
    assert needed - ({"dsink"} if not call.sink_on else set()) == {name for name in results if name.startswith("d")}


@pytest.mark.parametrize("name", CALLS)
def test_values_gradients_and_placements(name: str, four: Workers) -> None:
    for results in four.run("dtensor_calls.compare", CALLS[name]):
        if "probabilities" in name:
            assert set(results) == {"out", "lse", "probs"}
        check(CALLS[name], results)


@pytest.mark.parametrize("name", ["batch, shared bias", "heads, all else whole", "batch and heads"])
def test_one_graph_under_compile(name: str, four: Workers) -> None:
    for results in four.run("dtensor_calls.compare", CALLS[name], True):
        check(CALLS[name], results)


def test_a_shared_sequence_is_not_traced(four: Workers) -> None:
    for error in four.run("dtensor_calls.refused_as_one_graph", Call("S1", **EIGHT)):
        assert "q shares its sequence in a graph of torch.compile" in error


BATCH, HEADS = Call("S0", bias=(1, 2, 1, 7), bias_on="R"), Call("S2", bias=(1, 2, 1, 7), bias_on="S1")
REFUSED: list[tuple[str, Call]] = [
    (
        r"ValueError: k has shape \(3, 7, 2, 8\) .*; with q .* it needs .*k\.redistribute\(placements=\.\.\.\) comm",
        Call("S0", k="S2"),
    ),
    (r"k has .* it needs \(Replicate\(\),\)", Call("R", k="S2")),
    (
        r"bias has shape \(1, 2, 1, 7\) and placements \(Shard\(dim=1\),\); .* it needs \(Replicate\(\),\)",
        Call("S0", bias=(1, 2, 1, 7), bias_on="S1"),
    ),
    (r"bias .* it needs \(Shard\(dim=0\),\)", Call("S2", bias=(2, 5, 7), bias_on="S2")),
    (r"mask .* it needs \(Shard\(dim=1\),\)", Call("S2", mask=(3, 4, 5, 7), mask_on="S0")),
    (r"sink has shape \(4,\) .* it needs \(Replicate\(\),\)", Call("S0", sink_on="S0")),
    (
        r"bias .* \(Replicate\(\), Shard\(dim=0\)\); .* it needs \(Shard\(dim=0\), Shard\(dim=0\)\)",
        Call("S0 S0", bias=(3, 1, 1, 7), bias_on="R S0"),
    ),
    (r"ValueError: rank \d: q has 5 positions, shared among 2 ranks; it needs a multiple of 2, 4 at least", Call("S1")),
    (r"ValueError: rank \d: k has 7 positions, shared", Call("S1", seqlen_q=4)),
    (r"ValueError: rank \d: q has 2 positions.* 4 at", Call("S1", seqlen_q=2, seqlen_k=8)),
    (r"q has placements .* share its sequence over 2 mesh dims; it needs one: flatten them", Call("S1 S1", **EIGHT)),
    (r"bias .* it needs \(Shard\(dim=2\),\)", Call("S1", **EIGHT, bias=(1, 1, 8, 8), bias_on="S3")),
    (
        r"ValueError: rank \d: return_probs is True, and q shares its sequence",
        Call("S1", **EIGHT, flags=(("backend", "reference"), ("return_probs", True))),
    ),
    (
        r"ValueError: rank \d: return_aux asks for entropy, and q shares its sequence",
        Call("S1", **EIGHT, flags=(("return_aux", AuxRequest(entropy=True)),)),
    ),
    (r"q has placements \(Shard\(dim=3\),\); on mesh dim 0 it needs .* Shard\(2\) \(heads\)", Call("S3")),
    (
        r"k has 1 heads, and q has placements \(Shard\(dim=2\),\) .* \(2,\); k needs a multiple of 2 heads",
        Call("S2", num_heads_k=1),
    ),
    (r"k has 2 heads.* k needs a multiple of 4 heads", Call("S2 S2")),
    (r"ValueError: dropout_p is 0.5 with DTensors", Call("S0", flags=(("dropout_p", 0.5),))),
    ("ValueError: sequences is given with DTensors", Call("S0", flags=(("sequences", 1),))),
    # The whole tensors decide, so that each rank refuses alike: the first has two entries of each here.
    (
        r"ValueError: bias has shape \(2, 2, 1, 7\).*it needs batch in \{1, 3\}",
        Call("S0", bias=(2, 2, 1, 7), bias_on="R"),
    ),
    (
        "TypeError: mask has dtype float64; it needs bool",
        Call("S0", mask=(5, 7), mask_on="R", dtypes=(("mask", "float64"),)),
    ),
]
# Tensors of `BATCH` are replaced.
REFUSED_BESIDE: list[tuple[str, dict[str, Any]]] = [
    (r"bias .*\(Partial\(sum\),\); .* it needs \(Replicate\(\),\)", {"bias": "partial"}),
    ("TypeError: k is a Tensor, and q is a DTensor; k needs to be one, too", {"k": "plain"}),
    ("TypeError: bias is a Tensor, and q is a DTensor", {"bias": "plain"}),
    ("TypeError: k is a DTensor, and q is a Tensor; q needs to be a DTensor, too", {"q": "plain"}),
    (
        r"TypeError: bias is a DTensor, and q is a Tensor; q needs to be a DTensor, too, or bias a plain tensor",
        {"q": "plain", "k": "plain", "v": "plain"},
    ),
    ("TypeError: k is a NoneType, and q is a DTensor", {"k": None}),
    (r"ValueError: bias is on DeviceMesh.*needs to be on the mesh of q", {"bias": "other mesh"}),
    (
        r"ValueError: mask was prepared with batch and heads \(3, 1\); with DTensors it needs \(1, 1\)",
        {"mask": "prepared"},
    ),
    ("TypeError: mask is a int; it needs to be a bool torch.Tensor", {"mask": 3}),
]


PARTIAL_Q = r"q has placements \(Partial\(sum\),\); on mesh dim 0 it needs Replicate\(\), Shard\(0\) \(batch\), "


@pytest.mark.parametrize(
    "message, call, changes",
    [
        *((*row, {}) for row in REFUSED),
        *((message, BATCH, changes) for message, changes in REFUSED_BESIDE),
        (PARTIAL_Q, Call("R"), {"q": "partial"}),
    ],
)
def test_refused_on_every_rank(message: str, call: Call, changes: dict[str, Any], four: Workers) -> None:
    for error in four.run("dtensor_calls.refusal", call, changes):
        assert re.match(message if "Error" in message else ".*" + message, error), error


def test_a_mistake_of_one_rank_beside_a_shared_sequence_is_refused_on_all(four: Workers) -> None:
    call = Call("S1", **EIGHT, bias=(1, 1, 8, 8), bias_on="S2")
    for error in four.run("dtensor_calls.refusal", call, {"bias": "plain"}, (1, 2)):
        assert re.match("TypeError: rank [12]: bias is a Tensor, and q is a DTensor", error), error
    for results in four.run("dtensor_calls.compare", call):
        check(call, results)


@pytest.mark.parametrize("kind", ["vmap", "grad"])
def test_transforms_are_refused(kind: str, four: Workers) -> None:
    for error in four.run("dtensor_calls.transformed", kind):
        assert re.search(r"is a DTensor.*(inside of a transform of torch\.func|needs to be one, too)", error), error


def test_a_prepared_mask_of_all_goes_to_every_rank(four: Workers) -> None:
    assert max(four.run("dtensor_calls.prepared_for_all")) < 1e-10


def test_keys_that_are_still_being_gathered(four: Workers) -> None:
    assert max(four.run("dtensor_calls.gathered_keys")) < 1e-10


@pytest.mark.parametrize("call", [BATCH, HEADS, Call("S0 S2", bias=(5, 7), bias_on="R R")], ids=str)
def test_an_optimizer_steps_as_in_one_process(call: Call, four: Workers) -> None:
    for placed, held, far in four.run("dtensor_calls.steps", call):
        assert placed == call.bias_on
        assert far < 1e-10
        if "S" not in call.bias_on:
            assert held < 1e-10  # what each rank holds itself


def test_a_shared_gradient_is_rounded_once(four: Workers) -> None:
    for same, differing in four.run("dtensor_calls.widened"):
        assert differing > 10  # the values could tell
        assert same


def test_deterministic(four: Workers) -> None:
    assert all(four.run("dtensor_calls.repeated", Call("S0 S2", bias=(5, 7), bias_on="R R", sink_on="R S0")))


def test_second_derivative(four: Workers) -> None:
    assert max(four.run("dtensor_calls.second")) < 1e-10


def test_explain_speaks_of_the_call_of_the_rank(four: Workers) -> None:
    shared = [(batch, 2, "eager", "", []) for batch in (2, 2, 1, 1)]
    assert four.run("dtensor_calls.explained", Call("S0 S2")) == shared
    sequence = Call("S1", **EIGHT, flags=(("is_causal", True),))
    calls = four.run("dtensor_calls.explained", sequence)
    assert [call[2:] for call in calls] == [("eager", "gather", [(4, keys)]) for keys in (4, 8)] * 2


def test_the_program_of_gpu_tests_runs_on_a_cpu() -> None:
    printed = torchrun(2, "tests/gpu_dtensor.py")
    assert printed.count("passed q S") == 9 and "FAILED" not in printed


def test_plain_calls_ask_nothing_of_dtensors() -> None:
    """Not even whether an argument is one: no function of theirs runs in a call."""
    x = torch.randn(1, 5, 2, 8)
    called: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            called.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    for bias in (None, torch.randn(5, 5)):
        flash_dmattn.attention(x, x, x, None, bias)
        sys.setprofile(note)
        try:
            flash_dmattn.attention(x, x, x, None, bias)
        finally:
            sys.setprofile(None)
    assert any(name.endswith("api.py:attention") for name in called)  # it was watched
    asking = [name for name in called if re.search("distributed|dtensor", name.partition("flash_dmattn")[2])]
    assert asking == []
