"""Programs in C++, C and Rust that use the library in each way it can be had but the static one.

The static library is built once, for the C++ tests too: test_package_cpp.py. These builds run
beside those tests.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest
from cpp_builds import (
    CONSUMER,
    ROOT,
    build_folder,
    check_c_compiler,
    check_consumer,
    check_pkg_config,
    compile_and_install,
    configure,
    run,
    skip_without_tools,
)


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    skip_without_tools()


@pytest.fixture(scope="module")
def shared_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix that it is installed to."""
    folder = tmp_path_factory.mktemp("shared")
    build = build_folder("shared", folder)
    # These tests are of what the library exports and of what is installed beside it, which no
    # optimisation changes: without it a quarter fewer CPU seconds. pip's build is the optimised
    # shared one, test_package_cpp.py's the static one.
    options = {"BUILD_SHARED_LIBS": "ON", "DLATTN_JOINED": "ON", "CMAKE_CXX_FLAGS_RELEASE": "-O0"}
    return compile_and_install(build, folder / "prefix", **options)


@pytest.mark.slow
def test_consumer_of_installed_shared_library(shared_library: Path, tmp_path: Path) -> None:
    assert list(shared_library.glob("lib*/libdlattn.so"))
    check_consumer(tmp_path / "consumer", CMAKE_PREFIX_PATH=shared_library)


@pytest.mark.slow
def test_consumer_by_the_c_compiler_alone(shared_library: Path, tmp_path: Path) -> None:
    check_c_compiler(shared_library, tmp_path / "c")


@pytest.mark.slow
def test_consumer_by_pkg_config(shared_library: Path, tmp_path: Path) -> None:
    if not shutil.which("pkg-config"):
        pytest.skip("not found: pkg-config")
    check_pkg_config(shared_library, tmp_path)


@pytest.mark.slow
def test_rust_example(shared_library: Path, tmp_path: Path) -> None:
    if not shutil.which("cargo") or not shutil.which("rustc"):
        pytest.skip("not found: cargo, rustc")
    library = next(shared_library.glob("lib*/libdlattn.so")).parent
    folders = {"DLATTN_LIB_DIR": str(library), "CARGO_TARGET_DIR": str(tmp_path / "target")}
    shutil.copytree(ROOT / "examples" / "rust", tmp_path / "rust")  # cargo writes a lock file
    output = run(
        *("env", *(f"{name}={value}" for name, value in folders.items())),
        *("cargo", "run", "--offline", "--quiet", "--manifest-path", tmp_path / "rust/Cargo.toml"),
    )
    assert "largest error" in output and "refused: softmax_scale" in output, output


@pytest.mark.nightly
def test_consumer_through_fetch_content(tmp_path: Path) -> None:
    check_consumer(tmp_path, DLATTN_SOURCE=ROOT, DLATTN_CUDA="OFF")


def test_fetch_content_refuses_a_project_in_c_alone(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"languages of consumer, .*lack CXX; accepted"):
        configure(CONSUMER, tmp_path, DLATTN_SOURCE=ROOT, C_ALONE="ON")


def test_fast_math_of_a_project_stays_out(tmp_path: Path) -> None:
    """With it NaN passes every check of a number, and -inf hides no key."""
    configure(ROOT, tmp_path, DLATTN_CUDA="OFF", CMAKE_CXX_FLAGS="-ffast-math")
    commands = run("ninja", "-C", tmp_path, "-t", "commands", "dlattn").splitlines()
    compiled = [words for words in map(str.split, commands) if "-ffast-math" in words]
    assert len(compiled) > 50
    for words in compiled:
        assert words.index("-ffast-math") < words.index("-fno-fast-math")


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
