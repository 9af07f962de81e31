"""Which architectures a build is for: cmake/Archs.cmake, with made-up compilers and GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
CUDA_13 = (75, 80, 86, 87, 88, 89, 90, 100, 110, 103, 120, 121)
CUDA_12_0 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)

Choose = Callable[..., subprocess.CompletedProcess[str]]


def write_program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.fixture
def choose(tmp_path: Path) -> Choose:
    """Runs the choice, on a machine with these GPUs ("8.9") and this compiler."""
    cmake = shutil.which("cmake", path=PATH)
    if not cmake:
        pytest.skip("no cmake")
    script = tmp_path / "choose.cmake"
    script.write_text(
        f'cmake_minimum_required(VERSION 3.24)\ninclude("{ROOT}/cmake/Archs.cmake")\n'
        'dlattn_choose_archs(chosen "${NVCC}")\nmessage(STATUS "chosen: ${chosen}")\n'
        'message(STATUS "families of their own: ${DLATTN_ASKED_FAMILY_ARCHS}")\n'
        'message(STATUS "small: ${DLATTN_SMALL}")\n'
    )

    def run(
        gpus: list[str] | None = None,
        known: tuple[int, ...] = CUDA_13,
        query: str | None = None,  # the output of nvcc's own query
        environment: dict[str, str] | None = None,
        **definitions: str,
    ) -> subprocess.CompletedProcess[str]:
        nvcc = write_program(tmp_path / "cuda" / "bin" / "nvcc", *(f"echo sm_{a}" for a in known))
        write_program(
            nvcc.with_name("__nvcc_device_query"),
            *(["echo failed >&2; exit 1"] if query is None else [f"printf '{query}'"]),
        )
        failure = "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9"
        write_program(
            tmp_path / "bin" / "nvidia-smi",
            '[ "$*" = "--query-gpu=compute_cap --format=csv,noheader" ] || exit 2',
            *([failure] if gpus is None else [f"echo '{gpu}'" for gpu in gpus]),
        )
        unset = {"DLATTN_ARCHS", "CUDAARCHS"}
        inherited = {key: value for key, value in os.environ.items() if key not in unset}
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        defined = [f"-D{key}={value}" for key, value in definitions.items()]
        return subprocess.run(
            [cmake, f"-DNVCC={nvcc}", *defined, "-P", str(script)],
            env={**inherited, "PATH": path, **(environment or {})},
            capture_output=True,
            text=True,
        )

    return run


def chosen(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    match = re.search(r"^-- chosen: (.*)$", result.stdout, re.MULTILINE)
    assert match
    return match[1]


def said(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is built."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("-- dlattn: ")]
    assert len(lines) == 1, result.stdout
    return lines[0].removeprefix("-- dlattn: ")


def error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0, result.stdout
    return " ".join(result.stderr.split())


def families(result: subprocess.CompletedProcess[str]) -> str:
    """The architectures whose own families are asked for, beside those that are chosen."""
    match = re.search(r"^-- families of their own: ?(.*)$", result.stdout, re.MULTILINE)
    assert match
    return match[1]


def is_small(result: subprocess.CompletedProcess[str]) -> bool:
    """Whether kernels are compressed for size, which takes time."""
    match = re.search(r"^-- small: (ON|OFF)$", result.stdout, re.MULTILINE)
    assert match
    return match[1] == "ON"


ALL = "80-real;89-real;90-real;120-real;89-virtual"
COMMON = "89-real;80-virtual;89-virtual"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["8.0"], "80-real;80-virtual"),
        (["8.6"], "86-real;86-virtual"),
        (["8.9"], "89-real;89-virtual"),
        (["9.0"], "90-real;90-virtual"),
        (["12.0"], "120-real;120-virtual"),
        (["9.0", "9.0"], "90-real;90-virtual"),
        (["12.0", "8.9", "7.5"], "89-real;120-real;89-virtual"),  # PTX of the oldest
        (["8.9", "[N/A]"], "89-real;89-virtual"),
        (["12.9"], "121-real;121-virtual"),  # the newest machine code that runs there
        (["13.0"], "80-virtual"),
    ],
)
def test_gpus_of_the_machine(choose: Choose, gpus: list[str], expected: str) -> None:
    result = choose(gpus)
    assert chosen(result) == expected
    assert families(result) == ""  # those of 9.0 come with any 90


def test_native(choose: Choose) -> None:
    assert chosen(choose(["9.0", "8.9"], DLATTN_ARCHS="native")) == "89-real;90-real;89-virtual"


@pytest.mark.parametrize("gpus", [None, [], ["[N/A]"], ["7.5"]])
def test_common_where_there_is_no_gpu(choose: Choose, gpus: list[str] | None) -> None:
    result = choose(gpus)
    assert chosen(result) == COMMON
    assert families(result) == "90a"


def test_common_may_be_asked_for(choose: Choose) -> None:
    result = choose(["9.0"], CUDA_12_0, DLATTN_ARCHS="common")
    assert chosen(result) == COMMON
    assert families(result) == "90a"
    assert families(choose(None, DLATTN_ARCHS="all")) == ""
    assert families(choose(None, CMAKE_CUDA_ARCHITECTURES="89")) == ""


def test_nvcc_is_asked_where_nvidia_smi_does_not_know(choose: Choose) -> None:
    assert chosen(choose(None, query="89")) == "89-real;89-virtual"
    assert chosen(choose(["[N/A]"], query="90\\n120\\n")) == "90-real;120-real;90-virtual"
    assert chosen(choose(["8.9"], query="90")) == "89-real;89-virtual"


def test_all_is_what_this_compiler_knows(choose: Choose) -> None:
    result = choose(["8.9"], CUDA_12_0, DLATTN_ARCHS="all")
    assert chosen(result) == "80-real;89-real;90-real;89-virtual"
    assert "this nvcc does not know 12.0, where the PTX serves" in said(result)
    result = choose(["12.0"], CUDA_12_0)
    assert chosen(result) == "80-virtual"
    assert "building PTX alone (GPU found: 12.0; this nvcc does not know 12.0" in said(result)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("all", ALL),
        (" all ", ALL),
        ("89", "89-real;89-virtual"),
        ("8.9", "89-real;89-virtual"),
        ("89;90", "89-real;90-real;89-virtual"),
        ("89,90", "89-real;90-real;89-virtual"),
        ("8.9 12.0", "89-real;120-real;89-virtual"),
        ("90;89;90", "89-real;90-real;89-virtual"),
        ("native;90", "86-real;90-real;86-virtual"),
        ("86;native", "86-real;86-virtual"),
    ],
)
def test_list(choose: Choose, asked: str, expected: str) -> None:
    assert chosen(choose(["8.6"], DLATTN_ARCHS=asked)) == expected


def test_definition_goes_before_the_environment(choose: Choose) -> None:
    environment = {"DLATTN_ARCHS": "120"}
    assert chosen(choose(["8.6"], environment=environment)) == "120-real;120-virtual"
    result = choose(["8.6"], environment=environment, DLATTN_ARCHS="89;90")
    assert chosen(result) == "89-real;90-real;89-virtual"


@pytest.mark.parametrize("asked", ["75", "7.5", "99", "sm_89", "90a", "89-real", "all", "common"])
def test_unknown_value_is_refused(choose: Choose, asked: str) -> None:
    message = error(choose(["8.9"], DLATTN_ARCHS=f"89;{asked}"))
    assert f'DLATTN_ARCHS is "89;{asked}" and has "{asked}".' in message
    assert "Accepted: common; all; native, for the GPUs of this machine; or a list" in message
    assert "nvcc knows (89;90): 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121." in message


@pytest.mark.parametrize(("gpus", "found"), [(None, "none"), (["7.5"], "7.5")])
def test_native_without_a_gpu_is_refused(
    choose: Choose, gpus: list[str] | None, found: str
) -> None:
    message = error(choose(gpus, DLATTN_ARCHS="native"))
    assert 'DLATTN_ARCHS is "native", and no GPU of compute capability 8.0 or later' in message
    assert f"(found: {found}; asked: nvidia-smi, __nvcc_device_query)" in message
    assert "Accepted: common, all, or a list of compute capabilities (89;90)." in message


def test_cmakes_own_variable_goes_first(choose: Choose) -> None:
    result = choose(["8.9"], CMAKE_CUDA_ARCHITECTURES="80;90-real", DLATTN_ARCHS="120")
    assert chosen(result) == "80;90-real"
    assert said(result) == "building for 80, 90-real (CMAKE_CUDA_ARCHITECTURES)"
    assert chosen(choose(["8.9"], environment={"CUDAARCHS": "80", "DLATTN_ARCHS": "120"})) == "80"
    assert chosen(choose(None, CMAKE_CUDA_ARCHITECTURES="native")) == "native"
    message = error(choose(None, CMAKE_CUDA_ARCHITECTURES="75"))
    assert 'CMAKE_CUDA_ARCHITECTURES has "75"; the kernels need compute capability 8.0' in message


def test_one_line_says_what_is_built_and_why(choose: Choose) -> None:
    assert said(choose(["8.9"])) == (
        "building machine code for 8.9 and PTX for 8.9 and later (GPU found: 8.9). "
        "DLATTN_ARCHS=all builds machine code for every GPU."
    )
    assert said(choose(None)) == (
        "building machine code for 8.9 and PTX for 8.0 and later, with the kernels for 9.0 alone "
        "(no GPU found). DLATTN_ARCHS=all builds machine code for every GPU, DLATTN_ARCHS=90 for a "
        "Hopper."
    )
    assert said(choose(["8.9"], DLATTN_ARCHS="all")) == (
        "building machine code for 8.0, 8.9, 9.0, 12.0 and PTX for 8.9 and later (DLATTN_ARCHS: "
        "all). DLATTN_ARCHS=common, native, or a list as 89;90, builds for fewer in less time."
    )
    assert "(no GPU of compute capability 8.0 or later found)" in said(choose(["7.5"]))
    assert "machine code for 8.9, 9.0 and PTX for 8.9 and later (DLATTN_ARCHS: 89, 90)" in said(
        choose(["8.6"], DLATTN_ARCHS="89;90")
    )


@pytest.mark.parametrize(
    ("environment", "small"),
    [
        ({}, False),
        ({"DLATTN_ARCHS": "common"}, False),
        ({"DLATTN_ARCHS": "native"}, False),
        ({"DLATTN_ARCHS": "all"}, True),
        ({"DLATTN_ARCHS": "89;90"}, True),
        ({"DLATTN_ARCHS": "90"}, False),
        ({"CUDAARCHS": "89"}, True),
    ],
)
def test_what_is_built_for_one_machine_takes_no_time_to_compress(
    choose: Choose, environment: dict[str, str], small: bool
) -> None:
    assert is_small(choose(["8.9"], environment=environment)) is small
    if "native" not in environment.values():
        assert is_small(choose(environment=environment)) is small


@pytest.fixture
def flags(tmp_path: Path) -> Callable[[bool, str], list[str]]:
    """nvcc's options for a list of architectures, of files with `shared` PTX or without."""
    cmake = shutil.which("cmake", path=PATH)
    if not cmake:
        pytest.skip("no cmake")

    def run(shared: bool, archs: str) -> list[str]:
        script = tmp_path / "flags.cmake"
        script.write_text(
            f'cmake_minimum_required(VERSION 3.24)\ninclude("{ROOT}/cmake/Archs.cmake")\n'
            f'dlattn_code_flags(flags {"ON" if shared else "OFF"} "{archs}")\n'
            'message(STATUS "flags: ${flags}")\n'
        )
        command = [cmake, "-P", str(script)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        match = re.search(r"^-- flags: (.*)$", output, re.MULTILINE)
        assert match
        prefix = "--generate-code=arch=compute_"
        return [flag.removeprefix(prefix) for flag in match[1].split(";")]

    return run


def test_ptx_for_8_0_becomes_machine_code_for_8_9(flags: Callable[[bool, str], list[str]]) -> None:
    shared = ["80,code=sm_89", "-DDLATTN_CODE_OF_89"]
    assert flags(True, COMMON) == [*shared, "80,code=compute_80"]
    assert flags(False, COMMON) == ["89,code=sm_89", "80,code=compute_80", "89,code=compute_89"]
    assert flags(True, "89-real;90-real;80-virtual") == [
        *shared,
        "90,code=sm_90",
        "80,code=compute_80",
    ]
    # Machine code for 8.0 hands stages over otherwise, and a release's is compiled for each.
    beside = "80-real;89-real;80-virtual"
    for archs in (ALL, beside, "89-real;89-virtual", "80-real;80-virtual", "86-real;80-virtual"):
        assert flags(True, archs) == flags(False, archs)


def test_flags_of_cmakes_own_list(flags: Callable[[bool, str], list[str]]) -> None:
    assert flags(True, "89") == ["89,code=sm_89", "89,code=compute_89"]
    assert flags(True, "90a-real;120f") == [
        "90a,code=sm_90a",
        "120f,code=sm_120f",
        "120f,code=compute_120f",
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-DDLATTN_CUDA=ON",), "dlattn: DLATTN_CUDA is ON and DLATTN_PYTHON is OFF,"),
        (("-DDLATTN_PYTHON=ON",), "dlattn: DLATTN_CUDA is OFF and DLATTN_PYTHON is ON,"),
        (("-DCMAKE_CXX_COMPILER_ID=GNU",), "dlattn: the C++ compiler is GNU's,"),
    ],
)
def test_windows_has_the_cpu_library_alone(
    options: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    cmake = shutil.which("cmake", path=PATH)
    if not cmake:
        pytest.skip("no cmake")
    system = ["-DCMAKE_SYSTEM_NAME=Windows", "-DCMAKE_CXX_COMPILER_FORCED=ON"]
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path), *system, *options]
    environment = {n: x for n, x in os.environ.items() if n != "DLATTN_CUDA"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    words = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert told in words and "Accepted: -DDLATTN_CUDA=OFF" in words


@pytest.mark.parametrize("which", ["PROJECT_SOURCE_DIR", "PROJECT_BINARY_DIR"])
def test_a_comma_in_a_folders_name(which: str) -> None:
    """nvcc reads `-I"a, b"` as two folders, and does not find the headers."""
    cmake = shutil.which("cmake", path=PATH)
    if not cmake:
        pytest.skip("no cmake")
    folders = {"PROJECT_SOURCE_DIR": "/src", "PROJECT_BINARY_DIR": "/src/build", which: "/a, b"}
    defined = [f"-D{name}={folder}" for name, folder in folders.items()]
    command = [cmake, "-DDLATTN_CUDA=ON", *defined, "-P", str(ROOT / "cmake" / "Cuda.cmake")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    told = " ".join(result.stderr.split())
    assert 'a folder whose name has a comma for two: "/a, b". Build in another folder' in told
