"""What the Python tests share."""

from __future__ import annotations

import os

import pytest
from arrays import FRAMEWORKS, Framework

import dlattn

# JAX would take most of a GPU's memory, which torch's tests need too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    info = dlattn.info()
    if info.gpu:
        return
    why = "; ".join(str(device) for device in info.devices) or info.device_status
    skip = pytest.mark.skip(reason=f"no usable GPU: {why}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=sorted(FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each tensor library that runs on the CPU."""
    return FRAMEWORKS[request.param]()


@pytest.fixture
def no_exchange_api():
    """Take tensors in through __dlpack__, as from types without the C exchange API."""
    dlattn._core.use_exchange_api(False)
    yield
    dlattn._core.use_exchange_api(True)
