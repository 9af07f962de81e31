"""Files of several arrays, new or with what an older one holds: .npz and .safetensors."""

from __future__ import annotations

import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dlattn.console.errors import CommandError

Array = NDArray[Any]
Write = Callable[[BinaryIO, Mapping[str, Array], "Path | None"], None]

_CHUNK = 1 << 20  # bytes copied at a time


def write_npy(file: BinaryIO, arrays: Mapping[str, Array], older: Path | None) -> None:
    """Write the one array, whatever it is called."""
    assert older is None
    (array,) = arrays.values()
    _write_array(file, array)


def write_npz(file: BinaryIO, arrays: Mapping[str, Array], older: Path | None) -> None:
    """Write arrays, and all others of the older file as they are."""
    members = {f"{key}.npy": array for key, array in arrays.items()}
    with zipfile.ZipFile(file, "w") as archive:
        if older is not None:
            _copy_members(older, archive, {*arrays, *members})
        for name, array in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                _write_array(member, array)


def write_safetensors(file: BinaryIO, arrays: Mapping[str, Array], older: Path | None) -> None:
    """Write arrays, and all others and the metadata of the older file as they are."""
    contiguous = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    written = safetensors().numpy.save(contiguous)
    if older is None:
        file.write(written)
        return
    with ExitStack() as stack:
        tensors: dict[str, tuple[BinaryIO, int, dict[str, Any]]] = {}
        header: dict[str, Any] = {}
        sources: tuple[BinaryIO, ...] = (stack.enter_context(older.open("rb")), BytesIO(written))
        for source in sources:
            entries, start = _read_header(source)
            if "__metadata__" in entries:
                header["__metadata__"] = entries.pop("__metadata__")
            tensors |= {key: (source, start, entry) for key, entry in entries.items()}
        offset = 0
        names = sorted(tensors, key=lambda name: (-_item_size(tensors[name][2]), name))
        for name in names:  # largest elements first: all are aligned then
            entry = tensors[name][2]
            size = _size(entry)
            header[name] = entry | {"data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            source, start, entry = tensors[name]
            source.seek(start + entry["data_offsets"][0])
            _copy(source, file, _size(entry))


WRITERS: dict[str, Write] = {
    ".npy": write_npy,
    ".npz": write_npz,
    ".safetensors": write_safetensors,
}


def begins_as(path: Path) -> bool:
    """Whether a .npy or .npz file begins as these do."""
    with path.open("rb") as file:
        return file.read(6).startswith({".npy": b"\x93NUMPY", ".npz": b"PK"}[path.suffix])


def check_readable(path: Path) -> None:
    """Raise if a file of several arrays is none."""
    if path.suffix == ".npz":
        zipfile.ZipFile(path).close()
    else:
        with safetensors().safe_open(path, framework="np"):
            pass


def read_safetensors(path: Path, pick: Callable[[Iterable[str]], str]) -> Array:
    """The array of a .safetensors file that `pick` names, given all their names."""
    with safetensors().safe_open(path, framework="np") as tensors:
        key = pick(tensors.keys())
        # The package cannot read 8-bit floats to NumPy.
        if tensors.get_slice(key).get_dtype() != "F8_E4M3":
            array: Array = tensors.get_tensor(key)
            return array
    with path.open("rb") as file:
        entries, start = _read_header(file)
        entry = entries[key]
        file.seek(start + entry["data_offsets"][0])
        data = bytearray(file.read(_size(entry)))
    return np.frombuffer(data, dtype=ml_dtypes("float8").float8_e4m3fn).reshape(entry["shape"])


def ml_dtypes(what: str) -> Any:
    """The package that has the types NumPy lacks."""
    try:
        import ml_dtypes
    except ImportError:
        raise CommandError(f"{what} data needs ml_dtypes: pip install ml_dtypes") from None
    return ml_dtypes


def safetensors() -> Any:
    """The package."""
    try:
        import safetensors.numpy
    except ImportError:
        raise CommandError(
            ".safetensors files need the package safetensors: pip install safetensors"
        ) from None
    return safetensors


def _write_array(file: Any, array: Array) -> None:
    # NumPy writes past a real file's object, which fails for a FIFO and loses the cause of errors.
    np.lib.format.write_array(SimpleNamespace(write=file.write), array, allow_pickle=False)


def _copy_members(older: Path, archive: zipfile.ZipFile, without: set[str]) -> None:
    with zipfile.ZipFile(older) as source:
        archive.comment = source.comment
        for info in source.infolist():
            if info.filename in without:
                continue
            copy = zipfile.ZipInfo(info.filename, info.date_time)
            copy.compress_type, copy.external_attr = info.compress_type, info.external_attr
            copy.comment = info.comment
            with source.open(info) as old, archive.open(copy, "w", force_zip64=True) as new:
                shutil.copyfileobj(old, new, _CHUNK)


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The entries of a .safetensors file, and where its data begins."""
    size = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(size)), 8 + size


def _size(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


def _item_size(entry: dict[str, Any]) -> float:
    return _size(entry) / max(1, math.prod(entry["shape"]))


def _copy(source: BinaryIO, file: BinaryIO, size: int) -> None:
    while size > 0:
        chunk = source.read(min(size, _CHUNK))
        if not chunk:
            raise ValueError("it has become shorter")
        file.write(chunk)
        size -= len(chunk)
