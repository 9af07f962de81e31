"""Arrays made by hand that have `__cuda_array_interface__` and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np


def interface_of(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    """The interface of an array, with changes; None removes nothing, `...` does."""
    described = {
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (array.ctypes.data if array.size else 0, not array.flags.writeable),
        "strides": None if array.flags.c_contiguous else array.strides,
        "stream": None,
        "version": 3,
        **changes,
    }
    return {key: value for key, value in described.items() if value is not ...}


class CudaArray:
    """Host memory that claims to be a GPU's; for calls that must fail before they touch it."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        self.reads = 0
        self._interface = interface_of(array, **changes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.reads += 1
        return self._interface


class Borrowed:
    """The memory of a tensor on a GPU, of a library that has the interface as well."""

    def __init__(self, owner: Any, **changes: Any) -> None:
        self.owner = owner
        described = {**owner.__cuda_array_interface__, "stream": None, **changes}
        self.__cuda_array_interface__ = {**described, "version": 3}
