# Written by python/api/write.py from plan.py.in: edit that, or arguments.py.
"""`supported` and `plan`: what `attention` and the functions beside it would do."""

from __future__ import annotations

from typing import Any

from dlattn import _core
from dlattn._errors import UnsupportedError
from dlattn._types import (
    Causal,
    Kernel,
    Layout,
    OutDType,
    Plan,
    Precision,
    QuantizedKV,
    Support,
    Tensor,
    Window,
)


def supported(
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    precision: Precision | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    out_dtype: OutDType | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
    num_splits: int | None = None,
    split_size: int | None = None,
    workspace: Tensor | None = None,
) -> Support:
    """Tell whether `attention` would run with these arguments, and if not, why.

    Takes the arguments of `attention`, `attention_varlen` or `attention_with_kvcache`, and answers
    for the function that they belong to: cu_seqlens_q, cu_seqlens_k or max_seqlen_q is given for
    `attention_varlen`; else seqused_k, page_table, cache_batch_idx, leftpad_k or max_seqlen_k for
    `attention_with_kvcache`, whose caches are k and v here. Nothing is launched, and no device
    memory is allocated.

    Returns:
        A `Support`: true or false in a condition, with the reasons why the call would not run, one
        for each kernel or mistake. A problem that is merely unsupported raises nothing.

    Raises:
        TypeError: An argument is not the kind of object that is accepted, as in the call itself.
    """
    varlen = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
    )
    kvcache = (
        max_seqlen_k,
        seqused_k,
        page_table,
        cache_batch_idx,
        leftpad_k,
        num_splits,
        split_size,
        workspace,
    )
    if any(argument is not None for argument in varlen):
        reason = _not_taken(
            "attention_varlen",
            cache_batch_idx=cache_batch_idx,
            leftpad_k=leftpad_k,
        )
        if reason:
            return Support(False, (reason,))
        return Support(
            *_core.supported_varlen(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                max_seqlen_k,
                seqused_k,
                page_table,
                causal,
                softmax_scale,
                window,
                softcap,
                bias,
                mask,
                alibi_slopes,
                sinks,
                q_descale,
                k_descale,
                v_descale,
                precision,
                layout,
                out,
                out_dtype,
                return_lse,
                stream,
                kernel,
                batch_invariant,
                num_splits,
                split_size,
                workspace,
            )
        )
    if any(argument is not None for argument in kvcache):
        reason = _not_taken(
            "attention_with_kvcache",
            bias=bias,
            q_descale=q_descale,
            precision=precision,
            out_dtype=out_dtype,
        )
        if reason:
            return Support(False, (reason,))
        k_cache, v_cache = k, v
        return Support(
            *_core.supported_with_kvcache(
                q,
                k_cache,
                v_cache,
                seqused_k,
                page_table,
                cache_batch_idx,
                leftpad_k,
                max_seqlen_k,
                causal,
                softmax_scale,
                window,
                softcap,
                mask,
                alibi_slopes,
                sinks,
                k_descale,
                v_descale,
                layout,
                out,
                return_lse,
                stream,
                kernel,
                batch_invariant,
                num_splits,
                split_size,
                workspace,
            )
        )
    return Support(
        *_core.supported(
            q,
            k,
            v,
            causal,
            softmax_scale,
            window,
            softcap,
            bias,
            mask,
            alibi_slopes,
            sinks,
            q_descale,
            k_descale,
            v_descale,
            precision,
            layout,
            out,
            out_dtype,
            return_lse,
            stream,
            kernel,
            batch_invariant,
        )
    )


def plan(
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    precision: Precision | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    out_dtype: OutDType | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
    num_splits: int | None = None,
    split_size: int | None = None,
    workspace: Tensor | None = None,
) -> Plan:
    """Tell how `attention` would compute this: kernel, tile, grid, shared memory, splits.

    Takes the arguments of `attention`, `attention_varlen` or `attention_with_kvcache`, as
    `supported` does. Nothing is launched, and no device memory is allocated. DLATTN_PRINT_PLAN=1
    in the environment prints the plan of every call.

    Returns:
        A `Plan`, which prints readably.

    Raises:
        UnsupportedError, TypeError, DeviceError: As the call itself would, but for the size of a
            workspace, which the plan tells.
    """
    varlen = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
    )
    kvcache = (
        max_seqlen_k,
        seqused_k,
        page_table,
        cache_batch_idx,
        leftpad_k,
        num_splits,
        split_size,
        workspace,
    )
    if any(argument is not None for argument in varlen):
        reason = _not_taken(
            "attention_varlen",
            cache_batch_idx=cache_batch_idx,
            leftpad_k=leftpad_k,
        )
        if reason:
            raise UnsupportedError(reason)
        return Plan(
            **_core.plan_varlen(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                max_seqlen_k,
                seqused_k,
                page_table,
                causal,
                softmax_scale,
                window,
                softcap,
                bias,
                mask,
                alibi_slopes,
                sinks,
                q_descale,
                k_descale,
                v_descale,
                precision,
                layout,
                out,
                out_dtype,
                return_lse,
                stream,
                kernel,
                batch_invariant,
                num_splits,
                split_size,
                workspace,
            )
        )
    if any(argument is not None for argument in kvcache):
        reason = _not_taken(
            "attention_with_kvcache",
            bias=bias,
            q_descale=q_descale,
            precision=precision,
            out_dtype=out_dtype,
        )
        if reason:
            raise UnsupportedError(reason)
        k_cache, v_cache = k, v
        return Plan(
            **_core.plan_with_kvcache(
                q,
                k_cache,
                v_cache,
                seqused_k,
                page_table,
                cache_batch_idx,
                leftpad_k,
                max_seqlen_k,
                causal,
                softmax_scale,
                window,
                softcap,
                mask,
                alibi_slopes,
                sinks,
                k_descale,
                v_descale,
                layout,
                out,
                return_lse,
                stream,
                kernel,
                batch_invariant,
                num_splits,
                split_size,
                workspace,
            )
        )
    return Plan(
        **_core.plan(
            q,
            k,
            v,
            causal,
            softmax_scale,
            window,
            softcap,
            bias,
            mask,
            alibi_slopes,
            sinks,
            q_descale,
            k_descale,
            v_descale,
            precision,
            layout,
            out,
            out_dtype,
            return_lse,
            stream,
            kernel,
            batch_invariant,
        )
    )


def _not_taken(function: str, **arguments: Any) -> str:
    """Why a call has an argument too many; "" if it does not."""
    for name, value in arguments.items():
        if value is not None:
            return f"{name} is given; accepted: None, as {function} does not take it"
    return ""
