"""Caches of latents, as MLA has them: 576 columns of K, of which V is the first 512, as the same
memory. NaN lies wherever no key that is in use does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS
from kvcaches import Cache, Problem

import dlattn

LENGTHS = (0, 1, 64, 65, 130)


def latents(heads: int = 16, **more: Any) -> Problem:
    sizes: dict[str, Any] = {
        "lengths": LENGTHS, "page_size": 64, "num_heads": heads, "num_heads_kv": 1,
        "head_dim": 576, "head_dim_v": 512, "latent": True,
    }  # fmt: skip
    return Problem(Cache(**{**sizes, **more}))


def run(problem: Problem, framework: str = "numpy", **options: Any) -> Any:
    convert = FRAMEWORKS[framework]().array
    arrays = problem.arrays(convert)
    shape = (*problem.q.shape[:3], problem.cache.head_dim_v)
    out = convert(np.full(shape, np.nan, np.float32), problem.cache.dtype)
    got = dlattn.attention_with_kvcache(**arrays, **options, out=out, return_lse=True)
    assert got[0] is out
    problem.check(*got, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_latents(seqlen_q: int, dtype: str) -> None:
    run(latents(seqlen_q=seqlen_q, dtype=dtype), causal=True)


@pytest.mark.parametrize(("framework", "heads"), [("numpy", 128), ("torch", 8)])
def test_heads_pages_and_frameworks(framework: str, heads: int) -> None:
    lengths = (0, 65, 16)
    run(latents(heads, lengths=lengths, page_size=16, dtype="float16"), framework, causal=True)


def test_entries_splits_and_features() -> None:
    run(latents(page_size=0, chosen=True, dtype="bfloat16", leftpads=(0, 1, 9, 0, 70)))
    run(latents(4, layout="bhsd"), causal=True, num_splits=3)
    run(latents(4), causal=True, window=(20, None), softcap=3.0, batch_invariant=True)


def test_v_of_its_own_memory() -> None:
    run(latents(4, latent=False, head_dim=512, num_heads_kv=2, dtype="float16"), causal=True)
    run(latents(4, latent=False, head_dim=320, head_dim_v=264), causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_latents_of_8_bits(cache_dtype: str, dtype: str) -> None:
    """The same elements are keys by one factor and values by another."""
    pytest.importorskip("ml_dtypes")
    run(latents(seqlen_q=2, dtype=dtype, cache_dtype=cache_dtype), causal=True)
    entries = {"page_size": 0, "chosen": True, "leftpads": (0, 1, 9, 0, 70)}
    run(latents(4, dtype=dtype, cache_dtype=cache_dtype, **entries))
    own = {"latent": False, "head_dim": 512, "num_heads_kv": 2, "page_size": 16}
    run(latents(4, dtype=dtype, cache_dtype=cache_dtype, **own), causal=True)
