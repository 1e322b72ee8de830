"""`info --verify`: it passes what is right, notices what is wrong, and lists what does not run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from out_of_tree import replaced

import flash_dmattn
from flash_dmattn.__main__ import main
from flash_dmattn.backends import eager
from flash_dmattn.backends.protocol import Forward, Rule
from flash_dmattn.problem import AttentionProblem
from flash_dmattn.tools import verify


def wrong(name: str, factor: float) -> flash_dmattn.Backend:
    """Eager with one of its results scaled or replaced, to see that the verification notices."""

    def spoil(names: tuple[str, ...], results: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        return tuple(x * factor if each == name and x is not None else x for each, x in zip(names, results))

    def plan_forward(problem: AttentionProblem) -> Forward:
        run = eager.BACKEND.plan_forward(problem)
        return lambda inputs: spoil(("out", "lse"), run(inputs))

    def plan_backward(problem: AttentionProblem) -> Any:
        assert eager.BACKEND.plan_backward is not None
        run = eager.BACKEND.plan_backward(problem)
        return lambda *saved: spoil(("dq", "dk", "dv", "dbias"), run(*saved))

    return flash_dmattn.Backend("wrong", plan_forward, plan_backward, eager.BACKEND.features)


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    backend = wrong(*request.param)
    flash_dmattn.register_backend(backend)
    yield
    flash_dmattn.unregister_backend(backend.name)


def test_verify_passes_and_lists_what_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    with flash_dmattn.config(disabled="flex"):  # compiled: the tests of flex compare it case by case
        assert main(["info", "--verify"]) == 0
    printed = capsys.readouterr().out
    for case in verify.CASES:
        assert re.search(rf"^eager +{case.name} .*<.* pass$", printed, re.MULTILINE), printed
    assert re.search(r"^flex +all .* not run\n +because it is switched off", printed, re.MULTILINE), printed
    assert re.search(r", 0 failed, \d+ not run$", printed, re.MULTILINE), printed


@pytest.mark.parametrize(
    "registered",
    [("out", 1.001), ("lse", 1.001), ("dq", 1.001), ("dk", 0.999), ("dv", 0.0), ("dbias", -1.0), ("out", float("nan"))],
    indirect=True,
)
def test_verify_notices_a_wrong_result(
    registered: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with flash_dmattn.config(disabled=("flex", "reference")):
        assert main(["info", "--verify", "--json"]) == 1
    printed = capsys.readouterr()
    outcomes = json.loads(printed.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["verify"]
    verdicts = {(outcome["backend"], outcome["case"]): outcome["verdict"] for outcome in outcomes}
    assert verdicts["wrong", "all together"] == "FAIL" and verdicts["eager", "all together"] == "pass"
    assert ">" in printed.err, "the table marks what is over its limit"


def test_verify_reports_a_backend_that_raises(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(problem: AttentionProblem) -> Forward:
        raise RuntimeError("illegal memory access")

    with replaced("eager", plan_forward=broken), flash_dmattn.config(disabled="flex"):
        assert main(["info", "--verify"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^eager +causal .*FAIL\n +RuntimeError: illegal memory access", printed, re.MULTILINE), printed


def test_verify_completes_a_forward_pass_by_the_backward_pass_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    def plan_backward(problem: AttentionProblem) -> Any:
        raise AssertionError("its rules refuse this pass")

    no_backward = Rule("no_backward", lambda p: False, lambda p: "it has no backward pass", passes=("backward",))
    backend = replace(wrong("none", 1.0), name="alone", rules=(no_backward,), plan_backward=plan_backward)
    flash_dmattn.register_backend(backend)
    try:
        with flash_dmattn.config(disabled=("flex", "reference")):
            assert main(["info", "--verify"]) == 0
    finally:
        flash_dmattn.unregister_backend("alone")
    printed = capsys.readouterr().out
    for case in verify.CASES:
        assert re.search(rf"^alone +{case.name} .*<.* pass$", printed, re.MULTILINE), printed
    assert "gradients by eager, because it has no backward pass" in printed


def test_error_compares_infinities_and_keeps_nan() -> None:
    oracle = torch.tensor([1.0, -torch.inf, 2.0], dtype=torch.float64)
    assert verify.error(oracle.float(), oracle) == 0.0
    assert verify.error(torch.tensor([1.0, 0.0, 2.0]), oracle) == float("inf")
    assert not verify.error(torch.tensor([torch.nan, -torch.inf, 2.0]), oracle) <= 1.0
    assert verify.error(torch.tensor([1.0, -torch.inf, torch.inf]), oracle) == float("inf")
    assert verify.error(torch.full((2,), 3e-3), torch.zeros(2, dtype=torch.float64)) == pytest.approx(3e-3 * 2**0.5)
