"""Caches of keys for tests: NaN wherever no key in use is, with pages in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlattn.reference import (
    attention_reference,
    error_bound,
    kvcache_problems,
    max_error,
    round_to,
)

# Options that tell how to compute, and change no result beyond its rounding.
PLANNED = ("num_splits", "split_size", "workspace", "batch_invariant")


@dataclass(frozen=True)
class Cache:
    """The shape of a cache, and the queries over it."""

    lengths: tuple[int, ...]
    page_size: int = 0  # 0: no pages
    seqlen_q: int = 1
    num_heads: int = 4
    num_heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    layout: str = "bshd"
    one_row: bool = False
    """K and V of a key are parts of one row."""
    latent: bool = False
    """V is the first columns of K, as the same memory."""
    chosen: bool = False
    """Entries by cache_batch_idx, of more than there are sequences."""
    leftpads: tuple[int, ...] | None = None
    nan_before_leftpad: bool = True
    cache_dtype: str = ""
    """The dtype of 8 bits, with a scale for each sequence and head; "": dtype."""
    capacity: int = 0
    """Keys that each sequence has room for; 0: as many as the longest has."""

    @property
    def room(self) -> int:
        return max(self.capacity, *self.lengths, 1)


class Problem:
    """The numbers of a cache, rounded to its dtype; `arrays` makes a framework's arrays of them."""

    def __init__(self, cache: Cache, seed: int = 0) -> None:
        self.cache = cache
        self._random = np.random.default_rng([seed, len(cache.lengths), cache.room])
        batch, dims = len(cache.lengths), (cache.head_dim, cache.head_dim_v)
        self.k_descale, self.v_descale = (
            (0.02 + 0.03 * self._random.random((batch, cache.num_heads_kv))).astype(np.float32)
            for _ in "kv"
        )
        self.q = self._normal(batch, cache.seqlen_q, cache.num_heads, cache.head_dim)
        if cache.layout == "bhsd":
            self.q = np.ascontiguousarray(self.q.swapaxes(1, 2))
        self.seqused_k = np.array(cache.lengths, np.int32)
        self.leftpad_k = None if cache.leftpads is None else np.array(cache.leftpads, np.int32)
        self.page_table: Any = None
        self.told_table: Any = None
        """The table that calls get, if it is another one."""
        self.cache_batch_idx: Any = None
        entries, rows = batch, cache.room
        if cache.page_size:
            rows = cache.page_size
            entries = self._lay_out_pages()
        elif cache.chosen:
            entries = batch + 3
            self.cache_batch_idx = self._random.permutation(entries)[:batch].astype(np.int32)
        widths = [sum(dims)] if cache.one_row else dims[: 1 if cache.latent else 2]
        heads = cache.num_heads_kv
        scales = [self.k_descale, self.v_descale]
        if cache.one_row:
            scales = [np.repeat(np.stack(scales, axis=-1), dims, axis=-1)]
        scales = scales[: len(widths)]
        self.buffers = [
            self._fill(entries, rows, heads, width, scale)
            for width, scale in zip(widths, scales, strict=True)
        ]

    def _normal(self, *shape: int) -> Any:
        """Around 0.25: no result is right by being zero."""
        values = self._random.standard_normal(shape) + 0.25
        return round_to(values.astype(np.float32), self.cache.dtype)

    def _lay_out_pages(self) -> int:
        """Pages of the sequences in any order, beside some that nobody uses."""
        cache = self.cache
        columns = -(-cache.room // cache.page_size)
        counts = [-(-length // cache.page_size) for length in cache.lengths]
        total = sum(counts) + 3
        order = iter(self._random.permutation(total))
        self.page_table = np.full((len(counts), columns), -1, np.int32)
        for b, count in enumerate(counts):
            self.page_table[b, :count] = [next(order) for _ in range(count)]
        return total

    def _fill(self, entries: int, rows: int, heads: int, width: int, scale: Any) -> Any:
        """The elements of a cache; `scale`: (batch, heads), or with the columns too."""
        cache_dtype = self.cache.cache_dtype
        unused = 127 if cache_dtype == "int8" else np.nan
        buffer = np.full((entries, rows, heads, width), unused, np.float32)
        for b, length in enumerate(self.cache.lengths):
            first = 0
            if self.leftpad_k is not None and self.cache.nan_before_leftpad:
                first = int(self.leftpad_k[b])
            for j in range(first, length):
                x = self._normal(heads, width)
                if cache_dtype:
                    x = x / scale[b].reshape(heads, -1)
                    x = np.clip(np.rint(x), -128, 127) if cache_dtype == "int8" else x
                    x = round_to(x.astype(np.float32), cache_dtype)
                buffer[self.row(b, j)] = x
        if self.cache.layout == "bhsd":
            buffer = np.ascontiguousarray(buffer.swapaxes(1, 2))
        return buffer

    def row(self, b: int, j: int) -> tuple[int, int]:
        """Where key j of sequence b is, as indices of a buffer in the layout "bshd"."""
        if self.page_table is not None:
            page, row = divmod(j, self.cache.page_size)
            return int(self.page_table[b, page]), row
        return b if self.cache_batch_idx is None else int(self.cache_batch_idx[b]), j

    def arrays(self, convert: Callable[..., Any]) -> dict[str, Any]:
        """Arguments of `attention_with_kvcache`; `convert` is called with numbers and a dtype."""
        dtype = self.cache.dtype
        cache_dtype = self.cache.cache_dtype
        buffers = [convert(buffer, cache_dtype or dtype) for buffer in self.buffers]
        if self.cache.one_row:
            at = self.cache.head_dim
            buffers = [buffers[0][..., :at], buffers[0][..., at:]]
        elif self.cache.latent:
            buffers.append(buffers[0][..., : self.cache.head_dim_v])
        made = {"q": convert(self.q, dtype), "k_cache": buffers[0], "v_cache": buffers[1]}
        for name in ("seqused_k", "page_table", "cache_batch_idx", "leftpad_k"):
            values = getattr(self, name)
            if name == "page_table" and self.told_table is not None:
                values = self.told_table
            if values is not None:
                made[name] = convert(values, "int32")
        if cache_dtype:
            made["k_descale"] = convert(self.k_descale, "float32")
            made["v_descale"] = convert(self.v_descale, "float32")
        return {**made, "layout": self.cache.layout}

    def evict(self, left: int, entry: int) -> None:
        """Tell of no page before a window of so many keys, as engines leave their tables."""
        self.told_table = self.page_table.copy()
        for b, length in enumerate(self.cache.lengths):
            first = max(0, length - self.cache.seqlen_q - left)
            self.told_table[b, : first // self.cache.page_size] = entry

    def take_out(self, counts: Any, rows: int) -> tuple[Any, Any]:
        """The keys and values behind the first `counts` of each sequence; NaN takes their place."""
        taken = []
        for buffer in self.buffers:
            view = self._by_row(buffer)
            new = np.empty((len(counts), rows, *view.shape[2:]), np.float32)
            for b, i in np.ndindex(len(counts), rows):
                at = self.row(b, int(counts[b]) + i)
                new[b, i], view[at] = view[at], np.nan
            taken.append(new.swapaxes(1, 2) if self.cache.layout == "bhsd" else new)
        return taken[0], taken[1]

    def put_back(self, counts: Any, k: Any, v: Any) -> None:
        """Write rows where `take_out` took them from."""
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            new = self._by_row(new)
            for b, i in np.ndindex(*new.shape[:2]):
                self._by_row(buffer)[self.row(b, int(counts[b]) + i)] = new[b, i]

    def _by_row(self, x: Any) -> Any:
        return x.swapaxes(1, 2) if self.cache.layout == "bhsd" else x

    def check(self, out: Any, lse: Any, **options: Any) -> None:
        """Each sequence is within the bound of the float64 reference, in itself."""
        given = self.arrays(lambda x, dtype: x)
        if self.page_table is not None:
            given["page_table"] = self.page_table
        options = {name: x for name, x in options.items() if name not in PLANNED}
        assert max_error(out, out) == 0.0, "NaN in out"
        for b, (q, k, v, own) in enumerate(kvcache_problems(**given, **options)):
            expected = attention_reference(q, k, v, **own)
            bound = error_bound(q, k, v, dtype=self.cache.dtype, expected=expected, **own)
            assert max_error(out[b : b + 1], expected[0]) <= bound.out, (b, self.cache)
            assert max_error(lse[b : b + 1], expected[1]) <= bound.lse, (b, self.cache)


def rotated(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """Rotary embedding of (batch, rows, heads, dim) by rows of the tables, (batch, rows)."""
    x, half = x.astype(np.float64), cos.shape[1]
    c, s = (t.astype(np.float64)[positions][:, :, None] for t in (cos, sin))
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out = x.copy()
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out.astype(np.float32)


def lengths_about(page_size: int, capacity: int) -> tuple[int, ...]:
    """None, one, a page and one more or less, all that there is room for."""
    about = (0, 1, page_size - 1, page_size, page_size + 1, capacity - 1, capacity)
    return tuple(min(n, capacity) for n in about)


# Sizes of pages, and what each sequence has room for.
PAGES = {1: 37, 3: 41, 16: 70, 256: 513}

# Options beside the cache, by name. Those that are arrays are numbers: (shape, seed).
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": (5, None)},
    "both sides": {"window": (9, 0)},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.3},
    "top left": {"causal": "top_left"},
}


def draft_tree(problem: Problem) -> Any:
    """A mask over the newest keys: each query sees all old ones, and some of the new ones."""
    cache = problem.cache
    mask = np.zeros((len(cache.lengths), 1, cache.seqlen_q, cache.room), bool)
    random = np.random.default_rng(5)
    for b, length in enumerate(cache.lengths):
        new = min(length, cache.seqlen_q)
        mask[b, ..., : length - new] = True
        mask[b, ..., length - new : length] = random.random((cache.seqlen_q, new)) < 0.5
    return mask
