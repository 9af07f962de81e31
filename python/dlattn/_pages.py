"""Page tables from the lists of pages that other libraries keep."""

from __future__ import annotations

import importlib
from typing import Any

from dlattn import _frameworks
from dlattn._errors import UnsupportedError
from dlattn._types import Tensor

_MODULES = {"numpy": "numpy", "torch": "torch", "cupy": "cupy", "jax": "jax.numpy"}


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
        page_size: Keys of a page.
        max_pages: Columns of the page table, at least the number of pages of the longest sequence:
            further ones are left out. With it nothing is read by the host, so the call can be
            captured in a CUDA graph. None: that number, which for a tensor on a GPU waits for it.

    Returns:
        (page_table, seqused_k), new int32 arrays of indptr's framework on its device, as
        `attention_with_kvcache` takes them: (batch, max_pages), padded with -1, and (batch,).

    Raises:
        UnsupportedError: A value is wrong.
        TypeError: An argument is not the kind of object that is accepted.
    """
    framework = _frameworks.find(type(indptr), "indptr").name
    if framework not in _MODULES:
        raise TypeError(
            f"indptr is of type {type(indptr).__qualname__}; accepted: a torch, CuPy, JAX or NumPy "
            "array"
        )
    _check_count(page_size, "page_size", 1)
    lists = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    for name, x in lists.items():
        _check_list(x, name)
    batch_size = int(indptr.shape[0]) - 1
    if batch_size < 0:
        raise UnsupportedError("indptr is empty; accepted: shape (batch + 1,)")
    if int(last_page_len.shape[0]) != batch_size:
        raise UnsupportedError(
            f"last_page_len: shape is {tuple(last_page_len.shape)}; accepted: ({batch_size},), one "
            "fewer than indptr"
        )
    xp: Any = importlib.import_module(_MODULES[framework])
    on = {"device": indptr.device} if framework == "torch" else {}
    begins = indptr[:-1]
    counts = indptr[1:] - begins
    if max_pages is None:
        max_pages = int(counts.max()) if batch_size else 0
    _check_count(max_pages, "max_pages", 0)
    none = xp.zeros_like(counts)
    keys = xp.where(counts > 0, (counts - 1) * page_size + last_page_len, none)
    columns = xp.arange(max_pages, **on)
    if int(indices.shape[0]) == 0:
        table = xp.zeros_like(begins[:, None] + columns[None, :]) - 1  # on their device
    else:
        at = xp.clip(begins[:, None] + columns[None, :], 0, int(indices.shape[0]) - 1)
        pages = indices[at]
        table = xp.where(columns[None, :] < counts[:, None], pages, xp.zeros_like(pages) - 1)
    if framework == "torch":
        return table.to(xp.int32), keys.to(xp.int32)
    return table.astype(xp.int32), keys.astype(xp.int32)


def _check_count(value: Any, name: str, least: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} is of type {type(value).__qualname__}; accepted: an int")
    if value < least:
        raise UnsupportedError(f"{name} is {value}; accepted: at least {least}")


def _check_list(x: Any, name: str) -> None:
    _frameworks.find(type(x), name)  # raises TypeError for what is no tensor
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in ("int32", "int64"):
        raise UnsupportedError(f"{name}: dtype is {dtype}; accepted: int32, int64")
    if len(x.shape) != 1:
        raise UnsupportedError(f"{name}: shape is {tuple(x.shape)}; accepted: one dimension")
