"""Holds the model against measured times.

Two sources: this library's own kernels on an H200 (the same model, with that GPU's rates, on the
sm_90 code), and published shares of the tensor peak of kernels whose sources are public.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from sass_model.devices import DEVICES
from sass_model.kernels import Kernel
from sass_model.predict import Pace, Problem, predict
from sass_model.sass import find_paths, parse
from sass_model.simulate import simulate

MEASURED_ON = "H200"


@dataclass(frozen=True)
class Comparison:
    """One measured case."""

    problem: Problem
    kernel: str
    measured: float  # seconds
    predicted: float  # seconds

    @property
    def error(self) -> float:
        """Relative: positive where the model is too slow."""
        return self.predicted / self.measured - 1


# Names of variants in older results, with their names of today.
FORMER_VARIANTS = {"ahead": "pipelined", "whole": "single_pass", "bulk": "persistent"}


def measured_cases(path: Path) -> list[tuple[Problem, str, float]]:
    """The wmma kernel's float16 problems in a results file, the variants they ran on, seconds."""
    cases = []
    for result in json.loads(path.read_text())["results"]:
        ours = result["contestant"] == "dlattn wmma"
        if ours and result["dtype"] == "float16" and not result["wrong"]:
            batch, heads, seqlen, head_dim = result["shape"]
            problem = Problem(batch, heads, seqlen, head_dim, result["causal"])
            variant = result["plan"].removeprefix("wmma:")
            variant = FORMER_VARIANTS.get(variant, variant)
            cases.append((problem, variant, float(result["seconds"])))
    return cases


def compare(
    cases: list[tuple[Problem, str, float]], kernels: list[Kernel], paces: dict[str, Pace]
) -> list[Comparison]:
    """Predicts measured cases, those whose variant is modelled."""
    device = DEVICES[MEASURED_ON]
    by_name = {k.name: k for k in kernels}
    found = []
    for problem, variant, seconds in cases:
        name = f"{problem.head_dim} {variant}"
        if name in paces:
            predicted = predict(by_name[name], paces[name], device, problem).seconds
            found.append(Comparison(problem, name, seconds, predicted))
    return found


def summary(comparisons: list[Comparison]) -> dict[str, float]:
    """Geometric mean of predicted over measured, root mean square and largest error."""
    logs = [math.log(c.predicted / c.measured) for c in comparisons]
    return {
        "geometric_mean": math.exp(sum(logs) / len(logs)),
        "rms": math.sqrt(sum(x * x for x in logs) / len(logs)),
        "worst": max((c.error for c in comparisons), key=abs),
    }


@dataclass(frozen=True)
class Published:
    """A kernel of known source, and the share of the tensor peak that its author reports."""

    name: str
    device: str
    blocks_per_sm: int
    num_warps: int
    share: float
    source: str


_LEARN_CUDA = "github.com/gau-nernst/learn-cuda, commit e83c256, 07_attention/README.md"
# bfloat16, 8 heads, 4096 queries, 8192 keys, head_dim 128, an RTX 5090 at 400 W. Version 1 has bank
# conflicts, which a listing does not show. Blocks per SM by the registers and shared memory of the
# code compiled for sm_120.
PUBLISHED = (
    Published("v2", "RTX 5090", 2, 4, 0.8645, _LEARN_CUDA),
    Published("v3", "RTX 5090", 3, 4, 0.9062, _LEARN_CUDA),
    Published("v4", "RTX 5090", 3, 4, 0.9276, _LEARN_CUDA),
    Published("v5", "RTX 5090", 2, 4, 0.9439, _LEARN_CUDA),
)


def compare_published(folder: Path) -> list[dict[str, object]]:
    """The long loops of listings <name>.sass in a folder against what their author measured."""
    found = []
    for known in PUBLISHED:
        listing = folder / f"{known.name}.sass"
        if not listing.is_file():
            continue
        device = DEVICES[known.device]
        loop = find_paths(parse(listing.read_text())).main
        run = simulate(loop, device, known.blocks_per_sm, known.num_warps)
        found.append({**asdict(known), "predicted_share": run.busy["tensor"]})
    return found
