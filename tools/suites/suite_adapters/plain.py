"""Plain computations in fp32 that tests of other projects take from the package under test."""

from __future__ import annotations

import math
from typing import Any

import torch


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Rotary embedding of x, (..., num_heads, head_dim), whose rows have these positions."""
    half = cos.shape[-1]
    c, s = (table.float()[positions.long()].unsqueeze(-2) for table in (cos, sin))
    turned = x[..., : 2 * half].float()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * c - second * s, first * s + second * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
) -> torch.Tensor:
    """flash-attn's function of that name, of x of (batch, seqlen, num_heads, head_dim)."""
    assert not inplace
    rows = torch.arange(x.shape[1], device=x.device)
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    return rotate(x, cos, sin, (rows + offsets).expand(x.shape[0], -1), interleaved)


def unpad_input(
    x: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The rows of x where mask or unused is, one after the other, and where they came from.

    Returns:
        rows, their indices, cu_seqlens, the greatest length, lengths of mask alone.
    """
    kept = mask if unused is None else mask | unused
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = mask.sum(-1, dtype=torch.int32)
    return x.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def pad_input(rows: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The padded tensor whose rows `unpad_input` took, with zeros elsewhere."""
    out = rows.new_zeros(batch * seqlen, *rows.shape[1:])
    out = out.index_copy(0, indices, rows)
    return out.unflatten(0, (batch, seqlen))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence, (seqlen, num_heads, head_dim); causal to the bottom right.

    Args:
        length: How many of the keys count, which the host does not read. None: all.

    Returns:
        out, in q's dtype, and lse, (seqlen_q, num_heads), a natural logarithm.
    """
    seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_kv, _ = k.shape
    k, v = (x.float().repeat_interleave(num_heads // num_heads_kv, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (scale or 1 / math.sqrt(head_dim))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    count = seqlen_k if length is None else length
    row = torch.arange(seqlen_q, device=q.device)[:, None] + count - seqlen_q
    column = torch.arange(seqlen_k, device=q.device)[None, :]
    seen = (column < count).expand(seqlen_q, -1)
    if mask is not None:
        seen = seen & mask.bool()
    if causal:
        seen = seen & (column <= row)
    if window_left >= 0:
        seen = seen & (column >= row - window_left)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), lse.transpose(0, 1)
