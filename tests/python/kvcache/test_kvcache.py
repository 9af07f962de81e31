"""Attention over keys in a cache, against the float64 reference. The cache is NaN wherever no key
that is in use lies, and page tables are padded with -1."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, NumPy, max_error, normal
from kvcaches import FEATURES, PAGES, Cache, Problem, draft_tree, lengths_about
from wrong_calls import Wrong, check

import dlattn
from dlattn.reference import (
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
)

NUMPY = NumPy().array
DTYPES = ["float16", "bfloat16", "float32"]


def run(problem: Problem, convert: Callable[..., Any] = NUMPY, **options: Any) -> Any:
    """Compute with poisoned memory for out, and check it. Returns (out, lse)."""
    arrays = problem.arrays(convert)
    cache = problem.cache
    shape = (*problem.q.shape[:3], cache.head_dim_v)
    out = convert(np.full(shape, np.nan, np.float32), cache.dtype)
    made = {
        name: convert(value, str(value.dtype)) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    got = dlattn.attention_with_kvcache(**arrays, **made, out=out, return_lse=True)
    assert got[0] is out
    problem.check(*got, **options)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", PAGES)
def test_pages(page_size, layout, dtype):
    capacity = PAGES[page_size]
    cache = Cache(lengths_about(page_size, capacity), page_size, dtype=dtype, layout=layout)
    run(Problem(cache), causal=True)
    run(Problem(dataclasses.replace(cache, one_row=True, head_dim=40, head_dim_v=24, seqlen_q=3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("chosen", [False, True], ids=["all entries", "chosen entries"])
def test_entries(chosen, layout, dtype):
    cache = Cache((0, 1, 70, 33), capacity=100, chosen=chosen, dtype=dtype, layout=layout)
    run(Problem(cache), causal=True)
    run(Problem(dataclasses.replace(cache, one_row=True, head_dim_v=40, seqlen_q=3)), causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 3, 8])
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_queries_and_heads(page_size, seqlen_q, heads):
    """Causality is by a sequence's own length, even if it has fewer keys than queries."""
    cache = Cache((0, 5, 16, 45), page_size, seqlen_q, *heads, capacity=60)
    run(Problem(cache), causal=True)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("leftpad", [False, True], ids=["", "leftpad"])
def test_features(leftpad, page_size, feature):
    lengths = (0, 9, 50, 33)
    cache = Cache(lengths, page_size, seqlen_q=3, capacity=64)
    if leftpad:
        cache = dataclasses.replace(cache, leftpads=(0, 4, 17, 33))
    sinks = normal(4, seed=8)
    slopes = normal(4, 4, seed=9) ** 2
    options = {"causal": True, **FEATURES[feature]}
    run(Problem(cache), **options)
    run(Problem(cache), **options, sinks=sinks, alibi_slopes=slopes)


@pytest.mark.parametrize("page_size", [0, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_trees(dtype, page_size):
    problem = Problem(Cache((8, 21, 50), page_size, seqlen_q=8, capacity=64, dtype=dtype))
    run(problem, mask=draft_tree(problem), max_seqlen_k=64)
    of_all = normal(1, 4, 8, 64, seed=3) > 0.0
    run(problem, mask=of_all, causal=True, max_seqlen_k=64)
    run(problem, mask=of_all[0, 0, :, :1])  # whole rows


@pytest.mark.parametrize("entry", [-1, 2**31 - 1])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_before_a_window_need_not_be_there(page_size, entry):
    for seqlen_q, left in ((1, 20), (3, 7), (8, 0), (40, 33)):
        problem = Problem(Cache((0, 9, 50, 210), page_size, seqlen_q, capacity=224))
        problem.evict(left, entry)
        assert (problem.told_table[3] == entry).sum() > 210 // page_size // 3
        run(problem, causal=True, window=(left, None))
        run(problem, causal=True, window=(left, None), softcap=2.0)
    problem.evict(left - 3 * page_size, entry)
    with pytest.raises(dlattn.UnsupportedError, match=f"is {entry}; accepted: 0 to"):
        run(problem, causal=True, window=(left, None))


def test_one_sequence_of_many_keys():
    """Keys of few queries are split."""
    cache = Cache((5000,), 16, num_heads=2, num_heads_kv=1, capacity=8000)
    arrays = Problem(cache).arrays(NUMPY)
    q, k, v = (arrays.pop(name) for name in ("q", "k_cache", "v_cache"))
    assert dlattn.plan(q, k, v, **arrays).num_splits > 1
    run(Problem(cache))


def test_a_bound_below_the_room_that_there_is():
    for page_size in (0, 16):
        problem = Problem(Cache((40, 7), page_size, capacity=200))
        run(problem, max_seqlen_k=40)
        mask = normal(2, 1, 1, 40, seed=4) > 0
        run(problem, max_seqlen_k=40, mask=mask)


def test_no_sequences_and_no_keys():
    cache = np.full((3, 4, 2, 8), np.nan, np.float32)
    q, used = np.ones((2, 1, 4, 8), np.float32), np.zeros(2, np.int32)
    for table in (np.full((2, 5), -1, np.int32), np.zeros((2, 0), np.int32)):
        out, lse = dlattn.attention_with_kvcache(
            q, cache, cache, seqused_k=used, page_table=table, return_lse=True
        )
        assert (out == 0).all() and np.isneginf(lse).all()
    sinks = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    out, lse = dlattn.attention_with_kvcache(
        q, cache[:2], cache[:2], seqused_k=used, sinks=sinks, return_lse=True
    )
    assert (out == 0).all()
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], (2, 4, 1)))
    out = dlattn.attention_with_kvcache(
        q[:0], cache, cache, seqused_k=used[:0], page_table=table[:0]
    )
    assert out.shape == (0, 1, 4, 8)


def test_bits_are_those_of_the_same_keys_side_by_side():
    """Where the keys lie changes nothing."""
    for dtype in DTYPES:
        cache = Cache((50,), 16, seqlen_q=5, dtype=dtype)
        problem = Problem(cache)
        arrays = problem.arrays(NUMPY)
        got = run(problem, causal=True)
        rows = [problem.row(0, j) for j in range(50)]
        k, v = (
            np.stack([arrays[name][at] for at in rows])[None] for name in ("k_cache", "v_cache")
        )
        same = dlattn.attention(arrays["q"], k, v, causal=True, return_lse=True)
        for x, y in zip(got, same, strict=True):
            np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework(name):
    framework = FRAMEWORKS[name]()
    for cache in (
        Cache((9, 0, 40), 16, capacity=64, leftpads=(2, 0, 11)),
        Cache((9, 0, 40), capacity=64, chosen=True),
    ):
        problem = Problem(cache)
        out, lse = dlattn.attention_with_kvcache(
            **problem.arrays(framework.array), causal=True, return_lse=True
        )
        assert framework.is_array(out) and framework.is_array(lse)
        problem.check(out, lse, causal=True)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_varlen_queries(layout, page_size):
    """Chunks of prompts beside single tokens."""
    lengths_q, lengths = (1, 0, 20, 1, 7), (30, 5, 45, 1, 7)
    problem = Problem(Cache(lengths, page_size, layout=layout, capacity=64))
    arrays = problem.arrays(NUMPY)
    q = normal(sum(lengths_q), 4, 64, seed=6)
    if layout == "bhsd":
        q = np.ascontiguousarray(q.swapaxes(0, 1))
    starts = np.cumsum([0, *lengths_q]).astype(np.int32)
    bias = normal(5, 4, 20, 48, seed=7)
    given = {name: arrays[name] for name in ("seqused_k", "page_table", "layout")}
    for options in ({}, {"bias": bias}, {"mask": bias > 0, "window": (11, None)}):
        positional = (q, arrays["k_cache"], arrays["v_cache"], starts, None, 20, 48)
        got = dlattn.attention_varlen(*positional, **given, causal=True, return_lse=True, **options)
        expected = attention_varlen_reference(*positional, **given, causal=True, **options)
        assert dlattn.supported(*positional, **given, causal=True, **options)
        for x, y in zip(got, expected, strict=True):
            assert np.isneginf(x).tolist() == np.isneginf(y).tolist()
            assert max_error(x, y) < 1e-5


def test_the_references_agree():
    """That of a cache with that of plain attention, which the caller gathers for."""
    problem = Problem(Cache((7, 20), 3, seqlen_q=2, leftpads=(0, 5)))
    arrays = problem.arrays(lambda x, dtype: x)
    out, lse = attention_with_kvcache_reference(**arrays, causal=True)
    for b, length in enumerate((7, 20)):
        rows = [problem.row(b, j) for j in range(5 * b, length)]
        k, v = (np.stack([arrays[x][at] for at in rows])[None] for x in ("k_cache", "v_cache"))
        same = attention_reference(problem.q[b : b + 1], k, v, causal=True)
        assert max_error(out[b], same[0][0]) < 1e-12 and max_error(lse[b], same[1][0]) < 1e-12


# Changes that make a call wrong. Sequences of up to 12 keys in pages of 4, of which there are 9.
Q = normal(2, 1, 4, 8)
PAGED = normal(9, 4, 2, 8, seed=1)
TABLE = np.array([[3, 8, -1], [0, 1, 2]], np.int32)
USED = np.array([5, 12], np.int32)
# A page of so many keys, which all share one row.
ENDLESS = np.broadcast_to(np.zeros(8, np.float16), (1, 2**57, 2, 8))
PAGES_OF_4 = {"q": Q, "k_cache": PAGED, "v_cache": PAGED, "seqused_k": USED, "page_table": TABLE}
# Entries of 12 keys.
ENTRIES = normal(2, 12, 2, 8, seed=2)
BY_BATCH = {"q": Q, "k_cache": ENTRIES, "v_cache": ENTRIES, "seqused_k": USED}
FIVE = {**BY_BATCH, "k_cache": normal(5, 12, 2, 8), "v_cache": normal(5, 12, 2, 8)}
CHOSEN = {**FIVE, "cache_batch_idx": np.array([4, 0], np.int32)}


def int32(*values: Any) -> Any:
    return np.array(values, np.int32)


def wrong(message: str, defaults: dict[str, Any] = PAGES_OF_4, **changes: Any) -> Wrong:
    return Wrong(changes, (message,), defaults=defaults)


# The table behind room for most of an out.
MEMORY = np.concatenate([np.zeros(64, np.float32), TABLE.reshape(-1).view(np.float32)])

WRONG = {
    "no lengths": wrong(
        "seqused_k is None; accepted: an int32 tensor of shape (batch,), the keys that each "
        "sequence has",
        seqused_k=None,
    ),
    "lengths of int64": wrong(
        "seqused_k: dtype is int64; accepted: int32", seqused_k=USED.astype(np.int64)
    ),
    "lengths of another batch": wrong(
        "seqused_k: shape is (3,); accepted: (2,), (batch,)", seqused_k=int32(1, 2, 3)
    ),
    "length above the room": wrong(
        "seqused_k[0] is 13; accepted: 0 to 12, the most keys that a sequence can have",
        seqused_k=int32(13, 1),
    ),
    "length below zero": wrong(
        "seqused_k[1] is -1; accepted: 0 to 12, the most keys that a sequence can have",
        BY_BATCH,
        seqused_k=int32(3, -1),
    ),
    "length above the bound": wrong(
        "seqused_k[1] is 12; accepted: 0 to 11, the most keys that a sequence can have",
        max_seqlen_k=11,
    ),
    "bound above the pages": wrong(
        "max_seqlen_k is 13; accepted: up to 12, the keys of page_table's 3 pages of 4",
        max_seqlen_k=13,
    ),
    "bound above the entries": wrong(
        "max_seqlen_k is 13; accepted: up to 12, the seqlen of k_cache", BY_BATCH, max_seqlen_k=13
    ),
    "bound below zero": wrong(
        "max_seqlen_k is -1; accepted: an int from 0 to 2147483647", max_seqlen_k=-1
    ),
    "pages whose keys no number counts": wrong(
        "page_table: a sequence has 96 pages of 144115188075855872 keys; accepted: room for up to "
        "1099511627776 keys",
        q=Q.astype(np.float16),
        k_cache=ENDLESS,
        v_cache=ENDLESS,
        page_table=np.tile(TABLE, (1, 32)),
    ),
    "table of int64": wrong(
        "page_table: dtype is int64; accepted: int32", page_table=TABLE.astype(np.int64)
    ),
    "table of one dimension": wrong(
        "page_table has 1 dimensions, shape (3,); accepted: 2, (batch, max_pages)",
        page_table=TABLE[0],
    ),
    "table of another batch": wrong(
        "page_table: batch is 1, shape (1, 3); accepted: 2, the number of sequences",
        page_table=TABLE[:1],
    ),
    "table with strided rows": wrong(
        "page_table: the stride of the last dimension is 2; accepted: 1",
        page_table=np.zeros((2, 6), np.int32)[:, ::2],
    ),
    "table upside down": wrong(
        "page_table: the stride of dimension batch is -3; negative strides are not accepted",
        page_table=TABLE[::-1],
        seqused_k=int32(12, 5),
    ),
    "page that is none": wrong(
        "page_table[0][1] is -1; accepted: 0 to 8, as the sequence has 5 keys in pages of 4",
        page_table=np.array([[3, -1, -1], [0, 1, 2]], np.int32),
    ),
    "page beyond the last": wrong(
        "page_table[1][2] is 9; accepted: 0 to 8, as the sequence has 12 keys in pages of 4",
        page_table=np.array([[3, 8, 99], [0, 1, 9]], np.int32),
    ),
    "pages of no keys": wrong(
        "page_size is 0; accepted: at least 1", k_cache=PAGED[:, :0], v_cache=PAGED[:, :0]
    ),
    "no pages": wrong("num_pages is 0; accepted: at least 1", k_cache=PAGED[:0], v_cache=PAGED[:0]),
    "pages and entries": wrong(
        "cache_batch_idx is given with page_table; accepted: one of them, as a page table tells "
        "where a sequence's keys are",
        cache_batch_idx=int32(0, 1),
    ),
    "entries of int64": wrong(
        "cache_batch_idx: dtype is int64; accepted: int32", CHOSEN, cache_batch_idx=np.arange(2)
    ),
    "entries of another batch": wrong(
        "cache_batch_idx: shape is (1,); accepted: (2,), (batch,)", CHOSEN, cache_batch_idx=int32(1)
    ),
    "entry beyond the last": wrong(
        "cache_batch_idx[0] is 5; accepted: 0 to 4, the entries of the cache",
        CHOSEN,
        cache_batch_idx=int32(5, 1),
    ),
    "no entries": wrong(
        "cache_batch_size is 0; accepted: at least 1",
        CHOSEN,
        k_cache=ENTRIES[:0],
        v_cache=ENTRIES[:0],
    ),
    "entries that nobody chose": wrong(
        "k_cache: batch is 5, shape (5, 12, 2, 8); accepted: 2, that of q", FIVE
    ),
    "leftpad of int64": wrong(
        "leftpad_k: dtype is int64; accepted: int32", leftpad_k=np.zeros(2, np.int64)
    ),
    "leftpad of another batch": wrong(
        "leftpad_k: shape is (2, 1); accepted: (2,), (batch,)", leftpad_k=np.zeros((2, 1), np.int32)
    ),
    "leftpad beyond the length": wrong(
        "leftpad_k[0] is 6; accepted: 0 to 5, the keys of the sequence", leftpad_k=int32(6, 0)
    ),
    "leftpad below zero": wrong(
        "leftpad_k[1] is -2; accepted: 0 to 12, the keys of the sequence", leftpad_k=int32(0, -2)
    ),
    "v of other pages": wrong(
        "v_cache: num_pages is 8, shape (8, 4, 2, 8); accepted: 9, that of k_cache",
        v_cache=PAGED[:8],
    ),
    "v of another page size": wrong(
        "v_cache: page_size is 3, shape (9, 3, 2, 8); accepted: 4, that of k_cache",
        v_cache=PAGED[:, :3],
    ),
    "v of other entries": wrong(
        "v_cache: batch is 1, shape (1, 12, 2, 8); accepted: 2, that of k_cache",
        BY_BATCH,
        v_cache=ENTRIES[:1],
    ),
    "v of another length": wrong(
        "v_cache: seqlen is 11, shape (2, 11, 2, 8); accepted: 12, that of k_cache",
        BY_BATCH,
        v_cache=ENTRIES[:, :11],
    ),
    "pages of three dimensions": wrong(
        "k_cache has 3 dimensions, shape (4, 2, 8); accepted: 4, (num_pages, page_size, num_heads, "
        "head_dim)",
        k_cache=PAGED[0],
    ),
    "pages of three dimensions, heads first": wrong(
        "v_cache has 3 dimensions, shape (4, 2, 8); accepted: 4, (num_pages, num_heads, page_size, "
        "head_dim)",
        v_cache=PAGED[0],
        layout="bhsd",
    ),
    "entries of three dimensions": wrong(
        "k_cache has 3 dimensions, shape (12, 2, 8); accepted: 4, (batch, seqlen, num_heads, "
        "head_dim)",
        BY_BATCH,
        k_cache=ENTRIES[0],
    ),
    "pages backwards": wrong(
        "k_cache: the stride of dimension batch is -64; negative strides are not accepted",
        k_cache=PAGED[::-1],
    ),
    "another dtype": wrong(
        "k_cache: dtype is float16; accepted: float32, that of q", k_cache=PAGED.astype(np.float16)
    ),
    "a quantised cache": wrong(
        "k_cache is a QuantizedKV; accepted: a tensor, as keys in a cache are not quantised",
        k_cache=lambda: dlattn.quantize_kv(
            ENTRIES.astype(np.float16), ENTRIES.astype(np.float16), precision="fp8"
        ),
        v_cache=None,
    ),
    "a mask of all rows": wrong(
        "mask: shape is (2, 1, 1, 36); accepted: one that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_k) = (2, 4, 1, 12)",
        mask=np.ones((2, 1, 1, 36), bool),
    ),
    "out within the cache": wrong(
        "out shares memory with v_cache",
        CHOSEN,
        out=CHOSEN["v_cache"].reshape(-1)[-64:].reshape(2, 1, 4, 8),
    ),
    "out over the table": wrong(
        "out shares memory with page_table",
        out=MEMORY[5:69].reshape(2, 1, 4, 8),
        page_table=MEMORY[64:].view(np.int32).reshape(2, 3),
    ),
}
TYPES = {
    "no table": Wrong({"page_table": 7}, ("page_table is of type int",), TypeError, PAGES_OF_4),
    "no cache": Wrong({"k_cache": 7}, ("k_cache is of type int",), TypeError, PAGES_OF_4),
    "a bound that is no int": Wrong(
        {"max_seqlen_k": 1.5}, ("max_seqlen_k is of type float",), TypeError, PAGES_OF_4
    ),
}


@pytest.mark.parametrize("name", [*WRONG, *TYPES])
def test_wrong_call(name):
    check({**WRONG, **TYPES}[name], dlattn.attention_with_kvcache)


def test_float8_is_refused():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, cache = (x.astype(ml_dtypes.float8_e4m3fn) for x in (Q, PAGED))
    message = (
        "q: dtype is float8_e4m3fn with keys in a cache (page_table); accepted: float16, bfloat16, "
        "float32, float64"
    )
    check(wrong(message, q=q, k_cache=cache, v_cache=cache), dlattn.attention_with_kvcache)


VARLEN = {
    "q": Q[:, 0],
    "k": PAGED,
    "v": PAGED,
    "cu_seqlens_q": np.arange(3, dtype=np.int32),
    "cu_seqlens_k": None,
    "max_seqlen_q": 1,
    "max_seqlen_k": 12,
    "seqused_k": USED,
    "page_table": TABLE,
}
WRONG_VARLEN = {
    "offsets of keys": wrong(
        "cu_seqlens_k is given with page_table; accepted: None, as seqused_k tells how many keys a "
        "sequence has",
        VARLEN,
        cu_seqlens_k=np.arange(3, dtype=np.int32),
    ),
    "neither": wrong(
        "cu_seqlens_k is None; accepted: an int32 tensor, or None with page_table",
        VARLEN,
        page_table=None,
    ),
    "no lengths": wrong(
        "seqused_k is None; accepted: an int32 tensor of shape (batch,)", VARLEN, seqused_k=None
    ),
    "bound above the pages": wrong(
        "max_seqlen_k is 13; accepted: up to 12, the keys of page_table's 3 pages of 4",
        VARLEN,
        max_seqlen_k=13,
    ),
    "keys of three dimensions": wrong(
        "k has 3 dimensions, shape (4, 2, 8); accepted: 4, (num_pages, page_size, num_heads, "
        "head_dim)",
        VARLEN,
        k=PAGED[0],
    ),
    "a precision": wrong(
        "precision is fp8 with keys in a cache (page_table); accepted: inputs",
        {**VARLEN, **{name: VARLEN[name].astype(np.float16) for name in "qkv"}},
        precision="fp8",
    ),
}


@pytest.mark.parametrize("name", WRONG_VARLEN)
def test_wrong_varlen_call(name):
    check(WRONG_VARLEN[name], dlattn.attention_varlen)
    call = WRONG_VARLEN[name]
    support = dlattn.supported(**{**call.defaults, **call.changes})
    assert not support.ok and call.words[0] in support.reasons[0]


def test_right_calls_are_right():
    """The wrong ones differ from these by what is wrong."""
    for given in (PAGES_OF_4, BY_BATCH, CHOSEN):
        dlattn.attention_with_kvcache(**given)
        asked = {name.removesuffix("_cache"): value for name, value in given.items()}
        assert dlattn.supported(**asked) and dlattn.plan(**asked).kernel == "cpu"
    dlattn.attention_varlen(**VARLEN)


def csr(framework: Any, dtype: str = "int32") -> Any:
    lists = ([0, 2, 2, 5, 6], [7, 1, 4, 0, 2, 9], [3, 16, 16, 1])
    return [framework.array(np.array(x), dtype) for x in lists]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_page_table_from_csr(name):
    framework = FRAMEWORKS[name]()
    expected = np.array([[7, 1, -1], [-1, -1, -1], [4, 0, 2], [9, -1, -1]])
    for dtype in ("int32", "int64") if name != "jax" else ("int32",):
        for max_pages in (None, 3, 5):
            lists = csr(framework, dtype)
            table, used = dlattn.page_table_from_csr(*lists, page_size=16, max_pages=max_pages)
            assert framework.is_array(table) and framework.is_array(used)
            assert framework.dtype(table) == framework.dtype(used) == "int32"
            wide = np.pad(expected, ((0, 0), (0, (max_pages or 3) - 3)), constant_values=-1)
            np.testing.assert_array_equal(np.asarray(table), wide)
            np.testing.assert_array_equal(np.asarray(used), [19, 0, 48, 1])
    none = framework.array(np.zeros(1), "int32")
    table, used = dlattn.page_table_from_csr(none, none[:0], none[:0], page_size=16)
    assert tuple(table.shape) == (0, 0) and tuple(used.shape) == (0,)
    table, used = dlattn.page_table_from_csr(
        framework.array(np.zeros(3), "int32"), none[:0], csr(framework)[2][:2], page_size=16
    )
    assert tuple(table.shape) == (2, 0) and np.asarray(used).tolist() == [0, 0]


def test_csr_is_what_attention_takes():
    pages = normal(10, 16, 2, 64, seed=1)
    q = normal(4, 1, 4, 64)
    indptr, indices, last = csr(NumPy())
    table, used = dlattn.page_table_from_csr(indptr, indices, last, page_size=16)
    out = dlattn.attention_with_kvcache(q, pages, pages, seqused_k=used, page_table=table)
    own = pages[indices[2:5]].reshape(1, 48, 2, 64)
    np.testing.assert_array_equal(out[2:3], dlattn.attention(q[2:3], own, own))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"indptr": 3}, TypeError, "indptr is of type int"),
        ({"indptr": np.zeros(5)}, ValueError, "indptr: dtype is float64; accepted: int32, int64"),
        (
            {"indices": np.zeros((2, 3), np.int32)},
            ValueError,
            r"indices: shape is \(2, 3\); accepted: one dimension",
        ),
        (
            {"last_page_len": np.ones(3, np.int32)},
            ValueError,
            r"last_page_len: shape is \(3,\); accepted: \(4,\), one fewer than indptr",
        ),
        (
            {"indptr": np.zeros(0, np.int32)},
            ValueError,
            r"indptr is empty; accepted: shape \(batch \+ 1,\)",
        ),
        ({"page_size": 0}, ValueError, "page_size is 0; accepted: 1 to 2147483647"),
        ({"page_size": 2**40}, ValueError, "page_size is 1099511627776; accepted: 1 to 2147483647"),
        ({"page_size": 16.0}, TypeError, "page_size is of type float; accepted: an int"),
        ({"page_size": True}, TypeError, "page_size is of type bool; accepted: an int"),
        ({"max_pages": -1}, ValueError, "max_pages is -1; accepted: 0 to 2147483647"),
        ({"max_pages": 2**40}, ValueError, "max_pages is 1099511627776; accepted: 0 to 2147483647"),
        ({"max_pages": 2}, ValueError, "max_pages is 2; accepted: at least 3, the pages of sequen"),
    ],
)
def test_wrong_csr(changes, error, message):
    indptr, indices, last = csr(NumPy())
    given = {"indptr": indptr, "indices": indices, "last_page_len": last, "page_size": 16}
    with pytest.raises(error, match=message):
        dlattn.page_table_from_csr(**{**given, **changes})


@pytest.mark.parametrize("max_pages", [None, 3])
@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(
    ("changed", "values", "message"),
    [
        ("indptr", [0, 2, 2, 5, 7], r"indptr\[4\] is 7; accepted: 0 to 6, the number of indices"),
        ("indptr", [-1, 2, 2, 5, 6], r"indptr\[0\] is -1; accepted: 0 to 6"),
        (
            "indptr",
            [0, 2, 1, 5, 6],
            r"indptr\[2\] is 1, less than indptr\[1\], 2; accepted: n",
        ),
        ("last_page_len", [3, 16, 16, 0], r"last_page_len\[3\] is 0; accepted: 1 to 16, page_size"),
        ("last_page_len", [3, 16, -4, 1], r"last_page_len\[2\] is -4; accepted: 1 to 16"),
        ("last_page_len", [17, 16, 16, 1], r"last_page_len\[0\] is 17; accepted: 1 to 16"),
    ],
)
def test_csr_of_wrong_values(name, max_pages, changed, values, message):
    framework = FRAMEWORKS[name]()
    given = dict(zip(("indptr", "indices", "last_page_len"), csr(framework), strict=True))
    given[changed] = framework.array(np.array(values), "int32")
    with pytest.raises(dlattn.UnsupportedError, match=message):
        dlattn.page_table_from_csr(**given, page_size=16, max_pages=max_pages)


def test_csr_beyond_int32():
    indptr, indices, last = csr(NumPy(), "int64")
    for page in (2**31, -(2**31) - 1, 2**40):
        wrong = np.where(indices == 2, page, indices)
        with pytest.raises(ValueError, match=rf"indices\[4\] is {page}; accepted: an int32 number"):
            dlattn.page_table_from_csr(indptr, wrong, last, page_size=16, max_pages=3)
        room = np.append(indices, page)  # an engine's, of which nothing is used yet
        dlattn.page_table_from_csr(indptr, room, last, page_size=16)
    message = "indptr: sequence 2 has 3 pages, 2147483664 keys; accepted: at most 2147483647 keys"
    for dtype in ("int32", "int64"):
        with pytest.raises(ValueError, match=message):
            dlattn.page_table_from_csr(*csr(NumPy(), dtype), page_size=2**30)
    used = dlattn.page_table_from_csr(*csr(NumPy()), page_size=2**30 - 9)[1]
    assert used[2] == 2 * (2**30 - 9) + 16


def test_csr_of_two_libraries():
    torch = pytest.importorskip("torch")
    for i, name in enumerate(("indptr", "indices", "last_page_len")):
        lists = csr(NumPy())
        lists[i] = torch.from_numpy(lists[i])
        wrong = ("torch.Tensor", "numpy.ndarray")
        wrong = ("indices", *wrong[::-1]) if i == 0 else (name, *wrong)
        message = "{} is of type {}, and indptr of type {}; accepted: three arrays of one library"
        with pytest.raises(TypeError, match=message.format(*wrong)):
            dlattn.page_table_from_csr(*lists, page_size=16)
    lists = [torch.from_numpy(x) for x in csr(NumPy())]
    lists[1] = lists[1].to("meta")
    with pytest.raises(ValueError, match="indices is on meta, and indptr on cpu; accepted: one d"):
        dlattn.page_table_from_csr(*lists, page_size=16)


def test_csr_while_it_is_traced():
    """The host has no values then, and reads none if max_pages is given."""
    expected = dlattn.page_table_from_csr(*csr(NumPy()), page_size=16)
    jax = pytest.importorskip("jax")
    table = jax.jit(lambda *x: dlattn.page_table_from_csr(*x, page_size=16, max_pages=3))
    for got, same in zip(table(*csr(FRAMEWORKS["jax"]())), expected, strict=True):
        np.testing.assert_array_equal(got, same)
