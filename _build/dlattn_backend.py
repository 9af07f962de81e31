"""dlattn's build backend: scikit-build-core, plus nvcc from PyPI where no CUDA toolkit is found.

The CUDA compiler is looked for in CUDACXX, PATH, CUDA_HOME, CUDA_PATH, CUDAToolkit_ROOT and
/usr/local/cuda. Where it is in none of them, the hooks that name build requirements add NVIDIA's
compiler wheels, and the hooks that build point CMake at them. A build with DLATTN_CUDA=OFF asks for
no compiler at all.

DLATTN_IGNORE_SYSTEM_CUDA=1 passes over an installed toolkit, to try the PyPI route on a machine
that has one.
"""

from __future__ import annotations

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

NO_COMPILER = f"""\
dlattn: no CUDA compiler. Looked for nvcc {MIN_CUDA[0]}.{MIN_CUDA[1]} or later in CUDACXX, PATH,
CUDA_HOME, CUDA_PATH, CUDAToolkit_ROOT and /usr/local/cuda, and for NVIDIA's wheels in this
environment. Either
  - install the CUDA toolkit, or set CUDACXX to its nvcc;
  - build without --no-build-isolation, which brings nvcc from PyPI;
  - pip install {" ".join(repr(wheel) for wheel in CUDA_WHEELS)}; or
  - add --config-settings=cmake.define.DLATTN_CUDA=OFF for the CPU backend alone."""


def _as_list(value: str | list[str]) -> list[str]:
    return value.split(";") if isinstance(value, str) else list(value)


def _definitions(config_settings: ConfigSettings | None) -> Iterator[tuple[str, str]]:
    """CMake variables set from outside, in the order of increasing precedence."""
    settings = {
        key.removeprefix("skbuild."): value for key, value in (config_settings or {}).items()
    }
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


def wants_compiler(config_settings: ConfigSettings | None) -> bool:
    """Whether the build compiles CUDA code and leaves the choice of compiler to this backend."""
    if sys.platform == "darwin":
        return False
    definitions = dict(_definitions(config_settings))
    return not (
        _is_false(definitions.get("DLATTN_CUDA", "ON")) or definitions.get("CMAKE_CUDA_COMPILER")
    )


def _cuda_version(nvcc: str) -> tuple[int, int]:
    """The CUDA version of `nvcc`, (0, 0) if it does not run."""
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return (0, 0)
    match = re.search(r"release (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def system_nvcc() -> str | None:
    """The nvcc of an installed toolkit that is recent enough."""
    if os.environ.get("DLATTN_IGNORE_SYSTEM_CUDA", "0") not in ("", "0"):
        return None
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    for variable in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        if os.environ.get(variable):
            candidates.append(os.path.join(os.environ[variable], "bin", "nvcc"))
    candidates.append("/usr/local/cuda/bin/nvcc")
    for nvcc in candidates:
        if nvcc and _cuda_version(nvcc) >= MIN_CUDA:
            return nvcc
    return None


def wheels_root() -> Path | None:
    """The toolkit-like folder into which NVIDIA's wheels were installed."""
    for entry in sys.path:
        root = Path(entry) / "nvidia" / f"cu{CUDA_WHEEL_VERSION.split('.')[0]}"
        if (root / "bin" / "nvcc").is_file():
            return root
    return None


def _prepend(variable: str, value: str) -> None:
    rest = os.environ.get(variable)
    os.environ[variable] = f"{value}{os.pathsep}{rest}" if rest else value


def _prepare(config_settings: ConfigSettings | None) -> None:
    """Points CMake at the compiler, through the environment of this process."""
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_num_cores()))
    if not wants_compiler(config_settings):
        return
    nvcc = system_nvcc()
    if nvcc:
        os.environ["CUDACXX"] = nvcc
        return
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
