"""The cases of `benchmarks.packed` on a CPU: short sequences, each result against what checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import packed
from benchmarks.floors import Rates

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
        peers = [] if case.bias else ["varlen_attn"]
        assert list(systems) == ["eager", *(["eager, tiles"] if case.kept else []), *peers] + (
            ["making the tiles"] if case.kept else []
        )
        assert all(row[-1] == "yes |" for name, row in systems.items() if name.startswith("eager"))
        for name in peers:
            assert systems[name][2].startswith("NotImplementedError: "), "torch has no such kernel on a CPU"


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = small(packed.CASES[0])

    def wrong(batch: packed.Batch, backends: Any) -> list[packed.System]:
        of_ours: Callable[[], Tensor] = lambda: batch.call() * 1.02
        return [packed.System("wrong", of_ours)]

    monkeypatch.setattr(packed, "systems", wrong)
    assert not packed.run_case(case, CPU, ("eager",), RATES, 1.0)
    printed = capsys.readouterr()
    assert "| NO |" in printed.out and "wrong: out is" in printed.err


def test_floors_count_what_is_allowed() -> None:
    causal = packed.Batch(packed.Case("", (3, 2), 2, 1, 4, is_causal=True), CPU)
    forward, backward = causal.floors()
    pairs = (6 + 3) * 2
    assert forward.flop == 4 * 4 * pairs and backward.flop == 10 * 4 * pairs
    assert forward.moved == 2 * (5 * 2 * 4 + 2 * 5 * 4 + 5 * 2 * 4)
    kept = packed.Batch(packed.Case("", (3, 2), 2, 1, 4, is_causal=True, kept=2), CPU)
    assert kept.mask is not None and int(kept.mask.sum()) == 5 + 3
    assert kept.floors()[0].flop == 4 * 4 * (5 + 3) * 2


def test_all_lengths_are_those_of_the_published_table() -> None:
    assert (sum(packed.MIX), sum(packed.SHORT), sum(packed.RELATIVE), sum(packed.TOP)) == (32768, 196608, 16384, 16384)
