"""Exact gradients on torch tensors, and how far off correct ones may be.

The definition is that of `dlattn.reference`'s gradients, which a test compares with this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlattn.bench import tensors
from dlattn.bench.peers import Problem
from dlattn.reference import ABSOLUTE_TERM

Tensor = Any

_SCORES_AT_A_TIME = 1 << 25
_ALL_SCORES = 1 << 27  # problems with more scores than this are checked on a sample of heads
_OVER_PLAIN = 3.0  # times the error of a plain computation in the same dtype


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plain: bool = False,
    causal: bool = False,
    bias: Tensor | None = None,
) -> list[Tensor]:
    """dq, dk and dv, and dbias if there is a bias; all arguments are (batch, heads, ., .).

    In float64; if `plain`, what a plain implementation in q's dtype computes: products in float32
    of probabilities and gradients of scores that are rounded, and the results rounded.
    """
    torch = tensors.torch_module()
    dtype = q.dtype
    compute = torch.float32 if plain and dtype != torch.float64 else torch.float64

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(compute) if plain else x

    out, lse = tensors.attention(q, k, v, plain=plain, causal=causal, bias=bias)
    batch_size, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    scale = 1.0 / math.sqrt(head_dim)
    q, dout, out, lse = (x.to(compute) for x in (q, dout, out, lse))
    k, v = (x.to(compute).repeat_interleave(num_heads // num_heads_kv, 1) for x in (k, v))
    delta = (dout * out).sum(3, keepdim=True)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dbias = None if bias is None else torch.zeros_like(bias, dtype=compute)
    step = max(1, _SCORES_AT_A_TIME // max(1, batch_size * num_heads * seqlen_k))
    key = torch.arange(seqlen_k, device=q.device)
    for start in range(0, seqlen_q, step):
        rows = slice(start, min(start + step, seqlen_q))
        scores = scale * (q[:, :, rows] @ k.transpose(2, 3))
        if bias is not None:
            scores += bias[:, :, rows].to(compute)
        if causal:
            position = torch.arange(rows.start, rows.stop, device=q.device) + seqlen_k - seqlen_q
            scores.masked_fill_(key[None, :] > position[:, None], -math.inf)
        probabilities = torch.exp(scores - lse[:, :, rows, None])
        ds = probabilities * (dout[:, :, rows] @ v.transpose(2, 3) - delta[:, :, rows])
        if dbias is not None:
            dbias[:, :, rows] += ds.sum(0, keepdim=True) if dbias.shape[0] == 1 else ds
        ds, probabilities = rounded(ds), rounded(probabilities)
        dq[:, :, rows] = scale * (ds @ k)
        dk += scale * (ds.transpose(2, 3) @ q[:, :, rows])
        dv += probabilities.transpose(2, 3) @ dout[:, :, rows]
    of_heads = (batch_size, num_heads_kv, -1, seqlen_k, k.shape[3])
    found = [dq, dk.view(of_heads).sum(2), dv.view(*of_heads[:4], v.shape[3]).sum(2)]
    return [rounded(x) for x in (*found, *([] if dbias is None else [dbias]))]


Pick = Callable[[Sequence[Tensor]], list[Tensor]]


class ExpectedGradients:
    """The right gradients of some heads, and how far off correct ones may be there.

    That is three times the error of a plain computation in the same dtype, and a tiny term relative
    to the largest gradient of its kind.
    """

    def __init__(self, problem: Problem, dout: Tensor) -> None:
        """Compute them."""
        self._parts: list[tuple[Pick, list[Tensor], list[float]]] = []
        causal, bias = problem.case.causal, problem.options.get("bias")
        tiny = ABSOLUTE_TERM[tensors.dtype_of(problem.q)]
        for pick in _of_varlen(problem) if problem.varlen is not None else _of_heads(problem):
            given = [problem.q, problem.k, problem.v, *([] if bias is None else [bias])]
            q, k, v, *rest = pick(given)
            own: dict[str, Any] = {"causal": causal, "bias": rest[0] if rest else None}
            part = (pick([dout])[0], q, k, v)
            exact = gradients(*part, **own)
            plain = gradients(*part, plain=True, **own)
            bounds = [
                _OVER_PLAIN * tensors.largest(rough.double() - want) + tiny * tensors.largest(want)
                for rough, want in zip(plain, exact, strict=True)
            ]
            self._parts.append((pick, exact, bounds))

    def errors(self, found: Sequence[Tensor]) -> tuple[float, float]:
        """Largest error of dq, dk, dv and dbias, and the largest in units of its bound."""
        worst, ratios = [], []
        for pick, exact, bounds in self._parts:
            for got, want, bound in zip(pick(found), exact, bounds, strict=True):
                error = tensors.largest(got.double() - want)
                worst.append(error)
                ratios.append(error / bound if bound else math.inf)
        return max(worst), max(ratios)


def _sharing(head_kv: int, group: int) -> Callable[[int], slice]:
    """The heads of the i-th gradient that share a head of keys.

    The second and the third are of keys, a fourth is a bias of the query heads.
    """
    of_queries, of_keys = slice(head_kv * group, (head_kv + 1) * group), slice(head_kv, head_kv + 1)
    return lambda i: of_keys if i in (1, 2) else of_queries


def _of_heads(problem: Problem) -> Iterator[Pick]:
    """All heads of keys, with the query heads that share them, or the first and the last of many.

    Those of all batch entries where they share a bias, whose gradient is a sum over them.
    """
    batch_size, num_heads, seqlen_q, _ = problem.q.shape
    num_heads_kv, seqlen_k = problem.k.shape[1:3]
    whole = slice(None)
    if batch_size * num_heads * seqlen_q * seqlen_k <= _ALL_SCORES:
        yield lambda found: list(found)
        return
    group = num_heads // num_heads_kv
    for b, h in sorted({(0, 0), (batch_size - 1, num_heads_kv - 1)}):
        batch = whole if "bias" in problem.options else slice(b, b + 1)

        def pick(found: Sequence[Tensor], batch: slice = batch, h: int = h) -> list[Tensor]:
            heads = _sharing(h, group)
            return [x[batch if x.shape[0] > 1 else whole, heads(i)] for i, x in enumerate(found)]

        yield pick


def _of_varlen(problem: Problem) -> Iterator[Pick]:
    """The first and the last heads of the longest, shortest, first and last sequence."""
    assert problem.varlen is not None
    lengths = problem.varlen.lengths
    num_heads, num_heads_kv = problem.q.shape[1], problem.k.shape[1]
    group = num_heads // num_heads_kv
    chosen = {0, len(lengths) - 1, lengths.index(max(lengths)), lengths.index(min(lengths))}
    for b, h in ((b, h) for b in sorted(chosen) for h in sorted({0, num_heads_kv - 1})):
        start = sum(lengths[:b])
        rows = slice(start, start + lengths[b])

        def pick(found: Sequence[Tensor], rows: slice = rows, h: int = h) -> list[Tensor]:
            heads = _sharing(h, group)
            return [x[rows, heads(i)].transpose(0, 1)[None] for i, x in enumerate(found)]

        yield pick
