"""How the benchmark takes times: windows, turns, graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from quick_bench import INSTANT

from dlattn.bench import session, timing
from dlattn.bench.cases import Case

pytestmark = pytest.mark.usefixtures("instant")


class FakeTorch:
    """Just enough of torch.cuda for the clock: a stream's time is what calls add to `now`."""

    def __init__(self, refuses_capture: bool = False) -> None:
        self.now = 0.0
        self.capturing: list[Callable[[], object]] | None = None
        self.refuses_capture = refuses_capture
        fake = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.time = fake.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.time - self.time) * 1e3

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        class Graph:
            launches = 0

            def replay(self) -> None:
                for _ in range(self.launches):
                    fake.work()

        class Use:
            def __init__(self, *args: Any, stream: Any = None) -> None:
                self.graph = args[0]

            def __enter__(self) -> None:
                if isinstance(self.graph, Graph):
                    fake.capturing = []

            def __exit__(self, *error: Any) -> None:
                if isinstance(self.graph, Graph):
                    assert fake.capturing is not None
                    self.graph.launches = len(fake.capturing)
                    fake.capturing = None

        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=Stream,
            CUDAGraph=Graph,
            graph=Use,
            stream=Use,
            current_stream=Stream,
            synchronize=lambda: None,
            _sleep=self.sleep,
        )

    def sleep(self, cycles: int) -> None:
        self.now += cycles * 1e-9

    def work(self, seconds: float = 1e-3) -> None:
        if self.capturing is None:
            self.now += seconds
        elif self.refuses_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        else:
            self.capturing.append(self.work)


@pytest.fixture
def fake_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch(**getattr(request, "param", {}))
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_gpu_clock_replays_a_graph(fake_torch: FakeTorch) -> None:
    clock = timing.GpuClock()
    prepared = clock.prepare(fake_torch.work)
    assert (prepared.calls, prepared.note) == (10, "")
    start = fake_torch.now
    windows = timing.Windows(1, warmup_seconds=0.12, measured_seconds=0.28, host_calls=1)
    times = clock.window(prepared, windows)
    assert times == pytest.approx([1e-3] * len(times))
    assert sum(times) * 10 >= 0.28
    assert fake_torch.now - start >= 0.12 + 0.28


def test_gpu_clock_takes_long_calls_one_by_one(fake_torch: FakeTorch) -> None:
    clock = timing.GpuClock()
    prepared = clock.prepare(lambda: [fake_torch.work() for _ in range(2000)])
    assert prepared.calls == 1
    start = fake_torch.now
    assert clock.window(prepared, timing.SUSTAINED) == pytest.approx([2.0])
    assert fake_torch.now - start == pytest.approx(4.0)  # the first one was the warm-up


@pytest.mark.parametrize("fake_torch", [{"refuses_capture": True}], indirect=True)
def test_gpu_clock_times_what_cannot_be_captured(fake_torch: FakeTorch) -> None:
    clock = timing.GpuClock()
    prepared = clock.prepare(fake_torch.work)
    reason = "operation not permitted when stream is capturing"
    assert prepared.calls == 10
    assert prepared.note == f"not captured: eager launches ({reason})"
    fake_torch.capturing = None
    assert clock.window(prepared, INSTANT) == pytest.approx([1e-3])


def test_a_turn_is_captured_once(fake_torch: FakeTorch) -> None:
    calls: list[int] = []
    turn = [lambda i=i: (calls.append(i), fake_torch.work()) for i in range(26)]
    clock = timing.GpuClock()
    prepared = clock.prepare(fake_torch.work, turn)
    assert (prepared.calls, prepared.note) == (26, "")
    assert calls == 2 * list(range(26))  # once before, once captured
    windows = timing.Windows(1, warmup_seconds=0.0, measured_seconds=0.1, host_calls=1)
    times = clock.window(prepared, windows)
    assert times == pytest.approx([1e-3] * 4)
    assert len(calls) == 52


def test_cpu_clock_takes_the_calls_of_a_turn_one_by_one() -> None:
    calls: list[int] = []
    clock = timing.CpuClock()
    prepared = clock.prepare(
        lambda: pytest.fail("not of the turn"), [lambda i=i: calls.append(i) for i in range(3)]
    )
    assert len(clock.window(prepared, INSTANT)) == 3
    assert calls == [0, 1, 2, 0]


def test_gpu_clock_keeps_the_stream_busy_for_host_times(fake_torch: FakeTorch) -> None:
    clock = timing.GpuClock()
    start = fake_torch.now
    assert clock.host(lambda: None, timing.Windows(1, 0.0, 0.0, host_calls=120)) > 0
    assert fake_torch.now - start == pytest.approx(3 * 0.02, rel=1e-3)  # 50 calls at a time


def test_cpu_clock_counts_calls() -> None:
    calls: list[int] = []
    clock = timing.CpuClock()
    prepared = clock.prepare(lambda: calls.append(1))
    assert len(clock.window(prepared, INSTANT)) == 3
    assert len(calls) == 4  # one to warm up


def test_contestants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    class Clock(timing.CpuClock):
        def prepare(self, call: Any, turn: Any = ()) -> timing.Prepared:
            return timing.Prepared(call, 1, note=str(len(prepared)))

        def window(self, prepared: timing.Prepared, windows: timing.Windows) -> list[float]:
            turns.append(prepared.note)
            return [1.0]

    prepared: list[Any] = []
    run = session.Session("cpu", timing.Windows(3, 0, 0, 1), None, ["numpy"])
    run.clock = Clock()
    original = run.clock.prepare
    monkeypatch.setattr(
        run.clock, "prepare", lambda call, turn: (prepared.append(call), original(call, turn))[1]
    )
    results = run.time(run.of_case(Case((1, 1, 8, 8), False, "float32")))
    assert turns == ["1", "2", "2", "1", "1", "2"]
    assert [result.seconds for result in results] == [1.0, 1.0]
