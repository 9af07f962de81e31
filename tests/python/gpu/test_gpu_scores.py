"""Every CUDA kernel against float64: masks and score features, special values, merging, and the
bugs that the line of kernels has had.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from gpu_checks import (
    CAUSAL,
    DEVICE,
    HALF,
    HOPPER,
    assert_close,
    attend,
    check,
    every_kernel,
    normal,
    qkv,
    torch,
)

import dlattn

pytestmark = pytest.mark.gpu


# --- score features ------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("window", [(0, 0), (5, None), (None, 7), (40, 40), (100, 3), (None, 0)])
def test_window(kernel: str, dtype: str, window: Any, causal: Any) -> None:
    for lengths in [(100, 173), (173, 100), (70, 70)]:
        check(kernel, *qkv(dtype, *lengths), window=window, causal=causal)


@every_kernel
def test_sinks(kernel: str, dtype: str) -> None:
    sinks = torch.tensor([-2.0, 0.5, 6.0, -math.inf], device=DEVICE)
    check(kernel, *qkv(dtype, 70, 90), sinks=sinks)
    check(kernel, *qkv(dtype, 150, 60), sinks=sinks, causal=True)  # with rows that see nothing
    check(kernel, *qkv(dtype, 30, 0), sinks=sinks)


# Pairs of a kernel that has all score features and a dtype that it serves.
scored = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("scalar", "float32"), *((kernel, dtype) for kernel in ("scalar", "wmma") for dtype in HALF)]
    + [("sm90", dtype) for dtype in HALF if HOPPER],
)


@scored
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("seqlen_k", [90, 96])  # rows of any alignment, and to 16 bytes
def test_score_features(kernel: str, dtype: str, causal: Any, seqlen_k: int) -> None:
    q, k, v = qkv(dtype, 70, seqlen_k)
    bias = normal(2, 1, 70, seqlen_k, dtype=dtype, seed=5)
    bias_row = normal(4, 1, seqlen_k, dtype="float32", seed=6)
    mask = normal(1, 4, 70, seqlen_k, dtype="float32", seed=7) > -0.3
    mask[:, 1, 10:40] = False
    slopes = torch.tensor([0.5, 0.1, 0.0, 1.0], device=DEVICE)
    for options in [
        {"softcap": 2.0},
        {"softcap": 50.0},
        {"bias": bias},
        {"bias": bias_row},
        {"mask": mask},
        {"mask": mask[:, :1, :1]},
        {"alibi_slopes": slopes},
        {"alibi_slopes": torch.stack([slopes, slopes.flip(0)])},
        {"softcap": 3.0, "bias": bias, "mask": mask, "alibi_slopes": slopes, "window": (50, 20)},
    ]:
        check(kernel, q, k, v, causal=causal, **options)


@scored
@pytest.mark.parametrize("dim", [20, 64, 96, 128, 130, 256])
@pytest.mark.parametrize("seqlen_k", [192, 200, 206, 211])  # rows aligned to 16, 8, 2 and 1 bytes
def test_score_features_of_long_walks(kernel: str, dtype: str, dim: int, seqlen_k: int) -> None:
    q, k, v = qkv(dtype, 140, seqlen_k, dim=dim)
    shape = (2, 4, 140, seqlen_k)
    bias = normal(*shape, dtype=dtype, seed=5)
    mask = torch.rand(shape, device=DEVICE) < 0.7
    mask[:, 0, :, 60:] = False  # rows whose last tiles hide every key, and their first ones
    mask[:, 1, 20:90, :100] = False
    mask[0, 2, 70] = False
    by_query = torch.rand(2, 1, 140, 1, device=DEVICE) < 0.7
    transposed = normal(2, 4, seqlen_k, 140, dtype="float32", seed=6).transpose(2, 3)
    for options in [
        {"mask": mask},
        {"mask": by_query.expand(shape)},
        {"mask": mask.transpose(2, 3).contiguous().transpose(2, 3)},
        {"mask": mask, "bias": bias, "causal": True},
        {"bias": bias},
        {"bias": bias.float()},
        {"bias": bias[:, :, :, 3:].expand(2, 4, 140, -1), "seqlen": seqlen_k - 3},
        {"bias": transposed, "mask": mask, "softcap": 4.0},
    ]:
        keys = options.pop("seqlen", seqlen_k)
        check(kernel, q, k[:, :keys], v[:, :keys], **options)


@scored
def test_alibi_of_long_walks(kernel: str, dtype: str) -> None:
    for slopes in ([0.5, 4.0, 0.0, -0.01], [1.0, 16.0, 0.25, 64.0]):
        alibi = torch.tensor(slopes, device=DEVICE)
        for causal in CAUSAL:
            check(kernel, *qkv(dtype, 300, 500), alibi_slopes=alibi, causal=causal)


@scored
def test_special_biases(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 70, 192)
    bias = torch.zeros(70, 192, device=DEVICE)
    bias[:, 5:160] = -math.inf
    bias[3] = -math.inf
    check(kernel, q, k, v, bias=bias)
    assert (dlattn.attention(q, k, v, bias=bias, kernel=kernel)[:, 3] == 0).all()
    clean = dlattn.attention(q, k, v, bias=bias, kernel=kernel)
    for special in (math.nan, math.inf):
        spoilt = bias.clone()
        spoilt[7, 2] = special
        out, lse = dlattn.attention(q, k, v, bias=spoilt, kernel=kernel, return_lse=True)
        assert out[:, 7].isnan().all() and lse[:, :, 7].isnan().all()
        out[:, 7] = clean[:, 7]
        if kernel == "sm90":  # a row beyond measure has its neighbours' references looked at, too
            torch.testing.assert_close(
                out, clean, atol=4e-3 if dtype == "float16" else 3e-2, rtol=0
            )
        else:
            assert torch.equal(out, clean)
    hidden = torch.ones(70, 192, dtype=torch.bool, device=DEVICE)
    hidden[7, 2] = False  # a masked key's bias does not matter
    check(kernel, q, k, v, bias=torch.where(hidden, bias, 0.0), mask=hidden)
    spoilt = torch.where(hidden, bias, math.nan)
    got = dlattn.attention(q, k, v, bias=spoilt, mask=hidden, kernel=kernel)
    want = dlattn.attention(q, k, v, bias=bias, mask=hidden, kernel=kernel)
    assert torch.equal(got, want)


@every_kernel
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("slope", [-1000.0, -300.3])
def test_the_furthest_key_has_the_row(kernel: str, dtype: str, dim: int, slope: float) -> None:
    """With scores up to 10^6 out is one key's value, to the last bit, and lse as good."""
    for lengths in [(17, 20), (40, 150), (3, 1100)]:
        for causal in (False, "top_left", True):
            q, k, v = qkv(dtype, *lengths, dim=dim)
            slopes = torch.full((q.shape[2],), slope, device=DEVICE)
            options: dict[str, Any] = {"causal": causal, "alibi_slopes": slopes}
            if not dlattn.supported(q, k, v, kernel=kernel, **options):
                pytest.skip("not by this kernel")
            out, lse = dlattn.attention(q, k, v, kernel=kernel, return_lse=True, **options)
            at = torch.arange(lengths[0], device=DEVICE)
            at = at + (0 if causal == "top_left" else lengths[1] - lengths[0])
            last = at if causal else torch.full_like(at, lengths[1] - 1)
            furthest = torch.where(at > last - at, 0, last)  # never as far as the other end
            want = v[:, furthest].repeat_interleave(q.shape[2] // v.shape[2], 2)
            assert torch.equal(out, want), (lengths, causal)
            exact = attend(q, k, v, torch.float64, **options)[1]
            large = exact.abs() > 1e3
            size = exact.float().abs()
            ulp = torch.nextafter(size, torch.full_like(size, math.inf)) - size
            ulps = ((lse - exact).abs() / ulp)[large]
            assert (ulps <= 2.0).all(), (lengths, causal, ulps.max())


@pytest.mark.parametrize("kernel", ["wmma_qk", "wmma_smem", "wmma:wide"])
@pytest.mark.parametrize("feature", ["softcap", "bias", "mask", "alibi_slopes"])
def test_what_the_other_kernels_lack(kernel: str, feature: str) -> None:
    options = {
        "softcap": 2.0,
        "bias": torch.zeros(70, 90, device=DEVICE),
        "mask": torch.ones(70, 90, dtype=torch.bool, device=DEVICE),
        "alibi_slopes": torch.ones(4, device=DEVICE),
    }
    q, k, v = qkv("float16", 70, 90)
    asked = {feature: options[feature]}
    with pytest.raises(dlattn.UnsupportedError, match=f"does not implement {feature}"):
        dlattn.attention(q, k, v, kernel=kernel, **asked)
    assert dlattn.plan(q, k, v, kernel="wmma", **asked).variant == "general"
    assert dlattn.plan(q, k, v, **asked).kernel in ("wmma", "sm90", "decode")


@every_kernel
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("used", [False, True])
def test_variable_length(kernel: str, dtype: str, causal: Any, used: bool) -> None:
    lengths_q, lengths_k = [70, 0, 1, 133, 20], [90, 30, 64, 50, 0]
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    q, k, v = (x[0] for x in qkv(dtype, total_q, total_k, batch=1))
    starts_q = [sum(lengths_q[:i]) for i in range(6)]
    starts_k = [sum(lengths_k[:i]) for i in range(6)]
    out = torch.full_like(q, math.nan)
    seqused = [length // 2 for length in lengths_k] if used else lengths_k
    ints = {"dtype": torch.int32, "device": DEVICE}
    if used:  # keys that are not in use must not matter
        for start, length, count in zip(starts_k[:-1], lengths_k, seqused, strict=True):
            k[start + count : start + length] = math.nan
            v[start + count : start + length] = math.nan
    _, lse = dlattn.attention_varlen(
        q,
        k,
        v,
        torch.tensor(starts_q, **ints),
        torch.tensor(starts_k, **ints),
        max(lengths_q),
        max(lengths_k),
        seqused_k=torch.tensor(seqused, **ints) if used else None,
        causal=causal,
        out=out,
        return_lse=True,
        kernel=kernel,
    )
    for b in range(5):
        rows = slice(starts_q[b], starts_q[b + 1])
        keys = slice(starts_k[b], starts_k[b] + seqused[b])
        if lengths_q[b] == 0:
            continue
        inputs = q[None, rows], k[None, keys], v[None, keys]
        want, want_lse = attend(*inputs, torch.float64, causal=causal)
        plain, plain_lse = attend(*inputs, torch.float32, causal=causal)
        assert_close(out[None, rows], want, plain, dtype, f"out of sequence {b}")
        assert_close(lse[None, :, rows], want_lse, plain_lse, "float32", f"lse of sequence {b}")


# --- values --------------------------------------------------------------------------------------


@every_kernel
def test_large_scores(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 70, 200)
    check(kernel, q * 8, k * 8, v, causal=True)
    rising = torch.linspace(0.1, 6, 200, device=DEVICE)[None, :, None, None].to(q.dtype)
    check(kernel, q.abs(), k.abs() * rising, v)  # each tile raises the maximum
    check(kernel, q.abs(), k.abs() * rising.flip(1), v)
    check(kernel, -q.abs() * 8, k.abs() * 8, v)  # all scores far below zero


@every_kernel
def test_nan_reaches_those_who_see_it(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 100, 100)
    clean = dlattn.attention(q, k, v, causal=True, kernel=kernel)
    k_bad = k.clone()
    k_bad[:, 50, :, 3] = math.nan
    out, lse = dlattn.attention(q, k_bad, v, causal=True, kernel=kernel, return_lse=True)
    assert out[:, 50:].isnan().all()
    assert lse[..., 50:].isnan().all()
    assert torch.equal(out[:, :50], clean[:, :50])
    q_bad = q.clone()
    q_bad[:, 17, 0, 5] = math.nan
    out = dlattn.attention(q_bad, k, v, causal=True, kernel=kernel)
    assert out[:, 17, 0].isnan().all()
    out[:, 17, 0] = clean[:, 17, 0]
    assert torch.equal(out, clean)
    v_bad = v.clone()
    v_bad[:, 0, :, 7] = math.nan
    out = dlattn.attention(q, k, v_bad, causal=True, kernel=kernel)
    assert out[..., 7].isnan().all()
    out[..., 7] = clean[..., 7]
    assert torch.equal(out, clean)


@every_kernel
def test_infinities(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 70, 90)
    v_bad = v.clone()
    v_bad[:, 40, :, 2] = math.inf
    check(kernel, q, k, v_bad)
    q, k = q.abs() + 0.1, k.abs() + 0.1
    minus = k.clone()
    minus[:, 33] = -math.inf  # scores of -inf: keys that nobody attends to
    check(kernel, q, minus, v)
    plus = k.clone()
    plus[:, 33] = math.inf  # inf - inf: NaN, for all who see the key
    out = dlattn.attention(q, plus, v, causal=True, kernel=kernel)
    want, _ = attend(q, plus, v, torch.float64, causal=True)
    assert torch.equal(out.isnan(), want.isnan())


@every_kernel
def test_softmax_scale(kernel: str, dtype: str) -> None:
    for scale in (1e-3, 0.1, 1.0):
        check(kernel, *qkv(dtype, 70, 90), softmax_scale=scale)


def test_kernels_agree() -> None:
    for causal in (False, True):
        q, k, v = qkv("float16", 300, 333, dim=96)
        oracle = dlattn.attention(q, k, v, causal=causal, kernel="scalar").float()
        for kernel in ("wmma_qk", "wmma_smem", "wmma"):
            out = dlattn.attention(q, k, v, causal=causal, kernel=kernel).float()
            assert (out - oracle).abs().max() <= 4e-3


# --- the bugs of the line these kernels come from ------------------------------------------------


@every_kernel
def test_every_row_is_computed(kernel: str, dtype: str) -> None:
    """Once 8 of the 32 rows of a tile were: the warps' rows did not add up to the tile."""
    for seqlen_q in range(1, 131, 3):
        q, k, v = qkv(dtype, seqlen_q, 40, batch=1, heads=1, heads_kv=1)
        out = torch.full_like(q, math.nan)
        dlattn.attention(q, k, v, out=out, kernel=kernel)
        want, _ = attend(q, k, v, torch.float64)
        assert ((out - want).abs().amax((0, 2, 3)) < 0.05).all(), f"rows of {seqlen_q}"


@every_kernel
def test_accumulator_lives_across_tiles(kernel: str, dtype: str) -> None:
    """Once it was reset with each K/V tile: the output was that of the last one."""
    for tiles in (2, 3, 8):
        q, k, v = qkv(dtype, 70, 32 * tiles)
        k.zero_()  # all keys alike: the output is the mean of all of v
        v.copy_(torch.arange(32 * tiles, device=DEVICE).div(32).floor()[None, :, None, None])
        out = dlattn.attention(q, k, v, kernel=kernel)
        torch.testing.assert_close(out, torch.full_like(out, (tiles - 1) / 2), atol=0, rtol=8e-3)


@every_kernel
def test_scores_are_scaled_once(kernel: str, dtype: str) -> None:
    """Once the scale was applied as scores were stored, and again as they were read."""
    q, k, v = qkv(dtype, 40, 1)
    for scale in (0.25, 3.0):  # with one key, lse is its score
        _, lse = dlattn.attention(q, k, v, softmax_scale=scale, kernel=kernel, return_lse=True)
        _, want = attend(q, k, v, torch.float64, softmax_scale=scale)
        torch.testing.assert_close(lse.double(), want, rtol=1e-4, atol=1e-4)


@every_kernel
@pytest.mark.parametrize("dim", [16, 48, 64, 96, 128])
def test_k_is_read_with_its_own_leading_dimension(kernel: str, dtype: str, dim: int) -> None:
    """Once K^T was loaded with the tile's number of keys as leading dimension.

    Row i of q picks element i of every key, and v is the identity: the output is the softmax of
    the columns of K, each element with its own value.
    """
    keys = 32
    eye = torch.eye(dim, device=DEVICE)[None, :, None, :]
    q = eye.to(getattr(torch, dtype)).contiguous()
    index = torch.arange(keys * dim, device=DEVICE).view(1, keys, 1, dim)
    k = ((index * 37 % 101) / 25.0).to(q.dtype)
    v = torch.eye(keys, device=DEVICE)[None, :, None, :].to(q.dtype).contiguous()
    out = dlattn.attention(q, k, v, softmax_scale=1.0, kernel=kernel)
    want = torch.softmax(k.double()[0, :, 0].T, dim=1)
    torch.testing.assert_close(out.double()[0, :, 0], want, atol=2e-3, rtol=0)


@every_kernel
def test_partial_row_groups(kernel: str, dtype: str) -> None:
    """Once a warp's row group could have 12 rows, while matrix units always take 16."""
    for seqlen_q in [*range(1, 34), 47, 49, 63, 65, 79, 81]:
        check(kernel, *qkv(dtype, seqlen_q, 50, batch=1, heads=2, heads_kv=1), causal=True)


@every_kernel
def test_fewer_than_32_keys(kernel: str, dtype: str) -> None:
    """Once scores were broadcast from lanes that had none when a tile held fewer than 32 keys."""
    for seqlen_k in range(1, 34):
        check(kernel, *qkv(dtype, 20, seqlen_k, batch=1, heads=2, heads_kv=1))
        check(kernel, *qkv(dtype, 20, 64 + seqlen_k, batch=1, heads=2, heads_kv=1))


# --- merge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", *HALF])
@pytest.mark.parametrize("parts", [1, 2, 5, 32])
@pytest.mark.parametrize("dim", [1, 40, 64, 256])
def test_merge_states(dtype: str, parts: int, dim: int) -> None:
    q, k, v = qkv(dtype, 37, 200, dim=dim)
    edges = [200 * i // parts for i in range(parts + 1)]
    states = [
        dlattn.attention(q, k[:, a:b], v[:, a:b], kernel="scalar", return_lse=True)
        for a, b in itertools.pairwise(edges)
    ]
    out, lse = dlattn.merge_states([s[0] for s in states], [s[1] for s in states])
    want, want_lse = attend(q, k, v, torch.float64)
    plain, plain_lse = attend(q, k, v, torch.float32)
    # The parts have been rounded to dtype once more than the plain computation.
    epsilon = torch.finfo(q.dtype).eps
    assert (out.double() - want).abs().max() <= 2 * (plain.double() - want).abs().max() + (
        epsilon * v.abs().max().double()
    )
    assert_close(lse, want_lse, plain_lse, "float32", "lse")


@pytest.mark.parametrize("infinity", [-math.inf, math.inf])
@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_merge_with_empty_states(dtype: str, infinity: float) -> None:
    q, k, v = qkv(dtype, 37, 60)
    out, lse = dlattn.attention(q, k, v, kernel="scalar", return_lse=True)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, infinity)
    merged, merged_lse = dlattn.merge_states([nothing[0], out], [nothing[1], lse])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = dlattn.merge_states([nothing[0]] * 3, [nothing[1]] * 3)
    assert (merged == 0).all()
    assert (merged_lse == -math.inf).all()
    merged, merged_lse = dlattn.merge_states([out, out], [lse, torch.full_like(lse, math.nan)])
    assert merged.isnan().all() and merged_lse.isnan().all()
