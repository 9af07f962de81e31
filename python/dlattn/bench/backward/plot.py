"""A run of the backward pass as bars: a panel for each of the passes, cases from the top."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlattn.bench.cases import Case
from dlattn.bench.report import Result

_BAR, _GAP = 0.13, 0.12  # inches: of a bar, between cases
_TALLEST = 8.0  # inches of bars in a figure


def bars(
    pyplot: Any,
    results: Sequence[Result],
    colours: Mapping[str, str],
    width: float,
    margins: float,
) -> Iterator[Any]:
    """The figures, so wide and with so many inches above and below the panels, to one scale."""
    passes = list(dict.fromkeys(result.case.passes for result in results))
    most = 1.15 * max(result.tflops or 0.0 for result in results)
    for cases in _parts(results):
        own = [result for result in results if _problem(result.case) in cases]
        height = max(_height(own, each) for each in passes) + 0.7
        figure, axes = pyplot.subplots(
            1,
            len(passes),
            figsize=(width, height + margins),
            squeeze=False,
            layout="constrained",
        )
        for axis, each in zip(axes[0], passes, strict=True):
            _panel(axis, [result for result in own if result.case.passes == each], colours)
            axis.set_title(f"{each}, TFLOP/s", loc="left", fontsize=10)
            axis.set_xlim(0, most)
        names = dict.fromkeys(result.contestant for result in own)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
        columns = (len(names) + 1) // 2  # two rows: the title stands to the left of them
        place = {"loc": "upper right", "bbox_to_anchor": (0.99, 1.0), "ncols": columns}
        figure.legend(handles, list(names), fontsize=8, frameon=False, **place)
        yield figure


def _problem(case: Case) -> tuple[Any, ...]:
    """A case, whichever passes it is timed with."""
    return case.sizes, case.num_heads_kv, case.causal, case.dtype, case.variant


def _height(results: Sequence[Result], passes: str) -> float:
    own = [result for result in results if result.case.passes == passes]
    return _BAR * len(own) + _GAP * len({result.case for result in own})


def _parts(results: Sequence[Result]) -> list[list[tuple[Any, ...]]]:
    """Neighbouring cases, in as few figures as have room for them, of about the same height."""
    heights: dict[tuple[Any, ...], float] = {}
    for result in results:
        problem = _problem(result.case)
        heights.setdefault(problem, _GAP)
        if result.case.passes == results[0].case.passes:
            heights[problem] += _BAR
    total = sum(heights.values())
    count = math.ceil(total / _TALLEST)
    parts: list[list[tuple[Any, ...]]] = [[] for _ in range(count)]
    above = 0.0
    for problem, height in heights.items():
        parts[int((above + height / 2) * count / total)].append(problem)
        above += height
    return parts


def _panel(axis: Any, results: Sequence[Result], colours: Mapping[str, str]) -> None:
    place, ticks, labels = 0.0, [], []
    for case in dict.fromkeys(result.case for result in results):
        own = [result for result in results if result.case == case]
        ticks.append(place + _BAR * (len(own) - 1) / 2)
        labels.append(f"{case.label} {case.mask}" + (f"\n{case.variant}" if case.variant else ""))
        for result in own:
            rate = result.tflops or 0.0
            axis.barh(place, rate, color=colours[result.contestant], height=0.9 * _BAR)
            weight = "bold" if result.ours else "normal"
            axis.text(rate, place, f" {rate:.0f}", va="center", fontsize=6.5, fontweight=weight)
            place += _BAR
        place += _GAP
    axis.set_ylim(place - _GAP - _BAR / 2, -_BAR / 2)
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.tick_params(axis="y", length=0)
