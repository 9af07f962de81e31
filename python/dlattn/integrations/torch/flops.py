"""How many operations torch's FlopCounterMode counts for the operators.

As torch counts attention: two products of every query with every key, whatever is masked. Where
lengths stand in tensors their values count, as in torch's own formulas, and the host waits for them
on a GPU; where there are none, as while torch traces, the upper bounds do. Arguments come by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def attention(q: Any, k: Any, v: Any, *, bhsd: bool = False, **_: Any) -> int:
    batch, first, second, head_dim = q.shape
    heads, rows = (first, second) if bhsd else (second, first)
    return _products(heads, batch * rows * k.shape[2 if bhsd else 1], head_dim, v.shape[3])


def attention_varlen(
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None = None,
    bhsd: bool = False,
    **_: Any,
) -> int:
    batch = cu_seqlens_q.shape[0] - 1
    rows = cu_seqlens_q.diff().tolist() if _is_known(cu_seqlens_q) else [max_seqlen_q] * batch
    if seqused_k is not None and _is_known(seqused_k):
        keys = seqused_k.tolist()
    elif _is_known(cu_seqlens_k):
        keys = cu_seqlens_k.diff().tolist()
    else:
        keys = [max_seqlen_k] * batch
    pairs = sum(r * n for r, n in zip(rows, keys, strict=True))
    return _products(q.shape[0 if bhsd else 1], pairs, q.shape[2], v.shape[2])


def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    bhsd: bool = False,
    **_: Any,
) -> int:
    heads, rows = (q.shape[1], q.shape[2]) if bhsd else (q.shape[2], q.shape[1])
    if _is_known(seqused_k):
        keys = int(seqused_k.sum())
        if leftpad_k is not None and _is_known(leftpad_k):
            keys -= int(leftpad_k.sum())
    else:
        if max_seqlen_k is None:
            max_seqlen_k = k_cache.shape[2 if bhsd else 1]
            if page_table is not None:
                max_seqlen_k *= page_table.shape[1]
        keys = q.shape[0] * max_seqlen_k
    return _products(heads, rows * keys, q.shape[3], v_cache.shape[3])


def _products(heads: int, pairs: int, head_dim: int, head_dim_v: int) -> int:
    """The operations for `pairs` of a query and a key in each head."""
    return 2 * heads * pairs * (head_dim + head_dim_v)


def _is_known(x: torch.Tensor) -> bool:
    """Whether a tensor has values."""
    return not isinstance(x, (FakeTensor, FunctionalTensor)) and x.device.type != "meta"
