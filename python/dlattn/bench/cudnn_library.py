"""A cuDNN for the peers of a run other than the one that torch brings.

Libraries that ask for `libcudnn.so.9` get the one of that name that is loaded already: so it is
loaded before torch, and torch and all that use it compute with it in this process.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from dlattn.bench import tensors
from dlattn.console.errors import CommandError, first_line

NAME = "libcudnn.so.9"
# Where it lies in what an unpacked wheel, an archive or an installed package is.
_FOLDERS = ("", "lib", "lib64", "cudnn/lib", "nvidia/cudnn/lib")

_loaded: list[ctypes.CDLL] = []


def load(folder: Path) -> int:
    """Load it; the version as cuDNN counts, 92801 for 9.28.1."""
    found = [folder / part / NAME for part in _FOLDERS if (folder / part / NAME).is_file()]
    if not found:
        raise CommandError(f"--cudnn {folder}: accepted: a folder with {NAME}, or with one of it")
    if "torch" in sys.modules:
        raise CommandError(f"--cudnn {folder}: torch is loaded already, with its own cuDNN")
    try:
        library = ctypes.CDLL(str(found[0].resolve()), mode=ctypes.RTLD_GLOBAL)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        version = int(library.cudnnGetVersion())
    except (OSError, AttributeError) as error:
        raise CommandError(f"--cudnn {folder}: cannot be loaded: {first_line(error)}") from error
    _loaded.append(library)
    return version


def check(folder: Path, version: int) -> None:
    """Raise unless torch computes with the one that was loaded."""
    used = tensors.torch_module().backends.cudnn.version()
    if used != version:
        raise CommandError(f"--cudnn {folder}: it is cuDNN {version}, but torch uses {used}")


def handle() -> int | None:
    """The handle by which the loader knows it; None where torch's own is used."""
    return _loaded[-1]._handle if _loaded else None
