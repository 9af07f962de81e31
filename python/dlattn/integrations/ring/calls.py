"""One call of attention for the pairs of a step, forward and backward.

Sequences that lie one after the other are computed by `attention_varlen`, in which rows between two
pairs are sequences of their own, without keys or without queries: nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

import dlattn
from dlattn._types import Layout
from dlattn.integrations.ring.communication import Group
from dlattn.integrations.ring.schedule import Call, Mask, Step, steps
from dlattn.integrations.ring.shards import Range


@dataclass(frozen=True)
class Problem:
    """All of a call of `ring_attention` but its tensors.

    Attributes:
        lengths: Of the whole sequences, on all processes together.
        packed: q, k and v have no dimension of batches; sequences lie one after the other.
    """

    group: Group
    lengths: tuple[int, ...]
    packed: bool
    order: str
    mask: Mask
    softmax_scale: float | None
    softcap: float
    layout: Layout
    deterministic: bool

    @property
    def row_dim(self) -> int:
        return int(not self.packed) + int(self.layout == "bhsd")

    def steps_of(self, rank: int) -> tuple[Step, ...]:
        return steps(self.lengths, self.group.n, rank, self.order, self.mask)

    def options(self, left: int | None, right: int | None) -> dict[str, Any]:
        """Those of a call of attention with a window."""
        return {
            "causal": right == 0,
            "window": (left, None if right == 0 else right),
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "layout": self.layout,
        }

    def rows(self, x: torch.Tensor, rows: Range) -> torch.Tensor:
        return x.narrow(self.row_dim, rows[0], rows[1] - rows[0])

    def by_row(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like lse, to be multiplied with one like out."""
        return (x.transpose(-1, -2) if self.layout == "bshd" else x)[..., None]


class _Operands(NamedTuple):
    """A call's operands, forward and backward; `lse_offset` is to be added to lse, by row."""

    q: Range
    k: Range
    varlen: dict[str, Any]
    options: dict[str, Any]
    lse_offset: torch.Tensor | None


def _span(call: Call) -> tuple[Range, Range]:
    first, last = call.pairs[0], call.pairs[-1]
    return (first.q[0], last.q[1]), (first.k[0], last.k[1])


@lru_cache(maxsize=512)
def _varlen(call: Call, device: torch.device) -> dict[str, Any]:
    """cu_seqlens of a call's rows, those between its pairs included."""
    (q_row, _), (k_row, _) = _span(call)
    starts_q, starts_k = [0], [0]
    for pair in call.pairs:
        for q_end, k_end in ((pair.q[0], k_row), (pair.q[0], pair.k[0]), (pair.q[1], pair.k[1])):
            if (q_end, k_end) != (q_row, k_row):
                starts_q.append(starts_q[-1] + q_end - q_row)
                starts_k.append(starts_k[-1] + k_end - k_row)
            q_row, k_row = q_end, k_end
    most = [max(b - a for a, b in pairwise(x)) for x in (starts_q, starts_k)]
    return {
        "cu_seqlens_q": torch.tensor(starts_q, dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor(starts_k, dtype=torch.int32, device=device),
        "max_seqlen_q": most[0],
        "max_seqlen_k": most[1],
    }


@lru_cache(maxsize=512)
def _distances(call: Call, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Each query's position less that of its pair's first key."""
    (first, end), _ = _span(call)
    result = torch.zeros(end - first, dtype=dtype)
    for pair in call.pairs:
        m = pair.q[1] - pair.q[0]
        row = pair.q[0] - first
        result[row : row + m] = torch.arange(pair.offset, pair.offset + m, dtype=dtype)
    return result.to(device)


def _alibi(
    call: Call, slopes: torch.Tensor, max_seqlen_k: int, dtype: torch.dtype
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """How a call has the scores -slope |p - j|, and what is to be added to its lse.

    Queries at the positions of the keys have them from the call itself. Otherwise all keys are on
    one side, and the distance is one of the key from a fixed position, which is a bias, and one of
    the query from it, which the softmax does not see but lse does.
    """
    if call.pairs[0].is_square:
        return {"alibi_slopes": slopes}, None
    slopes = slopes.to(dtype)[..., None]
    keys = torch.arange(max_seqlen_k, device=slopes.device, dtype=dtype)
    distances = _distances(call, slopes.device, dtype)
    if call.pairs[0].offset > 0:
        keys, distances = keys - (max_seqlen_k - 1), (max_seqlen_k - 1) - distances
    else:
        keys = -keys
    bias = (slopes * keys)[..., None, :]
    return {"bias": bias if bias.dim() == 4 else bias[None]}, slopes * distances


def _operands(
    problem: Problem, call: Call, q: torch.Tensor, slopes: torch.Tensor | None
) -> _Operands:
    q_rows, k_rows = _span(call)
    varlen = _varlen(call, q.device) if problem.packed else {}
    options = problem.options(*call.window)
    offset = None
    if slopes is not None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        most = varlen["max_seqlen_k"] if varlen else k_rows[1] - k_rows[0]
        scores, offset = _alibi(call, slopes, most, dtype)
        options.update(scores)
    return _Operands(q_rows, k_rows, varlen, options, offset)


def forward(
    problem: Problem,
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
) -> tuple[Range, torch.Tensor, torch.Tensor]:
    """The rows of q that a call computes, and their out and lse over its keys alone."""
    given = _operands(problem, call, q, slopes)
    function: Any = dlattn.attention_varlen if problem.packed else dlattn.attention
    out, lse = function(
        problem.rows(q, given.q),
        problem.rows(k, given.k),
        problem.rows(v, given.k),
        **given.varlen,
        **given.options,
        return_lse=True,
    )
    return given.q, out, lse if given.lse_offset is None else (lse + given.lse_offset).float()


def backward(
    problem: Problem,
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    slopes: torch.Tensor | None,
) -> tuple[Range, Range, Any]:
    """The rows of q and of k that a call computes, and their gradients' share of it.

    out and lse are those over all keys.
    """
    given = _operands(problem, call, q, slopes)
    function: Any = (
        dlattn.attention_varlen_backward if problem.packed else dlattn.attention_backward
    )
    lse = lse.narrow(-1, given.q[0], given.q[1] - given.q[0])
    if given.lse_offset is not None:
        lse = (lse - given.lse_offset).float()
    found = function(
        problem.rows(dout, given.q),
        problem.rows(q, given.q),
        problem.rows(k, given.k),
        problem.rows(v, given.k),
        problem.rows(out, given.q),
        lse,
        **given.varlen,
        **given.options,
        needs=("dq", "dk", "dv"),
        deterministic=problem.deterministic,
    )
    return given.q, given.k, found
