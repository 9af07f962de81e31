"""Random problems of KV caches: lengths at every edge, pages of any size in any order, new keys.

A problem is made of its seed and of what its device allows. A cache is NaN, or of int8 something
else than 0, wherever no key in use lies: behind lengths, before leftpad_k, in pages and entries of
nobody, between strided rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvcache_eight_bits import draw_elements, draw_scale, unused_elements
from kvcache_problems import KVCacheProblem, Rotary
from random_problems import HEAD_DIMS, Draw, Placed, contiguous

from dlattn.reference import round_to

PAGE_SIZES = (1, 2, 3, 5, 16, 16, 17, 32, 64, 100, 128, 256)
QUERIES = (*(1,) * 5, 2, 3, 4, 5, 6, 7, 8, 11, 16, 17, 24, 33, 64, 100)
# Keys that a sequence has room for, at most, and how often.
ROOMS = {40: 30, 150: 30, 700: 25, 5000: 12, 100_000: 1}
LEAST, MOST = -(2**31), 2**31 - 1

# Head dims of K and V beyond those of most models: latents, whose V is the first columns of K where
# the call only reads them, and wide heads.
WIDE_DIMS = ((576, 512), (576, 512), (512, 512), (320, 256), (288, 272), (257, 257), (264, 40))
LATENT_DIMS = ((576, 512), (512, 512), (320, 256))
# One problem in so many has them.
WIDE_EVERY = 8

# The calls, and how often each is drawn.
CALLS = {"attend": 4, "new keys": 3, "varlen": 3, "append": 3}
# The dtypes of a cache beside the dtype of its queries, None, and beside which of these.
CACHE_DTYPES: tuple[str | None, ...] = (None, None, "int8", "float8_e4m3fn")
BESIDE_8_BITS = {
    "attend": ("float16", "bfloat16"),
    "new keys": ("float16", "bfloat16"),
    "varlen": ("float16", "bfloat16"),
    "append": ("float16", "bfloat16", "float32"),
}
# The options of the calls that attend, and what draws each. Those that are tensors are drawn in
# `_add_tensors`.
OPTIONS: dict[str, Callable[[KVCacheDraw], Any]] = {
    "causal": lambda draw: draw.choice((False, True, True, True, "bottom_right", "top_left")),
    "window": lambda draw: draw.window(),
    "softmax_scale": lambda draw: draw.one_of((0.03, 0.3, 1.0), (2.0**-126, 1e-6, 20.0), 0.5),
    "softcap": lambda draw: draw.one_of((0.5, 3.0, 30.0), (1e3, 1e5, 1e7, 2.0**100)) or 0.0,
    "return_lse": lambda draw: draw.chance(0.7),
    "batch_invariant": lambda draw: draw.chance(0.15),
}


@dataclass(frozen=True)
class Limits:
    """The ranges of a device's problems."""

    scores: int  # of a batch, at most
    numbers: int  # of the keys and values of a batch, about
    checked: bool  # whether values out of range are refused; else they count as some in range


class KVCacheDraw(Draw):
    """Draws one problem."""

    def __init__(self, seed: int, dtypes: Sequence[str], limits: Limits) -> None:
        super().__init__(seed, dtypes, limits.scores)
        self._limits = limits

    def choice(self, among: Sequence[Any]) -> Any:
        """One of them."""
        return self._random.choice(among)

    def chance(self, share: float) -> bool:
        """True so often."""
        return self._random.random() < share

    def window(self) -> tuple[int | None, int | None]:
        """Few keys or many to either side; often no limit."""
        limits = (None, 0, 1, 5, 16, 40, 64, 100, 200, 1000)
        return (self.choice(limits), self.choice(limits)) if self._some() else (None, None)

    def one_of(
        self, usual: Sequence[float], extreme: Sequence[float], weight: float = 1.0
    ) -> float | None:
        """None for the function's own."""
        return self._one_of(usual, extreme, weight) or None

    def problem(self) -> KVCacheProblem:  # type: ignore[override]
        """The problem of this seed."""
        p = self._shape()
        if p.call in ("new keys", "append"):
            self._add_new(p)
        self._add_pages(p) if p.page_size else self._add_entries(p)
        if p.call in ("attend", "new keys") and self._some():
            p.leftpads = tuple(self._random.randint(0, n) for n in p.lengths)
        if p.call == "append" and p.rotary is not None and self._some():
            p.leftpads = tuple(self._random.randint(0, n + 1) for n in p.lengths)
        p.told_leftpads = p.leftpads
        self._fill(p)
        if p.rotary is not None:
            p.rotary = self._tables(p, p.rotary)
        if p.call == "append":
            self._lose_rows(p)
        else:
            self._add_call(p)
            self._evict(p)
        if not self._limits.checked and p.call == "attend" and self.chance(0.15):
            self._tell_wrong(p)
        return p

    def _shape(self) -> KVCacheProblem:
        """Sizes and lengths."""
        rng, limits = self._random, self._limits
        call = rng.choices(list(CALLS), list(CALLS.values()))[0]
        dtype = rng.choice(self._dtypes)
        most = rng.choices(list(ROOMS), list(ROOMS.values()))[0]
        batch = rng.choice((1, 1, 2, 3, 4, 5, 8, 17))
        heads_kv = rng.choice((1, 1, 2, 2, 3, 4, 8))
        groups = [n for n in (1, 1, 2, 3, 4, 6, 8, 16, 32) if n * heads_kv <= 32]
        heads = heads_kv * rng.choice(groups)
        dims = [self._dim()] * 2 if rng.random() < 0.6 else [self._dim(), self._dim()]
        wide = random.Random(f"wide {self._seed}")  # beside the others, which stay as they are
        if wide.randrange(WIDE_EVERY) == 0:
            dims = list(wide.choice(WIDE_DIMS))
            heads_kv = wide.choice((1, 1, 2))
            heads = heads_kv * max(1, wide.choice((1, 2, 8, 16, 40, 64, 128)) // heads_kv)
        long = most >= 100_000 and limits.numbers >= most * 16
        if long:
            batch, heads_kv, heads = 1, 1, rng.choice((1, 2, 4))
            dims = [rng.choice((8, 40, 64))] * 2
        else:
            most = max(2, min(most, limits.numbers // (batch * heads_kv * sum(dims))))
        paged = call == "varlen" or rng.random() < 0.65
        page_size = 0
        if paged:
            page_size = rng.choice([n for n in PAGE_SIZES if n <= max(most, 16)])
        least = most if long else rng.randint(1, most)
        room = rng.choice((most, rng.randint(least, most)))
        columns = -(-room // page_size) if paged else 0
        room = columns * page_size or room
        cache_dtype = rng.choice(CACHE_DTYPES) if dtype in BESIDE_8_BITS[call] else None
        queries = max(1, limits.scores // (batch * heads * room))
        lengths_q = (min(rng.choice(QUERIES), queries),) * batch
        if call == "varlen":
            lengths_q = tuple(self._ragged(queries) for _ in range(batch))
        if call in ("new keys", "append"):
            lengths_q = tuple(min(n, room) for n in lengths_q)
        lengths = tuple(self._keys(room, page_size) for _ in range(batch))
        return KVCacheProblem(
            self._seed,
            call,
            dtype,
            cache_dtype or dtype,
            rng.choice(("bshd", "bshd", "bhsd")),
            heads,
            heads_kv,
            (dims[0], dims[1]),
            page_size,
            room,
            lengths,
            (0,) * batch,
            lengths_q,
            told_lengths=lengths,
        )

    def _dim(self) -> int:
        rng = self._random
        if rng.random() < 0.05:
            return rng.randint(1, 256)
        return rng.choice(HEAD_DIMS) if rng.random() < 0.7 else 8 * rng.randint(1, 32)

    def _ragged(self, most: int) -> int:
        """Chunks of prompts beside single tokens, and sequences that have none."""
        drawn = self.choice((0, 1, 1, 1, 1, 2, 3, 8, 16, 17, 33, 64, 100))
        return min(drawn, most)

    def _keys(self, room: int, page_size: int) -> int:
        """None, one, about a page, all that there is room for, or any number."""
        page = page_size or 16
        about = (0, 1, page - 1, page, page + 1, 2 * page, room - 1, room, room)
        drawn = self.choice(about) if self.chance(0.55) else self._random.randint(0, room)
        return max(0, min(drawn, room))

    def _add_new(self, p: KVCacheProblem) -> None:
        """How many new keys each sequence has, and how they are given."""
        rng = self._random
        counts: tuple[int, ...]
        rotary = self.chance(0.5)
        if p.call == "append":
            p.varlen_new = self.chance(0.5)
            counts = (min(rng.choice((1, 1, 2, 3, 5, 17, 40)), p.room),) * p.batch
            if p.varlen_new:
                counts = tuple(min(rng.choice((0, 1, 1, 2, 7, 30)), p.room) for _ in p.before)
                p.around = rng.choice(((0, 0), (0, 0), (2, 0), (0, 3)))
            if p.page_size and self.chance(0.45):
                p.slots = np.zeros(0, np.int64)
                p.slot_dtype = rng.choice(("int32", "int64"))
                p.slots_of_tokens = not rotary and self.chance(0.5)
                p.varlen_new = p.varlen_new or p.slots_of_tokens
            if p.slots_of_tokens:
                p.around = (0, 0)
            p.lengths_q = counts
        else:
            counts = p.lengths_q
            if not rotary and self.chance(0.4):
                counts = (rng.randint(1, p.lengths_q[0]),) * p.batch
        p.counts = counts
        p.before = tuple(max(0, n - new) for n, new in zip(p.before, counts, strict=True))
        p.told_lengths = p.before
        if rotary and p.dims[0] > 1:
            dim = p.dims[0] // 2 * 2
            none = np.zeros((0, rng.choice((dim, dim, rng.randint(1, dim // 2) * 2)) // 2))
            table_dtype = rng.choice(("float32", p.dtype))
            p.rotary = Rotary(none, none, table_dtype, self.chance(0.5), self.chance(0.3))

    def _tables(self, p: KVCacheProblem, rotary: Rotary) -> Rotary:
        """Cosines and sines of all positions that a sequence has room for."""
        most = p.room + self.choice((0, 0, 3))
        angles = self._numbers.random((most, rotary.cos.shape[1])) * 6.3
        cos, sin = (
            round_to(x.astype(np.float32), rotary.dtype) for x in (np.cos(angles), np.sin(angles))
        )
        return Rotary(cos, sin, rotary.dtype, rotary.interleaved, rotary.fixed_q)

    def _add_pages(self, p: KVCacheProblem) -> None:
        """Pages of the sequences in any order, beside some that nobody uses."""
        rng = self._random
        columns = p.room // p.page_size
        counts = [-(-n // p.page_size) for n in p.lengths]
        total = sum(counts) + rng.choice((0, 1, 3)) or 1
        order = iter(self._numbers.permutation(total))
        p.entries = np.zeros((p.batch, columns), int)
        for b, count in enumerate(counts):
            p.entries[b, :count] = [next(order) for _ in range(count)]
        if p.batch > 1 and self._some():  # prompts that begin alike
            for b in range(1, p.batch):
                alike = rng.randint(0, min(p.before[0], p.before[b]) // p.page_size)
                p.entries[b, :alike] = p.entries[0, :alike]
        # Behind the last page there may be anything, a page of another sequence among it.
        p.told_entries = p.entries.copy()
        behind = np.arange(columns) >= np.array(counts)[:, None]
        rubbish = rng.choice((-1, -1, LEAST, MOST, total, rng.randrange(total)))
        p.table_gap = rng.choice((0, 0, 3))
        p.told_entries[behind] = rubbish
        if rubbish == -1 and p.slots is None and p.call != "append" and self._some():
            pages = [p.entries[b, :count] for b, count in enumerate(counts)]
            last = [
                n - (count - 1) * p.page_size if count else rng.randint(1, p.page_size)
                for n, count in zip(p.lengths, counts, strict=True)
            ]
            dtype = rng.choice(("int32", "int64"))
            p.csr = (dtype, np.cumsum([0, *counts]), np.concatenate(pages), np.array(last))

    def _evict(self, p: KVCacheProblem) -> None:
        """No pages before a window, in the tables of every other problem that has one."""
        left = p.options.get("window", (None, None))[0]
        if not p.page_size or left is None or p.csr is not None or self._seed % 2:
            return
        for b, (length, queries) in enumerate(zip(p.lengths, p.lengths_q, strict=True)):
            first = 0 if p.options["causal"] == "top_left" else length - queries
            count = max(0, first - left) // p.page_size
            p.told_entries[b, :count] = (-1, LEAST, MOST)[self._seed // 2 % 3]
            p.evicted |= count > 0

    def _add_entries(self, p: KVCacheProblem) -> None:
        """Those of the sequences, or any of a larger cache."""
        rng = self._random
        p.entries = np.arange(p.batch)
        p.chosen = self.chance(0.5)
        if p.chosen:
            p.entries = self._numbers.permutation(p.batch + rng.choice((0, 3)))[: p.batch]
            if p.call == "attend" and self._some():
                p.entries[rng.randrange(p.batch)] = p.entries[0]
        p.told_entries = p.entries

    def _fill(self, p: KVCacheProblem) -> None:
        """Numbers where keys in use are, and their places in memory."""
        rng = self._random
        rows = p.page_size or p.room
        most = int(p.entries.max(initial=0)) + 1
        count = most + rng.choice((0, 0, 2))
        if not p.page_size and not p.chosen:
            count = p.batch
        used = np.zeros((count, rows), bool)
        for b, n in enumerate(p.before):
            first = p.leftpads[b] if p.leftpads is not None else 0
            used[p.where(b, np.arange(min(first, n), n))] = True
        if p.cache_dtype != p.dtype:
            full = (1 if p.slots_of_tokens else p.batch, p.heads_kv)
            appended = p.call in ("new keys", "append")
            p.scales = tuple(
                draw_scale(rng, self._numbers, p.cache_dtype, full, appended) for _ in "kv"
            )
        numbers = []
        for i, (name, dim) in enumerate(zip("kv", p.dims, strict=True)):
            sizes = (count, rows, p.heads_kv, dim)
            values = self._values(name, (int(used.sum()), p.heads_kv, dim))
            if p.scales:
                x = unused_elements(self._numbers, p.cache_dtype, sizes)
                x[used] = draw_elements(rng, self._numbers, p.cache_dtype, values, p.scales[i])
            else:
                x = np.full(sizes, np.nan, p.real)
                x[used] = round_to(values, p.dtype)
            numbers.append(x)
        p.memory, p.places = self._cache_memory(count, rows, p.heads_kv, p.dims)
        if p.dims in LATENT_DIMS and p.call in ("attend", "varlen") and self._seed % 4:
            # V is the first columns of K.
            numbers[1] = numbers[0][..., : p.dims[1]]
            sizes = p.places[1].sizes
            p.places = (p.places[0], Placed.of(sizes, p.places[0].strides, p.places[0].offset))
            p.memory = "latents"
        p.numbers = tuple(numbers)

    def _cache_memory(
        self, count: int, rows: int, heads: int, dims: tuple[int, int]
    ) -> tuple[str, tuple[Placed, ...]]:
        """K and V apart, in one row, or as two halves of a page; rows or heads first."""
        rng = self._random
        kind = rng.choice(("apart", "apart", "one row", "halves"))
        heads_first = rng.choice((False, False, True))
        pad = rng.choice((0, 0, 0, 8, 1))
        layers = rng.choice((1, 1, 3))  # pages of other layers lie between
        layer = rng.randrange(layers)
        offset = rng.choice((0, 0, 0, 8, 1))
        widths = [sum(dims) + pad] if kind == "one row" else [dim + pad for dim in dims]
        blocks = [rows * heads * width for width in widths]
        places = []
        for i, dim in enumerate(dims):
            width = widths[0] if kind == "one row" else widths[i]
            per_entry = layers * (sum(blocks) if kind != "apart" else blocks[i])
            at = offset + per_entry // layers * layer
            if i == 1 and kind != "apart":
                at += dims[0] if kind == "one row" else blocks[0]
            inner = (width, rows * width) if heads_first else (heads * width, width)
            places.append(Placed.of((count, rows, heads, dim), (per_entry, *inner, 1), at))
        order = "heads first" if heads_first else "rows first"
        return f"{kind}, {order}", tuple(places)

    def _lose_rows(self, p: KVCacheProblem) -> None:
        """Slots; some of them, and some pages, do not exist."""
        rng = self._random
        total = sum(p.counts)
        p.lost = np.zeros(total, bool)
        entry, row = p.where_new()
        if p.slots is not None:
            p.slots = entry * p.page_size + row
            none = [-1]
            if not self._limits.checked:
                none += [-2, LEAST, MOST, p.numbers[0].shape[0] * p.page_size]
            if self.chance(0.5):
                p.lost = self._numbers.random(total) < 0.3
                p.slots[p.lost] = rng.choice(none)
        elif p.page_size and not self._limits.checked and self.chance(0.2):
            b = rng.randrange(p.batch)
            column = rng.randrange(p.entries.shape[1])
            sequence, index = p.owners
            keys = np.array(p.before, int)[sequence] + index
            p.lost = (sequence == b) & (keys // p.page_size == column)
            p.told_entries[b, column] = rng.choice((-1, LEAST, MOST, p.numbers[0].shape[0]))
        self._add_rows(p)

    def _add_rows(self, p: KVCacheProblem) -> None:
        """New keys and values; q too, if there is rotary embedding of it."""
        total = sum(p.counts)
        p.new = tuple(
            round_to(self._values(name, (total, p.heads_kv, dim)), p.dtype).astype(p.real)
            for name, dim in zip("kv", p.dims, strict=True)
        )
        for name, dim in zip("kv", p.dims, strict=True):
            p.inputs[name] = self._place_rows(p, p.heads_kv, dim, p.counts, p.varlen_new)
        if p.call == "append" and p.rotary is not None and self.chance(0.5):
            p.q = round_to(self._values("q", (total, p.heads, p.dims[0])), p.dtype)
            p.inputs["q"] = self._place_rows(p, p.heads, p.dims[0], p.counts, p.varlen_new)

    def _place_rows(
        self, p: KVCacheProblem, heads: int, dim: int, counts: Sequence[int], varlen: bool
    ) -> Placed:
        if varlen:
            return self._place((sum(counts) + sum(p.around), heads, dim), "q")
        return self._place((p.batch, counts[0], heads, dim), "q")

    def _add_call(self, p: KVCacheProblem) -> None:
        """q, options, and where the result goes."""
        rng = self._random
        varlen = p.call == "varlen"
        p.q = round_to(self._values("q", (sum(p.lengths_q), p.heads, p.dims[0])), p.dtype)
        p.inputs["q"] = self._place_rows(p, p.heads, p.dims[0], p.lengths_q, varlen)
        if p.call == "new keys":
            self._add_rows(p)
        p.options = {name: draw(self) for name, draw in OPTIONS.items()}
        self._add_division(p)
        if p.rotary is not None:  # flash-attn's rule
            fixed = not p.options["causal"] and p.options["window"] == (None, None)
            p.rotary = Rotary(
                p.rotary.cos, p.rotary.sin, p.rotary.dtype, p.rotary.interleaved, fixed
            )
        longest = max(p.lengths)
        bound = rng.choice((longest, rng.randint(longest, p.room)))
        if varlen or self.chance(0.5):
            p.max_seqlen_k = bound
        most_k = p.room if p.max_seqlen_k is None else p.max_seqlen_k
        self._add_tensors(p, (p.batch, p.heads, max(p.lengths_q), most_k))
        if self.chance(0.5):
            p.out = self._place_rows(p, p.heads, p.dims[1], p.lengths_q, varlen)

    def _add_division(self, p: KVCacheProblem) -> None:
        """In which parts the keys are computed, and whether the caller gives memory for that."""
        asked = self.choice((None, None, None, "num_splits", "split_size"))
        p.options |= {"num_splits": None, "split_size": None}
        if asked == "num_splits":
            # A part must not depend on a sequence's length with batch_invariant.
            several = (1,) if p.options["batch_invariant"] else (1, 2, 2, 3, 7, 16, 1000)
            p.options[asked] = self.choice(several)
        elif asked == "split_size":
            p.options[asked] = self.choice((128, 128, 256, 1024, 1 << 20))
        if self.chance(0.25):
            p.workspace = self.choice(("uint8", "float32", "int64"))

    def _add_tensors(self, p: KVCacheProblem, full: tuple[int, int, int, int]) -> None:
        """Mask, slopes and sinks; bias where the call takes one."""
        numbers, tensors = self._numbers, p.tensors
        if p.call == "varlen" and self._some(0.5):
            sizes = self._broadcastable(full)
            bias = numbers.standard_normal(sizes, dtype=np.float32)
            if self.chance(0.3):
                bias[numbers.random(sizes) < 0.3] = -np.inf
            tensors["bias"] = _repeated(round_to(bias, p.dtype), self._place_scores(sizes))
        if self._some():
            sizes = self._broadcastable(full)
            mask = numbers.random(sizes) < self.choice((0.2, 0.7, 0.97))
            tensors["mask"] = _repeated(mask, self._place_scores(sizes))
        if self._some():
            sizes = full[1:2] if self.chance(0.5) else full[:2]
            slopes = numbers.random(sizes, dtype=np.float32)
            slopes *= np.float32(self.choice((1.0, 1.0, 1.0, 30.0, -1.0)))
            tensors["alibi_slopes"] = slopes, Placed.of(sizes, contiguous(sizes))
        if self._some():
            sinks = numbers.standard_normal(full[1], dtype=np.float32) * 3
            if self.chance(0.2):
                sinks[0] = -np.inf
            tensors["sinks"] = sinks, Placed.of((full[1],), (1,))

    def _tell_wrong(self, p: KVCacheProblem) -> None:
        """Values beyond what there can be count as the nearest one in range."""
        most = p.room if p.max_seqlen_k is None else p.max_seqlen_k
        p.told_lengths = tuple(self._beyond(n, most) for n in p.lengths)
        if p.leftpads is not None:
            p.told_leftpads = tuple(
                self._beyond(pad, n) for pad, n in zip(p.leftpads, p.lengths, strict=True)
            )
        if p.csr is None and (p.page_size or p.chosen):
            last = p.numbers[0].shape[0] - 1
            p.told_entries = p.told_entries.copy()
            for b, n in enumerate(p.lengths):
                of_keys: Any = np.s_[b : b + 1]
                if p.page_size:
                    of_keys = np.s_[b, : -(-n // p.page_size)]
                told = [self._beyond(int(x), last) for x in p.entries[of_keys]]
                p.stray |= told != p.entries[of_keys].tolist()
                p.told_entries[of_keys] = told

    def _beyond(self, x: int, most: int) -> int:
        """The number, or one that is held to it as the least, 0, or the most."""
        if x == most:
            return self.choice((x, most + 1, MOST))
        return self.choice((x, -1, LEAST)) if x == 0 else x


def _repeated(values: np.ndarray, place: Placed) -> tuple[np.ndarray, Placed]:
    """Values that agree where the place gives them the same memory."""
    first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in place.strides)
    return np.broadcast_to(values[first], values.shape), place


def draw_kvcache(seed: int, dtypes: Sequence[str], limits: Limits) -> KVCacheProblem:
    """The problem of a seed."""
    return KVCacheDraw(seed, dtypes, limits).problem()
