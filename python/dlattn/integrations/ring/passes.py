"""The ring as an autograd function: keys arrive while those before them are computed.

In step s a process computes its queries with keys of the process s before it, which sends them
itself, and only those that the mask leaves. Partial results are merged in fp32 by their lse, in the
order of steps. The backward pass has out and lse over all keys, by which each step's gradients are
shares of the whole; those of keys go back to the process that has them.

Source: Liu, Zaharia, Abbeel. Ring attention with blockwise transformers. arXiv:2310.01889, 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dlattn._errors import UnsupportedError
from dlattn.integrations.ring import calls
from dlattn.integrations.ring.calls import Problem
from dlattn.integrations.ring.communication import Messages
from dlattn.integrations.ring.schedule import Step
from dlattn.integrations.ring.sharding import take_rows
from dlattn.integrations.ring.sums import Gradient, States, sum_dtype
from dlattn.integrations.torch.gradients import with_rows_side_by_side


def gradient_dtype(x: torch.Tensor, step: Step) -> torch.dtype:
    """One call's gradients have the keys' dtype, and travel so; sums of several are in fp32."""
    return sum_dtype(x) if step.sums else x.dtype


class _Exchange(NamedTuple):
    """Tensors that go to ranks, and those of `received`, which come from ranks."""

    sends: list[tuple[int, torch.Tensor]]
    receives: list[tuple[int, torch.Tensor]]
    received: list[torch.Tensor]


_NOTHING = _Exchange([], [], [])


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

    def keys(self, s: int, own: list[torch.Tensor]) -> _Exchange:
        """The keys of step s, of which there may be none."""
        if s == self.n:
            return _NOTHING
        sent = [take_rows(x, self.theirs[s].rows, self.problem.row_dim) for x in own]
        if s == 0:
            return _NOTHING._replace(received=sent)
        received = [self._empty(x, self.steps[s], x.dtype) for x in own]
        sends = [(self.readers[s], x) for x in sent]
        return _Exchange(sends, [(self.steps[s].source, x) for x in received], received)

    def gradients(self, s: int, shares: list[torch.Tensor], own: list[torch.Tensor]) -> _Exchange:
        """Step s' gradients go to whom the keys are; those of our own keys come."""
        if s == 0:
            return _NOTHING._replace(received=shares)
        step = self.theirs[s]
        received = [self._empty(x, step, gradient_dtype(x, step)) for x in own]
        sends = [(self.steps[s].source, x) for x in shares]
        return _Exchange(sends, [(self.readers[s], x) for x in received], received)

    def start(self, *exchanges: _Exchange) -> Messages:
        """Start messages together; what is received is there after `wait`.

        NCCL has one kernel for all of them. A second one would wait for the first one's end, and
        then find attention on all of the GPU.
        """
        sends = [send for exchange in exchanges for send in exchange.sends]
        return self.problem.group.start(sends, [x for e in exchanges for x in e.receives])


def _add_sinks(problem: Problem, states: States, q: torch.Tensor, sinks: torch.Tensor) -> None:
    """Let the sinks join the denominator: a state of their own, whose values are zeros."""
    out, lse = states.empty((0, q.shape[problem.row_dim]))
    largest = torch.finfo(torch.float32).max  # a state whose lse is +inf would count as empty
    states.add(
        (0, lse.shape[-1]), out, sinks.clamp(max=largest)[:, None].expand_as(lse).contiguous()
    )


def _sink_gradients(
    problem: Problem, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    dtype = sum_dtype(out)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta.transpose(-1, -2) if problem.layout == "bshd" else delta
    share = torch.where(sinks[:, None] < lse, (sinks[:, None] - lse).exp(), 1.0)  # 1 too at +inf
    shares = torch.where(lse == -torch.inf, 0.0, share.to(dtype) * delta)
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
    states = States(problem, q, v.shape[-1])
    arriving = ring.keys(0, [k, v])
    for s, step in enumerate(ring.steps):
        k_step, v_step = arriving.received
        arriving = ring.keys(s + 1, [k, v])
        messages = ring.start(arriving)
        try:
            for call in step.calls:
                states.add(*calls.forward(problem, call, q, k_step, v_step, slopes))
        finally:  # the next call's messages must not meet these
            messages.wait()
    if sinks is not None:
        _add_sinks(problem, states, q, sinks)
    return states.result()


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
    dq = Gradient(problem, q, sum_dtype(q))
    own = [Gradient(problem, x, sum_dtype(x)) for x in (k, v)]
    arriving, returning, shares = ring.keys(0, [k, v]), _NOTHING, list[torch.Tensor]()
    for s, step in enumerate(ring.steps):
        k_step, v_step = arriving.received
        returned, arriving = returning.received, ring.keys(s + 1, [k, v])
        returning = ring.gradients(s - 1, shares, [k, v]) if s > 0 else _NOTHING
        messages = ring.start(arriving, returning)
        try:
            if s > 1:
                _add(own, returned, ring.theirs[s - 2])
            found = [Gradient(problem, x, gradient_dtype(x, step)) for x in (k_step, v_step)]
            for call in step.calls:
                q_rows, k_rows, share = calls.backward(
                    problem, call, dout, q, k_step, v_step, out, lse, slopes
                )
                dq.add([q_rows], share.dq)
                for x, y in zip(found, (share.dk, share.dv), strict=True):
                    x.add([k_rows], y)
            shares = [x.result(x.dtype) for x in found]
        finally:
            messages.wait()
    returned, returning = returning.received, ring.gradients(ring.n - 1, shares, [k, v])
    messages = ring.start(returning)
    if ring.n > 1:
        _add(own, returned, ring.theirs[-2])
    rounded = dq.result(q.dtype)  # while the last gradients travel
    messages.wait()
    _add(own, returning.received, ring.theirs[-1])
    return [rounded, *(x.result(q.dtype) for x in own)]


def _add(own: list[Gradient], shares: list[torch.Tensor], step: Step) -> None:
    """Add gradients of the rows of a step where these rows are ours."""
    for x, share in zip(own, shares, strict=True):
        x.add(step.rows, share)


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
