"""The ring as an autograd function: keys arrive while those before them are computed.

In step s a process computes its queries with keys of the process s before it, which sends them
itself, and only those that the mask leaves. Partial results are merged in fp32 by their lse, in the
order of steps. The backward pass has out and lse over all keys, by which each step's gradients are
shares of the whole; those of keys go back to the process that has them.

Source: Liu, Zaharia, Abbeel. Ring attention with blockwise transformers. arXiv:2310.01889, 2023.
"""

from __future__ import annotations

from typing import Any

import torch

import dlattn
from dlattn._errors import UnsupportedError
from dlattn.integrations.ring import calls
from dlattn.integrations.ring.calls import Problem
from dlattn.integrations.ring.communication import Messages
from dlattn.integrations.ring.schedule import Step
from dlattn.integrations.ring.sharding import take_rows
from dlattn.integrations.torch.gradients import with_rows_side_by_side


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gradient_dtype(x: torch.Tensor, step: Step) -> torch.dtype:
    """One call's gradients have the keys' dtype, and travel so; sums of several are in fp32."""
    return sum_dtype(x) if step.sums else x.dtype


class _Ring:
    """The messages of one pass. `theirs[s]` is the step s of the process that needs our keys."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        group = problem.group
        self.n = group.n
        self.steps = problem.steps_of(group.rank)
        self.readers = [(group.rank + s) % self.n for s in range(self.n)]
        self.theirs = [problem.steps_of(rank)[s] for s, rank in enumerate(self.readers)]

    def _empty(self, like: torch.Tensor, step: Step, dtype: torch.dtype) -> torch.Tensor:
        shape = list(like.shape)
        shape[self.problem.row_dim] = step.num_rows
        return like.new_empty(shape, dtype=dtype)

    def send_keys(self, s: int, keys: list[torch.Tensor]) -> tuple[Messages, list[torch.Tensor]]:
        """Start the messages of step s; the tensors are there after `wait`."""
        row_dim = self.problem.row_dim
        if s == 0:
            return Messages([]), [take_rows(x, self.steps[0].rows, row_dim) for x in keys]
        if s == self.n:
            return Messages([]), []
        received = [self._empty(x, self.steps[s], x.dtype) for x in keys]
        sent = [take_rows(x, self.theirs[s].rows, row_dim) for x in keys]
        messages = self.problem.group.start(
            [(self.readers[s], x) for x in sent], [(self.steps[s].source, x) for x in received]
        )
        return messages, received

    def send_gradients(
        self, s: int, gradients: list[torch.Tensor], keys: list[torch.Tensor]
    ) -> tuple[Messages, list[torch.Tensor]]:
        """Start to send step s' gradients to whom the keys are, and to receive those of ours."""
        step = self.theirs[s]
        received = [self._empty(x, step, gradient_dtype(x, step)) for x in keys]
        messages = self.problem.group.start(
            [(self.steps[s].source, x) for x in gradients],
            [(self.readers[s], x) for x in received],
        )
        return messages, received


def _merge(
    problem: Problem, whole: tuple[torch.Tensor, torch.Tensor], part: tuple[Any, ...]
) -> None:
    rows, out, lse = part
    into = problem.rows(whole[0], rows), whole[1].narrow(-1, rows[0], rows[1] - rows[0])
    outs, lses = [into[0], out.to(into[0].dtype)], [into[1], lse]
    if problem.packed:
        outs, lses = [x[None] for x in outs], [x[None] for x in lses]
    merged = dlattn.merge_states(outs, lses, layout=problem.layout)
    for x, found in zip(into, merged, strict=True):
        x.copy_(found[0] if problem.packed else found)


def _add_sinks(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Let the sinks join the denominator, once, behind all keys. Returns the new lse."""
    total = torch.logaddexp(lse, sinks[:, None])
    weights = torch.where(lse == -torch.inf, 0.0, (lse - total).exp())
    out.mul_(problem.by_row(weights).to(out.dtype))
    return total


def _sink_gradients(
    problem: Problem, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    dtype = sum_dtype(out)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta.transpose(-1, -2) if problem.layout == "bshd" else delta
    shares = torch.where(lse == -torch.inf, 0.0, (sinks[:, None] - lse).exp().to(dtype) * delta)
    shares = shares.sum(-1)
    return -(shares if problem.packed else shares.sum(0)).to(sinks.dtype)


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out in q's dtype, and lse over all keys of all processes."""
    ring = _Ring(problem)
    row_dim = problem.row_dim
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=sum_dtype(q))
    heads = [x for i, x in enumerate(q.shape[:-1]) if i != row_dim]
    lse = q.new_full((*heads, q.shape[row_dim]), -torch.inf, dtype=torch.float32)
    _, keys = ring.send_keys(0, [k, v])
    for s, step in enumerate(ring.steps):
        messages, arriving = ring.send_keys(s + 1, [k, v])
        try:
            for call in step.calls:
                part = calls.forward(problem, call, q, keys[0], keys[1], slopes)
                _merge(problem, (out, lse), part)
        finally:  # the next call's messages must not meet these
            messages.wait()
        keys = arriving
    if sinks is not None:
        lse = _add_sinks(problem, out, lse, sinks)
    return out.to(q.dtype), lse


def backward(
    problem: Problem,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    slopes: torch.Tensor | None,
) -> list[torch.Tensor]:
    """dq, dk and dv, summed in fp32 and then rounded."""
    ring = _Ring(problem)
    dq = torch.zeros_like(q, dtype=sum_dtype(q))
    own = [torch.zeros_like(x, dtype=sum_dtype(x)) for x in (k, v)]
    _, keys = ring.send_keys(0, [k, v])
    returning, returned = Messages([]), own[:0]
    for s, step in enumerate(ring.steps):
        messages, arriving = ring.send_keys(s + 1, [k, v])
        try:
            shares = [torch.zeros_like(x, dtype=gradient_dtype(x, step)) for x in keys]
            for call in step.calls:
                q_rows, k_rows, found = calls.backward(
                    problem, call, dout, q, keys[0], keys[1], out, lse, slopes
                )
                problem.rows(dq, q_rows).add_(found.dq)
                for x, share in zip(shares, (found.dk, found.dv), strict=True):
                    problem.rows(x, k_rows).add_(share)
        finally:
            returning.wait()
            messages.wait()
        if s == 0:
            returned = shares
        else:
            _add(problem, own, returned, ring.theirs[s - 1])
            returning, returned = ring.send_gradients(s, shares, [k, v])
        keys = arriving
    returning.wait()
    _add(problem, own, returned, ring.theirs[-1])
    return [x.to(q.dtype) for x in (dq, *own)]


def _add(problem: Problem, own: list[torch.Tensor], shares: list[torch.Tensor], step: Step) -> None:
    """Add gradients of the rows of a step where these rows are ours."""
    for x, share in zip(own, shares, strict=True):
        row = 0
        for begin, end in step.rows:
            problem.rows(x, (begin, end)).add_(problem.rows(share, (row, row + end - begin)))
            row += end - begin


class RingAttention(torch.autograd.Function):
    """`forward` and `backward` of this file, and the gradient of sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        out, lse = forward(problem, q, k, v, sinks, slopes)
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, sinks, slopes, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "gradients of ring_attention are computed with create_graph=True; accepted: "
                "create_graph=False, as these gradients have none themselves"
            )
        q, k, v, sinks, slopes, out, lse = ctx.saved_tensors
        dout: Any = with_rows_side_by_side(grad_outputs[0], out)
        gradients: list[Any] = [None] * 3
        if any(ctx.needs_input_grad[1:4]):
            gradients = list(backward(ctx.problem, dout, q, k, v, out, lse, slopes))
        dsinks = None
        if ctx.needs_input_grad[4]:
            dsinks = _sink_gradients(ctx.problem, dout, out, lse, sinks)
        return (None, *gradients, dsinks, None)
