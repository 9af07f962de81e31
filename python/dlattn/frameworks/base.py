"""The methods that the native module calls of a tensor library."""

from __future__ import annotations

from typing import Any

from dlattn._errors import UnsupportedError

_DL_CPU = 1
_DL_CUDA_HOST = 3


class Framework:
    """A tensor library: how to find its stream and to make its tensors.

    This one is any library whose tensors have `__dlpack__`.
    """

    name = "dlpack"

    def check(self, x: Any, argument: str) -> None:
        """Raise TypeError for a tensor that has no memory to compute on."""

    def current_stream(self, x: Any, device: int) -> int:
        """Return the CUDA stream that the library's own work on `device` would go to."""
        raise UnsupportedError(
            f"stream is None, and {type_text(type(x))} does not tell its current stream; "
            "accepted: the stream's handle"
        )

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new tensor on the device of `like`, where its library's own would be."""
        if int(like.__dlpack_device__()[0]) in (_DL_CPU, _DL_CUDA_HOST):
            import numpy

            return numpy.empty(shape, dtype=numpy_dtype(numpy, dtype))
        raise cannot_allocate(like)

    # Whether `workspace` gives any. Without, calls run on kernels that need none.
    gives_workspace = False

    def workspace(self, like: Any, nbytes: int, device: int, stream: int | None) -> Any:
        """Return device memory that may be let go of as soon as the work on it is enqueued.

        `stream` is what the work goes to, None for the library's current one.
        """
        raise UnsupportedError(
            f"precision is given, and dlattn cannot allocate for {type_text(type(like))} the "
            f"workspace of {nbytes} bytes that it needs; accepted: a torch, CuPy or JAX array"
        )


def cannot_allocate(like: Any) -> UnsupportedError:
    return UnsupportedError(
        f"out is None, and dlattn cannot allocate for {type_text(type(like))}; accepted: a tensor "
        "to write to (and return_lse=False), or arrays of torch, CuPy, JAX or Numba"
    )


def module_of(kind: type) -> str:
    """The name of the module of `kind`; "" for a class that has lost it or says something else."""
    try:
        module = kind.__module__
    except Exception:
        return ""
    return module if isinstance(module, str) else ""


def type_text(kind: type) -> str:
    module = module_of(kind)
    return kind.__qualname__ if module in ("", "builtins") else f"{module}.{kind.__qualname__}"


def shown(value: Any) -> str:
    """A value in an error's words, shortened; of arrays the type, as the host would wait for a GPU
    to read their numbers."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if any(hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__") for x in parts):
        return f"<{type_text(type(value))}>"
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def numpy_dtype(np: Any, dtype: str) -> Any:
    if dtype in ("bfloat16", "float8_e4m3fn"):
        # The caller's bfloat16 and float8 arrays are its.
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)
