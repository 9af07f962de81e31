"""The cost of features: every feature beside what it is measured by, taking turns with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import dlattn
from dlattn.bench import tensors
from dlattn.bench.cases import Case, Sizes
from dlattn.bench.peers import (
    TORCH_FLASH_VARLEN,
    TORCH_PEERS,
    TORCH_SDPA,
    Contestant,
    Problem,
    Varlen,
)
from dlattn.bench.session import TILES, Entrant

SM90_ROWS = 64  # that a warpgroup of sm90 walks with
Group = Callable[[], list[Entrant]]


@dataclass(frozen=True)
class Scale:
    """How large the problems are."""

    scores: tuple[Sizes, ...]  # for what changes the scores
    grouped: tuple[Sizes, int]  # and key heads
    masked: tuple[Sizes, ...]
    varlen: tuple[tuple[int, int], ...]  # heads, head_dim
    lengths: tuple[int, int, int]  # how many sequences, of how many tokens at least and at most
    window: int


SCALES = {
    "cuda": Scale(
        scores=((4, 32, 4096, 64), (4, 16, 4096, 128)),
        grouped=((4, 32, 4096, 128), 8),
        masked=((2, 32, 4096, 64), (2, 16, 4096, 128), (2, 8, 4096, 256)),
        varlen=((32, 64), (16, 128)),
        lengths=(64, 16, 4096),
        window=1024,
    ),
    "cpu": Scale(
        scores=((1, 2, 96, 16),),
        grouped=((1, 4, 64, 16), 2),
        masked=((2, 2, 64, 16),),
        varlen=((2, 16),),
        lengths=(6, 1, 80),
        window=24,
    ),
}


@dataclass(frozen=True)
class Context:
    """Where, in which dtype and with whom of ours to measure, and who else is asked for."""

    device: str
    dtype: str
    ours: Sequence[Contestant]
    peers: Sequence[str] | None  # None: those that a feature is measured by
    masks: Sequence[bool] = (False, True)  # whether causal
    head_dims: Sequence[int] | None = None  # None: all

    @property
    def scale(self) -> Scale:
        """The sizes of this device's problems."""
        scale = SCALES[self.device]
        return replace(
            scale,
            scores=tuple(sizes for sizes in scale.scores if self.wants(sizes[3])),
            masked=tuple(sizes for sizes in scale.masked if self.wants(sizes[3])),
            varlen=tuple(sizes for sizes in scale.varlen if self.wants(sizes[1])),
        )

    def wants(self, head_dim: int) -> bool:
        """Whether problems of this head_dim are asked for."""
        return self.head_dims is None or head_dim in self.head_dims

    def peer(self, name: str) -> list[Contestant]:
        """The peer of that name, unless others are asked for; on the CPU there is one."""
        if self.device == "cpu":
            return [] if self.peers is not None and "torch" not in self.peers else [TORCH_SDPA]
        if self.peers is not None and name not in self.peers:
            return []
        if name == TORCH_FLASH_VARLEN.name:
            return [TORCH_FLASH_VARLEN]
        return [Contestant(name, False, TORCH_PEERS[name])]


def groups(context: Context) -> dict[str, list[Group]]:
    """Every group of entrants that take turns, by the name that `--only` takes."""
    scale, masks = context.scale, context.masks
    heads = masks if context.wants(scale.grouped[0][3]) else ()
    kinds = ("mask", "bias", "bias float32") if False in masks else ()
    return {
        "gqa": [partial(grouped, context, causal) for causal in heads],
        "varlen": [
            partial(varlen, context, *sizes, causal=causal)
            for sizes in scale.varlen
            for causal in masks
        ],
        "mask": [
            partial(masked, context, sizes, kind, each_head)
            for sizes in scale.masked
            for kind in kinds
            for each_head in (False, True)
        ],
        "score": [partial(score, context, sizes) for sizes in scale.scores if True in masks],
    }


def grouped(context: Context, causal: bool) -> list[Entrant]:
    """Grouped heads, against FlashAttention-2, others beside it."""
    sizes, heads_kv = context.scale.grouped
    case = Case(sizes, causal, context.dtype, heads_kv)
    problem = Problem(case, *tensors.draw(case, context.device))
    names = ("torch-flash", "torch-cudnn", "fa3", "fa4") if context.device == "cuda" else ("torch",)
    peers = [Entrant(peer, problem) for name in names for peer in context.peer(name)]
    against = peers[0] if peers else None
    return [*(Entrant(own, problem, against) for own in context.ours), *peers]


def draw_lengths(scale: Scale, seed: int = 0) -> tuple[int, ...]:
    """Lengths of sequences, uniformly distributed."""
    count, least, most = scale.lengths
    drawn = np.random.default_rng(seed).integers(least, most + 1, count)
    return tuple(int(n) for n in drawn)


def varlen(context: Context, num_heads: int, head_dim: int, causal: bool) -> list[Entrant]:
    """Sequences of several lengths, against as many of one length with as many operations."""
    torch = tensors.torch_module()
    lengths = draw_lengths(context.scale)
    pairs = sum(n * n for n in lengths)
    # The root of the mean square, to a multiple of 32: operations are equal to a percent or two,
    # and the comparison is of operations per second.
    even = max(32, round(math.sqrt(pairs / len(lengths)) / 32) * 32)
    fixed_case = Case(
        (len(lengths), num_heads, even, head_dim), causal, context.dtype, variant="one length"
    )
    fixed = Problem(fixed_case, *tensors.draw(fixed_case, context.device))

    sizes = (1, num_heads, sum(lengths), head_dim)
    drawn = tensors.draw(Case(sizes, causal, context.dtype), context.device, seed=1)
    varlen_case = Case(
        (len(lengths), num_heads, max(lengths), head_dim),
        causal,
        context.dtype,
        variant=f"varlen {min(lengths)}-{max(lengths)}",
    )
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in drawn)
    several = Problem(varlen_case, q, k, v, varlen=Varlen(lengths, starts.to(context.device)))
    operations = 4.0 * num_heads * head_dim * pairs * (0.5 if causal else 1.0)
    entrants = []
    for own in context.ours:
        baseline = Entrant(own, fixed)
        entrants += [Entrant(own, several, baseline, operations), baseline]
    for name, problem, count in (
        (TORCH_FLASH_VARLEN.name, several, operations),
        ("torch-flash", fixed, None),
    ):
        for peer in context.peer(name):
            if context.device == "cuda" or problem is fixed:
                entrants.append(Entrant(peer, problem, operations=count))
    return entrants


def masked(context: Context, sizes: Sizes, kind: str, each_head: bool) -> list[Entrant]:
    """A boolean mask or an additive bias, against memory-efficient attention with the same one."""
    torch = tensors.torch_module()
    batch_size, num_heads, seqlen, _ = sizes
    shape = (batch_size, num_heads, seqlen, seqlen) if each_head else (1, 1, seqlen, seqlen)
    generator = torch.Generator(device=context.device).manual_seed(2)
    variant = f"{kind} {'(B,H,S,S)' if each_head else '(1,1,S,S)'}"
    case = Case(sizes, False, context.dtype, variant=variant)
    dtype = getattr(torch, context.dtype)
    inputs = tensors.draw(case, context.device)
    entrants = []
    if kind == "mask":
        mask = torch.rand(shape, device=context.device, generator=generator) < 0.8
        ours = Problem(case, *inputs, {"mask": mask})
        bias = torch.zeros(shape, device=context.device, dtype=dtype)
        theirs = replace(ours, options={"bias": bias.masked_fill_(~mask, -math.inf)})
        # torch turns a boolean mask into a bias anew in every call: beside that, the mask is given
        # as a bias that was made once, which is what counts.
        converting = [Entrant(peer, ours) for peer in context.peer("torch-efficient")]
        name = ", mask as bias"
    else:
        drawn = torch.randn(shape, device=context.device, generator=generator, dtype=dtype)
        wide = kind == "bias float32"
        ours = Problem(case, *inputs, {"bias": drawn.float() if wide else drawn})
        theirs = replace(ours, options={"bias": drawn})  # it takes the dtype of q alone
        converting, name = [], ", bias in q's dtype" if wide else ""
    peers = [
        Entrant(replace(peer, name=peer.name + name), theirs)
        for peer in context.peer("torch-efficient")
    ]
    against = peers[0] if peers else None
    without = replace(ours, case=replace(case, variant="plain"), options={})
    for own in context.ours:
        plain = Entrant(own, without)
        entrants += [Entrant(own, ours, against, plain=plain), plain]
    return [*entrants, *peers, *converting]


def tiles_walked(rows: int, keys: int, seqlen: int, left: int | None) -> int:
    """Tiles of `rows` by `keys` that a causal walk of one head takes, with a window or without.

    More than the visible keys would fill: those at both ends of a window are seen in part.
    """
    walked = 0
    for first in range(0, seqlen, rows):
        end = min(first + rows, seqlen)
        begin = 0 if left is None else max(0, first - left)
        walked += -(-end // keys) - begin // keys
    return walked


def _walk_facts(own: Contestant, problem: Problem, left: int | None) -> dict[str, float]:
    """The tiles of a call on a GPU, by its plan; nothing for kernels whose walk is another one."""
    inputs = (problem.q, problem.k, problem.v)
    asked: dict[str, Any] = {"causal": True, "layout": "bhsd", **problem.options}
    asked["kernel"] = own.name.removeprefix("dlattn ")
    if not dlattn.supported(*inputs, **asked):
        return {}
    plan = dlattn.plan(*inputs, **asked)
    if plan.kernel != "sm90" and plan.variant not in ("wide", "narrow", "pipelined"):
        return {}
    batch_size, num_heads, seqlen, _ = problem.case.sizes
    rows = SM90_ROWS if plan.kernel == "sm90" else plan.block_m
    return {TILES: batch_size * num_heads * tiles_walked(rows, plan.block_n, seqlen, left)}


def score(context: Context, sizes: Sizes) -> list[Entrant]:
    """Features that change scores, strides or outputs under causality, against the same kernel
    without."""
    torch = tensors.torch_module()
    batch_size, num_heads, seqlen, head_dim = sizes
    case = Case(sizes, True, context.dtype, variant="plain")
    plain = Problem(case, *tensors.draw(case, context.device))
    slopes = 2.0 ** -torch.linspace(1, 8, num_heads, device=context.device)
    sinks = torch.linspace(-2, 2, num_heads, device=context.device)
    window = (context.scale.window, None)
    asked: dict[str, Mapping[str, Any]] = {
        "lse": {"return_lse": True},
        "sinks": {"sinks": sinks},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": slopes},
        f"window {window[0]}": {"window": window},
    }
    problems = [
        replace(plain, case=replace(case, variant=name), options=options)
        for name, options in asked.items()
    ]
    other = "bfloat16" if context.dtype == "float16" else "float16"
    to_other = (x.to(getattr(torch, other)) for x in (plain.q, plain.k, plain.v))
    problems.append(Problem(replace(case, dtype=other, variant="other dtype"), *to_other))
    problems += _strided(context, case)

    # Keys that a window shows: of a row that stands at p, min(p, left) + 1.
    seen = sum(min(i, context.scale.window) + 1 for i in range(seqlen))
    in_window = 4.0 * batch_size * num_heads * head_dim * seen
    entrants = []
    for own in context.ours:
        baseline = Entrant(own, plain, facts=_walk_facts(own, plain, None))
        entrants.append(baseline)
        rows = Entrant(own, problems[-1])  # the baseline of packed qkv, which comes before it
        for problem in problems[:-1]:
            strided = problem.case.variant == "packed qkv"
            count, facts = None, {}
            if "window" in problem.options:
                count, facts = in_window, _walk_facts(own, problem, context.scale.window)
            entrants.append(Entrant(own, problem, rows if strided else baseline, count, facts))
        entrants.append(rows)
    return entrants


def _strided(context: Context, case: Case) -> list[Problem]:
    """q, k and v as slices of one tensor qkv, and as tensors of their own."""
    torch = tensors.torch_module()
    batch_size, num_heads, seqlen, head_dim = case.sizes
    generator = torch.Generator(device=context.device).manual_seed(3)
    drawn = torch.randn(
        (batch_size, seqlen, 3, num_heads, head_dim), device=context.device, generator=generator
    )
    qkv = (drawn + tensors.OFFSET).to(getattr(torch, context.dtype))
    slices = [qkv[:, :, i].transpose(1, 2) for i in range(3)]
    own = [qkv[:, :, i].contiguous().transpose(1, 2) for i in range(3)]
    return [
        Problem(replace(case, variant="packed qkv"), *slices),
        Problem(replace(case, variant="rows of their own"), *own),
    ]
