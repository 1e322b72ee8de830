"""`explain`, of tensors and of shapes: the same answer as the call itself, as a table and as plain data."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from out_of_tree import KernelPair, registered, replaced
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.protocol import Availability, Rule
from flash_dmattn.dispatch import registry, selection
from flash_dmattn.explanation import explain_problem

pytestmark = pytest.mark.usefixtures("untouched_settings")


def tensors() -> dict[str, Tensor]:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
    return {"q": q, "k": k, "v": v, "mask": torch.rand(5, 7) > 0.3}


def with_bias(**flags: Any) -> dict[str, Any]:
    return {**tensors(), "bias": torch.randn(1, 2, 1, 7, requires_grad=True), **flags}


CALLS: dict[str, dict[str, Any]] = {
    "plain": tensors(),
    "bias gradient": with_bias(),
    "flags": with_bias(is_causal=True, softcap=3.0, window_size=(2, -1), softmax_scale=0.5, deterministic=True),
    "by name": with_bias(backend="reference"),
    "pair": with_bias(backend=("eager", "eager"), return_lse=True),
    "probabilities": {**tensors(), "backend": "reference", "return_probs": True},
    "sink": {**tensors(), "sink": torch.randn(4, requires_grad=True), "return_lse": True},
    "expanded": {**tensors(), "bias": torch.randn(7).expand(2, 4, 5, 7)},
}


@pytest.mark.parametrize("name", CALLS)
def test_explanation_is_what_the_call_then_does(name: str) -> None:
    explanation = flash_dmattn.explain(**CALLS[name])
    with flash_dmattn.config(record=(decisions := [])):
        flash_dmattn.attention(**CALLS[name])
    (decision,) = decisions
    assert explanation.error is None
    assert decision == (explanation.problem, explanation.requested, explanation.forward, explanation.backward)


def test_explanation_follows_settings_no_grad_and_autocast() -> None:
    with flash_dmattn.config(backend="reference"):
        explanation = flash_dmattn.explain(**with_bias())
    assert (explanation.requested, explanation.forward, explanation.backward) == ("reference",) * 3
    with torch.no_grad():
        assert flash_dmattn.explain(**with_bias()).backward is None
    with torch.autocast("cpu", torch.bfloat16), flash_dmattn.config(record=(decisions := [])):
        flash_dmattn.attention(**with_bias(backend="eager"))
        explanation = flash_dmattn.explain(**with_bias(backend="eager"))
    assert decisions[0].problem.dtype == torch.bfloat16
    assert decisions[0].problem == explanation.problem


def test_explaining_records_and_warns_nothing_and_computes_nothing() -> None:
    ours = KernelPair("ours")
    with warnings.catch_warnings(), flash_dmattn.config(record=(decisions := [])), registered(ours, before="sdpa"):
        warnings.simplefilter("error")
        assert flash_dmattn.explain(**with_bias()).forward == "ours"
        explain_problem((2, 4096, 16, 64), device="sm_80")
    assert decisions == [] and ours.ran == []
    with flash_dmattn.config(disabled=("cuda", "triton", "flex", "sdpa")), pytest.warns(flash_dmattn.FallbackWarning):
        # explaining did not use up the one warning
        selection.report_fallback(explain_problem((2, 4096, 16, 64), device="sm_80").problem)


def test_call_that_would_be_refused_is_explained() -> None:
    call = with_bias(backend="eager", return_probs=True)
    explanation = flash_dmattn.explain(**call)
    with pytest.raises(flash_dmattn.BackendUnsupportedError) as caught:
        flash_dmattn.attention(**call)
    assert (explanation.forward, explanation.backward, explanation.error) == (None, None, caught.value.details)
    assert "\nbackend='eager' would raise\n" in str(explanation)
    assert not explanation.to_dict()["backends"]["eager"]["accepts"]


def test_fallback_that_would_raise_is_explained() -> None:
    x = torch.empty(2, 4096, 16, 64, dtype=torch.bfloat16, device="meta")
    with flash_dmattn.config(disabled=("cuda", "triton", "flex", "sdpa"), fallback="error"):
        explanation, by_name = (flash_dmattn.explain(x, x, x, device="sm_80", backend=b) for b in ("auto", "eager"))
    assert explanation.forward is None
    assert 'fallback="error" is in force' in explanation.error
    assert (by_name.forward, by_name.error) == ("eager", None)


def test_table_has_every_backend_its_reasons_and_the_choice() -> None:
    shy = Rule("small", lambda p: p.seqlen_k > 64, lambda p: f"only {p.seqlen_k} keys", 'use backend="shy"')
    half = Rule("half", lambda p: False, lambda p: "no backward yet", "", ("backward",))
    # A refused pass has no reason of auto.
    slow = Rule("slow", lambda p: False, lambda p: "a slow backward pass", "", ("backward",))
    backends = (KernelPair("shy", auto_rules=(shy,)), KernelPair("forward_only", rules=(half,), auto_rules=(slow,)))
    with registered(*backends, before="sdpa"):
        explanation = flash_dmattn.explain(**with_bias())
    lines = str(explanation).splitlines()
    assert lines[0] == f"attention: {explanation.problem}"
    assert lines[1] == "backend='auto' runs forward_only forward, eager backward"
    assert lines[3].split() == ["backend", "forward", "backward", "why"]
    assert lines[-2:] == ["", 'on a GPU: explain(..., device="sm_90"), or another architecture']
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[5:-4] if not line.startswith(" ")}
    assert list(rows) == ["cuda", "triton", "flex", "shy", "forward_only", "sdpa", "eager", "reference"]
    # Reasons that count only on a GPU are left out, and so are preferences of auto there.
    assert rows["cuda"].startswith("no no device is cpu; ") and "float32" not in str(explanation).split("\n\n")[1]
    assert {"device", "dtype"} <= {reason.code for reason in explanation.verdicts[0].reasons}
    assert rows["shy"] == 'yes yes auto passes it over: only 7 keys (use backend="shy")'
    assert rows["forward_only"] == "CHOSEN no no backward yet"
    assert rows["eager"].startswith("yes CHOSEN")
    assert rows["reference"].startswith("yes yes auto passes it over: ")
    assert all(len(set(column)) == 1 for column in zip(*(find_columns(line) for line in lines[3:5])))
    assert repr(explanation) == str(explanation)


def test_long_reasons_continue_on_the_next_line() -> None:
    explanation = flash_dmattn.explain(**with_bias())
    lines = explanation.to_text(100).splitlines()
    table = lines[lines.index("") + 1 : -2]
    why = table[0].index("why")
    assert max(map(len, table)) <= 100 < max(map(len, str(explanation).splitlines()))
    # Continued lines are indented by two; joined, they are the words of the whole table.
    assert any(line.startswith(" " * (why + 2)) for line in table)
    assert " ".join(" ".join(table).split()) == " ".join(str(explanation).split("\n\n")[1].split())


def test_the_table_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = flash_dmattn.explain(**with_bias())
    monkeypatch.setenv("COLUMNS", "90")
    assert str(explanation) == explanation.to_text()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert str(explanation) == explanation.to_text(90) != explanation.to_text()


def find_columns(line: str) -> list[int]:
    """Where the words of a line begin."""
    return [i for i, c in enumerate(line) if c != " " and (i == 0 or line[i - 1] == " ")]


@pytest.mark.parametrize("name", CALLS)
def test_plain_data_survives_json(name: str) -> None:
    explanation = flash_dmattn.explain(**CALLS[name])
    data = json.loads(json.dumps(explanation.to_dict()))
    requested = explanation.requested
    assert data["problem"] == str(explanation.problem)
    assert data["requested"] == (list(requested) if isinstance(requested, tuple) else requested)
    assert (data["forward"], data["backward"], data["error"]) == (explanation.forward, explanation.backward, None)
    assert list(data["backends"]) == list(registry.BACKENDS)
    for verdict in explanation.verdicts:
        told = data["backends"][verdict.backend]
        assert told["accepts"] is verdict.accepts is (not told["reasons"])
        assert [tuple(reason.values()) for reason in told["reasons"]] == list(verdict.reasons)
        assert all(list(reason) == ["backend", "code", "text", "hint"] for reason in told["reasons"])
        if explanation.backward is None:
            assert told["backward"] is None


@pytest.mark.parametrize(
    ("device", "arch", "codes"),
    [
        ("sm_80", "sm_80", {"arch"}),
        ("sm90", "sm_90", set()),
        ("sm_90a", "sm_90", set()),
        ("sm_100", "sm_100", {"arch"}),
        ("gfx942", "gfx942", {"arch"}),
        ("cpu", "cpu", {"device"}),
    ],
)
def test_any_device_can_be_described(device: str, arch: str, codes: set[str]) -> None:
    explanation = explain_problem(
        (2, 4096, 16, 64), kv_heads=4, dtype="bf16", device=device, bias=(1, 16, 4096, 4096), bias_grad=True
    )
    problem = explanation.problem
    assert problem.arch == arch
    assert problem.needs_grad == (False, False, False, True, False)
    (verdict,) = (verdict for verdict in explanation.verdicts if verdict.backend == "cuda")
    assert {reason.code for reason in verdict.reasons} - {"unavailable"} == codes
    assert str(problem) == (
        f"batch 2, 4096 queries x 4096 keys, 16 heads on 4 key-value heads, head_dim 64, bfloat16 on "
        f"{problem.arch}, bias (1, 16, 4096, 4096) bfloat16, gradients dbias"
    )


def test_another_gpu_is_explained_without_what_is_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"q": (2, 4096, 16, 64), "device": "sm_90", "backend": "cuda"}
    with replaced("cuda", probe=lambda: Availability(False, "it is not built")):
        for gpus, elsewhere in ({}, True), ({"sm_80": ["a GPU"]}, True), ({"sm_90": ["a GPU"]}, False):
            monkeypatch.setattr("flash_dmattn.explanation.gpu_names", lambda arch, gpus=gpus: gpus.get(arch, []))
            actual = explain_problem(**call)
            codes = {reason.code for verdict in actual.verdicts for reason in verdict.reasons}
            assert ("unavailable" in codes) is not elsewhere
            assert actual.forward == ("cuda" if elsewhere else None)
            assert (actual.error is None) is actual.to_dict()["is_hypothetical"] is elsewhere
            told = "no GPU of this machine is sm_90: all backends count as installed there"
            assert (told in str(actual).splitlines()) is elsewhere
    assert not explain_problem((1, 8, 2, 16), device="cpu").problem.is_hypothetical


@pytest.mark.parametrize("dims", [(), (3,)], ids=["", "leading dims"])
def test_shapes_and_tensors_on_meta_are_explained_as_tensors_are(dims: tuple[int, ...]) -> None:
    q = torch.randn(*dims, 2, 5, 4, 8, requires_grad=True)
    k, v = (torch.randn(*dims, 2, 7, 2, n, requires_grad=True) for n in (8, 6))
    mask, bias = torch.ones(2, 1, 5, 7, dtype=torch.bool), torch.randn(2, 1, 7, dtype=torch.float64)
    flags = {"is_causal": True, "softcap": 2.0, "window_size": (3, 1), "softmax_scale": 0.0, "return_lse": True}
    real = flash_dmattn.explain(q, k, v, mask, bias, deterministic=True, **flags)
    by_shapes = explain_problem(
        (*dims, 2, 5, 4, 8),
        kv_heads=2,
        seqlen_k=7,
        head_dim_v=6,
        dtype=torch.float32,
        device="cpu",
        mask=(2, 1, 5, 7),
        bias=(2, 1, 7),
        bias_dtype="fp64",
        grad=True,
        bias_grad=False,
        deterministic=True,
        **flags,
    )
    meta = (x.detach().to("meta").requires_grad_(x.requires_grad) for x in (q, k, v, mask, bias))
    on_meta = flash_dmattn.explain(*meta, device="cpu", deterministic=True, **flags)
    for described in (by_shapes, on_meta):
        assert described.problem == real.problem and hash(described.problem) == hash(real.problem)
        assert str(described) == str(real)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device": 9}, r"device is 9; it needs to be 'cpu' or the architecture of a GPU, such as 'sm_80' \(A100\)"),
        ({"device": "H100"}, r"device is 'H100'; it needs .*'sm_90' \(H100, H200\)"),
        ({"device": "sm_9"}, "device is 'sm_9'"),
        ({"dtype": "int8"}, "dtype is 'int8'; it needs to be one of fp16"),
        ({"bias": (1, 1, 1, 8), "bias_dtype": "fp8"}, "bias_dtype is 'fp8'; it needs to be one of fp16"),
        ({"q": (8, 2, 16)}, r"q is \(8, 2, 16\); it needs 4 sizes"),
        ({"q": (1, -8, 2, 16)}, r"q is \(1, -8, 2, 16\); sizes need to be at least 0"),
        ({"kv_heads": 3}, "q has 2 heads and k has 3"),
        ({"kv_heads": -1}, "kv_heads is -1; sizes need to be at least 0"),
        ({"bias": (2, 8, 9)}, r"bias has shape \(1, 2, 8, 9\)"),
        ({"mask": (8,)}, "mask has 1 dimensions"),
        ({"backend": "nope"}, "backend 'nope' is unknown"),
        ({"softcap": -2.0}, "softcap is -2.0"),
    ],
)
def test_bad_description_is_a_value_error(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        explain_problem(**{"q": (1, 8, 2, 16), "device": "sm_90", **changes})


def test_dtensors_are_explained_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_dmattn.explanation.is_dtensor", lambda x: True)
    x = torch.nn.Parameter(torch.randn(1, 8, 2, 16))  # any subclass
    with pytest.raises(ValueError, match="device is 'sm_90'; it needs to be None with DTensors"):
        flash_dmattn.explain(x, x, x, device="sm_90")
