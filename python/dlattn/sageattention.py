"""`attention` under the names and signatures of the package SageAttention, version 2.2.

    from dlattn.sageattention import sageattn

q, k and v of float16 or bfloat16 are attended to with `precision="int8_fp8"` of `dlattn.attention`:
8-bit integers for q·k, float8_e4m3fn for probabilities times v; by `sageattn_qk_int8_pv_fp16_cuda`
with `precision="int8_fp16"`, of float16 for the latter. Arguments mean what they mean
there, and are passed in the same order:

    tensor_layout: "HND", q being (batch, num_heads, seqlen_q, head_dim) and k and v (batch,
        num_heads_kv, seqlen_k, head_dim); or "NHD", (batch, seqlen, heads, head_dim). num_heads_kv
        divides num_heads.
    is_causal: Query i attends to keys j <= i, counted from the first. SageAttention allows it only
        with as many keys as queries, and its kernels count so.
    sm_scale: Factor of q·k, None: 1 / sqrt(head_dim).
    return_lse: Return (out, lse), lse being the natural logarithm of the softmax's denominator,
        float32 of (batch, num_heads, seqlen_q) in both layouts.
    smooth_k: Does nothing. k is always stored without a mean of its keys, of 64 of each head and
        sequence; no softmax sees it, and lse has it.
    smooth_v, qk_quant_gran, pv_accum_dtype: SageAttention's values are accepted and do nothing.
        Each row of q has a scale, so have 64 keys of k and of v, and products with v are added up
        in fp32 after each tile of keys.
    attn_mask, dropout_p: None and 0.0. SageAttention's `sageattn` ignores a mask; here it is
        refused, and so is a keyword argument that is not named here. `dlattn.attention` takes masks
        of bool with this precision.

It differs in these points: results are not SageAttention's bits, for k is rotated and scales are of
other rows. NumPy, CuPy and JAX arrays are accepted, and those on the CPU; so is a head_dim of v
that is not k's. An array whose last dimension is not contiguous is refused and never copied. On
compute capability 8.0 and 8.6, where `sageattn` there multiplies with v in 16 bits, `sageattn` is
refused and `sageattn_qk_int8_pv_fp16_cuda` is served. `sageattn_varlen` computes in the same
precision as `sageattn` here, there with v in 16 bits. `sageattn_qk_int8_pv_fp16_triton` is absent:
importing it says what to use.

All functions raise UnsupportedError, TypeError and DeviceError as `attention` does.

Source: Zhang et al. SageAttention2. arXiv:2411.10958, 2024; https://github.com/thu-ml/SageAttention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlattn import _views
from dlattn._attention import attention, attention_varlen
from dlattn._errors import UnsupportedError
from dlattn._types import Layout, Precision
from dlattn.frameworks.base import type_text

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_varlen",
]

_LAYOUTS: dict[str, Layout] = {"HND": "bhsd", "NHD": "bshd"}

# The words of an error of `attention`, and those for a caller who has given no `precision`.
_NAMES = {
    "softmax_scale": "sm_scale",
    "precision is int8_fp8 with q of": "q: dtype is",
    "precision is int8_fp16 with q of": "q: dtype is",
    "accepted: with float16 or bfloat16": "accepted: float16 or bfloat16",
}


def sageattn(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Any:
    """Attention of q over k and v in 8 bits. The module tells what the arguments mean.

    Returns:
        out, of q's shape and dtype; with return_lse the pair (out, lse).
    """
    _refuse_keywords("sageattn", kwargs)
    _views.check_flag(smooth_k, "smooth_k")
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_qk_int8_pv_fp8_cuda(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **kwargs: Any,
) -> Any:
    """`sageattn` under the name that SageAttention has for one kind of GPU.

    Returns:
        As sageattn.
    """
    _refuse_keywords("sageattn_qk_int8_pv_fp8_cuda", kwargs)
    _check_choice(qk_quant_gran, "qk_quant_gran", ("per_warp", "per_thread"))
    _check_choice(pv_accum_dtype, "pv_accum_dtype", ("fp32", "fp32+fp32", "fp32+fp16"))
    _views.check_flag(smooth_k, "smooth_k")
    _views.check_flag(smooth_v, "smooth_v")
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_qk_int8_pv_fp16_cuda(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **kwargs: Any,
) -> Any:
    """Attention of q over k in 8 bits and v in 16.

    Returns:
        As sageattn.
    """
    _refuse_keywords("sageattn_qk_int8_pv_fp16_cuda", kwargs)
    _check_choice(qk_quant_gran, "qk_quant_gran", ("per_warp", "per_thread"))
    _check_choice(pv_accum_dtype, "pv_accum_dtype", ("fp16", "fp16+fp32", "fp32"))
    _views.check_flag(smooth_k, "smooth_k")
    _views.check_flag(smooth_v, "smooth_v")
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, "int8_fp16")


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    **kwargs: Any,
) -> Any:
    """The same, under another such name.

    Returns:
        As sageattn.
    """
    _refuse_keywords("sageattn_qk_int8_pv_fp8_cuda_sm90", kwargs)
    _check_choice(qk_quant_gran, "qk_quant_gran", ("per_warp", "per_thread"))
    _check_choice(pv_accum_dtype, "pv_accum_dtype", ("fp32+fp32",))
    _views.check_flag(smooth_k, "smooth_k")
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Any:
    """Attention in 8 bits within each of several sequences, stored without padding.

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_heads_kv, head_dim); num_heads_kv divides num_heads.
        v: (total_k, num_heads_kv, head_dim).
        cu_seqlens_q: int32, (batch + 1,): where each sequence's queries begin, and total_q.
        cu_seqlens_k: The same for keys and values.
        max_seqlen_q: At least the length of the longest sequence of queries; an int.
        max_seqlen_k: The same for keys.

    Returns:
        out, of q's shape and dtype.
    """
    _refuse_keywords("sageattn_varlen", kwargs)
    _views.check_flag(is_causal, "is_causal")
    _views.check_flag(smooth_k, "smooth_k")
    try:
        return attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal="top_left" if is_causal else False,
            softmax_scale=sm_scale,
            precision="int8_fp8",
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, _NAMES)
        raise


def _attend(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    precision: Precision = "int8_fp8",
) -> Any:
    _check_choice(tensor_layout, "tensor_layout", tuple(_LAYOUTS))
    _views.check_flag(is_causal, "is_causal")
    _views.check_flag(return_lse, "return_lse")
    try:
        return attention(
            q,
            k,
            v,
            causal="top_left" if is_causal else False,
            softmax_scale=sm_scale,
            precision=precision,
            layout=_LAYOUTS[tensor_layout],
            return_lse=return_lse,
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, _NAMES)
        raise


def _refuse_keywords(function: str, kwargs: Mapping[str, Any]) -> None:
    """SageAttention takes any keyword argument and ignores what it does not know; nothing here."""
    for name, value in kwargs.items():
        if name == "dropout_p":
            _views.refuse_dropout(value)
        elif name != "attn_mask":
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        elif value is not None:
            raise UnsupportedError(
                f"attn_mask is of type {type_text(type(value))}; accepted: None. For a mask of "
                'bool call dlattn.attention(..., mask=..., precision="int8_fp8")'
            )


def _check_choice(value: Any, name: str, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        kind = type_text(type(value))
        raise TypeError(f"{name} is of type {kind}; accepted: {_either(accepted)}")
    if value not in accepted:
        raise UnsupportedError(f"{name} is {value!r}; accepted: {_either(accepted)}")


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(map(repr, words))


def __getattr__(name: str) -> Any:
    if name == "sageattn_qk_int8_pv_fp16_triton":
        # An AttributeError's text would be lost in `from dlattn.sageattention import ...`.
        raise ImportError(
            f"dlattn.sageattention has no {name}: no kernel here is written in Triton; use "
            "sageattn_qk_int8_pv_fp16_cuda, of the same arithmetic",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
