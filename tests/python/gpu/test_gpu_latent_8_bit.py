"""8-bit caches with head dims of 257 to 576 on a GPU, against the float64 reference of what their
elements stand for: latents, of which V is the first columns with a factor of its own, and V of its
own memory. NaN, or 127 of int8, lies wherever no key that is in use does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import normal
from gpu_checks import DEVICE, HALF, HOPPER, captured, torch
from kvcaches import Cache, Problem
from test_gpu_latent_decode import KERNELS, convert, hopper, latents, poisoned, run, run_features

import dlattn

pytestmark = pytest.mark.gpu

with_caches = pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
with_kernels = pytest.mark.parametrize("kernel", KERNELS)
# sm90_latent has e4m3 latents alone, of up to 32 rows.
NARROW = ["sm90_latent", "sm90_latent:rows32"]
PLAIN = [
    *((kernel, cache_dtype) for kernel in KERNELS for cache_dtype in ("int8", "float8_e4m3fn")),
    *((kernel, "float8_e4m3fn") for kernel in NARROW if HOPPER),
]
with_plain = pytest.mark.parametrize(("kernel", "cache_dtype"), PLAIN)


@with_kernels
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("heads", [8, 128])
@with_caches
def test_latents(cache_dtype: str, heads: int, page_size: int, dtype: str, kernel: str) -> None:
    problem = latents(heads, page_size=page_size, dtype=dtype, cache_dtype=cache_dtype)
    run(problem, kernel, causal=True)


@hopper
@pytest.mark.parametrize("kernel", NARROW)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("page_size", [0, 8, 64])
@pytest.mark.parametrize(("heads", "seqlen_q"), [(8, 1), (16, 1), (5, 3), (32, 1), (16, 2)])
def test_latents_of_few_rows(
    heads: int, seqlen_q: int, page_size: int, dtype: str, kernel: str
) -> None:
    given = {"page_size": page_size, "dtype": dtype, "cache_dtype": "float8_e4m3fn"}
    run(latents(heads, seqlen_q=seqlen_q, **given), kernel, causal=True)
    if seqlen_q > 1:
        run(latents(heads, seqlen_q=seqlen_q, **given), kernel)
        smaller = {"head_dim": 320, "head_dim_v": 272}
        run(latents(heads, seqlen_q=seqlen_q, **given, **smaller), kernel, causal=True)


@hopper
def test_several_heads_windows_and_sinks() -> None:
    given = {"cache_dtype": "float8_e4m3fn", "seqlen_q": 2, "num_heads_kv": 2}
    run(latents(8, **given, layout="bhsd"), "sm90_latent", causal=True)
    run(latents(32, **given), "sm90_latent", causal=True, sinks=normal(32, seed=8))
    run(latents(32, **given), "sm90_latent", causal=True, window=(40, None))
    run(latents(page_size=0, chosen=True, cache_dtype="float8_e4m3fn"), "sm90_latent", causal=True)


@with_kernels
@with_caches
def test_drafts_and_pages_of_any_size(cache_dtype: str, kernel: str) -> None:
    for seqlen_q in (2, 5):
        given = {"seqlen_q": seqlen_q, "cache_dtype": cache_dtype}
        run(latents(10, **given, page_size=7, dtype="float16"), kernel, causal=True)
        run(latents(8, **given, num_heads_kv=2, layout="bhsd"), kernel)


@with_kernels
@with_caches
def test_entries_and_padding(cache_dtype: str, kernel: str) -> None:
    leftpads = (0, 1, 9, 0, 64, 65, 129, 200)
    cache = {"page_size": 0, "chosen": True, "leftpads": leftpads, "cache_dtype": cache_dtype}
    run(latents(**cache), kernel, causal=True)


@pytest.mark.parametrize(("dim", "dim_v"), [(272, 272), (320, 256), (512, 512), (576, 16)])
@with_caches
def test_v_of_its_own_memory(cache_dtype: str, dim: int, dim_v: int) -> None:
    for heads_kv, dtype in ((1, "float16"), (4, "bfloat16")):
        cache = {
            "head_dim": dim, "head_dim_v": dim_v, "num_heads_kv": heads_kv, "dtype": dtype,
            "cache_dtype": cache_dtype, "latent": False,
        }  # fmt: skip
        run(latents(8, **cache), causal=True)
        run(latents(8, **cache, page_size=0, seqlen_q=3), causal=True)
        run(latents(32, **cache, page_size=16), causal=True)


@with_kernels
@with_caches
def test_features(cache_dtype: str, kernel: str) -> None:
    run_features(kernel, cache_dtype=cache_dtype)


@pytest.mark.parametrize(
    "options", [{"num_splits": 5}, {"split_size": 1024}, {"batch_invariant": True}]
)
@with_plain
def test_splits(cache_dtype: str, kernel: str, options: dict[str, Any]) -> None:
    problem = latents(16, lengths=(3000, 0, 1, 1100), cache_dtype=cache_dtype)
    if "sm90" in kernel and "batch_invariant" in options:
        with pytest.raises(dlattn.UnsupportedError, match="does not run with batch_invariant"):
            run(problem, kernel, causal=True, **options)
        return
    got = run(problem, kernel, causal=True, **options)
    again = run(problem, kernel, causal=True, **options)
    assert torch.equal(got[0], again[0])
    if "batch_invariant" in options:
        arrays = problem.arrays(convert)
        names = ("q", "seqused_k", "page_table", "k_descale", "v_descale")
        own = {name: arrays[name][3:] for name in names}
        alone = dlattn.attention_with_kvcache(
            **{**arrays, **own}, causal=True, kernel=kernel, **options
        )
        assert torch.equal(alone, got[0][3:])


@pytest.mark.parametrize("dtype", HALF)
@with_plain
def test_every_element_counts_what_it_is(cache_dtype: str, kernel: str, dtype: str) -> None:
    """One key a sequence: out is its value, in each column each of the 256 bytes."""
    rows = (torch.arange(256, device=DEVICE)[:, None] + torch.arange(512, device=DEVICE)) % 256
    v = rows.to(torch.uint8).view(getattr(torch, cache_dtype)).view(256, 1, 1, 512)
    if "sm90" in kernel:  # where a key is its value: without NaN, and with any score
        v = torch.where(v.float().isnan(), 0.0, v.float()).to(v.dtype)
    k = v if "sm90" in kernel else torch.zeros_like(v)
    out = dlattn.attention_with_kvcache(
        torch.ones(256, 1, 1, 512, device=DEVICE, dtype=getattr(torch, dtype)),
        k, v, seqused_k=torch.ones(256, device=DEVICE, dtype=torch.int32),
        k_descale=torch.ones((), device=DEVICE), v_descale=torch.full((), 0.5, device=DEVICE),
        kernel=kernel,
    )  # fmt: skip
    torch.testing.assert_close(out.float(), v.float() / 2, rtol=0, atol=0, equal_nan=True)


@with_plain
def test_queries_far_from_one(kernel: str, cache_dtype: str) -> None:
    """bfloat16 has numbers that fp16, in which these products are made, has not."""
    problem = latents(lengths=(70, 300), cache_dtype=cache_dtype)
    for power in (-60, 60):
        problem.q = problem.q * np.float32(2.0**power)
        run(problem, kernel, causal=True, softmax_scale=2.0 ** (-power - 5))
        problem.q = problem.q * np.float32(2.0**-power)


@with_caches
def test_a_graph_serves_other_lengths_and_tables(cache_dtype: str) -> None:
    cases = [(900, 3, 0, 64), (1, 1000, 16, 700), (17, 16, 15, 1000)]
    problems = [
        latents(lengths=x, capacity=1024, seqlen_q=2, cache_dtype=cache_dtype) for x in cases
    ]
    first, pages = problems[0], 80

    def pooled(problem: Problem) -> Any:
        pool = np.full((pages, *problem.buffers[0].shape[1:]), 127, np.float32)
        pool[: len(problem.buffers[0])] = problem.buffers[0]
        return convert(pool, cache_dtype)

    static = first.arrays(convert)
    static["k_cache"] = pooled(first)
    static["v_cache"] = static["k_cache"][..., :512]
    out = poisoned(first)

    def call() -> Any:
        return dlattn.attention_with_kvcache(**static, causal=True, out=out, return_lse=True)

    graph, (_, lse) = captured(call)
    for problem in [*problems, *problems[::-1]]:
        given = problem.arrays(convert)
        for name in ("q", "seqused_k", "page_table", "k_descale", "v_descale"):
            static[name].copy_(given[name])
        static["k_cache"].copy_(pooled(problem))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        problem.check(out.cpu(), lse.cpu(), causal=True)


@with_caches
def test_many_sequences_and_keys(cache_dtype: str) -> None:
    """More row blocks than thread blocks, and sequences that several of these share."""
    lengths = tuple(37 * i % 400 for i in range(200))
    run(latents(16, lengths=lengths, page_size=16, cache_dtype=cache_dtype), causal=True)
    run(latents(128, lengths=(900, 0, 333, 64), cache_dtype=cache_dtype), causal=True)
    run(latents(40, lengths=(4000, 64), cache_dtype=cache_dtype), causal=True)


def test_new_keys_of_the_call() -> None:
    """They are rounded by the same factors as `append_kv` does."""
    cache = Cache((5, 33), 16, num_heads=4, num_heads_kv=1, head_dim=320, head_dim_v=320,
                  dtype="float16", cache_dtype="int8", capacity=48)  # fmt: skip
    problem = Problem(cache)
    arrays = problem.arrays(convert)
    k, v = (convert(normal(2, 1, 1, 320, seed=s), "float16") for s in (1, 2))
    apart = {name: arrays[name].clone() for name in ("k_cache", "v_cache")}
    scales = {name: arrays[name] for name in ("k_descale", "v_descale")}
    before = arrays["seqused_k"] - 1
    dlattn.append_kv(
        k, v, *apart.values(), seqused_k=before, page_table=arrays["page_table"], **scales
    )
    expected = dlattn.attention_with_kvcache(**{**arrays, **apart}, causal=True)
    out = dlattn.attention_with_kvcache(**{**arrays, "seqused_k": before}, k=k, v=v, causal=True)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dim", [264, 520])
def test_what_is_refused(dim: int) -> None:
    """Rows of 8 bits that are no multiples of 16 bytes."""
    arrays = latents(16, lengths=(20, 30), head_dim=dim, head_dim_v=256, cache_dtype="int8").arrays(
        convert
    )
    with pytest.raises(dlattn.UnsupportedError, match="aligned to 8 bytes; accepted: 16"):
        dlattn.attention_with_kvcache(**arrays, kernel="decode")
