"""Query heads of one KV head as rows of the same tiles (wmma's narrow), against float64.

Rows of a tile are then (query, head) pairs: what depends on one of the two must not follow the
other.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpu_checks import CAUSAL, DEVICE, HALF, attend, check, normal, padded, qkv, torch

import dlattn

pytestmark = pytest.mark.gpu

PACKED = ["wmma:narrow+packed"]
GROUPS = [(4, 2), (8, 2), (8, 1), (7, 1)]

packed = pytest.mark.parametrize("kernel", PACKED)


@packed
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("heads", "heads_kv"), GROUPS)
def test_groups(kernel: str, dtype: str, causal: Any, heads: int, heads_kv: int) -> None:
    for seqlen_q in (1, 2, 3, 17, 33, 130):
        for seqlen_k in (1, 64, 200, 777):
            inputs = qkv(dtype, seqlen_q, seqlen_k, heads=heads, heads_kv=heads_kv)
            check(kernel, *inputs, causal=causal)


@packed
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [(None, None), (31, None), (300, 5), (0, 0), (None, 40)])
def test_windows_and_head_dims(kernel: str, dtype: str, dim: int, window: Any) -> None:
    for seqlen_q in (1, 5, 70):
        inputs = qkv(dtype, seqlen_q, 700, heads=6, heads_kv=2, dim=dim, dim_v=dim - 8)
        check(kernel, *inputs, window=window)
        check(kernel, *inputs, window=(window[0], None), causal=True)


@packed
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_sinks_are_those_of_their_heads(kernel: str, dtype: str, seqlen_q: int) -> None:
    q, k, v = qkv(dtype, seqlen_q, 90, heads=8, heads_kv=2)
    sinks = torch.linspace(-3, 9, 8, device=DEVICE)
    check(kernel, q, k, v, sinks=sinks, causal=True)
    check(kernel, q, k[:, :0], v[:, :0], sinks=sinks)


@packed
@pytest.mark.parametrize("dtype", HALF)
def test_strides(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 5, 300, heads=8, heads_kv=2)
    check(kernel, padded(q, 8), padded(k, 16), padded(v, 24), causal=True)
    check(kernel, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    fused = normal(2, 50, 12, 64, dtype=dtype, seed=4)  # 8 heads of q, 2 of k, 2 of v
    check(kernel, fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:], causal=True)
    for pad in (1, 8):  # rows of out that are off 16 bytes, and ones that are not
        shape = (2, 5, 8, 64 + pad)
        flat = torch.full((math.prod(shape),), 123.0, dtype=q.dtype, device=DEVICE)
        out = flat.view(shape)[..., :64]
        check(kernel, q, k[:, :, :1], v[:, :, :1], out=out, causal=True)
        out.fill_(123.0)
        assert (flat == 123.0).all(), "wrote beside out"


@packed
@pytest.mark.parametrize("causal", CAUSAL)
def test_packs_of_sequences(kernel: str, causal: Any) -> None:
    lengths_q, lengths_k = [1, 17, 0, 3, 40, 5], [140, 17, 8, 65, 300, 0]
    starts = [
        torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=DEVICE)
        for x in (lengths_q, lengths_k)
    ]
    q, k, v = qkv("float16", sum(lengths_q), sum(lengths_k), batch=1, heads=8, heads_kv=2)
    out, lse = dlattn.attention_varlen(
        q[0], k[0], v[0], *starts, 40, 300, causal=causal, kernel=kernel, return_lse=True
    )
    for b in range(len(lengths_q)):
        rows, keys = (slice(s[b], s[b + 1]) for s in starts)
        if lengths_q[b] == 0:
            continue
        want, want_lse = attend(q[:, rows], k[:, keys], v[:, keys], torch.float64, causal=causal)
        assert (out[rows] - want[0]).abs().max() < 4e-3
        assert torch.allclose(lse[:, rows].double(), want_lse[0], atol=1e-4)


@pytest.mark.parametrize("dtype", HALF)
def test_one_query_on_the_general_kernel(dtype: str) -> None:
    q, k, v = qkv(dtype, 1, 333, heads=8, heads_kv=2, dim=90)
    bias = normal(2, 8, 1, 333, dtype=dtype, seed=5)
    mask = normal(2, 8, 1, 333, dtype=dtype, seed=6) > 0
    for options in ({"softcap": 3.0}, {"bias": bias}, {"mask": mask}, {"bias": bias[:1, :1]}):
        for window in ((None, None), (50, None), (0, 0)):
            kwargs: Any = {**options, "window": window}
            assert dlattn.plan(q, k, v, **kwargs).packed_heads == 4
            check("wmma:general+packed", q, k, v, **kwargs)
            check("wmma:general+packed", q, k, v, causal="top_left", **kwargs)


def test_the_plan_packs_where_it_pays() -> None:
    q, k, v = qkv("float16", 1, 2048, batch=64, heads=32, heads_kv=8, dim=128)
    assert dlattn.plan(q, k, v).packed_heads == 4
    assert dlattn.plan(q, k, v, kernel="wmma:unpacked").packed_heads == 1
    assert dlattn.plan(q, k, v, batch_invariant=True).packed_heads == 1
    check("auto", q, k, v, causal=True)
    with pytest.raises(dlattn.UnsupportedError, match="every query head has a head of k and v"):
        dlattn.plan(q[:, :, :8], k, v, kernel="wmma:packed")
