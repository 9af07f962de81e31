"""The definition of attention in plain jax.numpy, for gradients that no backward pass of dlattn
computes: XLA differentiates it.

It holds all scores at once, (batch, num_heads, seqlen_q, seqlen_k). jax.nn.dot_product_attention
would not do: it has no softcap, ALiBi slopes, sinks or descales, no head_dim_v of its own, and
where every key of a row is hidden it gives the mean of v, which dlattn gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dlattn._errors import UnsupportedError
from dlattn.reference.definition import LARGEST_SLOPE

_DEFINED = {"q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "seqused_k"}


def check_defined(operands: Iterable[str]) -> None:
    """Raise UnsupportedError for an operand, by name, that has no place in the definition."""
    for name in sorted(set(operands) - _DEFINED):
        raise UnsupportedError(f"{name} is given and a gradient is asked for; accepted: None")


def attention(options: Mapping[str, Any], operands: Mapping[str, Any]) -> tuple[Any, Any]:
    """`out` and `lse`, as `dlattn.attention` defines them."""
    q, k, v = (operands[name] for name in "qkv")
    if options["layout"] == "bhsd":
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    batch_size, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    groups = (batch_size, num_heads_kv, num_heads // num_heads_kv)
    full = (*groups, seqlen_q, seqlen_k)
    compute = jnp.promote_types(q.dtype, jnp.float32)
    # Elements of 16 bits multiply as such, and add up in float32.
    precision = jax.lax.Precision.HIGHEST if q.dtype == compute else None

    if "seqused_k" in operands:
        # NaN in a row that is not in use, times a weight or a gradient of 0, would be NaN.
        rows = operands["seqused_k"].reshape(-1, 1, 1, 1)
        in_use = jnp.arange(seqlen_k)[:, None, None] < rows
        k, v = (jnp.where(in_use, x, jnp.zeros_like(x)) for x in (k, v))

    scale = options["softmax_scale"]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    q = q.reshape(batch_size, seqlen_q, *groups[1:], head_dim)
    scores = jnp.einsum(
        "bsgrd,btgd->bgrst", q, k, precision=precision, preferred_element_type=compute
    )
    scores = scores * jnp.asarray(scale, compute)
    softcap = float(options["softcap"])
    if softcap != 0.0:
        scores = softcap * jnp.tanh(scores / softcap)

    used = jnp.asarray(operands.get("seqused_k", seqlen_k)).reshape(-1, 1, 1, 1, 1)
    shift = 0 if options["causal"] == "top_left" else used - seqlen_q
    position = jnp.arange(seqlen_q)[:, None] + shift  # of the queries, among the keys
    key = jnp.arange(seqlen_k)
    seen = key < used
    if options["causal"]:
        seen &= key <= position
    most = seqlen_q + seqlen_k  # no limit, and an int that JAX's arrays can hold
    left, right = (None if x is None else min(int(x), most) for x in options["window"])
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right

    def by_score(x: Any) -> Any:
        """A tensor that broadcasts to (batch, num_heads, seqlen_q, seqlen_k), with its heads in
        groups."""
        x = x.reshape(*(1,) * (4 - x.ndim), *x.shape)
        heads = (1, 1) if x.shape[1] == 1 else groups[1:]
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    if "alibi_slopes" in operands:
        slopes = operands["alibi_slopes"].astype(compute).clip(-LARGEST_SLOPE, LARGEST_SLOPE)
        distance = jnp.abs(position - key).astype(compute)
        scores -= slopes.reshape(-1, *groups[1:], 1, 1) * distance
    if "bias" in operands:
        bias = by_score(operands["bias"]).astype(compute)
        hidden = jnp.isneginf(bias)
        seen &= ~hidden
        scores += jnp.where(hidden, 0, bias)
    if "mask" in operands:
        seen &= by_score(operands["mask"])
    seen = jnp.broadcast_to(seen, full)

    hidden_score = jnp.asarray(-jnp.inf, compute)
    most = jnp.max(jnp.where(seen, scores, hidden_score), axis=-1, initial=hidden_score)
    sinks = None
    if "sinks" in operands:
        sinks = operands["sinks"].astype(compute).reshape(1, *groups[1:], 1)
        most = jnp.maximum(most, sinks)
    most = jax.lax.stop_gradient(jnp.where(jnp.isneginf(most), 0, most))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - most[..., None], 0)), 0)
    total = weights.sum(axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks - most)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = jnp.einsum(
        "bgrst,btge->bsgre",
        (weights / total[..., None]).astype(v.dtype),
        v,
        precision=precision,
        preferred_element_type=compute,
    )
    out = out.reshape(batch_size, seqlen_q, num_heads, v.shape[3]).astype(v.dtype)
    lse = jnp.where(empty, -jnp.inf, most + jnp.log(total)).astype(jnp.float32)
    out = jnp.swapaxes(out, 1, 2) if options["layout"] == "bhsd" else out
    return out, lse.reshape(batch_size, num_heads, seqlen_q)
