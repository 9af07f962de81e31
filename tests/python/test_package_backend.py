"""The build backend: when it brings nvcc, when it does not, and what the sdist holds."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The backend, in an environment that says nothing of CUDA, on a machine with no toolkit."""
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    for variable in (
        *("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "CMAKE_BUILD_PARALLEL_LEVEL"),
        *("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT", "LIBRARY_PATH"),
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DLATTN_IGNORE_SYSTEM_CUDA", "1")
    monkeypatch.chdir(ROOT)
    import dlattn_backend

    return dlattn_backend


def make_nvcc(root: Path, version: str) -> Path:
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.99'\n")
    nvcc.chmod(0o755)
    return nvcc


def cuda_wheels(requirements: list[str]) -> list[str]:
    return [requirement for requirement in requirements if requirement.startswith("nvidia-")]


def test_all_wheels_are_of_one_cuda_minor(backend: ModuleType) -> None:
    wheels = cuda_wheels(backend.get_requires_for_build_wheel())
    assert {wheel.partition("==")[0] for wheel in wheels} == {
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
        "nvidia-nvvm",
    }
    assert {wheel.partition("==")[2] for wheel in wheels} == {f"{backend.CUDA_WHEEL_VERSION}.*"}
    assert cuda_wheels(backend.get_requires_for_build_editable()) == wheels
    assert cuda_wheels(backend.get_requires_for_build_sdist()) == []


@pytest.mark.parametrize("value", ["OFF", "off", "0", "FALSE", "No", ""])
@pytest.mark.parametrize(
    "key", ["cmake.define.DLATTN_CUDA", "skbuild.cmake.define.DLATTN_CUDA", "cmake.args"]
)
def test_config_settings_switch_cuda_off(backend: ModuleType, key: str, value: str) -> None:
    setting = f"-DDLATTN_CUDA:BOOL={value}" if key == "cmake.args" else value
    assert cuda_wheels(backend.get_requires_for_build_wheel({key: setting})) == []
    assert cuda_wheels(backend.get_requires_for_build_wheel({key: ["-DX=1", setting]})) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CMAKE_ARGS", "-DFOO=1 -DDLATTN_CUDA=OFF"),
        ("SKBUILD_CMAKE_ARGS", "-DFOO=1;-DDLATTN_CUDA=OFF"),
        ("SKBUILD_CMAKE_DEFINE", "FOO=1;DLATTN_CUDA=OFF"),
    ],
)
def test_environment_switches_cuda_off(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert cuda_wheels(backend.get_requires_for_build_wheel()) == []
    # What the command line says goes before what the environment says.
    settings = {"cmake.define.DLATTN_CUDA": "ON"}
    assert len(cuda_wheels(backend.get_requires_for_build_wheel(settings))) == 5


def test_named_compiler_is_left_alone(backend: ModuleType) -> None:
    settings = {"cmake.define.CMAKE_CUDA_COMPILER": "/opt/cuda/bin/nvcc"}
    assert cuda_wheels(backend.get_requires_for_build_wheel(settings)) == []


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"])
def test_toolkit_is_found(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    nvcc = make_nvcc(tmp_path, "12.4")
    monkeypatch.delenv("DLATTN_IGNORE_SYSTEM_CUDA")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv(variable, str(nvcc if variable == "CUDACXX" else tmp_path))
    assert backend.system_nvcc() == str(nvcc)
    assert cuda_wheels(backend.get_requires_for_build_wheel()) == []


def test_old_toolkit_is_passed_over(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, new = make_nvcc(tmp_path / "old", "11.5"), make_nvcc(tmp_path / "new", "12.0")
    monkeypatch.delenv("DLATTN_IGNORE_SYSTEM_CUDA")
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "new"))
    assert backend.system_nvcc() == str(new)


def test_wheels_are_used_where_there_is_no_toolkit(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "nvidia" / f"cu{backend.CUDA_WHEEL_VERSION.split('.')[0]}"
    nvcc = make_nvcc(root, backend.CUDA_WHEEL_VERSION)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    # Set, so that monkeypatch takes back what the backend writes.
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "3")
    monkeypatch.setenv("CUDACXX", "")
    monkeypatch.setenv("CUDAToolkit_ROOT", "")
    monkeypatch.setenv("LIBRARY_PATH", "/elsewhere")
    backend._prepare(None)
    assert backend.os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    assert backend.os.environ["CUDACXX"] == str(nvcc)
    assert backend.os.environ["CUDAToolkit_ROOT"] == str(root)
    assert backend.os.environ["LIBRARY_PATH"] == f"{root / 'lib'}:/elsewhere"


def test_missing_compiler_is_explained(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "1")
    with pytest.raises(SystemExit) as error:
        backend.build_wheel(str(tmp_path))
    message = str(error.value)
    assert "no CUDA compiler" in message
    assert "CUDACXX" in message and "cmake.define.DLATTN_CUDA=OFF" in message
    assert all(wheel in message for wheel in backend.CUDA_WHEELS)


def test_sdist_holds_every_tracked_file_and_no_junk(backend: ModuleType, tmp_path: Path) -> None:
    """All but research/, which nothing in the build needs."""
    folders = ("_build", "benchmarks", "cmake", "python", "src", "tests")
    listing = subprocess.run(
        ["git", "ls-files", *folders, "*.md", ":(exclude)research"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = {path for path in listing.stdout.splitlines() if (ROOT / path).exists()}
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        members = {member.partition("/")[2] for member in archive.getnames()}
    wanted = tracked | {"pyproject.toml", "CMakeLists.txt", "LICENSE"}
    assert wanted <= members, sorted(wanted - members)
    unwanted = (".git", "build", "dist", "research")
    junk = [m for m in members if m.startswith(unwanted) or "__pycache__" in m]
    assert not junk
