"""The cases of `benchmarks.packed` on a CPU: short sequences, each result against what checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import packed
from benchmarks.floors import Rates
from flash_dmattn import BackendUnavailableError, BackendUnsupportedError

CPU = torch.device("cpu")
RATES = Rates(1e9, 1e9, "made up")
LENGTHS = (40, 7, 1, 33)


def small(case: packed.Case) -> packed.Case:
    return case._replace(lengths=LENGTHS, heads=4, heads_k=min(case.heads_k, 2), head_dim=16, kept=min(case.kept, 8))


def test_every_case_is_checked_and_has_a_row_for_each_system(capsys: pytest.CaptureFixture[str]) -> None:
    for case in map(small, packed.CASES):
        assert packed.run_case(case, CPU, ("eager",), RATES, 1.0)
        rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
        systems = {row[1]: row for row in rows}
        peers = [] if case.bias else ["varlen_attn", "fa4 varlen"]
        assert list(systems) == ["eager", *(["eager, tiles"] if case.kept else []), *peers] + (
            ["making the tiles"] if case.kept else []
        )
        assert all(row[-1] == "yes |" for name, row in systems.items() if name.startswith("eager"))
        if peers:
            assert systems["varlen_attn"][2].startswith("NotImplementedError: "), "torch has no such kernel on a CPU"
            assert systems["fa4 varlen"][2] == "RuntimeError: its kernels run on GPUs"


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = small(packed.CASES[0])

    def wrong(batch: packed.Batch, backends: Any) -> list[packed.System]:
        spoiled_call: Callable[[], Tensor] = lambda: batch.call() * 1.02
        return [packed.System("wrong", spoiled_call)]

    monkeypatch.setattr(packed, "systems", wrong)
    assert not packed.run_case(case, CPU, ("eager",), RATES, 1.0)
    printed = capsys.readouterr()
    assert "| NO |" in printed.out and "wrong: out is" in printed.err


def test_a_call_spoiled_call_that_raises_is_a_failure_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that fails is none, nor a refusal by the rules of a backend: `cuda` takes no mask beside sequences."""
    case, failure = small(packed.CASES[0]), RuntimeError("a kernel has failed")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, error: Exception, late: bool) -> Tensor:
            if not late:
                raise error
            ctx.error = error
            return q.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise ctx.error

    for error, is_peer, good in (
        (failure, False, False),
        (BackendUnavailableError("not built", backend="cuda"), False, False),
        (BackendUnsupportedError("no mask", backend="cuda"), False, True),
        (failure, True, True),
    ):
        for late in (False, True):

            def one(batch: packed.Batch, _: Any, arguments: Any = (error, late), is_peer: bool = is_peer) -> Any:
                return [packed.System("one", lambda: Failing.apply(batch.q, *arguments), is_peer)]

            monkeypatch.setattr(packed, "systems", one)
            assert packed.run_case(case, CPU, (), RATES, 1.0) is good
            assert f"| one | {type(error).__name__}: {error} |" in capsys.readouterr().out


def test_floors_count_what_is_allowed() -> None:
    causal = packed.Batch(packed.Case("", (3, 2), 2, 1, 4, is_causal=True), CPU)
    forward, backward = causal.floors()
    pairs = (6 + 3) * 2
    assert forward.flop == 4 * 4 * pairs and backward.flop == 10 * 4 * pairs
    assert forward.moved == 2 * (5 * 2 * 4 + 2 * 5 * 4 + 5 * 2 * 4)
    kept = packed.Batch(packed.Case("", (3, 2), 2, 1, 4, is_causal=True, kept=2), CPU)
    assert kept.mask is not None and int(kept.mask.sum()) == 5 + 3
    assert kept.floors()[0].flop == 4 * 4 * (5 + 3) * 2
