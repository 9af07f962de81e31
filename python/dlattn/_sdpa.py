"""Attention under the signature of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np

from dlattn import _views
from dlattn._attention import attention
from dlattn._errors import UnsupportedError

_Array = TypeVar("_Array")

_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "bias": "attn_mask",
    "mask": "attn_mask",
    "softmax_scale": "scale",
}


def scaled_dot_product_attention(
    query: _Array,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Array:
    """`attention` as torch.nn.functional.scaled_dot_product_attention calls it; forward only.

    Takes torch tensors, and CuPy, JAX and NumPy arrays as well. Nothing is copied. Calls of four
    dimensions that agree in the first two go straight to `attention`; for all others the arrays are
    viewed as such, which JAX arrays cannot be. Under torch.autocast torch tensors are cast to its
    dtype first, as by torch's function: query, key and value, unless they are float64.

    Args:
        query: (..., num_heads, seqlen_q, head_dim). All of them have at least two dimensions; those
            before the last two broadcast as in torch.
        key: (..., num_heads_kv, seqlen_k, head_dim), of query's dtype.
        value: (..., num_heads_kv, seqlen_k, head_dim_v), of query's dtype.
        attn_mask: Broadcastable to (..., num_heads, seqlen_q, seqlen_k). bool: True where a query
            may attend to a key. query's dtype or float32: added to the scores. Not with is_causal.
            Its values are those of `attention`'s mask and bias.
        dropout_p: 0.0.
        is_causal: Query i attends to keys j <= i, counted from the first ("top_left"), whatever
            the lengths. `attention(causal=True)` counts from the last.
        scale: Factor of query·key, as softmax_scale of `attention`. None: 1 / sqrt(head_dim). 0 and
            negative numbers as in torch; for a negative one query is negated, in a new array.
        enable_gqa: Let num_heads be a multiple of num_heads_kv; query head h then reads key head
            h // (num_heads // num_heads_kv). Without it num_heads_kv is num_heads, or 1.

    Returns:
        out, (..., num_heads, seqlen_q, head_dim_v). A query from which attn_mask hides every key,
        by False or by -inf, gets 0, as in torch since 2.5 (before that some of its kernels gave
        NaN).

    Raises:
        UnsupportedError: A value is wrong, a tensor requires grad while gradients are on, no view
            of an array fits, or no kernel computes this.
        TypeError: An argument is not the kind of object that is accepted.
        DeviceError: The device or the launch failed.

    Source:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    _views.refuse_dropout(dropout_p)
    _views.check_flag(is_causal, "is_causal")
    _views.check_flag(enable_gqa, "enable_gqa")
    if attn_mask is not None and is_causal:
        raise UnsupportedError("attn_mask is given and is_causal is True; accepted: one of the two")

    torch = getattr(sys.modules.get("torch"), "_C", None)
    if (
        torch is not None
        and torch._is_any_autocast_enabled()
        and isinstance(query, torch.TensorBase)
    ):
        from dlattn.integrations.torch import autocast

        query, key, value, attn_mask = autocast.cast(query, key, value, attn_mask)
    arrays = (query, key, value)
    q_shape, k_shape, v_shape = (
        _views.shape_of(x, name) for x, name in zip(arrays, ("query", "key", "value"), strict=True)
    )
    shape: tuple[int, ...] | None = None  # of out, where attention's own is another
    plain = (
        len(q_shape) == len(k_shape) == len(v_shape) == 4
        and q_shape[0] == k_shape[0] == v_shape[0]
        and k_shape[1] == v_shape[1]
        and (k_shape[1] == q_shape[1] or enable_gqa)
        and (attn_mask is None or len(_views.shape_of(attn_mask, "attn_mask")) <= 4)
    )
    if not plain:
        arrays, attn_mask, shape = _as_four_dimensions(
            arrays, attn_mask, (q_shape, k_shape, v_shape), enable_gqa
        )
    is_bool = attn_mask is not None and str(getattr(attn_mask, "dtype", "")).endswith("bool")
    try:
        q, softmax_scale = _views.with_any_scale(arrays[0], scale)
        out: Any = attention(
            q,
            *arrays[1:],
            causal="top_left" if is_causal else False,
            softmax_scale=softmax_scale,
            mask=attn_mask if is_bool else None,
            bias=None if is_bool else attn_mask,
            layout="bhsd",
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, _NAMES)
        raise
    return out if shape is None else out.reshape(shape)


def _as_four_dimensions(
    arrays: tuple[Any, Any, Any],
    attn_mask: Any,
    shapes: tuple[_views.Shape, _views.Shape, _views.Shape],
    enable_gqa: bool,
) -> tuple[tuple[Any, Any, Any], Any, _views.Shape]:
    """View the arrays as (batch, num_heads, ., .); also tell the shape that out should have."""
    names = ("query", "key", "value")
    for name, shape in zip(names, shapes, strict=True):
        if len(shape) < 2:
            raise UnsupportedError(
                f"{name}: shape is {shape}; accepted: at least 2 dimensions, (..., num_heads, "
                "seqlen, head_dim)"
            )
    heads, heads_k, heads_v = (shape[-3] if len(shape) > 2 else 1 for shape in shapes)
    batches = [shape[:-3] for shape in shapes]
    try:
        equal = batches[0] == batches[1] == batches[2]
        batch = batches[0] if equal else np.broadcast_shapes(*batches)
    except ValueError:
        raise UnsupportedError(
            f"query, key and value: shapes are {shapes[0]}, {shapes[1]}, {shapes[2]}; accepted: "
            "dimensions before the last three that broadcast to one shape"
        ) from None
    if not enable_gqa:
        num_heads = max(heads, heads_k, heads_v)
        for name, shape, own in zip(names, shapes, (heads, heads_k, heads_v), strict=True):
            if own not in (1, num_heads):
                raise UnsupportedError(
                    f"{name}: num_heads is {own}, shape {shape}; accepted: {num_heads} or 1, or "
                    "enable_gqa=True"
                )
        heads = num_heads
        if heads_k != heads_v:
            heads_k = heads_v = num_heads
    own_heads = (heads, heads_k, heads_v)
    views = tuple(
        _views.as_leading(x, name, (*batch, own), 2)
        for x, name, own in zip(arrays, names, own_heads, strict=True)
    )
    if attn_mask is not None:
        attn_mask = _mask_of_merged(attn_mask, batch)
    rank = max(len(shape) for shape in shapes) - 2
    leading = (*batch, heads)[len(batch) + 1 - rank :]
    return (views[0], views[1], views[2]), attn_mask, (*leading, shapes[0][-2], shapes[2][-1])


def _mask_of_merged(attn_mask: Any, batch: _views.Shape) -> Any:
    """View attn_mask with one dimension in the place of the dimensions `batch`."""
    shape = _views.shape_of(attn_mask, "attn_mask")
    own = shape[:-3]
    if len(batch) <= 1 or len(shape) <= 3:
        return attn_mask
    try:
        fits = np.broadcast_shapes(own, batch) == batch
    except ValueError:
        fits = False
    if not fits:
        raise UnsupportedError(
            f"attn_mask: shape is {shape}; accepted: one that broadcasts to (*{batch}, num_heads, "
            "seqlen_q, seqlen_k)"
        )
    if all(size == 1 for size in own):
        return attn_mask.reshape(shape[-3:])
    return _views.as_leading(attn_mask, "attn_mask", (*batch, shape[-3]), 2)
