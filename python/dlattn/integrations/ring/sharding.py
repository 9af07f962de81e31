"""Parts of sequences: from whole tensors, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import type_text
from dlattn.integrations.ring import shards
from dlattn.integrations.ring.communication import Group


def lengths_of(cu_seqlens: Any) -> tuple[int, ...]:
    """The lengths of sequences from where each begins, and the last one ends."""
    if not isinstance(cu_seqlens, (torch.Tensor, list, tuple)):
        kind = type_text(type(cu_seqlens))
        raise TypeError(f"cu_seqlens is of type {kind}; accepted: a torch.Tensor or a list")
    starts = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    starts = starts if isinstance(starts, list) else [starts]
    whole = all(type(x) is int for x in starts)
    if not whole or len(starts) < 2 or starts[0] != 0 or sorted(starts) != starts:
        raise UnsupportedError(
            f"cu_seqlens is {starts}; accepted: integers from 0 on that do not decrease, one more "
            "than there are sequences"
        )
    return tuple(b - a for a, b in pairwise(starts))


def take_rows(x: torch.Tensor, ranges: Sequence[shards.Range], dim: int) -> torch.Tensor:
    """Rows of x one behind the other, contiguous; a copy only where they are not yet so."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in ranges]
    if not parts:
        return x.narrow(dim, 0, 0).contiguous()
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def shard_sequence(
    x: torch.Tensor,
    group: Any = None,
    dim: int = 1,
    order: str = "zigzag",
    *,
    cu_seqlens: Any = None,
) -> torch.Tensor:
    """This process's rows of a tensor that every process of the group has whole.

    Args:
        x: Any tensor with the positions of a sequence along `dim`: tokens, labels, q.
        group: A process group of n processes; None: all processes.
        dim: The dimension of positions.
        order: "zigzag": parts `rank` and 2n - 1 - rank of 2n, equal work under a causal mask.
            "contiguous": part `rank` of n. Part c of m begins at length * c // m, so lengths need
            not divide. "whole": with cu_seqlens, sequences that are short beside a process's share
            lie on one process each, and nothing of them is sent; others are cut as by "zigzag".
            Processes' rows and work differ by a 16th at most.
        cu_seqlens: Where several sequences that lie one after the other along `dim` begin, and the
            last one ends: each is cut for itself. A list, or a tensor, best on the CPU, as its
            values are read. None: one sequence.

    Returns:
        A contiguous tensor. Gradients flow to these rows of x.

    Raises:
        UnsupportedError, TypeError: An argument is wrong.
    """
    _check_dim(x, dim)
    to = Group(group)
    shards.check_order(order, shards.ORDERS_OF_MANY)
    lengths = _lengths(x.shape[dim], cu_seqlens)
    return take_rows(x, shards.rows(lengths, to.n, to.rank, order), dim)


def unshard_sequence(
    x: torch.Tensor,
    group: Any = None,
    dim: int = 1,
    order: str = "zigzag",
    *,
    cu_seqlens: Any = None,
) -> torch.Tensor:
    """The whole tensor, on every process, of the parts that `shard_sequence` gave them.

    It has no gradients: under autograd pass x.detach().

    Args:
        x: This process's part, of the others' shape but for `dim`.
        group, dim, order, cu_seqlens: As for `shard_sequence`.

    Returns:
        A new tensor.

    Raises:
        UnsupportedError, TypeError: An argument is wrong, or the parts are not those of a sequence.
    """
    _check_dim(x, dim)
    to = Group(group)
    shards.check_order(order, shards.ORDERS_OF_MANY)
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "x requires grad, and unshard_sequence has no gradients; accepted: x.detach()"
        )
    to.check_device("x", x)
    counts = [c for (c,) in to.all_numbers([x.shape[dim]], x.device)]
    lengths = _lengths(sum(counts), cu_seqlens)
    each = [shards.rows(lengths, to.n, rank, order) for rank in range(to.n)]
    check_counts(counts, each, lengths, order)
    shape = list(x.shape)
    shape[dim] = max(counts)
    padded = x.new_zeros(shape)  # all_gather takes equal shapes
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in range(to.n)]
    dist.all_gather(parts, padded, group=to.group)
    shape[dim] = sum(counts)
    whole = x.new_empty(shape)
    for part, ranges in zip(parts, each, strict=True):
        row = 0
        for begin, end in ranges:
            whole.narrow(dim, begin, end - begin).copy_(part.narrow(dim, row, end - begin))
            row += end - begin
    return whole


def _check_dim(x: Any, dim: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is of type {type_text(type(x))}; accepted: a torch.Tensor")
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise UnsupportedError(f"dim is {dim!r}; accepted: a dimension of x, which has {x.dim()}")


def _lengths(rows: int, cu_seqlens: Any) -> tuple[int, ...]:
    if cu_seqlens is None:
        return (rows,)
    lengths = lengths_of(cu_seqlens)
    if sum(lengths) != rows:
        raise UnsupportedError(
            f"cu_seqlens ends at {sum(lengths)}, and there are {rows} rows; accepted: their number"
        )
    return lengths


def check_counts(
    counts: Sequence[int | None],
    each: Sequence[Sequence[shards.Range]],
    lengths: tuple[int, ...],
    order: str,
) -> None:
    """Refuse shards that do not have the rows that `shard_sequence` gives; None: not known."""
    expected = [shards.count(ranges) for ranges in each]
    if any(c not in (None, e) for c, e in zip(counts, expected, strict=True)):
        raise UnsupportedError(
            f"the processes have {list(counts)} rows; accepted for {sum(lengths)} rows in order "
            f"{order!r}: {expected}, as shard_sequence gives them"
        )
