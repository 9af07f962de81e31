"""The variant of wmma that is a persistent kernel over TMA, against float64.

What TMA's boxes must get right: rows and columns where a tensor ends within a box,
other strides, few and many work items for the thread blocks that go from one to the next.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_checks import CAUSAL, HALF, check, normal, padded, qkv, torch

import dlattn

KERNEL = "wmma:persistent"
DIMS = [40, 64, 88, 104, 128, 168, 192, 200, 256]


def served(dim: int) -> bool:
    if not torch.cuda.is_available():
        return False
    return dlattn.supported(*qkv("float16", 1, 1, dim=dim), kernel=KERNEL).ok


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not served(128), reason="needs compute capability 9.0 and code for it"),
]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", DIMS)
def test_lengths(dtype: str, causal: Any, dim: int) -> None:
    for seqlen_q, seqlen_k in ((1, 1), (1, 300), (300, 1), (257, 129), (256, 256), (333, 700)):
        check(KERNEL, *qkv(dtype, seqlen_q, seqlen_k, dim=dim), causal=causal)
    check(KERNEL, *qkv(dtype, 333, 900, dim=dim), causal=causal, window=(400, None))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("dim", "dim_v"), [(40, 64), (128, 24), (72, 120), (192, 128), (256, 8)])
def test_head_dim_of_v(dtype: str, dim: int, dim_v: int) -> None:
    check(KERNEL, *qkv(dtype, 300, 400, dim=dim, dim_v=dim_v), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_blocks_of_several_items(dim: int, causal: bool) -> None:
    """More items than any GPU has multiprocessors, and of many lengths under causality."""
    check(KERNEL, *qkv("float16", 512, 512, batch=40, heads=8, heads_kv=4, dim=dim), causal=causal)
    check(KERNEL, *qkv("bfloat16", 700, 100, batch=40, heads=8, heads_kv=8, dim=dim), causal=causal)


@pytest.mark.parametrize("dim", [64, 104, 256])
def test_strides(dim: int) -> None:
    q, k, v = qkv("float16", 300, 500, dim=dim)
    check(KERNEL, padded(q, 8, 8), padded(k, 24, 16), padded(v, 64, 8), causal=True)
    check(KERNEL, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    packed = normal(2, 300, 12, dim, dtype="float16", seed=3)
    check(KERNEL, packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:], causal=True)
    one = k[:, :, :1].expand_as(k)
    check(KERNEL, q, one, v[:1].expand(2, -1, -1, -1))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_scores_that_rise(dim: int) -> None:
    """References are raised in the midst of the walk of few rows alone as well."""
    q, k, v = qkv("float16", 300, 1500, dim=dim)
    check(KERNEL, q, k * torch.linspace(8, 0.1, 1500, device="cuda").half()[:, None, None], v)
    q[:, 7] *= 12
    check(KERNEL, q, k, v, sinks=torch.linspace(-3, 9, q.shape[2], device="cuda"))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nothing_to_do(dim: int) -> None:
    check(KERNEL, *qkv("float16", 300, 0, dim=dim))
    for shape in ({"batch": 0}, {"seqlen_q": 0}):
        q, k, v = qkv("float16", **{"seqlen_q": 20, "seqlen_k": 30, "dim": dim, **shape})
        assert dlattn.attention(q, k, v, kernel=KERNEL).shape == q.shape


def test_in_a_graph() -> None:
    q, k, v = qkv("float16", 512, 512, batch=4, dim=64)
    want = dlattn.attention(q, k, v, kernel=KERNEL)
    out = torch.full_like(want, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dlattn.attention(q, k, v, kernel=KERNEL, out=out)
        dlattn.attention(q, k, v, kernel=KERNEL, out=out)
    graph.replay()
    assert torch.equal(out, want)


def test_packs_are_refused() -> None:
    q, k, v = (x[0] for x in qkv("float16", 40, 40, dim=128))
    starts = torch.tensor([0, 10, 40], dtype=torch.int32, device="cuda")
    with pytest.raises(
        dlattn.UnsupportedError, match="persistent: does not implement cu_seqlens_q"
    ):
        dlattn.attention_varlen(q, k, v, starts, starts, 30, 30, kernel=KERNEL)
