"""`attention` under the names and signatures of the package flash-attn, version 2.8.

    from dlattn.flash_attn import flash_attn_func

Arguments mean what they mean there, and are passed in the same order. Which values are accepted,
and what their extremes give, is told by `dlattn.attention` (Values):

    dropout_p: 0.0.
    softmax_scale: Factor of q·k, None: 1 / sqrt(head_dim). For a negative one q is negated, in a
        new array.
    causal: Query i attends to keys j <= i + seqlen_k - seqlen_q, so that the last query sees the
        last key. A query before the first key sees nothing.
    window_size: (left, right): keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q
        + right; a negative number is no limit. With causal, right counts as 0. A side of at least
        seqlen_k (max_seqlen_k of the varlen functions) is no limit either; and where left alone is
        limited, right is seqlen_k, not infinite, as in flash-attn's own code. Both can matter only
        to queries that stand before the first key.
    softcap: If > 0, scores become softcap * tanh(score / softcap); else it does nothing.
    alibi_slopes: float32, (num_heads,) or (batch, num_heads): slope * |i + seqlen_k - seqlen_q - j|
        is subtracted from the scores.
    deterministic: Whether gradients have the same bits each time, at some cost, as for
        `dlattn.attention_backward`. The forward pass has them in both packages. For bits that do
        not depend on the rest of the batch see `dlattn.attention`.
    return_attn_probs: Return (out, softmax_lse, S_dmask). softmax_lse is the log of the softmax's
        denominator, float32, and +inf for a query that sees no key (where `attention` tells -inf);
        out is 0 there. S_dmask is what flash-attn returns when nothing is dropped: an empty array.

    q_descale, k_descale, v_descale: Of flash_attn_func and flash_attn_varlen_func, by keyword, as
        FlashAttention-3 names them: what elements of float8_e4m3fn count, float32 of (batch,
        num_heads_kv). out is bfloat16 then. k_descale and v_descale are flash_attn_with_kvcache's
        too, for caches of float8_e4m3fn or int8 beside q of 16 bits.
    s_aux: Of the same two and flash_attn_with_kvcache, by keyword: sinks, float32 of (num_heads,),
        natural logits that take a share of each row's softmax, as the kernels of gpt-oss name them.

Torch tensors may require grad: gradients of out and softmax_lse with respect to q, k, v,
alibi_slopes and s_aux are those of `dlattn.attention_backward`, and have none themselves. Descales,
pages and `out` have no gradients, and neither has flash_attn_with_kvcache.

It differs in these points: float32 (and on the CPU float64), any head_dim that a kernel has, and
head_dim_v are accepted too; so are the arrays of CuPy, NumPy and, except as qkv and kv, JAX.
An array whose last dimension is not contiguous is refused and never copied. With alibi_slopes and
causal, flash-attn leaves a constant of each row, slope * (i + seqlen_k - seqlen_q), out of its
softmax_lse; here softmax_lse is that of the scores as described.

All functions raise UnsupportedError, TypeError and DeviceError as `attention` does, among others
for dropout_p other than 0.

The passes that training code calls itself, `_flash_attn_forward` and `_flash_attn_backward`, are in
`dlattn.flash_attn.flash_attn_interface`, as in flash-attn; with
sys.modules["flash_attn"] = dlattn.flash_attn code that imports flash-attn finds them there.
__version__ is that of the flash-attn whose signatures these are.

Source: Dao. FlashAttention-2. arXiv:2307.08691, 2023; https://github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dlattn import _views
from dlattn._attention import attention
from dlattn._errors import UnsupportedError
from dlattn._flash_kvcache import (
    NO_WINDOW,
    flash_attn_with_kvcache,
    lse_of_flash,
    one_split,
    options_of,
    triple,
    varlen,
    window_of,
)
from dlattn._numbers import integer

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__version__ = "2.8.3"


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    s_aux: Any = None,
) -> Any:
    """Attention of q over k and v. The module tells what the arguments mean.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_heads_kv, head_dim); num_heads_kv divides num_heads.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).

    Returns:
        out, (batch, seqlen_q, num_heads, head_dim_v); with return_attn_probs the triple (out,
        softmax_lse, S_dmask), softmax_lse being (batch, num_heads, seqlen_q).
    """
    options = options_of(dropout_p, causal, softcap, return_attn_probs)
    _views.check_flag(deterministic, "deterministic")
    if window_size is not NO_WINDOW:
        shape = _views.shape_of(k, "k")
        options["window"] = window_of(window_size, causal, shape[1] if len(shape) == 4 else 0)
    function: Any = attention
    if _views.wants_operator(q, k, v, alibi_slopes, s_aux):
        from dlattn.integrations.torch import flash

        function = partial(flash.attention, deterministic=deterministic)
    try:
        q, softmax_scale = _views.with_any_scale(q, softmax_scale)
        result = function(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            alibi_slopes=alibi_slopes,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            sinks=s_aux,
            **options,
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, {"sinks": "s_aux"})
        raise
    return triple(*result) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention among the tokens of qkv; q, k and v are views of it.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim); not of JAX, whose arrays have no views.

    Returns:
        As flash_attn_func.
    """
    q, k, v = _views.parts(qkv, "qkv", 2, 3, "(batch, seqlen, 3, num_heads, head_dim)")
    try:
        return flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, {"q": "qkv[:, :, 0]", "k": "qkv[:, :, 1]", "v": "qkv[:, :, 2]"})
        raise


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q over the keys and values of kv; k and v are views of it.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        kv: (batch, seqlen_k, 2, num_heads_kv, head_dim); not of JAX, whose arrays have no views.

    Returns:
        As flash_attn_func.
    """
    k, v = _views.parts(kv, "kv", 2, 2, "(batch, seqlen_k, 2, num_heads_kv, head_dim)")
    try:
        return flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, {"k": "kv[:, :, 0]", "v": "kv[:, :, 1]"})
        raise


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    s_aux: Any = None,
    seqused_k: Any = None,
    out: Any = None,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    scheduler_metadata: Any = None,
    fa_version: int | None = None,
) -> Any:
    """Attention within each of several sequences, stored one after the other without padding.

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_heads_kv, head_dim); num_heads_kv divides num_heads.
        v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: int32, (batch + 1,): where each sequence's queries begin, and total_q.
        cu_seqlens_k: The same for keys and values.
            With block_table only its differences count, and only without seqused_k.
        max_seqlen_q: At least the length of the longest sequence of queries; an int, required.
        max_seqlen_k: The same for keys.
        block_table: int32, (batch, max_pages): then k and v are pages, (num_pages, page_size,
            num_heads_kv, .) of any page_size, and key j of sequence b is row j % page_size of page
            block_table[b, j // page_size].

    vLLM's version of the function has these too, by keyword:
        seqused_k: int32, (batch,): how many keys each sequence has.
        out: Where to write the result.
        return_softmax_lse: Return (out, softmax_lse).
        num_splits: See flash_attn_with_kvcache.
        scheduler_metadata, fa_version: Ignored. A plan needs no preparation, and there is one
            version. With block_table q_descale is ignored too, and so are the others of pages that
            are not of 8 bits; pages of float8_e4m3fn or int8 need them.

    Returns:
        out, (total_q, num_heads, head_dim_v); with return_attn_probs the triple (out, softmax_lse,
        S_dmask), softmax_lse being (num_heads, total_q).
    """
    options = options_of(dropout_p, causal, softcap, return_attn_probs, return_softmax_lse)
    _views.check_flag(deterministic, "deterministic")
    options["batch_invariant"] = one_split(num_splits)
    options |= {"softmax_scale": softmax_scale, "alibi_slopes": alibi_slopes, "sinks": s_aux}
    if window_size is not NO_WINDOW:
        known = integer(max_seqlen_k) or 0  # anything but an int is refused later
        options["window"] = window_of(window_size, causal, known)
    result = varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k=seqused_k,
        block_table=block_table,
        descales={"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale},
        deterministic=deterministic,
        out=out,
        **options,
    )
    if return_attn_probs:
        return triple(*result)
    return lse_of_flash(*result) if return_softmax_lse else result


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention within each of several sequences, q, k and v being views of qkv.

    Args:
        qkv: (total, 3, num_heads, head_dim); not of JAX, whose arrays have no views.
        cu_seqlens: int32, (batch + 1,): where each sequence begins, and total.
        max_seqlen: At least the length of the longest sequence; an int.

    Returns:
        As flash_attn_varlen_func.
    """
    q, k, v = _views.parts(qkv, "qkv", 1, 3, "(total, 3, num_heads, head_dim)")
    try:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except (UnsupportedError, TypeError) as error:
        names = {"q": "qkv[:, 0]", "k": "qkv[:, 1]", "v": "qkv[:, 2]"}
        names |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
        names |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
        _views.rename(error, names)
        raise


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention within each of several sequences, k and v being views of kv.

    Args:
        q: (total_q, num_heads, head_dim).
        kv: (total_k, 2, num_heads_kv, head_dim); not of JAX, whose arrays have no views.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: As for flash_attn_varlen_func.

    Returns:
        As flash_attn_varlen_func.
    """
    k, v = _views.parts(kv, "kv", 1, 2, "(total_k, 2, num_heads_kv, head_dim)")
    try:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, {"k": "kv[:, 0]", "v": "kv[:, 1]"})
        raise
