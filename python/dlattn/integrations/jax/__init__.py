"""Attention inside JAX's programs: under jit, vmap, grad, shard_map and over sharded arrays.

`import dlattn.jax` brings these functions; they import JAX, which `import dlattn` does not.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from dlattn import _views
from dlattn._attention import attention as _attention
from dlattn._errors import UnsupportedError
from dlattn._numbers import integer
from dlattn.frameworks.base import shown

if jax.__version_info__ < (0, 8):
    raise ImportError(f"this is JAX {jax.__version__}; accepted: 0.8 or later, in dlattn.jax")

from dlattn.integrations.jax import _call, _launch
from dlattn.integrations.jax._operands import NAMES
from dlattn.integrations.jax._ring_attention import (
    ring_attention,
    shard_sequence,
    unshard_sequence,
)

__all__ = [
    "attention",
    "dot_product_attention",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]

_RENAMED = {
    "q": "query",
    "k": "key",
    "v": "value",
    "softmax_scale": "scale",
    "seqused_k": "key_value_seq_lengths",
}


def _attend(given: dict[str, Any]) -> Any:
    """`given` has all arguments of `attention` by name, and seqused_k if need be."""
    operands = {
        name: _launch.array(given[name], name)
        for name in NAMES
        if name in ("q", "k", "v") or given.get(name) is not None
    }
    options = {name: value for name, value in given.items() if name not in NAMES}
    if isinstance(options["window"], list):
        options["window"] = tuple(options["window"])
    _launch.describe(options, {name: x for name, x in operands.items() if name != "seqused_k"})
    settings = tuple(sorted(options.items()))
    result = _call.differentiable(settings, tuple(operands))(*operands.values())
    return result if options["return_lse"] else result[0]


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Any
) -> jax.Array: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Any
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: bool, **options: Any) -> Any: ...
def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    bound = _launch.SIGNATURE.bind(q, k, v, **options)
    bound.apply_defaults()
    return _attend(bound.arguments)


attention.__signature__ = _launch.SIGNATURE  # type: ignore[attr-defined]
attention.__doc__ = f"""`dlattn.attention` for JAX's transformations, with the same keywords.

    What shapes, dtypes and options tell is checked when the function is traced, and raises as
    `dlattn.attention` does; what is left is raised by XLA, in the same words. `out` and `stream`
    stay None, and k is no `QuantizedKV`. Gradients, of q, k, v, bias, alibi_slopes, sinks and
    lse, are those of `dlattn.attention_backward`; with precision, and where a GPU has no kernel for
    them, those of the definition in jax.numpy, which holds the scores in memory. 8-bit inputs have
    none.

    {(_attention.__doc__ or "").partition("    Args:")[2].join(["Args:", ""])}"""


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool,
) -> Any: ...
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    """`attention` as jax.nn.dot_product_attention calls it.

    Args:
        query: (batch, seqlen_q, num_heads, head_dim), or without batch. As q of `attention`.
        key: (batch, seqlen_k, num_heads_kv, head_dim), or without batch.
        value: As key; its head_dim may be another.
        bias: Added to the scores; broadcastable to (batch, num_heads, seqlen_q, seqlen_k).
        mask: bool, True where a query may attend to a key; broadcastable likewise.
        scale: Factor of the scores, a number, also 0 or negative. None: 1 / sqrt(head_dim).
        is_causal: Query i attends to keys j <= i, counted from the first.
        query_seq_lengths: int32, (batch,): later rows of the result are 0.
        key_value_seq_lengths: int32, (batch,): later keys are hidden.
        local_window_size: (left, right), or a number for both: query i attends to keys
            i - left <= j <= i + right, counted from the first.
        implementation: None.
        return_residual: Also return the lse, (batch, seqlen_q, num_heads), of key's dtype and
            without a gradient, as jax.nn does.

    Returns:
        out, of query's shape with value's head_dim. A row all of whose keys are hidden is 0, and
        its lse -inf; in jax.nn it is the mean of value.

    Raises:
        UnsupportedError, TypeError: As `attention`.

    Source:
        https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html
    """
    if implementation is not None:
        raise UnsupportedError(f"implementation is {implementation!r}; accepted: None")
    _views.check_flag(is_causal, "is_causal")
    _views.check_flag(return_residual, "return_residual")
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    given = {
        name: _launch.array(x, name)
        for name, x in {**arrays, **lengths}.items()
        if x is not None or name in ("query", "key", "value")
    }
    q, k, v = (given[name] for name in ("query", "key", "value"))
    alone = q.ndim == 3
    if alone:
        q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
    for name in lengths.keys() & given.keys():
        shape, dtype = given[name].shape, given[name].dtype
        if dtype != jnp.int32 or shape != q.shape[:1]:
            raise UnsupportedError(
                f"{name} is of {dtype} and shape {shape}; accepted: int32, (batch,) = "
                f"{tuple(q.shape[:1])}"
            )
    bias, mask = given.get("bias"), given.get("mask")
    if bias is not None and bias.dtype not in (q.dtype, jnp.float32):
        bias = bias.astype(jnp.promote_types(q.dtype, jnp.float32))
    used = given.get("key_value_seq_lengths")
    window, mask = _window(local_window_size, is_causal, used is not None, q, k, mask)
    q, scale = _views.with_any_scale(q, scale)
    options = {
        "causal": "top_left" if is_causal else False,
        "softmax_scale": scale,
        "window": window,
        "bias": bias,
        "mask": mask,
        "return_lse": return_residual,
    }
    bound = _launch.SIGNATURE.bind(q, k, v, **options)
    bound.apply_defaults()
    if used is not None and k.ndim == 4:
        bound.arguments["seqused_k"] = jnp.clip(used, 0, k.shape[1])
    if query_seq_lengths is not None and q.ndim == 4:
        # NaN in the other rows would reach the gradients of key and value.
        valid = jnp.arange(q.shape[1]) < given["query_seq_lengths"][:, None]
        bound.arguments["q"] = jnp.where(valid[..., None, None], q, jnp.zeros_like(q))
    try:
        result = _attend(bound.arguments)
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, _RENAMED)
        raise
    out, lse = result if return_residual else (result, None)
    if query_seq_lengths is not None:
        out = jnp.where(valid[..., None, None], out, 0)
        lse = None if lse is None else jnp.where(valid[:, None], lse, -jnp.inf)
    out = out[0] if alone else out
    if lse is None:
        return out
    lse = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(k.dtype))
    return out, lse[0] if alone else lse


def _window(
    size: Any, is_causal: bool, has_lengths: bool, q: Any, k: Any, mask: Any
) -> tuple[Any, Any]:
    """`attention`'s window and mask for one that is counted from the first key."""
    if size is None:
        return (None, None), mask
    both = size if isinstance(size, (tuple, list)) else (size, size)
    sides = [side for side in map(integer, both) if side is not None]
    if len(both) != 2 or len(sides) != 2:
        raise TypeError(
            f"local_window_size is {shown(size)}; accepted: an int >= 0, a pair (left, right) of "
            "them, or None"
        )
    if min(sides) < 0:
        raise UnsupportedError(f"local_window_size is {size!r}; accepted: ints >= 0")
    left, right = sides
    if is_causal or q.ndim != 4 or k.ndim != 4:  # "top_left" counts from the first key
        return (left, right), mask
    shift = k.shape[1] - q.shape[1]
    if not has_lengths and left + shift >= 0 and right - shift >= 0:
        return (left + shift, right - shift), mask
    most = q.shape[1] + k.shape[1]  # no limit, and an int that JAX's arrays can hold
    left, right = min(left, most), min(right, most)
    row, column = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    band = (column >= row - left) & (column <= row + right)
    return (None, None), band if mask is None else mask & band
