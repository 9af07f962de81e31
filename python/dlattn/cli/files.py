"""Arrays in files: .npy, .npz and .safetensors, named `path` or `path:key`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlattn.cli import archives
from dlattn.cli.archives import safetensors
from dlattn.console import writing
from dlattn.console.errors import CommandError, OutputError, first_line

Array = NDArray[Any]

_SUFFIXES = tuple(archives.WRITERS)


class Place(NamedTuple):
    """Where an array lives: a file and, in a file of many, its key."""

    path: Path
    key: str | None

    @classmethod
    def parse(cls, text: str) -> Place:
        """Split `path[:key]`; the suffix of the path decides what the file is."""
        path, key = _split(text)
        place = cls(Path(path), key)
        if place.path.suffix not in _SUFFIXES:
            raise CommandError(f"{text!r}: unknown kind of file; accepted: {', '.join(_SUFFIXES)}")
        if place.path.suffix == ".npy" and key is not None:
            raise CommandError(f"{text}: a .npy file holds one array and takes no key")
        if key is not None and not _is_key(key):
            raise CommandError(f"{text}: {key!r} cannot be the name of an array")
        return place

    def __str__(self) -> str:
        """The text it was parsed from."""
        return str(self.path) if self.key is None else f"{self.path}:{self.key}"


def load(place: Place) -> Array:
    """Read one array."""
    try:
        found = writing.status(place.path)
        if found is None:
            raise CommandError(f"{place.path}: no such file")
        if not stat.S_ISREG(found.st_mode):
            what = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise CommandError(f"{place.path}: cannot be read: it is {what}")
        if place.path.suffix == ".safetensors":
            return archives.read_safetensors(place.path, lambda keys: _pick(place, keys))
        loaded = _load_numpy(place)
        if not isinstance(loaded, np.ndarray):
            raise CommandError(
                f"{place}: cannot be read: it is no array in a {place.path.suffix} file"
            )
        return _native(_named(place, loaded))
    except CommandError:
        raise
    except Exception as error:  # each reader has errors of its own; all mean an unreadable file
        raise CommandError(f"{place}: cannot be read: {first_line(error)}") from error


def check_outputs(outputs: Mapping[str, Place], inputs: Mapping[str, Place]) -> None:
    """Raise before anything is computed if results could not be kept, or would destroy an input."""
    for name, output in outputs.items():
        for source, place in inputs.items():
            if writing.same_file(output.path, place.path) and not _is_another_array(output, place):
                hint = "" if output.path.suffix == ".npy" else ", or both arrays names: path:key"
                raise CommandError(
                    f"--{name} {output}: that is the file of --{source}; give it another name{hint}"
                )
    (first, one), *others = outputs.items()
    for second, other in others:
        if writing.same_file(one.path, other.path):
            if _is_another_array(Place(one.path, one.key or first), other, second):
                continue
            linked = os.path.realpath(one.path) != os.path.realpath(other.path)
            hint = " by another hard link; give both the same path" if linked else ""
            raise CommandError(f"--{second} {other}: --{first} goes there too{hint}")
    for name, place in outputs.items():
        writing.check_writable(place.path, f"--{name}")
        if place.path.suffix == ".safetensors":
            safetensors()
    for path, contents in _by_file((place, name) for name, place in outputs.items()).items():
        try:
            _older(path, contents)
        except CommandError as error:
            raise CommandError(f"--{contents[0][1]} {error}") from error


def save(arrays: Iterable[tuple[Place, str, Array]]) -> None:
    """Write arrays given as (place, key if the place has none, array).

    Those of one file go together. A file whose arrays are all named keeps those that it held under
    other names; any other file is replaced. Files are written whole or not at all, and either all
    of them or none.
    """
    listed = list(arrays)
    values = {(place, key): array for place, key, array in listed}
    files = _by_file((place, key) for place, key, _ in listed)
    path = Path()
    try:
        with ExitStack() as stack:
            for path, contents in files.items():
                content = {place.key or key: values[place, key] for place, key in contents}
                older = _older(path, contents)
                file = stack.enter_context(writing.replacing(path))
                archives.WRITERS[path.suffix](file, content, older)
                file.flush()
    except CommandError:
        raise
    except Exception as error:  # each writer has errors of its own
        raise OutputError(f"{path}: cannot be written: {first_line(error)}") from error


def _load_numpy(place: Place) -> Any:
    """The contents of a .npy or .npz file as NumPy finds them, an array if all is right."""
    try:
        loaded = np.load(place.path, allow_pickle=False)  # its content decides its type
        if place.path.suffix == ".npy":
            return loaded
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return None
        with loaded as archive:
            return archive[_pick(place, archive.files)]
    except (EOFError, ValueError) as error:
        reason = first_line(error)
        if not archives.begins_as(place.path):
            reason = f"it is no {place.path.suffix} file"
        elif "Object arrays" in reason:
            reason = "its elements are Python objects; accepted: numbers"
        elif "pickle" in str(error):  # NumPy's advice is to load it unsafely
            reason = "its header is none that NumPy writes for an array of numbers"
        raise CommandError(f"{place}: cannot be read: {reason}") from error


def _split(text: str) -> tuple[str, str | None]:
    """The path and the key, if there is a colon behind a path that can hold several arrays."""
    if Path(text).suffix in _SUFFIXES and os.path.exists(text):
        return text, None  # the colon is the path's
    at = text.find(":")
    while at >= 0:
        if Path(text[:at]).suffix in _SUFFIXES:
            return text[:at], text[at + 1 :]
        at = text.find(":", at + 1)
    return text, None


def _is_key(text: str) -> bool:
    """Whether an array can have this name in every kind of file."""
    try:
        return 0 < len(text.encode()) < 1 << 15 and text != "__metadata__"
    except UnicodeEncodeError:
        return False


def _by_file(contents: Iterable[tuple[Place, str]]) -> dict[Path, list[tuple[Place, str]]]:
    """The contents of each file, under the first of the paths that name it."""
    files: dict[str, list[tuple[Place, str]]] = {}
    for place, key in contents:
        files.setdefault(os.path.realpath(place.path), []).append((place, key))
    return {places[0][0].path: places for places in files.values()}


def _older(path: Path, contents: list[tuple[Place, str]]) -> Path | None:
    """The file as it is, if what it holds under other names is to be kept."""
    if any(place.key is None for place, _ in contents):
        return None
    found = writing.status(path)
    if found is None or not stat.S_ISREG(found.st_mode) or found.st_size == 0:
        return None
    try:
        archives.check_readable(path)
    except CommandError:
        raise
    except Exception as error:
        reason = f"what is there is no {path.suffix} file: {first_line(error)}"
        raise CommandError(f"{contents[0][0]}: cannot be written: {reason}") from error
    return path


def _is_another_array(a: Place, b: Place, default_key: str | None = None) -> bool:
    """Whether two arrays of one file can both be there: it is one by path too, and both named.

    To write to one of a file's hard links would part it from the others.
    """
    keys = {a.key, b.key or default_key}
    one_path = os.path.realpath(a.path) == os.path.realpath(b.path)
    one_kind = a.path.suffix == b.path.suffix != ".npy"
    return one_path and one_kind and len(keys) == 2 and None not in keys


def _pick(place: Place, keys: Iterable[str]) -> str:
    names = sorted(keys)
    if place.key in names:
        return str(place.key)
    if place.key is None and len(names) == 1:
        return names[0]
    if not names:
        raise CommandError(f"{place.path}: it holds no array")
    got = "several arrays; name one as path:key"
    if place.key is not None:
        got = f"no array named {place.key!r}"
    raise CommandError(f"{place.path}: {got}; it holds: {', '.join(names)}")


def _native(array: Array) -> Array:
    """The array, in C order and in this machine's order of bytes, copied if need be."""
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _named(place: Place, array: Array) -> Array:
    """NumPy writes bfloat16 as two bytes without a name; nothing else is written so."""
    if array.dtype == np.dtype("V1"):  # as which it writes some ten types
        raise CommandError(
            f"{place}: its elements are of 8 bits, whose type a {place.path.suffix} file does not "
            "tell; accepted: a .safetensors file"
        )
    if array.dtype != np.dtype("V2"):
        return array
    named: Array = array.view(archives.ml_dtypes("bfloat16").bfloat16)
    return named
