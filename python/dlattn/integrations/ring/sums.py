"""Sums of what steps of a ring compute, each of some rows: partial results, and gradients.

Passes over memory are what they cost beside attention: one for each gradient, and few for results.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

import dlattn
from dlattn.integrations.ring.calls import Problem
from dlattn.integrations.ring.shards import Range

# Partial results that wait to be merged, in units of the whole: a merge reads all it is given once.
_WAITING = 4
_MOST_STATES = 32  # of one call of merge_states


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class States:
    """Attention of all rows to the keys so far, from parts that each saw some of the keys."""

    def __init__(self, problem: Problem, q: torch.Tensor, head_dim_v: int) -> None:
        self.problem = problem
        self.rows = q.shape[problem.row_dim]
        self._nothing = q, head_dim_v
        self._parts: list[tuple[Range, torch.Tensor, torch.Tensor]] = []
        self._waiting = 0

    def add(self, rows: Range, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Rows of a state: out, and lse in the order (heads, rows) of its last two dimensions.

        Both are the sum's from then on.
        """
        count = rows[1] - rows[0]
        if self._waiting + count > _WAITING * self.rows:
            self._merge()
        self._parts.append((rows, out, lse))
        self._waiting += count

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._merge()
        return self._parts[0][1:]

    def _merge(self) -> None:
        """Let one part of all rows take the place of all parts."""
        whole = (0, self.rows)
        cuts = sorted({*whole, *(end for rows, *_ in self._parts for end in rows)})
        merged = [(rows, *self._merged(rows)) for rows in pairwise(cuts)]
        if len(merged) != 1:
            found = [x for x in self._parts if x[0] == whole]
            out, lse = found[0][1:] if found else self.empty(whole)
            for (a, b), own_out, own_lse in merged:
                into = self.problem.rows(out, (a, b))
                if own_out.data_ptr() != into.data_ptr():  # else this part was alone there
                    into.copy_(own_out)
                    lse[..., a:b] = own_lse
            merged = [(whole, out, lse)]
        self._parts, self._waiting = merged, self.rows

    def empty(self, rows: Range) -> tuple[torch.Tensor, torch.Tensor]:
        """The state of rows that saw no key."""
        q, head_dim_v = self._nothing
        q = self.problem.rows(q, rows)
        out = q.new_zeros(*q.shape[:-1], head_dim_v)
        lse = q.new_full(self.problem.by_row(q[..., 0]).shape[:-1], -torch.inf, dtype=torch.float32)
        return out, lse

    def _merged(self, rows: Range) -> tuple[torch.Tensor, torch.Tensor]:
        states = []
        for (begin, end), out, lse in self._parts:
            if begin <= rows[0] and rows[1] <= end:
                first, count = rows[0] - begin, rows[1] - rows[0]
                within = self.problem.rows(out, (first, first + count))
                states.append((within, lse.narrow(-1, first, count)))
        while len(states) > 1:
            together, states = states[:_MOST_STATES], states[_MOST_STATES:]
            states.insert(0, self._together(together))
        return states[0] if states else self.empty(rows)

    def _together(
        self, states: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self.problem.packed
        outs, lses = (
            [x[None] if packed else x for x in part] for part in zip(*states, strict=True)
        )
        out, lse = dlattn.merge_states(outs, lses, layout=self.problem.layout)
        return (out[0], lse[0]) if packed else (out, lse)


class Gradient:
    """The gradient of a tensor, from gradients of some of its rows, which are summed in `dtype`.

    Rows that have one gradient keep it as it came: a pass over memory is saved for each.
    """

    def __init__(self, problem: Problem, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.problem, self.like, self.dtype = problem, like, dtype
        self._all: Range = (0, like.shape[problem.row_dim])
        self._first: torch.Tensor | None = None  # of all rows
        self._sum: torch.Tensor | None = None  # what takes the first one's place in _rows
        self._rows: Range = (0, 0)

    def add(self, ranges: Sequence[Range], x: torch.Tensor) -> None:
        """Rows of x lie one behind the other. The first x of all rows is the sum's from then on."""
        if not ranges:
            return
        if self._first is None and tuple(ranges) == (self._all,):
            self._first = x.contiguous()
            return
        into = self._sum_of((ranges[0][0], ranges[-1][1]))
        row = 0
        for begin, end in ranges:
            share = self.problem.rows(x, (row, row + end - begin))
            self._within(into, (begin, end)).add_(share)
            row += end - begin

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        if self._first is None:
            return torch.zeros_like(self.like, dtype=dtype)
        if self._sum is not None and self._rows == self._all:
            return self._sum.to(dtype)
        result = self._first.to(dtype)
        if self._sum is not None:
            self.problem.rows(result, self._rows).copy_(self._sum)
        return result

    def _within(self, x: torch.Tensor, rows: Range) -> torch.Tensor:
        """Rows of a tensor that has those of `_rows`."""
        return self.problem.rows(x, (rows[0] - self._rows[0], rows[1] - self._rows[0]))

    def _sum_of(self, rows: Range) -> torch.Tensor:
        """The sum, after these rows and all between have been made part of it."""
        if self._first is None:
            self._first = torch.zeros_like(self.like, dtype=self.dtype)
        if self._sum is None and self._first.dtype == self.dtype:
            self._sum, self._rows = self._first, self._all
        before, had = self._sum, self._rows
        if before is not None:
            rows = min(rows[0], had[0]), max(rows[1], had[1])
            if rows == had:
                return before
        found = self._sum = self.problem.rows(self._first, rows).to(self.dtype)
        self._rows = rows
        if before is not None:
            self._within(found, had).copy_(before)
        if rows == self._all:
            self._first = found  # the memory of the first one is given back
        return found
