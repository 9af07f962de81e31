"""The C++ side's own tests, and a C++ program that uses the installed static library.

One static build without CUDA serves both. Where CUDA's headers are found, ctest also runs the
kernels' own source, compiled as host C++.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_builds import (
    CORES,
    build_folder,
    check_consumer,
    compile_and_install,
    run,
    skip_without_tools,
)


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    skip_without_tools()


@pytest.fixture(scope="module")
def static_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The build folder, with the C++ tests, and the prefix it was installed to.

    The library is compiled as pip compiles it, joined; file by file, as the nightly run's is, it
    takes more than twice the CPU seconds. Reports of the sanitizers name functions and no lines:
    the machine code is the same, and who looks for a fault compiles that test with lines.
    """
    folder = tmp_path_factory.mktemp("static")
    build, prefix = build_folder("static", folder), folder / "prefix"
    options = {
        "BUILD_SHARED_LIBS": "OFF",
        "DLATTN_JOINED": "ON",
        "DLATTN_TESTS": "ON",
        "DLATTN_SIMT_LINES": "OFF",
    }
    compile_and_install(build, prefix, **options)
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
    check_consumer(tmp_path / "cxx", CMAKE_PREFIX_PATH=prefix)
    check_consumer(tmp_path / "c", CMAKE_PREFIX_PATH=prefix, C_ALONE="ON")
