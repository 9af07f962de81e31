"""Attention over 8-bit caches, against the float64 reference of what their elements stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, NumPy, max_error, normal
from kvcaches import FEATURES, Cache, Problem, draft_tree, lengths_about
from test_kvcache import run
from wrong_calls import Wrong, check

import dlattn
from dlattn.reference import attention_varlen_reference

NUMPY = NumPy().array
CACHE_DTYPES = ["int8", "float8_e4m3fn"]
DTYPES = ["float16", "bfloat16"]

pytest.importorskip("ml_dtypes")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [0, 1, 16, 48])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_pages_and_entries(cache_dtype, page_size, layout, dtype):
    lengths = lengths_about(page_size or 30, 70)
    cache = Cache(lengths, page_size, dtype=dtype, layout=layout, cache_dtype=cache_dtype)
    run(Problem(cache), causal=True)
    run(Problem(dataclasses.replace(cache, one_row=True, head_dim=48, head_dim_v=32, seqlen_q=3)))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_features(cache_dtype, feature):
    cache = Cache((0, 1, 33, 70), 16, seqlen_q=3, dtype="float16", cache_dtype=cache_dtype)
    run(Problem(cache), **{"causal": True, **FEATURES[feature]})


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_masks_slopes_and_sinks(cache_dtype):
    cache = Cache((5, 33, 70), 10, seqlen_q=3, dtype="bfloat16", cache_dtype=cache_dtype)
    problem = Problem(cache)
    run(problem, mask=draft_tree(problem))
    slopes, sinks = np.array([0.1, 0.2, 0.4, 0.8], np.float32), np.ones(4, np.float32)
    run(problem, causal=True, alibi_slopes=slopes, sinks=sinks)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_leftpad_and_chosen_entries(cache_dtype):
    cache = Cache((20, 33, 70), leftpads=(0, 7, 70), chosen=True, dtype="float16", capacity=90)
    run(Problem(dataclasses.replace(cache, cache_dtype=cache_dtype)), causal=True)


SCALES = [(), (1,), (2,), (1, 1), (1, 2), (3, 1), (3, 2)]


@pytest.mark.parametrize("shape", SCALES, ids=str)
def test_append_kv_takes_the_scales_that_attention_takes(shape):
    given = np.random.default_rng(5).uniform(0.02, 0.05, shape).astype(np.float32)
    k, v = normal(3, 2, 2, 64), normal(3, 2, 2, 64, seed=1)
    lengths = np.array([0, 4, 6], np.int32)
    caches = [[np.full((3, 8, 2, 64), 7, np.int8) for _ in "kv"] for _ in range(3)]
    for own, scale in zip(caches, (given, np.broadcast_to(given, (3, 2)).copy()), strict=False):
        dlattn.append_kv(
            k, v, *own, seqused_k=lengths, k_descale=scale, v_descale=np.array(2 * scale)
        )
    q = normal(3, 2, 4, 64, seed=2).astype(np.float16)
    new = {"k": k.astype(np.float16), "v": v.astype(np.float16)}
    dlattn.attention_with_kvcache(
        q, *caches[2], seqused_k=lengths, k_descale=given, v_descale=np.array(2 * given), **new
    )
    for x, y, z in zip(*caches, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.abs(x.astype(int) - z).max() <= 1 and np.any(x != 7)


@pytest.mark.parametrize("shape", SCALES, ids=str)
def test_shapes_of_scales(shape):
    problem = Problem(Cache((5, 33, 70), 16, dtype="float16", cache_dtype="int8"))
    given = (np.random.default_rng(4).random(shape) * 0.05).astype(np.float32)
    scales = {"k_descale": np.array(given), "v_descale": np.array(given * 2)}
    problem.k_descale, problem.v_descale = scales.values()
    got = dlattn.attention_with_kvcache(**{**problem.arrays(NUMPY), **scales}, return_lse=True)
    problem.check(*got)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_what_append_kv_wrote_is_attended_to(cache_dtype):
    """The elements and what they count, end to end."""
    lengths, dtype = np.array([7, 0, 20], np.int32), "float16"
    k, v = normal(3, 1, 2, 64, seed=1, dtype=dtype), normal(3, 1, 2, 64, seed=2, dtype=dtype)
    caches = [np.zeros((3, 24, 2, 64), NUMPY([0], cache_dtype).dtype) for _ in "kv"]
    scales = {name: np.full((2,), 0.03, np.float32) for name in ("k_descale", "v_descale")}
    dlattn.append_kv(k, v, *caches, seqused_k=lengths, **scales)
    q = normal(3, 1, 4, 64, seed=3, dtype=dtype)
    # All but the new key are before leftpad_k: out is its value.
    out = dlattn.attention_with_kvcache(
        q, *caches, seqused_k=lengths + 1, leftpad_k=lengths, **scales
    )
    step = 0.03 if cache_dtype == "int8" else 0.07 * np.abs(np.float32(v)).max()
    assert max_error(out, np.repeat(v, 2, axis=2)) <= step


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_new_keys_of_the_call_are_rounded_by_the_same_factors(cache_dtype):
    lengths, dtype = np.array([7, 0, 20], np.int32), "float16"
    k, v = normal(3, 2, 2, 64, seed=1, dtype=dtype), normal(3, 2, 2, 64, seed=2, dtype=dtype)
    scales = {
        "k_descale": np.full((3, 2), 0.03, np.float32),
        "v_descale": np.array([0.02, 0.05], np.float32),
    }
    q = normal(3, 2, 4, 64, seed=3, dtype=dtype)
    empty = np.zeros((3, 24, 2, 64), NUMPY([0], cache_dtype).dtype)
    apart, at_once = [empty.copy(), empty.copy()], [empty.copy(), empty.copy()]
    dlattn.append_kv(k, v, *apart, seqused_k=lengths, **scales)
    expected = dlattn.attention_with_kvcache(
        q, *apart, seqused_k=lengths + 2, causal=True, **scales
    )
    out = dlattn.attention_with_kvcache(
        q, *at_once, seqused_k=lengths, k=k, v=v, causal=True, **scales
    )
    for one, other in zip(apart, at_once, strict=True):
        assert one.any() and np.array_equal(one.view(np.uint8), other.view(np.uint8))
    assert out.any() and np.array_equal(out, expected)


def test_rows_that_see_nothing_do_not_count_the_scale():
    problem = Problem(Cache((0, 0), dtype="float16", cache_dtype="int8", capacity=4))
    arrays = problem.arrays(NUMPY)
    arrays["v_descale"] = np.full((2, 2), np.nan, np.float32)
    out, lse = dlattn.attention_with_kvcache(**arrays, return_lse=True)
    assert not np.any(out) and np.all(lse == -np.inf)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_varlen(cache_dtype):
    problem = Problem(Cache((5, 33, 70), 16, dtype="float16", cache_dtype=cache_dtype))
    arrays = problem.arrays(NUMPY)
    arrays.pop("layout"), arrays.pop("q")
    arrays["k"], arrays["v"] = arrays.pop("k_cache"), arrays.pop("v_cache")
    q = normal(9, 4, 64, dtype="float16")
    varlen: dict[str, Any] = {
        "cu_seqlens_q": np.array([0, 2, 3, 9], np.int32),
        "cu_seqlens_k": None,
        "max_seqlen_q": 6,
        "max_seqlen_k": 70,
        **arrays,
    }
    out, lse = dlattn.attention_varlen(q, **varlen, causal=True, return_lse=True)
    expected = attention_varlen_reference(q, **varlen, causal=True)
    assert max_error(out, expected[0]) <= 2e-3
    assert max_error(lse, expected[1]) <= 1e-5


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_torch(cache_dtype):
    framework = FRAMEWORKS["torch"]()
    cache = Cache((5, 33, 70), 16, dtype="bfloat16", cache_dtype=cache_dtype)
    run(Problem(cache), framework.array, causal=True)


def arguments_of_a_cache() -> dict[str, Any]:
    return Problem(Cache((3, 5), 4, dtype="float16", cache_dtype="int8")).arrays(NUMPY)


F32, HALVES = np.float32, np.zeros((6, 4, 2, 64), np.float16)
ALLOWED = "accepted: a float32 tensor, the factor of the cache's elements"
WRONG = [
    Wrong({"k_descale": None}, ("k_descale is None with keys of int8", ALLOWED)),
    Wrong({"v_descale": None}, ("v_descale is None with keys of int8", ALLOWED)),
    Wrong(
        {"k_descale": np.ones(3, F32)},
        ("k_descale: shape is (3,)", "one that broadcasts to (batch, num_heads_kv) = (2, 2)"),
    ),
    Wrong({"v_descale": np.ones(2)}, ("v_descale: dtype is float64; accepted: float32",)),
    Wrong({"k_descale": 0.5}, ("k_descale is of type float",), TypeError),
    Wrong({"v_cache": HALVES}, ("v_cache: dtype is float16; accepted: int8, that of k_cache",)),
    Wrong({"k_cache": HALVES}, ("v_cache: dtype is int8; accepted: float16, that of q",)),
    Wrong(
        {"k_cache": HALVES, "v_cache": HALVES},
        ("k_descale is given with q of float16; accepted: none, as descales are for 8-bit",),
    ),
    Wrong(
        {"q": np.zeros((2, 1, 4, 64), F32)},
        ("q: dtype is float32 with k_cache of int8; accepted: float16, bfloat16",),
    ),
    Wrong(
        {"k_cache": np.zeros((6, 4, 2, 64), np.uint8)},
        ("k_cache: dtype is uint8", "or int8 or float8_e4m3fn with k_descale and v_descale"),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ", ".join(wrong.changes))
def test_wrong_calls(wrong):
    check(
        dataclasses.replace(wrong, defaults=arguments_of_a_cache()), dlattn.attention_with_kvcache
    )


def test_8_bit_keys_beside_16_bit_queries_lie_in_a_cache():
    q, k = np.zeros((1, 4, 2, 64), np.float16), np.zeros((1, 4, 2, 64), np.int8)
    check(
        Wrong({}, ("k: dtype is int8; accepted: float16, that of q",), defaults={}),
        lambda: dlattn.attention(q, k, k),
    )
