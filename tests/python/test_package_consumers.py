"""A C++ program that uses the library in each way it can be had but the static one.

The static library is built once, for the C++ tests too: test_package_cpp.py. These builds run
beside those tests.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from cpp_builds import ROOT, check_consumer, compile_and_install, run, skip_without_tools


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    skip_without_tools()


@pytest.mark.slow
def test_consumer_of_installed_shared_library(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    compile_and_install(tmp_path / "build", prefix, BUILD_SHARED_LIBS="ON")
    assert list(prefix.glob("lib*/libdlattn.so"))
    check_consumer(tmp_path / "consumer", CMAKE_PREFIX_PATH=prefix)


@pytest.mark.slow
def test_consumer_through_fetch_content(tmp_path: Path) -> None:
    check_consumer(tmp_path, DLATTN_SOURCE=ROOT, DLATTN_CUDA="OFF")


def test_consumer_of_python_package(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("dlattn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dlattn is imported from a build folder, not from an installed package")
    # Who links the shared library needs no CUDA toolkit, even where the library has CUDA kernels.
    cmake_dir = run(sys.executable, "-m", "dlattn", "--cmake-dir").strip()
    check_consumer(
        tmp_path,
        dlattn_DIR=cmake_dir,
        CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit="ON",
        CMAKE_CUDA_COMPILER="CMAKE_CUDA_COMPILER-NOTFOUND",
    )
