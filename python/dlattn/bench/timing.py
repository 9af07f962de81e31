"""Clocks: how long a call keeps a GPU or a CPU busy, and how long until an eager call returns."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, Protocol

Call = Callable[[], object]

_LAUNCHES_PER_GRAPH = 10
_LONG_CALL_SECONDS = 5e-3  # from here on a graph of one call has no overhead to speak of
_QUEUED_CALLS = 50  # fewer than a stream's queue holds, so that no launch waits for room in it
_BUSY_SECONDS = 0.02  # how long the stream is kept busy while calls queue up behind


@dataclass(frozen=True)
class Windows:
    """How long to run before and while measuring, and how often the contestants take turns."""

    rounds: int
    warmup_seconds: float
    measured_seconds: float
    host_calls: int


# A card at its power limit needs a while to settle: short windows flatter by up to a tenth.
SUSTAINED = Windows(rounds=3, warmup_seconds=0.12, measured_seconds=0.28, host_calls=1000)
# Bound by memory, of calls of microseconds: far from the power limit, and settled at once.
MEMORY_BOUND = Windows(rounds=3, warmup_seconds=0.03, measured_seconds=0.1, host_calls=1000)
QUICK = Windows(rounds=2, warmup_seconds=0.01, measured_seconds=0.03, host_calls=200)


@dataclass(frozen=True)
class Prepared:
    """One function to time."""

    run: Call
    calls: int  # that it makes
    note: str = ""  # if the method is not the usual one


class Clock(Protocol):
    """Times calls on one device."""

    method: str

    def prepare(self, call: Call, turn: Sequence[Call] = ()) -> Prepared:
        """Get ready to time a call, or those of a turn."""

    def window(self, prepared: Prepared, windows: Windows) -> list[float]:
        """Seconds per call, one figure for each repetition within a measured window."""

    def host(self, call: Call, windows: Windows) -> float:
        """Median seconds until an eager call returns, whatever the device does."""


class GpuClock:
    """CUDA-graph replays between events, by torch."""

    method = f"CUDA graph of {_LAUNCHES_PER_GRAPH} calls, events around each replay, median"

    def __init__(self) -> None:
        """Find out how many cycles keep the stream busy long enough."""
        self._torch: Any = importlib.import_module("torch")
        cycles = 1_000_000
        once = self._seconds(lambda: self._torch.cuda._sleep(cycles))
        self._busy_cycles = int(cycles * _BUSY_SECONDS / once)

    def prepare(self, call: Call, turn: Sequence[Call] = ()) -> Prepared:
        """Capture; what cannot be captured is timed as launches in a row."""
        torch = self._torch
        if not turn:
            long = self._seconds(call) > _LONG_CALL_SECONDS
            turn = (call,) if long else (call,) * _LAUNCHES_PER_GRAPH
        calls = len(turn)

        def launches() -> None:
            for each in turn:
                each()

        # One stream for both: an allocator that keeps blocks by stream finds them while capturing.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                launches()
        except Exception as error:  # whatever a peer raises when it cannot be captured
            torch.cuda.synchronize()
            reason = str(error.__context__ or error).partition("\n")[0]
            return Prepared(launches, calls, f"not captured: eager launches ({reason})")
        return Prepared(graph.replay, calls)

    def window(self, prepared: Prepared, windows: Windows) -> list[float]:
        """Replay for the warm-up, then measure each replay."""
        torch = self._torch
        once = max(self._seconds(prepared.run), 1e-6)
        for _ in range(int(windows.warmup_seconds / once)):
            prepared.run()
        count = int(windows.measured_seconds / once) + 1
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            prepared.run()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 / prepared.calls for start, end in pairwise(events)]

    def host(self, call: Call, windows: Windows) -> float:
        """Queue calls behind a busy stream, so that no kernel can hold them up."""
        torch = self._torch
        for _ in range(10):
            call()
        seconds: list[float] = []
        while len(seconds) < windows.host_calls:
            torch.cuda.synchronize()
            torch.cuda._sleep(self._busy_cycles)
            seconds += _wall_times(call, _QUEUED_CALLS)
        torch.cuda.synchronize()
        return statistics.median(seconds)

    def _seconds(self, call: Call) -> float:
        """Time on the device; of the second call, unless the first says that it takes long."""
        torch = self._torch
        seconds = 0.0
        for _ in range(2):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            seconds = float(start.elapsed_time(end)) * 1e-3
            if seconds > 10 * _LONG_CALL_SECONDS:
                break
        return seconds


class CpuClock:
    """Wall time of each call."""

    method = "wall time of each call, median"

    def prepare(self, call: Call, turn: Sequence[Call] = ()) -> Prepared:
        """Nothing to prepare."""
        if not turn:
            return Prepared(call, 1)
        calls = cycle(turn)
        return Prepared(lambda: next(calls)(), 1)

    def window(self, prepared: Prepared, windows: Windows) -> list[float]:
        """Call for the warm-up, then measure each call."""
        deadline = time.perf_counter() + windows.warmup_seconds
        prepared.run()
        while time.perf_counter() < deadline:
            prepared.run()
        seconds: list[float] = []
        while len(seconds) < 3 or sum(seconds) < windows.measured_seconds:
            seconds += _wall_times(prepared.run, 1)
        return seconds

    def host(self, call: Call, windows: Windows) -> float:
        """Median time of a call, which must be of a tiny problem to mean anything."""
        _wall_times(call, 10)
        return statistics.median(_wall_times(call, windows.host_calls))


def _wall_times(call: Call, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds
