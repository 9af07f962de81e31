"""The installed package: its files, versions and symbols, and what importing it pulls in."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import dlattn

ROOT = Path(__file__).resolve().parents[3]
HEADERS = sorted((ROOT / "src" / "include" / "dlattn").glob("*.h"))
MAX_WHEEL_BYTES = 25_000_000  # .ci/nightly weighs a release's


@pytest.fixture(scope="module")
def distribution() -> importlib.metadata.Distribution:
    """The installed distribution; an editable one has its Python files elsewhere."""
    try:
        found = importlib.metadata.distribution("dlattn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dlattn is imported from a build folder, not from an installed package")
    if any("editable" in str(file) for file in found.files or []):
        pytest.skip("dlattn is installed editable")
    return found


@pytest.fixture(scope="module")
def library(distribution: importlib.metadata.Distribution) -> Path:
    return Path(str(distribution.locate_file("dlattn/lib/libdlattn.so")))


def tool(name: str, *arguments: str | Path) -> str:
    if not shutil.which(name):
        pytest.skip(f"no {name}")
    command = [name, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def python(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter, away from the source tree."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=os.path.abspath(os.sep),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def header_version() -> str:
    text = (ROOT / "src" / "include" / "dlattn" / "version.h").read_text()
    major, minor, patch = (
        re.search(rf"#define DLATTN_VERSION_{part} (\d+)", text)[1]  # type: ignore[index]
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    version = re.search(r'#define DLATTN_VERSION "(.*)"', text)
    assert version and version[1] == f"{major}.{minor}.{patch}"
    return version[1]


def test_one_version() -> None:
    assert dlattn.__version__ == dlattn.info().version == header_version()


def test_one_version_in_the_distribution(distribution: importlib.metadata.Distribution) -> None:
    version = header_version()
    assert distribution.version == version
    config = str(distribution.locate_file("dlattn/lib/cmake/dlattn/dlattnConfigVersion.cmake"))
    assert f'set(PACKAGE_VERSION "{version}")' in Path(config).read_text()


def test_one_wheel_serves_every_python(distribution: importlib.metadata.Distribution) -> None:
    tags = re.findall(r"^Tag: (.*)$", distribution.read_text("WHEEL") or "", re.MULTILINE)
    assert tags and all(tag.startswith("cp310-abi3-") for tag in tags), tags
    assert distribution.metadata["Requires-Python"] == ">=3.10"


def test_requirements(distribution: importlib.metadata.Distribution) -> None:
    always = [r for r in distribution.requires or [] if "extra ==" not in r]
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in always} == {
        "nanobind-backend",
        "numpy",
    }
    assert {"test", "docs", "bench", "dev"} <= set(
        distribution.metadata.get_all("Provides-Extra") or []
    )


def test_contents(distribution: importlib.metadata.Distribution) -> None:
    files = {str(file) for file in distribution.files or []}
    wanted = {
        "dlattn/__init__.py",
        "dlattn/__main__.py",
        "dlattn/_core.abi3.so",
        "dlattn/_core.pyi",
        "dlattn/py.typed",
        "dlattn/lib/libdlattn.so",
        "dlattn/lib/cmake/dlattn/dlattnConfig.cmake",
        "dlattn/lib/cmake/dlattn/dlattnConfigVersion.cmake",
        "dlattn/lib/pkgconfig/dlattn.pc",
        "dlattn/_attention.pyi",
        "dlattn/_kernel_names.pyi",
        *(f"dlattn/include/dlattn/{header.name}" for header in HEADERS),
    }
    assert wanted <= files, sorted(wanted - files)
    assert any(file.endswith("licenses/LICENSE") for file in files)
    allowed = re.compile(
        r"dlattn/.*\.(py|pyi|typed|h|cmake|pc|so|pyc)|dlattn/py.typed|dlattn-[\d.]+\.dist-info/.*"
        r"|(\.\./)+bin/dlattn"
    )
    assert not {file for file in files if not allowed.fullmatch(file)}
    assert {Path(f).name for f in files if f.endswith(".so")} == {"_core.abi3.so", "libdlattn.so"}


def test_wheel_is_small(distribution: importlib.metadata.Distribution) -> None:
    files = [
        Path(str(file.locate())) for file in distribution.files or [] if ".pyc" not in str(file)
    ]
    compressed = sum(len(zlib.compress(file.read_bytes())) for file in files if file.is_file())
    assert 20_000 < compressed < MAX_WHEEL_BYTES


def test_import_brings_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import dlattn\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    new = set(python(code).split()) - set(sys.stdlib_module_names)
    assert new <= {"dlattn", "nanobind_backend"}


def test_first_call_imports_no_framework() -> None:
    code = (
        "import sys, numpy as np, dlattn\n"
        "q = np.ones((1, 2, 1, 16), np.float32); dlattn.attention(q, q, q)\n"
        "print(*{'torch', 'cupy', 'jax', 'ml_dtypes'} & set(sys.modules))"
    )
    assert python(code) == ""


def test_works_without_visible_gpu() -> None:
    code = (
        "import numpy as np, dlattn\n"
        "print(dlattn.info())\n"
        "q = np.ones((1, 2, 1, 16), np.float32); print(dlattn.attention(q, q, q).sum())"
    )
    assert python(code, CUDA_VISIBLE_DEVICES="").endswith("32.0")


def test_library_needs_no_driver_and_no_toolkit(library: Path) -> None:
    dynamic = tool("readelf", "--dynamic", "--wide", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed and not [name for name in needed if "cuda" in name], needed
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", dynamic)


def test_module_finds_its_library_beside_it(library: Path) -> None:
    dynamic = tool("readelf", "--dynamic", "--wide", library.parents[1] / "_core.abi3.so")
    assert re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) == ["$ORIGIN/lib"]
    assert "libdlattn.so" in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert not re.findall(r"libpython[\d.]+", dynamic)


def test_exported_symbols_are_the_public_api(library: Path) -> None:
    exported = tool("nm", "--dynamic", "--defined-only", "--demangle", library).splitlines()
    names = [line.split(maxsplit=2)[2] for line in exported]
    public = re.compile(
        r"dlattn_\w+|((typeinfo|typeinfo name|vtable) for )?dlattn::\w+(::~\w+)?(\W.*)?"
    )
    assert names and not [name for name in names if not public.fullmatch(name)]
    inner = re.compile(r"dlattn::(core|cpu|cuda|scalar|wmma_qk|wmma_smem|wmma|sm90)::")
    assert not [name for name in names if inner.search(name)]
    headers = "".join(header.read_text() for header in HEADERS)
    in_c = set(re.findall(r"DLATTN_API [\w ]+?\*? ?\b(dlattn_\w+)\(", headers))
    assert in_c and in_c == {name for name in names if name.startswith("dlattn_")}
    headers = re.sub(r"\bdlattn_\w+\(", "", headers)
    functions = set(re.findall(r"DLATTN_API [\w:&*<> ]+?\b(?!__)(\w+)\(", headers))
    assert "forward" in functions
    assert functions == {
        m[1] for name in names if (m := re.match(r"dlattn::([a-z]\w*)[(\[]", name))
    }


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_header_stands_alone(header: Path, tmp_path: Path) -> None:
    source = tmp_path / "main.cpp"
    source.write_text(f'#include "dlattn/{header.name}"\n#include "dlattn/{header.name}"\n')
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    tool("g++", *flags, "-I", ROOT / "src" / "include", source)


def test_c_header_is_c99(tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text(
        '#include "dlattn/c.h"\n#include "dlattn/c.h"\nint main(void) { return 0; }\n'
    )
    flags = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only")
    tool("cc", *flags, "-I", ROOT / "src" / "include", source)


@pytest.mark.parametrize("option", ["--cmake-dir", "--include-dir"])
def test_command_line_prints_folders(
    distribution: importlib.metadata.Distribution, option: str
) -> None:
    command = [sys.executable, "-m", "dlattn", option]
    folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    expected = {"--cmake-dir": "dlattnConfig.cmake", "--include-dir": "dlattn/attention.h"}[option]
    assert (Path(folder) / expected).is_file()
