"""The predictor: values computed by hand, measured runs, and its command line."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from benchmarks.scale import predict as model
from benchmarks.scale.predict import Layer, Machine, Prediction

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
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


def test_one_gpu_by_hand() -> None:
    # 4 x 25600 x 25600 x 4 x 125 x 0.5 = 655.36 GFLOP at 100 TFLOP/s
    assert model.one_gpu(PLAIN, LAYER) == pytest.approx((6.5536e-3, 16.384e-3))
    x = model.predict(PLAIN, LAYER, 1)
    # 200 tiles a head x 4 heads on 100 SMs are 8 waves, and a quarter of one is lost
    assert (
        x is not None and x.forward == pytest.approx(6.5536e-3 * 8.25 / 8) and x.efficiency == pytest.approx(8 / 8.25)
    )


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


@pytest.mark.parametrize(
    ("layer", "gpus", "inner"),
    [
        (Layer(25600), 3, 2),
        (Layer(25600, heads=6, kv_heads=2), 4, 4),
        (Layer(24576, heads=6, kv_heads=6), 4, 4),
        (Layer(25600 + 128), 2, 1),
        (Layer(16 * 256, heads=32, kv_heads=32), 16, 16),
    ],
)
def test_sizes_that_do_not_divide_have_no_prediction(layer: Layer, gpus: int, inner: int) -> None:
    assert model.predict(Machine(), layer, gpus, inner) is None


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
    model.main(["--lengths", "100", "--gpus", "64"])
    assert "| 64 | 2d | does not divide |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ('{"nvlink": 3}', [], r"has ['nvlink']; it needs ['backward_tflops', 'copy_gbs', 'forward_tflops'"),
        ('{"sms": "3"}', [], "has '3' for sms; it needs a positive number"),
        ('{"sms": 0}', [], "has 0 for sms; it needs a positive number"),
        ("{", [], "Expecting property name"),
        ("{}", ["--density", "0"], "density above 0"),
        ("{}", ["--window", "-1"], "--window is -1; it needs to be at least 1, or 0 for none"),
        ("{}", ["--heads", "6"], "--heads is 6; it needs to be a multiple of each of --kv-heads, [8, 32]"),
    ],
)
def test_refused(
    content: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        model.main(["--machine", str(file), *arguments])
    assert message in capsys.readouterr().err
