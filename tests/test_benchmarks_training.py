"""The benchmark of training steps on a CPU: every row that is asked for, what ran, and losses that differ."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks import training


def rows(printed: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize(
    ("model", "match", "implementations"),
    [
        ("llama", "packed", ["sdpa", "dmattn"]),
        ("t5", "8 of 512 to 2048", ["sdpa", "dmattn", "eager"]),
        ("swin", "2 images", ["sdpa", "dmattn"]),
    ],
)
def test_a_row_for_each_implementation(capsys, model, match, implementations):
    given = ["--quick", "--device", "cpu", "--steps", "1", "--models", model, "--match", match]
    assert training.main(given) == 0
    found = rows(capsys.readouterr().out)
    assert [row[2] for row in found] == implementations
    ours = found[1]
    assert ours[7] == "eager/eager", "the library did not run in the model"
    assert all(row[7] == "-" for row in found if row[2] != "dmattn")
    assert len({row[6][:6] for row in found}) == 1, "implementations disagree on the loss"


def test_a_loss_that_differs_is_told(capsys, monkeypatch):
    monkeypatch.setattr(training, "LOSS_ERROR", -1.0)
    assert training.main(["--quick", "--device", "cpu", "--steps", "1", "--models", "swin"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_lengths_of_a_padded_batch():
    assert training.spread(512, 2048, 4) == [2048, 1536, 1024, 512]
    inputs = training.padded([3, 1], training.torch.device("cpu"))
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs["labels"][1, 1:].tolist() == [-100, -100]


def test_a_cpu_needs_quick():
    with pytest.raises(SystemExit):
        training.main(["--device", "cpu"])
