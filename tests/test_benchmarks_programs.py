"""Programs of the benchmarks on a CPU: builds beside each other, long contexts, serving, training steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import flash_dmattn
from benchmarks import builds, long_context, serving
from flash_dmattn.masks import PreparedMask

ON_CPU = ["--only", "heads-1", "--passes", "forward", "--rounds", "1", "--system", "eager", "--device", "cpu"]


# Builds of the extension


def test_a_run_of_a_build(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system needs no extension, so that an empty file will do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "old.so").touch()
    assert builds.main([str(tmp_path / "old.so"), *ON_CPU]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "[1/1] old" and said[2] == "| case | pass | old |"
    assert said[4].startswith("| heads-1 | forward | ")


# Long contexts


def test_errors_of_sampled_rows_are_those_of_the_formula() -> None:
    inputs = long_context.Inputs(64, torch.device("cpu"))
    mask = PreparedMask.from_topk(inputs.scores.detach(), 9, is_causal=True, reorder=True)
    with torch.no_grad():
        out = flash_dmattn.attention(inputs.q, inputs.k, inputs.v, mask, inputs.scores, backend="eager")
        assert isinstance(out, torch.Tensor)
        assert 1e-4 < long_context.error_of_rows(inputs, mask, out) < long_context.MOST_ERROR
        other = PreparedMask.from_topk(inputs.scores.detach(), 10, is_causal=True)
        assert long_context.error_of_rows(inputs, other, out) > long_context.MOST_ERROR


# Serving


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


# Training steps


def rows_of(printed: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize(
    ("model", "match", "implementations", "ran"),
    [
        ("llama", "packed", ["sdpa", "dmattn"], "eager/eager"),
        ("t5", "8 of 512 to 2048", ["sdpa", "dmattn", "eager"], "sdpa/eager sdpa/sdpa"),
        ("swin", "2 images", ["sdpa", "dmattn"], "sdpa/eager"),
    ],
)
def test_a_row_for_each_implementation(
    capsys: pytest.CaptureFixture[str], model: str, match: str, implementations: list[str], ran: str
) -> None:
    training = pytest.importorskip("benchmarks.training", exc_type=ImportError)
    arguments = ["--quick", "--device", "cpu", "--steps", "1", "--models", model, "--match", match]
    assert training.main(arguments) == 0
    cells = rows_of(capsys.readouterr().out)
    assert [row[2] for row in cells] == implementations
    ours = cells[1]
    assert ours[7] == ran, "the library did not run in the model"
    assert all(row[7] == "-" for row in cells if row[2] != "dmattn")
    assert len({row[6][:6] for row in cells}) == 1, "implementations disagree on the loss"


def test_a_loss_that_differs_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    training = pytest.importorskip("benchmarks.training", exc_type=ImportError)
    monkeypatch.setattr(training, "LOSS_ERROR", -1.0)
    assert training.main(["--quick", "--device", "cpu", "--steps", "1", "--models", "swin"]) == 1
    assert "WRONG" in capsys.readouterr().out
