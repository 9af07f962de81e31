"""The checks of what one process gives `ring_attention`."""

from __future__ import annotations

from typing import Any

import torch

from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import type_text
from dlattn.integrations.ring.shards import ORDERS_OF_MANY, check_order

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_words(layout: object, order: object, mode: object) -> None:
    if not isinstance(layout, str) or layout not in ("bshd", "bhsd"):
        raise UnsupportedError(f"layout is {layout!r}; accepted: 'bshd', 'bhsd'")
    if not isinstance(mode, str) or mode not in ("ring", "all_to_all"):
        raise UnsupportedError(f"mode is {mode!r}; accepted: 'ring', 'all_to_all'")
    check_order(order, ORDERS_OF_MANY)


def check_tensors(
    q: Any, k: Any, v: Any, sinks: Any, alibi_slopes: Any, packed: bool, layout: str
) -> None:
    dims = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is of type {type_text(type(x))}; accepted: a torch.Tensor")
        if x.dim() != dims:
            given = "with" if packed else "without"
            raise UnsupportedError(
                f"{name} has {x.dim()} dimensions; accepted {given} cu_seqlens: {dims}"
            )
        if x.dtype != q.dtype:
            raise UnsupportedError(f"{name}: dtype is {x.dtype}; accepted: {q.dtype}, that of q")
        if x.dtype not in DTYPES:
            raise UnsupportedError(
                f"{name}: dtype is {x.dtype}; accepted: float16, bfloat16, float32, float64"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
            raise UnsupportedError(
                f"{name}: the stride of the last dimension is {x.stride(-1)}; accepted: 1 "
                "(elements of a row side by side)"
            )
        if x.device != q.device:
            raise UnsupportedError(f"{name} is on {x.device}; accepted: q's device, {q.device}")
    head = dims - 2 if layout == "bshd" else dims - 3
    heads, heads_kv = q.shape[head], k.shape[head]
    if not heads_kv or heads % heads_kv:
        raise UnsupportedError(f"num_heads is {heads}; accepted: multiples of k's {heads_kv}")
    for name, x, dim in (("k", k, q.shape[-1]), ("v", v, v.shape[-1])):
        shape = [*q.shape[:-1], dim]
        shape[head] = heads_kv
        if list(x.shape) != shape:
            raise UnsupportedError(
                f"{name} has the shape {tuple(x.shape)}; accepted beside this q: {tuple(shape)}"
            )
    by_batch = [] if packed else [(q.shape[0], heads)]
    _check_of_heads("sinks", sinks, [(heads,)], q)
    _check_of_heads("alibi_slopes", alibi_slopes, [(heads,), *by_batch], q)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "alibi_slopes requires grad, and ring_attention has no gradient of it; accepted: "
            "alibi_slopes.detach()"
        )


def _check_of_heads(name: str, x: Any, shapes: list[tuple[int, ...]], q: torch.Tensor) -> None:
    if x is None:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is of type {type_text(type(x))}; accepted: a torch.Tensor")
    if x.dtype != torch.float32 or tuple(x.shape) not in shapes or x.device != q.device:
        raise UnsupportedError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}; accepted: float32 of "
            f"shape {' or '.join(str(shape) for shape in shapes)} on {q.device}"
        )
