"""Shared by the Python tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, Framework
from command_line import INPUTS
from quick_bench import INSTANT

import dlattn
from dlattn import bench
from dlattn.bench import environment, load

# JAX would take most of a GPU's memory, which torch's tests need too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest tests begin first, so that others run beside them where there are workers.
    items.sort(key=lambda item: item.path.name != "test_package_cpp.py")
    if not os.environ.get("DLATTN_NIGHTLY"):
        later = pytest.mark.skip(reason="for .ci/nightly, or with DLATTN_NIGHTLY=1")
        for item in items:
            if "nightly" in item.keywords:
                item.add_marker(later)
    info = dlattn.info()
    if info.gpu:
        return
    why = "; ".join(str(device) for device in info.devices) or info.device_status
    skip = pytest.mark.skip(reason=f"no usable GPU: {why}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """gc.collect() looks at what a file's own tests have made: at frameworks, and at the 20,000
    tests there are, it takes two seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=sorted(FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each tensor library that runs on the CPU."""
    return FRAMEWORKS[request.param]()


@pytest.fixture
def torch() -> Iterator[Any]:
    """torch with a GPU, and no work on it when the test is over."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no GPU")
    yield torch
    torch.cuda.synchronize()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with a problem's q, k and v in it."""
    for name, array in INPUTS.items():
        np.save(tmp_path / f"{name}.npy", array)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark does everything once, has small ceilings, and is alone on the machine."""
    monkeypatch.setattr(load, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(load, "_others", lambda *_: 0.0)
    monkeypatch.setattr(load, "_gpu_utilization", lambda: 0.0)
    monkeypatch.setattr(load, "_GPU_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(bench, "QUICK", INSTANT)
    monkeypatch.setattr(environment, "_MATMUL_SIZE", {"cpu": 64, "cuda": 256})
    monkeypatch.setattr(environment, "_COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 20})


@pytest.fixture
def no_exchange_api():
    """Take tensors in through __dlpack__, as from types without the C exchange API."""
    dlattn._core.use_exchange_api(False)
    yield
    dlattn._core.use_exchange_api(True)
