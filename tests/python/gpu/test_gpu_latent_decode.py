"""Caches with head dims of 257 to 576 on a GPU, against float64: latents, of which V is the first
columns, and V of its own memory. NaN lies wherever no key that is in use does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import normal
from gpu_checks import DEVICE, HALF, HOPPER, captured, torch
from kvcaches import Cache, Problem

import dlattn

pytestmark = pytest.mark.gpu

KERNELS = ["auto", "decode:rows16", "decode:rows32"]
# Those for latents alone, in pages of multiples of 8 keys, without what modifies scores.
PLAIN = [*KERNELS, *(["sm90_latent", "sm90_latent:rows64"] if HOPPER else [])]
LENGTHS = (0, 1, 15, 63, 64, 65, 130, 300)

hopper = pytest.mark.skipif(not HOPPER, reason="sm90_latent is for compute capability 9.0")


def convert(values: Any, dtype: str) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE, getattr(torch, dtype))


def latents(heads: int = 16, **more: Any) -> Problem:
    sizes: dict[str, Any] = {
        "lengths": LENGTHS, "page_size": 64, "num_heads": heads, "num_heads_kv": 1,
        "head_dim": 576, "head_dim_v": 512, "latent": True, "dtype": "bfloat16",
    }  # fmt: skip
    return Problem(Cache(**{**sizes, **more}))


def poisoned(problem: Problem) -> Any:
    shape = (*problem.q.shape[:3], problem.cache.head_dim_v)
    return convert(np.full(shape, np.nan, np.float32), problem.cache.dtype)


def run(problem: Problem, kernel: str = "auto", **options: Any) -> Any:
    arrays = problem.arrays(convert)
    given = {
        name: convert(value, str(value.dtype)) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    got = dlattn.attention_with_kvcache(
        **arrays, **given, kernel=kernel, out=poisoned(problem), return_lse=True
    )
    problem.check(*(x.cpu() for x in got), **options)
    return got


def run_features(kernel: str, **cache: Any) -> None:
    """All that modifies scores, one at a time and together, and a mask."""
    problem = latents(20, lengths=(0, 9, 50, 300), seqlen_q=3, dtype="float16", **cache)
    each: dict[str, Any] = {
        "window": (40, None), "softcap": 2.0, "sinks": normal(20, seed=8),
        "alibi_slopes": normal(4, 20, seed=9) ** 2,
    }  # fmt: skip
    for name, value in each.items():
        run(problem, kernel, causal=True, **{name: value})
    run(problem, kernel, causal=True, **each)
    run(problem, kernel, mask=normal(4, 20, 3, 300, seed=3) > 0.0, max_seqlen_k=300)


@pytest.mark.parametrize("kernel", PLAIN)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_latents(heads: int, page_size: int, dtype: str, kernel: str) -> None:
    run(latents(heads, page_size=page_size, dtype=dtype), kernel, causal=True)


@pytest.mark.parametrize("kernel", PLAIN)
@pytest.mark.parametrize("seqlen_q", [2, 5, 40])
def test_drafts(seqlen_q: int, kernel: str) -> None:
    run(latents(10, seqlen_q=seqlen_q, dtype="float16"), kernel, causal=True)
    run(latents(8, seqlen_q=seqlen_q, num_heads_kv=2, layout="bhsd"), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_entries_and_padding(kernel: str) -> None:
    problem = latents(page_size=0, chosen=True, leftpads=(0, 1, 9, 0, 64, 65, 129, 200))
    run(problem, kernel, causal=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("dim", "dim_v"), [(264, 264), (320, 256), (512, 512), (576, 8), (8, 512)])
def test_v_of_its_own_memory(dim: int, dim_v: int, dtype: str) -> None:
    for heads_kv in (1, 4):
        cache = {"head_dim": dim, "head_dim_v": dim_v, "num_heads_kv": heads_kv, "dtype": dtype}
        run(latents(8, latent=False, **cache), causal=True)
        run(latents(8, latent=False, page_size=0, seqlen_q=3, **cache), causal=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_features(kernel: str) -> None:
    run_features(kernel)


@pytest.mark.parametrize("kernel", PLAIN)
@pytest.mark.parametrize(
    "options", [{"num_splits": 5}, {"split_size": 1024}, {"batch_invariant": True}]
)
def test_splits(options: dict[str, Any], kernel: str) -> None:
    problem = latents(16, lengths=(3000, 0, 1, 1100))
    got = run(problem, kernel, causal=True, **options)
    again = run(problem, kernel, causal=True, **options)
    assert torch.equal(got[0], again[0])
    if "batch_invariant" in options:
        arrays = problem.arrays(convert)
        own = {name: arrays[name][3:] for name in ("q", "seqused_k", "page_table")}
        alone = dlattn.attention_with_kvcache(**{**arrays, **own}, causal=True, kernel=kernel,
                                              **options)  # fmt: skip
        assert torch.equal(alone, got[0][3:])


@pytest.mark.parametrize("kernel", PLAIN)
def test_entries_windows_and_sinks(kernel: str) -> None:
    run(latents(page_size=0, chosen=True), kernel, causal=True)
    problem = latents(20, lengths=(0, 9, 50, 300), seqlen_q=3, dtype="float16")
    run(problem, kernel, causal=True, window=(40, None), sinks=normal(20, seed=8))


@pytest.mark.parametrize("kernel", ["auto", *PLAIN[len(KERNELS) :]])
def test_a_graph_serves_other_lengths_and_tables(kernel: str) -> None:
    cases = [(900, 3, 0, 64), (1, 1000, 16, 700), (0, 0, 0, 0), (17, 16, 15, 1000)]
    problems = [latents(lengths=x, capacity=1024, seqlen_q=2) for x in cases]
    first, pages = problems[0], 80

    def pooled(problem: Problem) -> Any:
        pool = np.full((pages, *problem.buffers[0].shape[1:]), np.nan, np.float32)
        pool[: len(problem.buffers[0])] = problem.buffers[0]
        return convert(pool, problem.cache.dtype)

    static = first.arrays(convert)
    static["k_cache"] = pooled(first)
    static["v_cache"] = static["k_cache"][..., :512]
    out = poisoned(first)

    def call() -> Any:
        return dlattn.attention_with_kvcache(
            **static, causal=True, out=out, return_lse=True, kernel=kernel
        )

    graph, (_, lse) = captured(call)
    for problem in [*problems, *problems[::-1]]:
        given = problem.arrays(convert)
        for name in ("q", "seqused_k", "page_table"):
            static[name].copy_(given[name])
        static["k_cache"].copy_(pooled(problem))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        problem.check(out.cpu(), lse.cpu(), causal=True)


@pytest.mark.parametrize("kernel", ["auto", *PLAIN[len(KERNELS) :]])
def test_many_sequences_and_keys(kernel: str) -> None:
    """More row blocks than thread blocks, and sequences that several of these share."""
    lengths = tuple(37 * i % 400 for i in range(200))
    run(latents(16, lengths=lengths, page_size=16), kernel, causal=True)
    run(latents(128, lengths=(900, 0, 333, 64)), kernel, causal=True)
    run(latents(40, lengths=(4000, 64)), kernel, causal=True)


@hopper
def test_lengths_beyond_the_table() -> None:
    """They count as what the table has room for."""
    problem = latents(16, lengths=(128, 70, 128))
    arrays = problem.arrays(convert)
    arrays["seqused_k"] = convert(np.array([2**31 - 1, 70, 129]), "int32")
    got = dlattn.attention_with_kvcache(
        **arrays, kernel="sm90_latent", causal=True, out=poisoned(problem), return_lse=True
    )
    problem.check(*(x.cpu() for x in got), causal=True)


@hopper
def test_pages_far_apart() -> None:
    """Beyond element 2^32 of the pool."""
    problem = latents(16, lengths=(200, 64, 1))
    arrays = problem.arrays(convert)
    few, far = arrays["k_cache"], 2**32 // (64 * 576) + 5
    pool = torch.empty(far + len(few), *few.shape[1:], dtype=few.dtype, device=DEVICE)
    pool[far:] = few
    arrays["k_cache"], arrays["v_cache"] = pool, pool[..., :512]
    arrays["page_table"] = arrays["page_table"] + far * (arrays["page_table"] >= 0)
    arrays["page_table"] = arrays["page_table"].to(torch.int32)
    got = dlattn.attention_with_kvcache(
        **arrays, kernel="sm90_latent", causal=True, out=poisoned(problem), return_lse=True
    )
    problem.check(*(x.cpu() for x in got), causal=True)


@hopper
def test_two_streams_at_once() -> None:
    """Each with a workspace of its own."""
    problem = latents(128, lengths=(3000, 1, 700))
    arrays = problem.arrays(convert)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for stream in [*streams, *streams]:
        with torch.cuda.stream(stream):
            results.append(
                dlattn.attention_with_kvcache(**arrays, kernel="sm90_latent", causal=True)
            )
    torch.cuda.synchronize()
    expected = run(problem, "sm90_latent", causal=True)[0]
    assert all(torch.equal(out, expected) for out in results)


@hopper
def test_pages_that_tma_cannot_find() -> None:
    """Refused by name; another kernel has them."""
    problem = latents(16, lengths=(100, 64))
    arrays = problem.arrays(convert)
    few, page = arrays["k_cache"], 64 * 576
    gaps = torch.full((len(few), page + 64), float("nan"), dtype=few.dtype, device=DEVICE)
    gaps[:, :page] = few.reshape(len(few), page)
    k_cache = gaps.as_strided(few.shape, (page + 64, 576, 576, 1))
    arrays["k_cache"], arrays["v_cache"] = k_cache, k_cache[..., :512]
    with pytest.raises(dlattn.UnsupportedError, match="has a batch stride of 36928 elements"):
        dlattn.attention_with_kvcache(**arrays, kernel="sm90_latent")
    got = dlattn.attention_with_kvcache(
        **arrays, causal=True, out=poisoned(problem), return_lse=True
    )
    problem.check(*(x.cpu() for x in got), causal=True)


def test_what_is_refused() -> None:
    arrays = latents(16, lengths=(20, 30), head_dim_v=576).arrays(convert)
    refusal = r"head_dim of v(_cache)? is 576; accepted: up to 512"
    with pytest.raises(dlattn.UnsupportedError, match=refusal):
        dlattn.attention_with_kvcache(**arrays, kernel="decode")
