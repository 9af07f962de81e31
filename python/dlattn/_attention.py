# Written by python/api/write.py from attention.py.in: edit that, or arguments.py.
"""Attention and its forms: the native module reads and checks what they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

from dlattn import _core
from dlattn._errors import UnsupportedError
from dlattn._types import (
    Causal,
    Kernel,
    Layout,
    OutDType,
    Precision,
    QuantizedKV,
    Tensor,
    Window,
)

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _declared_as(declaration: Callable[..., Any]) -> Callable[[_Call], _Call]:
    """Give a function that passes its keywords on as they are a declaration's signature.

    Python puts in a default of a keyword in some 20 ns, and there are 20 of them: to name them all
    takes 5% of the time of an eager call on a GPU.
    """

    def declare(call: _Call) -> _Call:
        return update_wrapper(call, declaration, assigned=("__doc__", "__annotations__"))

    return declare


def _attention(
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None,
    *,
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
) -> Any:
    """Attention: softmax(softmax_scale * q kᵀ, modified and masked) v.

    The scores are never written to memory: they are computed tile by tile, with a softmax whose
    maximum and denominator are carried along [1, 2, 3]. Nothing is copied and nothing waits: on a
    GPU the call enqueues the work and returns, and it can be captured in a CUDA graph.

    Args:
        q: Queries, (batch, seqlen_q, num_heads, head_dim) in the layout "bshd". float16, bfloat16
            or float8_e4m3fn [7]; float32 on the CPU and in the kernel "scalar"; float64 on the CPU.
            Any strides of at least 0 with a contiguous last dimension; rows aligned to 16 bytes are
            fastest. The result is of q's framework and on q's device.
        k: Keys, (batch, seqlen_k, num_heads_kv, head_dim), of q's dtype. num_heads_kv divides
            num_heads: query head h reads key head h // (num_heads // num_heads_kv) (GQA, MQA [4]).
            Or what `quantize_kv` returned of keys and values, with None for v.
        v: Values, (batch, seqlen_k, num_heads_kv, head_dim_v), of q's dtype.
        causal: Which keys a query may attend to. Query i stands at key position p = i + shift. True
            or "bottom_right": keys j <= p with shift = seqlen_k - seqlen_q, so that the last query
            sees the last key. "top_left": keys j <= p with shift = 0. False: all keys (shift =
            seqlen_k - seqlen_q, for `window` and `alibi_slopes`).
        softmax_scale: Factor of q·k, from 2^-126 to 2^126. None: 1 / sqrt(head_dim).
        window: (left, right), the number of keys that a query sees to either side of its position:
            p - left <= j <= p + right. None on a side: no limit.
        softcap: If not 0, scores become softcap * tanh(score / softcap), before bias and ALiBi.
            From 2^-100 to 2^100.
        bias: Added to the scores. Broadcastable to (batch, num_heads, seqlen_q, seqlen_k); q's
            dtype or float32, with q of float8_e4m3fn float16, bfloat16 or float32. -inf hides the
            key.
        mask: bool, True where a query may attend to a key; broadcastable as `bias`.
        alibi_slopes: float32, (num_heads,) or (batch, num_heads): slope * |p - j| is subtracted
            from the scores [5].
        sinks: float32, (num_heads,): a logit per head that joins the softmax's denominator, and has
            no value [6].
        q_descale: With q of float8_e4m3fn alone: the factor of its elements, one for each head.
            float32 on q's device, which the host does not read; broadcastable to (batch,
            num_heads_kv), as FlashAttention-3 takes it, or to (batch, num_heads). None: 1.
        k_descale: The same for k, broadcastable to (batch, num_heads_kv).
        v_descale: The same for v, broadcastable to (batch, num_heads_kv).
        precision: The numbers that are multiplied, with q of float16 or bfloat16 and head dims up
            to 256. None: the inputs as they are. "int8_fp8": 8-bit integers for q·k, and
            float8_e4m3fn for probabilities times v [8]. "int8_fp16": 8-bit integers for q·k, and
            float16 for probabilities times v [9]. "fp8": float8_e4m3fn for both. q, k and v are
            quantised on the way, k and v into a workspace of the framework's memory (see
            `quantize_kv`, also for numbers that are not finite). Each row of q has a scale, with
            "fp8" each 64 rows. Not with softcap or alibi_slopes. "auto" never chooses it.
        layout: Dimensions of q, k, v and out: "bshd", or "bhsd" for (batch, num_heads, seqlen,
            head_dim).
        out: Where to write the result: of its shape and dtype, on q's device, writable. It shares
            no element with an input; interleaved slices of one buffer are fine if their strides
            show that they are apart. torch counts it as modified in place. None: a new tensor, of a
            library that dlattn can allocate for. Not for JAX, whose arrays are immutable.
        out_dtype: Dtype of the result for q of float8_e4m3fn: "bfloat16", "float16" or "float32".
            None: that of `out` if it is given, else "bfloat16". For other dtypes of q it is q's.
        return_lse: Also return the log of the softmax's denominator.
        stream: The CUDA stream to enqueue on: a handle, or a torch, CuPy or CUDA Python stream.
            None: the current stream of q's framework, or the stream that its
            `__cuda_array_interface__` names, by default the legacy default stream. Order other
            streams against it as you would for any kernel; those that such interfaces name are
            waited for, on the GPU. Not for JAX, which orders its work itself.
        kernel: The one kernel to use, of those in `info().kernels`, or "auto" for the one predicted
            to be the fastest. One of a kernel's variants may follow: "wmma:narrow" names a tile
            shape (see `Plan.variant`), "wmma:packed" and "wmma:narrow+unpacked" also say whether
            query heads are packed (see `Plan.packed_heads`).
        batch_invariant: Give a sequence the same bits alone, in any batch and in any batch of
            `attention_varlen`, on the same device, as long as its rows are aligned alike. Without
            it the same call gives the same bits each time, but some choices of the plan follow
            batch size, numbers of heads and lengths: on a GPU the kernel, its tile shape, whether
            it packs heads and whether it splits the keys, on the CPU into how many parts the keys
            of few queries are split. With it these choices are those for a large batch of long
            sequences, which is slower for a small one, most of all with few queries: they depend on
            dtype, head dims, num_heads / num_heads_kv, features, alignment and device alone. A call
            beyond the limits of the chosen kernel is refused, on GPUs mostly one of more than
            131,072 keys; "wmma:general" takes any number of them.

    Values: every kernel accepts these, for every dtype. Other values of Python objects are refused.
    Values in a tensor cannot be refused, and give these results.

        q, k, v: Finite numbers whose scores stay within fp32's range, |q·k| and |softmax_scale *
            q·k| <= 2^126. Beyond that a row may be inf or NaN, as a plain computation in fp32
            gives. On a GPU |v| <= 2^95 (4.0e28) in bfloat16, of up to 2^20 keys: weights of v are
            up to 2^15 before they are normalised, and their sums with it must stay below 2^128.
        softmax_scale: 2^-126 (1.18e-38) to 2^126 (8.5e37).
        softcap: 0 for none, or 2^-100 (7.9e-31) to 2^100 (1.27e30).
        bias: -inf hides the key, as `mask` does. Every finite number, down to the least of its
            dtype, is a number like any other: a row all of whose keys have a large negative bias is
            not hidden. If they share one of magnitude 1e9 or more, beside which scores vanish, out
            is the mean of v over those keys. Below that it is a weighted mean of v's rows, with at
            most twice the error of a plain computation in fp32, in natural scores or times log2(e).
            NaN or +inf: the row is NaN.
        alibi_slopes: Any. Beyond 2^64 (1.8e19), ±inf too, it counts as 2^64 with its sign. NaN: the
            head's rows are NaN.
        sinks: Any. -inf: no sink. +inf: out = 0 and lse = +inf. NaN: NaN.
        q_descale: Positive and finite, or 0, and so must be its product with k_descale. That times
            softmax_scale is 0 or from 2^-126 to 2^126; below, it may count as 0. Negative or NaN:
            the head's rows are NaN; inf: NaN or infinite. Only rows that see no key may be 0 then,
            as always.
        k_descale: As for q_descale.
        v_descale: Any: a factor of out.

    An element x of q, k or v of float8_e4m3fn stands for x times its head's descale; scores are
    softmax_scale * q_descale * k_descale * q·k, and softcap applies to them.

    Scores are computed in fp32 (in float64 for float64 inputs). A shift common to a row's scores
    changes out only by fp32's rounding.

    Returns:
        out, of q's shape with head_dim_v for head_dim, and of q's dtype or `out_dtype`; with
        `return_lse`, the pair (out, lse), lse being the natural logarithm of the softmax's
        denominator, float32 of shape (batch, num_heads, seqlen_q) in both layouts. A query that may
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
        [7] Micikevicius et al. FP8 formats for deep learning. arXiv:2209.05433, 2022; descales as
            in Shah et al. FlashAttention-3. arXiv:2407.08608, 2024.
        [8] Zhang et al. SageAttention2. arXiv:2411.10958, 2024.
        [9] Zhang et al. SageAttention. arXiv:2410.02367, 2024.
    """
    raise NotImplementedError  # attention() stands for it


@_declared_as(_attention)
def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return _core.attention(q, k, v, options)


def _attention_varlen(
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
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
) -> Any:
    """Attention within each of several sequences of any lengths, stored without padding.

    The sequences lie one after the other: sequence b owns the rows cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] of q and out, and the rows cu_seqlens_k[b] to cu_seqlens_k[b + 1] of k and
    v. Everything else is as for `attention`; seqlen_q, seqlen_k and shift are each sequence's own.

    Args:
        q: Queries, (total_q, num_heads, head_dim) in the layout "bshd". Dtypes, strides and
            alignment are those of `attention`.
        k: Keys, (total_k, num_heads_kv, head_dim), of q's dtype. num_heads_kv divides num_heads. Or
            what `quantize_kv` returned for the same cu_seqlens_k and seqused_k, with None for v:
            another number of sequences or a larger max_seqlen_k is refused, and on the CPU other
            offsets and more keys too. With page_table: a cache in pages, (num_pages, page_size,
            num_heads_kv, head_dim), as for `attention_with_kvcache`, also of int8 or float8_e4m3fn.
        v: Values, (total_k, num_heads_kv, head_dim_v), of q's dtype. With page_table: (num_pages,
            page_size, num_heads_kv, head_dim_v).
        cu_seqlens_q: int32, (batch + 1,), contiguous: the row of q at which each sequence begins,
            and the one at which the last sequence ends. Not decreasing, within 0 to total_q. The
            first may be more than 0 and the last less than total_q, as in a slice of a larger
            batch: rows of out and lse that belong to no sequence are not written. On the CPU other
            values are refused.
        cu_seqlens_k: The same for the rows of k and v, within 0 to total_k. None with page_table.
        max_seqlen_q: At least the number of queries of the longest sequence, 0 to 2^31 - 1. Further
            queries of a longer one are not computed on a GPU; the CPU refuses it.
        max_seqlen_k: The same for keys.
        seqused_k: int32, (batch,), contiguous: how many of each sequence's keys to use, from its
            first; 0 to its length. None: all. The causal shift counts the keys in use. With
            page_table it is required, and tells how many keys each sequence has.
        page_table: int32, (batch, max_pages), rows contiguous, on q's device: key j of sequence b
            is row j % page_size of page page_table[b, j // page_size]. Entries behind a sequence's
            last page, and those of pages before a window, whose keys no query sees, are not read
            and may be anything, as -1. None: k and v are not in pages.
        causal: As for `attention`, with the lengths of each sequence: False, True, "bottom_right"
            or "top_left".
        softmax_scale: Factor of q·k, from 2^-126 to 2^126. None: 1 / sqrt(head_dim).
        window: (left, right), the number of keys that a query sees to either side of its position:
            p - left <= j <= p + right. None on a side: no limit.
        softcap: If not 0, scores become softcap * tanh(score / softcap), before bias and ALiBi.
            From 2^-100 to 2^100.
        bias: Added to the scores. Broadcastable to (batch, num_heads, max_seqlen_q, max_seqlen_k);
            q's dtype or float32, with q of float8_e4m3fn as for `attention`. -inf hides the key.
        mask: bool, True where a query may attend to a key; broadcastable as `bias`.
        alibi_slopes: float32, (num_heads,) or (batch, num_heads): slope * |p - j| is subtracted
            from the scores.
        sinks: float32, (num_heads,): a logit per head that joins the softmax's denominator, and has
            no value.
        q_descale: With q of float8_e4m3fn alone: the factor of its elements, one for each head.
            float32 on q's device, which the host does not read; broadcastable to (batch,
            num_heads_kv), as FlashAttention-3 takes it, or to (batch, num_heads). None: 1.
        k_descale: The same for k, broadcastable to (batch, num_heads_kv). With page_table and k of
            int8 or float8_e4m3fn, beside q of float16 or bfloat16: the factor of its elements with
            which `append_kv` wrote them, required then.
        v_descale: The same for v.
        precision: The numbers that are multiplied, as for `attention`: None for the inputs,
            "int8_fp8", "int8_fp16" or "fp8".
        layout: Dimensions of q, k, v and out: "bshd" for (total, num_heads, head_dim), "bhsd" for
            (num_heads, total, head_dim).
        out: Where to write the result, as for `attention`. None: a new tensor.
        out_dtype: Dtype of the result for q of float8_e4m3fn, as for `attention`.
        return_lse: Also return the log of the softmax's denominator.
        stream: The CUDA stream to enqueue on, as for `attention`.
        kernel: The one kernel to use, or "auto", as for `attention`.
        batch_invariant: Give a sequence the same bits alone and in any batch, as for `attention`.
        num_splits: The number of parts that the keys of a row are split into. Different thread
            blocks compute them, and they are added up in order. A sequence's own length decides
            where they begin. None: the plan decides. For keys in a cache, and the kernel "decode";
            on the CPU at most a part for each tile of keys. Not more than 1 with batch_invariant.
        split_size: The number of keys in a part, a multiple of 128: parts begin at its multiples,
            counted from a sequence's first key, and are added up in order. So a sequence has the
            same bits in any batch and at any capacity of the cache, in CUDA graphs too. The
            workspace grows with that capacity. None: the plan decides. For keys in a cache, and the
            kernel "decode"; the CPU does not split the keys then. Not with num_splits.
        workspace: Memory on q's device that the plan needs beside the tensors: contiguous, of any
            dtype, at least `Plan.workspace_bytes` bytes, aligned to 256 bytes, apart from the
            tensors. It needs no initialisation. A call must be done with it before another uses it.
            None: q's framework allocates it. Not for JAX. The CPU, `supported` and `plan` need
            none.

    `attention` lists the accepted values. The host does not read lengths that lie on a GPU, and
    no kernel leaves the tensors, whatever the lengths are: a sequence's rows are those from
    clamp(cu_seqlens[b], 0, total) to clamp(cu_seqlens[b + 1], its first row, total), the first
    max_seqlen of them at most, and seqused_k is clamped to the sequence's length. With page_table
    keys and values lie in pages, as for `attention_with_kvcache`, and seqused_k counts them.

    Returns:
        out, (total_q, num_heads, head_dim_v) in the layout "bshd", of q's dtype or `out_dtype`;
        with `return_lse` the pair (out, lse), lse being float32 of shape (num_heads, total_q) in
        both layouts. A query that may attend to no key gets what it gets from `attention`.

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention`.

    Source:
        The interface is that of flash_attn_varlen_func: Dao. FlashAttention-2. arXiv:2307.08691,
        2023; https://github.com/Dao-AILab/flash-attention.
    """
    raise NotImplementedError  # attention_varlen() stands for it


@_declared_as(_attention_varlen)
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    **options: Any,
) -> Any:
    return _core.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options
    )


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
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
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
    out: Tensor | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
    num_splits: int | None = None,
    split_size: int | None = None,
    workspace: Tensor | None = None,
) -> Any:
    """Attention of a few new queries over each sequence's keys and values in a cache.

    This is a step of generation: seqlen_q is 1, a few drafted tokens, or a chunk of a prompt. The
    keys and values of these tokens are in the cache before the call, or are given as k and v, and
    the call writes them to it. The numbers of keys and their pages are tensors on q's device, which
    the host never reads: nothing waits, and a CUDA graph captured once serves other lengths and
    other pages at each replay.

    Args:
        q: Queries, (batch, seqlen_q, num_heads, head_dim) in the layout "bshd": float16 or
            bfloat16; float32 on the CPU and in the kernel "scalar"; float64 on the CPU. Strides and
            alignment are those of `attention`.
        k_cache: Keys, of q's dtype, or of int8 or float8_e4m3fn with q of float16 or bfloat16 and
            k_descale: (batch, seqlen_k, num_heads_kv, head_dim), or with page_table (num_pages,
            page_size, num_heads_kv, head_dim), with any page_size from 1 on. All strides but the
            last are free, so pages of other layouts are views: (num_pages, 2, page_size, ...) is
            `cache[:, 0]` and `cache[:, 1]`.
        v_cache: Values, of k_cache's shape with head_dim_v for head_dim, and of its dtype.
        seqused_k: int32, (batch,), contiguous, on q's device: how many keys each sequence has in
            the cache, those of this step's tokens among them; 0 to max_seqlen_k. Under causality
            the last query sees the last of them. With k, how many it has before the call, as
            flash-attn's cache_seqlens: the rows of k are counted in addition.
        page_table: int32, (batch, max_pages), rows contiguous, on q's device: key j of sequence b
            is row j % page_size of page page_table[b, j // page_size]. Entries behind a sequence's
            last page, and those of pages before a window, whose keys no query sees, are not read
            and may be anything, as -1. None: k and v are not in pages.
        cache_batch_idx: int32, (batch,), contiguous: the entry of k_cache and v_cache that each
            sequence's keys are in; they may then have more entries than there are sequences. None:
            sequence b is entry b. Not with page_table.
        leftpad_k: int32, (batch,), contiguous: the number of hidden keys at the start of each
            sequence, 0 to seqused_k. Positions still count them. None: 0.
        max_seqlen_k: At least the number of keys of the longest sequence. A bound for the plan,
            which does not know seqused_k: a tight one may be faster. None: the capacity of the
            cache or the page table.
        k: New keys, (batch, seqlen_new, num_heads_kv, head_dim), of q's dtype: `append_kv` writes
            them to k_cache, behind the keys that seqused_k counts, and they are attended to. A call
            that is refused writes nothing. Not with stream: lengths are added on the current stream
            of their library. None: the caches are only read.
        v: New values, of k's shape with head_dim_v for head_dim. With k alone.
        rotary_cos: Cosines, (positions, rotary_dim / 2), of q's dtype or float32, with k alone: k,
            and q with as many rows, are rotated by their positions as by `append_kv`, counted from
            leftpad_k. Without causal and window all rows of q have the position of the sequence's
            first new key, as in flash-attn.
        rotary_sin: Sines, the same.
        rotary_interleaved: Whether pairs are columns 2j and 2j + 1 (GPT-J); else they are j and j +
            rotary_dim / 2 (GPT-NeoX, Llama).
        causal: As for `attention`, with seqused_k for seqlen_k: False, True, "bottom_right" or
            "top_left". seqlen_q new tokens see those before them and each other with True.
        softmax_scale: Factor of q·k, from 2^-126 to 2^126. None: 1 / sqrt(head_dim).
        window: (left, right), the number of keys that a query sees to either side of its position:
            p - left <= j <= p + right. None on a side: no limit.
        softcap: If not 0, scores become softcap * tanh(score / softcap), before bias and ALiBi.
            From 2^-100 to 2^100.
        mask: bool, True where a query may attend to a key; broadcastable to (batch, num_heads,
            seqlen_q, max_seqlen_k). Its last dimension counts a sequence's keys from its first. A
            tree of drafts is such a mask.
        alibi_slopes: float32, (num_heads,) or (batch, num_heads): slope * |p - j| is subtracted
            from the scores.
        sinks: float32, (num_heads,): a logit per head that joins the softmax's denominator, and has
            no value.
        k_descale: The factor of the elements of k_cache of int8 or float8_e4m3fn, with which
            `append_kv` wrote them: float32 on q's device, which the host does not read,
            broadcastable to (batch, num_heads_kv). Required then, and not with other dtypes.
        v_descale: The same for v_cache.
        layout: Dimensions of q, the caches and out: "bshd" (NHD), or "bhsd" (HND) for (batch,
            num_heads, seqlen, head_dim) and pages of (num_heads_kv, page_size, head_dim).
        out: Where to write the result, as for `attention`. None: a new tensor.
        return_lse: Also return the log of the softmax's denominator.
        stream: The CUDA stream to enqueue on, as for `attention`.
        kernel: The one kernel to use, or "auto", as for `attention`.
        batch_invariant: Give a sequence the same bits alone and in any batch, as for `attention`.
            Keys are split all the same, at positions that no other sequence changes: see
            split_size, which is 1024 then if it is not given.
        num_splits: The number of parts that the keys of a row are split into. Different thread
            blocks compute them, and they are added up in order. A sequence's own length decides
            where they begin. None: the plan decides. For keys in a cache, and the kernel "decode";
            on the CPU at most a part for each tile of keys. Not more than 1 with batch_invariant.
        split_size: The number of keys in a part, a multiple of 128: parts begin at its multiples,
            counted from a sequence's first key, and are added up in order. So a sequence has the
            same bits in any batch and at any capacity of the cache, in CUDA graphs too. The
            workspace grows with that capacity. None: the plan decides. For keys in a cache, and the
            kernel "decode"; the CPU does not split the keys then. Not with num_splits.
        workspace: Memory on q's device that the plan needs beside the tensors: contiguous, of any
            dtype, at least `Plan.workspace_bytes` bytes, aligned to 256 bytes, apart from the
            tensors. It needs no initialisation. A call must be done with it before another uses it.
            None: q's framework allocates it. Not for JAX. The CPU, `supported` and `plan` need
            none.

    `attention` lists the accepted values. Parts of the cache behind a sequence's last key, in pages
    that nobody uses or before leftpad_k have no effect, even if they are NaN. seqused_k,
    page_table, cache_batch_idx and leftpad_k are checked on the CPU; on a GPU lengths are clamped
    to 0 and max_seqlen_k, and entries and pages to those that exist.

    Returns:
        out, of q's shape with head_dim_v for head_dim; with `return_lse` the pair (out, lse), as
        from `attention`. A sequence without keys gets out = 0 and lse = -inf (or its sink).

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention`.

    Source:
        Pages: Kwon et al. PagedAttention. arXiv:2309.06180, 2023. The interface follows
        flash_attn_with_kvcache; https://github.com/Dao-AILab/flash-attention.
    """
    if not (k is v is rotary_cos is rotary_sin is None):
        from dlattn._append_and_attend import append_and_attend

        return append_and_attend(
            q,
            k,
            v,
            k_cache,
            v_cache,
            options={
                "seqused_k": seqused_k,
                "page_table": page_table,
                "cache_batch_idx": cache_batch_idx,
                "leftpad_k": leftpad_k,
                "max_seqlen_k": max_seqlen_k,
                "causal": causal,
                "softmax_scale": softmax_scale,
                "window": window,
                "softcap": softcap,
                "mask": mask,
                "alibi_slopes": alibi_slopes,
                "sinks": sinks,
                "k_descale": k_descale,
                "v_descale": v_descale,
                "layout": layout,
                "out": out,
                "return_lse": return_lse,
                "stream": stream,
                "kernel": kernel,
                "batch_invariant": batch_invariant,
                "num_splits": num_splits,
                "split_size": split_size,
                "workspace": workspace,
            },
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            rotary_leftpad_k=leftpad_k,
        )
    try:
        return _core.attention_with_kvcache(
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
    except (UnsupportedError, TypeError) as error:
        from dlattn import _views  # and NumPy with it, which loads slowly

        _views.rename(error, {"k": "k_cache", "v": "v_cache"})
        raise
