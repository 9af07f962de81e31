"""Row blocks of decode that a cluster of thread blocks has, on compute capability 9.0."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from arrays import normal as normal_array
from gpu_checks import DEVICE, HALF, captured, check, normal, qkv, torch
from kvcaches import FEATURES, Cache, Problem
from test_gpu_kvcache import convert, on_device, poisoned

import dlattn

pytestmark = pytest.mark.gpu

# A batch of one, whose length no other sequence's can be far from.
ONE = Cache(
    (1000,), num_heads=8, num_heads_kv=2, head_dim=128, head_dim_v=128, dtype="bfloat16",
    capacity=1100,
)  # fmt: skip


def cluster_size(*args: Any, **options: Any) -> int:
    found = re.search(r"clusters of (\d+)", dlattn.plan(*args, **options).text)
    return int(found[1]) if found else 1


@pytest.fixture(autouse=True)
def _clusters() -> None:
    arrays = Problem(ONE).arrays(convert)
    asked = {name.removesuffix("_cache"): value for name, value in arrays.items()}
    if cluster_size(**asked) == 1:
        pytest.skip("neither this GPU nor this build has clusters")


def run(problem: Problem, size: int = 0, **options: Any) -> Any:
    """Check a call that clusters compute, of `size` thread blocks if that is given."""
    arrays = {**problem.arrays(convert), **on_device(options)}
    if size:
        arrays["num_splits"] = size
    asked = {name.removesuffix("_cache"): value for name, value in arrays.items()}
    found = cluster_size(**asked)
    assert found == size if size else found > 1
    got = dlattn.attention_with_kvcache(**arrays, out=poisoned(problem), return_lse=True)
    problem.check(*(x.cpu() for x in got), **options)
    return got


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_lengths(page_size: int, size: int, dim: int, dtype: str) -> None:
    """From none to all, at the edges of tiles and of what each block of a cluster has."""
    cache = dataclasses.replace(ONE, head_dim=dim, head_dim_v=dim, dtype=dtype, page_size=page_size)
    for length in (0, 1, 63, 65, 129, 512, 1000, 1100):
        run(Problem(dataclasses.replace(cache, lengths=(length,))), size, causal=True)


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("size", [2, 8])
def test_caches_of_8_bits(size: int, dim: int, cache_dtype: str) -> None:
    cache = dataclasses.replace(
        ONE, head_dim=dim, head_dim_v=dim, cache_dtype=cache_dtype, page_size=16
    )
    run(Problem(cache), size)
    run(Problem(dataclasses.replace(cache, seqlen_q=5, lengths=(70,))), size, causal=True)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("seqlen_q", [1, 6])
def test_features(seqlen_q: int, feature: str) -> None:
    problem = Problem(dataclasses.replace(ONE, seqlen_q=seqlen_q))
    sinks, slopes = normal_array(8, seed=8), normal_array(1, 8, seed=9) ** 2
    for size in (2, 8):
        run(problem, size, **{"causal": True, **FEATURES[feature]})
        run(problem, size, **FEATURES[feature], sinks=sinks, alibi_slopes=slopes)


@pytest.mark.parametrize("lengths", [(1000, 3), (0, 0, 900), (64, 65, 1, 1100)])
def test_sequences_of_several_lengths(lengths: tuple[int, ...]) -> None:
    """Where the caller asks for parts, in clusters whose sequences are not alike."""
    run(Problem(dataclasses.replace(ONE, lengths=lengths, seqlen_q=3)), 8, causal=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv"),
    [(1, 1, 256, 32, 8), (1, 1, 1024, 32, 8), (1, 3, 700, 16, 4), (8, 8, 4096, 32, 8)],
)
def test_lengths_that_the_host_knows(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int, dtype: str
) -> None:
    tensors = qkv(
        dtype, seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=heads_kv, dim=128, seed=3
    )
    options = {"causal": True, "kernel": "decode"}  # auto has another kernel for the fewest keys
    assert cluster_size(*tensors, **options) > 1
    assert dlattn.plan(*tensors, **options).workspace_bytes == 0
    check("decode", *tensors, causal=True)
    check("decode", *tensors, softcap=5.0, sinks=normal(heads, dtype="float32", seed=9))


def test_a_graph_serves_other_lengths() -> None:
    problems = [
        Problem(dataclasses.replace(ONE, lengths=(length,), seqlen_q=2), seed=length)
        for length in (1100, 0, 1, 130, 64, 999)
    ]
    static = problems[0].arrays(convert)
    out = poisoned(problems[0])

    def call() -> Any:
        return dlattn.attention_with_kvcache(**static, causal=True, out=out, return_lse=True)

    graph, (_, lse) = captured(call)
    for problem in [*problems, *problems[::-1]]:
        for name, tensor in problem.arrays(convert).items():
            if name != "layout":
                static[name].copy_(tensor)
        out.fill_(np.nan), lse.fill_(np.nan)
        graph.replay()
        torch.cuda.synchronize()
        problem.check(out.cpu(), lse.cpu(), causal=True)


def test_calls_that_wait_for_each_other() -> None:
    """Each call's q is what the one before has written, and its bits are those of calls apart."""
    tensors = qkv("bfloat16", 1, 900, batch=1, heads=16, heads_kv=4, dim=128)
    k, v = (8.0 * x for x in tensors[1:])
    assert cluster_size(tensors[0], k, v) > 1

    def chain(pause: bool) -> Any:
        x = tensors[0]
        for _ in range(20):
            x = dlattn.attention(x, k, v)
            if pause:
                torch.cuda.synchronize()
        return x

    want = chain(pause=True)
    for _ in range(30):
        assert torch.equal(chain(pause=False), want)


def test_an_output_of_any_memory() -> None:
    """Rows of out that are off 16 bytes, in a wider tensor whose other elements stay."""
    tensors = qkv("float16", 1, 500, batch=1, heads=8, heads_kv=2, dim=128, dim_v=72)
    whole = torch.full((1, 1, 8, 75), 7.0, dtype=torch.float16, device=DEVICE)
    check("decode", *tensors, out=whole[..., 1:73])
    assert bool((whole[..., 0] == 7.0).all()) and bool((whole[..., 73:] == 7.0).all())
