"""The long-context benchmark without a GPU: its check of sampled rows, its table, its plot, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_dmattn
from benchmarks import long_context
from flash_dmattn.masks import PreparedMask

PUBLISHED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "nvidia-h200" / "long-context.json"


def test_errors_of_sampled_rows_are_those_of_the_formula() -> None:
    inputs = long_context.Inputs(64, torch.device("cpu"))
    mask = PreparedMask.from_topk(inputs.scores.detach(), 9, is_causal=True, reorder=True)
    with torch.no_grad():
        out = flash_dmattn.attention(inputs.q, inputs.k, inputs.v, mask, inputs.scores, backend="eager")
        assert isinstance(out, torch.Tensor)
        assert 1e-4 < long_context.error_of_rows(inputs, mask, out) < long_context.MOST_ERROR
        other = PreparedMask.from_topk(inputs.scores.detach(), 10, is_causal=True)
        assert long_context.error_of_rows(inputs, other, out) > long_context.MOST_ERROR


def test_table_tells_of_times_errors_and_failures() -> None:
    rows = [
        {"length": 64, "system": "cuda", "making": 0.0791, "forward": 0.5, "backward": 1.25, "peak_mib": 7},
        {"length": 64, "system": "flexattention", "failed": "RuntimeError: no"},
    ]
    rows[0] |= {"error_of_rows": 2e-3, "gradients_off": None}
    lines = long_context.table(rows).splitlines()
    assert lines[2:] == [
        "| 64 | cuda | 0.0791 | 0.5 | 1.25 | 7 | 2e-03, - |",
        "| 64 | flexattention | - | - | - | - | RuntimeError: no |",
    ]


def test_plot_of_the_published_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (copied := tmp_path / "found.json").write_text(PUBLISHED.read_text(encoding="utf-8"), encoding="utf-8")
    assert [path.name for path in long_context.plot(copied)] == ["found.png", "found.svg"]
    drawn = (tmp_path / "found.svg").read_text(encoding="utf-8")
    assert "<svg" in drawn and (tmp_path / "found.png").stat().st_size > 1000
    rows = json.loads(copied.read_text(encoding="utf-8"))["rows"]
    assert {row["system"] for row in rows} == set(long_context.LABELS) and not any("wrong" in row for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.long_context"]
    done = subprocess.run(command, cwd=PUBLISHED.parents[3], capture_output=True, text=True)
    assert done.returncode == 2 and "torch finds no GPU" in done.stderr
