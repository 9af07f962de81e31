"""Caches that on a GPU `scalar` alone reads: float32, rows not aligned to 16 bytes, bias."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from arrays import normal
from kvcaches import PAGES, Cache, Problem, lengths_about
from test_gpu_kvcache import convert, poisoned, run

import dlattn
from dlattn.reference import attention_reference, error_bound, kvcache_problems, max_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("scalar" not in dlattn.info().kernels, reason="no kernel scalar here"),
]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", PAGES)
def test_float32(page_size: int, layout: str) -> None:
    capacity = PAGES[page_size]
    cache = Cache(lengths_about(page_size, capacity), page_size, layout=layout)
    run(Problem(cache), causal=True)
    run(Problem(dataclasses.replace(cache, one_row=True, head_dim_v=33, seqlen_q=3)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(1, 7), (33, 33), (34, 66), (36, 100), (129, 256)])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_any_alignment(page_size: int, dims: tuple[int, int], dtype: str) -> None:
    cache = Cache(
        (0, 1, 70, 33), page_size, 3, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype,
        chosen=not page_size, leftpads=(0, 0, 40, 33),
    )  # fmt: skip
    run(Problem(cache), causal=True)
    run(Problem(cache), "scalar", window=(5, 2))


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_8_bits_of_any_alignment(dtype: str, cache_dtype: str) -> None:
    for dim, page_size in ((64, 16), (33, 16), (20, 0)):
        cache = Cache(
            (0, 1, 70, 33), page_size, 3, head_dim=dim, head_dim_v=dim + 3, dtype=dtype,
            cache_dtype=cache_dtype,
        )  # fmt: skip
        run(Problem(cache), "scalar", causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_bias(page_size: int, dtype: str) -> None:
    problem = Problem(Cache((8, 21, 50), page_size, seqlen_q=8, capacity=64, dtype=dtype))
    arrays = problem.arrays(convert)
    bias = convert(normal(3, 4, 8, 64, seed=3), "float32")
    out = poisoned(problem)
    starts = convert(np.arange(4, dtype=np.int32) * 8, "int32")
    got = dlattn.attention_varlen(
        arrays["q"].flatten(0, 1), arrays["k_cache"], arrays["v_cache"], starts, None, 8, 64,
        seqused_k=arrays["seqused_k"], page_table=arrays["page_table"], bias=bias, causal=True,
        out=out.flatten(0, 1), return_lse=True,
    )  # fmt: skip
    lse = got[1].reshape(4, 3, 8).transpose(0, 1)
    given = problem.arrays(lambda x, dtype: x)
    for b, (q, k, v, own) in enumerate(kvcache_problems(**given, causal=True)):
        own["bias"] = bias[b : b + 1, :, :, : k.shape[1]].cpu().numpy()
        expected = attention_reference(q, k, v, **own)
        bound = error_bound(q, k, v, dtype=dtype, expected=expected, **own)
        assert max_error(out[b : b + 1].cpu(), expected[0]) <= bound.out
        assert max_error(lse[b : b + 1].cpu(), expected[1]) <= bound.lse


@pytest.mark.parametrize("page_size", [0, 16])
def test_many_keys(page_size: int) -> None:
    cache = Cache((9000, 1, 0, 700), page_size, 2, 8, 2, 128, 128, capacity=10_000)
    run(Problem(cache), causal=True)
