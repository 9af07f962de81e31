"""DLPack exporters made by hand with ctypes, honest and not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_READ_ONLY = 1
_IS_COPIED = 2


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


# Not ctypes.pythonapi, whose functions other packages give types of their own.
_python = ctypes.PyDLL(None)
new_capsule = _python.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

capsule_pointer = _python.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
set_capsule_name = _python.PyCapsule_SetName
set_capsule_name.argtypes = (ctypes.py_object, ctypes.c_char_p)

_exported: dict[int, Any] = {}  # the target of an export, until its deleter is called


def make_managed(
    pointer: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: tuple[int, int, int],
    *,
    device: tuple[int, int] = (1, 0),
    byte_offset: int = 0,
    version: tuple[int, int] | None = None,
    flags: int = 0,
    on_delete: Callable[[], None] = lambda: None,
    keep: Any = None,
) -> int:
    """The address of a managed tensor, which lives, as `keep` does, until its deleter is called."""
    managed = Managed() if version is None else ManagedVersioned()
    if version is not None:
        managed.major, managed.minor = version
        managed.flags = flags
    tensor = managed.tensor
    tensor.data = pointer
    tensor.device_type, tensor.device_id = device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits, tensor.lanes = dtype
    tensor.byte_offset = byte_offset
    tensor.shape = (ctypes.c_int64 * len(shape))(*shape)
    if strides is not None:
        tensor.strides = (ctypes.c_int64 * len(shape))(*strides)
    address = ctypes.addressof(managed)

    def delete(_: int) -> None:
        on_delete()
        del _exported[address]

    managed.deleter = _Deleter(delete)
    _exported[address] = (managed, keep)
    return address


def kept(address: int) -> Any:
    """The owner that make_managed was given to keep."""
    return _exported[address][1]


def make_capsule(*arguments: Any, version: tuple[int, int] | None = None, **more: Any) -> Any:
    """A capsule of a tensor as of make_managed; with a version, "dltensor_versioned"."""
    name = b"dltensor" if version is None else b"dltensor_versioned"
    return new_capsule(make_managed(*arguments, version=version, **more), name, None)


class Exporter:
    """Exports a NumPy array, with whatever the arguments say instead of the truth."""

    def __init__(
        self,
        array: np.ndarray,
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | str | None = "true",
        pointer: int | None = None,
        dtype: tuple[int, int, int] | None = None,
        device: tuple[int, int | None] = (1, 0),
        capsule_device: tuple[int, int] | None = None,
        byte_offset: int = 0,
        version: tuple[int, int] | None = (1, 1),
        read_only: bool = False,
        copied: bool = False,
        capsule: Any = None,
        error: Exception | None = None,
    ) -> None:
        self.array = array
        self.alive = 0  # capsules handed out and not yet deleted
        self.streams: list[Any] = []  # the streams that were asked for
        self.capsule = capsule
        self._error = error
        self._device = device
        self._version = version
        self.arguments: dict[str, Any] = {
            "pointer": array.ctypes.data if pointer is None else pointer,
            "shape": array.shape if shape is None else shape,
            "strides": [s // array.itemsize for s in array.strides]
            if strides == "true"
            else strides,
            "dtype": dtype or (_CODES[array.dtype.kind], 8 * array.itemsize, 1),
            "device": capsule_device or device,
            "byte_offset": byte_offset,
            "flags": _READ_ONLY * read_only | _IS_COPIED * copied,
        }

    def __dlpack_device__(self) -> tuple[int, int | None]:
        return self._device

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None, **_: Any
    ) -> Any:
        self.streams.append(stream)
        if self._error is not None:
            raise self._error
        if self.capsule is not None:
            return self.capsule
        self.alive += 1
        version = self._version if max_version else None
        return make_capsule(**self.arguments, version=version, on_delete=self._deleted)

    def _deleted(self) -> None:
        self.alive -= 1


class OldExporter(Exporter):
    """An exporter from before DLPack 1.0, which knows no max_version."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


class OldestExporter(Exporter):
    """An exporter that knows no streams either."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return super().__dlpack__()


def device_tensor(device_type: int, device_id: int, array: np.ndarray) -> Exporter:
    """Host memory that claims to be on a device; for calls that must fail before they touch it."""
    return Exporter(array, device=(device_type, device_id))
