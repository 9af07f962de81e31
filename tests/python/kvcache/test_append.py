"""`append_kv` on the CPU, against NumPy: where rows go, rotation, 8 bits, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn import append_kv

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
POISON = 0x5B  # a number in every dtype


def poisoned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = POISON
    return array


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rows (n, heads, head_dim) by tables (n, rotary_dim / 2), each step in x's own precision."""
    half = cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x0, x1 = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = x0 * cos[:, None] - x1 * sin[:, None]
    out[..., second] = x1 * cos[:, None] + x0 * sin[:, None]
    return out


def in_8_bits(x: np.ndarray, scale: np.ndarray, dtype: Any) -> np.ndarray:
    """(n, heads, head_dim) in float32 by scales (n, heads)."""
    quotient = x / scale[..., None]
    if dtype == np.int8:
        whole = np.clip(np.rint(np.where(np.isnan(quotient), 0.0, quotient)), -128, 127)
        return whole.astype(np.int8)
    return np.clip(quotient, -448, 448).astype(dtype)


@dataclass
class Problem:
    """New rows, and a cache for them. `lengths`: new rows of each sequence."""

    lengths: tuple[int, ...] = (3, 3)
    seqused: tuple[int, ...] = (2, 5)
    dtype: str = "float16"
    cache_dtype: str | None = None
    heads: int = 6
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 24
    rotary_dim: int = 0
    table_dtype: str = "float32"
    interleaved: bool = False
    fixed_q: bool = False
    leftpad: tuple[int, ...] = ()
    where: str = "rows"  # "rows", "entries", "pages", "slots"
    page_size: int = 3
    capacity: int = 12
    varlen: bool = False
    with_q: bool = False
    layout: str = "bshd"
    scale_shape: str = "batch"
    seed: int = 0
    skipped: tuple[int, ...] = ()  # rows whose slot is -1
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        batch, total = len(self.lengths), sum(self.lengths)
        self.sequence = np.repeat(np.arange(batch), self.lengths)
        self.index = np.concatenate([np.arange(n) for n in self.lengths])
        self.position = np.array(self.seqused)[self.sequence] + self.index
        dtype = DTYPES[self.dtype]

        def draw(heads: int, columns: int) -> np.ndarray:
            return random.normal(0.5, 2.0, (total, heads, columns)).astype(dtype)

        self.k, self.v = draw(self.heads_kv, self.head_dim), draw(self.heads_kv, self.head_dim_v)
        self.q = draw(self.heads, self.head_dim)
        angle = random.uniform(0, 6.3, (self.capacity + 2, self.rotary_dim // 2))
        table = DTYPES[self.table_dtype]
        self.cos, self.sin = np.cos(angle).astype(table), np.sin(angle).astype(table)
        self.scales = random.uniform(0.02, 0.05, (2, batch, self.heads_kv)).astype(np.float32)
        self.place(random, batch)

    def place(self, random: np.random.Generator, batch: int) -> None:
        """Where each row goes: (entry or page, row)."""
        self.entries = np.arange(batch)
        self.entry, self.row = self.sequence, self.position
        self.sizes = (batch, self.capacity)
        if self.where == "entries":
            self.entries = random.permutation(batch + 2)[:batch]
            self.entry, self.sizes = self.entries[self.sequence], (batch + 2, self.capacity)
        if self.where in ("pages", "slots"):
            per_sequence = -(-self.capacity // self.page_size)
            pages = batch * per_sequence + 3
            self.table = random.permutation(pages)[: batch * per_sequence]
            self.table = self.table.reshape(batch, per_sequence)
            self.entry = self.table[self.sequence, self.position // self.page_size]
            self.row, self.sizes = self.position % self.page_size, (pages, self.page_size)

    def shaped(self, x: np.ndarray) -> np.ndarray:
        """Rows as the call takes them."""
        if not self.varlen:
            x = x.reshape(len(self.lengths), self.lengths[0], *x.shape[1:])
        return x if self.layout == "bshd" else np.ascontiguousarray(np.moveaxis(x, -2, -3))

    def cache(self, columns: int) -> np.ndarray:
        entries, rows = self.sizes
        heads_first = self.layout == "bhsd"
        shape = (self.heads_kv, rows) if heads_first else (rows, self.heads_kv)
        return poisoned((entries, *shape, columns), DTYPES[self.cache_dtype or self.dtype])

    def arguments(self) -> dict[str, Any]:
        """All but k, v and the caches."""
        given: dict[str, Any] = {"layout": self.layout}
        if self.where != "slots" or self.rotary_dim:
            given["seqused_k"] = np.array(self.seqused, np.int32)
        if self.where == "entries":
            given["cache_batch_idx"] = self.entries.astype(np.int32)
        if self.where == "pages":
            table = self.table.astype(np.int32)
            # Behind the last new key there may be anything.
            ends = np.array(self.seqused) + np.array(self.lengths)
            table[np.arange(table.shape[1]) >= -(-ends[:, None] // self.page_size)] = -7
            given["page_table"] = table
        if self.where == "slots":
            slots = self.entry * self.page_size + self.row
            slots[list(self.skipped)] = -1
            given["slots"] = slots if self.varlen else slots.reshape(len(self.lengths), -1)
        if self.varlen:
            given["cu_seqlens_q"] = np.cumsum([0, *self.lengths]).astype(np.int32)
        if self.leftpad:
            given["leftpad_k"] = np.array(self.leftpad, np.int32)
        if self.rotary_dim:
            given |= {"rotary_cos": self.cos, "rotary_sin": self.sin}
            given["rotary_interleaved"] = self.interleaved
            given["q_fixed_position"] = self.fixed_q
        if self.with_q:
            given["q"] = self.shaped(self.q)
        if self.cache_dtype:
            for name, scale in zip(("k_descale", "v_descale"), self.scales, strict=True):
                given[name] = {
                    "batch": scale,
                    "heads": scale[0],
                    "one": scale[0, :1].reshape(()),
                }[self.scale_shape]
        return given | self.extra

    @property
    def real(self) -> Any:
        return np.float64 if self.dtype == "float64" else np.float32

    def rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """In the precision that is computed in."""
        x = x.astype(self.real)
        if not self.rotary_dim:
            return x
        if self.leftpad:
            positions = np.maximum(positions - np.array(self.leftpad)[self.sequence], 0)
        tables = [table.astype(self.real)[positions] for table in (self.cos, self.sin)]
        return rotated(x, *tables, self.interleaved)

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The caches afterwards, in this problem's layout, and q as rows."""
        caches = []
        stored = DTYPES[self.cache_dtype or self.dtype]
        new = (self.rotated(self.k, self.position), self.v.astype(self.real))
        for x, scale in zip(new, self.scales, strict=True):
            by_row = scale[self.sequence]
            if self.scale_shape == "heads":
                by_row = np.broadcast_to(scale[0], by_row.shape)
            if self.scale_shape == "one":
                by_row = np.broadcast_to(scale[0, 0], by_row.shape)
            rows = in_8_bits(x, by_row, stored) if self.cache_dtype else x.astype(stored)
            cache = self.cache(x.shape[-1])
            as_rows = np.moveaxis(cache, 1, 2) if self.layout == "bhsd" else cache
            kept = np.setdiff1d(np.arange(len(self.sequence)), self.skipped)
            as_rows[self.entry[kept], self.row[kept]] = rows[kept]
            caches.append(cache)
        positions = np.array(self.seqused)[self.sequence] if self.fixed_q else self.position
        return caches[0], caches[1], self.rotated(self.q, positions).astype(self.q.dtype)

    def check(self) -> None:
        k_cache, v_cache = self.cache(self.head_dim), self.cache(self.head_dim_v)
        given = self.arguments()
        out = append_kv(self.shaped(self.k), self.shaped(self.v), k_cache, v_cache, **given)
        k_expected, v_expected, q_expected = self.expected()
        assert not np.array_equal(bits(k_cache), bits(self.cache(self.head_dim)))
        np.testing.assert_array_equal(bits(k_cache), bits(k_expected))
        np.testing.assert_array_equal(bits(v_cache), bits(v_expected))
        if self.with_q:
            np.testing.assert_array_equal(bits(out), bits(self.shaped(q_expected)))
        else:
            assert out is None


NAMES = ("where", "page_size", "capacity")
PLACES = [
    ("rows", 3, 12),
    ("entries", 3, 12),
    ("pages", 1, 12),
    ("pages", 3, 11),
    ("pages", 16, 32),
    ("slots", 1, 12),
    ("slots", 3, 11),
    ("slots", 16, 32),
]
every_place = pytest.mark.parametrize(NAMES, PLACES)
every_layout = pytest.mark.parametrize("layout", ["bshd", "bhsd"])


@every_place
@every_layout
@pytest.mark.parametrize("varlen", [False, True])
def test_places(where: str, page_size: int, capacity: int, layout: str, varlen: bool) -> None:
    place = {"where": where, "page_size": page_size, "capacity": capacity, "layout": layout}
    lengths, seqused = ((4, 0, 1, 3), (7, 2, 0, 4)) if varlen else ((3, 3), (2, 8))
    Problem(lengths, seqused, varlen=varlen, **place).check()


@every_place
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rotary(where: str, page_size: int, capacity: int, dtype: str) -> None:
    place = {"where": where, "page_size": page_size, "capacity": capacity}
    for seed, interleaved in enumerate([False, True]):
        for rotary_dim, table in ((16, "float32"), (8, dtype)):
            Problem(
                dtype=dtype,
                rotary_dim=rotary_dim,
                table_dtype=table,
                interleaved=interleaved,
                with_q=True,
                seed=seed,
                **place,
            ).check()


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("fixed_q", [False, True])
@every_layout
def test_rotated_queries(varlen: bool, fixed_q: bool, layout: str) -> None:
    lengths, seqused = ((5, 0, 2), (0, 3, 4)) if varlen else ((4, 4), (0, 7))
    Problem(
        lengths,
        seqused,
        varlen=varlen,
        fixed_q=fixed_q,
        layout=layout,
        rotary_dim=12,
        with_q=True,
    ).check()


@pytest.mark.parametrize("leftpad", [(0, 1), (2, 6), (9, 0)])
def test_leftpad(leftpad: tuple[int, int]) -> None:
    """Padding, which may reach into the new rows, moves the rotary positions alone."""
    problem = Problem(leftpad=leftpad, rotary_dim=16, with_q=True)
    problem.check()
    k, v = problem.shaped(problem.k), problem.shaped(problem.v)
    plain = {n: x for n, x in problem.arguments().items() if n != "leftpad_k"}
    cached = problem.cache(16), problem.cache(24)
    append_kv(k, v, *cached, **plain)
    assert not np.array_equal(bits(cached[0]), bits(problem.expected()[0]))


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rotary_dim", [0, 8])
def test_8_bit_caches(cache_dtype: str, dtype: str, rotary_dim: int) -> None:
    for scale_shape in ("one", "heads", "batch"):
        for where in ("rows", "pages", "slots"):
            Problem(
                dtype=dtype,
                cache_dtype=cache_dtype,
                rotary_dim=rotary_dim,
                scale_shape=scale_shape,
                where=where,
                seed=rotary_dim,
            ).check()


def test_special_values() -> None:
    """Saturation, ties to the even number, NaN, and the bits of what is only copied."""
    numbers = [0.5, 1.5, 2.5, -0.5, -2.5, 126.5, 127.5, -128.5, 1e4, -1e4, np.inf, -np.inf, np.nan]
    numbers += [0.0, -0.0, 3e-3]
    x = np.array(numbers, np.float32).reshape(1, 1, 1, 16)
    one, used = np.ones((), np.float32), np.zeros(1, np.int32)
    stored = {}
    for dtype in ("int8", "float8_e4m3fn"):
        caches = [poisoned((1, 1, 1, 16), DTYPES[dtype]) for _ in "kv"]
        append_kv(x, x, *caches, seqused_k=used, k_descale=one, v_descale=one)
        np.testing.assert_array_equal(bits(caches[0]), bits(caches[1]))
        stored[dtype] = caches[0].reshape(-1)
    expected = [0, 2, 2, 0, -2, 126, 127, -128, 127, -128, 127, -128, 0, 0, 0, 0]
    assert stored["int8"].tolist() == expected
    e4m3 = stored["float8_e4m3fn"].astype(np.float32)
    expected = [0.5, 1.5, 2.5, -0.5, -2.5, 128, 128, -128, 448, -448, 448, -448]
    assert e4m3[:12].tolist() == expected
    assert np.isnan(e4m3[12])
    assert e4m3[13:15].tolist() == [0, 0] and np.signbit(e4m3[14])
    assert e4m3[15] == 2**-9 * 2  # 3e-3 is 1.54 of the least number

    signalling = np.full((1, 1, 1, 16), 0x7D01, np.uint16).view(np.float16)
    caches = [poisoned((1, 1, 1, 16), np.float16) for _ in "kv"]
    append_kv(signalling, signalling, *caches, seqused_k=used)
    assert (bits(caches[0]) == 0x7D01).all() and (bits(caches[1]) == 0x7D01).all()


def test_e4m3_rounds_as_ml_dtypes() -> None:
    """Every number of fp16 that e4m3 can hold."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)][: 1 << 15].reshape(1, 1, -1, 128).astype(np.float32)
    heads = x.shape[2]
    caches = [poisoned(x.shape, ml_dtypes.float8_e4m3fn) for _ in "kv"]
    scale = np.ones((), np.float32)
    append_kv(x, x, *caches, seqused_k=np.zeros(1, np.int32), k_descale=scale, v_descale=scale)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert heads > 200
    np.testing.assert_array_equal(bits(caches[0]), bits(expected))


def test_skipped_slots() -> None:
    """-1 leaves the cache as it is; queries are rotated still."""
    Problem(where="slots", skipped=(0, 4)).check()
    Problem(where="slots", skipped=(1,), rotary_dim=16, with_q=True).check()
    Problem(lengths=(2, 4), varlen=True, where="slots", skipped=(5,)).check()


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_slots_of_a_list_of_tokens(width: Any) -> None:
    """As vLLM calls it: (tokens, heads, head_dim), without offsets."""
    problem = Problem(lengths=(2, 4), varlen=True, where="slots")
    given = problem.arguments()
    del given["cu_seqlens_q"]
    given["slots"] = given["slots"].astype(width)
    caches = problem.cache(16), problem.cache(24)
    append_kv(problem.k, problem.v, *caches, **given)
    for got, expected in zip(caches, problem.expected(), strict=False):
        np.testing.assert_array_equal(bits(got), bits(expected))


def test_rows_of_no_sequence_are_skipped() -> None:
    problem = Problem(lengths=(1, 3, 2), seqused=(0, 4, 2), varlen=True)
    problem.check()
    offsets = np.array([1, 4, 4], np.int32)  # of sequences 1 and none
    caches = [cache[1:] for cache in (problem.cache(16), problem.cache(24))]
    used = np.array([4, 2], np.int32)
    append_kv(problem.k, problem.v, *caches, seqused_k=used, cu_seqlens_q=offsets)
    expected = [cache[1:].copy() for cache in problem.expected()[:2]]
    for got, whole, columns in zip(caches, expected, (16, 24), strict=True):
        whole[1] = problem.cache(columns)[0]
        np.testing.assert_array_equal(bits(got), bits(whole))


def test_strided_tensors() -> None:
    """K and V of a token side by side in one cache; k, v and q slices of one tensor."""
    problem = Problem(head_dim_v=16, rotary_dim=16, with_q=True, where="pages")
    pages, rows = problem.sizes
    both = poisoned((rows, pages, 2, 2, 20), np.float16)
    k_cache, v_cache = (np.moveaxis(both[..., i, :16], 0, 1) for i in (0, 1))
    before = both.copy()
    qkv = np.concatenate([problem.q, problem.k, problem.v], 1).reshape(2, 3, 10, 16)
    given = problem.arguments() | {"q": qkv[:, :, :6]}
    out = append_kv(qkv[:, :, 6:8], qkv[:, :, 8:], k_cache, v_cache, **given)
    k_expected, v_expected, q_expected = problem.expected()
    np.testing.assert_array_equal(bits(k_cache), bits(k_expected))
    np.testing.assert_array_equal(bits(v_cache), bits(v_expected))
    np.testing.assert_array_equal(bits(out), bits(problem.shaped(q_expected)))
    np.testing.assert_array_equal(bits(both[..., 16:]), bits(before[..., 16:]))


def test_nothing_to_write() -> None:
    problem = Problem(lengths=(0, 0), rotary_dim=16, with_q=True)
    caches = problem.cache(16), problem.cache(24)
    out = append_kv(
        problem.shaped(problem.k), problem.shaped(problem.v), *caches, **problem.arguments()
    )
    assert out.shape == (2, 0, 6, 16)
    np.testing.assert_array_equal(bits(caches[0]), bits(problem.cache(16)))


def test_many_rows() -> None:
    """Over the threads of the pool."""
    lengths = tuple(range(0, 90, 3))
    Problem(
        lengths,
        tuple(range(len(lengths))),
        varlen=True,
        where="pages",
        page_size=16,
        capacity=128,
        head_dim=64,
        head_dim_v=64,
        rotary_dim=64,
        with_q=True,
    ).check()


def test_attention_sees_what_was_appended() -> None:
    """Token by token it is what attention makes of all keys, rotated beforehand."""
    random = np.random.default_rng(3)
    q, k, v = (random.normal(0.3, 1, (1, 6, h, 32)).astype(np.float32) for h in (4, 2, 2))
    angle = random.uniform(0, 6.3, (6, 16)).astype(np.float32)
    tables = np.cos(angle), np.sin(angle)
    caches = [poisoned((1, 6, 2, 32), np.float32) for _ in "kv"]
    steps = []
    for i in range(6):
        used = np.array([i], np.int32)
        at = slice(i, i + 1)
        q_rotated = append_kv(
            k[:, at],
            v[:, at],
            *caches,
            seqused_k=used,
            q=q[:, at],
            rotary_cos=tables[0],
            rotary_sin=tables[1],
        )
        keys, values = (cache[:, : i + 1] for cache in caches)
        steps.append(dlattn.attention(q_rotated, keys, values, causal=True))
    at_once = [rotated(x[0], *tables, False)[None] for x in (q, k)]
    whole = dlattn.attention(*at_once, v, causal=True)
    np.testing.assert_allclose(np.concatenate(steps, 1), whole, rtol=1e-4, atol=1e-5)
