"""The effect of the data on a softmax whose row max is seldom raised: `wmma`'s and `sm90`'s.

That softmax takes a row's probabilities relative to a row max that may be stale. It raises the row
max where a lane's sum of them over a tile, or a slice of one, exceeds 2^15 (`sm90`: 2^10), by what
the sums say, and scales the probabilities down. Where a sum exceeds 2^120 (`wmma`: a lane's,
`sm90`: a row's), scores are recomputed and the row max becomes their maximum; `sm90` then computes
the maximum first until no row max rises by 2^60 or more. How often that happens depends on the
scores alone. So queries and keys are made here whose scores have statistics as models produce them,
and the rates are counted by following the rule over the scores in float32.

Statistics, in natural logits after scaling. Noise is that of normal q and k, of deviation about 1:

noise       nothing else: the measure of all the others
peaked 4    deviation 4, and the norm of a key log-normal (sigma 0.4), so with heavy tails
peaked 8    the same with deviation 8
recent      the mean rises by 2 for every 64 keys towards the last key, which the walk sees first
distant     the mean rises by 2 for every 64 keys towards the first key: every tile may be a record
sink        key 0 stands 10 (first head) to 30 (last head) above the mean of the others
retrieval   16 pairs of rotary angles that add up to 8 at distance 0 and decay from there, and for
            each query one of 32 keys, anywhere, that its content matches: about 14
adversarial deviation 0.1, and 13 more from each 16 keys to the 16 before them: no row max fits
            any tile
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dlattn
from dlattn.bench import tensors
from dlattn.bench.cases import Case, Sizes
from dlattn.bench.features import Context
from dlattn.bench.peers import Problem
from dlattn.bench.session import Entrant

Tensor = Any

MAX_SUM = 2.0**15  # of a lane's probabilities, in wmma
HOPPER_MAX_SUM = 2.0**10  # in sm90
SLACK = 8.0  # of an edge tile's scores over the row max, in powers of 2
LARGEST = 2.0**120  # sum of a row that is scaled down
FAR_RISE = 60.0  # of a row max, in powers of 2, after which the next tile's maximum comes first
_TILE = 64  # keys in which the drifts are told
_WIDE_SLICES = {96: 4, 128: 4}  # of wmma's tiles with 32 rows a warp, where there is not one
_LANES = 4  # that share a row: lane l has columns 2 l and 2 l + 1 of every 8
_SIZES: dict[str, tuple[Sizes, ...]] = {
    "cuda": ((4, 32, 4096, 64), (4, 16, 4096, 128), (1, 16, 16384, 128)),
    "cpu": ((1, 2, 256, 32),),
}


def groups(context: Context) -> dict[str, list[Callable[[], list[Entrant]]]]:
    """A group for each size and mask: all kinds of scores take turns."""
    return {
        f"{sizes[2]} keys": [
            partial(study, context, Case(other, causal, context.dtype))
            for other in _SIZES[context.device]
            if other[2] == sizes[2] and context.wants(other[3])
            for causal in context.masks
        ]
        for sizes in _SIZES[context.device]
    }


def study(context: Context, case: Case) -> list[Entrant]:
    """Every kind of scores on every kernel of ours, against noise on the same kernel."""
    problems = {
        kind: Problem(replace(case, variant=kind), *make(kind, case, context.device))
        for kind in KINDS
    }
    entrants = []
    for own in context.ours:
        baseline = None
        for kind, problem in problems.items():
            facts = facts_of(problem, own.name.removeprefix("dlattn "))
            entrants.append(Entrant(own, problem, baseline, facts=facts))
            baseline = entrants[-1] if kind == "noise" else baseline
    return entrants


# Scores with given statistics


def make(kind: str, case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (batch, num_heads, seqlen, head_dim), whose scores are of that kind."""
    torch = tensors.torch_module()
    q, k, v = tensors.draw(replace(case, dtype="float32"), device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    q, k = KINDS[kind](torch, generator, q, k)
    dtype = getattr(torch, case.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _noise(torch: Any, generator: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def _peaked(deviation: float) -> Any:
    def make(torch: Any, generator: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.randn((*k.shape[:3], 1), device=k.device, generator=generator)
        return deviation * (q - tensors.OFFSET), (k - tensors.OFFSET) * torch.exp(0.4 * norm)

    return make


def _with_means(q: Tensor, k: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Adds means, (num_heads or 1, seqlen), to the scores of all queries: by four columns."""
    columns = 4
    weight = 16.0
    q, k = q.clone(), k.clone()
    q[..., -columns:] = weight
    k[..., -columns:] = (means * math.sqrt(q.shape[3]) / (columns * weight))[None, ..., None]
    return q, k


def _drift(per_tile: float, towards_first: bool) -> Any:
    def make(torch: Any, generator: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        key = torch.arange(k.shape[2], device=k.device, dtype=torch.float32)
        distance = key.max() - key if towards_first else key
        return _with_means(q, k, (distance - distance.mean())[None] * (per_tile / _TILE))

    return make


def _sink(torch: Any, generator: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    means = torch.zeros((k.shape[1], k.shape[2]), device=k.device)
    means[:, 0] = torch.linspace(10, 30, k.shape[1], device=k.device)
    return _with_means(q, k, means)


def _retrieval(torch: Any, generator: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    seqlen, head_dim = q.shape[2:]
    pairs = min(16, head_dim // 4)
    position = torch.arange(seqlen, device=q.device, dtype=torch.float32)
    angles = position[:, None] * 10000.0 ** (-torch.arange(pairs, device=q.device) / pairs)
    rotary = torch.cat([angles.cos(), angles.sin()], 1)
    amplitude = math.sqrt(8.0 * math.sqrt(head_dim) / pairs)
    q, k = q - tensors.OFFSET, k - tensors.OFFSET
    content = slice(0, head_dim - 2 * pairs)
    chosen = torch.randint(seqlen, (min(32, seqlen),), device=q.device, generator=generator)
    choice = torch.randint(len(chosen), (seqlen,), device=q.device, generator=generator)
    matching = k[:, :, chosen[choice], content]
    q[..., content] += 14.0 * math.sqrt(head_dim) / matching.square().sum(3, True) * matching
    q[..., content.stop :] = amplitude * rotary
    k[..., content.stop :] = amplitude * rotary
    return q, k


def _adversarial(torch: Any, generator: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    key = torch.arange(k.shape[2], device=k.device)
    steps = (k.shape[2] - 1) // 16 - key // 16  # 0 at the last keys, where the walk begins
    q, k = 0.1 * (q - tensors.OFFSET), k - tensors.OFFSET
    # Integers, which float16 holds exactly up to 2048, as small differences of large means must be.
    q[..., -1] = 13.0 * math.sqrt(q.shape[3])
    k[..., -1] = steps
    return q, k


KINDS: dict[str, Any] = {
    "noise": _noise,
    "peaked 4": _peaked(4.0),
    "peaked 8": _peaked(8.0),
    "recent": _drift(2.0, towards_first=False),
    "distant": _drift(2.0, towards_first=True),
    "sink": _sink,
    "retrieval": _retrieval,
    "adversarial": _adversarial,
}


# The rule


@dataclass(frozen=True)
class Walk:
    """The tiles in which a kernel sees scores."""

    block_m: int
    block_n: int
    warp_rows: int  # that vote together
    slices: int  # of a tile of the long loop, from its first keys on, each with a vote
    edge_keys: int  # of an edge tile that are worked on at a time, from its last keys on
    anticipates: bool = False  # works the maximum out first while row maxima rise far
    max_sum: float = MAX_SUM
    slack: float = SLACK
    speculates_on_edges: bool = False  # on all edge tiles but the walk's first
    lanes_overflow: bool = True  # lanes' sums tell whether fp32 was too small; False: rows'
    to_power: bool = False  # sums raise a row max so that the largest probability is a power of 2


@dataclass(frozen=True)
class Rates:
    """How often the rule was broken, over warps, tiles and slices."""

    redone: float  # scores and probabilities made again, of the long loop's
    scaled: float  # scaled down to row maxima raised by the sums, of the long loop's
    max_first: float  # made after the maximum was worked out, of the long loop's
    raised_on_edges: float  # row maxima raised, of edge tiles
    long_tiles: float  # the long loop's share of all tiles


def walk_of(plan: Any) -> Walk:
    """The walk that a plan of `sm90`, or of a speculating variant of `wmma`, stands for.

    What `sm90` walks together are the 64 rows of a warpgroup.
    """
    if plan.kernel == "sm90":
        return Walk(
            64,
            plan.block_n,
            16,
            slices=1,
            edge_keys=plan.block_n,
            max_sum=HOPPER_MAX_SUM,
            slack=0.0,
            speculates_on_edges=True,
            anticipates=True,
            lanes_overflow=False,
            to_power=True,
        )
    rows = plan.block_m // plan.num_warps
    narrow_slices = 1 if plan.variant == "persistent" else 2
    return Walk(
        plan.block_m,
        plan.block_n,
        rows,
        slices=_WIDE_SLICES.get(plan.head_dim_tile, 1) if rows == 32 else narrow_slices,
        edge_keys=16 if plan.head_dim_tile > 128 else 32,
        max_sum=MAX_SUM,
    )


def facts_of(problem: Problem, kernel: Any) -> dict[str, float]:
    """The effect of the rule on a problem; nothing where a kernel computes it that has no such
    rule."""
    inputs = (problem.q, problem.k, problem.v)
    options = {"causal": problem.case.causal, "layout": "bhsd", "kernel": kernel}
    if not dlattn.supported(*inputs, **options):
        return {}
    plan = dlattn.plan(*inputs, **options)
    speculates = plan.kernel == "wmma" and plan.variant in (
        "wide",
        "narrow",
        "pipelined",
        "persistent",
    )
    if not speculates and plan.kernel != "sm90":
        return {}
    rates = follow(walk_of(plan), _some_scores(problem.q, problem.k), problem.case.causal)
    return {
        "redone": rates.redone,
        "scaled": rates.scaled,
        "maximum first": rates.max_first,
        "raised on edges": rates.raised_on_edges,
    }


def _some_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scores of the first and the last head in float32, in powers of 2: (heads, rows, keys)."""
    scale = math.log2(math.e) / math.sqrt(q.shape[3])
    chosen = [(q[0, 0], k[0, 0]), (q[-1, -1], k[-1, -1])]
    return tensors.torch_module().stack([a.float() @ b.float().T * scale for a, b in chosen])


def follow(walk: Walk, scores: Tensor, causal: bool) -> Rates:
    """Follow the rule over scores, (heads, rows, keys) in powers of 2, from the last tile on.

    As the softmaxes of wmma and sm90 in src/cuda/forward do: on edge tiles a row whose maximum
    exceeds its row max by more than the slack gets the maximum as its row max, a row that has
    seen nothing always. On the others, if a lane's sum exceeds max_sum, all rows of its warp raise
    their row maxima by the exponent of their sum, in sm90 up to the next one for which the largest
    probability is a power of two, or as on edge tiles if a sum exceeds LARGEST.
    If the walk anticipates, a warp whose row maxima rose far goes about the next tile like that
    from the start. Warps pass over the slices of edge tiles that they do not see. As many queries
    as keys.
    """
    torch = tensors.torch_module()
    heads, num_rows, num_keys = scores.shape
    rows = torch.arange(num_rows, device=scores.device)
    first = rows // walk.block_m * walk.block_m
    last = (first + walk.block_m - 1).clamp(max=num_rows - 1)
    if causal:
        keys = torch.arange(num_keys, device=scores.device)
        scores = torch.where(keys <= rows[:, None], scores, -math.inf)
    end = (last + 1 if causal else torch.full_like(rows, num_keys)) + walk.block_n - 1
    end = end // walk.block_n
    every = first + 1 if causal else torch.full_like(rows, num_keys)
    full_end = end - 1  # the walk's first tile is an edge in any case
    if not walk.speculates_on_edges:
        full_end = torch.minimum(every // walk.block_n, full_end)

    pad = -num_keys % walk.block_n
    scores = torch.nn.functional.pad(scores, (0, pad), value=-math.inf)
    row_max = torch.full((heads, num_rows), -math.inf, device=scores.device)
    rising = torch.zeros((heads, num_rows), dtype=torch.bool, device=scores.device)
    counts = dict.fromkeys(("redone", "scaled", "first", "long", "raised", "edge"), 0.0)
    for n in range(int(end.max()) - 1, -1, -1):
        for edge in (True, False):
            inside = (n < end) & ((n >= full_end) if edge else (n < full_end))
            if not bool(inside.any()):
                continue
            rose_far = torch.zeros_like(rising)
            width = walk.edge_keys if edge else walk.block_n // walk.slices
            slices = range(n * walk.block_n, (n + 1) * walk.block_n, width)
            for first_key in reversed(slices) if edge else slices:
                part = scores[:, :, first_key : first_key + width]
                top = part.amax(2)
                by_maximum = torch.where(top > row_max + walk.slack, top, row_max)
                if edge:
                    raised_to = torch.where(inside, by_maximum, row_max)
                    seen = inside & (top > -math.inf)
                    counts["edge"] += _warps(seen, walk.warp_rows)
                    counts["raised"] += _warps(raised_to > row_max, walk.warp_rows)
                    row_max = raised_to
                    continue
                by_lane = _sums_by_lane(part, row_max)
                sums = by_lane.sum(2)
                largest = by_lane.amax(2)
                overflowing = inside & ~rising & (largest > walk.max_sum)
                overflowing = _by_warp(overflowing, walk.warp_rows)
                overflown = (largest if walk.lanes_overflow else sums) > LARGEST
                overflown = _by_warp(overflowing & overflown, walk.warp_rows)
                by_sums = row_max + sums.clamp(min=1.0).frexp().exponent - 1
                if walk.to_power:
                    excess = top - row_max
                    by_sums += torch.where(by_sums > row_max, excess - excess.floor(), 0.0)
                raised_to = torch.where(overflowing, by_sums, row_max)
                raised_to = torch.where(overflown | (inside & rising), by_maximum, raised_to)
                far = _by_warp(raised_to - row_max > FAR_RISE, walk.warp_rows)
                rose_far |= overflown | (rising & far)
                row_max = raised_to
                counts["long"] += _warps(inside.expand(heads, -1), walk.warp_rows)
                counts["redone"] += _warps(overflown, walk.warp_rows)
                counts["scaled"] += _warps(overflowing & ~overflown, walk.warp_rows)
                counts["first"] += _warps(inside & rising, walk.warp_rows)
            if walk.anticipates and not edge:
                rising = torch.where(inside, rose_far, rising)
    both = counts["edge"] + counts["long"]
    return Rates(
        counts["redone"] / max(1.0, counts["long"]),
        counts["scaled"] / max(1.0, counts["long"]),
        counts["first"] / max(1.0, counts["long"]),
        counts["raised"] / max(1.0, counts["edge"]),
        counts["long"] / max(1.0, both),
    )


def _sums_by_lane(part: Tensor, row_max: Tensor) -> Tensor:
    """The sums of a slice's probabilities over each lane of a row: (heads, rows, lanes)."""
    torch = tensors.torch_module()
    weights = torch.where(part > -math.inf, torch.exp2(part - row_max[..., None]), 0.0)
    heads, num_rows, width = part.shape
    return weights.view(heads, num_rows, width // 8, _LANES, 2).sum((2, 4))


def _by_warp(of_rows: Tensor, warp_rows: int) -> Tensor:
    """For each row, (heads, rows), whether it holds for any row of its warp."""
    torch = tensors.torch_module()
    num_rows = of_rows.shape[1]
    padded = torch.nn.functional.pad(of_rows.float(), (0, -num_rows % warp_rows))
    by_warp = padded.view(of_rows.shape[0], -1, warp_rows).amax(2) > 0
    return by_warp.repeat_interleave(warp_rows, 1)[:, :num_rows]


def _warps(of_rows: Tensor, warp_rows: int) -> float:
    """For how many warps it holds in any row."""
    return float(_by_warp(of_rows, warp_rows)[:, ::warp_rows].sum())
