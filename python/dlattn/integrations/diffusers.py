"""dlattn as attention backends of diffusers: "dlattn", and three in 8 bits.

Source: diffusers' `models/attention_dispatch.py`, 0.36 to 0.42. Its list of names is closed, an
enumeration, and there is no function to add one: the members are made as the enumeration makes its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import dlattn
from dlattn import _views
from dlattn._types import Precision
from dlattn.integrations.torch import _functions, autocast

# The names, and the precision of their products.
BACKENDS: dict[str, Precision | None] = {
    "dlattn": None,
    "dlattn_int8_fp8": "int8_fp8",
    "dlattn_int8_fp16": "int8_fp16",
    "dlattn_fp8": "fp8",
}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    precision: Precision | None = None,
) -> Any:
    """Attention as diffusers calls a backend.

    Under torch.autocast query, key and value are cast to its dtype first, unless they are float64.

    Where gradients are asked for, or dropout, diffusers' native backend does it, with torch's
    scaled_dot_product_attention; not in 8 bits, which have no gradients.

    Args:
        query: (batch, seqlen_q, num_heads, head_dim) of float16, bfloat16 or float32, any strides
            with a contiguous last dimension.
        key, value: (batch, seqlen_k, num_heads_kv, head_dim), (…, head_dim_v); num_heads_kv divides
            num_heads, whatever diffusers' `enable_gqa` says.
        attn_mask: bool (True: attend) or additive in query's dtype or float32: (batch, seqlen_k),
            or broadcastable to (batch, num_heads, seqlen_q, seqlen_k).
        dropout_p: Probability.
        is_causal: Query i sees keys 0 to i.
        scale: Factor of q·k; None: 1 / sqrt(head_dim).
        return_lse: Also return the log of the softmax's denominator, (batch, num_heads, seqlen_q)
            of float32, as `dlattn.attention` has it.
        precision: As `dlattn.attention` takes it.

    Returns:
        out of (batch, seqlen_q, num_heads, head_dim_v), in query's dtype.

    Raises:
        ValueError: Gradients or dropout with a precision or return_lse.
        UnsupportedError, TypeError, DeviceError: As `dlattn.attention`.
    """
    if torch._C._is_any_autocast_enabled():
        query, key, value, attn_mask = autocast.cast(query, key, value, attn_mask)
    tensors = (query, key, value, attn_mask)
    if dropout_p > 0.0 or (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    ):
        if precision is not None or return_lse:
            asked = f"precision {precision!r}" if precision is not None else "return_lse=True"
            raise ValueError(
                f"{asked}: with it dlattn has no gradients and no dropout; accepted: a call "
                'without both, or the backend "dlattn", which leaves them to torch'
            )
        return attention_dispatch._native_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
    mask, bias = attn_mask, None
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, mask
    if precision is None:
        query, scale = _views.with_any_scale(query, scale)
    # Traced, or mapped by torch.func, it must be an operator; run, that is only a way about.
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    function = _functions.attention if transformed else dlattn.attention
    return function(
        query,
        key,
        value,
        causal="top_left" if is_causal else False,
        softmax_scale=scale,
        mask=mask,
        bias=bias,
        precision=precision,
        return_lse=return_lse,
    )


def _backend(precision: Precision | None) -> Callable[..., Any]:
    # diffusers passes what it finds among the parameters, by name.
    def backend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        if _parallel_config is not None:
            raise NotImplementedError(
                "_parallel_config: dlattn's backends have no context parallelism; accepted: None"
            )
        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale, return_lse, precision
        )

    return backend


def _member(value: str) -> AttentionBackendName:
    """The enumeration's member of that value, made if there is none."""
    known: Any = AttentionBackendName._value2member_map_.get(value)
    if known is not None:
        return known
    name = value.upper()
    member: Any = str.__new__(AttentionBackendName, value)
    member._name_, member._value_ = name, value
    member.__objclass__ = AttentionBackendName
    member._sort_order_ = len(AttentionBackendName._member_names_)
    AttentionBackendName._member_map_[name] = member
    AttentionBackendName._value2member_map_[value] = member
    AttentionBackendName._member_names_.append(name)
    type.__setattr__(AttentionBackendName, name, member)
    return member


for _name, _precision in BACKENDS.items():
    _AttentionBackendRegistry.register(_member(_name))(_backend(_precision))
