"""The variants of wmma that divide keys among the warps of a thread block, against float64.

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


# Whole: all keys on their way at once, which takes more shared memory than some devices have.
SINGLE_PASS = "wmma:single_pass"


def check_single_pass(q: Any, k: Any, v: Any, **options: Any) -> None:
    support = dlattn.supported(q, k, v, kernel=SINGLE_PASS)
    if not support.ok:
        assert "of shared memory per block" in str(support)
        pytest.skip(str(support))
    check(SINGLE_PASS, q, k, v, **options)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("seqlen_q", [1, 33, 512])
def test_single_pass(dtype: str, causal: Any, seqlen_q: int) -> None:
    for seqlen_k in (1, 63, 64, 65, 128, 200, 256, 257, 320, 383, 449, 511, 512):
        check_single_pass(*qkv(dtype, seqlen_q, seqlen_k), causal=causal)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("window", [(0, 0), (31, None), (300, 5), (None, 40)])
def test_whole_with_windows(dtype: str, window: Any) -> None:
    for dim, dim_v in ((64, 64), (40, 64), (56, 8)):
        check_single_pass(*qkv(dtype, 333, 500, dim=dim, dim_v=dim_v), window=window)
        check_single_pass(*qkv(dtype, 500, 333, dim=dim, dim_v=dim_v), window=window, causal=True)


def test_whole_with_scores_that_rise_in_one_group_alone() -> None:
    for hot in (0, 64, 255, 256, 511):
        q, k, v = qkv("float16", 64, 512)
        k[:, hot] *= 20
        check_single_pass(q, k, v)
        check_single_pass(q, k, v, sinks=torch.linspace(-3, 9, q.shape[2], device="cuda"))


def test_whole_is_what_the_plan_takes_where_it_fits() -> None:
    q, k, v = qkv("float16", 512, 512, batch=1, heads=8, heads_kv=8)
    properties = torch.cuda.get_device_properties(0)
    if (
        properties.multi_processor_count < 128
        or not dlattn.supported(q, k, v, kernel=SINGLE_PASS).ok
    ):
        pytest.skip("the blocks have no SM each, or less shared memory than they need")
    assert dlattn.plan(q, k, v, kernel="wmma").variant == "single_pass"
    first = dlattn.attention(q, k, v, kernel="wmma")
    for _ in range(20):
        assert torch.equal(first, dlattn.attention(q, k, v, kernel="wmma"))
    alone = dlattn.attention(q[:, :, 3:4], k[:, :, 3:4], v[:, :, 3:4], kernel=SINGLE_PASS)
    assert torch.equal(first[:, :, 3:4], alone)
