"""The build backend: when it brings nvcc, when it does not, and what the sdist holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The backend, in an environment that says nothing of CUDA, on a machine with no toolkit and
    no driver."""
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    for variable in (
        "DLATTN_CUDA",
        *("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "CMAKE_BUILD_PARALLEL_LEVEL"),
        *("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT", "LIBRARY_PATH"),
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DLATTN_IGNORE_SYSTEM_CUDA", "1")
    monkeypatch.delenv("DLATTN_IGNORE_DRIVER", raising=False)
    monkeypatch.chdir(ROOT)
    import dlattn_backend

    monkeypatch.setattr(dlattn_backend, "driver_cuda", lambda: None)
    monkeypatch.setattr(dlattn_backend, "PROC_VERSION", Path("/nowhere"))
    make_nvidia_smi(monkeypatch, tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    return dlattn_backend


def make_nvcc(root: Path, version: str) -> Path:
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.99'\n")
    nvcc.chmod(0o755)
    return nvcc


def make_nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
    program = folder / "driver" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    query = '[ "$*" = "--query-gpu=driver_version --format=csv,noheader" ] || exit 2'
    program.write_text("\n".join(["#!/bin/sh", query, *lines, ""]))
    program.chmod(0o755)
    if str(program.parent) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)


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
    # The command line goes before the environment.
    settings = {"cmake.define.DLATTN_CUDA": "ON"}
    assert len(cuda_wheels(backend.get_requires_for_build_wheel(settings))) == 5


CUDA_OFF = {"cmake.define.DLATTN_CUDA": "OFF"}
CUDA_ON = {"cmake.define.DLATTN_CUDA": "ON"}


@pytest.mark.parametrize("value", ["OFF", "off", "0", "FALSE", "No", " OFF "])
def test_variable_of_the_environment_switches_cuda_off(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DLATTN_CUDA", value)
    assert cuda_wheels(backend.get_requires_for_build_wheel()) == []
    assert cuda_wheels(backend.get_requires_for_build_editable()) == []
    assert len(cuda_wheels(backend.get_requires_for_build_wheel(CUDA_ON))) == 5
    monkeypatch.setenv("CMAKE_ARGS", "-DDLATTN_CUDA=ON")
    assert len(cuda_wheels(backend.get_requires_for_build_wheel())) == 5


@pytest.mark.parametrize(
    ("environment", "settings", "expected"),
    [
        ({"DLATTN_CUDA": "OFF"}, None, "OFF"),
        ({"DLATTN_CUDA": ""}, CUDA_OFF, "OFF"),
        ({"DLATTN_CUDA": "ON"}, CUDA_OFF, "OFF"),
        ({"CMAKE_ARGS": "-DDLATTN_CUDA=ON"}, CUDA_OFF, "OFF"),
        ({"CMAKE_ARGS": "-DDLATTN_CUDA=OFF"}, {"cmake.args": "-DDLATTN_CUDA=0"}, "0"),
        ({"DLATTN_CUDA": "ON", "SKBUILD_CMAKE_DEFINE": "DLATTN_CUDA=NO"}, None, "NO"),
    ],
)
def test_cmake_is_given_what_the_compiler_was_chosen_by(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    settings: dict[str, str] | None,
    expected: str,
) -> None:
    """scikit-build-core gives CMake the definitions of CMAKE_ARGS last, and the last one counts."""
    from scikit_build_core.builder.builder import get_cmake_args_from_settings
    from scikit_build_core.settings.skbuild_model import ScikitBuildSettings

    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "1")
    monkeypatch.setenv("CMAKE_ARGS", "")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    backend._prepare(settings)
    given = get_cmake_args_from_settings(ScikitBuildSettings(), os.environ)
    assert [word for word in given if "DLATTN_CUDA" in word][-1] == f"-DDLATTN_CUDA={expected}"


@pytest.mark.parametrize("value", ["of", "maybe", "2", "cpu"])
def test_neither_on_nor_off_is_refused(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    message = rf"DLATTN_CUDA is '{value}'; accepted: ON or OFF"
    settings = {"cmake.define.DLATTN_CUDA": value}
    for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        with pytest.raises(SystemExit, match=message):
            hook(settings)
    monkeypatch.setenv("DLATTN_CUDA", value)
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "1")
    for hook in (backend.build_wheel, backend.build_editable):
        with pytest.raises(SystemExit, match=message):
            hook(str(tmp_path))
    assert cuda_wheels(backend.get_requires_for_build_wheel(CUDA_OFF)) == []  # goes before it


def option_of_cmake(
    tmp_path: Path, environment: dict[str, str], *definitions: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    if not cmake:
        pytest.skip("no cmake")
    script = tmp_path / "option.cmake"
    script.write_text(
        f'cmake_minimum_required(VERSION 3.24)\ninclude("{ROOT}/cmake/Options.cmake")\n'
        'dlattn_option_or_environment(DLATTN_CUDA "the kernels" ON)\n'
        'dlattn_option(DLATTN_TESTS "the tests" OFF)\n'
        "if(DLATTN_CUDA)\n  message(STATUS built)\nendif()\n"
    )
    rest = {name: value for name, value in os.environ.items() if name != "DLATTN_CUDA"}
    return subprocess.run(
        [cmake, *definitions, "-P", str(script)],
        env={**rest, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("environment", "definitions", "built"),
    [
        ({}, (), True),
        ({"DLATTN_CUDA": ""}, (), True),
        ({"DLATTN_CUDA": "off"}, (), False),
        ({"DLATTN_CUDA": "0"}, ("-DDLATTN_CUDA=ON",), True),
        ({"DLATTN_CUDA": "ON"}, ("-DDLATTN_CUDA=OFF",), False),
    ],
)
def test_cmake_takes_the_variable_of_the_environment(
    tmp_path: Path, environment: dict[str, str], definitions: tuple[str, ...], built: bool
) -> None:
    result = option_of_cmake(tmp_path, environment, *definitions)
    assert result.returncode == 0, result.stderr
    assert ("-- built" in result.stdout) == built
    if environment.get("DLATTN_CUDA"):
        source = "(environment)" if not definitions else "goes before the environment's"
        assert source in result.stdout


@pytest.mark.parametrize(
    ("environment", "definitions", "place"),
    [
        ({"DLATTN_CUDA": "maybe"}, (), "DLATTN_CUDA of the environment"),
        ({}, ("-DDLATTN_CUDA=maybe",), "DLATTN_CUDA"),
        ({}, ("-DDLATTN_TESTS=maybe",), "DLATTN_TESTS"),
    ],
)
def test_cmake_refuses_what_is_neither_on_nor_off(
    tmp_path: Path, environment: dict[str, str], definitions: tuple[str, ...], place: str
) -> None:
    result = option_of_cmake(tmp_path, environment, *definitions)
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert f'dlattn: {place} is "maybe"; accepted: ON or OFF.' in message


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


@pytest.fixture
def toolkits(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[str]]:
    """Installs toolkits of these versions; the first is in PATH, the others beside it."""

    def install(*versions: str) -> list[str]:
        monkeypatch.delenv("DLATTN_IGNORE_SYSTEM_CUDA", raising=False)
        monkeypatch.setattr(backend, "VERSIONED_NVCC", str(tmp_path / "cuda-*" / "bin" / "nvcc"))
        found = [make_nvcc(tmp_path / f"cuda-{version}", version) for version in versions]
        only = [found[0].parent, tmp_path / "driver"]  # no toolkit of this machine
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, [*only, "/usr/bin", "/bin"])))
        exists = backend._cuda_version
        here = str(tmp_path)
        monkeypatch.setattr(
            backend, "_cuda_version", lambda nvcc: exists(nvcc) if here in nvcc else (0, 0)
        )
        return [str(nvcc) for nvcc in found]

    return install


def set_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    make_nvidia_smi(monkeypatch, folder, f"echo {version}", f"echo {version}")  # two GPUs


@pytest.mark.parametrize("driver", ["550.54.15", "579.99", "470.256.02"])
def test_driver_too_old_for_the_compiler_from_pypi(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str
) -> None:
    set_driver(monkeypatch, tmp_path, driver)
    hooks = (
        backend.get_requires_for_build_wheel,
        backend.get_requires_for_build_editable,
        lambda: backend.build_wheel(str(tmp_path)),
    )
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "1")
    for hook in hooks:
        with pytest.raises(SystemExit) as error:
            hook()
        message = " ".join(str(error.value).split())
        assert f"the NVIDIA driver of this machine is {driver}. " in message
        assert (
            f"What NVIDIA's compiler from PyPI (CUDA {backend.CUDA_WHEEL_VERSION}) builds needs "
            "driver 580 or later and would not run here. Either - update the driver to 580"
            in message
        )
        assert "DLATTN_CUDA=OFF" in message and "DLATTN_IGNORE_DRIVER=1" in message
        # The driver 470 could not run the code of these either.
        helps = driver != "470.256.02"
        assert ("install a CUDA 12.x toolkit" in message) == helps
        assert ("a release wheel built with CUDA 12" in message) == helps
    assert cuda_wheels(backend.get_requires_for_build_sdist()) == []
    off = {"cmake.define.DLATTN_CUDA": "OFF"}
    assert cuda_wheels(backend.get_requires_for_build_wheel(off)) == []
    monkeypatch.setenv("DLATTN_IGNORE_DRIVER", "1")
    assert len(cuda_wheels(backend.get_requires_for_build_wheel())) == 5


@pytest.mark.parametrize("driver", ["580.65.06", "590.10"])
def test_new_driver(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str
) -> None:
    set_driver(monkeypatch, tmp_path, driver)
    assert len(cuda_wheels(backend.get_requires_for_build_wheel())) == 5


def test_driver_too_old_for_the_toolkit(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    toolkits: Callable[..., list[str]],
) -> None:
    (nvcc,) = toolkits("13.1")
    assert backend.system_nvcc() == nvcc  # without a driver
    set_driver(monkeypatch, tmp_path, "550.54.15")
    with pytest.raises(SystemExit) as error:
        backend.get_requires_for_build_wheel()
    assert f"What {nvcc} (CUDA 13.1) builds needs\ndriver 580 or later" in str(error.value)
    monkeypatch.setenv("DLATTN_IGNORE_DRIVER", "1")
    assert backend.system_nvcc() == nvcc


def test_toolkit_that_suits_the_driver_is_taken(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    toolkits: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    new, _, old = toolkits("13.0", "12.0", "12.4")
    set_driver(monkeypatch, tmp_path, "580.65.06")
    assert backend.system_nvcc() == new
    set_driver(monkeypatch, tmp_path, "550.54.15")
    assert backend.system_nvcc() == old
    note = f"dlattn: {new} (CUDA 13.0) is too new for the driver; using {old}\n"
    assert capsys.readouterr().err == note
    set_driver(monkeypatch, tmp_path, "470.256.02")
    with pytest.raises(SystemExit, match=r"CUDA 13\.0"):
        backend.system_nvcc()


def test_forward_compatible_library_goes_before_the_driver(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_driver(monkeypatch, tmp_path, "550.54.15")
    monkeypatch.setattr(backend, "driver_cuda", lambda: 13)
    assert len(cuda_wheels(backend.get_requires_for_build_wheel())) == 5
    monkeypatch.setattr(backend, "driver_cuda", lambda: 12)
    with pytest.raises(SystemExit, match=r"550\.54\.15"):
        backend.get_requires_for_build_wheel()


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (x)",
    ],
)
def test_driver_version_without_nvidia_smi(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    assert backend.driver_version() is None
    file = tmp_path / "version"
    file.write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    monkeypatch.setattr(backend, "PROC_VERSION", file)
    assert backend.driver_version() == "550.54.15"
    monkeypatch.setenv("PATH", "")
    assert backend.driver_version() == "550.54.15"


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
    folders = ("_build", "benchmarks", "cmake", "examples", "python", "src", "tests", "tools")
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
