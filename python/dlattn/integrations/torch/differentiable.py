"""Attention whose gradients come from the formula, for what torch's own attention lacks.

The forward pass is `dlattn.attention`'s. The backward pass computes the scores again, in float32 or
float64, by torch's matrix products: for some heads and queries at a time, so that its memory does
not grow with the square of the sequence. That takes several times the time of a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import dlattn
from dlattn.integrations.torch import ops

# Scores in memory at a time; several tensors of as many elements are there at once.
MOST_SCORES = 1 << 23


@dataclass(frozen=True)
class Options:
    causal: bool  # query i sees keys 0 to i
    scale: float
    softcap: float  # 0: none


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`dlattn.attention` with gradients of q, k, v, bias and sinks.

    q is (batch, seqlen_q, num_heads, head_dim) and so on; `causal` is the mode "top_left". The
    gradients have none themselves.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = Options(causal, scale, softcap)
    return _Attention.apply(q, k, v, bias, sinks, mask, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        q, k, v, bias, sinks, mask, options = arguments
        ctx.save_for_backward(q, k, v, bias, sinks, mask)
        ctx.options = options
        function = ops.attention if torch.compiler.is_compiling() else dlattn.attention
        return function(
            q,
            k,
            v,
            causal="top_left" if options.causal else False,
            softmax_scale=options.scale,
            softcap=options.softcap,
            bias=bias,
            mask=mask,
            sinks=sinks,
        )

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise dlattn.UnsupportedError(
                "create_graph is True, and gradients of attention with softcap or sinks cannot be "
                "differentiated again; accepted: False"
            )
        q, k, v, bias, sinks, mask = ctx.saved_tensors
        needs_bias = bias is not None and ctx.needs_input_grad[3]
        with torch.autocast(q.device.type, enabled=False):
            gradients = _gradients(
                q, k, v, bias, sinks, mask, ctx.options, grad_out, needs_bias=needs_bias
            )
        return (*gradients, None, None)


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    options: Options,
    grad_out: torch.Tensor,
    *,
    needs_bias: bool,
) -> list[torch.Tensor | None]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # As tensors of [batch, num_heads_kv, group, seqlen, head_dim], the heads that share one of k
    # and v being its group.
    group = q.shape[2] // max(k.shape[2], 1)
    views = [_grouped(x, group) for x in (q, grad_out)] + [_grouped(x, 1) for x in (k, v)]
    sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (views[0], *views[2:])]
    dq, dk, dv = sums
    dbias = dsinks = None
    if bias is not None and needs_bias:
        dbias = torch.zeros(_four(bias).shape, dtype=wide, device=q.device)
    if sinks is not None:
        dsinks = torch.zeros(sinks.shape, dtype=wide, device=q.device)
    for batch, heads, rows in _chunks(views[0], k.shape[1]):
        at = batch, heads, slice(None), rows
        some_q, some_do = (x[at].to(wide) for x in views[:2])
        some_k, some_v = (x[batch, heads].to(wide) for x in views[2:])
        of_q = slice(heads.start * group, heads.stop * group)
        part = _Part(
            bias=_part(bias, batch, of_q, rows, group, wide),
            mask=_part(mask, batch, of_q, rows, group, torch.bool),
            sinks=None if sinks is None else sinks[of_q].to(wide).view(-1, group, 1, 1),
        )
        part.mask = _causal(part.mask, rows, k.shape[1], options.causal, q.device)
        found = _chunk(some_q, some_k, some_v, some_do, part, options)
        dq[at] = found.q
        dk[batch, heads] += found.k
        dv[batch, heads] += found.v
        if dbias is not None:
            _add_bias(dbias, found.scores.flatten(0, 1), batch, of_q, rows)
        if dsinks is not None and found.sinks is not None:
            dsinks[of_q] += found.sinks
    gradients = [_flat(x).to(like.dtype) for x, like in zip(sums, (q, k, v), strict=True)]
    of_bias = None if bias is None or dbias is None else dbias.view(bias.shape).to(bias.dtype)
    of_sinks = None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
    return [*gradients, of_bias, of_sinks]


def _chunks(q: torch.Tensor, seqlen_k: int) -> Iterator[tuple[int, slice, slice]]:
    """Batch, heads of k and queries whose scores are at most MOST_SCORES, or one query's."""
    if seqlen_k == 0:  # all gradients are 0
        return
    batch_size, num_heads_kv, group, seqlen_q, _ = q.shape
    rows = min(max(MOST_SCORES // max(group * seqlen_k, 1), 1), max(seqlen_q, 1))
    heads = max(MOST_SCORES // max(group * seqlen_k * rows, 1), 1)
    for batch in range(batch_size):
        for head in range(0, num_heads_kv, heads):
            for row in range(0, seqlen_q, rows):
                stops = min(head + heads, num_heads_kv), min(row + rows, seqlen_q)
                yield batch, slice(head, stops[0]), slice(row, stops[1])


@dataclass
class _Part:
    """The terms that change the scores of a chunk, each broadcasting to them."""

    bias: torch.Tensor | None
    mask: torch.Tensor | None
    sinks: torch.Tensor | None


@dataclass
class _Found:
    """Gradients of a chunk."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor  # behind softcap, as bias is added there
    sinks: torch.Tensor | None


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    part: _Part,
    options: Options,
) -> _Found:
    scores = q @ k.transpose(-1, -2) * options.scale
    slope = None
    if options.softcap:
        bent = torch.tanh(scores / options.softcap)
        slope = 1 - bent * bent
        scores = bent * options.softcap
    if part.bias is not None:
        scores = scores + part.bias
    if part.mask is not None:
        scores = scores.masked_fill(~part.mask, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if part.sinks is not None:
        highest = torch.maximum(highest, part.sinks)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)  # a row that sees nothing
    p = torch.exp(scores - highest)
    total = p.sum(-1, keepdim=True)
    if part.sinks is not None:
        total = total + torch.exp(part.sinks - highest)
    total = total.masked_fill(total == 0, 1.0)
    p = p / total
    dp = grad_out @ v.transpose(-1, -2)
    delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    of_sinks = None
    if part.sinks is not None:
        of_sinks = -(torch.exp(part.sinks - highest) / total * delta).sum((-1, -2)).flatten()
    before = ds if slope is None else ds * slope
    return _Found(
        q=before @ k * options.scale,
        k=(before.transpose(-1, -2) @ q).sum(1, keepdim=True) * options.scale,
        v=(p.transpose(-1, -2) @ grad_out).sum(1, keepdim=True),
        scores=ds,
        sinks=of_sinks,
    )


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """[batch, seqlen, heads, dim] as [batch, heads / group, group, seqlen, dim]."""
    return x.unflatten(2, (x.shape[2] // max(group, 1), group)).permute(0, 2, 3, 1, 4)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _four(x: torch.Tensor) -> torch.Tensor:
    return x[(None,) * (4 - x.dim())]


def _part(
    x: torch.Tensor | None, batch: int, heads: slice, rows: slice, group: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The part of a tensor that belongs to a chunk, where it broadcasts to [batch, num_heads,
    seqlen_q, …]."""
    if x is None:
        return None
    x = _four(x)
    x = x[batch if x.shape[0] > 1 else 0]
    x = (
        x[heads].unflatten(0, (heads.stop // group - heads.start // group, group))
        if x.shape[0] > 1
        else x[:, None]
    )
    return (x[:, :, rows] if x.shape[2] > 1 else x).to(dtype)


def _causal(
    mask: torch.Tensor | None, rows: slice, seqlen_k: int, causal: bool, device: torch.device
) -> torch.Tensor | None:
    if not causal:
        return mask
    queries = torch.arange(rows.start, rows.stop, device=device)
    seen = torch.arange(seqlen_k, device=device) <= queries[:, None]
    return seen if mask is None else mask & seen


def _add_bias(dbias: torch.Tensor, ds: torch.Tensor, batch: int, heads: slice, rows: slice) -> None:
    """Add [heads, rows, seqlen_k] to its place, summed where the bias broadcasts."""
    to = dbias[batch if dbias.shape[0] > 1 else 0]
    shared = [dim for dim in range(3) if to.shape[dim] == 1]
    if shared:
        ds = ds.sum(shared, keepdim=True)
    to[heads if to.shape[0] > 1 else slice(None), rows if to.shape[1] > 1 else slice(None)] += ds
