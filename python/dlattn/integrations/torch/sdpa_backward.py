"""The backward operators of torch's attention by dlattn: what `activation` puts in their place.

Each has the operator's arguments and results, of the strides that torch's meta functions promise to
a compiler, and raises `Refused` for what it does not serve. out and the log-sum-exp may be dlattn's
or torch's own: they mean the same, and in rows that see nothing any number will do, as the
probabilities are exp(-inf) there. Gradients of gradients are torch's to refuse.

Source: the operators' definitions in PyTorch's aten/src/ATen/native/native_functions.yaml, and
torch/_meta_registrations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import dlattn
from dlattn.integrations.torch.gradients import with_rows_side_by_side
from dlattn.integrations.torch.sdpa import (
    Refused,
    check_dense,
    compute,
    flash_window,
    top_left,
)

# Elements to which torch pads the rows of a bias' gradient.
_BIAS_COLUMNS = 16

_ALL = ("dq", "dk", "dv")


def _compute(
    function: Callable[..., Any],
    grad_out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
    *given: Any,
    **named: Any,
) -> dlattn.Gradients:
    found: dlattn.Gradients = compute(
        function,
        with_rows_side_by_side(grad_out, out),
        *inputs,
        out,
        *given,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **named,
    )
    return found


def _dense(
    grad_out: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    results: tuple[torch.Tensor, ...],
    needs: Sequence[str] = _ALL,
    **options: Any,
) -> dlattn.Gradients:
    """The gradients of `dlattn.attention`, of which `needs` are computed into `results`."""
    if lse.stride(-1) != 1:
        lse = lse.contiguous()
    into = {name: x for name, x in zip(_ALL, results, strict=True) if name in needs}
    options |= {"layout": "bhsd", "needs": needs, **into}
    return _compute(dlattn.attention_backward, grad_out, inputs, out, lse, **options)


def _rows_first(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of the inputs' shapes, the heads of a row side by side in memory."""
    order = (0, 2, 1, 3)
    return tuple(
        torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device) for x in inputs
    )


# torch's operators. Each has its arguments and results.


def flash(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    del cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset
    check_dense(dropout_p)
    inputs = (query, key, value)
    results = tuple(torch.empty_like(x) for x in inputs)
    _dense(grad_out, inputs, out, logsumexp, results, causal=is_causal, softmax_scale=scale)
    return results


def efficient(
    grad_out_: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    del philox_seed, philox_offset
    check_dense(dropout_p)
    rows = query.shape[2]
    if logsumexp.shape[-1] < rows:
        raise Refused("logsumexp was not computed")
    inputs = (query, key, value)
    results = _rows_first(*inputs)
    wanted = [*grad_input_mask[:3], grad_input_mask[3] and attn_bias is not None]
    needs = [name for name, is_wanted in zip((*_ALL, "dbias"), wanted, strict=True) if is_wanted]
    dbias = None
    if needs:
        dbias = _dense(
            grad_out_,
            inputs,
            out,
            logsumexp[..., :rows],
            results,
            needs,
            causal=top_left(is_causal),
            softmax_scale=scale,
            bias=attn_bias,
        ).dbias
    for x, is_wanted in zip(results, wanted, strict=False):
        if not is_wanted:  # torch has a tensor there too, which nobody reads
            x.zero_()
    return (*results, None if dbias is None else _padded(dbias))


def _padded(dbias: torch.Tensor) -> torch.Tensor:
    columns = dbias.shape[-1]
    if columns % _BIAS_COLUMNS == 0:
        return dbias
    padded = -(-columns // _BIAS_COLUMNS) * _BIAS_COLUMNS
    return dbias.new_empty(*dbias.shape[:-1], padded)[..., :columns].copy_(dbias)


def cudnn(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    del philox_seed, philox_offset, max_q, max_k
    check_dense(dropout_p)
    if cum_seq_q is not None or cum_seq_k is not None:
        raise Refused("cum_seq_q or cum_seq_k is given")
    inputs = (query, key, value)
    results = tuple(torch.empty_like(x) for x in inputs)
    _dense(
        grad_out,
        inputs,
        out,
        logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp,
        results,
        causal=top_left(is_causal),
        softmax_scale=scale,
        bias=attn_bias,
    )
    return results


def for_cpu(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    if dropout_p != 0.0:
        raise Refused("dropout_p is not 0")
    if query.dtype == torch.float64:  # as the forward kernel's
        raise Refused("query is float64")
    inputs = (query, key, value)
    results = _rows_first(*inputs)
    _dense(
        grad_out,
        inputs,
        out,
        logsumexp,
        results,
        causal=top_left(is_causal),
        softmax_scale=scale,
        bias=attn_mask,
    )
    return results


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    del rng_state, unused
    check_dense(dropout_p)
    inputs = (query, key, value)
    results = tuple(torch.empty_like(x) for x in inputs)
    options: dict[str, Any] = {
        "causal": is_causal,
        "softmax_scale": scale,
        "window": flash_window(window_size_left, window_size_right),
        "needs": _ALL,
        **dict(zip(_ALL, results, strict=True)),
    }
    given = (grad_out, inputs, out, logsumexp)
    if cum_seq_q is None and cum_seq_k is None:
        _compute(dlattn.attention_backward, *given, **options)
    elif cum_seq_q is None or cum_seq_k is None:
        raise Refused("one of cum_seq_q and cum_seq_k is None")
    else:
        starts = (cum_seq_q, cum_seq_k, int(max_q), int(max_k))
        _compute(dlattn.attention_varlen_backward, *given, *starts, **options)
    return results


KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "CUDA": {
        "_scaled_dot_product_flash_attention_backward": flash,
        "_scaled_dot_product_efficient_attention_backward": efficient,
        "_scaled_dot_product_cudnn_attention_backward": cudnn,
        "_flash_attention_backward": flash_backward,
    },
    "CPU": {"_scaled_dot_product_flash_attention_for_cpu_backward": for_cpu},
}
