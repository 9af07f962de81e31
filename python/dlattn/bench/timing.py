"""Clocks: how long a call keeps a GPU or a CPU busy, and how long until an eager call returns."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

Call = Callable[[], object]

_LAUNCHES_PER_GRAPH = 10
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
QUICK = Windows(rounds=2, warmup_seconds=0.01, measured_seconds=0.03, host_calls=200)


class Clock(Protocol):
    """Times calls on one device."""

    method: str

    def prepare(self, call: Call) -> tuple[Call, int, str]:
        """What to time, how many calls it makes, and a note if it is not the usual method."""

    def window(self, prepared: Call, calls: int, protocol: Windows) -> list[float]:
        """Seconds per call, one figure for each repetition within a measured window."""

    def host(self, call: Call, protocol: Windows) -> float:
        """Median seconds until an eager call returns, whatever the device does."""


class GpuClock:
    """CUDA-graph replays between events, by torch."""

    method = f"CUDA graph of {_LAUNCHES_PER_GRAPH} calls, events around each replay, median"

    def __init__(self) -> None:
        """Find out how many cycles keep the stream busy long enough."""
        self._torch: Any = importlib.import_module("torch")
        cycles = 1_000_000
        once = self._between_events(lambda: self._torch.cuda._sleep(cycles))
        self._busy_cycles = int(cycles * _BUSY_SECONDS / once)

    def prepare(self, call: Call) -> tuple[Call, int, str]:
        """Capture; calls that cannot be captured are timed as ten launches in a row."""
        torch = self._torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(_LAUNCHES_PER_GRAPH):
                    call()
        except Exception:  # whatever a peer raises when it cannot be captured
            torch.cuda.synchronize()

            def launches() -> None:
                for _ in range(_LAUNCHES_PER_GRAPH):
                    call()

            return launches, _LAUNCHES_PER_GRAPH, "not captured: eager launches"
        return graph.replay, _LAUNCHES_PER_GRAPH, ""

    def window(self, prepared: Call, calls: int, protocol: Windows) -> list[float]:
        """Replay for the warm-up, then measure each replay."""
        torch = self._torch
        once = max(self._between_events(prepared), 1e-6)
        for _ in range(int(protocol.warmup_seconds / once) + 1):
            prepared()
        count = max(3, int(protocol.measured_seconds / once) + 1)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            prepared()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 / calls for start, end in pairwise(events)]

    def host(self, call: Call, protocol: Windows) -> float:
        """Queue calls behind a busy stream, so that no kernel can hold them up."""
        torch = self._torch
        for _ in range(10):
            call()
        seconds: list[float] = []
        while len(seconds) < protocol.host_calls:
            torch.cuda.synchronize()
            torch.cuda._sleep(self._busy_cycles)
            for _ in range(_QUEUED_CALLS):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(seconds)

    def _between_events(self, call: Call) -> float:
        torch = self._torch
        call()
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


class CpuClock:
    """Wall time of each call."""

    method = "wall time of each call, median"

    def prepare(self, call: Call) -> tuple[Call, int, str]:
        """Nothing to prepare."""
        return call, 1, ""

    def window(self, prepared: Call, calls: int, protocol: Windows) -> list[float]:
        """Call for the warm-up, then measure each call."""
        deadline = time.perf_counter() + protocol.warmup_seconds
        prepared()
        while time.perf_counter() < deadline:
            prepared()
        seconds: list[float] = []
        while len(seconds) < 3 or sum(seconds) < protocol.measured_seconds:
            start = time.perf_counter()
            prepared()
            seconds.append(time.perf_counter() - start)
        return seconds

    def host(self, call: Call, protocol: Windows) -> float:
        """Median time of a call, which must be of a tiny problem to mean anything."""
        for _ in range(10):
            call()
        seconds = []
        for _ in range(protocol.host_calls):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
