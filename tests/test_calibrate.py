"""`python -m flash_dmattn calibrate`: checks, rows, table, profile and progress, with figures that nobody measured."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import GPU
from out_of_tree import replaced
from torch import Tensor

import flash_dmattn
from flash_dmattn.__main__ import main
from flash_dmattn.dispatch import config, profiles
from flash_dmattn.dispatch.profiles import ROWS, Figures, Row, read, rows_of
from flash_dmattn.explanation import explain_problem
from flash_dmattn.gradients import empty_outputs
from flash_dmattn.problem.inputs import Inputs
from flash_dmattn.tools import calibrate as tool
from flash_dmattn.tools import info
from flash_dmattn.tools.verify import CASES, Outcome

pytestmark = pytest.mark.usefixtures("caches")
CPU = torch.device("cpu")
NO = Figures(error="it refuses: no")
LONG_MS = {"eager": Figures(9.0, 20.0), "triton": Figures(1.0, 2.0), "flex": Figures(1.5, 3.0), "sdpa": NO}


class Clock:
    """Seconds that pass when something is measured."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def outcomes(backend: str = "triton", cases: int = len(CASES), **changes: Any) -> list[Outcome]:
    """Checks that passed, the last of them with changes."""
    made = [
        Outcome(backend, "cuda", "bfloat16", case.name, {"out": 1e-3}, {"out": 2e-3}) for case in list(CASES)[:cases]
    ]
    if changes:
        last = made[-1]
        made[-1] = Outcome(**{**{name: getattr(last, name) for name in last.__dataclass_fields__}, **changes})
    return made


def instruments(
    clock: Clock | None = None,
    seconds: float = 1.0,
    checks: list[Outcome] | None = None,
    figures: Callable[[Row, str], Figures] = lambda row, backend: LONG_MS[backend],
    seen: list[tuple[str, str]] | None = None,
    arch: str = "sm_80",
) -> tool.Instruments:
    clock = clock or Clock()

    def measure(row: Row, backend: str, budget: float) -> Figures:
        assert 0 < budget <= tool.ROW_SECONDS
        clock.now += seconds
        if seen is not None:
            seen.append((row.name, backend))
        return figures(row, backend)

    def check(has_time: Callable[[], bool]) -> list[Outcome]:
        assert has_time()
        return outcomes() if checks is None else checks

    return tool.Instruments(check, measure, clock, GPU, arch, "570.1")


def calibrate(made: tool.Instruments, seconds: float = 120) -> tuple[int, str, str]:
    stream, bar = io.StringIO(), io.StringIO()
    return tool.calibrate(made, seconds, stream, bar), stream.getvalue(), bar.getvalue()


# The run


def test_every_backend_is_measured_in_every_row_and_the_profile_is_in_force(caches: Path) -> None:
    seen: list[tuple[str, str]] = []
    assert explain_problem((2, 4096, 16, 64), device="sm_80").forward == "sdpa"
    status, printed, bar = calibrate(instruments(seen=seen))
    assert status == 0
    assert seen == [(row.name, backend) for row in ROWS for backend in ("eager", "sdpa", "triton", "flex")]
    path = caches / "NVIDIA-A100-SXM4-80GB.json"
    profile = read(path)
    assert (profile.gpu, profile.arch, profile.driver, profile.wrong) == (GPU, "sm_80", "570.1", {})
    assert {name: getattr(profile, name) for name in ("library", "torch", "triton")} == profiles.versions()
    assert profile.rows == {row.name: LONG_MS for row in ROWS}
    actual = explain_problem((2, 4096, 16, 64), device="sm_80")
    assert actual.forward == "triton", "written, and read at once"
    assert actual.profile == f"{path} decided: long: triton 1 ms, flex 1.5 ms, sdpa failed, eager 9 ms; forward"
    assert f"wrote {path}\nauto goes by it from now on; python -m flash_dmattn explain cites it\n" in printed
    assert len(bar.splitlines()) == 2 + 4 * len(ROWS)


def test_what_the_table_says_is_what_auto_does() -> None:
    for order in itertools.permutations((1.0, 2.0, 3.0, 4.0)):
        times = {name: Figures(time) for name, time in zip(profiles.measured_on("sm_90"), order, strict=True)}
        calibrate(instruments(figures=lambda row, backend, times=times: times[backend]))
        profile = profiles.find("sm_80").profile
        assert profile is not None
        actual = explain_problem((2, 4096, 16, 64), device="sm_80").forward
        assert tool.choice(profile, "long", False) == actual


def test_what_is_not_reached_in_time_is_left_out() -> None:
    clock = Clock()
    status, printed, _ = calibrate(instruments(clock, seconds=10.0), seconds=100)
    profile = profiles.find("sm_80").profile
    assert status == 0 and profile is not None
    # Rows of 40 s each: after two of them a third would end at 120 s.
    assert list(profile.rows) == [row.name for row in ROWS[:2]]
    assert clock() - 100.0 <= 100
    assert f"not reached in 100 s: {', '.join(row.name for row in ROWS[2:])}; what was compiled is kept" in printed
    assert printed.count("not reached\n") == len(ROWS) - 2
    on_a_cpu = calibrate(instruments(Clock(), seconds=20.0, arch="cpu"), seconds=100)[1]
    assert "; give more with --seconds" in on_a_cpu and "compiled" not in on_a_cpu, "nothing is compiled there"


def test_a_cpu_has_a_profile_of_sdpa_and_eager(
    monkeypatch: pytest.MonkeyPatch, caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "gpu_names", lambda arch: [profiles.cpu_name()])
    monkeypatch.setattr(tool, "ROWS", [row for row in ROWS if row.name in ("short", "bias per key, dbias")])
    monkeypatch.setattr(tool, "_CPU_SHRINK", 64)
    assert main(["calibrate", "--device", "cpu"]) == 0
    profile = profiles.find("cpu").profile
    assert profile is not None and (profile.gpu, profile.arch) == (profiles.cpu_name(), "cpu")
    assert profile.wrong == {}, "the checks are those of fp32"
    assert [*profile.rows] == ["bias per key, dbias", "short"]
    assert all([*figures] == ["eager", "sdpa"] for figures in profile.rows.values())
    assert profile.rows["short"]["sdpa"].backward and profile.rows["bias per key, dbias"]["sdpa"].error
    printed = capsys.readouterr().out
    assert "class of calls       sdpa" in printed and "auto goes by it from now on" in printed


def test_a_run_that_measures_nothing_writes_nothing(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    slow = instruments(clock)._replace(check=lambda has_time: setattr(clock, "now", 500.0) or outcomes())
    assert calibrate(slow, seconds=60)[0] == 1
    assert "no class of calls was measured within 60 s; give more with --seconds" in capsys.readouterr().err
    assert not caches.exists()


@pytest.mark.parametrize(("seconds", "runs"), [(0.001, tool.LEAST), (0.02, 11), (9.0, tool.MOST)])
def test_a_cpu_is_timed_for_so_many_seconds(seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0, 0]

    def run() -> None:  # of 2 ms
        now[0], now[1] = now[0] + 1 / 512, now[1] + 1

    monkeypatch.setattr(tool.time, "perf_counter", lambda: now[0])
    assert tool.time_on_host(run, seconds) == 1e3 / 512
    assert now[1] == runs  # 11 runs are the first that take 20 ms


def test_a_profile_that_cannot_be_written_is_an_error(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (caches.parent / "file").write_text("")
    monkeypatch.setattr(config.process, "profile", str(caches.parent / "file" / "p.json"))
    assert calibrate(instruments())[0] == 1
    assert f"{caches.parent / 'file' / 'p.json'} cannot be written: " in capsys.readouterr().err


def test_the_effect_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, printed, _ = calibrate(instruments(arch="sm_90"))
    assert "on sm_90 the built-in rules stay in force; FLASH_DMATTN_RULES=profile lets the profile decide" in printed
    monkeypatch.setattr(config.process, "rules", "profile")
    assert "auto goes by it from now on" in calibrate(instruments(arch="sm_90"))[1]
    monkeypatch.setattr(config.process, "profile", "off")
    before = {path: path.read_bytes() for path in profiles.folder().iterdir()}
    _, printed, _ = calibrate(instruments(arch="sm_86"))
    assert "FLASH_DMATTN_PROFILE=off: no profile is written" in printed and "auto reads none" in printed
    assert {path: path.read_bytes() for path in profiles.folder().iterdir()} == before


# Checks

CHECKS: dict[str, tuple[list[Outcome], dict[str, str]]] = {
    "passed": (outcomes(), {}),
    "wrong": (
        outcomes(errors={"out": 3e-3}),
        {"triton": "it failed the check 'empty rows': out is 3.0e-03 off, with a limit of 2.0e-03"},
    ),
    "not a number": (
        outcomes(errors={"out": float("nan")}),
        {"triton": "it failed the check 'empty rows': out is nan off, with a limit of 2.0e-03"},
    ),
    "raised": (
        outcomes(exception="RuntimeError: no\nmore"),
        {"triton": "it failed the check 'empty rows': RuntimeError: no"},
    ),
    "not all": (outcomes(cases=4), {"triton": "it was not checked on 'bias alone needs grad'"}),
    "none": ([], {"triton": "it was not checked on 'all together'"}),
    "flex wrong": (
        outcomes() + outcomes("flex", 2, exception="InductorError: shared memory"),
        {"flex": "it failed the check 'causal': InductorError: shared memory"},
    ),
    "flex not reached": (outcomes() + outcomes("flex", 2), {}),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_failed_a_check_is_not_taken(name: str) -> None:
    checks, wrong = CHECKS[name]
    _, printed, _ = calibrate(instruments(checks=checks))
    profile = profiles.find("sm_80").profile
    assert profile is not None and profile.wrong == wrong
    taken = explain_problem((2, 4096, 16, 64), device="sm_80").forward
    assert taken == ("flex" if "triton" in wrong else "triton")
    for backend, why in wrong.items():
        assert f"{backend}: {why}" in printed


# Timing


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_timed_in_both_passes_on_tensors_of_its_class(row: Row) -> None:
    call = tool.make_call(row, CPU, shrink=64)
    assert call["q"].dtype == torch.float32 and call["q"].shape[1] == max(1, row.seqlen_q // 64)
    leaves = ["q", "k", "v"] * row.grad + ["bias"] * row.dbias
    assert [name for name, x in call.items() if x.requires_grad] == leaves
    # Short now, and else the row itself.
    problem = flash_dmattn.explain(**call).problem._replace(seqlen_k=row.seqlen_k)
    assert row.name in rows_of(problem) or row.name == "long"
    runs: list[tuple[Any, float]] = []

    def timer(run: Callable[[], Any], seconds: float) -> float:
        runs.append((run(), seconds))
        return float(len(runs))

    figures = tool.measure(row, "eager", 0.6, CPU, timer, shrink=64)
    assert figures == (Figures(1.0, 2.0) if row.grad else Figures(1.0))
    assert runs[0][0].shape[1] == call["q"].shape[1]
    assert len(runs[1][0] if row.grad else ()) == len(leaves)
    assert sum(seconds for _, seconds in runs) == pytest.approx(0.6)


def test_what_does_not_run_has_its_error_as_figures() -> None:
    def timer(run: Callable[[], Any], seconds: float) -> float:
        raise AssertionError("nothing is timed")

    (short,) = (row for row in ROWS if row.name == "short")
    actual = tool.measure(short, "triton", 0.6, CPU, timer, shrink=64)
    assert actual.error == "it refuses: device is cpu; the kernels run on GPUs"

    def fails(inputs: Inputs) -> tuple[Tensor, ...]:
        raise torch.OutOfMemoryError("no\nmemory")

    def spoil(inputs: Inputs) -> tuple[Tensor, ...]:
        return empty_outputs(inputs.q, inputs.v)[0].fill_(float("nan")), empty_outputs(inputs.q, inputs.v)[1]

    for run, error in ((fails, "OutOfMemoryError: no memory"), (spoil, "its results are not finite")):
        with replaced("eager", plan_forward=lambda problem, run=run: run):
            assert tool.measure(short, "eager", 0.6, CPU, timer, shrink=64).error == error


# Progress


class _Clocks:
    """A host and a device: what is enqueued ends when both have come to it. Writing the buffer takes 0.1 ms."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def enqueue(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def cuda(self) -> Any:
        clocks = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                clocks.enqueue(0.0, 0.0)
                self.at = clocks.device

            def elapsed_time(self, stop: Event) -> float:
                return stop.at - self.at

        def synchronize() -> None:
            clocks.host = max(clocks.host, clocks.device)

        class Buffer:
            def zero_(self) -> None:
                clocks.enqueue(0.005, 0.1)

        return SimpleNamespace(
            empty=lambda *_, **__: Buffer(), int8=None, cuda=SimpleNamespace(Event=Event, synchronize=synchronize)
        )


@pytest.mark.parametrize("host", (0.01, 0.3, 6.0))
def test_launching_does_not_count(host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels count, 0.02 ms here, however long the host takes to enqueue them."""
    clocks = _Clocks()
    monkeypatch.setattr(tool, "torch", clocks.cuda())
    monkeypatch.setattr(tool, "time", SimpleNamespace(perf_counter=lambda: clocks.host / 1e3))
    timer = tool.EventTimer(torch.device("cuda"))
    assert timer(lambda: clocks.enqueue(host, 0.02), 0.1) == pytest.approx(0.02)


# The command line


MACHINES: dict[str, tuple[int, str, str]] = {
    "no GPU": (
        0,
        "cpu",
        "it times an NVIDIA GPU, and torch sees none; python -m flash_dmattn info has the driver and torch, "
        "and --device cpu times the CPU",
    ),
    "one GPU": (1, "sm_80", "--device is 2, and torch sees 1 GPU: give 0 to 0"),
    "two GPUs": (2, "sm_80", "--device is 2, and torch sees 2 GPUs: give 0 to 1"),
    "Turing": (3, "sm_75", "the GPU is sm_75; profiles are of NVIDIA GPUs from sm_80 on"),
    "AMD": (3, "gfx942", "the GPU is gfx942; profiles are of NVIDIA GPUs from sm_80 on"),
    "flex is off": (3, "sm_80", "flex is switched off; calibrate compares triton, flex, sdpa, eager"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_cannot_be_measured_is_told_why(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, arch, message = MACHINES[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(tool, "device_arch", lambda device: arch)
    with flash_dmattn.config(disabled="flex" if name == "flex is off" else ()):
        assert main(["calibrate", "--device", "2"]) == 1
    assert capsys.readouterr().err == f"python -m flash_dmattn calibrate: error: {message}\n"


def test_arguments_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, float]] = []
    monkeypatch.setattr(tool, "run", lambda index, seconds: seen.append((index, seconds)) or 0)
    assert main(["calibrate"]) == main(["calibrate", "--device", "1", "--seconds", "30"]) == 0
    assert main(["calibrate", "--device", "cpu"]) == 0
    assert seen == [(0, 120), (1, 30), ("cpu", 120)]
    for words in (["--seconds", "0"], ["--seconds", "x"], ["--device", "-1"]):
        with pytest.raises(SystemExit) as leaving:
            main(["calibrate", *words])
        assert leaving.value.code == 2


def test_info_tells_of_the_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caches: Path
) -> None:
    def lines() -> list[str]:
        assert main(["info"]) == 0
        return [line.partition("  ")[2].strip() for line in capsys.readouterr().out.splitlines() if "profile" in line]

    assert (
        lines()[0] == f"cpu: none: there is none in {caches}; python -m flash_dmattn calibrate --device cpu makes one"
    )
    monkeypatch.setattr(profiles, "arches_here", lambda: ["sm_80"])
    made_by = "python -m flash_dmattn calibrate makes one"
    assert lines() == [f"sm_80: none: there is none in {caches}; {made_by}"]
    calibrate(instruments())
    profile = profiles.find("sm_80").profile
    assert profile is not None
    path = caches / "NVIDIA-A100-SXM4-80GB.json"
    assert lines() == [f"sm_80: {path}, made {profile.made}"]
    path.chmod(0o622)
    profiles.forget()
    (line,) = lines()
    assert (
        line == f"sm_80: none: {path} has mode 622, so others may write it; chmod go-w makes it yours alone; {made_by}"
    )
    monkeypatch.setattr(profiles, "arches_here", lambda: ["sm_90"])
    assert lines()[0].endswith("; built-in rules decide")
    assert info.collect()["profiles"]["sm_90"]["decides"] is False
