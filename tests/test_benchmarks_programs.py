"""Programs of the benchmarks on a CPU, and how they time and weigh calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_systems import CPU
from torch import Tensor

import flash_dmattn
from benchmarks import builds, cli, long_context, packed, positions, proteins, serving, statistics, steps, timing
from benchmarks.floors import Rates
from benchmarks.peak_memory import MIB, peaks
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


@pytest.mark.parametrize("adapter", ["openpi", "deberta"])
def test_training_steps_of_other_projects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    """Both ways train the same model, ours on this library; a model whose package is missing is named."""
    pytest.importorskip("benchmarks.training", exc_type=ImportError)
    model = next(model for model in steps.MODELS if model.adapter == adapter)
    monkeypatch.setattr(steps, "MODELS", (model, model._replace(name="absent", packages=("absent_in_this_test",))))
    arguments = ["steps", "--quick", "--device", "cpu", "--steps", "3"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    ((name, *_, loss, difference, waits, _, backends, slower),) = rows_of(printed)
    assert name == model.name and backends != "none" and set(waits) <= set("0123456789, ")
    assert float(difference.removesuffix(" in 3")) < 1e-5 and "nan" not in loss
    assert slower.startswith(("sdpa", "eager")) or model.peers == ("eager",)
    assert "left out: absent: absent_in_this_test cannot be imported" in printed
    monkeypatch.setattr(steps, "LOSS_ERROR", -1.0)
    assert cli.main([*arguments, "--only", model.name]) == 1 and " WRONG" in capsys.readouterr().out


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


def test_repetitions_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    now = [0.0]

    def run(name: str, seconds: float) -> None:
        log.append(name)
        now[0] += seconds

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    quick, slow = (timing.Runner(partial(run, name, s)) for name, s in (("quick", 0.001), ("slow", 0.004)))
    timing.measure([quick, slow], CPU, rep_ms=13.0, least=3, most=9)
    timed = "".join(name[0] for name in log[8:])  # after four runs of each that see how long it takes
    assert (timed.count("q"), timed.count("s")) == (9, 3) == (len(quick.ms), len(slow.ms))
    assert "ss" not in timed and "qqqq" not in timed  # in turns, as far as their numbers allow
    assert quick.summary()["how"] == "wall clock"
    log.clear()
    endless, long = (timing.Runner(partial(run, name, s)) for name, s in (("endless", 15.0), ("long", 0.4)))
    timing.measure([endless, long], CPU, rep_ms=13.0, least=5, most=9)
    assert log.count("endless") == 2 and endless.summary()["ms"] == pytest.approx(15e3), "the second run is its time"
    assert (log.count("long"), len(long.ms)) == (2 + 2, 2), "no more runs than a second has room for"
    assert quick.summary()["ms"] == pytest.approx(1.0) and slow.summary()["ms"] == pytest.approx(4.0)


def test_peaks_count_what_is_held_at_once() -> None:
    """A forward that keeps 4 MiB, and 8 MiB for a while; a backward that needs 2 MiB in addition to the gradient."""
    x = torch.zeros(MIB, requires_grad=True)  # 4 MiB

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            torch.empty(2 * MIB).sum()
            return x * 2

        @staticmethod
        def backward(ctx, dout):  # type: ignore[no-untyped-def]
            torch.empty(MIB // 2).sum()
            return dout * 2

    measured = peaks(lambda: Doubled.apply(x), [x], torch.ones_like(x))
    assert measured.forward == pytest.approx(8.0, abs=0.1)
    assert measured.backward == pytest.approx(4.0, abs=0.1)
    assert measured.both == pytest.approx(8.0, abs=0.1)
    assert peaks(lambda: x * 2, [x], torch.ones_like(x), backward=False) == (pytest.approx(4.0, abs=0.1), None, None)


def test_protein_modules_train_alike_in_fp32(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--quick", "--device", "cpu", "--steps", "8"]
    assert proteins.main(arguments) == 0
    cells = rows_of(capsys.readouterr().out)
    assert [(row[0], row[1]) for row in cells] == [(name, way) for name in proteins.MODULES for way in proteins.WAYS]
    assert all(row[7] != "-" for row in cells if row[1] == "ours"), "the library did not run"
    ours = proteins.ours
    monkeypatch.setitem(proteins.WAYS, "ours", lambda q, *others: 1.01 * ours(q, *others))
    assert proteins.main([*arguments, "--modules", "boltz tokens"]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert torch.get_float32_matmul_precision() == "highest"


def test_numbers_about_probabilities_are_compared_with_fp64(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--quick", "--device", "cpu", "--only"]
    for word, lines in (("passes 64 True", 6), ("sums (1, 512, 16", 4), ("teacher", 2)):
        assert statistics.main([*arguments, word]) == 0
        assert capsys.readouterr().out.count("\n") == 3 + lines
    exact = statistics.statistics.list_sums
    monkeypatch.setattr(statistics.statistics, "list_sums", lambda *x: 1.01 * exact(*x))
    assert statistics.main([*arguments, "teacher"]) == 1


def test_positions_are_compared_with_fp64(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--quick", "--device", "cpu", "--calls", "deberta v2", "conformer L"]
    assert positions.main(arguments) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| deberta v2", "| conformer L"))]
    assert len(rows) == 2 * (len(positions.WAYS) + 3)
    monkeypatch.setattr(positions, "ours", lambda c: 1.05 * positions.tensor(c))
    assert positions.main([*arguments[:3], "--calls", "conformer L"]) == 1
