"""How much of the machine others use while the benchmark runs, by which its figures go wrong."""

from __future__ import annotations

import importlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dlattn

# The note of a result that was measured then.
BUSY = "busy machine"

_STAT = Path("/proc/stat")
_SAMPLE_SECONDS = 0.5  # /proc/stat counts in hundredths
_TOLERATED = 0.1  # of the cores that the benchmark computes on
_TOLERATED_GPU = 5.0  # percent of the time
_GPU_SAMPLE_SECONDS = 1.5  # nvidia-smi looks back for up to a second


@dataclass(frozen=True)
class _Snapshot:
    wall: float
    busy: float | None  # seconds of this process's cores, that a hypervisor withheld included
    own: float  # seconds of this process and those that it started


class Watch:
    """Compares what this process's cores did with what this process did."""

    def __init__(self, device: str) -> None:
        """Watch from now on, for a benchmark of a device."""
        self._device = device
        self._num_cores = len(_cores())
        threads = dlattn.info().cpu_threads if device == "cpu" else 1  # which enqueues
        self._limit = max(0, self._num_cores - threads) + _TOLERATED * threads
        self._last = _snapshot()
        self._others = {"before": 0.0, "during": 0.0}  # cores in use, at most
        self._gpu = {"before": 0.0, "after": 0.0}  # percent
        self._is_busy = False

    def before(self) -> None:
        """Look around for half a second, before anything is computed."""
        self._last = _snapshot()
        time.sleep(_SAMPLE_SECONDS)
        self._look("before")
        if self._device == "cuda":
            self._gpu["before"] = _gpu_utilization()

    def during(self) -> bool:
        """Whether others used too much since the last look; after a moment alone as it said."""
        if time.monotonic() - self._last.wall >= _SAMPLE_SECONDS:
            self._look("during")
        return self._is_busy

    def after(self) -> None:
        """Look at the GPU, when the benchmark's own work on it has ended."""
        if self._device == "cuda":
            time.sleep(_GPU_SAMPLE_SECONDS)
            self._gpu["after"] = _gpu_utilization()

    def reasons(self) -> list[str]:
        """Why the figures cannot be relied on; empty on a quiet machine."""
        found = [
            f"other programs used {used:.1f} of {self._num_cores} cores {when} the benchmark"
            for when, used in self._others.items()
            if used > self._limit
        ]
        found += [
            f"other programs kept the GPU {percent:.0f}% busy {when} the benchmark"
            for when, percent in self._gpu.items()
            if percent > _TOLERATED_GPU
        ]
        return found

    def _look(self, when: str) -> None:
        now = _snapshot()
        others = _others(self._last, now)
        self._last = now
        self._others[when] = max(self._others[when], others)
        self._is_busy = others > self._limit


def warning(reasons: list[str]) -> str:
    """The line that is printed beside figures; empty on a quiet machine."""
    if not reasons:
        return ""
    return f"WARNING, {BUSY}: {'; '.join(reasons)}. Times and ratios may be far off."


def _others(first: _Snapshot, second: _Snapshot) -> float:
    """How many cores others used meanwhile."""
    seconds = max(second.wall - first.wall, 1e-9)
    own = (second.own - first.own) / seconds
    if first.busy is None or second.busy is None or second.busy == 0:
        return max(0.0, _load_average() - own)  # of the last minute
    return max(0.0, (second.busy - first.busy) / seconds - own)


def _snapshot() -> _Snapshot:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return _Snapshot(time.monotonic(), _busy_seconds(), own)


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _load_average() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _busy_seconds() -> float | None:
    """Since the machine started, of the cores that this process may use; None if it is not told."""
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in _cores()}
    ticks = 0
    for line in lines:
        name, *counts = line.split()
        if name in names:
            user, nice, system, _, _, *rest = map(int, counts[:8])  # but idle and iowait
            ticks += user + nice + system + sum(rest)  # of interrupts, and stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def _gpu_utilization() -> float:
    """Percent of the last moments in which kernels ran on torch's GPU; 0 if it is not told."""
    try:
        torch: Any = importlib.import_module("torch")
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        command = [*query, "-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return float(done.stdout)
    except (ImportError, AttributeError, RuntimeError, OSError, ValueError):
        return 0.0
    except subprocess.SubprocessError:
        return 0.0
