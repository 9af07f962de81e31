"""The facts by which a figure has to be read: commit, machine, versions, ceilings."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

import dlattn
from dlattn.bench import mma_ceiling
from dlattn.bench.timing import GpuClock, Prepared, Windows

_MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}


def describe(device: str, commit: str | None) -> dict[str, Any]:
    """Everything but the figures."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git": git_state(commit),
        "machine": _machine(device),
        "versions": _versions(device),
    }


def ceilings(device: str, dtype: str, windows: Windows, *, float8: bool = False) -> dict[str, Any]:
    """The fastest matrix products and copy that this machine does, in this run."""
    measure = _gpu_ceilings if device == "cuda" else _cpu_ceilings
    found = measure(dtype, windows)
    if float8 and device == "cuda":
        found["float8_tflops"] = _float8_product(windows)
    return found


def _gpu_ceilings(dtype: str, windows: Windows) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    clock = GpuClock()
    size = _MATMUL_SIZE["cuda"]
    a, b = (torch.randn(size, size, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    seconds = np.median(clock.window(Prepared(lambda: torch.matmul(a, b, out=product), 1), windows))
    source = torch.randn(_COPY_BYTES["cuda"] // 4, device="cuda")
    target = torch.empty_like(source)
    copy_seconds = np.median(clock.window(Prepared(lambda: target.copy_(source), 1), windows))
    return {
        "matmul": f"torch {dtype} {size}^3",
        "tflops": 2.0 * size**3 / float(seconds) / 1e12,
        "mma_sync_tflops": _mma_sync(dtype, windows),
        "copy_gb_per_s": 2.0 * _COPY_BYTES["cuda"] / float(copy_seconds) / 1e9,
    }


def _float8_product(windows: Windows) -> float | None:
    """A large product of float8_e4m3fn, by one scale each; None where torch has none."""
    torch: Any = importlib.import_module("torch")
    size = _MATMUL_SIZE["cuda"]
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> Any:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        seconds = np.median(GpuClock().window(Prepared(product, 1), windows))
    except (AttributeError, RuntimeError, ValueError):
        return None
    return 2.0 * size**3 / float(seconds) / 1e12


def _mma_sync(dtype: str, windows: Windows) -> float | None:
    """None where the driver does not let itself be asked."""
    try:
        return mma_ceiling.measure(dtype, windows)
    except (OSError, RuntimeError):
        return None


def _cpu_ceilings(dtype: str, windows: Windows) -> dict[str, Any]:
    """The CPU kernels compute in float32 (float64 for float64), whatever the tensors hold."""
    compute = "float64" if dtype == "float64" else "float32"
    size = _MATMUL_SIZE["cpu"]
    try:
        library: Any = importlib.import_module("torch")
        a = library.rand(size, size, dtype=getattr(library, compute))
        name = "torch"
    except ImportError:
        library, name = np, "numpy"
        a = np.random.default_rng(0).random((size, size)).astype(compute)
    seconds = _best_time(lambda: library.matmul(a, a), windows.measured_seconds)
    source = np.ones(_COPY_BYTES["cpu"] // 4, dtype=np.float32)
    target = np.empty_like(source)
    copy_seconds = _best_time(lambda: np.copyto(target, source), windows.measured_seconds)
    return {
        "matmul": f"{name} {compute} {size}^3",
        "tflops": 2.0 * size**3 / seconds / 1e12,
        "copy_gb_per_s": 2.0 * _COPY_BYTES["cpu"] / copy_seconds / 1e9,
    }


def _best_time(call: Any, budget: float) -> float:
    """A ceiling is what the machine can do, so the best of several."""
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < budget:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def git_state(commit: str | None) -> dict[str, Any]:
    """The commit given, else that of the checkout in the working directory."""
    if commit:
        return {"sha": commit, "dirty": None}
    try:
        top = Path(_output("git", "rev-parse", "--show-toplevel"))
        if not (top / "src" / "include" / "dlattn" / "version.h").is_file():
            return {"sha": None, "dirty": None}
        # Only changed code makes it another program; notes and results lying about do not.
        changes = _output("git", "status", "--porcelain", "--untracked-files=no")
        return {"sha": _output("git", "rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"sha": None, "dirty": None}


def _machine(device: str) -> dict[str, Any]:
    machine: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
    }
    if device == "cuda":
        torch: Any = importlib.import_module("torch")
        machine["gpu"] = torch.cuda.get_device_name()
        machine["compute_capability"] = list(torch.cuda.get_device_capability())
        machine["driver"] = _driver()
    return machine


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    """The driver's version; containers may have one of the two sources, or neither."""
    try:
        query = "--query-gpu=driver_version"
        return _output("nvidia-smi", query, "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass
    try:
        found = re.search(r"\b\d+\.[\d.]+\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[0] if found else None


def _versions(device: str) -> dict[str, Any]:
    versions: dict[str, Any] = {
        "dlattn": dlattn.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    names = {"torch": ("torch",), "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}
    names["fa4"] = ("flash-attn-4",)
    names["cudnn_frontend"] = ("nvidia-cudnn-frontend",)
    names["comfy_kitchen"] = ("comfy-kitchen",)
    names["flashinfer"] = ("flashinfer-python",)
    names["flash_attn"] = ("flash-attn",)
    names["fa3"] = ("flash-attn-3",)
    names["fa3-fwd"] = ("fa3-fwd",)  # its forward pass, with versions of its own
    names["xformers"] = ("xformers",)
    names["sageattention"] = ("sageattention",)
    for name, distributions in names.items():
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    if device == "cuda":
        torch: Any = importlib.import_module("torch")
        versions["torch_cuda"] = torch.version.cuda
        versions["cudnn"] = torch.backends.cudnn.version()
    return versions


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
