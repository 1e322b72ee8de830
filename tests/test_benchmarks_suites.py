"""The suites of the benchmarks without a GPU: timing in turns, peaks of memory, rows, and rows of what fails."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from benchmark_systems import (
    BROKEN,
    CPU,
    EAGER,
    MATH,
    NAN,
    RATES,
    SPOILED,
    breaks_later,
    broken,
    plain,
    small,
    spoiled,
    times,
)

from benchmarks import results, systems, timing
from benchmarks.cases import PASSES
from benchmarks.inputs import make_inputs
from benchmarks.peak_memory import MIB, held, peaks
from benchmarks.suites import equivalence, memory, performance, trial
from benchmarks.systems import Mode, Needs, System


def performed(name: str, *chosen: System) -> results.Record:
    effort = performance.Effort(1.0, 2, 3)
    row = performance.row(small(name), list(chosen), CPU, passes=PASSES, effort=effort, rates=RATES)
    json.dumps(row, allow_nan=False)
    return row


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
    assert quick.summary()["ms"] == pytest.approx(1.0) and slow.summary()["ms"] == pytest.approx(4.0)


class Gpu:
    """What `timing` uses of torch.cuda, with a clock that only the runs move."""

    def __init__(self) -> None:
        self.now, self.log, self.capturing = 0.0, [], False

    def run(self, name: str, ms: float, *, capturable: bool = True) -> Callable[[], None]:
        def run() -> None:
            if self.capturing and not capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.log.append(name)
            self.now += 0.0 if self.capturing else ms

        return run

    def torch(self) -> SimpleNamespace:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, later: Event) -> float:
                return later.at - self.at

        class Graph:
            def replay(self) -> None:
                gpu.log.append("replay")
                gpu.now += self.ms

        @contextmanager
        def graph(captured: Graph, stream: object) -> Iterator[None]:
            gpu.capturing, before = True, len(gpu.log)
            try:
                yield
            finally:
                gpu.capturing = False
                captured.ms = 0.04 * (len(gpu.log) - before)

        cuda = SimpleNamespace(
            Event=Event, CUDAGraph=Graph, graph=graph, current_stream=lambda: None, synchronize=lambda: None
        )
        buffer = SimpleNamespace(zero_=self.run("flush", 0.25))
        return SimpleNamespace(cuda=cuda, int8=None, empty=lambda size, **options: buffer)


def test_events_round_every_run_after_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(timing, "torch", gpu.torch())
    runners = [timing.Runner(gpu.run("a", 0.5)), timing.Runner(gpu.run("b", 20.0))]
    timing.measure(runners, torch.device("cuda"), rep_ms=5.0, least=2, most=10)
    a, b = (runner.summary() for runner in runners)
    assert (a["ms"], a["runs"], a["how"]) == (pytest.approx(0.5), 10, "events")
    assert (b["ms"], b["runs"], b["how"]) == (pytest.approx(20.0), 2, "events")
    assert a["host_us"] is not None and b["host_us"] is None  # of a long run it says nothing
    ahead = timing.FLUSHES_AHEAD - 1  # of each of the ten rounds, before its first run
    turns = gpu.log[-24 - 10 * ahead :]
    assert [turn for turn in turns if turn != "flush"].count("b") == 2 and turns.count("flush") == 12 + 10 * ahead
    assert all("flush" in (turn, before) for before, turn in pairwise(turns))
    assert turns[: ahead + 2] == ["flush"] * (ahead + 1) + [turns[ahead + 1]] and turns[ahead + 1] != "flush"


def test_graphs_where_a_run_is_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu()
    monkeypatch.setattr(timing, "torch", gpu.torch())
    short, busy = timing.Runner(gpu.run("a", 0.06)), timing.Runner(gpu.run("b", 0.4, capturable=False))
    timing.measure([short, busy], torch.device("cuda"), rep_ms=5.0, least=2, most=10)
    assert short.how == "graph" and short.calls == 8 and short.summary()["runs"] == 10
    assert short.summary()["ms"] == pytest.approx(0.04)  # without what the launches cost
    assert busy.how == "events" and busy.summary()["ms"] == pytest.approx(0.4)
    assert "not capturable, timed by events: operation not permitted" in capsys.readouterr().out


def test_a_run_that_fails_ends_alone() -> None:
    calls = iter(range(6))

    def fails() -> None:
        if next(calls, None) is None:
            raise RuntimeError("a call too many")

    good, bad = timing.Runner(lambda: time.sleep(0.001)), timing.Runner(fails)
    timing.measure([bad, good], CPU, rep_ms=1e4, least=5, most=5)
    assert str(bad.error) == "a call too many" and good.error is None and len(good.ms) == 5


def test_summary_of_samples() -> None:
    runner = timing.Runner(lambda: None, ms=[5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    summary = runner.summary()
    assert [summary[name] for name in ("ms", "p20", "p80", "min", "runs")] == [3.5, 2.0, 5.0, 1.0, 6]


def test_peaks_count_what_is_held_at_once() -> None:
    """A forward that keeps 4 MiB, and 8 MiB for a while; a backward that needs 2 MiB beside the gradient."""
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

    found = peaks(lambda: Doubled.apply(x), [x], torch.ones_like(x))
    assert found.forward == pytest.approx(8.0, abs=0.1)
    assert found.backward == pytest.approx(4.0, abs=0.1)
    assert found.both == pytest.approx(8.0, abs=0.1)
    assert peaks(lambda: x * 2, [x], torch.ones_like(x), backward=False) == (pytest.approx(4.0, abs=0.1), None, None)


def test_what_is_held_leaves_out_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reference cycle held before counts for nothing, wherever it is freed; nor does one made on the way."""

    class Held:
        alive = 0

        def __init__(self) -> None:
            self.myself = self
            Held.alive += 1

        def __del__(self) -> None:
            Held.alive -= 1

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: Held.alive * MIB)

    def make() -> Held:
        gc.collect()
        Held()
        return Held()

    Held()
    made, found = held(make, torch.device("cuda"))
    assert found == 1.0 and Held.alive == 1
    assert gc.get_freeze_count() == 0  # later garbage is found
    made.myself = None  # type: ignore[assignment]


def test_performance_row() -> None:
    row = performed("topk-8k", EAGER, MATH, SPOILED, BROKEN)
    assert performance.failures(row) == []
    assert row["auto"] == ["eager", "eager"] and row["has_mask"]
    eager, math = times(row, "eager"), times(row, "sdpa-math", "prepared")
    assert eager["wrong"] == math["wrong"] == []
    assert times(row, "spoiled")["wrong"] == ["out", "dq", "dk", "dv", "dbias"]
    assert times(row, "broken")["reason"] == "RuntimeError: no kernel for this call"
    assert times(row, "broken")["forward"] is None
    for name, flop in (("forward", 4), ("backward", 10), ("step", 14)):
        timed = eager[name]
        assert timed["tflops"] == pytest.approx(flop * 32 * row["counts"]["pairs"] / timed["ms"] / 1e9)
        assert timed["of_floor"] == pytest.approx(row["floor_ms"][name] / timed["ms"])
        assert 2 <= timed["runs"] <= 3
    # Not charged for reading the bool mask: a smaller floor where the bytes decide.
    assert eager["peak_mb"] > 0 and row["tile_floor_ms"]["forward"] >= row["floor_ms"]["forward"]


def test_ours_must_be_right() -> None:
    row = performed("causal-gqa", plain("wrong", spoiled, is_ours=True), NAN, plain("broken", broken, is_ours=True))
    inaccurate, not_finite, failed = performance.failures(row)
    assert inaccurate.startswith("causal-gqa, wrong: out 5.0e-02 above ")
    assert not_finite.startswith("causal-gqa, nan: out NaN above ")
    assert failed == "causal-gqa, broken: RuntimeError: no kernel for this call"


def test_a_system_that_breaks_while_it_is_timed_is_a_row() -> None:
    row = performed("causal-gqa", plain("late", breaks_later), EAGER)
    late = times(row, "late")
    assert late["failed"] and late["reason"].endswith("RuntimeError: a call too many")
    assert times(row, "eager")["step"]["ms"] > 0


def test_a_lost_device_ends_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (performance, equivalence, memory):
        monkeypatch.setattr(module, "device_is_lost", lambda device: True)
    row = performed("causal-gqa", BROKEN, EAGER)
    assert row["lost"] == "broken" and times(row, "eager")["reason"] == "not run: broken left the GPU unusable"
    for suite in (equivalence, memory):
        lines = suite.row(small("causal-gqa"), [BROKEN, EAGER], CPU)["systems"]
        assert lines[1]["reason"] == "not run: broken left the GPU unusable"


def test_a_device_lost_while_timing_ends_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "device_is_lost", lambda device: True)
    row = performed("causal-gqa", plain("late", breaks_later), EAGER)
    assert row["lost"] == "late" and times(row, "eager")["step"] is None


def test_equivalence_row() -> None:
    refuses = System("no", broken, lambda case, device: Needs("not for this"), lambda device: "")
    row = equivalence.row(small("form-topk"), [EAGER, MATH, SPOILED, NAN, BROKEN, refuses], CPU)
    json.dumps(row, allow_nan=False)
    verdicts = {line["system"]: line["verdict"] for line in row["systems"]}
    assert verdicts == {
        **{"eager": "pass", "sdpa-math": "pass", "spoiled": "fail", "nan": "fail"},
        **{"broken": "failed", "no": "refused"},
    }
    eager, math = row["systems"][:2]
    assert list(eager["errors"]) == ["out", "lse", "dq", "dk", "dv", "dbias"] == list(row["limits"])
    assert all(eager["errors"][name] <= row["limits"][name] for name in row["limits"])
    # Two that are right are about as far from each other as the less accurate one is from fp64.
    assert 0.5 < eager["from_plain"]["out"] / row["plain"]["out"] < 1.5
    assert math["errors"]["out"] < 5e-3
    assert [text.split(":")[0] for text in equivalence.failures(row)] == ["form-topk, nan"]


def test_memory_row() -> None:
    row = memory.row(small("memory-bias-1hll"), [EAGER, BROKEN], CPU)
    eager, failed = row["systems"]
    assert 0 < row["returned_mb"] <= eager["peaks"]["both"] and failed["peaks"] is None
    assert memory.failures(row) == []


def test_trial_says_what_does_not_run() -> None:
    case = small("causal-gqa")
    inputs = make_inputs(case, CPU)
    forward_only = System("f", EAGER.bind, lambda case, device: Needs("", "not here"), lambda device: "")
    found = trial.attempt(forward_only, Mode(), case, inputs)
    assert found.reason == "backward: not here" and not found.failed and list(found.results) == ["out"]
    no_lse = System("l", EAGER.bind, lambda case, device: Needs(lse_refusal="none"), lambda device: "")
    assert "lse" not in trial.attempt(no_lse, Mode(with_lse=True), case, inputs).results
    assert "lse" in trial.attempt(EAGER, Mode(with_lse=True), case, inputs).results
    assert trial.attempt(systems.by_name("cuda"), Mode(), case, inputs).needs.refusal
