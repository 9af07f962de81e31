"""Page tables from the lists of pages that other libraries keep."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dlattn._errors import UnsupportedError
from dlattn._numbers import integer
from dlattn._types import Tensor
from dlattn.frameworks import find
from dlattn.frameworks.base import type_text

_MODULES = {"numpy": "numpy", "torch": "torch", "cupy": "cupy", "jax": "jax.numpy"}
_INT32_MAX = 2**31 - 1


def page_table_from_csr(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    *,
    page_size: int,
    max_pages: int | None = None,
) -> tuple[Any, Any]:
    """Make page_table and seqused_k of lists of pages that lie one after the other (CSR).

    Sequence b has the pages indices[indptr[b]] to indices[indptr[b + 1] - 1], all full but the
    last one, which has last_page_len[b] keys: FlashInfer's form. A sequence without pages has no
    keys, whatever its last_page_len is.

    Args:
        indptr: int32 or int64, (batch + 1,).
        indices: int32 or int64, (number of pages,).
        last_page_len: int32 or int64, (batch,), 1 to page_size.
            The three are arrays of one library on one device.
        page_size: Keys of a page.
        max_pages: Columns of the page table, at least the number of pages of the longest sequence.
            With it the host reads nothing of lists on a GPU, so the call can be captured in a CUDA
            graph, and what they hold is not checked: further pages are left out. None: that number,
            for which the host waits for the GPU.

    Returns:
        (page_table, seqused_k), new int32 arrays of indptr's framework on its device, as
        `attention_with_kvcache` takes them: (batch, max_pages), padded with -1, and (batch,).

    Raises:
        UnsupportedError: A value is wrong.
        TypeError: An argument is not the kind of object that is accepted.
    """
    lists = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    framework = _check_lists(lists)
    page_size = _count(page_size, "page_size", 1)
    room = None if max_pages is None else _count(max_pages, "max_pages", 0)
    longest = 0
    if room is None or _is_on_host(indptr, framework):
        longest = _check_values({name: _values(x) for name, x in lists.items()}, page_size, room)
    columns_count = longest if room is None else room
    xp: Any = importlib.import_module(_MODULES[framework])
    on = {"device": indptr.device} if framework == "torch" else {}
    begins = indptr[:-1]
    counts = indptr[1:] - begins
    none = xp.zeros_like(counts)
    keys = xp.where(counts > 0, (counts - 1) * page_size + last_page_len, none)
    columns = xp.arange(columns_count, **on)
    if int(indices.shape[0]) == 0:
        table = xp.zeros_like(begins[:, None] + columns[None, :]) - 1  # on their device
    else:
        at = xp.clip(begins[:, None] + columns[None, :], 0, int(indices.shape[0]) - 1)
        pages = indices[at]
        table = xp.where(columns[None, :] < counts[:, None], pages, xp.zeros_like(pages) - 1)
    if framework == "torch":
        return table.to(xp.int32), keys.to(xp.int32)
    return table.astype(xp.int32), keys.astype(xp.int32)


def _count(value: Any, name: str, least: int) -> int:
    number = integer(value)
    if number is None:
        raise TypeError(f"{name} is of type {type_text(type(value))}; accepted: an int")
    if not least <= number <= _INT32_MAX:
        raise UnsupportedError(f"{name} is {number}; accepted: {least} to {_INT32_MAX}")
    return number


def _check_lists(lists: dict[str, Any]) -> str:
    """Check all that needs no values; returns the name of the library."""
    indptr = lists["indptr"]
    frameworks = {name: find(type(x), name).name for name, x in lists.items()}
    framework = frameworks["indptr"]
    if framework not in _MODULES:
        raise TypeError(
            f"indptr is of type {type_text(type(indptr))}; accepted: a torch, CuPy, JAX or NumPy "
            "array"
        )
    for name, x in lists.items():
        if frameworks[name] != framework:
            raise TypeError(
                f"{name} is of type {type_text(type(x))}, and indptr of type "
                f"{type_text(type(indptr))}; accepted: three arrays of one library"
            )
        if _device_of(x, framework) != _device_of(indptr, framework):
            raise UnsupportedError(
                f"{name} is on {_device_of(x, framework)}, and indptr on "
                f"{_device_of(indptr, framework)}; accepted: one device"
            )
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype not in ("int32", "int64"):
            raise UnsupportedError(f"{name}: dtype is {dtype}; accepted: int32, int64")
        if len(x.shape) != 1:
            raise UnsupportedError(f"{name}: shape is {tuple(x.shape)}; accepted: one dimension")
    batch_size = int(indptr.shape[0]) - 1
    if batch_size < 0:
        raise UnsupportedError("indptr is empty; accepted: shape (batch + 1,)")
    last = lists["last_page_len"]
    if int(last.shape[0]) != batch_size:
        raise UnsupportedError(
            f"last_page_len: shape is {tuple(last.shape)}; accepted: ({batch_size},), one fewer "
            "than indptr"
        )
    return framework


def _check_values(lists: dict[str, Any], page_size: int, max_pages: int | None) -> int:
    """Check what the lists hold, NumPy's here; returns the pages of the longest sequence."""
    import numpy as np  # not at the top: it loads slowly, and `import dlattn` brings this module

    starts, indices, last = (x.astype(np.int64) for x in lists.values())
    outside = (starts < 0) | (starts > indices.size)
    if outside.any():
        i = int(outside.argmax())
        raise UnsupportedError(
            f"indptr[{i}] is {starts[i]}; accepted: 0 to {indices.size}, the number of indices"
        )
    counts = np.diff(starts)
    if (counts < 0).any():
        i = int((counts < 0).argmax())
        raise UnsupportedError(
            f"indptr[{i + 1}] is {starts[i + 1]}, less than indptr[{i}], {starts[i]}; accepted: "
            "numbers that do not decrease"
        )
    wrong = (counts > 0) & ((last < 1) | (last > page_size))
    if wrong.any():
        b = int(wrong.argmax())
        raise UnsupportedError(
            f"last_page_len[{b}] is {last[b]}; accepted: 1 to {page_size}, page_size"
        )
    keys = np.where(counts > 0, (counts - 1) * page_size + last, 0)
    if (keys > _INT32_MAX).any():
        b = int(keys.argmax())
        raise UnsupportedError(
            f"indptr: sequence {b} has {counts[b]} pages, {keys[b]} keys; accepted: at most "
            f"{_INT32_MAX} keys"
        )
    used = indices[starts[0] : starts[-1]]  # others may be anything, as an engine's free room is
    wide = used != used.astype(np.int32)
    if wide.any():
        i = int(wide.argmax())
        raise UnsupportedError(f"indices[{starts[0] + i}] is {used[i]}; accepted: an int32 number")
    longest = int(counts.max(initial=0))
    if max_pages is not None and max_pages < longest:
        raise UnsupportedError(
            f"max_pages is {max_pages}; accepted: at least {longest}, the pages of sequence "
            f"{int(counts.argmax())}"
        )
    return longest


def _device_of(x: Any, framework: str) -> Any:
    if framework == "jax":
        return None if _is_traced(x) else ", ".join(sorted(map(str, x.devices())))
    return None if framework == "numpy" else x.device


def _is_on_host(x: Any, framework: str) -> bool:
    """Whether the values are there to be read: not on a GPU, and no compiler is tracing."""
    if framework == "torch":
        torch = sys.modules["torch"]
        plain = type(x) in (torch.Tensor, torch.nn.Parameter)  # no FakeTensor, for one
        return bool(plain and x.device.type == "cpu" and not torch.compiler.is_compiling())
    if framework == "jax":
        return not _is_traced(x) and all(device.platform == "cpu" for device in x.devices())
    return framework == "numpy"


def _is_traced(x: Any) -> bool:
    return isinstance(x, sys.modules["jax"].core.Tracer)


def _values(x: Any) -> Any:
    """As a NumPy array; of a GPU's array, the host waits for it."""
    if hasattr(x, "cpu"):  # torch
        return x.cpu().numpy()
    if hasattr(x, "get"):  # CuPy
        return x.get()
    import numpy as np

    return np.asarray(x)
