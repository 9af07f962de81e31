"""Attention in plain NumPy, in any dtype: what `dlattn.reference` is made of.

Nothing here is fast or clever. It writes the definition down: scores, modifications of the scores,
masks, softmax, product with V; one head and a block of query rows at a time, so that memory stays
bounded.

What happens at the edges of the accepted values: a bias of -inf hides its key as a mask does, and
every finite bias is a score like any other. A finite score stays finite, so the sum of a score and
a bias saturates. ALiBi slopes count as at most 2^64, with their sign. A sink of +inf takes
the whole weight. NaN, and +inf as a score, make their row NaN.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dlattn._types import Causal, Layout, Window

Form = Literal["natural", "base2"]
Array = NDArray[Any]

MAX_SCORES = 1 << 22  # elements of the score matrix that are alive at a time


# A slope beyond it, infinite ones too, is taken as it: slope times distance stays within float32.
LARGEST_SLOPE = 2.0**64

FLOAT8 = "float8_e4m3fn"

_LOG2_E = math.log2(math.e)
_LARGEST = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}


def plain_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: str,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    layout: Layout = "bshd",
    out_dtype: str | None = None,
    form: Form = "natural",
    score_dtype: str = "",
) -> tuple[Array, Array]:
    """`out` and `lse` in the arithmetic of `dtype`; see `attention_reference` and what is by it."""
    if out_dtype is None:
        out_dtype = "bfloat16" if dtype == FLOAT8 else dtype
    check_layout(layout)
    compute: Any = np.float64 if dtype == "float64" else np.float32
    q, k, v = (to_float64(x).astype(compute) for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))

    batch_size, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    shift = shift_of(seqlen_q, seqlen_k, causal)
    full = (batch_size, num_heads, seqlen_q, seqlen_k)
    bias = None if bias is None else np.broadcast_to(to_float64(bias).astype(compute), full)
    mask = None if mask is None else np.broadcast_to(to_bool(mask), full)
    slopes = None if alibi_slopes is None else np.broadcast_to(to_float64(alibi_slopes), full[:2])
    slopes = None if slopes is None else np.clip(slopes, -LARGEST_SLOPE, LARGEST_SLOPE)
    sinks = None if sinks is None else to_float64(sinks).astype(compute)
    factors = _descales(q_descale, k_descale, batch_size, num_heads, num_heads_kv)
    v_factors = per_head(v_descale, batch_size, num_heads_kv)

    out = np.zeros((batch_size, num_heads, seqlen_q, head_dim_v), dtype=compute)
    lse = np.zeros((batch_size, num_heads, seqlen_q), dtype=compute)
    block = max(1, MAX_SCORES // max(1, seqlen_k))
    for b, h, start in np.ndindex(batch_size, num_heads, -(-seqlen_q // block)):
        rows = np.arange(start * block, min((start + 1) * block, seqlen_q))
        head_kv = h // (num_heads // num_heads_kv)
        allowed = allowed_keys(rows, seqlen_q, seqlen_k, causal=causal, window=window)
        if mask is not None:
            allowed &= mask[b, h, rows]
        if bias is not None:
            allowed &= ~np.isneginf(bias[b, h, rows])
        products = _products(q[b, h, rows], k[b, head_kv], dtype)
        score_mod: dict[str, Any] = {
            "scale": scale * float(factors[b, h]),
            "softcap": softcap,
            "alibi": None if slopes is None else (slopes[b, h], rows + shift),
            "bias": None if bias is None else bias[b, h, rows],
        }
        sink = compute(-np.inf) if sinks is None else sinks[h]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scores = np.where(allowed, _scores(products, 1.0, **score_mod), compute(-np.inf))
            if score_dtype not in ("", dtype_name(scores)):
                scores = _saturate(scores, score_dtype, np.isfinite(scores))
            probs, lse[b, h, rows] = _softmax(scores, sink)
            if form == "base2":
                scores = np.where(
                    allowed, _scores(products, _LOG2_E, **score_mod), compute(-np.inf)
                )
                # A row that base 2 cannot hold stays in natural units.
                holds = np.all((np.abs(scores) < _LARGEST[dtype_name(scores)]) | ~allowed, axis=1)
                probs2, lse2 = _softmax_base2(scores, sink)
                probs = np.where(holds[:, None], probs2, probs)
                lse[b, h, rows] = np.where(holds, lse2, lse[b, h, rows])
            result = round_probabilities(probs, dtype) @ v[b, head_kv]
            if v_descale is not None:
                # A row that sees nothing is 0, whatever the descale is.
                seen = np.any(allowed, axis=1, keepdims=True)
                result = np.where(seen, result * compute(v_factors[b, head_kv]), result)
            # Weights whose sum is rounded to more than 1 must not take V beyond its type.
            finite = np.isfinite(v[b, head_kv]).all() & ~np.isnan(result)
            out[b, h, rows] = _saturate(result, out_dtype, finite)
    return (np.swapaxes(out, 1, 2) if layout == "bshd" else out), lse


def per_head(values: Any, batch_size: int, heads: int) -> Array:
    """Values that broadcast to (batch, heads), as that; None: 1."""
    return np.broadcast_to(to_float64(1.0 if values is None else values), (batch_size, heads))


def _descales(
    q_descale: Any, k_descale: Any, batch_size: int, num_heads: int, num_heads_kv: int
) -> Array:
    """The factors of the products of each query head with its keys: (batch, num_heads).

    Those of q are given by head, or by KV head. A negative one is no factor of anything.
    """
    values = np.asarray(to_float64(1.0 if q_descale is None else q_descale))
    by_kv_head = values.ndim > 0 and values.shape[-1] == num_heads_kv
    group = num_heads // num_heads_kv
    of_q = per_head(values, batch_size, num_heads_kv if by_kv_head else num_heads)
    of_q = np.repeat(of_q, group, axis=1) if by_kv_head else of_q
    of_k = np.repeat(per_head(k_descale, batch_size, num_heads_kv), group, axis=1)
    return np.where((of_q >= 0.0) & (of_k >= 0.0), of_q * of_k, np.nan)


def _products(q: Array, k: Array, dtype: str) -> Array:
    """q kᵀ, of 8 bits with the accumulators of matrix units: 14 bits, cut off.

    Of 32 products and the sum so far each is cut 13 bits behind the largest exponent, and so is
    their sum (Hopper's; Ada's are like it; arXiv:2511.10909).
    """
    if dtype != FLOAT8:
        product: Array = q @ k.T
        return product

    def exponent(x: Array, least: int) -> Array:
        return np.maximum(np.where(x == 0, least, np.frexp(x)[1] - 1), least)

    sums = np.zeros((q.shape[0], k.shape[0]), dtype=np.float32)
    rows = max(1, MAX_SCORES // (8 * max(1, k.shape[0])))  # terms take 32 times the memory
    for first, d in np.ndindex(-(-q.shape[0] // rows), -(-q.shape[1] // 32)):
        at = slice(first * rows, (first + 1) * rows)
        a, b = q[at, None, 32 * d : 32 * d + 32], k[None, :, 32 * d : 32 * d + 32]
        terms = a * b
        scales = np.where(terms == 0, -100, exponent(a, -6) + exponent(b, -6))
        top = np.maximum(np.max(scales, axis=2), exponent(sums[at], -100))
        unit = np.ldexp(np.float32(1.0), top - 13)
        whole = np.trunc(terms / unit[..., None]).sum(axis=2) + np.trunc(sums[at] / unit)
        total = (whole * unit).astype(np.float32)
        sums[at] = (total.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32)
    return sums


def round_probabilities(probs: Array, dtype: str) -> Array:
    """Rows of probabilities as a plain implementation holds them for the product with V.

    In 8 bits relative to the row's largest, which counts 256, as FlashAttention-3 holds them.
    """
    if dtype != FLOAT8:
        return round_to(probs, dtype)
    top = np.max(probs, axis=1, initial=0.0, keepdims=True)
    unit = np.where(top == 0.0, 1.0, top / 256.0).astype(probs.dtype)
    return round_to(probs / unit, dtype) * unit


def _scores(
    products: Array,
    unit: float,
    *,
    scale: float,
    softcap: float,
    alibi: tuple[float, Array] | None,
    bias: Array | None,
) -> Array:
    """Scores of a block of rows times `unit`, by which every factor is multiplied first.

    `alibi` holds the head's slope and the positions of the rows.
    """
    compute = products.dtype.type
    if softcap > 0.0:
        scores = compute(softcap * unit) * np.tanh(compute(scale) * products / compute(softcap))
    else:
        scores = compute(scale * unit) * products
    if alibi is not None:
        slope, position = alibi
        distance = np.abs(position[:, None] - np.arange(products.shape[1])[None, :])
        scores = scores - compute(slope * unit) * distance.astype(compute)
    if bias is not None:
        finite = np.isfinite(scores) & np.isfinite(bias)
        scores = _saturate(scores + compute(unit) * bias, dtype_name(scores), finite)
    return scores


def _softmax(scores: Array, sink: Any) -> tuple[Array, Array]:
    """Softmax of each row with `sink` as one more logit, and the log of the denominator."""
    top = np.maximum(np.max(scores, axis=1, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0.0, top).astype(scores.dtype)
    weights = np.exp(scores - top[:, None])
    total = np.sum(weights, axis=1) + np.where(sink == top, 1.0, np.exp(sink - top))
    total = total.astype(scores.dtype)
    return weights / np.where(total == 0.0, 1.0, total)[:, None], top + np.log(total)


def _softmax_base2(scores: Array, sink: Any) -> tuple[Array, Array]:
    """The same of scores times log2(e). The sink joins in natural units, which hold it."""
    top = np.max(scores, axis=1, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top).astype(scores.dtype)
    weights = np.exp2(scores - top[:, None])
    total = np.sum(weights, axis=1)
    lse = ((top + np.log2(total)) * scores.dtype.type(math.log(2.0))).astype(scores.dtype)
    shares, lse = _softmax(lse[:, None], sink)
    return weights / np.where(total == 0.0, 1.0, total)[:, None] * shares, lse


def _saturate(values: Array, dtype: str, finite: Any) -> Array:
    """Round to `dtype`, without an overflow where the value is a `finite` one in exact numbers."""
    largest = _LARGEST[dtype]
    return round_to(np.where(finite, np.clip(values, -largest, largest), values), dtype)


def dtype_name(array: Any) -> str:
    """Name of the element type of an array of any framework: "float16", "bfloat16", ..."""
    dtype = array.dtype
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def to_float64(array: Any) -> Array:
    """The values of an array of any framework as float64 in NumPy."""
    if hasattr(array, "detach"):  # torch: NumPy knows neither its GPU tensors nor its bfloat16
        array = array.detach().double().cpu().numpy()
    elif hasattr(array, "get") and not isinstance(array, np.ndarray):  # CuPy
        array = array.get()
    return np.asarray(array).astype(np.float64)


def round_to(array: Array, dtype: str) -> Array:
    """Round values to the nearest one of `dtype`; the array's own type stays."""
    if array.dtype.name == dtype:
        return array
    if dtype == "bfloat16":
        # The upper 16 bits of a float32, rounded to nearest even.
        bits = array.astype(np.float32).view(np.uint32)
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(array.dtype)
    if dtype == "float16":
        # NumPy's own conversion is some thirty times slower for subnormals, multiples of 2^-24.
        subnormal = np.abs(array) < 2.0**-14
        with np.errstate(over="ignore"):  # to infinity
            normals = np.where(subnormal, 0, array).astype(np.float16).astype(array.dtype)
        return np.where(subnormal, np.rint(array * 2.0**24) * 2.0**-24, normals).astype(array.dtype)
    if dtype == FLOAT8:
        # Steps of 2^-3 of the power of two below, of 2^-9 at least; saturating at 448.
        exponent = np.maximum(np.frexp(array)[1] - 1, -6)
        step = np.ldexp(array.dtype.type(1.0), exponent - 3)
        return np.clip(np.rint(array / step) * step, -448.0, 448.0).astype(array.dtype)
    return array.astype(dtype).astype(array.dtype)


def allowed_keys(
    rows: Array,
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: Causal = False,
    window: Window = (None, None),
) -> Array:
    """Whether causality and window let query row i see key j: (len(rows), seqlen_k), bool."""
    position = rows[:, None] + shift_of(seqlen_q, seqlen_k, causal)
    key = np.arange(seqlen_k)[None, :]
    allowed = np.ones((len(rows), seqlen_k), dtype=bool)
    if causal:
        allowed &= key <= position
    left, right = window
    if left is not None:
        allowed &= key >= position - left
    if right is not None:
        allowed &= key <= position + right
    return allowed


def check_layout(layout: str) -> None:
    """Refuse an unknown layout."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}; accepted: 'bshd', 'bhsd'")


def shift_of(seqlen_q: int, seqlen_k: int, causal: Causal) -> int:
    """Query i stands at key position i + shift."""
    if causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError(f"causal is {causal!r}; accepted: False, True, 'bottom_right', 'top_left'")
    return 0 if causal == "top_left" else seqlen_k - seqlen_q


def to_bool(mask: Any) -> NDArray[np.bool_]:
    """A mask of any framework in NumPy."""
    return to_float64(mask).astype(bool)
