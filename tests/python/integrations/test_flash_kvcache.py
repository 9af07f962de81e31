"""dlattn.flash_attn over keys in a cache: flash-attn's own signature, and vLLM's call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, NumPy, normal
from kvcaches import Cache, Problem, rotated

import dlattn
from dlattn import UnsupportedError, flash_attn

NUMPY = NumPy().array
NEW = normal(4, 3, 2, 64)
TABLE = np.ones((80, 16), np.float32)
LENGTHS = (9, 0, 40, 33)
PAGED = Cache(LENGTHS, 16, seqlen_q=3, capacity=60)
BY_BATCH = Cache(LENGTHS, seqlen_q=3, capacity=60)
CHOSEN = Cache(LENGTHS, seqlen_q=3, capacity=60, chosen=True, leftpads=(3, 0, 0, 33))


def positional(problem: Problem, convert: Any = NUMPY) -> tuple[Any, ...]:
    """The arguments of flash_attn_with_kvcache up to block_table, in flash-attn's order."""
    given = problem.arrays(convert)
    names = ("seqused_k", "cache_batch_idx", "leftpad_k", "page_table")
    own = (given.get(name) for name in names)
    return given["q"], given["k_cache"], given["v_cache"], None, None, None, None, *own


@pytest.mark.parametrize("cache", [PAGED, BY_BATCH, CHOSEN], ids=["pages", "entries", "chosen"])
def test_results(cache):
    problem = Problem(cache)
    slopes = normal(4, seed=9) ** 2
    call = (*positional(problem), 0.2, True, (11, -1), 1.5, True, slopes)
    out, lse = flash_attn.flash_attn_with_kvcache(*call, 0, True)
    assert np.isposinf(lse[1]).all()
    options = {"softmax_scale": 0.2, "causal": True, "window": (11, None), "softcap": 1.5}
    lse = np.asarray(lse)
    problem.check(out, np.where(np.isposinf(lse), -np.inf, lse), **options, alibi_slopes=slopes)
    np.testing.assert_array_equal(flash_attn.flash_attn_with_kvcache(*call), out)


def test_sinks_are_named_s_aux():
    problem, sinks = Problem(PAGED), np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    out = flash_attn.flash_attn_with_kvcache(*positional(problem), s_aux=sinks)
    want = dlattn.attention_with_kvcache(**problem.arrays(NUMPY), sinks=sinks)
    np.testing.assert_array_equal(out, want)
    assert not np.array_equal(out, flash_attn.flash_attn_with_kvcache(*positional(problem)))


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("count", [None, 60, 17, np.int64(17)])
def test_one_length_for_all(count, name):
    framework = FRAMEWORKS[name]()
    k, v = (framework.array(normal(2, 60, 2, 64, seed=i)) for i in (1, 2))
    q = framework.array(normal(2, 1, 4, 64))
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=count)
    used = 60 if count is None else int(count)
    same = dlattn.attention(q, k[:, :used], v[:, :used])
    np.testing.assert_allclose(np.asarray(out), np.asarray(same), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
@pytest.mark.parametrize("mode", ["causal", "window", "full"])
@pytest.mark.parametrize("cache", [PAGED, BY_BATCH, CHOSEN], ids=["pages", "entries", "chosen"])
def test_new_keys_are_appended(cache, mode, rotary, name):
    """Lengths count from before; what is no new key's stays as it is."""
    framework = FRAMEWORKS[name]()
    new, counts = 3, np.array([4, 0, 33, 30], np.int32)  # of the 9, 0, 40 and 33 that there are
    if cache.leftpads:
        cache = dataclasses.replace(cache, leftpads=(3, 0, 0, 30))
    lengths = tuple(int(n) + new for n in counts)
    problem = Problem(dataclasses.replace(cache, lengths=lengths))
    k, v = problem.take_out(counts, new)
    caches = [framework.array(x) for x in problem.buffers]
    positions = counts[:, None] + np.arange(new)
    options: dict[str, Any] = {"causal": mode == "causal"}
    call: dict[str, Any] = dict(options)
    if mode == "window":
        options["window"], call["window_size"] = (11, 0), (11, 0)
    own_q, own_k = problem.q, k
    if rotary:
        angles = normal(80, 16, seed=3)
        cos, sin = np.cos(angles), np.sin(angles)
        call |= {"rotary_cos": framework.array(cos), "rotary_sin": framework.array(sin)}
        call["rotary_interleaved"] = rotary == "interleaved"
        of_q = positions if mode != "full" else positions[:, :1].repeat(new, 1)
        own_q = rotated(own_q, cos, sin, of_q, rotary == "interleaved")
        own_k = rotated(k, cos, sin, positions, rotary == "interleaved")
    for field, argument in (
        ("page_table", "block_table"),
        ("cache_batch_idx", "cache_batch_idx"),
        ("leftpad_k", "cache_leftpad"),
    ):
        if getattr(problem, field) is not None:
            call[argument] = framework.array(getattr(problem, field))
    out, lse = flash_attn.flash_attn_with_kvcache(
        framework.array(problem.q), *caches, framework.array(k), framework.array(v),
        cache_seqlens=framework.array(counts), return_softmax_lse=True, **call,
    )  # fmt: skip
    problem.put_back(counts, own_k, v)
    for x, buffer in zip(caches, problem.buffers, strict=True):
        np.testing.assert_allclose(np.asarray(x), buffer, rtol=1e-5, atol=1e-6)
    problem.q = own_q
    lse = np.asarray(lse)
    problem.check(out, np.where(np.isposinf(lse), -np.inf, lse), **options)


def test_one_length_for_all_that_append():
    q, k, v = (normal(2, 2, heads, 64, seed=heads) for heads in (4, 2, 2))
    k_cache, v_cache = (normal(2, 30, 2, 64, seed=i) for i in (5, 6))
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=28)
    np.testing.assert_array_equal(k_cache[:, 28:], k)
    np.testing.assert_array_equal(v_cache[:, 28:], v)
    np.testing.assert_allclose(out, dlattn.attention(q, k_cache, v_cache), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"softcap": math.nan},
        {"alibi_slopes": np.ones(4)},
        {"cache_seqlens": np.array([1, 2, 3, 62], np.int32)},
        {"rotary_cos": TABLE},
        {"k": normal(4, 3, 2, 32)},
        {"s_aux": np.ones(3, np.float32)},
        {"window_size": 3},
        # rotated q of other rows than k's
        {"rotary_sin": TABLE, "rotary_cos": TABLE, "k": NEW[:, :2], "v": NEW[:, :2]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_refused_call_writes_nothing(wrong):
    problem = Problem(BY_BATCH)
    numbers = problem.arrays(NUMPY)
    caches = [numbers["k_cache"], numbers["v_cache"]]
    before = [x.copy() for x in caches]
    given = {"k": NEW, "v": NEW, "cache_seqlens": np.array([1, 2, 3, 4], np.int32), **wrong}
    with pytest.raises((UnsupportedError, TypeError), match="s_aux" if "s_aux" in wrong else None):
        flash_attn.flash_attn_with_kvcache(numbers["q"], *caches, **given)
    for x, y in zip(caches, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_caches_of_8_bits():
    """With the factors by which new keys are written, too."""
    q, k, v = (normal(2, 2, heads, 64, seed=heads).astype(np.float16) for heads in (4, 2, 2))
    k_cache, v_cache = np.zeros((2, 2, 30, 2, 64), np.int8)
    k_cache[:, :20], v_cache[:, :20] = np.rint(20 * normal(2, 2, 20, 2, 64)).clip(-128, 127)
    factors = {name: np.full((2, 2), 1 / 20, np.float32) for name in ("k_descale", "v_descale")}
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=20, **factors)
    own = {name: x[:, :22] for name, x in (("k_cache", k_cache), ("v_cache", v_cache))}
    again = flash_attn.flash_attn_with_kvcache(q, **own, **factors)
    np.testing.assert_array_equal(again, out)
    exact = (x[:, :22] * np.float16(1 / 20) for x in (k_cache, v_cache))
    np.testing.assert_allclose(out, dlattn.attention(q, *exact), rtol=2e-2, atol=2e-2)


def test_no_lengths_are_all_pages():
    k, v = (normal(5, 16, 2, 64, seed=i) for i in (1, 2))
    q, table = normal(2, 1, 4, 64), np.array([[4, 0], [1, 3]], np.int32)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, block_table=table)
    for b in range(2):
        own = (x[table[b]].reshape(1, 32, 2, 64) for x in (k, v))
        np.testing.assert_array_equal(out[b : b + 1], dlattn.attention(q[b : b + 1], *own))


def test_one_split_is_batch_invariance():
    problem = Problem(Cache((3000,), 16, num_heads=2, num_heads_kv=1))
    given = problem.arrays(NUMPY)
    want = dlattn.attention_with_kvcache(**given, batch_invariant=True)
    other = dlattn.attention_with_kvcache(**given)
    assert not np.array_equal(want, other)
    for splits, bits in ((0, other), (1, want), (7, other)):
        got = flash_attn.flash_attn_with_kvcache(*positional(problem), num_splits=splits)
        np.testing.assert_array_equal(got, bits)


def varlen_problem() -> tuple[Problem, dict[str, Any], Any]:
    """vLLM's call of flash_attn_varlen_func, and the result it should have."""
    problem = Problem(Cache((30, 5, 45), 16, capacity=64))
    given = problem.arrays(NUMPY)
    starts = np.array([0, 1, 6, 26], np.int32)
    q = normal(26, 4, 64, seed=6)
    common = {"causal": True, "softmax_scale": 0.2, "softcap": 2.0}
    call = {
        "q": q,
        "k": given["k_cache"],
        "v": given["v_cache"],
        "cu_seqlens_q": starts,
        "max_seqlen_q": 20,
        "seqused_k": given["seqused_k"],
        "max_seqlen_k": 4096,
        "window_size": [11, -1],
        "alibi_slopes": None,
        "block_table": given["page_table"],
        "scheduler_metadata": None,
        "fa_version": 2,
        "q_descale": None,
        "k_descale": np.ones((3, 2), np.float32),
        "v_descale": np.ones((3, 2), np.float32),
        "num_splits": 0,
        "s_aux": normal(4, seed=8),
        **common,
    }
    want = dlattn.attention_varlen(
        q, call["k"], call["v"], starts, None, 20, 64,
        seqused_k=call["seqused_k"], page_table=call["block_table"], window=(11, None),
        sinks=call["s_aux"], return_lse=True, **common,
    )  # fmt: skip
    return problem, call, want


def test_the_call_of_vllm():
    _, call, (want, lse) = varlen_problem()
    out = np.full_like(want, np.nan)
    assert flash_attn.flash_attn_varlen_func(**call, out=out) is out
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    again, softmax_lse = flash_attn.flash_attn_varlen_func(**call, return_softmax_lse=True)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_allclose(softmax_lse, lse, rtol=1e-5, atol=1e-5)
    triple = flash_attn.flash_attn_varlen_func(**call, return_attn_probs=True)
    np.testing.assert_array_equal(triple[0], out)
    assert len(triple) == 3


def test_pages_of_8_bits_count_by_their_factors():
    _, call, _ = varlen_problem()
    rounded = {
        name: np.rint(np.nan_to_num(call[name] * 20)).clip(-128, 127).astype(np.int8)
        for name in "kv"
    }
    factor = np.full((3, 2), 1 / 20, np.float32)
    call |= {"q": call["q"].astype(np.float16), "k_descale": factor, "v_descale": factor}
    found = flash_attn.flash_attn_varlen_func(**{**call, **rounded, "q_descale": factor})
    exact = {name: (rounded[name] * np.float32(1 / 20)).astype(np.float16) for name in "kv"}
    want = flash_attn.flash_attn_varlen_func(**{**call, **exact})
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=2e-2)


def test_lengths_of_pages_by_cu_seqlens_k():
    """As flash-attn itself has them; seqused_k goes before."""
    _, call, _ = varlen_problem()
    want = flash_attn.flash_attn_varlen_func(**call)
    starts = np.array([0, 30, 35, 80], np.int32)
    again = flash_attn.flash_attn_varlen_func(**{**call, "seqused_k": None, "cu_seqlens_k": starts})
    np.testing.assert_array_equal(again, want)
    both = flash_attn.flash_attn_varlen_func(**call, cu_seqlens_k=np.zeros(4, np.int32))
    np.testing.assert_array_equal(both, want)


def test_seqused_k_without_pages():
    q, k, v = (normal(20, heads, 64, seed=i) for i, heads in enumerate((4, 2, 2)))
    starts, used = np.array([0, 8, 20], np.int32), np.array([5, 12], np.int32)
    call = (q, k, v, starts, starts, 12, 12)
    out = flash_attn.flash_attn_varlen_func(*call, causal=True, seqused_k=used)
    want = dlattn.attention_varlen(*call, causal=True, seqused_k=used)
    np.testing.assert_array_equal(out, want)
    assert not np.array_equal(out, flash_attn.flash_attn_varlen_func(*call, causal=True))


def of_cache(cache: Cache = PAGED, **changes: Any) -> Any:
    names = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")
    names = (*names, "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
    given = dict(zip(names, positional(Problem(cache)), strict=True))
    return flash_attn.flash_attn_with_kvcache(**{**given, **changes})


def of_pages(**changes: Any) -> Any:
    return flash_attn.flash_attn_varlen_func(**{**varlen_problem()[1], **changes})


class Exporter:
    """A tensor of a library that dlattn does not know."""

    shape = (4, 3, 4, 64)

    def __dlpack__(self, **_: Any) -> Any:
        return normal(*self.shape).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


WRONG = {
    "v alone": (
        lambda: of_cache(v=NEW),
        UnsupportedError,
        "v is given and k is None; accepted: both, or neither",
    ),
    "cosines alone": (
        lambda: of_cache(rotary_cos=NEW),
        UnsupportedError,
        "rotary_cos is given and k is None; accepted: both, or neither",
    ),
    "sines alone": (
        lambda: of_cache(rotary_sin=NEW),
        UnsupportedError,
        "rotary_sin is given and k is None; accepted: both, or neither",
    ),
    "q of no dimensions": (
        lambda: of_cache(BY_BATCH, q=np.float32([1.0]).reshape(()), cache_seqlens=3),
        UnsupportedError,
        "q has 0 dimensions",
    ),
    "k of two dimensions": (
        lambda: of_cache(BY_BATCH, k=NEW[0, 0], v=NEW, cache_seqlens=3),
        UnsupportedError,
        "k has 2 dimensions",
    ),
    "k alone": (lambda: of_cache(BY_BATCH, k=NEW), TypeError, "v is of type NoneType"),
    "k without lengths": (
        lambda: of_cache(k=NEW, v=NEW, cache_seqlens=None),
        UnsupportedError,
        "cache_seqlens is None and k is given; accepted: an int32 tensor of shape (batch,), or an "
        "int, as k is written behind the keys that it counts",
    ),
    "k behind the last row": (
        lambda: of_cache(k=NEW, v=NEW, cache_seqlens=62),
        UnsupportedError,
        "cache_seqlens is 62; accepted: 0 to 61, the keys that there is room for",
    ),
    "k of another batch": (
        lambda: of_cache(BY_BATCH, k=NEW[:2], v=NEW[:2], cache_seqlens=0),
        UnsupportedError,
        "k: batch is 2, shape (2, 3, 2, 64); accepted: 4, that of q",
    ),
    "k with lengths that are none": (
        lambda: of_cache(k=NEW, v=NEW, cache_seqlens="3"),
        TypeError,
        "cache_seqlens is of type str",
    ),
    "a length above the room": (
        lambda: of_cache(cache_seqlens=65),
        UnsupportedError,
        "cache_seqlens is 65; accepted: 0 to 64, the keys that there is room for, or an int32 "
        "tensor of shape (batch,)",
    ),
    "a length below zero": (
        lambda: of_cache(cache_seqlens=-1),
        UnsupportedError,
        "cache_seqlens is -1; accepted: 0 to 64",
    ),
    "a length of q's library, which none is": (
        lambda: of_cache(q=memoryview(b"x"), cache_seqlens=3),
        TypeError,
        "q is of type memoryview",
    ),
    "one length with q of no library": (
        lambda: of_cache(q=Exporter(), cache_seqlens=3),
        TypeError,
        f"cache_seqlens is 3 with q of type {Exporter.__module__}.Exporter; "
        "accepted: an int32 tensor of shape (batch,)",
    ),
    "lengths": (
        lambda: of_cache(cache_seqlens=np.array([1, 0, 3, 65], np.int32)),
        UnsupportedError,
        "cache_seqlens[3] is 65; accepted: 0 to 64, the most keys that a sequence can have",
    ),
    "lengths that are a bool": (
        lambda: of_cache(cache_seqlens=True),
        TypeError,
        "cache_seqlens is of type bool",
    ),
    "leftpad": (
        lambda: of_cache(cache_leftpad=np.array([0, 0, 0, 34], np.int32)),
        UnsupportedError,
        "cache_leftpad[3] is 34; accepted: 0 to 33, the keys of the sequence",
    ),
    "pages and entries": (
        lambda: of_cache(cache_batch_idx=np.zeros(4, np.int32)),
        UnsupportedError,
        "cache_batch_idx is given with block_table; accepted: one of them",
    ),
    "table": (
        lambda: of_cache(block_table=np.zeros((4, 3), np.int64)),
        UnsupportedError,
        "block_table: dtype is int64; accepted: int32",
    ),
    "table of one dimension": (
        lambda: of_cache(block_table=np.zeros(4, np.int32)),
        UnsupportedError,
        "block_table has 1 dimensions, shape (4,); accepted: 2, (batch, max_pages)",
    ),
    "cache of three dimensions": (
        lambda: of_cache(k_cache=NEW[0]),
        UnsupportedError,
        "k_cache has 3 dimensions, shape (3, 2, 64); accepted: 4, (num_pages, page_size",
    ),
    "cache no tensor": (lambda: of_cache(k_cache=3), TypeError, "k_cache is of type int"),
    "table no tensor": (lambda: of_cache(block_table=3), TypeError, "block_table is of type int"),
    "splits": (
        lambda: of_cache(num_splits=1.0),
        TypeError,
        "num_splits is of type float; accepted: an int",
    ),
    "return_softmax_lse": (
        lambda: of_cache(return_softmax_lse=1),
        TypeError,
        "return_softmax_lse is of type int; accepted: a bool",
    ),
    "window": (
        lambda: of_cache(window_size=(1.0, 0)),
        TypeError,
        "window_size is (1.0, 0); accepted: a pair (left, right) of int",
    ),
    "softcap": (lambda: of_cache(softcap=math.nan), UnsupportedError, "softcap is nan"),
    "varlen: no lengths": (
        lambda: of_pages(seqused_k=None),
        UnsupportedError,
        "seqused_k is None; accepted: an int32 tensor of shape (batch,)",
    ),
    "varlen: table": (
        lambda: of_pages(block_table=np.zeros((3, 4), np.int64)),
        UnsupportedError,
        "block_table: dtype is int64; accepted: int32",
    ),
    "varlen: offsets of bool": (
        lambda: of_pages(seqused_k=None, cu_seqlens_k=np.zeros(4, bool)),
        UnsupportedError,
        "cu_seqlens_k: dtype is bool, shape (4,); accepted: int32, (batch + 1,)",
    ),
    "varlen: offsets of int64": (
        lambda: of_pages(seqused_k=None, cu_seqlens_k=np.zeros(4, np.int64)),
        UnsupportedError,
        "cu_seqlens_k: dtype is int64, shape (4,); accepted: int32, (batch + 1,)",
    ),
    "varlen: neither offsets nor table": (
        lambda: of_pages(block_table=None, k_descale=None, v_descale=None),
        UnsupportedError,
        "cu_seqlens_k is None; accepted: an int32 tensor, or None with block_table",
    ),
    "varlen: no longest sequence": (
        lambda: of_pages(max_seqlen_k=None),
        TypeError,
        "max_seqlen_k is of type NoneType; accepted: an int",
    ),
    "varlen: splits": (
        lambda: of_pages(num_splits=None),
        TypeError,
        "num_splits is of type NoneType; accepted: an int",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, error, message = WRONG[name]
    with pytest.raises((UnsupportedError, TypeError)) as raised:
        call()
    assert type(raised.value) is error
    assert message in str(raised.value)
