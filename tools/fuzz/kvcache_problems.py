"""A problem of KV caches: what a call is asked, where keys lie in memory, and what becomes of them.

`kvcache_draws` draws them, and `kvcache_differential` holds calls to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvcache_eight_bits import CACHE_DTYPES, Scale, in_8_bits
from random_problems import Placed

from dlattn.reference import round_to


@dataclass(frozen=True)
class Rotary:
    """Tables, (positions, rotary_dim / 2), and how they are used."""

    cos: np.ndarray
    sin: np.ndarray
    dtype: str
    interleaved: bool
    fixed_q: bool

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows (n, heads, dim) at their positions, each step in x's own precision."""
        half = self.cos.shape[1]
        first = slice(0, 2 * half, 2) if self.interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if self.interleaved else slice(half, 2 * half)
        c, s = (table.astype(x.dtype)[positions][:, None] for table in (self.cos, self.sin))
        x0, x1 = x[..., first], x[..., second]
        out = x.copy()
        out[..., first] = x0 * c - x1 * s
        out[..., second] = x1 * c + x0 * s
        return out


@dataclass
class KVCacheProblem:
    """A problem to compute. Numbers are float32, float64 of float64, and those of their dtype.

    Rows of q, and new rows of k and v, lie one after the other, (rows, heads, dim), whatever the
    call makes of them: sequence b has `counts[b]` new keys and `lengths_q[b]` queries.
    """

    seed: int
    call: str
    dtype: str
    cache_dtype: str  # that of q, or one of 8 bits
    layout: str
    heads: int
    heads_kv: int
    dims: tuple[int, int]
    page_size: int  # 0: no pages
    room: int
    before: tuple[int, ...]
    counts: tuple[int, ...]
    lengths_q: tuple[int, ...]
    max_seqlen_k: int | None = None
    # Where keys are.
    entries: Any = None
    """(batch, columns) of pages, or (batch,) of a cache's entries."""
    told_entries: Any = None
    """The same as the call is told, which may differ where it has no effect."""
    chosen: bool = False
    leftpads: tuple[int, ...] | None = None
    told_lengths: tuple[int, ...] = ()
    told_leftpads: tuple[int, ...] | None = None
    stray: bool = False
    """Whether pages or entries are told that there are not."""
    evicted: bool = False
    """Whether there are no pages before a window."""
    table_gap: int = 0
    """Numbers between rows of the table."""
    csr: tuple[str, Any, Any, Any] | None = None
    """dtype, indptr, indices and last_page_len."""
    memory: str = ""
    places: tuple[Placed, ...] = ()
    numbers: tuple[np.ndarray, ...] = ()
    """(entries, rows, heads, dim) of K and V."""
    # The new rows.
    q: Any = None
    new: tuple[np.ndarray, ...] = ()
    inputs: dict[str, Placed] = field(default_factory=dict)
    """Places of q, k and v."""
    varlen_new: bool = False
    around: tuple[int, int] = (0, 0)
    """New rows of no sequence, before and behind the others."""
    slots: Any = None
    slots_of_tokens: bool = False
    """Without cu_seqlens_q."""
    slot_dtype: str = "int64"
    rotary: Rotary | None = None
    scales: tuple[Scale, ...] = ()
    """The dtype of K and V in 8 bits."""
    lost: Any = None
    """New rows that have no place."""
    tensors: dict[str, tuple[np.ndarray, Placed]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    out: Placed | None = None
    workspace: str = ""
    """dtype of memory that the caller gives the call; "": none."""

    @property
    def batch(self) -> int:
        return len(self.before)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(n + new for n, new in zip(self.before, self.counts, strict=True))

    @property
    def real(self) -> Any:
        return np.float64 if self.dtype == "float64" else np.float32

    def where(self, b: int, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """The entry or page, and the row there, of keys of sequence b."""
        if self.page_size:
            return self.entries[b, keys // self.page_size], keys % self.page_size
        return np.full(len(keys), self.entries[b]), keys

    @property
    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """The sequence of each new row, and which of the sequence's rows it is."""
        sequence = np.repeat(np.arange(self.batch), self.counts)
        index = np.concatenate([np.arange(n) for n in self.counts])
        return sequence, index.astype(int)

    def where_new(self) -> tuple[np.ndarray, np.ndarray]:
        """The same of all new rows."""
        sequence, index = self.owners
        keys = np.array(self.before, int)[sequence] + index
        if self.page_size:
            return self.entries[sequence, keys // self.page_size], keys % self.page_size
        return self.entries[sequence], keys

    def positions(self, fixed: bool = False) -> np.ndarray:
        """The positions of new rows, for rotary embedding."""
        sequence, index = self.owners
        at = np.array(self.before, int)[sequence] + (0 if fixed else index)
        if self.leftpads is not None:
            at = at - np.array(self.leftpads)[sequence]
        return np.maximum(at, 0)

    def stored(self) -> list[np.ndarray]:
        """The new rows of k and v as the cache has them, as numbers of its dtype."""
        k, v = (x.astype(self.real) for x in self.new)
        if self.rotary is not None:
            k = self.rotary.rotate(k, self.positions())
        if not self.scales:
            return [round_to(x, self.cache_dtype) for x in (k, v)]
        sequence = self.owners[0]
        return [
            in_8_bits(x, scale[sequence], self.cache_dtype)
            for x, scale in zip((k, v), self.factors, strict=True)
        ]

    @property
    def factors(self) -> list[np.ndarray]:
        """The factors of the elements of K and V, (batch, heads)."""
        return [scale.of_heads(self.batch, self.heads_kv) for scale in self.scales]

    def stands_for(self, x: np.ndarray, name: str, b: int) -> np.ndarray:
        """The numbers (rows, heads, dim) of sequence b's elements: exact ones, of 8 bits."""
        if not self.scales:
            return x.astype(self.real)
        factors: np.ndarray = self.factors["kv".index(name)][b, :, None].astype(np.float64)
        return x.astype(np.float64) * factors

    def rotated_q(self) -> np.ndarray:
        """q as scores are formed of it."""
        if self.rotary is None:
            return self.q
        positions = self.positions(self.rotary.fixed_q)
        return round_to(self.rotary.rotate(self.q.astype(self.real), positions), self.dtype)

    def features(self) -> list[str]:
        """The features asked for, in the words that a summary counts."""
        options, lengths = self.options, self.lengths
        causal, rotary = options.get("causal"), self.rotary
        pages = self.page_size
        asked = {
            f"call: {self.call}": True,
            f"dtype {self.dtype}": True,
            f"layout {self.layout}": True,
            f"cache of {self.cache_dtype}": self.cache_dtype in CACHE_DTYPES,
            **{scale.kind: True for scale in self.scales},
            f"page_size {pages}": bool(pages),
            f"memory: {self.memory}": True,
            "cache_batch_idx": self.chosen,
            "page_table_from_csr": self.csr is not None,
            "no pages before a window": self.evicted,
            "shared pages or entries": self._shared(),
            "leftpad_k": self.leftpads is not None,
            "max_seqlen_k": self.max_seqlen_k is not None,
            "values out of range": self._out_of_range(),
            "no keys": 0 in lengths,
            "one key": 1 in lengths,
            "all the room": self.room in lengths,
            "whole pages": bool(pages) and any(n and n % pages == 0 for n in lengths),
            "thousands of keys": max(lengths, default=0) >= 1000,
            "grouped heads": self.heads != self.heads_kv,
            "head_dim_v": self.dims[0] != self.dims[1],
            "head dims beyond 256": max(self.dims) > 256,
            "rotary interleaved": rotary is not None and rotary.interleaved,
            "rotary halves": rotary is not None and not rotary.interleaved,
            "rotary q": rotary is not None and self.q is not None,
            "ragged new rows": self.varlen_new,
            "slots": self.slots is not None,
            "slots of tokens": self.slots_of_tokens,
            "rows of no place": self.lost is not None and bool(self.lost.any()),
            "out": self.out is not None,
            **{name: name in self.tensors for name in ("bias", "mask", "alibi_slopes", "sinks")},
        }
        if self.call != "append":
            asked |= {
                "one query": max(self.lengths_q) == 1,
                "drafts": 1 < max(self.lengths_q) <= 16,
                "chunks of a prompt": max(self.lengths_q) > 16,
                "causal bottom-right": causal is True or causal == "bottom_right",
                "causal top-left": causal == "top_left",
                "window": options["window"] != (None, None),
                "softmax_scale": options["softmax_scale"] is not None,
                "softcap": options["softcap"] > 0,
                "lse": options["return_lse"],
                "batch_invariant": options["batch_invariant"],
                "num_splits": options["num_splits"] is not None,
                "split_size": options["split_size"] is not None,
                "workspace": bool(self.workspace),
            }
        return [name for name, used in asked.items() if used]

    def _shared(self) -> bool:
        if not self.page_size:
            return len(set(self.entries.tolist())) < self.batch
        used = [self.entries[b, : -(-n // self.page_size)] for b, n in enumerate(self.lengths)]
        pages = np.concatenate(used)
        return len(np.unique(pages)) < len(pages)

    def _out_of_range(self) -> bool:
        lengths = self.before if self.call in ("new keys", "append") else self.lengths
        told = (self.told_lengths, self.told_leftpads)
        return self.stray or told != (lengths, self.leftpads)

    def describe(self) -> str:
        """In one line."""
        plain = {k: x for k, x in self.options.items() if x not in (None, False, 0.0)}
        return (
            f"seed {self.seed}: heads {self.heads}, {self.heads_kv}, head dims {self.dims}, "
            f"queries {self.lengths_q}, keys {self.before} and new {self.counts} of "
            f"{self.room}, bound {self.max_seqlen_k}, leftpad_k {self.leftpads}, {plain}; "
            f"{', '.join(self.features())}"
        )
