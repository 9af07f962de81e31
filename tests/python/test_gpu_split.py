"""The variant of wmma that divides keys among the warps of a thread block, against float64.

What every kernel must pass, test_gpu_kernels.py and test_gpu_scores.py ask of it too. Here: lengths
at which its groups of warps have no tile, one tile, one more than others, or so many that their
slots in shared memory are used again and again.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_checks import CAUSAL, HALF, check, qkv, torch

import dlattn

pytestmark = pytest.mark.gpu

KERNEL = "wmma:split"
TILE = {32: 64, 64: 64, 96: 32, 128: 32}  # keys, by head_dim; 4 groups take tiles in turn


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", sorted(TILE))
@pytest.mark.parametrize("tiles", [1, 2, 4, 5, 8, 9, 20, 21, 67])
def test_tiles_per_group(dtype: str, causal: Any, dim: int, tiles: int) -> None:
    for seqlen_k in (tiles * TILE[dim] - 1, tiles * TILE[dim], tiles * TILE[dim] + 1):
        check(KERNEL, *qkv(dtype, 40, seqlen_k, dim=dim), causal=causal)
        check(KERNEL, *qkv(dtype, seqlen_k, seqlen_k, heads=1, heads_kv=1, dim=dim), causal=causal)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(0, 0), (31, None), (300, 5), (None, 40)])
def test_windows_over_long_walks(dtype: str, dim: int, window: Any) -> None:
    check(KERNEL, *qkv(dtype, 333, 1457, dim=dim), window=window)
    check(KERNEL, *qkv(dtype, 333, 1457, dim=dim), window=(window[0], None), causal=True)


@pytest.mark.parametrize("dim", [64, 128])
def test_scores_that_rise_in_one_group_alone(dim: int) -> None:
    """The groups' references differ by much, in both directions."""
    for hot in (0, TILE[dim], 5 * TILE[dim] + 3, 511):
        q, k, v = qkv("float16", 64, 512, dim=dim)
        k[:, hot] *= 20
        check(KERNEL, q, k, v)
        check(KERNEL, q, k, v, sinks=torch.linspace(-3, 9, q.shape[2], device="cuda"))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", [False, True])
def test_bits_depend_on_nothing_else(dtype: str, causal: bool) -> None:
    """The same from call to call, and alone as in a batch."""
    q, k, v = qkv(dtype, 512, 512, batch=5, heads=8, heads_kv=8)
    first = dlattn.attention(q, k, v, causal=causal, kernel=KERNEL)
    for _ in range(20):
        assert torch.equal(first, dlattn.attention(q, k, v, causal=causal, kernel=KERNEL))
    alone = dlattn.attention(q[2:3], k[2:3], v[2:3], causal=causal, kernel=KERNEL)
    assert torch.equal(first[2:3], alone)
