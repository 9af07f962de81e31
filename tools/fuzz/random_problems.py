"""Random attention problems: shapes at the edges of tiles, any strides, all features combined.

A problem is made of its seed alone. Its values are placed in memory that is otherwise NaN, so that
whatever reads beside a tensor shows.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 104, 120, 128, 128, 160, 192, 256)
LARGE_HEAD_DIMS = (257, 264, 320, 384, 512)  # of attention without caches

# The largest finite values.
FINITE = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
}
# How programs spell minus infinity where it must stay finite; in float16 the lowest that it has.
SPELLINGS = (-1e4, -1e9, -1e10, -1e20, *(-x for x in FINITE.values()))


@dataclass(frozen=True)
class Placed:
    """A tensor's place in a flat block of memory, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    block: int

    @staticmethod
    def of(sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> Placed:
        """In the smallest block."""
        last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        empty = math.prod(sizes) == 0
        return Placed(tuple(sizes), tuple(strides), offset, offset + (0 if empty else last + 1))


@dataclass(frozen=True)
class Problem:
    """A problem to compute. Tensors are pairs of values and a place; names are those of dlattn."""

    seed: int
    dtype: str
    layout: str
    tensors: dict[str, tuple[np.ndarray, Placed]]
    options: dict[str, Any]
    out: Placed | None  # where to write; None: a new tensor
    lengths_q: tuple[int, ...] = ()  # of varlen batches
    lengths_k: tuple[int, ...] = ()
    seqused_k: tuple[int, ...] = ()
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def varlen(self) -> bool:
        return bool(self.lengths_q)

    def features(self) -> list[str]:
        """The features asked for, in the words that a summary counts."""
        q, k, v = (self.tensors[name][1].sizes for name in "qkv")
        options = self.options
        causal = options["causal"]
        asked = {
            f"dtype {self.dtype}": True,
            f"layout {self.layout}": True,
            "causal bottom-right": causal is True or causal == "bottom_right",
            "causal top-left": causal == "top_left",
            "window": options["window"] != (None, None),
            "softmax_scale": options["softmax_scale"] is not None,
            "softcap": options["softcap"] > 0,
            "lse": options["return_lse"],
            "batch_invariant": options["batch_invariant"],
            "grouped heads": q[-2] != k[-2],
            "head_dim_v": q[-1] != v[-1],
            "varlen": self.varlen,
            "varlen with an empty sequence": self.varlen and 0 in self.lengths_q + self.lengths_k,
            "seqused_k": bool(self.seqused_k),
            "out": self.out is not None,
            "no keys": 0 in k,
            "rows off 16 bytes": self._unaligned(),
            **{name: name in self.tensors for name in ("bias", "mask", "alibi_slopes", "sinks")},
        }
        return [name for name, used in asked.items() if used]

    def _unaligned(self) -> bool:
        eight = 4 if self.dtype == "float32" else 8
        places = [self.tensors[name][1] for name in "qkv"]
        if self.out is not None:
            places.append(self.out)
        return any((p.offset | math.gcd(0, *p.strides[:-1])) % eight for p in places)

    def describe(self) -> str:
        """In one line."""
        q, k, v = (self.tensors[name][1] for name in "qkv")
        lengths = f" lengths {self.lengths_q}, {self.lengths_k}" if self.varlen else ""
        plain = {k: x for k, x in self.options.items() if x not in (None, False, 0.0)}
        return (
            f"seed {self.seed}: q {q.sizes} k {k.sizes} v {v.sizes} strides {q.strides} "
            f"{k.strides} {v.strides}{lengths} {plain}; {', '.join(self.features())}"
        )


class Draw:
    """Draws one problem."""

    def __init__(self, seed: int, dtypes: Sequence[str], most_scores: int) -> None:
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._seed = seed
        self._dtypes = dtypes
        self._most_scores = most_scores
        # Few features and many: the former reach the kernels that have few.
        self._density = self._random.choice((0.0, 0.1, 0.4))

    def problem(self) -> Problem:
        """The problem of this seed."""
        rng = self._random
        dtype = rng.choice(self._dtypes)
        heads_kv = rng.choice((1, 1, 2, 3))
        heads = heads_kv * rng.choice((1, 1, 2, 3, 4, 8))
        head_dim = self._head_dim()
        head_dim_v = head_dim if rng.random() < 0.6 else self._head_dim()
        varlen = self._some(0.5)
        batch = rng.choice((2, 3, 5)) if varlen else rng.choice((1, 1, 2, 3))
        each = max(1, self._most_scores // (batch * heads))
        rows = self._most_rows(each)
        lengths_q = tuple(self._length(rows) for _ in range(batch if varlen else 1))
        lengths_k = tuple(self._length(each // max(1, n)) for n in lengths_q)
        if varlen and rng.random() < 0.4:
            lengths_q, lengths_k = self._with_empty(lengths_q), self._with_empty(lengths_k)
        used = ()
        if varlen and rng.random() < 0.4:
            used = tuple(rng.randint(0, n) for n in lengths_k)
        total_q, total_k = sum(lengths_q), sum(lengths_k) + (rng.choice((0, 3)) if varlen else 0)
        most_q = max(lengths_q) + (rng.choice((0, 0, 5)) if varlen else 0)
        most_k = max(lengths_k) + (rng.choice((0, 0, 5)) if varlen else 0)
        leading = () if varlen else (batch,)
        sizes = {
            "q": (*leading, total_q, heads, head_dim),
            "k": (*leading, total_k, heads_kv, head_dim),
            "v": (*leading, total_k, heads_kv, head_dim_v),
        }
        tensors = {name: (self._values(name, n), self._place(n, name)) for name, n in sizes.items()}
        if varlen:
            self._forget_unused(tensors, lengths_k, used)
        self._add_scores(tensors, (batch, heads, most_q, most_k), dtype)
        out = None
        if rng.random() < 0.4:
            out = self._place((*sizes["q"][:-1], head_dim_v), "out")
        return Problem(
            self._seed,
            dtype,
            rng.choice(("bshd", "bshd", "bhsd")),
            tensors,
            self._options(),
            out,
            *((lengths_q, lengths_k, used, most_q, most_k) if varlen else ()),
        )

    def _some(self, weight: float = 1.0) -> bool:
        return self._random.random() < self._density * weight

    def _head_dim(self) -> int:
        rng = self._random
        return rng.choice(HEAD_DIMS) if rng.random() < 0.75 else rng.randint(1, 256)

    def _most_rows(self, most: int) -> int:
        """The number of queries, where a head may have so many scores."""
        return most

    def _length(self, most: int) -> int:
        rng = self._random
        if rng.random() < 0.02:
            return 0
        drawn = rng.choice(EDGES) if rng.random() < 0.6 else rng.randint(1, 420)
        return max(1, min(drawn, most))

    def _with_empty(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        empty = self._random.randrange(len(lengths))
        return tuple(0 if i == empty else n for i, n in enumerate(lengths))

    def _options(self) -> dict[str, Any]:
        rng = self._random
        limits = (None, 0, 1, 5, 16, 40, 64, 100, 200)
        window = (rng.choice(limits), rng.choice(limits)) if self._some() else (None, None)
        return {
            "causal": rng.choice((False, False, True, "bottom_right", "top_left")),
            "window": window,
            "softmax_scale": self._one_of((0.03, 0.3, 1.0), (2.0**-126, 1e-6, 20.0), 0.5) or None,
            "softcap": self._one_of((0.5, 3.0, 30.0), (1e3, 1e5, 1e7, 2.0**100)),
            "return_lse": rng.random() < 0.7,
            "batch_invariant": rng.random() < 0.15,
        }

    def _one_of(
        self, usual: Sequence[float], extreme: Sequence[float], weight: float = 1.0
    ) -> float:
        """0 for none."""
        if not self._some(weight):
            return 0.0
        return self._random.choice(usual if self._random.random() < 0.75 else extreme)

    def _values(self, name: str, sizes: tuple[int, ...]) -> np.ndarray:
        """Normal with an offset; sometimes with wide scores, or maxima that rise along the keys."""
        rng = self._random
        x = self._numbers.standard_normal(sizes, dtype=np.float32) + 0.25
        if name == "q":
            x *= rng.choice((1.0, 1.0, 0.2, 3.0))
        if name == "k" and rng.random() < 0.2:
            trend = np.linspace(0.1, rng.choice((4.0, 12.0)), sizes[-3], dtype=np.float32)
            x *= (trend if rng.random() < 0.5 else trend[::-1])[:, None, None]
        return x

    def _place(self, sizes: tuple[int, ...], name: str) -> Placed:
        """(batch, rows, heads, dim), or without a batch, in one of many orders and spacings."""
        rng = self._random
        *leading, rows, heads, dim = sizes
        batch = leading[0] if leading else 1
        kinds = ["contiguous"] * 3 + ["bhsd", "packed", "padded", "padded rows", "sbhd"]
        kind = rng.choice([*kinds, *(["broadcast"] if name in "kv" and leading else [])])
        offset = 0
        row, head, per_batch = heads * dim, dim, rows * heads * dim
        if kind == "bhsd":
            row, head = dim, rows * dim
        elif kind == "packed":
            row = 3 * heads * dim
            per_batch, offset = rows * row, "qkv".find(name) % 3 * heads * dim
        elif kind == "padded":
            head = dim + rng.choice((1, 2, 4, 8, 8, 16))
            row, offset = heads * head, rng.choice((0, 0, 1, 2, 4, 8))
            per_batch = rows * row
        elif kind == "padded rows":
            row = heads * dim + rng.choice((1, 2, 4, 8, 8, 64))
            per_batch = rows * row + rng.choice((0, 8))
        elif kind == "sbhd":
            row, per_batch = batch * heads * dim, heads * dim
        elif kind == "broadcast":
            per_batch = 0
        strides = (row, head, 1)
        return Placed.of(sizes, (per_batch, *strides) if leading else strides, offset)

    @staticmethod
    def _forget_unused(
        tensors: dict[str, tuple[np.ndarray, Placed]],
        lengths: tuple[int, ...],
        used: tuple[int, ...],
    ) -> None:
        """Keys that belong to no sequence, or are not in use, are NaN."""
        starts = [0, *itertools.accumulate(lengths)]
        for name in "kv":
            values = tensors[name][0]
            values[starts[-1] :] = np.nan
            for start, length, count in zip(starts[:-1], lengths, used or lengths, strict=True):
                values[start + count : start + length] = np.nan

    def _add_scores(
        self,
        tensors: dict[str, tuple[np.ndarray, Placed]],
        full: tuple[int, int, int, int],
        dtype: str,
    ) -> None:
        """Bias, mask, slopes and sinks."""
        rng, numbers = self._random, self._numbers
        if self._some():
            sizes = self._broadcastable(full)
            bias = numbers.standard_normal(sizes, dtype=np.float32)
            if rng.random() < 0.3:
                bias[numbers.random(sizes) < 0.3] = -np.inf
            if rng.random() < 0.4:
                self._lower(bias, dtype)
            tensors["bias"] = (bias, self._place_scores(sizes))
        if self._some():
            sizes = self._broadcastable(full)
            mask = numbers.random(sizes) < rng.choice((0.2, 0.7, 0.97))
            tensors["mask"] = (mask, self._place_scores(sizes))
        if self._some():
            sizes = full[1:2] if rng.random() < 0.5 else full[:2]
            slopes = numbers.random(sizes, dtype=np.float32)
            slopes *= np.float32(rng.choice((1.0, 1.0, 1.0, 30.0, -1.0, 1000.0, -1000.0)))
            tensors["alibi_slopes"] = (slopes, Placed.of(sizes, contiguous(sizes)))
        if self._some():
            sinks = numbers.standard_normal(full[1], dtype=np.float32) * 3
            if rng.random() < 0.2:
                sinks[0] = -np.inf
            tensors["sinks"] = (sinks, Placed.of((full[1],), (rng.choice((1, 1, 3)),)))

    def _lower(self, bias: np.ndarray, dtype: str) -> None:
        """Minus infinity as programs spell it that keep it finite, over keys at one end or rows."""
        rng = self._random
        rows, keys = bias.shape[-2:]
        count = rng.choice((1, 64, 128, max(1, keys // 2), keys))
        own = dtype if self._seed % 2 == 0 else "float32"  # as differential.Run makes it
        lowest = -FINITE.get(own, FINITE["float32"])
        value = np.float32(max(rng.choice(SPELLINGS), lowest))
        region = rng.choice((np.s_[..., -count:], np.s_[..., :count], np.s_[..., rows // 2 :, :]))
        bias[region] = value

    def _broadcastable(self, full: tuple[int, int, int, int]) -> tuple[int, ...]:
        rng = self._random
        sizes = [n if rng.random() < 0.65 else 1 for n in full]
        return tuple(sizes[rng.choice((0, 0, 0, 1, 2)) :])

    def _place_scores(self, sizes: tuple[int, ...]) -> Placed:
        """Contiguous, with longer rows, with keys before queries, or repeated without memory."""
        rng = self._random
        strides = list(contiguous(sizes))
        kind = rng.choice(("contiguous", "contiguous", "padded", "transposed", "repeated"))
        if kind == "padded":
            strides = list(contiguous((*sizes[:-1], sizes[-1] + rng.choice((1, 2, 8)))))
        elif kind == "transposed":
            order = (*sizes[:-2], sizes[-1], sizes[-2])
            strides = list(contiguous(order))
            strides[-2], strides[-1] = strides[-1], strides[-2]
        elif kind == "repeated" and len(sizes) > 2:
            strides[rng.randrange(len(sizes) - 2)] = 0
        return Placed.of(sizes, strides, rng.choice((0, 0, 1)))


def contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps."""
    strides = [1]
    for n in reversed(sizes[1:]):
        strides.append(strides[-1] * max(1, n))
    return tuple(reversed(strides))


class ForwardDraw(Draw):
    """Problems of attention alone, some with head dims that no GPU has caches or gradients of."""

    def _head_dim(self) -> int:
        large = self._random.random() < 0.1
        return self._random.choice(LARGE_HEAD_DIMS) if large else super()._head_dim()


def draw(seed: int, dtypes: Sequence[str], most_scores: int) -> Problem:
    """The problem of a seed; its batch has at most about `most_scores` scores."""
    return ForwardDraw(seed, dtypes, most_scores).problem()
