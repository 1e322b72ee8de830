"""The benchmark of context parallelism, a quick run of two processes, and its predictor: by hand and as measured."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
from distributed_workers import torchrun

from benchmarks.scale import predict as model
from benchmarks.scale.predict import Layer, Machine, Prediction

ROOT = Path(__file__).resolve().parent.parent


def test_a_quick_run_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    quick = ("--quick", "--device", "cpu", "--only", "4 on 2")
    torchrun(2, "-m", "benchmarks.scale", "--out", str(tmp_path), *quick)
    content = json.loads((tmp_path / "scale.json").read_text())
    assert {row["collective"] for row in content["bandwidth"]} == {"all_gather", "all_to_all"}
    ours = [row for row in content["rows"] if row["system"].startswith("ours")]
    windowed = [row["system"] for row in ours if row["case"] == "window 64, 1024, 4 on 2"]
    assert windowed == ["ours", "ours, all keys sent"]
    assert [row["system"] for row in ours[:3]] == ["ours", "ours", "ours, heads traded"]
    assert [row["case"] for row in ours] == ["causal, 256, 4 on 2"] * 3 + [
        "window 64, 1024, 4 on 2",
        "window 64, 1024, 4 on 2",
        "causal, bias (B,Hq,L,L), 128, 4 on 2",
        "top-32, bias (B,Hq,1,L), 256, 4 on 2",
        "documents of 32, 256, 4 on 2",
        "4 padded entries, 256, 4 on 2",
        "lists of 32 keys, bias of entries, 256, 4 on 2",
        "dropout 0.1, 256, 4 on 2",
        "documents of 32, dropout 0.1, 256, 4 on 2",
    ]
    for row in ours:
        names = ["out", "dq", "dk", "dv"] + (["dbias"] if "bias" in row["case"] else [])
        assert list(row["errors"]) == names and max(row["errors"].values()) < 1e-5
        assert row["right"] and row["forward_ms"] > 0 and row["backward_ms"] > 0
        both = (row["one_forward_ms"] + row["one_backward_ms"]) / 2
        assert row["efficiency"] == pytest.approx(both / (row["forward_ms"] + row["backward_ms"]))
    # On a CPU torch's own has no kernel: a row that says so, and no end of the run.
    peers = [row for row in content["rows"] if not row["system"].startswith("ours")]
    assert [row["system"] for row in peers] == [
        f"torch, flash, {method}, {form} heads"
        for method in ("allgather", "alltoall")
        for form in ("grouped", "repeated")
    ]
    assert all("failed" in row or "errors" in row for row in peers)
    assert "ours, 2 groups" in (tmp_path / "scale.md").read_text()
    assert (tmp_path / "scale.png").stat().st_size > 0


RESULTS = ROOT / "benchmarks" / "results"
MEASURED = sorted(RESULTS.glob("*/scale.json"))


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.parent.name)
def test_long_calls_are_predicted_as_they_were_measured(file: Path) -> None:
    content = json.loads(file.read_text())
    machine, checked = model.read_machine(file), 0
    for row in content["rows"]:
        plain = row["case"].startswith("causal, ") and "bias" not in row["case"] and row["length"] >= 65536
        if not plain or not row["system"].startswith("ours") or row["head_groups"] not in (None, 1):
            continue
        inner = content["world_size"] if "traded" in row["system"] else 1
        x = model.predict(machine, Layer(row["length"], row["heads"], row["kv_heads"]), content["world_size"], inner)
        assert x is not None
        assert row["forward_ms"] + row["backward_ms"] == pytest.approx(1e3 * (x.forward + x.backward), rel=0.065), row
        checked += 1
    assert checked >= 4


# Free collectives, launches and copies, 100 SMs that are all free: the rest is computed by hand.
PLAIN = Machine(
    forward_tflops=100.0,
    backward_tflops=100.0,
    nvlink_gbs=100.0,
    network_gbs=10.0,
    copy_gbs=1e12,
    latency_us=1e-9,
    per_peer_us=1e-9,
    launch_us=1e-9,
    host_forward_us=1e-9,
    host_backward_us=1e-9,
    host_gather_us=1e-9,
    sms=100,
)
LAYER = Layer(25600, heads=4, kv_heads=2, head_dim=125, density=0.5)


def test_gather_by_hand() -> None:
    x = model.predict(PLAIN, LAYER, 2)
    # K and V are 2 x 25600 x 2 x 125 x 2 = 25.6 MB, and half of it comes over 100 GB/s; 4 waves on each GPU
    gathered, last_wave = 0.128e-3, 4.25 / 4
    forward, backward = gathered + 3.2768e-3 * last_wave, 2 * gathered + 8.192e-3 * last_wave
    assert x == pytest.approx(
        Prediction(1, forward, backward, (3.2768e-3 + 8.192e-3) / (forward + backward), 6 * 25.6e6), rel=1e-5
    )


def test_a_window_leaves_a_share_of_the_wire_by_hand() -> None:
    layer = Layer(25600, heads=4, kv_heads=2, head_dim=125, density=0.5, window=1280)
    # A rank of two has chunks 0 and 3, or 1 and 2, of 6400; it lacks the 1280 keys before one of them, of 12800.
    assert layer.share(2) == 0.1 and LAYER.share(2) == 1.0
    assert Layer(25600, window=12800).share(2) == 1.0  # 1 is not clearly less
    x, causal = model.predict(PLAIN, layer, 2), model.predict(PLAIN, LAYER, 2)
    assert x is not None and causal is not None
    assert causal.forward - x.forward == pytest.approx(0.9 * 0.128e-3, rel=1e-4)
    assert causal.backward - x.backward == pytest.approx(0.9 * 0.256e-3, rel=1e-4)
    assert x.transient == pytest.approx(6 * 25.6e6 * 0.55)
    assert model.density_of(8, 3) == pytest.approx((1 + 2 + 3 + 4 * 5) / 64) and model.density_of(8, 99) == 36 / 64


def test_documents_by_hand() -> None:
    fits, crosses = Layer(25600, document=6400), Layer(25600, document=25600)
    assert fits.share(2) == fits.share(4) == 0.0 and fits.balance(2) == fits.balance(4) == 1.0
    halves = Layer(25600, document=12800)  # whole on two ranks, shared by four
    assert halves.layout(2).intervals == (((0, 12800),), ((12800, 25600),)) and halves.share(2) == 0.0
    assert halves.layout(4).intervals[0] == ((0, 3200), (22400, 25600))
    pairs = [6400 * 6401 / 2 - 3200 * 3201 / 2, 12800 * 12801 / 2 - 9600 * 9601 / 2]
    assert (
        halves._pairs(6400) - halves._pairs(3200) == pairs[0] and halves._pairs(12800) - halves._pairs(9600) == pairs[1]
    )
    assert crosses.share(2) == 1.0 and crosses.balance(2) == pytest.approx(1.0, abs=1e-3)
    uneven = Layer(25600, document=19200)  # rows 0 to 19200, and 19200 to 25600 begin anew
    own = [sum(range(1, 6401)) + sum(range(1, 6401)), sum(range(6401, 19201))]
    assert uneven.balance(2) == pytest.approx(max(own) * 2 / sum(own))
    layer = Layer(25600, heads=4, kv_heads=2, head_dim=125, density=0.5, document=19200)
    plain, x = model.predict(PLAIN, LAYER, 2), model.predict(PLAIN, layer, 2)
    assert x is not None and plain is not None
    longer = 3.2768e-3 * 4.25 / 4 * (uneven.balance(2) - 1)
    assert x.forward - plain.forward == pytest.approx(longer - (1 - layer.share(2)) * 0.128e-3, rel=1e-4)


def test_lists_by_hand() -> None:
    """They take time at rates of their own, gather every key, and trade no heads over one dim."""
    machine = model.replace(PLAIN, lists_forward_tflops=50.0, lists_backward_tflops=25.0)
    layer = Layer(25600, heads=4, kv_heads=2, head_dim=125, density=0.5, listed=100)
    one, plain = model.one_gpu(machine, layer), model.one_gpu(machine, LAYER)
    assert one == pytest.approx((plain[0] * 2, plain[1] * 4)) and layer.share(2) == 1.0
    assert model.best(machine, layer, 2, "ulysses") is None and model.best(machine, layer, 2, "gather") is not None
    assert model.density_of(8, 3 - 1) == (1 + 2 + 3 * 6) / 64


def test_padded_entries_by_hand() -> None:
    """Rank 0 of two has the first and the last chunk of entries of 12800 and 25600 positions."""
    layer = Layer(25600, heads=4, kv_heads=2, head_dim=125, batch=2, density=0.5, shortest=12800)
    assert layer.lengths == (12800, 25600) and layer.share(2) == 1.0 and layer.calls(2) == 3
    before = [n * (n + 1) / 2 for n in (0, 6400, 12800, 19200, 25600)]
    outer, inner = 2 * before[1] + before[4] - before[3], 2 * (before[2] - before[1]) + before[3] - before[2]
    assert layer.balance(2) == pytest.approx(max(outer, inner) * 2 / (outer + inner))
    assert layer.causal_density == pytest.approx((before[2] + before[4]) / (2 * 25600**2))
    full = model.replace(layer, shortest=0)
    plain, x = model.predict(PLAIN, full, 2), model.predict(PLAIN, layer, 2)
    assert x is not None and plain is not None
    longer = 2 * 3.2768e-3 * 8.25 / 8 * (layer.balance(2) - 1)
    assert x.forward - plain.forward == pytest.approx(longer, rel=1e-4)


def test_many_calls_wait_for_the_host() -> None:
    layer = Layer(25600, heads=4, kv_heads=2, head_dim=125, density=0.001, document=64, dropout=True)
    machine = model.replace(PLAIN, host_call_us=1000.0)
    assert layer.calls(2) == 200 and model.replace(layer, dropout=False).calls(2) == 1
    x = model.predict(machine, layer, 2)
    assert x is not None and x.forward == pytest.approx(0.2, rel=1e-3)
    assert x.backward == pytest.approx(0.2, rel=1e-3)


def test_dropout_by_hand() -> None:
    machine = model.replace(PLAIN, dropout_forward_tflops=50.0, dropout_backward_tflops=25.0)
    one, plain = (model.one_gpu(machine, model.replace(LAYER, dropout=dropout)) for dropout in (True, False))
    assert one == pytest.approx((plain[0] * 2, plain[1] * 4))


def test_examples() -> None:
    done = doctest.testmod(model)
    assert done.attempted and not done.failed


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "scale.json"
    measured.write_text(json.dumps({"machine": {"forward_tflops": 361.5, "backward_tflops": 324}, "rows": []}))
    model.main(["--lengths", "32768", "--gpus", "2", "--kv-heads", "8", "--machine", str(measured), "--sms", "100"])
    said, _, table = capsys.readouterr().out.partition("\n\n")
    assert "forward_tflops 361.5, backward_tflops 324, nvlink_gbs 300" in said and "sms 100" in said
    machine = Machine(forward_tflops=361.5, backward_tflops=324, sms=100)
    assert table.strip() == model.table(machine, [Layer(32768)], [2])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    assert [row[3] for row in rows[2:]] == ["gather", "ulysses"]
    expected = model.best(machine, Layer(32768), 2, "gather")
    assert expected is not None and rows[2][5] == f"{expected.forward * 1e3:.2f}"
    model.main(["--lengths", "32768", "--gpus", "2", "--kv-heads", "8", "--window", "1024"])
    windowed = Layer(32768, window=1024, density=model.density_of(32768, 1024))
    assert capsys.readouterr().out.partition("\n\n")[2].strip() == model.table(Machine(), [windowed], [2])
    for name, value, density in (("document", 1024, 1025 / 65536), ("listed", 64, model.density_of(32768, 63))):
        model.main(["--lengths", "32768", "--gpus", "2", "--kv-heads", "8", f"--{name}", str(value)])
        own = Layer(32768, density=density, **{name: value})
        assert capsys.readouterr().out.partition("\n\n")[2].strip() == model.table(Machine(), [own], [2])
    for wrong in (["--document", "-1"], ["--listed", "8", "--window", "8"]):
        with pytest.raises(SystemExit):
            model.main(wrong)
    model.main(["--lengths", "100", "--gpus", "64"])
    assert "| 64 | 2d | does not divide |" in capsys.readouterr().out
