"""How tests build, install and consume the C++ library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
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


def build_folder(name: str, otherwise: Path) -> Path:
    """Where a test builds the library: .ci/run has its builds side by side, for ccache's sake."""
    folder = os.environ.get("DLATTN_TEST_BUILDS")
    return Path(folder) / name if folder else otherwise / "build"


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
    """Builds the consumers and runs them: they check their results themselves."""
    configure(CONSUMER, build, **definitions)
    run("cmake", "--build", build, "-j", str(CORES))
    for name in ("consumer_c",) if definitions.get("C_ALONE") else ("consumer", "consumer_c"):
        check_output(run(build / name))


def check_output(output: str) -> None:
    assert "out = 2 3 4 5" in output and "refused: softmax_scale" in output, output


def check_c_compiler(prefix: Path, build: Path) -> None:
    """Builds the consumer in C with the compiler alone, as a Makefile would."""
    library = next(prefix.glob("lib*/libdlattn.so")).parent
    build.mkdir()
    run(
        *("cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"),
        *("-I", prefix / "include", CONSUMER / "main.c", "-o", build / "consumer_c"),
        *("-L", library, f"-Wl,-rpath,{library}", "-ldlattn", "-lm"),
    )
    check_output(run(build / "consumer_c"))


def check_pkg_config(prefix: Path, build: Path) -> None:
    """Builds the consumer in C with the flags of pkg-config, from a prefix that was moved."""
    moved = build / "moved"
    shutil.copytree(prefix, moved, symlinks=True)
    package = next(moved.glob("lib*/pkgconfig/dlattn.pc"))
    flags = run("pkg-config", "--cflags", "--libs", package).split()
    run(
        *("cc", "-std=c99", CONSUMER / "main.c", "-o", build / "consumer_pc", *flags, "-lm"),
        f"-Wl,-rpath,{package.parents[1]}",
    )
    check_output(run(build / "consumer_pc"))


def skip_without_tools() -> None:
    missing = [
        tool for tool in ("cmake", "ninja", "cc", "c++") if not shutil.which(tool, path=PATH)
    ]
    if missing:
        pytest.skip(f"not found: {', '.join(missing)}")
