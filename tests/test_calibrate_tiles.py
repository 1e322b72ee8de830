"""`calibrate --tiles` and `--share`, and the tiles that a profile prefers, with times that nobody measured."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import GPU
from torch import Tensor

from flash_dmattn.__main__ import main
from flash_dmattn.dispatch import config, profiles
from flash_dmattn.dispatch.profiles import Figures, ProfileError, dump, parse, read, write
from flash_dmattn.tools import calibrate as rows_tool
from flash_dmattn.tools import calibrate_tiles as tool
from flash_dmattn.tools.calibrate_tiles import CLASSES, TileClass, Verdicts
from flash_dmattn.triton_kernels import preferred_tiles
from flash_dmattn.triton_kernels.gpus import GPUS
from flash_dmattn.triton_kernels.preferred_tiles import Sizes, is_usable, preferred

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

pytestmark = pytest.mark.usefixtures("caches")
CPU = torch.device("cpu")
NVIDIA = [gpu.arch for gpu in GPUS if gpu.arch.startswith("sm_")]
PLAIN = "forward|128|band|none"
SCORES = ("B", "Hq", "Lq", "Lk")
OWN, OTHER, THIRD = (64, 64, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2)


def right(*sizes: Sizes) -> Verdicts:
    return dict.fromkeys(sizes, "")


def instruments(
    times: dict[Sizes, float],
    verdicts: Callable[[TileClass], Verdicts] = lambda each: right(OWN, OTHER, THIRD),
    arch: str = "sm_80",
    seconds: float = 1.0,
    reached: int = len(CLASSES),
    seen: list[str] | None = None,
) -> tool.Instruments:
    """Instruments that check only the first classes, and whose clock goes on with each measurement."""
    clock = SimpleNamespace(now=100.0)

    def check(classes: Sequence[TileClass], budget: float) -> Iterator[tuple[TileClass, Verdicts]]:
        for each in list(classes)[:reached]:
            yield each, verdicts(each)

    def measure(each: TileClass, sizes: Sizes, budget: float) -> float:
        clock.now += seconds
        if seen is not None:
            seen.append(each.name)
        return times[sizes]

    return tool.Instruments(check, measure, lambda: clock.now, GPU, arch, "570.1")


def calibrate(made: tool.Instruments, seconds: float = 1000) -> tuple[int, str]:
    stream = io.StringIO()
    return tool.calibrate(made, seconds, stream, io.StringIO()), stream.getvalue()


# The run


def test_the_fastest_tile_of_each_class_is_put_into_the_profile_and_in_force(caches: Path) -> None:
    seen: list[str] = []
    assert preferred("forward", 128, "sm_80", False) is None
    status, printed = calibrate(instruments({OWN: 1.0, OTHER: 0.9, THIRD: 2.0}, seen=seen))
    assert status == 0 and list(dict.fromkeys(seen)) == list(CLASSES)
    profile = read(caches / "NVIDIA-A100-SXM4-80GB.json")
    assert profile.tiles == dict.fromkeys(CLASSES, OTHER) and profile.rows == {}
    assert preferred("forward", 128, "sm_80", False) == OTHER, "written, and read at once"
    lines = [line.split() for line in printed.splitlines()]
    assert [PLAIN, "64", "x", "64,", "8,", "2", "1.000"] in lines
    assert ["64", "x", "32,", "4,", "2", "0.900", "taken"] in lines
    assert "not from run to run" in printed


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ({OWN: 1.0, OTHER: 0.99, THIRD: 1.0}, OWN),  # no more than chance
        ({OWN: 1.0, OTHER: 0.97, THIRD: 0.96}, THIRD),
        ({OWN: 1.0, OTHER: "wrong: 1e-1 off", THIRD: 2.0}, OWN),
        ({OWN: 1.0, OTHER: "OutOfResources: shared memory", THIRD: 0.5}, THIRD),
    ],
)
def test_which_tile_is_taken(times: dict[Sizes, Any], taken: Sizes) -> None:
    assert tool.fastest(times) == taken
    assert [line.split()[-1] for line in tool.table({PLAIN: times}).splitlines()].count("taken") == 1


def test_a_tile_that_is_wrong_is_not_timed_and_its_fault_is_printed(caches: Path) -> None:
    verdicts = {OWN: "", OTHER: "wrong: 3.0e-01 off, with a limit of 4.0e-03", THIRD: ""}
    status, printed = calibrate(instruments({OWN: 1.0, THIRD: 0.5}, lambda each: verdicts))
    assert status == 0 and verdicts[OTHER] in printed
    assert set(read(profiles.path_of(GPU)).tiles.values()) == {THIRD}


def test_a_class_whose_own_tile_failed_keeps_it() -> None:
    def verdicts(each: TileClass) -> Verdicts:
        return {OWN: "RuntimeError: no"} if each.name == PLAIN else right(OWN)

    assert calibrate(instruments({OWN: 1.0}, verdicts))[0] == 0
    assert read(profiles.path_of(GPU)).tiles == dict.fromkeys(CLASSES.keys() - {PLAIN}, OWN)


def test_a_second_run_goes_on_where_the_first_one_ended() -> None:
    times = {OWN: 1.0, OTHER: 0.9, THIRD: 2.0}
    assert "20 classes were not reached in 1000 s" in calibrate(instruments(times, reached=len(CLASSES) - 20))[1]
    seen: list[str] = []
    calibrate(instruments(times, reached=5, seen=seen))
    names = list(CLASSES)
    assert list(dict.fromkeys(seen)) == names[-20:-15]
    assert list(read(profiles.path_of(GPU)).tiles) == names[:-15]
    for times in ({OWN: 1.0, OTHER: 2.0, THIRD: 2.0},) * 2:  # the rest, and then all of them anew
        calibrate(instruments(times))
    assert read(profiles.path_of(GPU)).tiles == dict.fromkeys(names, OWN)


def test_timing_ends_in_time_and_a_run_that_measures_nothing_writes_nothing(
    caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(instruments({}, reached=0))[0] == 1
    assert "no class of tiles was checked within 1000 s" in capsys.readouterr().err
    assert not caches.exists()
    calibrate(instruments({OWN: 1.0, OTHER: 1.0, THIRD: 1.0}, seconds=10), seconds=65)
    assert list(read(profiles.path_of(GPU)).tiles) == list(CLASSES)[:3]


def test_rows_and_tiles_are_measured_apart_and_kept_together() -> None:
    profile = rows_tool.new_profile(GPU, "sm_80", "1")._replace(rows={"long": {"eager": Figures(1.0)}})
    write(profile, profiles.path_of(GPU))
    calibrate(instruments({OWN: 1.0, OTHER: 0.9, THIRD: 2.0}))
    assert read(profiles.path_of(GPU)).rows == profile.rows
    known = rows_tool.former(GPU, "sm_80")
    assert known is not None and known.tiles
    for other in (("NVIDIA A10", "sm_86"), (GPU, "sm_86")):
        assert rows_tool.former(*other) is None
    write(known._replace(torch="1.0"), profiles.path_of(GPU))
    assert rows_tool.former(GPU, "sm_80") is None


# Checks


def results_of(tile: Sizes | None, exact: Tensor) -> Tensor:
    """Round a result, with an error of 2e-3, as a kernel does; THIRD leaves out a tile of rows."""
    rounded = exact.to(torch.bfloat16)
    return rounded.index_fill(1, torch.arange(64), 0) if tile == THIRD else rounded


def test_results_are_held_against_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, each = torch.randn(2, 512, 4, 16, generator=torch.Generator().manual_seed(0)), CLASSES[PLAIN]

    def make_pass(each: TileClass, call: Any, backend: str) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            tile = preferred(each.kernel, each.row, "sm_80", each.has_bias)
            if tile == (32, 32, 4, 1):
                raise torch.OutOfMemoryError("no\nroom")
            return (exact if backend == "eager" else results_of(tile, exact),)

        return run

    monkeypatch.setattr(tool, "make_pass", make_pass)
    monkeypatch.setattr(tool, "_is_broken", lambda device: False)
    actual = tool.check(each, [OWN, (32, 32, 4, 1), THIRD, OTHER], CPU, shrink=64)
    assert actual[OWN] == actual[OTHER] == ""
    assert actual[THIRD].startswith("wrong: 3.") and "with a limit of 2." in actual[THIRD]
    assert actual[32, 32, 4, 1] == "OutOfMemoryError: no room"
    assert preferred("forward", 128, "sm_80", False) is None, "nothing is preferred any longer"
    assert tool.check(each, [(32, 32, 4, 1), OWN], CPU, shrink=64) == {(32, 32, 4, 1): "OutOfMemoryError: no room"}
    monkeypatch.setattr(tool, "_is_broken", lambda device: True)
    assert list(tool.check(each, [OWN, (32, 32, 4, 1), OTHER], CPU, shrink=64)) == [OWN, (32, 32, 4, 1)]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_timed_by_the_pass_that_runs_its_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    each, times = CLASSES[name], []
    call = tool.make_call(each, CPU, shrink=128)
    assert [x for x in call if isinstance(call[x], Tensor) and call[x].requires_grad] == list(each.needed)
    assert call["q"].dtype == torch.bfloat16 and ("bias" in call) is each.has_bias
    run = tool.make_pass(each, call, "eager")
    shapes = [x.shape for x in run()]
    assert shapes == ([call[x].shape for x in each.needed] or [call["q"].shape, (2, 8, call["q"].shape[1])])

    def timer(run: Callable[[], Any], seconds: float) -> float:
        times.append((len(run()), seconds))
        return 0.25

    original = tool.make_pass
    monkeypatch.setattr(tool, "make_pass", lambda each, call, backend: original(each, call, "eager"))
    passes = tool.Passes(CPU, timer, shrink=128)
    assert passes(each, OWN, 0.1) == passes(each, OTHER, 0.1) == 0.25
    assert times == [(len(shapes), 0.1)] * 2


@needs_triton
@pytest.mark.parametrize("name", CLASSES)
def test_the_pass_of_a_class_launches_its_kernel_on_the_preferred_tile(name: str) -> None:
    from unittest import mock

    from compiled_triton import Variant

    from flash_dmattn.problem import NeedsGrad
    from flash_dmattn.problem.inputs import Inputs, Saved
    from flash_dmattn.triton_kernels.kernel_launch import Launch
    from flash_dmattn.triton_kernels.launch import backward_plan, forward_plan

    each, launched = CLASSES[name], {}
    call = tool.make_call(each, CPU, shrink=1024)
    shape = (
        tuple(name if call["bias"].shape[i] > 1 else "1" for i, name in enumerate(SCORES)) if each.has_bias else None
    )
    variant = Variant(each.row, batch=2, num_heads=8, num_heads_k=8, bias=shape, is_causal=not each.has_bias)

    def record(launch: Launch, *tensors: Tensor | None) -> None:
        names = launch.kernel.arg_names[-len(launch.rest) :]
        values = dict(zip(names, launch.rest, strict=True))
        launched[launch.kernel.__name__] = (values.get("BLOCK_M"), values.get("BLOCK_N"), *launch.options.values())

    made = variant.call("sm_80")
    x = Inputs(made.q, made.k, made.v, made.mask, made.bias)
    out, lse = torch.empty_like(x.q), torch.empty(2, 8, x.q.shape[1], device="meta")
    needs = NeedsGrad(*(x in each.needed for x in ("q", "k", "v", "bias")), False)
    with tool.preferring(name, OTHER), mock.patch.object(Launch, "__call__", record):
        if each.needed:
            backward_plan(made, out, None, needs)(Saved(x, out, lse), out, None)
        else:
            forward_plan(made)(x, out, lse)
    kernel = "_forward_kernel" if each.kernel == "forward" else f"backward_{each.kernel}_kernel"
    (tile,) = (tile for name, tile in launched.items() if name.strip("_") == kernel.strip("_"))
    assert tile == OTHER


# Which tiles are preferred


@needs_triton
@pytest.mark.parametrize("arch", NVIDIA)
def test_candidates_are_at_most_three_usable_tiles_with_that_of_the_table_first(arch: str) -> None:
    from flash_dmattn.triton_kernels.tile_table import candidates

    for name, each in CLASSES.items():
        tiles = candidates(each.kernel, each.row, arch, each.has_bias)
        assert 2 <= len(set(tiles)) == len(tiles) <= 3
        assert all(is_usable(name, tile[:4], arch) for tile in tiles), name
        with tool.preferring(name, tiles[-1][:4]):
            assert candidates(each.kernel, each.row, arch, each.has_bias) == tiles


UNUSABLE: dict[str, Sizes] = {
    "no power of two": (64, 48, 4, 2),
    "few queries": (8, 64, 4, 2),
    "few keys, which calls of 32 keys need in one tile": (64, 16, 4, 2),
    "many queries": (512, 64, 4, 2),
    "warps": (64, 64, 3, 2),
    "no stage": (64, 64, 4, 0),
    "shared memory": (64, 256, 8, 4),
}


@needs_triton
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_tile_that_no_kernel_can_take_is_ignored(name: str) -> None:
    assert not is_usable(PLAIN, UNUSABLE[name], "sm_86") and is_usable(PLAIN, OTHER, "sm_86")
    with tool.preferring(PLAIN, UNUSABLE[name]):
        assert preferred("forward", 128, "sm_86", False) is None


@needs_triton
def test_a_preferred_tile_serves_the_calls_that_were_timed_alone() -> None:
    from flash_dmattn.triton_kernels.bias_forms import KEY_BIAS, NO_BIAS, TILE_BIAS
    from flash_dmattn.triton_kernels.tile_ops import BAND, KEYS, TILES
    from flash_dmattn.triton_kernels.tile_table import tile_of

    chosen = (32, 64, 4, 3)

    def takes(mask: Any = BAND, bias: Any = NO_BIAS, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> bool:
        call = {"kernel": "forward", "block_d": 128, "arch": "sm_80", "bias_tma": False, **changes}
        return tile_of(dtype=dtype, mask=mask.value, bias=bias.value, **call)[:4] == chosen

    with tool.preferring(PLAIN, chosen):
        assert takes() and takes(dtype=torch.float16) and takes(block_d=128)
        assert not any(
            [
                *(takes(mask=mask) for mask in (KEYS, TILES)),
                *(takes(bias=bias) for bias in (KEY_BIAS, TILE_BIAS)),
                *(takes(block_d=block_d) for block_d in (64, 256)),
                takes(kernel="keys"),
                takes(dtype=torch.float32),
                takes(few_rows="narrow"),
            ]
        )
    with tool.preferring("forward|128|band|score", chosen):
        assert takes(bias=TILE_BIAS) and not takes()
        # On sm_90 a bias was timed that TMA loads.
        assert takes(bias=TILE_BIAS, arch="sm_90", bias_tma=True) and not takes(bias=TILE_BIAS, arch="sm_90")
    assert not takes()


@needs_triton
def test_plans_are_made_anew_when_other_tiles_are_preferred() -> None:
    from flash_dmattn.triton_kernels.launch import plans

    for change in (profiles.forget, lambda: preferred_tiles.prefer(profiles.tiles_in_force)):
        plans.put("a call", lambda: None)
        change()
        assert "a call" not in plans


# Profiles


def test_tiles_are_read_as_they_were_written() -> None:
    profile = rows_tool.new_profile(GPU, "sm_80", "1")
    assert parse(dump(profile._replace(tiles={PLAIN: OWN}))).tiles == {PLAIN: OWN}
    fields = json.loads(dump(profile))
    del fields["tiles"]
    assert parse(json.dumps(fields)) == profile, "a profile without tiles is none the worse"
    for damaged in ([64, 64, 8], [64, 64, 8, 2.0], [64, 64, 8, True], "64x64", None):
        with pytest.raises(ProfileError, match=r"is damaged: tile 'forward.*it needs to be four integers"):
            parse(json.dumps({**fields, "tiles": {PLAIN: damaged}}))


def test_tiles_of_other_versions_are_ignored() -> None:
    profile = rows_tool.new_profile(GPU, "sm_80", "1")._replace(tiles={PLAIN: OTHER})
    for changes, wanted in (({}, OTHER), ({"triton": "1.0"}, None), ({"torch": "1.0"}, None), ({"library": "0"}, None)):
        write(profile._replace(**changes), profiles.path_of(GPU))
        profiles.forget()
        assert preferred("forward", 128, "sm_80", False) == wanted
    assert preferred("forward", 512, "sm_80", False) is None and preferred("forward", 64, "cpu", False) is None


# The command line


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_tool, "device_of", lambda index: (torch.device("cuda", index), ""))
    monkeypatch.setattr(rows_tool, "device_arch", lambda device: "sm_80")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)


def test_a_shared_profile_has_no_paths_and_is_read_by_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on_a_gpu(monkeypatch)
    file = tmp_path / "a100.json"
    assert main(["calibrate", "--share", str(file)]) == 1
    assert "this GPU has no profile of these versions to share" in capsys.readouterr().err
    errors = {"flex": Figures(error="OSError: no file '/home/joe/.cache/x.py' (C:\\Users\\joe\\y)")}
    profile = rows_tool.new_profile(GPU, "sm_80", "1")
    profile = profile._replace(
        rows={"long": errors}, wrong={"triton": "it failed: /home/joe/a.cu"}, tiles={PLAIN: OTHER}
    )
    write(profile, profiles.path_of(GPU))
    assert main(["calibrate", "--share", str(file)]) == 0
    assert f"FLASH_DMATTN_PROFILE={file} reads it" in capsys.readouterr().out
    assert "joe" not in file.read_text() and file.stat().st_mode & 0o777 == 0o644
    assert read(file).rows["long"]["flex"].error == "OSError: no file '(a path)' ((a path))"
    profiles.path_of(GPU).unlink()
    monkeypatch.setattr(config.process, "profile", str(file))
    profiles.forget()
    assert preferred("forward", 128, "sm_80", False) == OTHER
    monkeypatch.setattr(config.process, "profile", str(tmp_path / "none" / ".." / "b.json"))
    assert main(["calibrate", "--share", str(tmp_path)]) == 1


def test_arguments_reach_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr(tool, "run", lambda index, seconds: seen.append((index, seconds)) or 0)
    assert main(["calibrate", "--tiles", "--device", "1", "--seconds", "30"]) == 0
    assert seen == [(1, 30)]
    with pytest.raises(SystemExit) as leaving:
        main(["calibrate", "--tiles", "--share", "x"])
    assert leaving.value.code == 2
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert main(["calibrate", "--tiles"]) == 1
        assert "it times an NVIDIA GPU, and torch sees none" in capsys.readouterr().err
