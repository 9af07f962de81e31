"""Attention in plain NumPy: the float64 reference, and the error that a correct result may have.

Nothing here is fast or clever. The reference writes the definition down: scores, modifications of
the scores, masks, softmax, product with V; one head and a block of query rows at a time, so
that memory stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Causal = bool | Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
Layout = Literal["bshd", "bhsd"]
Array = NDArray[Any]

_MAX_SCORES = 1 << 22  # elements of the score matrix that are alive at a time

# The absolute term of the bound, relative to the largest magnitude of the result (at least 1).
# The plain computation is exact where a row sees one key; nothing can be held to twice nothing.
ABSOLUTE_TERM = {"float16": 1e-5, "bfloat16": 1e-4, "float32": 2e-6, "float64": 1e-14}


class Bound(NamedTuple):
    """Largest error that a correct result may have."""

    out: float
    lse: float


def attention_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    layout: Layout = "bshd",
) -> tuple[Array, Array]:
    """Attention in float64; arguments mean what they mean to `dlattn.attention`.

    Returns `out`, in the layout of q, and `lse` of shape (batch, num_heads, seqlen_q).
    """
    return _attention(
        q,
        k,
        v,
        dtype="float64",
        causal=causal,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        layout=layout,
    )


def same_dtype_reference(
    q: Any, k: Any, v: Any, *, dtype: str | None = None, **options: Any
) -> tuple[Array, Array]:
    """What a plain implementation in `dtype` computes (default: the dtype of q).

    Products accumulate in float32, as matrix units do; scores and softmax are float32, the
    probabilities are rounded to `dtype` before they meet V, and so is the result. In float32 and
    float64 everything is of that type. `out` is returned as float32 (float64 for float64), holding
    values of `dtype`.
    """
    return _attention(q, k, v, dtype=dtype or dtype_name(q), **options)


def bound_of(dtype: str, plain_error: float, largest: float, allowance: float = 0.0) -> float:
    """The largest error that a correct result may have: the one rule that all checks go by.

    Twice the error of the plain same-dtype computation, and, as that may be right by luck, what
    `allowance` says or a tiny term relative to the result's largest magnitude, whichever is more.
    """
    return 2 * plain_error + max(allowance, ABSOLUTE_TERM[dtype] * max(1.0, largest))


def error_bound(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: str | None = None,
    expected: tuple[Array, Array] | None = None,
    **options: Any,
) -> Bound:
    """How far off the results of a problem may be, by the rule of `bound_of`.

    `expected` is the result of `attention_reference`, computed here if it is not given.
    """
    dtype = dtype or dtype_name(q)
    want_out, want_lse = expected or attention_reference(q, k, v, **options)
    out, lse = same_dtype_reference(q, k, v, dtype=dtype, **options)
    lse_dtype = dtype if dtype == "float64" else "float32"
    return Bound(
        out=bound_of(dtype, max_error(out, want_out), _magnitude(want_out)),
        lse=bound_of(lse_dtype, max_error(lse, want_lse), _magnitude(want_lse)),
    )


def max_error(actual: Any, expected: Any) -> float:
    """Largest absolute difference.

    Equal infinities do not differ; a NaN anywhere is an infinite error.
    """
    a, e = to_float64(actual), to_float64(expected)
    if a.shape != e.shape:
        raise ValueError(f"shapes differ: {a.shape} and {e.shape}")
    if a.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        error = np.where(a == e, 0.0, np.abs(a - e))
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def attention_varlen_reference(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Any = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    layout: Layout = "bshd",
    **options: Any,
) -> tuple[Array, Array]:
    """Attention over packed sequences, in float64.

    Sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1]. q is (total_q, num_heads, head_dim), k
    and v are (total_k, num_heads_kv, .); returns `out` (total_q, num_heads, head_dim_v) and `lse`
    (num_heads, total_q). Every sequence is a problem of its own, with its own shift; bias and mask
    broadcast to (batch, num_heads, max_seqlen_q, max_seqlen_k). In the layout "bhsd" the heads of
    q, k, v and out come first.
    """
    _check_layout(layout)
    q, k, v = to_float64(q), to_float64(k), to_float64(v)
    if layout == "bhsd":
        q, k, v = (np.swapaxes(x, 0, 1) for x in (q, k, v))
    starts_q = [int(n) for n in np.asarray(cu_seqlens_q)]
    starts_k = [int(n) for n in np.asarray(cu_seqlens_k)]
    batch_size, num_heads = len(starts_q) - 1, q.shape[1]
    lengths_q = [starts_q[b + 1] - starts_q[b] for b in range(batch_size)]
    lengths_k = [starts_k[b + 1] - starts_k[b] for b in range(batch_size)]
    if seqused_k is not None:
        lengths_k = [int(n) for n in np.asarray(seqused_k)]
    shape = (
        batch_size,
        num_heads,
        max(lengths_q, default=0) if max_seqlen_q is None else max_seqlen_q,
        max(lengths_k, default=0) if max_seqlen_k is None else max_seqlen_k,
    )
    bias = None if bias is None else np.broadcast_to(to_float64(bias), shape)
    mask = None if mask is None else np.broadcast_to(np.asarray(mask), shape)
    if alibi_slopes is not None:
        alibi_slopes = np.broadcast_to(to_float64(alibi_slopes), shape[:2])

    out = np.zeros((q.shape[0], num_heads, v.shape[2]))
    lse = np.full((num_heads, q.shape[0]), -np.inf)
    for b in range(batch_size):
        rows = slice(starts_q[b], starts_q[b] + lengths_q[b])
        keys = slice(starts_k[b], starts_k[b] + lengths_k[b])
        of_sequence = (slice(b, b + 1), slice(None), slice(lengths_q[b]), slice(lengths_k[b]))
        part_out, part_lse = attention_reference(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            bias=None if bias is None else bias[of_sequence],
            mask=None if mask is None else mask[of_sequence],
            alibi_slopes=None if alibi_slopes is None else alibi_slopes[b],
            **options,
        )
        out[rows] = part_out[0]
        lse[:, rows] = part_lse[0]
    return (np.swapaxes(out, 0, 1) if layout == "bhsd" else out), lse


def merge_states_reference(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: Layout = "bshd"
) -> tuple[Array, Array]:
    """Merge partial results over disjoint sets of keys, in float64.

    A part with lse = -inf saw no key and contributes nothing, whatever its out holds.
    """
    all_outs = np.stack([to_float64(out) for out in outs])
    all_lses = np.stack([to_float64(lse) for lse in lses])
    top = np.max(all_lses, axis=0)
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(all_lses - top)
    total = np.sum(weights, axis=0)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    shares = weights / np.where(total == 0.0, 1.0, total)
    if layout == "bshd":  # lse has the heads before the rows, out after them
        shares = np.swapaxes(shares, -1, -2)
    shares = shares[..., None]
    return np.sum(np.where(shares == 0.0, 0.0, shares * all_outs), axis=0), lse


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
        normals = np.where(subnormal, 0, array).astype(np.float16).astype(array.dtype)
        return np.where(subnormal, np.rint(array * 2.0**24) * 2.0**-24, normals).astype(array.dtype)
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
    position = rows[:, None] + _shift(seqlen_q, seqlen_k, causal)
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


def _check_layout(layout: str) -> None:
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}; accepted: 'bshd', 'bhsd'")


def _shift(seqlen_q: int, seqlen_k: int, causal: Causal) -> int:
    """Query i stands at key position i + shift."""
    if causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError(f"causal is {causal!r}; accepted: False, True, 'bottom_right', 'top_left'")
    return 0 if causal == "top_left" else seqlen_k - seqlen_q


def _attention(
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
    layout: Layout = "bshd",
) -> tuple[Array, Array]:
    _check_layout(layout)
    compute: Any = np.float64 if dtype == "float64" else np.float32
    q, k, v = (to_float64(x).astype(compute) for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))

    batch_size, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = compute(1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale)
    shift = _shift(seqlen_q, seqlen_k, causal)
    full = (batch_size, num_heads, seqlen_q, seqlen_k)
    bias = None if bias is None else np.broadcast_to(to_float64(bias).astype(compute), full)
    mask = None if mask is None else np.broadcast_to(_to_bool(mask), full)
    slopes = None if alibi_slopes is None else np.broadcast_to(to_float64(alibi_slopes), full[:2])
    slopes = None if slopes is None else slopes.astype(compute)
    sinks = None if sinks is None else to_float64(sinks).astype(compute)

    out = np.zeros((batch_size, num_heads, seqlen_q, head_dim_v), dtype=compute)
    lse = np.zeros((batch_size, num_heads, seqlen_q), dtype=compute)
    block = max(1, _MAX_SCORES // max(1, seqlen_k))
    for b, h, start in np.ndindex(batch_size, num_heads, -(-seqlen_q // block)):
        rows = np.arange(start * block, min((start + 1) * block, seqlen_q))
        head_kv = h // (num_heads // num_heads_kv)
        scores = scale * (q[b, h, rows] @ k[b, head_kv].T)
        if softcap > 0.0:
            scores = compute(softcap) * np.tanh(scores / compute(softcap))
        if slopes is not None:
            distance = np.abs(rows[:, None] + shift - np.arange(seqlen_k)[None, :])
            scores = scores - slopes[b, h] * distance.astype(compute)
        if bias is not None:
            scores = scores + bias[b, h, rows]
        allowed = allowed_keys(rows, seqlen_q, seqlen_k, causal=causal, window=window)
        if mask is not None:
            allowed &= mask[b, h, rows]
        scores = np.where(allowed, scores, compute(-np.inf))
        sink = compute(-np.inf) if sinks is None else sinks[h]
        probs, lse[b, h, rows] = _softmax(scores, sink)
        out[b, h, rows] = round_to(round_to(probs, dtype) @ v[b, head_kv], dtype)
    return (np.swapaxes(out, 1, 2) if layout == "bshd" else out), lse


def _softmax(scores: Array, sink: Any) -> tuple[Array, Array]:
    """Softmax of each row with `sink` as one more logit, and the log of the denominator."""
    top = np.maximum(np.max(scores, axis=1, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0.0, top).astype(scores.dtype)
    weights = np.exp(scores - top[:, None])
    total = np.sum(weights, axis=1) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return weights / np.where(total == 0.0, 1.0, total).astype(scores.dtype)[:, None], lse


def _to_bool(mask: Any) -> NDArray[np.bool_]:
    return to_float64(mask).astype(bool)


def _magnitude(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(np.max(finite)) if finite.size else 0.0
