"""The rows of `benchmarks.serving` on a CPU: short sequences, each output against what checks it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import serving


def test_rows_check_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LENGTHS", tuple(range(20, 84)))
    with torch.no_grad():
        rows = list(serving.decoding_rows(16, "cpu", "eager"))
        *ours, peer = rows
        assert [row.name.partition(",")[0] for row in ours] == ["1 query", *3 * ["16 queries"]]
        assert all(row.check is not None and row.check() and not row.is_peer for row in ours)
        assert peer.name == "1 query, pages of 16, FlashInfer" and peer.is_peer
        wrong = rows[0].run()
        assert isinstance(wrong, Tensor)
        pool = serving.Pool(16, "cpu")
        queries = pool.normal(64, 1, 32, 128)
        assert not pool.is_accurate(queries, lambda: wrong + 1, torch.ones(1, 1) > 0)
        for row in serving.append_rows("cpu"):
            row.run()
            assert row.check is not None and row.check() and row.bytes > 0


def test_the_peer_is_planned_with_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as its interface has it; the library is not needed."""
    monkeypatch.setattr(serving, "LENGTHS", (20, 32, 5))
    planned: list[tuple[object, ...]] = []

    class Wrapper:
        def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
            assert layout == "NHD"

        def plan(self, *given: object, **dtypes: torch.dtype) -> None:
            planned.append(given)

        def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
            return q

    monkeypatch.setitem(
        sys.modules,
        "flashinfer",
        SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper),  # type: ignore[arg-type]
    )
    pool = serving.Pool(16, "cpu")
    run = serving.flashinfer_run(pool, torch.zeros(3, 1, 32, 128, dtype=torch.bfloat16))
    assert run().shape == (3, 1, 32, 128)
    edges, order, last, *sizes = planned[0]
    assert isinstance(edges, Tensor) and isinstance(order, Tensor) and isinstance(last, Tensor)
    assert edges.tolist() == [0, 2, 4, 5] and last.tolist() == [4, 16, 5] and sizes == [32, 8, 128, 16]
    assert sorted(order.tolist()) == list(range(5))


def test_a_peer_that_fails_has_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing library and one that cannot plan are no failure of the run; a call of ours that raises is one."""

    class Wrapper:
        def __init__(self, *_: object, use_tensor_cores: bool) -> None:
            raise RuntimeError("no nvcc to build with")

    monkeypatch.setattr(serving, "LENGTHS", (20, 32, 5))
    pool = serving.Pool(16, "cpu")
    broken = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    for module, reason in ((None, "ModuleNotFoundError: "), (broken, "RuntimeError: no nvcc to build with")):
        monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]
        run = serving.flashinfer_run(pool, torch.zeros(3, 1, 32, 128))
        for is_peer in (True, False):
            row = serving.Row("1 query", run, 1, lambda: pytest.fail("it has no output"), is_peer=is_peer)
            assert serving.run_rows([row], torch.device("cpu"), 1.0) is is_peer
            assert f"| 1 query | {reason}" in capsys.readouterr().out


def test_a_peer_that_is_wrong_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    row = serving.Row("1 query", lambda: None, 1, lambda: False, is_peer=True)
    assert not serving.run_rows([row], torch.device("cpu"), 1.0)
    assert "| NO |" in capsys.readouterr().out
