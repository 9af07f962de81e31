"""Attention in plain NumPy: the float64 reference, and the error that a correct result may have.

The definition itself, and what holds at the edges of the accepted values, is in `definition.py`,
which also computes what a plain implementation in another dtype would make of the same problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlattn.reference.definition import (
    LARGEST_SLOPE,
    Array,
    Causal,
    Form,
    Layout,
    Window,
    allowed_keys,
    check_layout,
    dtype_name,
    per_head,
    plain_attention,
    round_to,
    to_bool,
    to_float64,
)
from dlattn.reference.gradients import (
    ReferenceGradients,
    attention_backward_reference,
    attention_varlen_backward_reference,
    same_dtype_gradients,
)

__all__ = [
    "ABSOLUTE_TERM",
    "LARGEST_SLOPE",
    "BiasRange",
    "Bound",
    "ReferenceGradients",
    "allowed_keys",
    "attention_backward_reference",
    "attention_reference",
    "attention_varlen_backward_reference",
    "attention_varlen_reference",
    "attention_with_kvcache_reference",
    "bias_range",
    "bound_of",
    "dtype_name",
    "error_bound",
    "kvcache_problems",
    "max_error",
    "merge_states_reference",
    "round_to",
    "same_dtype_gradients",
    "same_dtype_reference",
    "to_float64",
]

# The absolute term of the bound, relative to the largest magnitude of the result (at least 1).
# The plain computation is exact where a row sees one key; nothing can be held to twice nothing.
ABSOLUTE_TERM = {
    "float16": 1e-5,
    "bfloat16": 1e-4,
    "float32": 2e-6,
    "float64": 1e-14,
    "float8_e4m3fn": 1e-4,
}


class Bound(NamedTuple):
    """Largest error that a correct result may have."""

    out: float
    lse: float


class BiasRange(NamedTuple):
    """The bias of the keys that a row may attend to; each (batch, num_heads, seqlen_q).

    Without such a key: inf, -inf, inf. A row whose keys share one bias has low == high.
    """

    low: Array
    high: Array
    least: Array  # the smallest magnitude


def attention_reference(
    q: Any, k: Any, v: Any, *, score_dtype: str = "float64", **options: Any
) -> tuple[Array, Array]:
    """Attention in float64; arguments mean what they mean to `dlattn.attention`.

    `options` are those arguments of `dlattn.attention` that change the result, from causal to
    layout. Returns `out`, in the layout of q, and `lse` of shape (batch, num_heads, seqlen_q).

    With `score_dtype` "float32" every score is rounded to it once, and what follows is float64:
    where all keys of a row share a bias that dwarfs their scores, `out` is the mean of their V.
    """
    return plain_attention(q, k, v, dtype="float64", score_dtype=score_dtype, **options)


def same_dtype_reference(
    q: Any, k: Any, v: Any, *, dtype: str | None = None, form: Form = "natural", **options: Any
) -> tuple[Array, Array]:
    """Attention as a plain implementation in `dtype` computes it (default: the dtype of q).

    Products accumulate in float32, as matrix units do; scores and softmax are float32, the
    probabilities are rounded to `dtype` before they meet V, and so is the result. In float32 and
    float64 everything is of that type. In float8_e4m3fn the products of q and k accumulate in 14
    bits, the probabilities are rounded relative to the row's largest, which counts 256, and the
    result is of `out_dtype`, bfloat16 unless told.
    `out` is returned as float32 (float64 for float64), holding values of `dtype` or `out_dtype`.

    `form` says how scores are formed: "natural", or in "base2", times log2(e) for exp2. The two
    differ by the rounding of the scores, which counts where every score of a row is large.
    """
    return plain_attention(q, k, v, dtype=dtype or dtype_name(q), form=form, **options)


def bound_of(dtype: str, plain_error: float, largest: float, allowance: float = 0.0) -> float:
    """The largest error that a correct result may have: the one rule that all checks go by.

    Twice the error of the plain same-dtype computation, and, as that may be right by luck, what
    `allowance` says or a tiny term relative to the result's largest magnitude, whichever is more.
    Raises ValueError where the plain computation has no finite error: it bounds nothing.
    """
    if not (math.isfinite(plain_error) and math.isfinite(largest)):
        raise ValueError(
            f"the plain computation's error is {plain_error}, of results up to {largest}; "
            "accepted: finite numbers"
        )
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
    page_table: Any = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    layout: Layout = "bshd",
    **options: Any,
) -> tuple[Array, Array]:
    """Attention over sequences of several lengths (varlen), in float64.

    Sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1]; rows that none owns are 0 and -inf in
    the result. q is (total_q, num_heads, head_dim), k and v are (total_k, num_heads_kv, .); returns
    `out` (total_q, num_heads, head_dim_v) and `lse` (num_heads, total_q). Every sequence is a
    problem of its own, with its own shift; bias and mask broadcast to (batch, num_heads,
    max_seqlen_q, max_seqlen_k). In the layout "bhsd" the heads of q, k, v and out come first. With
    page_table k and v are pages, as for `attention_with_kvcache`, and cu_seqlens_k is None.
    """
    check_layout(layout)
    q, k, v = to_float64(q), to_float64(k), to_float64(v)
    if layout == "bhsd":
        q, k, v = (np.swapaxes(x, -3, -2) for x in (q, k, v))
    if page_table is not None:
        k, v, cu_seqlens_k = _gathered(k, v, seqused_k, page_table)
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

    descales: dict[str, Any] = {
        name: _of_sequences(values, batch_size)
        for name, values in (
            ("q_descale", q_descale),
            ("k_descale", k_descale),
            ("v_descale", v_descale),
        )
        if values is not None
    }

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
            **{name: values[b : b + 1] for name, values in descales.items()},
            **options,
        )
        out[rows] = part_out[0]
        lse[:, rows] = part_lse[0]
    return (np.swapaxes(out, 0, 1) if layout == "bhsd" else out), lse


def attention_with_kvcache_reference(
    q: Any, k_cache: Any, v_cache: Any, *, layout: Layout = "bshd", **options: Any
) -> tuple[Array, Array]:
    """Attention over keys in a cache, in float64: each sequence with its keys side by side.

    `options` are those arguments of `dlattn.attention_with_kvcache` that change the result, from
    seqused_k to layout. Returns what `attention_reference` does.
    """
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    shape = (*q.shape[:3], v_cache.shape[3])
    out = np.zeros(shape)
    lse = np.zeros((q.shape[0], q.shape[heads], q.shape[rows]))
    problems = kvcache_problems(q, k_cache, v_cache, layout=layout, **options)
    for b, (own_q, k, v, own) in enumerate(problems):
        out[b : b + 1], lse[b : b + 1] = attention_reference(own_q, k, v, **own)
    return out, lse


def kvcache_problems(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seqused_k: Any,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    leftpad_k: Any = None,
    max_seqlen_k: int | None = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    layout: Layout = "bshd",
    **options: Any,
) -> Iterator[tuple[Any, Array, Array, dict[str, Any]]]:
    """For each sequence of a cache its own q, k, v and options for `attention_reference`.

    Keys before leftpad_k are 0 there, and hidden by the mask. k and v are what 8-bit elements
    stand for. max_seqlen_k changes no result.
    """
    check_layout(layout)
    k, v = to_float64(k_cache), to_float64(v_cache)
    if layout == "bhsd":
        k, v = np.swapaxes(k, 1, 2), np.swapaxes(v, 1, 2)
    lengths = [int(n) for n in np.asarray(seqused_k)]
    leftpads = [0] * len(lengths) if leftpad_k is None else [int(n) for n in np.asarray(leftpad_k)]
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    if alibi_slopes is not None:
        slopes = np.broadcast_to(to_float64(alibi_slopes), (len(lengths), q.shape[heads]))
    of_heads = [per_head(scale, len(lengths), k.shape[2]) for scale in (k_descale, v_descale)]
    for b, length in enumerate(lengths):
        if page_table is not None:
            own = _in_pages(k, v, length, np.asarray(page_table)[b])
        else:
            entry = b if cache_batch_idx is None else int(np.asarray(cache_batch_idx)[b])
            own = k[entry, :length], v[entry, :length]
        hidden = np.arange(length) < leftpads[b]
        keys, values = (
            np.where(hidden[:, None, None], 0.0, x * scale[b][:, None])[None]
            for x, scale in zip(own, of_heads, strict=True)
        )
        seen = np.broadcast_to(~hidden, (1, q.shape[heads], q.shape[rows], length))
        if mask is not None:
            full = np.atleast_1d(to_bool(mask))
            full = full[(None,) * (4 - full.ndim)]
            of_batch = full[b : b + 1] if full.shape[0] > 1 else full
            seen = seen & (of_batch[..., :length] if full.shape[3] > 1 else of_batch)
        if layout == "bhsd":
            keys, values = np.swapaxes(keys, 1, 2), np.swapaxes(values, 1, 2)
        of_sequence = {**options, "mask": seen, "layout": layout}
        if alibi_slopes is not None:
            of_sequence["alibi_slopes"] = slopes[b : b + 1]
        yield q[b : b + 1], keys, values, of_sequence


def _in_pages(k: Array, v: Array, length: int, pages: Array) -> tuple[Array, Array]:
    """The first `length` keys and values of a sequence, (length, num_heads_kv, .)."""
    page_size = k.shape[1]
    used = pages[: -(-length // page_size)]
    own_k, own_v = (x[used].reshape(-1, *x.shape[2:])[:length] for x in (k, v))
    return own_k, own_v


def _gathered(k: Array, v: Array, seqused_k: Any, page_table: Any) -> tuple[Array, Array, Array]:
    """Keys and values of all sequences, one after the other, and where each begins."""
    lengths = [int(n) for n in np.asarray(seqused_k)]
    tables = np.asarray(page_table)
    parts = [_in_pages(k, v, n, pages) for n, pages in zip(lengths, tables, strict=True)]
    keys, values = (np.concatenate(x) for x in zip(*parts, strict=True))
    return keys, values, np.cumsum([0, *lengths])


def merge_states_reference(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: Layout = "bshd"
) -> tuple[Array, Array]:
    """Merge partial results over disjoint sets of keys, in float64.

    A part whose lse is an infinity saw no key and contributes nothing, whatever its out holds.
    """
    all_outs = np.stack([to_float64(out) for out in outs])
    all_lses = np.stack([to_float64(lse) for lse in lses])
    all_lses = np.where(np.isposinf(all_lses), -np.inf, all_lses)
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


def bias_range(
    q: Any,
    k: Any,
    *,
    bias: Any,
    mask: Any = None,
    causal: Causal = False,
    window: Window = (None, None),
    layout: Layout = "bshd",
    **_: Any,
) -> BiasRange:
    """The range of the bias over the keys that each row may attend to; options without a say are
    taken.

    A bias of -inf hides its key. NaN counts as a bias of any size.
    """
    check_layout(layout)
    row, head = (1, 2) if layout == "bshd" else (2, 1)
    full = (q.shape[0], q.shape[head], q.shape[row], k.shape[row])
    values = np.broadcast_to(to_float64(bias), full)
    seen = allowed_keys(np.arange(full[2]), full[2], full[3], causal=causal, window=window)
    seen = seen & ~np.isneginf(values)
    if mask is not None:
        seen &= np.broadcast_to(to_bool(mask), full)
    return BiasRange(
        low=np.min(np.where(seen, values, np.inf), axis=3, initial=np.inf),
        high=np.max(np.where(seen, values, -np.inf), axis=3, initial=-np.inf),
        least=np.min(np.where(seen, np.abs(values), np.inf), axis=3, initial=np.inf),
    )


def _of_sequences(values: Any, batch_size: int) -> Array:
    """Descales that broadcast to (batch, heads), with the batch written out."""
    array = np.atleast_1d(to_float64(values))
    return np.broadcast_to(array, (batch_size, array.shape[-1]))


def _magnitude(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(np.max(finite)) if finite.size else 0.0
