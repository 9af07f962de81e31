"""The public functions. They pass their arguments on: the native module reads and checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from dlattn import _core
from dlattn._types import DeviceInfo, Info, Plan, Support

Tensor: TypeAlias = Any
"""A torch, CuPy, JAX or NumPy array, or any object with __dlpack__."""
Causal: TypeAlias = bool | Literal["bottom_right", "top_left"]
Window: TypeAlias = tuple[int | None, int | None]
Layout: TypeAlias = Literal["bshd", "bhsd"]
Kernel: TypeAlias = str

_NO_WINDOW: Window = (None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = _NO_WINDOW,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
) -> Any:
    """Attention: softmax(softmax_scale * q kᵀ, modified and masked) v.

    The scores are never written to memory: they are computed tile by tile, with a softmax whose
    maximum and denominator are carried along [1, 2, 3]. Nothing is copied and nothing waits: on a
    GPU the call enqueues the work and returns, and it can be captured in a CUDA graph.

    Args:
        q: Queries, (batch, seqlen_q, num_heads, head_dim) in the layout "bshd". float16 or
            bfloat16; float32 on the CPU and in the kernel "scalar"; float64 on the CPU. Any strides
            with a contiguous last dimension; rows aligned to 16 bytes are fastest. The result is
            of q's framework and on q's device.
        k: Keys, (batch, seqlen_k, num_heads_kv, head_dim), of q's dtype. num_heads_kv divides
            num_heads: query head h reads key head h // (num_heads // num_heads_kv) (GQA, MQA [4]).
        v: Values, (batch, seqlen_k, num_heads_kv, head_dim_v), of q's dtype.
        causal: Which keys a query may attend to. Query i stands at key position p = i + shift.
            True or "bottom_right": keys j <= p with shift = seqlen_k - seqlen_q, so that the last
            query sees the last key. "top_left": keys j <= p with shift = 0. False: all keys
            (shift = seqlen_k - seqlen_q, for `window` and `alibi_slopes`).
        softmax_scale: Factor of q·k, from 2^-126 to 2^126. None: 1 / sqrt(head_dim).
        window: (left, right), tokens that a query sees to either side: p - left <= j <= p + right.
            None on a side: no limit.
        softcap: If not 0, scores become softcap * tanh(score / softcap), before all that follows.
            From 2^-100 to 2^100.
        bias: Added to the scores. Broadcastable to (batch, num_heads, seqlen_q, seqlen_k); q's
            dtype or float32. -inf hides the key.
        mask: bool, True where a query may attend to a key; broadcastable as `bias`.
        alibi_slopes: float32, (num_heads,) or (batch, num_heads): slope * |p - j| is subtracted
            from the scores [5].
        sinks: float32, (num_heads,): a logit per head that joins the softmax's denominator, and
            has no value [6].
        layout: "bshd", or "bhsd" for (batch, num_heads, seqlen, head_dim); holds for q, k, v, out.
        out: Where to write the result: of its shape and dtype, on q's device, writable. It shares
            no element with an input; slices of one buffer, interleaved in any way that their
            strides show to be apart, are fine. torch counts it as modified in place.
        return_lse: Also return the log of the softmax's denominator.
        stream: The CUDA stream to enqueue on: a handle, or a torch, CuPy or CUDA Python stream.
            None: the current stream of q's framework. Order other streams against it as you would
            for any kernel. Not for JAX, which orders its work itself.
        kernel: "auto", or the one kernel to use: "cpu", "scalar", "wmma_qk", "wmma_smem", "wmma",
            "sm90"; or one of the tile shapes of "wmma": "wmma:narrow" (see `Plan.variant`); or it
            with query heads packed or not: "wmma:packed", "wmma:narrow+unpacked" (see
            `Plan.packed_heads`).
        batch_invariant: Give a sequence the same bits alone, in any batch and in any pack of
            `attention_varlen`, on the same device, as long as its rows are aligned alike. Without
            it the same call gives the same bits each time, but some choices of the plan follow
            batch size, numbers of heads and lengths: on a GPU the kernel, the tile shape of "wmma"
            and whether it packs heads, on the CPU into how many parts the keys of few queries are
            split. With it they are made as for a large batch of long sequences, which is slower
            for a small one, most of all with few queries.

    Values: these are accepted, by every kernel and for every dtype alike. What Python holds and is
    not accepted is refused; what lies in a tensor cannot be, and has these results.

        q, k, v: Finite numbers whose scores stay within fp32's range, |q·k| and |softmax_scale *
            q·k| <= 2^126. Beyond that a row may be inf or NaN, as a plain computation in fp32
            gives. On a GPU |v| <= 2^95 (4.0e28) in bfloat16, of up to 2^20 keys: weights of v are
            up to 2^15 before they are normalised, and their sums with it must stay below 2^128.
        softmax_scale: 2^-126 (1.18e-38) to 2^126 (8.5e37).
        softcap: 0 for none, or 2^-100 (7.9e-31) to 2^100 (1.27e30).
        bias: -inf hides the key, as `mask` does. Every finite number, down to the least of its
            dtype, is a number like any other: a row all of whose keys have a large negative bias
            is not hidden. If they share one of magnitude 1e9 or more, beside which scores vanish,
            out is the mean of v over those keys. Below that it is a weighted mean of v's rows, its
            error at most twice the worse of two plain computations in fp32, with scores natural
            and with scores times log2(e). NaN or +inf: the row is NaN.
        alibi_slopes: Any. Beyond 2^64 (1.8e19), ±inf too, it counts as 2^64 with its sign. NaN:
            the head's rows are NaN.
        sinks: Any. -inf: no sink. +inf: out = 0 and lse = +inf. NaN: NaN.

    Scores are formed in fp32 (of float64 in float64). A shift common to a row's scores changes
    nothing in out but what fp32 rounds.

    Returns:
        out, of q's shape with head_dim_v for head_dim; with `return_lse`, the pair (out, lse), lse
        being float32 of shape (batch, num_heads, seqlen_q) in both layouts. A query that may
        attend to no key gets out = 0 and lse = -inf (or its sink, if there are sinks).

    Raises:
        UnsupportedError: A value is wrong, or no kernel computes this; see `supported`.
        TypeError: An argument is not the kind of object that is accepted.
        DeviceError: The device or the launch failed.

    References:
        [1] Milakov, Gimelshein. Online normalizer calculation for softmax. arXiv:1805.02867, 2018.
        [2] Rabe, Staats. Self-attention does not need O(n²) memory. arXiv:2112.05682, 2021.
        [3] Dao et al. FlashAttention. arXiv:2205.14135, 2022; Dao. FlashAttention-2.
            arXiv:2307.08691, 2023.
        [4] Shazeer. Fast transformer decoding. arXiv:1911.02150, 2019; Ainslie et al. GQA.
            arXiv:2305.13245, 2023.
        [5] Press, Smith, Lewis. Train short, test long. arXiv:2108.12409, 2021.
        [6] Xiao et al. Efficient streaming language models with attention sinks. arXiv:2309.17453,
            2023.
    """
    return _core.attention(
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
        layout,
        out,
        return_lse,
        stream,
        kernel,
        batch_invariant,
    )


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
    window: Window = _NO_WINDOW,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
) -> Any:
    """Attention within each of several sequences, packed one after the other without padding.

    Sequence b owns the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k and v.

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_heads_kv, head_dim).
        v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: int32, (batch + 1,): where each sequence's queries begin, and where the last
            one ends; not decreasing, within 0 to total_q. Of a slice of a larger pack [0] may be
            more than 0 and the last less than total_q: rows of out and lse that are no sequence's
            stay as they are. On the CPU other values are refused.
        cu_seqlens_k: The same for keys and values.
        max_seqlen_q: At least the length of the longest sequence of queries.
        max_seqlen_k: The same for keys.
        seqused_k: int32, (batch,): how many of each sequence's keys to use, from its first; 0 to
            its length. None: all. The causal shift follows it.
        bias: Broadcastable to (batch, num_heads, max_seqlen_q, max_seqlen_k).
        mask: The same.
        layout: "bshd" for tokens before heads, as above; "bhsd" for (num_heads, total, head_dim).

    The other arguments, their values and the errors are those of `attention`; shift is each
    sequence's own. Lengths on a GPU are not read by the host, and whatever they are, no kernel
    leaves the tensors: a sequence's rows are those from clamp(cu_seqlens[b], 0, total) to
    clamp(cu_seqlens[b + 1], its first, total), the first max_seqlen of them at most, and seqused_k
    is clamped to what is there.

    Returns:
        out, (total_q, num_heads, head_dim_v); with `return_lse` the pair (out, lse), lse being
        float32 of shape (num_heads, total_q).
    """
    return _core.attention_varlen(
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
        layout,
        out,
        return_lse,
        stream,
        kernel,
        batch_invariant,
    )


def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    layout: Layout = "bshd",
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    Exact up to rounding: lse = log sum exp(lse_n), out = sum exp(lse_n - lse) out_n. A part whose
    lse is -inf contributes nothing, whatever its out holds. At most one part may have been
    computed with sinks.

    Args:
        outs: 1 to 32 results of `attention`, in a list or stacked along a first dimension; each of
            the same shape and dtype.
        lses: The lse that came with each, in a list or stacked; float32, (batch, num_heads,
            seqlen_q).
        layout: Of outs and out, as for `attention`.
        stream: As for `attention`.

    Returns:
        (out, lse), new tensors of the framework of outs.

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention`.
    """
    return _core.merge_states(outs, lses, layout, stream)


def supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = _NO_WINDOW,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
) -> Support:
    """Tell whether `attention` would run with these arguments, and if not, why.

    With the arguments of `attention_varlen` it answers for that. Nothing is launched and nothing
    allocated. A problem that is merely unsupported raises nothing; what is no tensor at all raises
    TypeError, as the call itself would.
    """
    options = (
        causal,
        softmax_scale,
        window,
        softcap,
        bias,
        mask,
        alibi_slopes,
        sinks,
        layout,
        out,
        return_lse,
        stream,
        kernel,
        batch_invariant,
    )
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    if all(argument is None for argument in packing):
        return Support(*_core.supported(q, k, v, *options))
    return Support(*_core.supported_varlen(q, k, v, *packing, *options))


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = _NO_WINDOW,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
) -> Plan:
    """Tell how `attention` would compute this: kernel, tile, grid, shared memory, splits.

    Takes the arguments of `attention` or of `attention_varlen`, launches nothing and allocates
    nothing. The result prints readably. DLATTN_PRINT_PLAN=1 in the environment prints the plan of
    every call.

    Raises:
        UnsupportedError, TypeError, DeviceError: As the call itself would.
    """
    options = (
        causal,
        softmax_scale,
        window,
        softcap,
        bias,
        mask,
        alibi_slopes,
        sinks,
        layout,
        out,
        return_lse,
        stream,
        kernel,
        batch_invariant,
    )
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    if all(argument is None for argument in packing):
        return Plan(**_core.plan(q, k, v, *options))
    return Plan(**_core.plan_varlen(q, k, v, *packing, *options))


def info() -> Info:
    """Tell what this build contains and which devices it finds. The result prints readably."""
    fields = _core.info()
    devices = tuple(DeviceInfo(**device) for device in fields.pop("devices"))
    return Info(devices=devices, **fields)
