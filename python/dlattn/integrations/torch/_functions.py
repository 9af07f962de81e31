# Written by python/api/write.py from functions.py.in: edit that, or arguments.py.
"""`dlattn.torch`'s functions of attention: dlattn's as operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dlattn.integrations.torch.kvcache  # noqa: F401  registers an operator
from dlattn._types import Causal, Layout, Precision, Window
from dlattn.integrations.torch import arguments, ops, overrideable
from dlattn.integrations.torch.gradients import called_eagerly


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    precision: Precision | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """`dlattn.attention` as an operator: for functions that torch compiles or exports.

    Arguments, results and errors are those of `dlattn.attention`; descales, `out_dtype`, `out`,
    `stream` and `kernel` are not among them. It has gradients, of out and lse with respect to q, k,
    v, bias, alibi_slopes and sinks: those of `dlattn.attention_backward`. Where an input requires
    grad `precision` is refused.
    """
    arguments.check(causal, softmax_scale, softcap, precision, layout, return_lse, batch_invariant)
    sides = arguments.sides_of(window)
    try:
        if not return_lse and alibi_slopes is None and sinks is None and precision is None:
            carried = overrideable.attention(
                *(q, k, v, bias, mask, arguments.CAUSAL[causal], softmax_scale, sides, softcap),
                *(layout == "bhsd", batch_invariant),
            )
            if carried is not None:
                return carried
        given = [
            q,
            k,
            v,
            bias,
            mask,
            alibi_slopes,
            sinks,
            arguments.CAUSAL[causal],
            softmax_scale,
            *sides,
            softcap,
            precision,
            layout == "bhsd",
            batch_invariant,
        ]
        if called_eagerly(
            q,
            k,
            v,
            bias,
            mask,
            alibi_slopes,
            sinks,
        ):
            out, lse = ops.DIFFERENTIABLE["attention"].eagerly(given)
        else:
            out, lse = torch.ops.dlattn.attention(*given)
    except RuntimeError as error:
        raise arguments.error_of(
            error,
            {
                "q": q,
                "k": k,
                "v": v,
            },
            bias=bias,
            mask=mask,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        ) from None
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    precision: Precision | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """`dlattn.attention_varlen` as an operator, as `attention` is that of `dlattn.attention`."""
    arguments.check(causal, softmax_scale, softcap, precision, layout, return_lse, batch_invariant)
    sides = arguments.sides_of(window)
    given = [
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        arguments.length(max_seqlen_q, "max_seqlen_q"),
        arguments.length(max_seqlen_k, "max_seqlen_k"),
        seqused_k,
        bias,
        mask,
        alibi_slopes,
        sinks,
        arguments.CAUSAL[causal],
        softmax_scale,
        *sides,
        softcap,
        precision,
        layout == "bhsd",
        batch_invariant,
    ]
    try:
        if called_eagerly(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            bias,
            mask,
            alibi_slopes,
            sinks,
        ):
            out, lse = ops.DIFFERENTIABLE["attention_varlen"].eagerly(given)
        else:
            out, lse = torch.ops.dlattn.attention_varlen(*given)
    except RuntimeError as error:
        raise arguments.error_of(
            error,
            {
                "q": q,
                "k": k,
                "v": v,
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
            },
            seqused_k=seqused_k,
            bias=bias,
            mask=mask,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        ) from None
    return (out, lse) if return_lse else out


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqused_k: Tensor,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """`dlattn.attention_with_kvcache` as an operator: for functions that torch compiles or exports.

    Arguments, results and errors are those of `dlattn.attention_with_kvcache`; new keys and values,
    rotary tables, `out`, `stream`, `kernel`, `num_splits`, `split_size` and `workspace` are not
    among them. `k_descale` and `v_descale` of caches in 8 bits are tensors, float32 on q's device.
    """
    arguments.check(causal, softmax_scale, softcap, None, layout, return_lse, batch_invariant)
    sides = arguments.sides_of(window)
    if max_seqlen_k is not None:
        max_seqlen_k = arguments.length(max_seqlen_k, "max_seqlen_k")
    try:
        out, lse = torch.ops.dlattn.attention_with_kvcache(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            seqused_k=seqused_k,
            page_table=page_table,
            cache_batch_idx=cache_batch_idx,
            leftpad_k=leftpad_k,
            max_seqlen_k=max_seqlen_k,
            causal=arguments.CAUSAL[causal],
            scale=softmax_scale,
            window_left=sides[0],
            window_right=sides[1],
            softcap=softcap,
            mask=mask,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_descale=k_descale,
            v_descale=v_descale,
            bhsd=layout == "bhsd",
            batch_invariant=batch_invariant,
        )
    except RuntimeError as error:
        raise arguments.error_of(
            error,
            {
                "q": q,
                "k_cache": k_cache,
                "v_cache": v_cache,
                "seqused_k": seqused_k,
            },
            page_table=page_table,
            cache_batch_idx=cache_batch_idx,
            leftpad_k=leftpad_k,
            mask=mask,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_descale=k_descale,
            v_descale=v_descale,
        ) from None
    return (out, lse) if return_lse else out
