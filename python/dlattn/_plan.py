# Written by python/api/write.py from plan.py.in: edit that, or arguments.py.
"""`supported` and `plan`: what `attention` and `attention_varlen` would do with their arguments."""

from __future__ import annotations

from typing import Any

from dlattn import _core
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
) -> Support:
    """Tell whether `attention` would run with these arguments, and if not, why.

    Takes the arguments of `attention`, or of `attention_varlen` and answers for that. Nothing is
    launched, and no memory of a device allocated.

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
        max_seqlen_k,
        seqused_k,
    )
    if all(argument is None for argument in varlen):
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
) -> Plan:
    """Tell how `attention` would compute this: kernel, tile, grid, shared memory, splits.

    Takes the arguments of `attention` or of `attention_varlen`. Nothing is launched, and no memory
    of a device allocated. DLATTN_PRINT_PLAN=1 in the environment prints the plan of every call.

    Returns:
        A `Plan`, which prints readably.

    Raises:
        UnsupportedError, TypeError, DeviceError: As the call itself would.
    """
    varlen = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k,
    )
    if all(argument is None for argument in varlen):
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
