"""dlattn's build backend: scikit-build-core, plus nvcc from PyPI where no CUDA toolkit is found.

The CUDA compiler is looked for in CUDACXX, PATH, CUDA_HOME, CUDA_PATH, CUDAToolkit_ROOT and
/usr/local/cuda*. Where it is in none of them, the hooks that name build requirements add NVIDIA's
compiler wheels, and the hooks that build point CMake at them. A build with DLATTN_CUDA=OFF, a CMake
definition or a variable of the environment, asks for no compiler at all.

The library links CUDA's runtime statically, and a runtime refuses drivers older than its major
version of CUDA. A compiler too new for the driver of this machine is passed over; where no other
is left, the build stops before it fetches or compiles anything. Which GPUs the kernels are compiled
for is decided in cmake/Archs.cmake.

DLATTN_IGNORE_DRIVER=1 builds whatever the driver, for another machine.
DLATTN_IGNORE_SYSTEM_CUDA=1 passes over an installed toolkit, to try the PyPI route on a machine
that has one.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scikit_build_core import build as skbuild

ConfigSettings = dict[str, str | list[str]]

# All five of one CUDA minor: nvcc runs its own ptxas and the cicc of -nvvm, and includes headers of
# the other three.
CUDA_WHEEL_VERSION = "13.0"
CUDA_WHEELS = [
    f"{name}=={CUDA_WHEEL_VERSION}.*"
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
        "nvidia-nvvm",
    )
]
MIN_CUDA = (12, 0)
VERSIONED_NVCC = "/usr/local/cuda-1[2-9]*/bin/nvcc"
PROC_VERSION = Path("/proc/driver/nvidia/version")
MIN_DRIVER = {12: 525, 13: 580}  # by the major version of the CUDA runtime

NO_COMPILER = f"""\
dlattn: no CUDA compiler. Looked for nvcc {MIN_CUDA[0]}.{MIN_CUDA[1]} or later in CUDACXX, PATH,
CUDA_HOME, CUDA_PATH, CUDAToolkit_ROOT and /usr/local/cuda*, and for NVIDIA's wheels in this
environment. Either
  - install the CUDA toolkit, or set CUDACXX to its nvcc;
  - build without --no-build-isolation, which brings nvcc from PyPI;
  - pip install {" ".join(repr(wheel) for wheel in CUDA_WHEELS)}; or
  - set DLATTN_CUDA=OFF, or add --config-settings=cmake.define.DLATTN_CUDA=OFF, for the CPU backend
    alone."""


def _as_list(value: str | list[str]) -> list[str]:
    return value.split(";") if isinstance(value, str) else list(value)


def _definitions(config_settings: ConfigSettings | None) -> Iterator[tuple[str, str]]:
    """CMake variables set from outside, in the order of increasing precedence."""
    settings = {
        key.removeprefix("skbuild."): value for key, value in (config_settings or {}).items()
    }
    cuda = os.environ.get("DLATTN_CUDA", "").strip()
    if cuda:
        yield "DLATTN_CUDA", cuda
    arguments = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    arguments += _as_list(os.environ.get("SKBUILD_CMAKE_ARGS", ""))
    arguments += [f"-D{item}" for item in _as_list(os.environ.get("SKBUILD_CMAKE_DEFINE", ""))]
    arguments += _as_list(settings.get("cmake.args", ""))
    for argument in arguments:
        match = re.fullmatch(r"-D(\w+)(?::\w+)?=(.*)", argument.strip())
        if match:
            yield match[1], match[2]
    for key, value in settings.items():
        if key.startswith("cmake.define."):
            last = value if isinstance(value, str) else value[-1]
            yield key.removeprefix("cmake.define."), last


def _is_false(value: str) -> bool:
    """Whether CMake reads `value` as false."""
    value = value.upper()
    return value in {"", "0", "OFF", "NO", "FALSE", "N", "IGNORE"} or value.endswith("NOTFOUND")


def _is_true(value: str) -> bool:
    return value.upper() in {"1", "ON", "YES", "TRUE", "Y"}


def asked_cuda(config_settings: ConfigSettings | None) -> str | None:
    """The value of DLATTN_CUDA from outside; stops the build if that is neither on nor off."""
    asked = dict(_definitions(config_settings)).get("DLATTN_CUDA")
    if asked is not None and not (_is_true(asked) or _is_false(asked)):
        raise SystemExit(f"dlattn: DLATTN_CUDA is {asked!r}; accepted: ON or OFF")
    return asked


def wants_compiler(config_settings: ConfigSettings | None) -> bool:
    """Whether the build compiles CUDA code and leaves the choice of compiler to this backend."""
    asked = asked_cuda(config_settings)
    if sys.platform == "darwin" or (asked is not None and _is_false(asked)):
        return False
    return not dict(_definitions(config_settings)).get("CMAKE_CUDA_COMPILER")


def _cuda_version(nvcc: str) -> tuple[int, int]:
    """The CUDA version of `nvcc`, (0, 0) if it does not run."""
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return (0, 0)
    match = re.search(r"release (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def driver_version() -> str | None:
    """The version of NVIDIA's driver, "550.54.15"; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    match = re.search(r"^(\d+(?:\.\d+)+)\s*$", output, re.MULTILINE)
    if not match:
        try:
            output = PROC_VERSION.read_text()
        except OSError:
            return None
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", output)
    return match[1] if match else None


def driver_cuda() -> int | None:
    """The major version of CUDA that the driver's library has; None if it cannot be asked.

    It may be newer than the driver: NVIDIA's forward compatibility packages replace it.
    """
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 and version.value > 0 else None


def min_driver(cuda_major: int) -> int:
    """The oldest driver that the runtime of a CUDA major, or of the newest known, accepts."""
    return MIN_DRIVER.get(cuda_major, max(MIN_DRIVER.values()))


def driver_runs(cuda_major: int) -> bool:
    """Whether this machine's driver runs what CUDA `cuda_major`.x builds; True without a driver."""
    if _is_set("DLATTN_IGNORE_DRIVER"):
        return True
    library = driver_cuda()
    if library is not None:
        return library >= cuda_major
    driver = driver_version()
    return driver is None or int(driver.partition(".")[0]) >= min_driver(cuda_major)


def _old_driver(compiler: str, cuda_major: int) -> str:
    """The error where the driver is too old for a compiler, with what helps."""
    needed = min_driver(cuda_major)
    found = driver_version() or f"one of CUDA {driver_cuda()}"
    remedies = [f"update the driver to {needed} or later;"]
    if driver_runs(MIN_CUDA[0]):
        remedies += [
            f"install a CUDA {MIN_CUDA[0]}.x toolkit, in /usr/local or named by CUDACXX;",
            f"install a release wheel built with CUDA {MIN_CUDA[0]} in place of the source;",
        ]
    remedies += [
        "set DLATTN_CUDA=OFF, or add --config-settings=cmake.define.DLATTN_CUDA=OFF, for the CPU "
        "backend alone; or",
        "set DLATTN_IGNORE_DRIVER=1 to build for another machine.",
    ]
    return "\n  - ".join(
        [
            f"dlattn: the NVIDIA driver of this machine is {found}. What {compiler} builds needs\n"
            f"driver {needed} or later and would not run here. Either",
            *remedies,
        ]
    )


def toolkits() -> Iterator[tuple[str, tuple[int, int]]]:
    """The nvcc of each installed toolkit that is recent enough, and its version."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    for variable in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        if os.environ.get(variable):
            candidates.append(os.path.join(os.environ[variable], "bin", "nvcc"))
    candidates += ["/usr/local/cuda/bin/nvcc", *sorted(glob.glob(VERSIONED_NVCC), reverse=True)]
    for nvcc in dict.fromkeys(filter(None, candidates)):
        version = _cuda_version(nvcc)
        if version >= MIN_CUDA:
            yield nvcc, version


def system_nvcc() -> str | None:
    """The nvcc of an installed toolkit, the first that this machine's driver can run code of.

    Stops the build if the driver is too old for every one that there is.
    """
    if _is_set("DLATTN_IGNORE_SYSTEM_CUDA"):
        return None
    passed_over: tuple[str, int] | None = None
    for nvcc, (major, minor) in toolkits():
        if driver_runs(major):
            if passed_over:
                note = f"dlattn: {passed_over[0]} is too new for the driver; using {nvcc}"
                print(note, file=sys.stderr, flush=True)
            return nvcc
        passed_over = passed_over or (f"{nvcc} (CUDA {major}.{minor})", major)
    if passed_over:
        raise SystemExit(_old_driver(*passed_over))
    return None


def wheels_root() -> Path | None:
    """The toolkit-like folder into which NVIDIA's wheels were installed."""
    for entry in sys.path:
        root = Path(entry) / "nvidia" / f"cu{CUDA_WHEEL_VERSION.split('.')[0]}"
        if (root / "bin" / "nvcc").is_file():
            return root
    return None


def _check_wheels_driver() -> None:
    """Stops the build if the driver is too old for NVIDIA's compiler from PyPI."""
    major = int(CUDA_WHEEL_VERSION.partition(".")[0])
    if not driver_runs(major):
        compiler = f"NVIDIA's compiler from PyPI (CUDA {CUDA_WHEEL_VERSION})"
        raise SystemExit(_old_driver(compiler, major))


def _prepend(variable: str, value: str) -> None:
    rest = os.environ.get(variable)
    os.environ[variable] = f"{value}{os.pathsep}{rest}" if rest else value


def _prepare(config_settings: ConfigSettings | None) -> None:
    """Points CMake at the compiler, through the environment of this process."""
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_num_cores()))
    asked = asked_cuda(config_settings)
    if asked is not None:  # last: scikit-build-core gives CMAKE_ARGS to CMake after all the others
        argument = shlex.quote(f"-DDLATTN_CUDA={asked}")
        os.environ["CMAKE_ARGS"] = f"{os.environ.get('CMAKE_ARGS', '')} {argument}".strip()
    if not wants_compiler(config_settings):
        return
    nvcc = system_nvcc()
    if nvcc:
        os.environ["CUDACXX"] = nvcc
        return
    _check_wheels_driver()
    root = wheels_root()
    if root is None:
        raise SystemExit(NO_COMPILER)
    print(f"dlattn: no CUDA toolkit found; using nvcc from {root}", flush=True)
    os.environ["CUDACXX"] = str(root / "bin" / "nvcc")
    os.environ["CUDAToolkit_ROOT"] = str(root)  # noqa: SIM112 (CMake's own spelling)
    _prepend("LIBRARY_PATH", str(root / "lib"))  # nvcc.profile names lib64, the wheels have lib


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _requirements(base: list[str], config_settings: ConfigSettings | None) -> list[str]:
    if wants_compiler(config_settings) and not system_nvcc():
        _check_wheels_driver()
        return [*base, *CUDA_WHEELS]
    return base


build_sdist = skbuild.build_sdist
get_requires_for_build_sdist = skbuild.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = skbuild.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = skbuild.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    return _requirements(skbuild.get_requires_for_build_wheel(config_settings), config_settings)


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    return _requirements(skbuild.get_requires_for_build_editable(config_settings), config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings | None = None,
    metadata_directory: str | None = None,
) -> str:
    _prepare(config_settings)
    return skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings | None = None,
    metadata_directory: str | None = None,
) -> str:
    _prepare(config_settings)
    return skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
