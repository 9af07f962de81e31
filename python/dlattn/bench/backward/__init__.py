"""The backward pass: gradients alone, and with the forward pass before them.

Our kernels are timed beside torch's autograd over each peer's forward function, all on the same
inputs and the same gradient of the result. TFLOP/s count 2.5 times the operations of the forward
pass, 3.5 times with it. Ours take part in their deterministic mode too, where its plan is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from dlattn.bench import tensors
from dlattn.bench.backward.contestants import by_autograd, ours
from dlattn.bench.backward.gradients import ExpectedGradients
from dlattn.bench.cases import BACKWARD, BOTH, Case, Sizes
from dlattn.bench.features import Context
from dlattn.bench.peers import (
    TORCH_FLASH_VARLEN,
    TORCH_PEERS,
    TORCH_SDPA,
    Contestant,
    Problem,
    Varlen,
)
from dlattn.bench.session import Entrant
from dlattn.console.errors import CommandError

Group = Callable[[], list[Entrant]]

PASSES = (BACKWARD, BOTH)


@dataclass(frozen=True)
class Scale:
    """How large the problems are; `num_heads_kv` of 0 is num_heads."""

    square: tuple[Sizes, ...]  # groups by head_dim
    gqa: tuple[tuple[Sizes, int], ...]  # and key heads; causal
    bias: Sizes
    varlen: dict[str, tuple[int, int, int]]  # sequences, of how many tokens at least and at most
    varlen_heads: tuple[int, int]  # and head_dim
    more: tuple[Sizes, ...]  # what `square` has of one head_dim, of the others
    short: tuple[Sizes, ...]  # grids of about one wave
    host: Sizes


SCALES = {
    "cuda": Scale(
        square=(
            (1, 16, 16384, 128),
            (4, 16, 4096, 128),
            (1, 16, 1024, 128),
            (1, 32, 16384, 64),
            (1, 8, 16384, 256),
        ),
        gqa=(((4, 32, 4096, 128), 8), ((2, 32, 8192, 128), 8)),
        bias=(2, 16, 4096, 128),
        varlen={"long": (64, 16, 4096), "short": (128, 16, 512)},
        varlen_heads=(16, 128),
        more=((4, 32, 4096, 64), (4, 8, 4096, 256)),
        short=((4, 8, 512, 128), (2, 32, 256, 128), (1, 32, 512, 64)),
        host=(1, 8, 128, 64),
    ),
    "cpu": Scale(
        square=((1, 8, 512, 64), (1, 8, 1024, 64), (1, 8, 2048, 64), (1, 4, 1024, 128)),
        gqa=(((1, 8, 1024, 128), 2),),
        bias=(1, 8, 512, 64),
        varlen={"long": (8, 16, 512)},
        varlen_heads=(8, 64),
        more=(),
        short=((8, 8, 32, 64), (4, 8, 128, 64)),
        host=(1, 1, 16, 64),
    ),
}


class BackwardInputs:
    """The gradient of the result, and the exact gradients of the inputs."""

    def __init__(self, problem: Problem, dout: Any) -> None:
        """Keep them; nothing is computed until it is asked for."""
        self.dout = dout
        self._problem = problem

    @cached_property
    def expected(self) -> ExpectedGradients:
        """The right gradients."""
        return ExpectedGradients(self._problem, self.dout)


@dataclass(frozen=True)
class Study:
    """The set on one device, and who takes part."""

    context: Context
    peers: dict[str, Contestant]
    passes: Sequence[str] = PASSES  # to time

    def groups(self) -> dict[str, list[Group]]:
        """Every group of entrants that take turns, by the name that `--only` takes.

        A time limit cuts off the last ones.
        """
        scale = SCALES[self.context.device]
        wants, masks = self.context.wants, self.context.masks
        found: dict[str, list[Group]] = {}
        for sizes in scale.square:
            found.setdefault(f"head_dim {sizes[3]}", []).extend(self._masked(sizes))
        found["gqa"] = [
            self._dense(sizes, True, heads_kv)
            for sizes, heads_kv in scale.gqa
            if True in masks and wants(sizes[3])
        ]
        with_bias = False in masks and wants(scale.bias[3])
        found["bias"] = [partial(self._bias, scale.bias)] if with_bias else []
        found["varlen"] = [
            partial(self._varlen, name, causal)
            for name in scale.varlen
            for causal in masks
            if wants(scale.varlen_heads[1])
        ]
        if scale.more:
            found["more"] = [group for sizes in scale.more for group in self._masked(sizes)]
        found["short"] = [group for sizes in scale.short for group in self._masked(sizes)]
        return found

    def _masked(self, sizes: Sizes) -> list[Group]:
        """A problem with each mask, if its head_dim is asked for."""
        masks = self.context.masks if self.context.wants(sizes[3]) else []
        return [self._dense(sizes, causal) for causal in masks]

    def host_entrants(self) -> dict[str, Entrant]:
        """Whose eager calls' host time is to be measured, by the name to tell it by."""
        case = Case(SCALES[self.context.device].host, False, self.context.dtype)
        entrants = self._entrants(self._drawn(case), ("torch-flash", "torch-cudnn", "torch"))
        return {f"{e.contestant.name}, {e.problem.case.passes}": e for e in entrants}

    def _dense(self, sizes: Sizes, causal: bool, heads_kv: int = 0) -> Group:
        case = Case(sizes, causal, self.context.dtype, heads_kv)
        names = ["torch-flash", "torch-cudnn", "torch-efficient", "fa3", "fa4", "torch"]
        if heads_kv:
            names.remove("torch-efficient")  # it takes none
        return lambda: self._entrants(self._drawn(case), names)

    def _varlen(self, name: str, causal: bool) -> list[Entrant]:
        """Sequences of several lengths, one after the other."""
        torch = tensors.torch_module()
        scale = SCALES[self.context.device]
        count, least, most = scale.varlen[name]
        num_heads, head_dim = scale.varlen_heads
        drawn = np.random.default_rng(0).integers(least, most + 1, count)
        lengths = tuple(int(n) for n in drawn)
        sizes = (count, num_heads, max(lengths), head_dim)
        case = Case(sizes, causal, self.context.dtype, variant=f"varlen {least}-{most}")
        all_rows = replace(case, sizes=(1, num_heads, sum(lengths), head_dim))
        rows = [x[0].transpose(0, 1).contiguous() for x in self._draw(all_rows)]
        starts = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
        varlen = Varlen(lengths, starts.to(self.context.device))
        problem = Problem(case, rows[0], rows[1], rows[2], varlen=varlen)
        pairs = sum(n * n for n in lengths)
        names = (TORCH_FLASH_VARLEN.name, "fa3", "fa4")
        return self._entrants(self._with_dout(problem, rows[3]), names, pairs)

    def _bias(self, sizes: Sizes) -> list[Entrant]:
        """An additive bias that the batch shares, and its gradient."""
        torch = tensors.torch_module()
        _, num_heads, seqlen, _ = sizes
        case = Case(sizes, False, self.context.dtype, variant="bias and dbias (1,H,S,S)")
        generator = torch.Generator(device=self.context.device).manual_seed(2)
        shape = (1, num_heads, seqlen, seqlen)
        bias = torch.randn(shape, device=self.context.device, generator=generator)
        options = {"bias": bias.to(getattr(torch, case.dtype))}
        q, k, v, dout = self._draw(case)
        problem = self._with_dout(Problem(case, q, k, v, options), dout)
        return self._entrants(problem, ("torch-efficient", "torch-cudnn", "torch"))

    def _draw(self, case: Case) -> tuple[Any, ...]:
        """q, k, v and the gradient of the result."""
        dout, _, _ = tensors.draw(replace(case, num_heads_kv=0), self.context.device, seed=7)
        return (*tensors.draw(case, self.context.device), dout)

    def _drawn(self, case: Case) -> Problem:
        q, k, v, dout = self._draw(case)
        return self._with_dout(Problem(case, q, k, v), dout)

    @staticmethod
    def _with_dout(problem: Problem, dout: Any) -> Problem:
        return replace(problem, backward=BackwardInputs(problem, dout))

    def _entrants(
        self, problem: Problem, names: Sequence[str], pairs: float | None = None
    ) -> list[Entrant]:
        """Everybody with the backward pass alone, then with both passes, if these are to be timed.

        `pairs` counts queries and keys where the case's sizes do not tell.
        """
        entrants = []
        for passes in self.passes:
            case = replace(problem.case, passes=passes)
            own = replace(problem, case=case)
            _, num_heads, _, head_dim = case.sizes
            count = None if pairs is None else case.flops_of(pairs, num_heads, head_dim)
            for contestant in self.context.ours:
                fast = Entrant(ours(contestant, False), own, operations=count)
                entrants.append(fast)
                if self.context.device == "cuda":  # a CPU's gradients are always deterministic
                    other = ours(contestant, True)
                    entrants.append(Entrant(other, own, operations=count, beside=(fast,)))
            entrants += [
                Entrant(self.peers[name], own, operations=count)
                for name in names
                if name in self.peers
            ]
        return entrants


def study(context: Context, passes: Sequence[str] | None = None) -> Study:
    """The set with all its peers and passes, or those of them that are asked for."""
    known = dict(_peers(context.device))
    for name in context.peers or ():
        if name not in known:
            raise CommandError(f"--peers {name}; accepted here: {', '.join(known)}")
    asked = known if context.peers is None else context.peers
    named = {name: by_autograd(known[name]) for name in asked}
    return Study(context, named, PASSES if passes is None else passes)


def _peers(device: str) -> Iterator[tuple[str, Contestant]]:
    if device == "cpu":
        yield TORCH_SDPA.name, TORCH_SDPA
        return
    for name in ("torch-flash", "torch-cudnn", "torch-efficient", "fa3", "fa4"):
        yield name, Contestant(name, False, TORCH_PEERS[name])
    yield TORCH_FLASH_VARLEN.name, TORCH_FLASH_VARLEN
