"""Where the commands compute: the CPU through NumPy, or a GPU through whichever framework is here.

The commands need no framework of their own. On a GPU somebody must own the memory, so the first of
CuPy, torch and JAX that imports and sees the GPU lends its arrays and its clock.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import dlattn
from dlattn._core import kernel_names
from dlattn.console.errors import CommandError, first_line

CPU_KERNELS = ("cpu",)
GPU_KERNELS = tuple(name for name in kernel_names if name not in ("auto", *CPU_KERNELS))

FLOAT8 = "float8_e4m3fn"

Array = NDArray[Any]
Call = Callable[[], object]

_WARMUP_CALLS = 3
_MEASURED_SECONDS = 0.15
_MEASURED_CALLS = (5, 50)  # at least, at most


class Device(Protocol):
    """A place to compute on."""

    kind: str  # "cpu" or "cuda"
    label: str

    def put(self, array: Array) -> Any:
        """Copy a NumPy array there."""

    def get(self, array: Any) -> Array:
        """Copy an array of the device to NumPy."""

    def poisoned(self, shape: tuple[int, ...], like: Any) -> Any:
        """An array full of NaN to write results into; None where arrays are immutable."""

    def seconds(self, call: Call) -> float:
        """Median time of a call, work on the device included."""


class CpuDevice:
    """NumPy arrays."""

    kind = "cpu"
    label = "CPU, NumPy arrays"

    def put(self, array: Array) -> Any:
        """NumPy arrays are there already."""
        return array

    def get(self, array: Any) -> Array:
        """NumPy arrays are here already."""
        return np.asarray(array)

    def poisoned(self, shape: tuple[int, ...], like: Any) -> Any:
        """An array full of NaN."""
        return np.full(shape, np.nan, dtype=like.dtype)

    def seconds(self, call: Call) -> float:
        """Median wall time."""
        return _median_wall_time(call)


class CupyDevice:
    """CuPy arrays on the current GPU."""

    kind = "cuda"

    def __init__(self) -> None:
        """Raise if CuPy is missing or cannot use the GPU."""
        self._cupy: Any = importlib.import_module("cupy")
        device = self._cupy.cuda.Device()
        name = self._cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        self._cupy.zeros(1).sum().get()
        self.label = f"{name}, CuPy {self._cupy.__version__} arrays"

    def put(self, array: Array) -> Any:
        """Copy to the GPU."""
        return self._cupy.asarray(array)

    def get(self, array: Any) -> Array:
        """Copy from the GPU."""
        host: Array = self._cupy.asnumpy(array)
        return host

    def poisoned(self, shape: tuple[int, ...], like: Any) -> Any:
        """An array full of NaN."""
        return self._cupy.full(shape, np.nan, dtype=like.dtype)

    def seconds(self, call: Call) -> float:
        """Median time between two events around the call."""

        def timed() -> float:
            start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e-3

        return _median(timed)


class TorchDevice:
    """torch tensors on the current GPU."""

    kind = "cuda"

    def __init__(self) -> None:
        """Raise if torch is missing or cannot use the GPU."""
        self._torch: Any = importlib.import_module("torch")
        self._torch.zeros(1, device="cuda").sum().item()
        name = self._torch.cuda.get_device_name()
        self.label = f"{name}, torch {self._torch.__version__} tensors"

    def put(self, array: Array) -> Any:
        """Copy to the GPU."""
        bits = {"bfloat16": np.int16, FLOAT8: np.int8}.get(array.dtype.name)
        if bits is not None:  # torch does not know NumPy's
            words = self._torch.from_numpy(np.array(array).view(bits))
            return words.view(getattr(self._torch, array.dtype.name)).cuda()
        return self._torch.from_numpy(np.array(array)).cuda()

    def get(self, array: Any) -> Array:
        """Copy from the GPU."""
        if array.dtype == self._torch.bfloat16:
            import ml_dtypes

            bits: Array = array.view(self._torch.int16).cpu().numpy()
            return bits.view(ml_dtypes.bfloat16)
        host: Array = array.cpu().numpy()
        return host

    def poisoned(self, shape: tuple[int, ...], like: Any) -> Any:
        """A tensor full of NaN."""
        return self._torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)

    def seconds(self, call: Call) -> float:
        """Median time between two events around the call."""

        def timed() -> float:
            start = self._torch.cuda.Event(enable_timing=True)
            end = self._torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3

        return _median(timed)


class JaxDevice:
    """JAX arrays on the first GPU; JAX has no events, so times include the wait for the result."""

    kind = "cuda"

    def __init__(self) -> None:
        """Raise if JAX is missing or cannot use the GPU."""
        self._jax: Any = importlib.import_module("jax")
        self._device = self._jax.devices("gpu")[0]
        self.label = f"{self._device.device_kind}, JAX {self._jax.__version__} arrays"

    def put(self, array: Array) -> Any:
        """Copy to the GPU."""
        return self._jax.device_put(array, self._device)

    def get(self, array: Any) -> Array:
        """Copy from the GPU."""
        return np.asarray(array)

    def poisoned(self, shape: tuple[int, ...], like: Any) -> Any:
        """JAX arrays are immutable: nothing can be written into."""
        return None

    def seconds(self, call: Call) -> float:
        """Median wall time until the result is ready."""
        return _median_wall_time(lambda: self._jax.block_until_ready(call()))


def gpu_status() -> str:
    """Why there is no GPU to compute on, in words; empty if there is one."""
    info = dlattn.info()
    if info.gpu:
        return ""
    return info.device_status or "; ".join(str(device) for device in info.devices)


def find_gpu(float8: bool = False) -> Device:
    """The GPU through the first framework that can use it; `float8`: that has float8_e4m3fn."""
    status = gpu_status()
    if status:
        raise CommandError(f"no GPU: {status}")
    attempts = []
    for name, kind in (("cupy", CupyDevice), ("torch", TorchDevice), ("jax", JaxDevice)):
        if name == "cupy" and float8:
            attempts.append(f"cupy has no {FLOAT8}")
            continue
        try:
            device: Device = kind()
        except ImportError:
            attempts.append(f"{name} is not installed")
        except Exception as error:  # each framework has errors of its own
            attempts.append(f"{name} cannot use it ({first_line(error)})")
        else:
            return device
    raise CommandError(
        f"there is a GPU, but nothing here can hold arrays on it: {'; '.join(attempts)}. "
        f"Install one of them, for example: pip install {'torch' if float8 else 'cupy-cuda13x'}"
    )


def find_device(name: str, float8: bool = False) -> Device:
    """The device that "cpu" or "cuda" names; `float8`: through what has float8_e4m3fn."""
    return CpuDevice() if name == "cpu" else find_gpu(float8)


def _median(timed: Callable[[], float]) -> float:
    for _ in range(_WARMUP_CALLS - 1):
        timed()
    least, most = _MEASURED_CALLS
    once = timed()
    count = min(most, max(least, int(_MEASURED_SECONDS / max(once, 1e-9))))
    return statistics.median(timed() for _ in range(count))


def _median_wall_time(call: Call) -> float:
    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return _median(timed)
