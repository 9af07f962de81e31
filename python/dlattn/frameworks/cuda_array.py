"""Arrays that have no DLPack, but `__cuda_array_interface__`: Numba's, PyCUDA's and others.

The interface is described in Numba's documentation, "CUDA Array Interface (Version 3)".
"""

from __future__ import annotations

import operator
import sys
from typing import Any

from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import Framework, cannot_allocate, type_text

INTERFACE = "__cuda_array_interface__"

# DLPack's code of a kind of numbers, and the bytes that one may have.
_KINDS = {
    "b": (6, (1,)),
    "i": (0, (1, 2, 4, 8)),
    "u": (1, (1, 2, 4, 8)),
    "f": (2, (2, 4, 8)),
    "c": (5, (8, 16)),
}
_BYTE_ORDERS = "|=<" if sys.byteorder == "little" else "|=>"

# Pointer (0 of an empty array), read-only, DLPack's type code, bytes of an element, shape, strides
# in bytes (None: contiguous), the stream on which the memory is ready (0: it is ready already).
Description = tuple[int, bool, int, int, tuple[int, ...], "tuple[int, ...] | None", int]


class CudaArray(Framework):
    """Whoever cannot be allocated for."""

    name = "cuda_array"

    def describe(self, x: Any, argument: str) -> Description:
        return describe(x, argument)

    def empty_on(
        self, like: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> Any:
        """Return a new array that is written to on `stream` of `device`."""
        raise cannot_allocate(like)


class Numba(CudaArray):
    def empty_on(
        self, like: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> Any:
        cuda = sys.modules["numba.cuda"]
        with cuda.gpus[device]:
            return cuda.device_array(shape, dtype, stream=_numba_stream(cuda, like, stream))


def _numba_stream(cuda: Any, like: Any, stream: int) -> Any:
    """The stream that Numba writes into an array's interface, for who uses the array after this
    call."""
    if stream in (0, 1):
        return 0
    if getattr(like, INTERFACE).get("stream") == stream:
        return like.stream  # holds the stream, which Numba destroys when nobody does
    return cuda.external_stream(stream)


def describe(x: Any, argument: str) -> Description:
    """Read the interface of `x`, refusing what it must not be."""
    interface = _interface(x, argument)
    version = interface.get("version")
    if not 0 <= _int(version) <= 3:
        raise UnsupportedError(
            f"{argument}: its {INTERFACE} is of version {_short(version)}; accepted: 0 to 3"
        )
    for key in ("shape", "typestr", "data"):
        if key not in interface:
            raise TypeError(
                f"{argument}: its {INTERFACE} has no {key!r}; accepted: shape, typestr, data and "
                "version, and optionally strides and stream"
            )
    if interface.get("mask") is not None:
        raise UnsupportedError(
            f"{argument}: its {INTERFACE} has a mask, which attention would not see; accepted: an "
            "array without one, and the mask as mask="
        )
    code, itemsize = _dtype(interface["typestr"], argument)
    shape = _sizes(interface["shape"], "shape", "ints >= 0", argument)
    strides = interface.get("strides")
    if strides is not None:
        strides = _sizes(strides, "strides", f"{len(shape)} ints, or None", argument)
    if strides is not None and len(strides) != len(shape):
        raise TypeError(
            f"{argument}: its {INTERFACE} has the strides {strides} for the shape {shape}; "
            f"accepted: a tuple of {len(shape)} ints, or None"
        )
    pointer, read_only = _data(interface["data"], argument)
    return pointer, read_only, code, itemsize, shape, strides, _stream(interface, argument)


def _interface(x: Any, argument: str) -> dict[str, Any]:
    try:
        interface = getattr(x, INTERFACE)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise TypeError(
            f"{argument}: {type_text(type(x))} cannot be taken in through {INTERFACE} ({why}); "
            "accepted: a dense array on a CUDA device"
        ) from error
    if not isinstance(interface, dict):
        raise TypeError(
            f"{argument}: its {INTERFACE} is {_short(interface)}; accepted: a dict with shape, "
            "typestr, data and version"
        )
    return interface


def _dtype(typestr: Any, argument: str) -> tuple[int, int]:
    if isinstance(typestr, str) and typestr[:1] in _BYTE_ORDERS and typestr[2:].isdecimal():
        code, sizes = _KINDS.get(typestr[1], (0, ()))
        itemsize = int(typestr[2:])
        if itemsize in sizes:
            return code, itemsize
    raise UnsupportedError(
        f"{argument}: its {INTERFACE} has the typestr {_short(typestr)}; accepted: bool and "
        "numbers of 8 to 64 bits in the machine's byte order, as '<f2'. bfloat16 and float8 have "
        "no typestr; give them as an array with __dlpack__, of torch, CuPy or JAX"
    )


def _sizes(value: Any, key: str, accepted: str, argument: str) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, value))
    except TypeError:
        sizes = (-(2**63) - 1,)
    least = 0 if key == "shape" else -(2**63)
    if not all(least <= size < 2**63 for size in sizes):
        raise TypeError(
            f"{argument}: its {INTERFACE} has the {key} {_short(value)}; accepted: a tuple of "
            f"{accepted}"
        )
    return sizes


def _data(value: Any, argument: str) -> tuple[int, bool]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        pointer, read_only = value
        if _int(pointer) >= 0:
            return _int(pointer), bool(read_only)
    raise TypeError(
        f"{argument}: its {INTERFACE} has the data {_short(value)}; accepted: a pair (pointer, "
        "read-only) of an int >= 0 and a bool"
    )


def _stream(interface: dict[str, Any], argument: str) -> int:
    stream = interface.get("stream")
    if stream is None:
        return 0
    if _int(stream) <= 0:
        raise UnsupportedError(
            f"{argument}: its {INTERFACE} has the stream {_short(stream)}; accepted: None, 1 (the "
            "legacy default stream), 2 (the per-thread default stream) or a stream's handle"
        )
    return _int(stream)


def _int(value: Any) -> int:
    """`value` as an int, -1 where it is none or does not fit 64 bits."""
    if isinstance(value, bool):
        return -1
    try:
        number = operator.index(value)
    except TypeError:
        return -1
    return number if number < 2**64 else -1


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
