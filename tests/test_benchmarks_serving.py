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
        assert [row.name.partition(",")[0] for row in rows] == ["1 query", *3 * ["16 queries"]]
        assert all(row.check is not None and row.check() for row in rows)
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
    assert run is not None and run().shape == (3, 1, 32, 128)
    edges, order, last, *sizes = planned[0]
    assert isinstance(edges, Tensor) and isinstance(order, Tensor) and isinstance(last, Tensor)
    assert edges.tolist() == [0, 2, 4, 5] and last.tolist() == [4, 16, 5] and sizes == [32, 8, 128, 16]
    assert sorted(order.tolist()) == list(range(5))
