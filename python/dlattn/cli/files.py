"""Arrays in files: .npy, .npz and .safetensors, named `path` or `path:key`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlattn.cli.errors import CommandError

Array = NDArray[Any]

_SUFFIXES = (".npy", ".npz", ".safetensors")


class Place(NamedTuple):
    """Where an array lives: a file and, in a file of many, its key."""

    path: Path
    key: str | None

    @classmethod
    def parse(cls, text: str) -> Place:
        """Split `path[:key]`; the suffix of the path decides what the file is."""
        path, colon, key = text.rpartition(":")
        if not colon or Path(text).suffix in _SUFFIXES:
            path, key = text, ""
        place = cls(Path(path), key or None)
        if place.path.suffix not in _SUFFIXES:
            raise CommandError(f"{text}: unknown kind of file; accepted: {', '.join(_SUFFIXES)}")
        if place.path.suffix == ".npy" and place.key:
            raise CommandError(f"{text}: a .npy file holds one array and takes no key")
        return place

    def __str__(self) -> str:
        """The text it was parsed from."""
        return f"{self.path}:{self.key}" if self.key else str(self.path)


def load(place: Place) -> Array:
    """Read one array."""
    if not place.path.is_file():
        raise CommandError(f"{place.path}: no such file")
    try:
        if place.path.suffix == ".npy":
            return _named_bfloat16(np.load(place.path, allow_pickle=False))
        if place.path.suffix == ".npz":
            with np.load(place.path, allow_pickle=False) as archive:
                return _named_bfloat16(archive[_pick(place, archive.files)])
        with _safetensors().safe_open(place.path, framework="np") as tensors:
            array: Array = tensors.get_tensor(_pick(place, tensors.keys()))
            return array
    except CommandError:
        raise
    except Exception as error:  # each reader has errors of its own; all mean an unreadable file
        raise CommandError(f"{place}: cannot be read: {error}") from error


def check_writable(place: Place) -> None:
    """Raise before anything is computed if its result could not be written."""
    if not place.path.parent.is_dir():
        raise CommandError(f"{place.path}: cannot be written: no such folder")
    if place.path.suffix == ".safetensors":
        _safetensors()


def save(arrays: Iterable[tuple[Place, str, Array]]) -> None:
    """Write arrays given as (place, key if the place has none, array).

    Those of one file go together. Every file is written beside its final name and then moved
    there: never half a file.
    """
    files: dict[Path, dict[str, Array]] = {}
    for place, default_key, array in arrays:
        content = files.setdefault(place.path, {})
        key = place.key or default_key
        if key in content or (content and place.path.suffix == ".npy"):
            raise CommandError(f"{place}: two results cannot have the same place")
        content[key] = array
    for path, content in files.items():
        try:
            _write(path, content)
        except OSError as error:
            raise CommandError(f"{path}: cannot be written: {error.strerror or error}") from error


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths name one file, through links too."""
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


def _pick(place: Place, keys: Iterable[str]) -> str:
    names = sorted(keys)
    if place.key in names:
        return str(place.key)
    if place.key is None and len(names) == 1:
        return names[0]
    got = f"no array named {place.key!r}" if place.key else "several arrays; name one as path:key"
    raise CommandError(f"{place.path}: {got}; it holds: {', '.join(names) or 'nothing'}")


def _named_bfloat16(array: Array) -> Array:
    """NumPy writes bfloat16 as two bytes without a name; nothing else is written so."""
    if array.dtype != np.dtype("V2"):
        return array
    try:
        import ml_dtypes
    except ImportError:
        raise CommandError("bfloat16 data needs ml_dtypes: pip install ml_dtypes") from None
    return array.view(ml_dtypes.bfloat16)


def _write(path: Path, content: dict[str, Array]) -> None:
    handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=".dlattn-", dir=path.parent)
    os.close(handle)
    try:
        if path.suffix == ".npy":
            np.save(name, next(iter(content.values())))
        elif path.suffix == ".npz":
            np.savez(name, **content)  # type: ignore[arg-type]
        else:
            contiguous = {key: np.ascontiguousarray(array) for key, array in content.items()}
            _safetensors().numpy.save_file(contiguous, name)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise CommandError(
            ".safetensors files need the package safetensors: pip install safetensors"
        ) from None
    return safetensors
