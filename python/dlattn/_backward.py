# Written by python/api/write.py from backward.py.in: edit that, or arguments.py.
"""The gradients of attention: the native module reads and checks what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dlattn import _core
from dlattn._errors import UnsupportedError
from dlattn._types import Causal, Gradient, Kernel, Layout, Plan, Support, Tensor, Window


class Gradients(NamedTuple):
    """The gradients of a call of `attention`; None for those that were not asked for."""

    dq: Any = None
    """The gradient of q, of its shape and dtype."""
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    """The gradient of bias, of its own shape and dtype: the sum over what it is broadcast along."""
    dalibi_slopes: Any = None
    """float32, of alibi_slopes' shape."""
    dsinks: Any = None
    """float32, (num_heads,)."""


def attention_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    stream: Any = None,
    kernel: Kernel = "auto",
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    needs: Sequence[Gradient] | None = None,
    deterministic: bool = False,
    workspace: Tensor | None = None,
) -> Gradients:
    """The gradients of `attention` with respect to its inputs.

    With P = exp(scores - lse), delta = rowsum(dout * out) - dlse and dS = P (dout vᵀ - delta) they
    are dv = Pᵀ dout, dq = softmax_scale dS k, dk = softmax_scale dSᵀ q, with a softcap's derivative
    as a factor of dS there, dbias = dS summed over what bias is broadcast along, dalibi_slopes =
    -Σ dS |p - j| and dsinks = -Σ exp(sink - lse) delta [1]. Scores are computed again, tile by
    tile: memory grows with the sequences' lengths alone, for a bias too.

    Queries that may attend to nothing and keys that nobody may attend to have gradients of 0. The
    sums are in fp32 (float64 for float64 tensors) and rounded once, those of query heads that share
    a key head included.

    Args:
        dout: The gradient of `out`, of its shape and dtype; dimensions but the last may have a
            stride of 0. None: zeros, where dlse is given.
        out, lse: What `attention` returned with return_lse for the other arguments. Those of a
            larger whole, of whose keys k and v are a part, give the gradients' share of that part.
        dlse: The gradient of lse, float32, of its shape, any strides of at least 0. None: zeros.
        q, k, v, causal, softmax_scale, window, softcap, bias, mask, alibi_slopes, sinks, layout,
            stream: As they were given to `attention`.
        kernel: The one kernel to use, "auto" for the one predicted to be the fastest, or "cpu".
        dq, dk, dv: Where to write the gradient: of the input's shape and dtype, writable. None: a
            new tensor.
        needs: The names of the gradients to compute, of "dq", "dk", "dv", "dbias", "dalibi_slopes"
            and "dsinks"; only these are computed. None: those of all inputs that are given.
        deterministic: On a GPU: give the same bits at every call, at some cost. On the CPU they
            always are the same; with this, a sequence has the same ones in any batch.
        workspace: Memory on q's device that the plan needs beside the tensors: contiguous, of any
            dtype, aligned to 256 bytes, apart from the tensors. None: q's framework allocates it.
            The CPU needs none.

    Returns:
        Gradients(dq, dk, dv, dbias, dalibi_slopes, dsinks), None for those that `needs` leaves
        out or that have no input.

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention`. float8 tensors, `precision` and
            keys in a cache have no gradients.

    References:
        [1] Dao. FlashAttention-2. arXiv:2307.08691, 2023, section 3.1.
    """
    return Gradients(
        *_core.attention_backward(
            dout,
            out,
            lse,
            dlse,
            {"dq": dq, "dk": dk, "dv": dv},
            needs,
            deterministic,
            workspace,
            {
                "q": q,
                "k": k,
                "v": v,
                "causal": causal,
                "softmax_scale": softmax_scale,
                "window": window,
                "softcap": softcap,
                "bias": bias,
                "mask": mask,
                "alibi_slopes": alibi_slopes,
                "sinks": sinks,
                "layout": layout,
                "stream": stream,
                "kernel": kernel,
            },
        )
    )


def attention_varlen_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    stream: Any = None,
    kernel: Kernel = "auto",
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    needs: Sequence[Gradient] | None = None,
    deterministic: bool = False,
    workspace: Tensor | None = None,
) -> Gradients:
    """The gradients of `attention_varlen` with respect to its inputs.

    As `attention_backward`, within each sequence. Rows of q, k and v that belong to no sequence, or
    lie behind seqused_k, have gradients of 0, which are written.

    Args:
        dout, out, lse, dlse: As for `attention_backward`, in the shapes of `attention_varlen`.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, causal,
            softmax_scale, window, softcap, bias, mask, alibi_slopes, sinks, layout, stream: As they
            were given to `attention_varlen`.
        kernel: As for `attention_backward`.
        dq, dk, dv, needs, deterministic, workspace: As for `attention_backward`.

    Returns:
        Gradients(dq, dk, dv, dbias, dalibi_slopes, dsinks), as `attention_backward`.

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention_backward`.
    """
    return Gradients(
        *_core.attention_backward(
            dout,
            out,
            lse,
            dlse,
            {"dq": dq, "dk": dk, "dv": dv},
            needs,
            deterministic,
            workspace,
            {
                "q": q,
                "k": k,
                "v": v,
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_k": max_seqlen_k,
                "seqused_k": seqused_k,
                "causal": causal,
                "softmax_scale": softmax_scale,
                "window": window,
                "softcap": softcap,
                "bias": bias,
                "mask": mask,
                "alibi_slopes": alibi_slopes,
                "sinks": sinks,
                "layout": layout,
                "stream": stream,
                "kernel": kernel,
            },
        )
    )


def supported_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dlse: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    stream: Any = None,
    kernel: Kernel = "auto",
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    needs: Sequence[Gradient] | None = None,
    deterministic: bool = False,
    workspace: Tensor | None = None,
) -> Support:
    """Tell whether `attention_backward` would run with these arguments, and if not, why.

    Takes the arguments of `attention_backward` or, with cu_seqlens_q, of
    `attention_varlen_backward`. Nothing is launched, and no device memory is allocated.

    Returns:
        A `Support`: true or false in a condition, with the reasons why the call would not run, one
        for each kernel or mistake. A problem that is merely unsupported raises nothing.

    Raises:
        TypeError: An argument is not the kind of object that is accepted, as in the call itself.
    """
    try:
        return Support(*_core.supported_backward(*_native(locals())))
    except UnsupportedError as error:
        return Support(False, (str(error),))


def plan_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dlse: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    stream: Any = None,
    kernel: Kernel = "auto",
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    needs: Sequence[Gradient] | None = None,
    deterministic: bool = False,
    workspace: Tensor | None = None,
) -> Plan:
    """Tell how `attention_backward` would compute this: kernel, launches, workspace.

    Takes the arguments of `attention_backward` or, with cu_seqlens_q, of
    `attention_varlen_backward`. Nothing is launched, and no device memory is allocated:
    `workspace_bytes` is the size of the `workspace` that a call takes. DLATTN_PRINT_PLAN=1 in the
    environment prints the plan of every call.

    Returns:
        A `Plan`, which prints readably.

    Raises:
        UnsupportedError, TypeError, DeviceError: As the call itself would, but for the size of a
            workspace, which the plan tells.
    """
    return Plan(**_core.plan_backward(*_native(locals())))


def _native(options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of `supported_backward` and `plan_backward` as the native module takes them."""
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    if all(options[name] is None for name in lengths):
        if options["seqused_k"] is not None:
            raise UnsupportedError(
                "seqused_k is given; accepted: None, as attention_backward does not take it"
            )
        for name in (*lengths, "seqused_k"):
            del options[name]
    gradients = {name: options.pop(name) for name in ("dq", "dk", "dv")}
    results = [options.pop(name) for name in ("dout", "out", "lse", "dlse")]
    asked = [options.pop(name) for name in ("needs", "deterministic", "workspace")]
    return (*results, gradients, *asked, options)
