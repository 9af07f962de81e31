"""The forward and the backward pass by flash-attn's names, without autograd.

Their public place is `dlattn.flash_attn.flash_attn_interface`. No parameter of flash-attn's is made
keyword-only: callers read names and defaults from the signature and pass all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dlattn
from dlattn import _views, flash_attn
from dlattn._errors import UnsupportedError
from dlattn._flash_kvcache import options_of, window_of
from dlattn._numbers import integer
from dlattn.frameworks.base import type_text

Window = tuple[int, int] | None
# Rows that flash-attn leaves free behind those of a sequence: its largest tile.
_ROWS_OF_A_TILE = 128


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    *,
    window_size: Window = None,
) -> tuple[Any, Any, Any, Any]:
    """The forward pass. `dlattn.flash_attn` tells what the arguments mean.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_heads_kv, head_dim); num_heads_kv divides num_heads.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).
        return_softmax: False, as flash-attn asks for without dropout.

    Returns:
        (out, softmax_lse, S_dmask, rng_state): out is (batch, seqlen_q, num_heads, head_dim_v);
        softmax_lse float32, (batch, num_heads, seqlen_q), +inf for a query that sees no key;
        S_dmask is empty, and rng_state, int64 of (2,), has no meaning, as nothing is dropped.
    """
    _refuse(return_softmax, "return_softmax", "as nothing is dropped")
    result = flash_attn.flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal),
        window_size=_window(window_size_left, window_size_right, window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,
    )
    return (*result, _rng_state(q))


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
    *,
    window_size: Window = None,
) -> tuple[Any, Any, Any, Any]:
    """The forward pass within each of several sequences, stored one after the other.

    Args:
        q, k, v: As for `dlattn.flash_attn.flash_attn_varlen_func`, and so are cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k and num_splits.
        return_softmax, zero_tensors: False.
        leftpad_k: None.

    Returns:
        As `_flash_attn_forward`, with out of (total_q, num_heads, head_dim_v) and softmax_lse of
        (num_heads, total_q).
    """
    _refuse(return_softmax, "return_softmax", "as nothing is dropped")
    _refuse(zero_tensors, "zero_tensors", "as rows that belong to no sequence are not written")
    if leftpad_k is not None:
        raise UnsupportedError(
            "leftpad_k is given; accepted: None. flash_attn_with_kvcache has cache_leftpad"
        )
    result = flash_attn.flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal),
        window_size=_window(window_size_left, window_size_right, window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,
        block_table=block_table,
        seqused_k=seqused_k,
        num_splits=num_splits,
    )
    return (*result, _rng_state(q))


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
    *,
    window_size: Window = None,
) -> torch.Tensor:
    """The backward pass, which writes dq, dk and dv.

    Args:
        dout: The gradient of out, of its shape and dtype. Copied if its last dimension is not
            contiguous, as flash-attn does.
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
            alibi_slopes: As they were given to `_flash_attn_forward`.
        out, softmax_lse: What it returned. Those of a larger whole, of whose keys k and v are a
            part, give the gradients' share of that part. Where a query sees no key softmax_lse may
            be +inf, as here, or -inf, as `dlattn.attention` tells it.
        dq, dk, dv: Where to write the gradients: of the input's shape and dtype, with a contiguous
            last dimension, apart from all other tensors. None: that one is not computed.
        deterministic: Give the same bits each time, at some cost.
        rng_state: Ignored, as nothing is dropped.

    Returns:
        softmax_d, rowsum(dout * out): float32, (batch, num_heads, seqlen_q rounded up to a multiple
        of 128), 0 behind seqlen_q.
    """
    options = options_of(dropout_p, causal, softcap, False)
    shape = _views.shape_of(k, "k")
    window = _window(window_size_left, window_size_right, window_size)
    options["window"] = window_of(window, causal, shape[1] if len(shape) == 4 else 0)
    _write(
        dlattn.attention_backward,
        {"dq": dq, "dk": dk, "dv": dv},
        *(dout, q, k, v, out, softmax_lse),
        softmax_scale=softmax_scale,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        **options,
    )
    delta = _delta(dout, out).transpose(1, 2)
    rows = delta.shape[2]
    softmax_d = delta.new_zeros((*delta.shape[:2], rows + -rows % _ROWS_OF_A_TILE))
    softmax_d[:, :, :rows] = delta
    return softmax_d


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
    *,
    window_size: Window = None,
) -> torch.Tensor:
    """The backward pass within each of several sequences.

    Args:
        dout, out, softmax_lse, dq, dk, dv, deterministic, rng_state: As for `_flash_attn_backward`,
            in the shapes of `_flash_attn_varlen_forward`.
        zero_tensors: Ignored: rows that belong to no sequence always have gradients of 0.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            causal, window_size_left, window_size_right, softcap, alibi_slopes: As they were given
            to `_flash_attn_varlen_forward`.

    Returns:
        softmax_d, rowsum(dout * out): float32, (num_heads, total_q + 128 * batch), where row i of
        sequence b is at cu_seqlens_q[b] + 128 * b + i, with 0 between sequences.
    """
    options = options_of(dropout_p, causal, softcap, False)
    window = _window(window_size_left, window_size_right, window_size)
    known = integer(max_seqlen_k) or 0  # anything but an int is refused later
    options["window"] = window_of(window, causal, known)
    _write(
        dlattn.attention_varlen_backward,
        {"dq": dq, "dk": dk, "dv": dv},
        *(dout, q, k, v, out, softmax_lse),
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        softmax_scale=softmax_scale,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        **options,
    )
    delta = _delta(dout, out).transpose(0, 1)
    rows, batch = delta.shape[1], cu_seqlens_q.shape[0] - 1
    softmax_d = delta.new_zeros((delta.shape[0], rows + _ROWS_OF_A_TILE * batch))
    row = torch.arange(rows, dtype=cu_seqlens_q.dtype, device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], row, right=True)
    places = row + _ROWS_OF_A_TILE * sequence.clamp_(max=max(batch - 1, 0))
    return softmax_d.index_copy_(1, places, delta)


def _window(left: Any, right: Any, pair: Any) -> Any:
    if pair is None:
        return left, right
    if (left, right) != (-1, -1):
        raise UnsupportedError(
            f"window_size is {pair!r} with window_size_left and window_size_right of {left!r} and "
            f"{right!r}; accepted: window_size alone, or those two"
        )
    return pair


def _refuse(value: Any, name: str, why: str) -> None:
    _views.check_flag(value, name)
    if value:
        raise UnsupportedError(f"{name} is True; accepted: False, {why}")


def _rng_state(q: torch.Tensor) -> torch.Tensor:
    return torch.empty((2,), dtype=torch.int64, device=q.device)


def _write(
    function: Callable[..., Any],
    gradients: dict[str, Any],
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *lengths: Any,
    return_lse: bool,
    deterministic: Any,
    **options: Any,
) -> None:
    """Compute the gradients that have a tensor."""
    del return_lse  # of the forward pass
    _views.check_flag(deterministic, "deterministic")
    for name, x in (("dout", dout), ("out", out), ("softmax_lse", lse)):
        if not isinstance(x, torch.Tensor):
            kind = type_text(type(x))
            raise TypeError(f"{name} is of type {kind}; accepted: a torch tensor")
    # Autograd expands the gradient of a sum; numbers of rows, once merged, may lie transposed.
    dout, lse = map(_with_rows_side_by_side, (dout, lse))
    given = q
    try:
        q, options["softmax_scale"] = _views.with_any_scale(q, options["softmax_scale"])
        function(
            *(dout, q, k, v, out, lse, *lengths),
            **gradients,
            needs=[name for name, x in gradients.items() if x is not None],
            deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
            **options,
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, {"lse": "softmax_lse"})
        raise
    if q is not given and gradients["dq"] is not None:
        gradients["dq"].neg_()


def _with_rows_side_by_side(x: torch.Tensor) -> torch.Tensor:
    is_dense = x.layout == torch.strided and not x.is_nested  # others are refused later on
    return x if not is_dense or x.ndim == 0 or x.stride(-1) == 1 else x.contiguous()


def _delta(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out) in float32: the native backward pass keeps its own to itself."""
    kind = torch.promote_types(out.dtype, torch.float32)
    return dout.to(kind).mul(out).sum(-1).to(torch.float32)
