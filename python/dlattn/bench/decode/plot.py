"""A run of decoding as bars: what everybody reads a second, cold, in a panel for each group, and in
several figures where one would be too tall to be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlattn.bench.decode.cases import COLD
from dlattn.bench.decode.report import Row, reference_tb_per_s, rows
from dlattn.bench.report import Result
from dlattn.console.text import duration

_BAR, _GAP, _PANEL = 0.2, 0.12, 0.75  # inches: of a bar, between cases, beside a panel's bars
_TALLEST = 8.0  # inches of panels in a figure, unless one alone is taller


def bars(
    pyplot: Any,
    document: Mapping[str, Any],
    results: Sequence[Result],
    colours: Mapping[str, str],
    width: float,
    margins: float,
) -> Iterator[Any]:
    """The figures, so wide and with so many inches above and below the panels, to one scale."""
    timed = [row for row in rows(results) if row.seconds(COLD) is not None]
    groups = list(dict.fromkeys(row.group for row in timed))
    panels = [[row for row in timed if row.group == group] for group in groups]
    reference = reference_tb_per_s(document["machine"])
    most = 1.12 * max(*(row.tb_per_s(COLD) or 0.0 for row in timed), reference or 0.0)
    measure = f"; dotted: the memory's {reference}" if reference is not None else ""
    for part in _parts(panels):
        heights = [_height(panel) for panel in part]
        figure, axes = pyplot.subplots(
            len(part),
            1,
            figsize=(width, sum(heights) + margins),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
            sharex=True,
        )
        for axis, panel in zip(axes[:, 0], part, strict=True):
            _panel(axis, panel, colours)
            axis.set_xlim(0, most)
            if reference is not None:
                axis.axvline(reference, color="#3d3d3d", linewidth=0.8, linestyle=":")
        axes[-1, 0].set_xlabel(f"TB/s of K and V, cold{measure}")
        names = dict.fromkeys(row.contestant for panel in part for row in panel)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
        place = {"loc": "upper right", "bbox_to_anchor": (0.99, 1.0), "ncols": len(names)}
        figure.legend(handles, list(names), fontsize=8, frameon=False, **place)
        yield figure


def _parts(panels: Sequence[Sequence[Row]]) -> list[list[Sequence[Row]]]:
    """Neighbouring panels that one figure has room for."""
    parts: list[list[Sequence[Row]]] = []
    room = 0.0
    for panel in panels:
        if not parts or _height(panel) > room:
            parts.append([])
            room = _TALLEST
        parts[-1].append(panel)
        room -= _height(panel)
    return parts


def _height(panel: Sequence[Row]) -> float:
    return _PANEL + _BAR * len(panel) + _GAP * len({row.key for row in panel})


def _panel(axis: Any, panel: Sequence[Row], colours: Mapping[str, str]) -> None:
    """Bars of a group, the cases in the order of the run from the top."""
    place, ticks, labels = 0.0, [], []
    for key in dict.fromkeys(row.key for row in panel):
        own = [row for row in panel if row.key == key]
        ticks.append(place + _BAR * (len(own) - 1) / 2)
        labels.append(f"{own[0].case.label}\n{own[0].what}")
        for row in own:
            rate = row.tb_per_s(COLD) or 0.0
            axis.barh(place, rate, color=colours[row.contestant], height=0.9 * _BAR)
            text = f" {duration(row.seconds(COLD) or 0.0)}"
            weight = "bold" if row.ours else "normal"
            label = axis.text(rate, place, text, va="center", fontsize=7.5, fontweight=weight)
            label.set_bbox({"color": "white", "pad": 0.5})  # above the dotted line
            place += _BAR
        place += _GAP
    axis.set_ylim(place - _GAP - _BAR / 2, -_BAR / 2)
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_title(panel[0].group, loc="left", fontsize=10)
