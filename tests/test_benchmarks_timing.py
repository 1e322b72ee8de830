"""How the benchmarks time and weigh calls, without a GPU: in turns, by events and graphs, peaks of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from benchmark_systems import CPU

from benchmarks import timing
from benchmarks.peak_memory import MIB, peaks


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
    """The part of torch.cuda that `timing` uses, with a clock that only the runs move."""

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

    measured = peaks(lambda: Doubled.apply(x), [x], torch.ones_like(x))
    assert measured.forward == pytest.approx(8.0, abs=0.1)
    assert measured.backward == pytest.approx(4.0, abs=0.1)
    assert measured.both == pytest.approx(8.0, abs=0.1)
    assert peaks(lambda: x * 2, [x], torch.ones_like(x), backward=False) == (pytest.approx(4.0, abs=0.1), None, None)
