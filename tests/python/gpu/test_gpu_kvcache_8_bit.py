"""Attention over 8-bit caches on a GPU, and keys split as the caller asks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from arrays import normal
from gpu_checks import DEVICE, HALF, captured, torch
from kvcaches import FEATURES, Cache, Problem, draft_tree, lengths_about
from test_gpu_kvcache import KERNELS, convert, run

import dlattn

pytestmark = pytest.mark.gpu

CACHE_DTYPES = ["int8", "float8_e4m3fn"]
with_kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [0, 1, 16, 48])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@with_kernels
def test_pages_and_entries(
    cache_dtype: str, page_size: int, layout: str, dtype: str, kernel: str
) -> None:
    lengths = lengths_about(page_size or 30, 530)
    cache = Cache(lengths, page_size, dtype=dtype, layout=layout, cache_dtype=cache_dtype)
    run(Problem(cache), kernel, causal=True)
    run(Problem(dataclasses.replace(cache, one_row=True, head_dim=48, head_dim_v=32, seqlen_q=3)))


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (32, 1)])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@with_kernels
def test_head_dims(cache_dtype: str, heads: tuple[int, int], dim: int, kernel: str) -> None:
    cache = Cache(
        (40, 7, 0, 300), 16, 1, *heads, dim, dim, dtype="bfloat16", cache_dtype=cache_dtype
    )
    run(Problem(cache), kernel, causal=True)
    run(Problem(dataclasses.replace(cache, head_dim_v=16, seqlen_q=9)), kernel, causal=True)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@with_kernels
def test_features(cache_dtype: str, feature: str, kernel: str) -> None:
    cache = Cache((0, 9, 50, 33), 16, seqlen_q=3, dtype="float16", cache_dtype=cache_dtype)
    sinks, slopes = normal(4, seed=8), normal(4, 4, seed=9) ** 2
    options = {"causal": True, **FEATURES[feature]}
    run(Problem(cache), kernel, **options, sinks=sinks, alibi_slopes=slopes)
    cache = dataclasses.replace(cache, leftpads=(0, 4, 17, 33), capacity=64)
    problem = Problem(cache)
    run(problem, kernel, **options, mask=draft_tree(problem))


@with_kernels
def test_queries_far_from_one(kernel: str) -> None:
    """bfloat16 has numbers that fp16, in which these products are made, has not."""
    problem = Problem(Cache((70, 300), 16, dtype="bfloat16", cache_dtype="int8"))
    for power in (-60, 60):
        problem.q = problem.q * np.float32(2.0**power)
        run(problem, kernel, causal=True, softmax_scale=2.0 ** (-power - 3))
        problem.q = problem.q * np.float32(2.0**-power)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@with_kernels
def test_every_element_counts_what_it_is(cache_dtype: str, kernel: str) -> None:
    """One key a sequence: out is its value, of all 256 bytes."""
    torch_dtype = getattr(torch, cache_dtype)
    v = torch.arange(256, device=DEVICE).to(torch.uint8).view(torch_dtype).view(4, 1, 1, 64)
    q = torch.ones(4, 1, 1, 64, device=DEVICE, dtype=torch.float16)
    out = dlattn.attention_with_kvcache(
        q, torch.zeros_like(v), v, seqused_k=torch.ones(4, device=DEVICE, dtype=torch.int32),
        k_descale=torch.ones((), device=DEVICE), v_descale=torch.ones((), device=DEVICE),
        kernel=kernel,
    )  # fmt: skip
    torch.testing.assert_close(out.float(), v.float(), rtol=0, atol=0, equal_nan=True)


LONG = Cache((0, 1, 3000, 700), 16, num_heads=8, head_dim=128, head_dim_v=128, dtype="float16")


@pytest.mark.parametrize("cache_dtype", ["", *CACHE_DTYPES])
@pytest.mark.parametrize(
    "asked", [{"num_splits": n} for n in (1, 2, 7, 1000)] + [{"split_size": n} for n in (128, 1024)]
)
@with_kernels
def test_splits(asked: dict[str, int], cache_dtype: str, kernel: str) -> None:
    problem = Problem(dataclasses.replace(LONG, cache_dtype=cache_dtype))
    run(problem, kernel, causal=True, **asked)
    run(problem, kernel, window=(500, None), **asked)


@pytest.mark.parametrize("cache_dtype", ["", *CACHE_DTYPES])
@pytest.mark.parametrize("asked", [{"split_size": 256}, {"batch_invariant": True}])
@with_kernels
def test_bits_of_splits_do_not_depend_on_the_batch(
    asked: dict[str, Any],
    cache_dtype: str,
    kernel: str,
) -> None:
    lengths = tuple(97 * i % 5000 for i in range(40))
    problem = Problem(dataclasses.replace(LONG, lengths=lengths, cache_dtype=cache_dtype))
    arrays = problem.arrays(convert)
    options: dict[str, Any] = {"causal": True, "kernel": kernel, **asked}
    whole = dlattn.attention_with_kvcache(**arrays, **options)
    problem.check(whole.cpu(), dlattn.attention_with_kvcache(
        **arrays, **options, return_lse=True)[1].cpu(), causal=True)  # fmt: skip
    table = arrays["page_table"]
    for b in (1, 20, 39):
        own = dict(arrays)
        for name in ("q", "seqused_k", "k_descale", "v_descale"):
            if name in own:
                own[name] = own[name][b : b + 1]
        for columns in (table.shape[1], -(-lengths[b] // 16)):  # of any room
            own["page_table"] = table[b : b + 1, :columns].contiguous()
            alone = dlattn.attention_with_kvcache(**own, **options)
            assert torch.equal(alone, whole[b : b + 1])


@pytest.mark.parametrize("asked", [{}, {"num_splits": 5}, {"split_size": 256}])
def test_a_workspace_of_the_callers(asked: dict[str, int]) -> None:
    problem = Problem(LONG)
    arrays = problem.arrays(convert)
    plan_of = {name.removesuffix("_cache"): value for name, value in arrays.items()}
    size = dlattn.plan(**plan_of, kernel="decode", causal=True, **asked).workspace_bytes
    assert size > 0
    workspace = torch.full((size + 256,), 0xFF, dtype=torch.uint8, device=DEVICE)
    run(problem, "decode", causal=True, workspace=workspace[256:], **asked)
    assert torch.all(workspace[:256] == 0xFF)
    run(problem, "decode", causal=True, workspace=workspace, **asked)
    options: dict[str, Any] = {"kernel": "decode", "causal": True, **asked}
    wrong = {
        f"workspace has {size - 1} bytes; accepted: at least {size}": workspace[: size - 1],
        "workspace: its address is 1 byte": workspace[1:],
    }
    for message, given in wrong.items():
        support = dlattn.supported(**plan_of, **options, workspace=given)
        assert not support and message in str(support)
        with pytest.raises(dlattn.UnsupportedError, match=message):
            dlattn.attention_with_kvcache(**arrays, **options, workspace=given)


def test_a_graph_of_splits_serves_other_lengths() -> None:
    cases = [(0, 1, 3000, 700), (3000, 128, 127, 0), (129, 2999, 1, 3000)]
    problems = [
        Problem(dataclasses.replace(LONG, page_size=0, lengths=x, capacity=3000)) for x in cases
    ]
    static = problems[0].arrays(convert)
    out = torch.empty_like(static["q"])
    options: dict[str, Any] = {"causal": True, "kernel": "decode", "batch_invariant": True}

    def call() -> Any:
        return dlattn.attention_with_kvcache(**static, **options, out=out, return_lse=True)[1]

    graph, lse = captured(call)
    for problem in problems:
        for name, tensor in problem.arrays(convert).items():
            if name != "layout":
                static[name].copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        problem.check(out.cpu(), lse.cpu(), causal=True)
