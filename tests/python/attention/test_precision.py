"""8-bit products of 16-bit inputs: `precision=` and `quantize_kv`, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dlattn

PRECISIONS = ("int8_fp8", "int8_fp16", "fp8")
DTYPES = (np.float16, ml_dtypes.bfloat16)

# Relative L2 errors that rounding q and k to 8 bits makes of noise, by simulation, and half as much
# again. Probabilities are not rounded on the CPU; v in e4m3 alone makes 0.023.
NOISE = {"int8_fp8": 0.045, "int8_fp16": 0.015, "fp8": 0.075}


def relative(out: Any, expected: np.ndarray) -> float:
    difference = np.asarray(out, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def inputs(
    rng: np.random.Generator,
    *,
    batch: int = 2,
    seqlen_q: int = 65,
    seqlen_k: int = 200,
    heads: int = 4,
    heads_kv: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: Any = np.float16,
) -> list[np.ndarray]:
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v or head_dim),
    )
    return [(rng.standard_normal(shape) + 0.2).astype(dtype) for shape in shapes]


def exact(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    seen: Any = True,
    bias: Any = 0.0,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64: out and lse."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + np.asarray(bias, np.float64)
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, column], -1)
        v = np.concatenate([v, np.zeros_like(v[..., :1, :])], -2)
    largest = scores.max(-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + largest)[..., 0]
    return (weights / np.where(total == 0, 1, total) @ v).transpose(0, 2, 1, 3), lse


def causal(seqlen_q: int, seqlen_k: int) -> np.ndarray:
    return np.arange(seqlen_k) <= np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(64, 64), (128, 128), (72, 40), (40, 128), (8, 1), (256, 256), (136, 200), (64, 160)],
)
def test_noise(precision: str, dtype: Any, head_dim: int, head_dim_v: int) -> None:
    rng = np.random.default_rng(head_dim)
    q, k, v = inputs(rng, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    out, lse = dlattn.attention(q, k, v, precision=precision, return_lse=True)
    expected, expected_lse = exact(q, k, v)
    assert out.dtype == q.dtype and out.shape == expected.shape
    assert relative(out, expected) < NOISE[precision]
    assert np.sqrt(np.mean((lse - expected_lse) ** 2)) < 0.05
    assert relative(out, expected) > 1e-3, "nothing was quantised"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("seqlen_k", [1, 9, 12, 63, 64, 65, 127, 128, 129, 503])
def test_ragged_lengths(precision: str, seqlen_k: int) -> None:
    rng = np.random.default_rng(seqlen_k)
    q, k, v = inputs(rng, seqlen_q=min(seqlen_k, 70), seqlen_k=seqlen_k)
    out = dlattn.attention(q, k, v, precision=precision, causal=True)
    expected, _ = exact(q, k, v, seen=causal(q.shape[1], seqlen_k))
    # Rows of few keys have no neighbours to average errors away.
    assert relative(out, expected) < 1.5 * NOISE[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_bias_and_mask(precision: str, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    q, k, v = inputs(rng, head_dim=160)
    bias = rng.standard_normal((4, 65, 200)).astype(dtype)
    bias[:, 3] = np.finfo(dtype).min  # of all keys of a row, which is not hidden by that
    bias[:, 5, ::2] = -np.inf
    mask = rng.random((65, 200)) < 0.8
    mask[7] = False
    out, lse = dlattn.attention(q, k, v, precision=precision, bias=bias, mask=mask, return_lse=True)
    expected, _ = exact(q, k, v, seen=mask, bias=bias)
    assert relative(out, expected) < NOISE[precision]
    assert (out[:, 7] == 0).all() and np.isneginf(lse[:, :, 7]).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_key_has_its_value(precision: str) -> None:
    """The only key has all the weight, so all that is lost is what e4m3 rounds of v."""
    rng = np.random.default_rng(3)
    q, k, v = inputs(rng, seqlen_k=1)
    out = dlattn.attention(q, k, v, precision=precision)
    group = q.shape[2] // v.shape[2]
    expected = np.repeat(v, group, 2).astype(np.float64)
    assert (np.abs(out - expected) <= np.maximum(np.abs(expected) / 16, 2.0**-9)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_all_keys_share_costs_nothing(precision: str) -> None:
    """A mean of k changes no softmax; lse has it."""
    rng = np.random.default_rng(4)
    q, k, v = inputs(rng, seqlen_k=700)
    shifted = (k + 20 * rng.standard_normal((1, 1, *k.shape[2:]))).astype(k.dtype)
    out, lse = dlattn.attention(q, shifted, v, precision=precision, return_lse=True)
    expected, expected_lse = exact(q, shifted, v)
    assert relative(out, expected) < NOISE[precision]
    assert np.sqrt(np.mean((lse - expected_lse) ** 2)) < 0.05
    assert np.abs(expected_lse).max() > 20


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_column_that_carries_all(precision: str) -> None:
    rng = np.random.default_rng(5)
    q, k, v = inputs(rng, head_dim=128, seqlen_k=700)
    for x in (q, k):
        x[..., 7] *= 8
    out = dlattn.attention(q, k, v, precision=precision)
    assert relative(out, exact(q, k, v)[0]) < NOISE[precision] * 1.5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [1.0, -3.5, 448.0])
def test_constant_values_are_exact(precision: str, value: float) -> None:
    rng = np.random.default_rng(6)
    q, k, v = inputs(rng, seqlen_k=300)
    v[...] = value
    out = dlattn.attention(q, k, v, precision=precision)
    assert np.abs(np.asarray(out, np.float64) / value - 1).max() < 2e-3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mask_window_and_sinks(precision: str) -> None:
    rng = np.random.default_rng(7)
    q, k, v = inputs(rng)
    sinks = rng.standard_normal(q.shape[2]).astype(np.float32)
    mask = rng.random((2, 1, q.shape[1], k.shape[1])) < 0.7
    mask[0, 0, 5] = False
    seen = mask & causal(q.shape[1], k.shape[1])
    for given in (None, sinks):
        out, lse = dlattn.attention(
            q, k, v, mask=mask, causal=True, sinks=given, precision=precision, return_lse=True
        )
        expected, expected_lse = exact(q, k, v, seen=seen, sinks=given)
        assert relative(out, expected) < NOISE[precision]
        assert (out[0, 5] == 0).all()
        np.testing.assert_array_equal(
            lse[0, :, 5], -np.inf if given is None else given.astype(np.float32)
        )
        finite = np.isfinite(expected_lse)
        assert np.sqrt(np.mean((lse[finite] - expected_lse[finite]) ** 2)) < 0.05


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sinks_at_the_extremes(precision: str) -> None:
    rng = np.random.default_rng(8)
    q, k, v = inputs(rng)
    sinks = np.array([np.inf, -np.inf, np.nan, 3e38], np.float32)
    out, lse = dlattn.attention(q, k, v, sinks=sinks, precision=precision, return_lse=True)
    plain = dlattn.attention(q, k, v, precision=precision)
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == np.inf).all()
    np.testing.assert_array_equal(out[:, :, 1], plain[:, :, 1])
    assert np.isnan(out[:, :, 2]).all() and np.isnan(lse[:, 2]).all()
    assert (out[:, :, 3] == 0).all() and (lse[:, 3] == np.float32(3e38)).all()
    # Beside a value that is NaN, and of rows that see nothing.
    v[:, 0] = np.nan
    out, _ = dlattn.attention(q, k, v, sinks=sinks, precision=precision, return_lse=True)
    assert (out[:, :, 0] == 0).all() and np.isnan(out[:, :, 1]).all()
    mask = np.zeros((1, 1), bool)
    out, lse = dlattn.attention(
        q, k, v, sinks=sinks, mask=mask, precision=precision, return_lse=True
    )
    np.testing.assert_array_equal(lse[:, :, 0], np.broadcast_to(sinks, lse.shape[:2]))
    assert (out[:, :, [0, 1, 3]] == 0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_kept_keys_give_the_same_bits(precision: str, layout: str) -> None:
    rng = np.random.default_rng(9)
    q, k, v = inputs(rng, head_dim=80)
    if layout == "bhsd":
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    options = {"causal": True, "return_lse": True, "layout": layout}
    out, lse = dlattn.attention(q, k, v, precision=precision, **options)
    kv = dlattn.quantize_kv(k, v, precision=precision, layout=layout)
    assert (kv.precision, kv.batch_size, kv.seqlen_k, kv.total_k) == (precision, 2, 200, None)
    assert (kv.num_heads_kv, kv.head_dim, kv.head_dim_v) == (2, 80, 80)
    assert kv.nbytes == np.asarray(kv.buffer).nbytes
    k[...], v[...] = np.nan, np.nan
    for given in (None, precision):
        kept = dlattn.attention(q, kv, None, precision=given, **options)
        np.testing.assert_array_equal(kept[0], out)
        np.testing.assert_array_equal(kept[1], lse)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_sequences_are_those_alone(precision: str) -> None:
    rng = np.random.default_rng(10)
    lengths_q, lengths_k, used = [5, 0, 70, 33], [130, 40, 64, 200], [100, 40, 0, 200]
    cu_q = np.cumsum([0, *lengths_q]).astype(np.int32)
    cu_k = np.cumsum([0, *lengths_k]).astype(np.int32)
    q, k, v = inputs(rng, batch=1, seqlen_q=cu_q[-1], seqlen_k=cu_k[-1])
    q, k, v = q[0], k[0], v[0]
    for b, n in enumerate(used):  # unused keys are not read
        k[cu_k[b] + n : cu_k[b + 1]] = np.nan
        v[cu_k[b] + n : cu_k[b + 1]] = np.nan
    seqused = np.array(used, np.int32)
    lengths = {"seqused_k": seqused, "causal": True, "return_lse": True}
    out, lse = dlattn.attention_varlen(q, k, v, cu_q, cu_k, 70, 200, precision=precision, **lengths)
    kv = dlattn.quantize_kv(
        k, v, precision=precision, cu_seqlens_k=cu_k, max_seqlen_k=200, seqused_k=seqused
    )
    kept, _ = dlattn.attention_varlen(q, kv, None, cu_q, cu_k, 70, 200, **lengths)
    np.testing.assert_array_equal(kept, out)
    for b, n in enumerate(used):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b] + n)
        alone, alone_lse = dlattn.attention(
            q[None, rows], k[None, keys], v[None, keys], precision=precision,
            causal=True, return_lse=True, batch_invariant=True,
        )  # fmt: skip
        np.testing.assert_allclose(out[rows], alone[0], atol=2e-3)
        np.testing.assert_allclose(lse[:, rows], alone_lse[0], atol=2e-3)
    assert (out[cu_q[2] : cu_q[3]] == 0).all() and (lse[:, cu_q[2] : cu_q[3]] == -np.inf).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_strides_are_taken_as_they_are(precision: str) -> None:
    rng = np.random.default_rng(11)
    q, k, v = inputs(rng)
    out = dlattn.attention(q, k, v, precision=precision)
    holder = np.full((2, 200, 3, 131), np.nan, np.float16)
    views = holder[:, :, :2, 1:65], holder[:, :, 1:, 66:130]
    apart = np.full((2, 200, 2, 2, 66), np.nan, np.float16)
    apart[:, :, 0, :, :64], apart[:, :, 1, :, 2:] = k, v
    strided = dlattn.attention(
        q, apart[:, :, 0, :, :64], apart[:, :, 1, :, 2:], precision=precision
    )
    np.testing.assert_array_equal(strided, out)
    assert views[0].shape == k.shape


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite(bad: float) -> None:
    """They reach the rows that see their block (int8) or their key (fp8), and no other."""
    rng = np.random.default_rng(12)
    for precision, first in (("int8_fp8", 64), ("fp8", 100)):
        q, k, v = inputs(rng, seqlen_q=200)
        k[0, 100, 1, 3] = bad
        out = np.asarray(dlattn.attention(q, k, v, causal=True, precision=precision), np.float64)
        assert np.isfinite(out[:, :, :2]).all() and np.isfinite(out[1]).all()
        assert np.isfinite(out[0, :first, 2:]).all()
        assert np.isnan(out[0, 100:, 2:]).all()
        q, k, v = inputs(rng, seqlen_q=200)
        v[0, 100, 1, 3] = bad
        out = np.asarray(dlattn.attention(q, k, v, causal=True, precision=precision), np.float64)
        assert np.isnan(out[0, 100:, 2:, 3]).all()
        assert np.isfinite(np.delete(out, 3, -1)).all()
        q, k, v = inputs(rng)
        q[0, 7, 0, 3] = bad
        out = np.asarray(dlattn.attention(q, k, v, precision="int8_fp8"), np.float64)
        assert np.isnan(out[0, 7, 0]).all()
        assert np.isfinite(np.delete(out, 7, 1)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_magnitudes_of_bfloat16(precision: str) -> None:
    rng = np.random.default_rng(13)
    q, k, v = inputs(rng, dtype=ml_dtypes.bfloat16)
    plain = np.asarray(dlattn.attention(q, k, v, precision=precision), np.float64)
    for power in (-100, 90):
        big = (q.astype(np.float32) * 2.0**power).astype(q.dtype)
        small = (k.astype(np.float32) * 2.0**-power).astype(q.dtype)
        values = (v.astype(np.float32) * 2.0**power).astype(q.dtype)
        out = np.asarray(dlattn.attention(big, small, values, precision=precision), np.float64)
        assert relative(out * 2.0**-power, plain) < 1e-2


def test_zeros() -> None:
    """A key and a query of zeros have a score of 0, and out is the mean of v."""
    rng = np.random.default_rng(14)
    for precision in PRECISIONS:
        q, k, v = inputs(rng)
        for x in (q, k):
            plain = [y.copy() for y in (q, k, v)]
            (plain[0] if x is q else plain[1])[...] = 0
            out = dlattn.attention(*plain, precision=precision)
            expected, _ = exact(*plain)
            assert relative(out, expected) < 0.1
        v[...] = 0
        assert (dlattn.attention(q, k, v, precision=precision) == 0).all()


def refused(match: str, *args: Any, error: type = dlattn.UnsupportedError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        dlattn.attention(*args, **options)


def test_refusals() -> None:
    rng = np.random.default_rng(15)
    q, k, v = inputs(rng)
    accepted = '"int8_fp8", "int8_fp16" or "fp8", or None'
    refused(f"precision is 'int4'; accepted: {accepted}", q, k, v, precision="int4")
    refused(f"precision is of type int; accepted: {accepted}", q, k, v, precision=8,
            error=TypeError)  # fmt: skip
    wrong: list[tuple[Any, str, type]] = [
        ("int4", "'int4'", dlattn.UnsupportedError),
        (8, "of type int", TypeError),
        (None, "None", dlattn.UnsupportedError),
    ]
    for value, shown, error in wrong:  # keys are quantised in some precision
        with pytest.raises(error, match=f'^precision is {shown}; accepted: .* or "fp8"$'):
            dlattn.quantize_kv(k, v, precision=value)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    refused("precision is int8_fp8 with q of float32; accepted: with float16 or bfloat16", *wide,
            precision="int8_fp8")  # fmt: skip
    refused("softcap is given with precision fp8; accepted: none", q, k, v, precision="fp8",
            softcap=5.0)  # fmt: skip
    slopes = np.ones(4, np.float32)
    refused("alibi_slopes is given with precision", q, k, v, precision="fp8", alibi_slopes=slopes)
    large = inputs(rng, head_dim=264)
    refused("head_dim is 264; accepted: 1 to 256 with precision fp8", *large, precision="fp8")
    values = inputs(rng, head_dim_v=264)
    refused("head_dim of v is 264; accepted: 1 to 256", *values, precision="fp8")
    kv = dlattn.quantize_kv(k, v)
    refused('precision is "fp8"; accepted: None or "int8_fp8", which k is', q, kv, None,
            precision="fp8")  # fmt: skip
    refused("v is of type .*; accepted: None, as k is a QuantizedKV", q, kv, v, error=TypeError)
    refused("batch_size is 2; accepted: 1, that of q", q[:1], kv, None)
    refused("head_dim is 64; accepted: 40, that of q", q[..., :40], kv, None)
    refused("with q of float32", q.astype(np.float32), kv, None)
    cu = np.array([0, 65], np.int32)
    with pytest.raises(dlattn.UnsupportedError, match="quantised with fixed length; accepted"):
        dlattn.attention_varlen(q[0], kv, None, cu, cu, 65, 65)
    assert not dlattn.supported(q, k, v, precision="fp8", softcap=1.0)
    assert dlattn.supported(q, kv, None)
    assert "head_dim_tile" not in dlattn.plan(q, k, v, precision="int8_fp8").text


def packed_keys() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(18)
    q = rng.standard_normal((18, 4, 64)) + 0.5
    k, v = (rng.standard_normal((200, 2, 64)) + 0.5 for _ in range(2))
    return q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)


def test_kept_keys_of_other_sequences() -> None:
    """Neither of another number of them than k was quantised with, nor of other keys."""
    q, k, v = packed_keys()

    def lengths(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    used = lengths(50, 100)
    kept = {"cu_seqlens_k": lengths(0, 100, 200), "max_seqlen_k": 100}
    kv = dlattn.quantize_kv(k, v, **kept)
    part = dlattn.quantize_kv(k, v, **kept, seqused_k=used)
    two, three = lengths(0, 9, 18), lengths(0, 9, 18, 18)
    number = ", the number of sequences of cu_seqlens_q"
    cases: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
        ("k: batch_size is 2; accepted: 3" + number, kv, (three, lengths(0, 100, 200, 200)), {}),
        ("k: batch_size is 2; accepted: 1" + number, kv, (lengths(0, 18), lengths(0, 100)), {}),
        ("max_seqlen_k is 101; accepted: up to 100, which k is quantised with", kv,
         (two, lengths(0, 100, 200)), {"max_seqlen_k": 101}),
        (r"cu_seqlens_k\[1\] is 110; accepted: 100, which k is quantised with", kv,
         (two, lengths(0, 110, 200)), {"max_seqlen_k": 100}),
        (r"seqused_k is None and sequence 0 has 100 keys; accepted: up to 50, the keys", part,
         (two, lengths(0, 100, 200)), {}),
        (r"seqused_k\[0\] is 51; accepted: up to 50, the keys that k is quantised with", part,
         (two, lengths(0, 100, 200)), {"seqused_k": lengths(51, 100)}),
    ]  # fmt: skip
    for match, given, cu_seqlens, options in cases:
        arguments = {"max_seqlen_q": 18, "max_seqlen_k": 100, **options}
        for function in (dlattn.attention_varlen, dlattn.plan):
            with pytest.raises(dlattn.UnsupportedError, match=match):
                function(q, given, None, *cu_seqlens, **arguments)
        assert not dlattn.supported(q, given, None, *cu_seqlens, **arguments)
    # Fewer keys of each sequence than it was quantised with are its first ones.
    options = {"max_seqlen_q": 9, "max_seqlen_k": 100, "seqused_k": used}
    fewer = dlattn.attention_varlen(q, kv, None, two, kept["cu_seqlens_k"], **options)
    for b, n in enumerate(used):
        rows, keys = slice(9 * b, 9 * b + 9), slice(100 * b, 100 * b + n)
        expected, _ = exact(q[None, rows], k[None, keys], v[None, keys])
        assert relative(fewer[rows], expected[0]) < 0.1


def test_key_lengths_that_quantize_kv_did_not_make() -> None:
    import dataclasses

    q, k, v = packed_keys()
    cu_q, cu_k = np.array([0, 9, 18], np.int32), np.array([0, 100, 200], np.int32)
    kv = dlattn.quantize_kv(k, v, cu_seqlens_k=cu_k, max_seqlen_k=100)
    out = dlattn.attention_varlen(q, kv, None, cu_q, cu_k, 9, 100)
    unknown = dataclasses.replace(kv, key_lengths=None)
    np.testing.assert_array_equal(
        dlattn.attention_varlen(q, unknown, None, cu_q, cu_k, 9, 100), out
    )
    for lengths, error, match in (
        (b"", dlattn.UnsupportedError, "key_lengths of k has 0 bytes; accepted: 20"),
        (3, TypeError, "key_lengths of k is of type int; accepted: bytes or None"),
    ):
        wrong = dataclasses.replace(kv, key_lengths=lengths)
        with pytest.raises(error, match=match):
            dlattn.attention_varlen(q, wrong, None, cu_q, cu_k, 9, 100)


def test_a_buffer_that_is_too_small() -> None:
    import dataclasses

    rng = np.random.default_rng(16)
    q, k, v = inputs(rng)
    kv = dlattn.quantize_kv(k, v)
    short = dataclasses.replace(kv, buffer=kv.buffer[:-1])
    refused("buffer of k has 1 dimension.s. and .* bytes; accepted: one of at least", q, short,
            None)  # fmt: skip
    longer = dataclasses.replace(kv, seqlen_k=2000)
    refused("buffer of k has", q, longer, None)


def test_quantize_kv_refusals() -> None:
    rng = np.random.default_rng(17)
    _, k, v = inputs(rng)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("precision is None; accepted", {"precision": None}),
        ("cu_seqlens_k is None; accepted: both", {"max_seqlen_k": 3}),
        ("max_seqlen_k is None; accepted: both", {"cu_seqlens_k": np.array([0, 1], np.int32)}),
        ("seqused_k is given without", {"seqused_k": np.array([0], np.int32)}),
    ]
    for match, options in cases:
        with pytest.raises(dlattn.UnsupportedError, match=match):
            dlattn.quantize_kv(k, v, **options)
    with pytest.raises(dlattn.UnsupportedError, match=r"v: shape is .*; accepted: that of k"):
        dlattn.quantize_kv(k, v[:, :-1])
    with pytest.raises(dlattn.UnsupportedError, match="dtype is float32; accepted: float16"):
        dlattn.quantize_kv(k.astype(np.float32), v.astype(np.float32))
    cu = np.array([0, 300], np.int32)
    with pytest.raises(dlattn.UnsupportedError, match=r"cu_seqlens_k\[1\] is 300; accepted"):
        dlattn.quantize_kv(k[0], v[0], cu_seqlens_k=cu, max_seqlen_k=300)
