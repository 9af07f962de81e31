"""torch's operators of attention by dlattn: what `activation` puts in the place of torch's kernels.

Each has the operator's arguments and results, the logarithms of the softmax's denominators among
them as torch's own backward kernel takes them, and raises `Refused` for what it does not serve.

Source: the operators' definitions in PyTorch's aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dlattn
from dlattn._types import Causal

# Rows of the log-sum-exp that memory-efficient attention's backward reads at a time.
_EFFICIENT_ROWS = 32

# torch draws numbers of 32 bits: with less than one in 2**32 it drops nothing.
_LEAST_DROPOUT = 2.0**-32


class Refused(Exception):
    """Why dlattn leaves a call to torch."""


def compute(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call dlattn below autograd, where tensors that require grad are as good as others."""
    enabled = torch.is_grad_enabled()
    if enabled:
        torch._C._set_grad_enabled(False)
    try:
        return function(*arguments, **options)
    except (dlattn.UnsupportedError, TypeError) as error:  # before anything was launched
        raise Refused(str(error)) from error
    finally:
        if enabled:
            torch._C._set_grad_enabled(True)


def _compute(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return compute(function, *arguments, return_lse=True, **options)


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    causal: Causal,
    scale: float | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of tensors with heads first, into `out`. Returns lse."""
    options = {"softmax_scale": scale, "bias": bias, "layout": "bhsd", "out": out}
    _, lse = _compute(dlattn.attention, query, key, value, causal=causal, **options)
    return lse


def top_left(is_causal: bool) -> Causal:
    """The mask of operators for which is_causal counts from the first query and key."""
    return "top_left" if is_causal else False


def check_dense(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p >= _LEAST_DROPOUT:
        raise Refused("dropout_p is above 0")
    if not dropout_p >= 0.0:  # NaN too
        raise Refused("dropout_p is no probability")
    if return_debug_mask:
        raise Refused("return_debug_mask is True")


def _for_backward(lse: torch.Tensor, maybe_blind: bool = True) -> torch.Tensor:
    """Backward kernels take exp(score - lse), which must be 0 in rows that see nothing.

    `maybe_blind` is false where every row sees a key: that saves two kernels of torch's.
    """
    return lse.masked_fill_(lse == -torch.inf, torch.inf) if maybe_blind else lse


def _unused_random_state(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and offset as flash-attention returns them; without dropout nobody reads them."""
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
    )


def _unused_seed_and_offset(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of memory-efficient attention: on the GPU only where a graph is captured, in which
    every result is to be on the GPU."""
    captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
    seed, offset = (
        torch.empty((), dtype=torch.int64, device=query.device if captured else "cpu")
        for _ in range(2)
    )
    return seed, offset


# torch's operators. Each has its arguments and results.


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    check_dense(dropout_p, return_debug_mask)
    out = torch.empty_like(query)
    lse = _dense(query, key, value, out, is_causal, scale)
    lengths = (query.shape[2], key.shape[2])
    # The last row of a causal call sees the last key.
    lse = _for_backward(lse, lengths[0] > lengths[1] if is_causal else lengths[1] == 0)
    debug = query.new_empty(0)
    return (out, lse, None, None, *lengths, *_unused_random_state(query), debug)


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    check_dense(dropout_p)
    batch, heads, rows, _ = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
    found = _dense(query, key, value, out, top_left(is_causal), scale, attn_bias)
    # torch does not ask for it where the bias alone requires grad, and its backward then fails.
    compute_log_sumexp = compute_log_sumexp or (attn_bias is not None and attn_bias.requires_grad)
    padded = -(-rows // _EFFICIENT_ROWS) * _EFFICIENT_ROWS if compute_log_sumexp else 0
    lse = query.new_empty(batch, heads, padded, dtype=torch.float32)
    if compute_log_sumexp:
        lse[..., rows:] = torch.inf
        lse[..., :rows] = _for_backward(found, attn_bias is not None or key.shape[2] == 0)
    return (out, lse, *_unused_seed_and_offset(query))


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    del compute_log_sumexp  # it is returned in any case
    check_dense(dropout_p, return_debug_mask)
    out = _in_the_order_of(query, value.shape[3])
    lse = _dense(query, key, value, out, top_left(is_causal), scale, attn_bias)
    lse = _for_backward(lse, attn_bias is not None or key.shape[2] == 0)[..., None]
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    return (out, lse, None, None, query.shape[2], key.shape[2], seed, offset, None)


def _in_the_order_of(query: torch.Tensor, columns: int) -> torch.Tensor:
    """A tensor of query's shape but for its columns, its dimensions in memory as query's are."""
    if columns == query.shape[3]:
        return torch.empty_like(query)
    shape = (*query.shape[:3], columns)
    order = sorted(range(4), key=lambda dim: query.stride(dim), reverse=True)
    return torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)


def _for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    # This one has no dropout at all and fewer kinds of masks: the rest are errors of torch's.
    if dropout_p != 0.0:
        raise Refused("dropout_p is not 0")
    if query.dtype == torch.float64:
        # dlattn's lse is float32, which float64 gradients would be no better than.
        raise Refused("query is float64")
    if attn_mask is not None and (attn_mask.dtype == torch.bool or attn_mask.dim() not in (2, 4)):
        raise Refused("attn_mask is bool, or has not 2 or 4 dimensions")
    out = torch.empty_like(query)
    found = _dense(query, key, value, out, top_left(is_causal), scale, attn_mask)
    lse = found.new_empty(query.shape[0], query.shape[2], query.shape[1]).transpose(1, 2)
    return out, lse.copy_(_for_backward(found, attn_mask is not None or key.shape[2] == 0))


def flash_window(left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """dlattn's for flash-attention's, in which None and negative numbers are no limit."""
    return (
        None if left is None or left < 0 else left,
        None if right is None or right < 0 else right,
    )


def _flash_forward_into(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    del num_splits  # how the work is shared out
    check_dense(dropout_p, return_debug_mask)
    if block_table is not None:
        raise Refused("block_table is not None: pages are left to torch")
    options: dict[str, Any] = {
        "causal": is_causal,
        "softmax_scale": scale,
        "window": flash_window(window_size_left, window_size_right),
        "alibi_slopes": alibi_slopes,
        "out": out,
    }
    if cum_seq_q is None and cum_seq_k is None:
        if seqused_k is not None:
            raise Refused("seqused_k without cum_seq_q")
        _, lse = _compute(dlattn.attention, query, key, value, **options)
    elif cum_seq_q is None or cum_seq_k is None:
        raise Refused("one of cum_seq_q and cum_seq_k is None")
    else:
        starts = (cum_seq_q, cum_seq_k, int(max_q), int(max_k))
        options["seqused_k"] = seqused_k
        _, lse = _compute(dlattn.attention_varlen, query, key, value, *starts, **options)
    return _for_backward(lse)


def _flash_forward(query: torch.Tensor, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    out = torch.empty_like(query)
    lse = _flash_forward_into(out, query, *arguments, **options)
    return (out, lse, *_unused_random_state(query), query.new_empty(0))


KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "CUDA": {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_cudnn_attention": _cudnn,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    },
    "CPU": {"_scaled_dot_product_flash_attention_for_cpu": _for_cpu},
}
