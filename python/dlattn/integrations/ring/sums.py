"""Sums of what steps of a ring compute, each of some rows: partial results, and gradients.

Passes over memory are what they cost beside attention: one for each gradient, and few for results.
"""

from __future__ import annotations

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
    """A gradient of a tensor, summed in `dtype` from gradients of some of its rows."""

    def __init__(self, problem: Problem, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.problem, self.like, self.dtype = problem, like, dtype
        self._total: torch.Tensor | None = None

    def add(self, rows: Range, x: torch.Tensor) -> None:
        """The first one may become the sum itself."""
        if self._total is None and rows == (0, self.like.shape[self.problem.row_dim]):
            self._total = x.to(self.dtype).contiguous()
        else:
            self.problem.rows(self.total(), rows).add_(x)

    def total(self) -> torch.Tensor:
        if self._total is None:
            self._total = torch.zeros_like(self.like, dtype=self.dtype)
        return self._total
