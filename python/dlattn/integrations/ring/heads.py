"""All positions of some heads, in place of some positions of all heads, and back.

Source: Jacobs et al. DeepSpeed Ulysses. arXiv:2309.14509, 2023.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from dlattn._errors import UnsupportedError
from dlattn.integrations.ring import shards
from dlattn.integrations.ring.calls import Problem
from dlattn.integrations.torch import _functions
from dlattn.integrations.torch.gradients import deterministic_gradients


@lru_cache(maxsize=64)
def _orders(
    lengths: tuple[int, ...], n: int, order: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions in the order in which the processes have them, and the way back."""
    each = [shards.rows(lengths, n, rank, order) for rank in range(n)]
    parts = [torch.arange(a, b, device=device) for rows in each for a, b in rows]
    by_process = torch.cat(parts) if parts else torch.arange(0, device=device)
    return by_process, by_process.argsort()


class _Exchange:
    """Between a process's rows of all heads, and all rows of its heads."""

    def __init__(self, problem: Problem) -> None:
        group = problem.group
        self.n, self.group, self.rank = group.n, group.group, group.rank
        self.row_dim = problem.row_dim
        self.head_dim = problem.row_dim + (1 if problem.layout == "bshd" else -1)
        each = [shards.rows(problem.lengths, self.n, r, problem.order) for r in range(self.n)]
        self.counts = [shards.count(rows) for rows in each]
        self.settings = problem.lengths, self.n, problem.order

    def _shape(self, x: torch.Tensor, rows: int, heads: int) -> list[int]:
        shape = list(x.shape)
        shape[self.row_dim], shape[self.head_dim] = rows, heads
        return shape

    def _rows_come_first(self, x: torch.Tensor) -> bool:
        """Whether a tensor's parts by rows lie one behind the other in memory."""
        return all(x.shape[dim] == 1 for dim in range(self.row_dim))

    def _exchanged(self, sent: torch.Tensor, sizes: list[int], found: list[int]) -> torch.Tensor:
        """A flat tensor: found[r] elements of process r, which sends them for sizes[r] of ours."""
        result = sent.new_empty(sum(found))
        dist.all_to_all_single(result, sent.reshape(-1), found, sizes, group=self.group)
        return result

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.shape[self.head_dim] // self.n
        shapes = [self._shape(x, rows, heads) for rows in self.counts]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = torch.stack(x.chunk(self.n, self.head_dim))
        flat = self._exchanged(parts, [sizes[self.rank]] * self.n, sizes)
        _, by_position = _orders(*self.settings, x.device)
        if self._rows_come_first(x):
            ordered = flat.view(self._shape(x, sum(self.counts), heads))
        else:
            received = zip(flat.split(sizes), shapes, strict=True)
            ordered = torch.cat([part.view(shape) for part, shape in received], self.row_dim)
        return ordered.index_select(self.row_dim, by_position)

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        by_process, _ = _orders(*self.settings, x.device)
        parts = x.index_select(self.row_dim, by_process)
        shape = self._shape(x, self.counts[self.rank], x.shape[self.head_dim])
        sizes = [x.numel() // max(1, sum(self.counts)) * rows for rows in self.counts]
        if not self._rows_come_first(x):
            each = parts.split(self.counts, self.row_dim)
            parts = torch.cat([part.reshape(-1) for part in each])
        flat = self._exchanged(parts, sizes, [sizes[self.rank]] * self.n)
        return torch.cat(flat.view(self.n, *shape).unbind(), self.head_dim)

    def own(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """The part of sinks or slopes that belongs to this process's heads."""
        return None if x is None else x.chunk(self.n, -1)[self.rank]


class _Exchanged(torch.autograd.Function):
    """`to_heads` or `to_rows`. Each element goes to one place: gradients go back the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _Exchange, to_heads: bool) -> torch.Tensor:
        ctx.settings = exchange, to_heads
        return exchange.to_heads(x) if to_heads else exchange.to_rows(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exchange, to_heads = ctx.settings
        return _Exchanged.apply(gradients[0], exchange, not to_heads), None, None


def attention(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """out of this process's rows, by attention of its heads to whole sequences."""
    n = problem.group.n
    exchange = _Exchange(problem)
    for name, x in (("num_heads", q), ("num_heads_kv", k)):
        if x.shape[exchange.head_dim] % n:
            raise UnsupportedError(
                f"mode is 'all_to_all' and {name} is {x.shape[exchange.head_dim]}; accepted: "
                f"multiples of the {n} processes of the group. mode='ring' takes any number"
            )
    options = problem.options(problem.mask.left, problem.mask.right)
    options |= {"sinks": exchange.own(sinks), "alibi_slopes": exchange.own(slopes)}
    q, k, v = (_Exchanged.apply(x, exchange, True) for x in (q, k, v))
    with deterministic_gradients(problem.deterministic):
        if problem.packed:
            starts = torch.tensor([0, *problem.lengths]).cumsum(0).int().to(q.device)
            most = max(problem.lengths)
            out = _functions.attention_varlen(q, k, v, starts, starts, most, most, **options)
        else:
            out = _functions.attention(q, k, v, **options)
    result: torch.Tensor = _Exchanged.apply(out, exchange, False)
    return result
