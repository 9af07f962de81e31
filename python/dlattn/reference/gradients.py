"""Gradients of attention in plain NumPy, in any dtype: what the backward pass is held to.

They are written down from the definition, one head and a block of query rows at a time, and share
nothing with the kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from dlattn._types import Causal, Layout, Window
from dlattn.reference.definition import (
    LARGEST_SLOPE,
    MAX_SCORES,
    Array,
    allowed_keys,
    check_layout,
    round_to,
    shift_of,
    to_bool,
    to_float64,
)


class ReferenceGradients(NamedTuple):
    """Gradients of the shapes of what they belong to; None: there is no such input."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dalibi_slopes: Array | None
    dsinks: Array | None


def attention_backward_reference(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any
) -> ReferenceGradients:
    """Gradients in float64; arguments mean what they mean to `dlattn.attention_backward`."""
    return plain_gradients(dout, q, k, v, out, lse, dtype="float64", **options)


def same_dtype_gradients(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dtype: str, **options: Any
) -> ReferenceGradients:
    """Gradients as a plain implementation in `dtype` computes them, in float32 or float64.

    Products accumulate in float32; probabilities and the gradients of scores are rounded to `dtype`
    before they are multiplied, and so are dq, dk and dv. In float32 and float64 everything is of
    that type.
    """
    return plain_gradients(dout, q, k, v, out, lse, dtype=dtype, **options)


def attention_varlen_backward_reference(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: Any = None,
    seqused_k: Any = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    layout: Layout = "bshd",
    dtype: str = "float64",
    **options: Any,
) -> ReferenceGradients:
    """Gradients of each of several sequences; rows that belong to none have zeros."""
    check_layout(layout)
    dout, q, k, v, out = (
        None if x is None else np.swapaxes(to_float64(x), 0, 1 if layout == "bhsd" else 0)
        for x in (dout, q, k, v, out)
    )
    lse, dlse = (None if x is None else to_float64(x) for x in (lse, dlse))
    starts_q, starts_k = (np.asarray(x).astype(int) for x in (cu_seqlens_q, cu_seqlens_k))
    lengths_k = np.diff(starts_k) if seqused_k is None else np.asarray(seqused_k).astype(int)
    full = (len(lengths_k), q.shape[1], max_seqlen_q, max_seqlen_k)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dbias = None if bias is None else np.zeros(_four(np.shape(bias)))
    dslopes = None if alibi_slopes is None else np.zeros(full[:2])
    dsinks = None if sinks is None else np.zeros(full[1])
    bias_shape = np.shape(bias)
    if bias is not None:
        bias = np.broadcast_to(to_float64(bias), full)
    if mask is not None:
        mask = np.broadcast_to(to_bool(mask), full)
    if alibi_slopes is not None:
        slopes = np.broadcast_to(to_float64(alibi_slopes), full[:2])
    for b, length_k in enumerate(lengths_k):
        rows = slice(starts_q[b], starts_q[b + 1])
        keys = slice(starts_k[b], starts_k[b] + length_k)
        part = (slice(b, b + 1), slice(None), slice(rows.stop - rows.start), slice(length_k))
        own = plain_gradients(
            *(None if dout is None else dout[None, rows], q[None, rows]),
            *(k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows]),
            dlse=None if dlse is None else dlse[None, :, rows],
            bias=None if bias is None else bias[part],
            mask=None if mask is None else mask[part],
            alibi_slopes=None if alibi_slopes is None else slopes[b : b + 1],
            sinks=sinks,
            dtype=dtype,
            **options,
        )
        dq[rows], dk[keys], dv[keys] = own.dq[0], own.dk[0], own.dv[0]
        if dbias is not None and own.dbias is not None:
            of_sequence = np.zeros((1, *full[1:]))
            of_sequence[0][part[1:]] = own.dbias[0]
            for dim in (1, 2, 3):
                if dbias.shape[dim] == 1:
                    of_sequence = np.sum(of_sequence, axis=dim, keepdims=True)
            dbias[b if dbias.shape[0] > 1 else 0] += of_sequence[0]
        if dslopes is not None and own.dalibi_slopes is not None:
            dslopes[b] = own.dalibi_slopes[0]
        if dsinks is not None and own.dsinks is not None:
            dsinks += own.dsinks
    if layout == "bhsd":
        dq, dk, dv = (np.swapaxes(x, 0, 1) for x in (dq, dk, dv))
    return ReferenceGradients(
        dq,
        dk,
        dv,
        None if dbias is None else dbias.reshape(bias_shape),
        None if dslopes is None else _of_slopes(dslopes, alibi_slopes),
        dsinks,
    )


def plain_gradients(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dtype: str,
    dlse: Any = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    layout: Layout = "bshd",
) -> ReferenceGradients:
    """Gradients in the arithmetic of `dtype`: products in float32 of operands rounded to it.

    out and lse are the forward pass's, or those of a whole of which k and v are a part. dout None
    counts as zeros.
    """
    check_layout(layout)
    compute: Any = np.float64 if dtype == "float64" else np.float32
    dout = np.zeros_like(to_float64(out)) if dout is None else dout
    given = [to_float64(x).astype(compute) for x in (q, k, v, out, dout)]
    if layout == "bshd":
        given = [np.swapaxes(x, 1, 2) for x in given]
    q, k, v, out, dout = given
    lse = to_float64(lse).astype(compute)
    batch_size, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    full = (batch_size, num_heads, seqlen_q, seqlen_k)
    scale = compute(1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale)
    biases = None if bias is None else np.broadcast_to(to_float64(bias).astype(compute), full)
    masks = None if mask is None else np.broadcast_to(to_bool(mask), full)
    slopes = None
    if alibi_slopes is not None:
        slopes = np.broadcast_to(to_float64(alibi_slopes).astype(compute), full[:2])
        slopes = np.clip(slopes, -LARGEST_SLOPE, LARGEST_SLOPE)
    delta = np.sum(dout * out, axis=3)
    if dlse is not None:
        delta = delta - to_float64(dlse).astype(compute)

    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dbias = None if bias is None else np.zeros(_four(np.shape(bias)), compute)
    dslopes = None if alibi_slopes is None else np.zeros(full[:2], compute)
    block = max(1, MAX_SCORES // max(1, seqlen_k))
    for b, h, start in np.ndindex(batch_size, num_heads, -(-seqlen_q // block)):
        rows = np.arange(start * block, min((start + 1) * block, seqlen_q))
        head_kv = h // (num_heads // num_heads_kv)
        allowed = allowed_keys(rows, seqlen_q, seqlen_k, causal=causal, window=window)
        if masks is not None:
            allowed &= masks[b, h, rows]
        if biases is not None:
            allowed &= ~np.isneginf(biases[b, h, rows])
        scores = scale * (q[b, h, rows] @ k[b, head_kv].T)
        slope_of_cap = np.ones_like(scores)
        if softcap > 0.0:
            bent = np.tanh(scores / compute(softcap))
            scores, slope_of_cap = compute(softcap) * bent, 1 - bent * bent
        position = rows + shift_of(seqlen_q, seqlen_k, causal)
        distance = np.abs(position[:, None] - np.arange(seqlen_k)[None, :]).astype(compute)
        if slopes is not None:
            scores = scores - slopes[b, h] * distance
        if biases is not None:
            scores = scores + np.where(allowed, biases[b, h, rows], 0)
        own_lse = lse[b, h, rows]
        # A row that sees nothing has lse = -inf, and no probabilities.
        seen = allowed & ~np.isneginf(own_lse)[:, None]
        # No score exceeds lse but by rounding, which at -1e9 is by 64.
        power = np.minimum(scores - np.where(seen, own_lse[:, None], 0), 0)
        probs = np.exp(np.where(seen, power, -np.inf))
        own_delta = np.where(np.any(seen, axis=1), delta[b, h, rows], 0)
        ds = probs * (dout[b, h, rows] @ v[b, head_kv].T - own_delta[:, None])
        dx = round_to(ds * slope_of_cap, dtype)
        dq[b, h, rows] = scale * (dx @ k[b, head_kv])
        dk[b, head_kv] += scale * (dx.T @ q[b, h, rows])
        dv[b, head_kv] += round_to(probs, dtype).T @ dout[b, h, rows]
        if dbias is not None:
            _add(dbias, ds, b, h, rows)
        if dslopes is not None:
            dslopes[b, h] -= np.sum(ds * distance)
    if layout == "bshd":
        dq, dk, dv = (np.swapaxes(x, 1, 2) for x in (dq, dk, dv))
    return ReferenceGradients(
        round_to(dq, dtype),
        round_to(dk, dtype),
        round_to(dv, dtype),
        None if dbias is None else dbias.reshape(np.shape(bias)),
        None if dslopes is None else _of_slopes(dslopes, alibi_slopes),
        None if sinks is None else _of_sinks(to_float64(sinks).astype(compute), lse, delta),
    )


def _of_sinks(sinks: Array, lse: Array, delta: Array) -> Array:
    """The share of each sink is exp(sink - lse), none of a row that sees neither it nor a key."""
    with np.errstate(invalid="ignore"):
        shares = np.exp(sinks[None, :, None] - lse)
    shares = np.where(np.isneginf(lse), 0, shares)
    total: Array = -np.sum(shares * delta, axis=(0, 2))
    return total


def _of_slopes(dslopes: Array, alibi_slopes: Any) -> Array:
    return dslopes if len(np.shape(alibi_slopes)) == 2 else np.sum(dslopes, axis=0)


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + tuple(shape)


def _add(dbias: Array, ds: Array, b: int, h: int, rows: Array) -> None:
    """Add the gradients of a block of scores to those of the bias that they share."""
    to = dbias[b if dbias.shape[0] > 1 else 0, h if dbias.shape[1] > 1 else 0]
    ds = np.sum(ds, axis=1, keepdims=True) if to.shape[1] == 1 else ds
    if to.shape[0] == 1:
        to += np.sum(ds, axis=0, keepdims=True)
    else:
        to[rows] += ds
