"""The C++ side: its own tests, and a C++ program that uses the library in each way it can be had.

One static build without CUDA serves ctest and the installed static library; a shared build and
FetchContent are compiled apart. Where CUDA's headers are found, ctest also runs the kernels' own
source, compiled as host C++.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSUMER = ROOT / "tests" / "consumer"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# A pip-installed cmake and ninja stand beside the interpreter, which need not be in PATH.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def run(*command: str | Path) -> str:
    """Runs a command; its output is the message of the failure."""
    result = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        words = " ".join(map(str, command))
        pytest.fail(f"{words}: exit status {result.returncode}\n{result.stdout}", pytrace=False)
    return result.stdout


def configure(source: Path, build: Path, **definitions: object) -> None:
    run(
        *("cmake", "-S", source, "-B", build, "-G", "Ninja"),
        *(f"-D{name}={value}" for name, value in definitions.items()),
    )


def compile_and_install(build: Path, prefix: Path, **definitions: object) -> Path:
    configure(ROOT, build, DLATTN_CUDA="OFF", **definitions)
    run("cmake", "--build", build, "-j", str(CORES))
    run("cmake", "--install", build, "--prefix", prefix)
    return prefix


def check_consumer(build: Path, **definitions: object) -> None:
    """Builds the consumer and runs it: it checks its result itself."""
    configure(CONSUMER, build, **definitions)
    run("cmake", "--build", build, "-j", str(CORES))
    output = run(build / "consumer")
    assert "out = 2 3 4 5" in output and "refused: softmax_scale" in output, output


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    missing = [tool for tool in ("cmake", "ninja", "c++") if not shutil.which(tool, path=PATH)]
    if missing:
        pytest.skip(f"not found: {', '.join(missing)}")


@pytest.fixture(scope="module")
def static_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The build folder, with the C++ tests, and the prefix it was installed to."""
    folder = tmp_path_factory.mktemp("static")
    build, prefix = folder / "build", folder / "prefix"
    compile_and_install(build, prefix, BUILD_SHARED_LIBS="OFF", DLATTN_TESTS="ON")
    return build, prefix


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("suite", ["cpp", "simt"])
def test_ctest(
    static_build: tuple[Path, Path], suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ctest = ("ctest", "--test-dir", static_build[0], "-R", rf"^{suite}\.", "-j", str(CORES))
    if suite == "simt" and "Total Tests: 0" in run(*ctest, "-N"):
        pytest.skip("no simt tests in this build: they need g++ and CUDA's headers")
    output = run(*ctest, "--output-on-failure", "--no-tests=error")
    with capsys.disabled():
        print("", *re.findall(r"^.* Test +#.*$|^.*tests passed.*$", output, re.MULTILINE), sep="\n")


@pytest.mark.slow
def test_every_ctest_is_in_a_suite(static_build: tuple[Path, Path]) -> None:
    names = re.findall(r"Test +#\d+: (\S+)", run("ctest", "--test-dir", static_build[0], "-N"))
    assert names and not [name for name in names if not name.startswith(("cpp.", "simt."))]


@pytest.mark.slow
def test_consumer_of_installed_static_library(
    static_build: tuple[Path, Path], tmp_path: Path
) -> None:
    prefix = static_build[1]
    assert list(prefix.glob("lib*/libdlattn.a"))
    check_consumer(tmp_path, CMAKE_PREFIX_PATH=prefix)


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
