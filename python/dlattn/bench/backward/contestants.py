"""Who computes gradients: this library's kernels, and peers by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dlattn
from dlattn.bench import tensors
from dlattn.bench.cases import BACKWARD
from dlattn.bench.peers import Bound, Contestant, Problem, UnavailableError

DETERMINISTIC = " deterministic"  # behind the name of ours


def ours(own: Contestant, deterministic: bool) -> Contestant:
    """The gradients by the kernel that one of the library's contestants has."""
    kernel = own.name.removeprefix("dlattn ")

    def bind(problem: Problem) -> Bound:
        options = {**problem.options, "causal": problem.case.causal, "kernel": kernel}
        inputs: tuple[Any, ...] = (problem.q, problem.k, problem.v)
        forward: Any = dlattn.attention
        backward: Any = dlattn.attention_backward
        lengths: tuple[Any, ...] = ()
        if problem.varlen is None:
            options["layout"] = "bhsd"
        else:
            cu_seqlens, longest = problem.varlen.cu_seqlens, max(problem.varlen.lengths)
            lengths = (cu_seqlens, cu_seqlens, longest, longest)
            forward, backward = dlattn.attention_varlen, dlattn.attention_varlen_backward

        def attend() -> Any:
            return forward(*inputs, *lengths, return_lse=True, **options)

        _require(dlattn.supported(*inputs, *lengths, **options))
        dout = _dout_of(problem)
        given = (dout, *inputs, *attend(), *lengths)
        _require(dlattn.supported_backward(*given, deterministic=deterministic, **options))
        plan = dlattn.plan_backward(*given, deterministic=deterministic, **options)
        if deterministic and plan == dlattn.plan_backward(*given, **options):
            raise UnavailableError("always deterministic: its plan is that of the other call")

        def differentiate(out: Any, lse: Any, **more: Any) -> list[Any]:
            found = backward(
                *(dout, *inputs, out, lse, *lengths), deterministic=deterministic, **options, **more
            )
            return [x for x in found if x is not None]

        def once(**more: Any) -> list[Any]:
            if problem.case.passes == BACKWARD:
                return differentiate(*given[4:6], **more)
            return differentiate(*attend(), **more)

        def checked() -> list[Any]:
            targets = zip(("dq", "dk", "dv"), inputs, strict=True)
            return once(
                **{name: tensors.fill_with_nan(x.new_empty(x.shape)) for name, x in targets}
            )

        taken = f"{plan.kernel}:{plan.variant}" if plan.variant else plan.kernel
        return Bound(once, checked=checked, plan=taken)

    name = own.name + (DETERMINISTIC if deterministic else "")
    return Contestant(name, True, bind)


def by_autograd(peer: Contestant) -> Contestant:
    """A peer's gradients: those that torch finds of its forward call."""

    def bind(problem: Problem) -> Bound:
        torch = tensors.torch_module()
        given = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.options}
        dout = _dout_of(problem)

        def with_leaves() -> tuple[Bound, tuple[Any, ...]]:
            leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
            options = {name: leaves[name] for name in problem.options}
            q, k, v = (leaves[name] for name in "qkv")
            bound = peer.bind(replace(problem, q=q, k=k, v=v, options=options))
            return bound, tuple(leaves.values())

        # Autograd computes on the stream where the forward pass ran, and ends on the one where a
        # leaf was first used: a captured stream has leaves and a result of its own.
        by_stream: dict[int, tuple[Bound, tuple[Any, ...]]] = {}
        results: dict[int, Any] = {}

        def stream() -> int:
            return torch.cuda.current_stream().cuda_stream if dout.is_cuda else 0

        def on_this_stream() -> tuple[Bound, tuple[Any, ...]]:
            if stream() not in by_stream:
                by_stream[stream()] = with_leaves()
            return by_stream[stream()]

        def backward() -> Any:
            bound, leaves = on_this_stream()
            if stream() not in results:
                results[stream()] = bound.call()
            return torch.autograd.grad(results[stream()], leaves, dout, retain_graph=True)

        def both() -> Any:
            bound, leaves = on_this_stream()
            return torch.autograd.grad(bound.call(), leaves, dout)

        call: Callable[[], Any] = backward if problem.case.passes == BACKWARD else both
        bound, _ = on_this_stream()
        return Bound(call, bound.context, note=bound.note)

    return Contestant(peer.name, False, bind)


def _require(support: Any) -> None:
    if not support.ok:
        raise UnavailableError("; ".join(support.reasons))


def _dout_of(problem: Problem) -> Any:
    if problem.backward is None:
        raise UnavailableError("computes gradients only")
    return problem.backward.dout
