"""The predictor: hand-computed values, the figures of the design's table, and its command line."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from benchmarks.scale import predict as model
from benchmarks.scale.predict import Layer, Machine, Prediction, Strategy

# (length, GPUs, strategy, key-value heads, partial rows): inner, groups, segments, forward ms, backward ms, %, GB; the
# first model of this kind, written apart from this one, printed them.
FIGURES: dict[tuple[int, int, Strategy, int, bool], tuple[float, ...]] = {
    (32768, 2, "gather", 8, False): (1, 2, 1, 6.44, 17.74, 95.3, 0.40),
    (32768, 2, "ulysses", 8, False): (2, 1, 1, 6.85, 18.75, 90.0, 0.17),
    (32768, 2, "gather", 32, False): (1, 4, 1, 6.92, 18.83, 89.5, 0.81),
    (65536, 2, "gather", 8, False): (1, 2, 1, 24.97, 69.31, 97.8, 0.81),
    (131072, 2, "gather", 32, False): (1, 4, 1, 100.30, 278.45, 97.4, 3.22),
    (32768, 8, "gather", 8, False): (1, 2, 1, 1.98, 5.21, 80.2, 0.40),
    (65536, 8, "ulysses", 32, False): (8, 1, 1, 7.17, 19.30, 87.1, 0.23),
    (2**20, 64, "2d", 8, False): (8, 1, 1, 208.91, 573.25, 94.3, 3.51),
    (2**20, 64, "2d", 32, True): (8, 1, 16, 207.87, 565.03, 95.4, 1.28),
    (2**20, 256, "2d", 8, True): (8, 1, 16, 53.59, 145.12, 92.8, 0.27),
    (2**20, 512, "2d", 32, False): (8, 4, 1, 59.04, 124.19, 50.3, 3.28),
    (2**20, 1024, "2d", 32, True): (8, 1, 8, 54.53, 110.38, 28.0, 1.64),
    (2**20, 256, "gather", 8, False): (1, 8, 1, 113.06, 232.26, 53.4, 3.22),
    (2**20, 1024, "gather", 8, False): (1, 4, 1, 113.54, 230.94, 13.4, 6.44),
}


@pytest.mark.parametrize("case", FIGURES, ids=str)
def test_figures_of_the_design(case: tuple[int, int, Strategy, int, bool]) -> None:
    length, gpus, strategy, kv_heads, partial_rows = case
    x = model.best(Machine(), Layer(length, kv_heads=kv_heads), gpus, strategy, partial_rows)
    assert x is not None
    values = (x.inner, x.groups, x.segments, x.forward * 1e3, x.backward * 1e3, x.efficiency * 100, x.transient / 1e9)
    for value, figure, digits in zip(values, FIGURES[case], (0, 0, 0, 2, 2, 1, 2), strict=True):
        assert round(value, digits) == figure


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
    sms=100,
    comm_sms=1,
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
        Prediction(1, 1, 1, forward, backward, (3.2768e-3 + 8.192e-3) / (forward + backward), 6 * 25.6e6), rel=1e-5
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
    ("layer", "gpus", "way"),
    [
        (Layer(25600), 3, (2, 1, 1)),
        (Layer(25600, heads=6, kv_heads=2), 4, (4, 1, 1)),
        (Layer(24576, heads=6, kv_heads=6), 4, (4, 1, 1)),
        (Layer(25600 + 128), 2, (1, 1, 1)),
        (Layer(25600), 2, (1, 3, 1)),
        (Layer(16 * 256, heads=32, kv_heads=32), 16, (16, 1, 1)),
    ],
)
def test_what_does_not_divide_is_no_prediction(layer: Layer, gpus: int, way: tuple[int, int, int]) -> None:
    assert model.predict(Machine(), layer, gpus, *way) is None


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
    assert expected is not None and rows[2][7] == f"{expected.forward * 1e3:.2f}"
    model.main(["--lengths", "32768", "--gpus", "2", "--kv-heads", "8", "--window", "1024"])
    windowed = Layer(32768, window=1024, density=model.density_of(32768, 1024))
    assert capsys.readouterr().out.partition("\n\n")[2].strip() == model.table(Machine(), [windowed], [2])
    model.main(["--lengths", "100", "--gpus", "64"])
    assert "| 64 | 2d | does not divide |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ('{"nvlink": 3}', [], r"has ['nvlink']; it needs ['backward_tflops', 'comm_sms', 'copy_gbs'"),
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
