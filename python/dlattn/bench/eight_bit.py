"""Attention on 8-bit tensors beside the 16-bit kernels and its peers, in one sustained run.

Inputs are normal values plus 0.25. The float8 tensors hold them by one scale for each of q, k and
v, since that is what cuDNN takes; dlattn gets it as descales of each batch entry and key head.
At one length the library also takes the 16-bit tensors themselves and computes in 8 bits: the time
is that of the whole call, or without what `quantize_kv` does, which is timed apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dlattn.bench import accuracy, tensors
from dlattn.bench.cases import FLOAT8, Case, Sizes
from dlattn.bench.cudnn_fp8 import CUDNN_FP8
from dlattn.bench.features import Context
from dlattn.bench.peers import (
    COMFY_INT8,
    SAGE,
    TORCH_PEERS,
    TORCH_SDPA,
    Contestant,
    Problem,
    Varlen,
)
from dlattn.bench.precision import (
    ALONE,
    KEPT,
    MOST_COLUMNS,
    PRECISIONS,
    attending_to_kept,
    bytes_moved,
    computing_in,
    in_precision,
    quantising,
    rates_table,
)
from dlattn.bench.report import Result
from dlattn.bench.session import Entrant
from dlattn.console.errors import CommandError
from dlattn.console.text import table

Group = Callable[[], list[Entrant]]


@dataclass(frozen=True)
class Scale:
    """How large the problems are: (batch, num_heads, seqlen, head_dim) and key heads."""

    fixed: tuple[tuple[Sizes, int], ...]
    varlen: tuple[tuple[int, int, int], ...]  # heads, key heads, head_dim
    lengths: tuple[int, int, int]  # how many sequences, of how many tokens at least and at most
    mean_of_v: tuple[Sizes, ...]
    seqlen: int  # of those of `fixed` that are computed in 8 bits out of 16
    quantised: tuple[tuple[Sizes, int], ...]  # for quantize_kv alone


_LENGTHS = (4096, 8192, 16384, 32768)
SCALES = {
    "cuda": Scale(
        fixed=(
            *(((1, 64, seqlen, 128), 8) for seqlen in _LENGTHS),
            *(((1, 16, seqlen, 128), 16) for seqlen in _LENGTHS),
            ((1, 32, 8192, 64), 32),
            ((1, 64, 8192, 64), 8),
            ((1, 8, 8192, 256), 8),
        ),
        varlen=((64, 8, 128), (16, 16, 128)),
        lengths=(16, 256, 4096),
        mean_of_v=tuple((1, 4, seqlen, 128) for seqlen in (2048, 8192, 32768, 131072)),
        seqlen=8192,
        quantised=(
            ((1, 64, 8192, 128), 8),
            ((1, 16, 8192, 128), 16),
            ((1, 32, 8192, 64), 32),
            ((1, 16, 32768, 128), 16),
        ),
    ),
    "cpu": Scale(
        fixed=(((1, 4, 96, 16), 2),),
        varlen=((2, 1, 16),),
        lengths=(4, 8, 64),
        mean_of_v=((1, 1, 128, 16),),
        seqlen=96,
        quantised=(((1, 4, 96, 16), 2),),
    ),
}


@dataclass(frozen=True)
class Peers:
    """Those that take part: on float8 tensors, and on 16-bit ones."""

    float8: list[Contestant]
    wide: list[Contestant]


def peers(context: Context) -> Peers:
    """All, or those asked for. Raises CommandError for a name that is none of them."""
    wide = [TORCH_SDPA]
    if context.device == "cuda":
        cudnn = Contestant("torch-cudnn", False, TORCH_PEERS["torch-cudnn"])
        wide = [cudnn, COMFY_INT8, SAGE]
    names = [peer.name for peer in (CUDNN_FP8, *wide)]
    for name in context.peers or ():
        if name not in names:
            raise CommandError(f"--peers {name}; accepted here: {', '.join(names)}")

    def asked(peer: Contestant) -> bool:
        return context.peers is None or peer.name in context.peers

    return Peers([CUDNN_FP8] if asked(CUDNN_FP8) else [], [x for x in wide if asked(x)])


def groups(context: Context) -> dict[str, list[Group]]:
    """Every group of entrants that take turns, by the name that `--only` takes."""
    scale, others = SCALES[context.device], peers(context)
    found: dict[str, list[Group]] = {}
    for sizes, heads_kv in scale.fixed:
        if not context.wants(sizes[3]):
            continue
        for causal in context.masks:
            case = Case(sizes, causal, context.dtype, _kv(sizes, heads_kv))
            members = found.setdefault(f"head_dim {sizes[3]}", [])
            members.append(partial(_fixed, context, others, case))
    found["varlen"] = [
        partial(_varlen, context, others, shape, causal)
        for shape in scale.varlen
        if context.wants(shape[2])
        for causal in context.masks
    ]
    found["quantize"] = [
        partial(_quantised, context, Case(sizes, causal, context.dtype, _kv(sizes, heads_kv)))
        for sizes, heads_kv in scale.quantised
        if context.wants(sizes[3])
        for causal in context.masks
        if causal == context.masks[0] or sizes[2] == scale.seqlen
    ]
    return found


def _kv(sizes: Sizes, heads_kv: int) -> int:
    return 0 if heads_kv == sizes[1] else heads_kv


def _fixed(context: Context, others: Peers, case: Case) -> list[Entrant]:
    """Ours and the peers, on float8 tensors and on the same values in 16 bits."""
    wide = Problem(case, *tensors.draw(case, context.device))
    narrow = to_float8(wide)
    wide_peers = [Entrant(peer, wide) for peer in others.wide]
    narrow_peers = [Entrant(peer, narrow) for peer in others.float8]
    entrants = []
    for own in context.ours:
        own_wide = Entrant(own, wide, _first(wide_peers))
        beside = (own_wide, *wide_peers)
        entrants += [Entrant(own, narrow, _first(narrow_peers), beside=beside), own_wide]
        if own is context.ours[0] and _has_precisions(context, case):
            entrants += [
                Entrant(computing_in(x), in_precision(wide, x), own_wide, beside=tuple(wide_peers))
                for x in PRECISIONS
            ]
    return [*entrants, *narrow_peers, *wide_peers]


def _has_precisions(context: Context, case: Case) -> bool:
    return case.sizes[2] == SCALES[context.device].seqlen and case.sizes[3] <= MOST_COLUMNS


def _quantised(context: Context, case: Case) -> list[Entrant]:
    """quantize_kv alone, and attention to what it made once."""
    wide = Problem(case, *tensors.draw(case, context.device))
    attended = case.sizes[2] == SCALES[context.device].seqlen
    baseline = [Entrant(own, wide) for own in context.ours[:1] if attended]
    entrants = []
    for precision in PRECISIONS:
        if attended:
            asked = in_precision(wide, precision, KEPT)
            entrants.append(Entrant(attending_to_kept(precision), asked, _first(baseline)))
        if case.causal == context.masks[0]:  # quantize_kv knows no mask
            asked = in_precision(wide, precision, ALONE)
            facts = {"bytes": bytes_moved(asked)}
            entrants.append(Entrant(quantising(precision), asked, operations=0.0, facts=facts))
    return [*entrants, *baseline]


def _first(entrants: Sequence[Entrant]) -> Entrant | None:
    return entrants[0] if entrants else None


def _varlen(
    context: Context, others: Peers, shape: tuple[int, int, int], causal: bool
) -> list[Entrant]:
    """Sequences of several lengths, against as many of one length with as many operations."""
    torch = tensors.torch_module()
    num_heads, heads_kv, head_dim = shape
    count, least, most = SCALES[context.device].lengths
    drawn = np.random.default_rng(0).integers(least, most + 1, count)
    lengths = tuple(int(n) for n in drawn)
    pairs = sum(n * n for n in lengths)
    even = max(32, round(math.sqrt(pairs / count) / 32) * 32)
    one = Case(
        (count, num_heads, even, head_dim),
        causal,
        context.dtype,
        0 if heads_kv == num_heads else heads_kv,
        "one length",
    )
    fixed = to_float8(Problem(one, *tensors.draw(one, context.device)))
    sizes = (1, num_heads, sum(lengths), head_dim)
    inputs = tensors.draw(replace(one, sizes=sizes), context.device, seed=1)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs)
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    several = to_float8(
        Problem(
            replace(
                one,
                sizes=(count, num_heads, max(lengths), head_dim),
                variant=f"varlen {min(lengths)}-{max(lengths)}",
            ),
            q,
            k,
            v,
            varlen=Varlen(lengths, starts.to(context.device)),
        )
    )
    operations = 4.0 * num_heads * head_dim * pairs * (0.5 if causal else 1.0)
    theirs = [Entrant(peer, several, operations=operations) for peer in others.float8]
    entrants = []
    for own in context.ours:
        baseline = Entrant(own, fixed)
        ours = Entrant(own, several, baseline, operations, beside=tuple(theirs))
        entrants += [ours, baseline]
    return [*entrants, *theirs, *(Entrant(peer, fixed) for peer in others.float8)]


def to_float8(problem: Problem) -> Problem:
    """The same problem on float8 tensors, with a descale for each batch entry and key head."""
    inputs, options = [], dict(problem.options)
    varlen = problem.varlen
    batch_size = problem.case.sizes[0] if varlen is None else len(varlen.lengths)
    for x, name in zip((problem.q, problem.k, problem.v), tensors.DESCALES, strict=True):
        narrow, descale = tensors.to_float8(x)
        inputs.append(narrow)
        options[name] = descale.repeat(batch_size, problem.case.heads_kv)
    case = replace(problem.case, dtype=FLOAT8)
    return Problem(case, inputs[0], inputs[1], inputs[2], options, varlen)


# Checks beside the times


def checks(context: Context) -> dict[str, Callable[[], list[accuracy.Entry]]]:
    """The measurements that follow the times, by the key of the JSON that has each."""
    others, scale, device = peers(context), SCALES[context.device], context.device
    # The inputs of the distributions are exact in float16.
    dtype = "float16" if context.dtype == "bfloat16" else context.dtype
    schemes = [
        *(accuracy.Scheme(x, FLOAT8) for x in (*context.ours, *others.float8)),
        *(accuracy.Scheme(x, dtype) for x in (*context.ours, *others.wide)),
    ]
    if context.ours:
        sixteen = "float16" if dtype == "float32" else dtype
        schemes += [accuracy.Scheme(computing_in(x), sixteen, {"precision": x}) for x in PRECISIONS]
    return {
        "mean_of_v": partial(accuracy.mean_of_v, schemes, device, to_float8, scale.mean_of_v),
        "distributions": partial(accuracy.distributions, schemes, device, to_float8),
        "dequantised": partial(accuracy.dequantised, schemes, device, to_float8),
    }


# The results of a run


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """How fast ours is in 8 bits relative to each other: by head_dim, and varlen apart."""
    ratios: dict[tuple[str, str, str], dict[str, float]] = {}
    for result in results:
        precision = result.contestant.startswith("dlattn precision=")
        in_8_bits = precision or result.case.dtype == FLOAT8
        if not result.ours or not in_8_bits or result.seconds is None:
            continue
        case = f"{result.case.label} {result.case.mask}"
        kind = f"head_dim {result.case.sizes[3]}"
        if result.case.variant:
            kind = f"{kind}, {result.case.variant}" if precision else "varlen"
        told: Mapping[str, float] = {
            name: value for name, value in result.facts.items() if name.startswith("vs ")
        }
        if result.vs_baseline is not None:
            told = {f"vs {result.baseline}": result.vs_baseline, **told}
        for name, value in told.items():
            ratios.setdefault((result.contestant, kind, name), {})[case] = value
    lines = []
    for (contestant, kind, name), by_case in ratios.items():
        least = min(by_case, key=lambda case: by_case[case])
        lines.append(
            {
                "contestant": contestant,
                "cases_of": kind,
                "ratio": name,
                "cases": len(by_case),
                "geometric_mean": statistics.geometric_mean(by_case.values()),
                "least": by_case[least],
                "least_case": least,
            }
        )
    return lines


def tables(document: Mapping[str, Any]) -> list[accuracy.Table]:
    """The results of a run, and the checks beside the times."""
    found = document["eight_bit"]
    parts = []
    if found["summary"]:
        parts.append(_summary_table(found["summary"]))
    if found.get("quantising"):
        parts.append(rates_table(found["quantising"]))
    if "mean_of_v" in found:
        parts.append(accuracy.mean_table(found["mean_of_v"]))
    if "distributions" in found:
        entries = found["distributions"]
        parts.append(accuracy.error_table(entries))
        parts.append(accuracy.error_table(entries, "relative_l1", "relative L1 error"))
        parts.append(accuracy.error_table(entries, "one_minus_cosine", "1 - cosine", 6))
    if "dequantised" in found:
        parts.append(accuracy.error_table(found["dequantised"]))
        parts.append(accuracy.error_table(found["dequantised"], "largest", "largest error"))
    return parts


def text(document: Mapping[str, Any]) -> str:
    """The tables for a terminal."""
    return "\n\n".join(
        table(headers, rows, right=range(1, len(headers))) for headers, rows in tables(document)
    )


def _summary_table(lines: Sequence[Mapping[str, Any]]) -> accuracy.Table:
    rows = [
        [
            f"{line['contestant']} {line['ratio']}",
            line["cases_of"],
            str(line["cases"]),
            f"{line['geometric_mean']:.3f}",
            f"{line['least']:.3f}",
            line["least_case"],
        ]
        for line in lines
    ]
    return ["in 8 bits", "cases of", "cases", "geometric mean", "least", "at"], rows
