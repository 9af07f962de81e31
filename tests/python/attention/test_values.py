"""Values that a caller can send and that have gone wrong: every kernel against float64.

Here are fixed cases, and a part of the random ones that is limited in time; `values.py` runs any
more. What a right result is, `value_bounds` says.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from differential import KERNELS  # noqa: E402
from random_problems import FINITE, SPELLINGS  # noqa: E402
from value_bounds import Expected  # noqa: E402

import dlattn  # noqa: E402

INF = math.inf
DTYPES = ["float16", "bfloat16", "float32"]
HALF = DTYPES[:2]
LOWEST = -FINITE["float32"]

every_kernel = pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("cpu", "cpu"),
        *(pytest.param("cuda", kernel, marks=pytest.mark.gpu) for kernel in KERNELS["cuda"]),
        pytest.param("cuda", "auto", marks=pytest.mark.gpu),
    ],
)
ROWS = {"cpu": 24, "cuda": 70}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """The reference's matrices are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def qkv(
    device: str,
    dtype: str,
    seqlen_q: int | None = None,
    seqlen_k: int = 320,
    dim: int = 64,
) -> list[Any]:
    """Normal with an offset, (batch, rows, heads, dim)."""
    generator = torch.Generator().manual_seed(seqlen_k)
    lengths = (seqlen_q or ROWS[device], seqlen_k, seqlen_k)
    made = [torch.randn(1, n, 2, dim, generator=generator) + 0.25 for n in lengths]
    return [x.to(device).to(getattr(torch, dtype)) for x in made]


def check(kernel: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Hold a kernel to its bounds, or skip the test if it does not serve the problem."""
    support = dlattn.supported(q, k, v, kernel=kernel, **options)
    if not support:
        pytest.skip(str(support))
    expected = Expected(q, k, v, options)
    assert not expected.broken, "the plain computation is not finite"
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device=q.device)
    _, lse = dlattn.attention(q, k, v, kernel=kernel, out=out, return_lse=True, **options)
    of_out, of_lse, text = expected.worst(out, lse)
    assert of_out <= 1, text
    assert of_lse <= 1, text
    return expected


def padding(device: str, length: int, count: int, value: float, side: str) -> Any:
    """A bias of `value` at the last or first `count` keys, (1, 1, 1, keys)."""
    keys = torch.arange(length, device=device)
    hidden = keys >= length - count if side == "right" else keys < count
    return torch.where(hidden, value, 0.0)[None, None, None]


# --- a large finite negative bias ----------------------------------------------------------------


@every_kernel
@every_dtype
@pytest.mark.parametrize("value", SPELLINGS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_finite_minus_infinity(
    device: str, kernel: str, dtype: str, value: float, side: str
) -> None:
    q, k, v = qkv(device, dtype)
    for count in (64, 319) if device == "cpu" else (1, 64, 129, 319):
        check(kernel, q, k, v, bias=padding(device, 320, count, value, side))


@every_kernel
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [40, 80, 96, 128, 192, 256])
def test_padding_of_every_head_dim(device: str, kernel: str, dtype: str, dim: int) -> None:
    q, k, v = qkv(device, dtype, dim=dim)
    for value in (-1e9, LOWEST):
        check(kernel, q, k, v, bias=padding(device, 320, 136, value, "right"))


@every_kernel
@pytest.mark.parametrize("dtype", HALF)
def test_lowest_of_its_own_dtype(device: str, kernel: str, dtype: str) -> None:
    q, k, v = qkv(device, dtype)
    lowest = padding(device, 320, 200, -FINITE[dtype], "right").to(q.dtype)
    check(kernel, q, k, v, bias=lowest)
    check(kernel, q, k, v, bias=lowest, causal=True)
    check(kernel, q, k, v, bias=torch.full_like(lowest, -FINITE[dtype]))


@every_kernel
@every_dtype
@pytest.mark.parametrize("value", SPELLINGS)
def test_causal_mask_of_finite_minus_infinity(
    device: str, kernel: str, dtype: str, value: float
) -> None:
    q, k, v = qkv(device, dtype, 64 if device == "cpu" else 192, 192)
    length_q, keys = q.shape[1], torch.arange(192, device=device)
    rows = torch.arange(length_q, device=device)[:, None] + 192 - length_q
    bias = torch.where(keys > rows, value, 0.0)[None, None]
    check(kernel, q, k, v, bias=bias)
    # With padding on top of it, and a mask that hides some more.
    both = (bias.double() + padding(device, 192, 70, value, "left")).clamp_min(LOWEST)
    mask = torch.rand(length_q, 192, generator=torch.Generator().manual_seed(1)).to(device) < 0.8
    check(kernel, q, k, v, bias=both.float(), mask=mask[None, None])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@every_dtype
@pytest.mark.parametrize("value", [-1e9, -1e10, LOWEST])
def test_additive_mask_of_scaled_dot_product_attention(
    device: str, dtype: str, value: float
) -> None:
    length = 100 if device == "cpu" else 256
    q, k, v = (x.transpose(1, 2) for x in qkv(device, dtype, length, length))
    mask = torch.full((length, length), value, device=device).triu(1)
    out = dlattn.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    expected = Expected(*arguments, {"bias": mask[None, None]})
    of_out, _, text = expected.worst(out.transpose(1, 2), None)
    assert of_out <= 1, text


# --- rows whose every key has one ----------------------------------------------------------------


@every_kernel
@every_dtype
@pytest.mark.parametrize("value", SPELLINGS)
def test_rows_of_finite_minus_infinity_are_not_masked(
    device: str, kernel: str, dtype: str, value: float
) -> None:
    q, k, v = qkv(device, dtype)
    length_q = q.shape[1]
    rows = torch.arange(length_q, device=device)[:, None]
    for bias in (
        torch.full((1, 1, length_q, 320), value, device=device),
        torch.where(rows % 3 == 0, value, 0.0).expand(1, 1, length_q, 320).contiguous(),
    ):
        expected = check(kernel, q, k, v, bias=bias)
        if abs(value) >= 1e9:
            mean = v.double().mean(1)
            torch.testing.assert_close(expected.out[:, :, 0], mean, rtol=1e-6, atol=1e-6)
        check(kernel, q, k, v, bias=bias, causal=True)


@every_kernel
@pytest.mark.parametrize("dtype", HALF)
def test_rows_of_biases_that_differ(device: str, kernel: str, dtype: str) -> None:
    """The mean over those keys whose bias is the largest."""
    q, k, v = qkv(device, dtype)
    bias = torch.full((1, 1, 1, 320), -1e20, device=device)
    bias[..., 100:140] = -1e9
    check(kernel, q, k, v, bias=bias)
    bias[..., 7] = 1e10
    check(kernel, q, k, v, bias=bias)
    bias[..., 300:] = -INF
    check(kernel, q, k, v, bias=bias)


# --- ALiBi, and huge scores ----------------------------------------------------------------------


@every_kernel
@every_dtype
@pytest.mark.parametrize("slope", [-1000.0, 1000.0, 1e7, -1e7, 1e18, 1e30, -1e30, INF, -INF])
def test_slopes(device: str, kernel: str, dtype: str, slope: float) -> None:
    slopes = torch.tensor([slope, 0.5], device=device)
    q, k, v = qkv(device, dtype)
    check(kernel, q, k, v, alibi_slopes=slopes)
    check(kernel, q, k, v, alibi_slopes=slopes, causal=True)
    check(kernel, q, k, v, alibi_slopes=slopes, causal="top_left")
    check(kernel, q, k, v, alibi_slopes=slopes, window=(200, 60))


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [300.0, 30000.0])
def test_equal_huge_scores(device: str, kernel: str, dtype: str, value: float) -> None:
    q, k, v = qkv(device, dtype)
    q, k = torch.full_like(q, value), torch.full_like(k, value)
    expected = check(kernel, q, k, v)
    mean = v.double().mean(1)
    torch.testing.assert_close(expected.out[:, :, 0], mean, rtol=1e-6, atol=1e-6)
    check(kernel, q, k, v, causal=True)
    check(kernel, -q, k, v)


@every_kernel
@every_dtype
@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_huge_scores_that_differ(device: str, kernel: str, dtype: str, size: float) -> None:
    q, k, v = qkv(device, dtype)
    check(kernel, q * size, k * size, v)
    check(kernel, q * size, k, v, causal=True)


# --- softcap -------------------------------------------------------------------------------------


@every_kernel
@every_dtype
@pytest.mark.parametrize("softcap", [2.0**-100, 1e-3, 1e3, 1e4, 1e5, 1e7, 1e12, 2.0**100])
def test_softcap(device: str, kernel: str, dtype: str, softcap: float) -> None:
    q, k, v = qkv(device, dtype)
    check(kernel, q, k, v, softcap=softcap)
    check(kernel, q * 8, k * 8, v, softcap=softcap, causal=True)
    check(kernel, q, k, v, softcap=softcap, bias=padding(device, 320, 136, -1e9, "right"))


# --- scale and sinks -----------------------------------------------------------------------------


@every_kernel
@every_dtype
@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 1e-6, 1e3, 1e20, 2.0**126])
def test_scale(device: str, kernel: str, dtype: str, scale: float) -> None:
    q, k, v = qkv(device, dtype, seqlen_k=200)
    size = min(1.0, (1e8 / scale) ** 0.5, 100.0)
    size = max(size, 2.0**-12 if dtype == "float16" else 2.0**-60)
    q, k = (q * size).to(q.dtype), (k * size).to(k.dtype)
    if scale > 1e30:  # 2^126 leaves room for products of 1
        k = k * 2.0**-8
    check(kernel, q, k, v, softmax_scale=scale)
    check(kernel, q, k, v, softmax_scale=scale, causal=True)
    check(kernel, q, k, v, softmax_scale=scale, window=(5, 3))


@every_kernel
@pytest.mark.parametrize("dtype", HALF)
def test_smallest_scale_and_a_mask(device: str, kernel: str, dtype: str) -> None:
    q, k, v = qkv(device, dtype)
    mask = torch.rand(q.shape[1], 320, generator=torch.Generator().manual_seed(1)).to(device) < 0.5
    check(kernel, q, k, v, softmax_scale=2.0**-126, mask=mask[None, None])


@pytest.mark.parametrize("scale", [1e-46, 1e-39, 2.0**-127, 8.6e37, 1e38, 2.4e38, 1e300, INF])
def test_scales_that_are_refused(scale: float) -> None:
    q, k, v = qkv("cpu", "float32", 3, 5)
    with pytest.raises(dlattn.UnsupportedError, match=r"softmax_scale is .*; accepted: "):
        dlattn.attention(q, k, v, softmax_scale=scale)


@pytest.mark.parametrize("softcap", [2.0**-101, 1e-46, 2.0**101, 1e38, 1e300])
def test_softcaps_that_are_refused(softcap: float) -> None:
    q, k, v = qkv("cpu", "float32", 3, 5)
    with pytest.raises(dlattn.UnsupportedError, match=r"softcap is .*; accepted: "):
        dlattn.attention(q, k, v, softcap=softcap)


@every_kernel
@every_dtype
@pytest.mark.parametrize("sink", [2.4e38, 3e38, -LOWEST, INF, -3e38, -INF, 1e9, math.nan])
def test_sinks(device: str, kernel: str, dtype: str, sink: float) -> None:
    sinks = torch.tensor([sink, 0.5], device=device)
    q, k, v = qkv(device, dtype, 130 if device == "cuda" else 60, 40)
    check(kernel, q, k, v, sinks=sinks)
    check(kernel, q, k, v, sinks=sinks, causal=True)  # with rows that see nothing
    check(kernel, q, k[:, :0], v[:, :0], sinks=sinks)


@every_kernel
@pytest.mark.parametrize("dtype", HALF)
def test_nan_and_inf_make_their_rows_nan(device: str, kernel: str, dtype: str) -> None:
    q, k, v = qkv(device, dtype)
    bias = torch.zeros(1, 1, q.shape[1], 320, device=device)
    bias[..., 3, 5], bias[..., 20, 300], bias[..., 9, 2] = math.nan, INF, -INF
    check(kernel, q, k, v, bias=bias)
    check(kernel, q, k, v, bias=bias, causal="top_left")  # (20, 300) is hidden
    check(kernel, q, k, v, alibi_slopes=torch.tensor([math.nan, 1.0], device=device))


# --- magnitudes of V -----------------------------------------------------------------------------


@every_kernel
@every_dtype
@pytest.mark.parametrize("exponent", [-60, -13, 14, 100])
def test_magnitudes_of_v(device: str, kernel: str, dtype: str, exponent: int) -> None:
    if dtype == "float16":
        exponent = max(-8, min(exponent, 13))
    q, k, v = qkv(device, dtype)
    v = (v.float() * 2.0**exponent).to(v.dtype)
    check(kernel, q, k, v)
    check(kernel, q, k, v, causal=True)
