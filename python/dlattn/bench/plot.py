"""Figures of a benchmark: bars for a few shapes, lines for a sweep over sequence lengths."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from dlattn.bench import record
from dlattn.bench.backward import plot as backward_plot
from dlattn.bench.cases import FLOAT8, FORWARD, Case
from dlattn.bench.decode import plot as decode_plot
from dlattn.bench.load import BUSY
from dlattn.bench.report import Result, ceiling_of, ceiling_text, from_json
from dlattn.console.errors import CommandError, OutputError, first_line
from dlattn.console.text import duration, rate
from dlattn.console.writing import replacing

# Ours in shades of one strong colour, "auto", or else the last kernel, in the strongest. Peers in
# greys that still differ when printed, and in lines by their markers too.
_OURS = ("#0b5fa5", "#4d9bdb", "#9ccaf0", "#cfe5f8")
_PEERS = ("#3d3d3d", "#6e6e6e", "#969696", "#bababa", "#d6d6d6", "#ececec")
_MARKERS = "sD^v*P"

_WIDTH = 11.2  # inches
_DPI = 130
# Inches above and below the panels, for the title, the small print and a legend.
_TOP, _BOTTOM, _LEGEND = 0.4, 0.6, 0.5
_SMALL = 7.5  # points: the small print's font
_RANGE = 50.0  # fastest over slowest from which the scale is logarithmic: ratios stay visible
_TICKS = (1, 3, 10, 30, 100, 300, 1000)  # TFLOP/s, on that scale


def require(path: Path) -> None:
    """Raise before an hour of measuring if nothing can be drawn after it, or not in such a file."""
    try:
        import matplotlib
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'dlattn[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    if path.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise CommandError(f"--plot {path}: accepted: a name that ends in .png, .svg or .pdf")


def part(path: Path, number: int) -> Path:
    """The file of a plot's part, counted from 1, where the plot takes several."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def draw(document: dict[str, Any], path: Path) -> list[Path]:
    """Draw what `report.to_json` wrote. Returns the files: decoding may take several."""
    require(path)
    from matplotlib import pyplot

    results = [result for result in from_json(document) if result.tflops is not None]
    if not results:
        raise CommandError("--plot: nothing was timed, so there is nothing to draw")
    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "svg.hashsalt": "dlattn",
    }
    files = []
    with pyplot.rc_context(style):
        for number, figure in enumerate(_figures(pyplot, document, results), 1):
            figure.text(0.01, 0.99, _title(document), fontsize=13, fontweight="bold", va="top")
            width, height = figure.get_size_inches()
            small = {"fontsize": _SMALL, "color": "#666666", "va": "bottom"}
            figure.text(0.01, 0.05 / height, _footnote(document, width), **small)
            files.append(part(path, number))
            _save(figure, files[-1])
            pyplot.close(figure)
    return files


def _figures(pyplot: Any, document: dict[str, Any], results: Sequence[Result]) -> Iterator[Any]:
    """The figures of a document, in the form that its results ask for."""
    if "decode" in document:
        for figure in decode_plot.bars(
            pyplot, document, results, _colours(results), _WIDTH, _TOP + _BOTTOM
        ):
            _reserve(figure, _BOTTOM)
            yield figure
    elif "eight_bit" in document and _of_several_lengths(results):
        yield _eight_bit(pyplot, results, document["eight_bit"])
    elif any(result.case.passes != FORWARD for result in results):
        for figure in backward_plot.bars(
            pyplot, results, _colours(results), _WIDTH, _TOP + _BOTTOM
        ):
            _reserve(figure, _BOTTOM)
            yield figure
    elif any(result.vs_baseline is not None for result in results):
        yield _ratios(pyplot, results)
    elif _is_sweep(results):
        yield _lines(pyplot, results, ceiling_of(document["ceiling"]))
    else:
        yield _bars(pyplot, results)


def _save(figure: Any, path: Path) -> None:
    try:
        with replacing(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower(), dpi=_DPI)
    except (OSError, ValueError) as error:
        raise OutputError(f"--plot {path}: cannot be written: {first_line(error)}") from error


# head_dim, heads, key heads, whether causal, and the batch where that tells results apart
Panel = tuple[int, int, int, bool, int]
Panelist = Callable[[Any, dict[str, str]], None]  # draws into axes, with contestants' colours


def _panel_of(result: Result, batch: int = 0) -> Panel:
    case = result.case
    return case.sizes[3], case.sizes[1], case.heads_kv, case.causal, batch


def _panels(results: Sequence[Result]) -> dict[Panel, list[Result]]:
    """The results of each panel, in which a contestant has one at a length: no line goes back."""
    panels: dict[Panel, list[Result]] = {}
    for result in results:
        panels.setdefault(_panel_of(result), []).append(result)
    for key, panel in list(panels.items()):
        if len({(r.contestant, r.case.sizes[2]) for r in panel}) == len(panel):
            continue
        del panels[key]
        for result in panel:
            panels.setdefault(_panel_of(result, result.case.sizes[0]), []).append(result)
    return dict(sorted(panels.items()))


def _of_several_lengths(results: Sequence[Result]) -> list[Result]:
    """Those of a panel that a line can be drawn in."""
    lengths: dict[Panel, set[int]] = {}
    for result in results:
        if not result.case.variant:
            lengths.setdefault(_panel_of(result), set()).add(result.case.sizes[2])
    return [r for r in results if not r.case.variant and len(lengths.get(_panel_of(r), ())) > 1]


def _is_sweep(results: Sequence[Result]) -> bool:
    by_panel: dict[Any, set[int]] = {}
    for result in results:
        panel = (result.case.sizes[3], result.case.causal)
        by_panel.setdefault(panel, set()).add(result.case.sizes[2])
    return all(len(lengths) >= 4 for lengths in by_panel.values())


def _colours(results: Sequence[Result]) -> dict[str, str]:
    colours = {}
    for ours, palette in ((True, _OURS), (False, _PEERS)):
        names = list(dict.fromkeys(r.contestant for r in results if r.ours is ours))
        if ours:
            names.reverse()
            names.sort(key=lambda name: name != "dlattn auto")
        for i, name in enumerate(names):
            colours[name] = palette[i % len(palette)]
    return colours


def _bars(pyplot: Any, results: Sequence[Result]) -> Any:
    """A panel for each case: bars of speed, the fastest on top, each with its figures."""
    cases = list(dict.fromkeys(result.case for result in results))
    colours = _colours(results)
    columns = min(2, len(cases))
    rows = -(-len(cases) // columns)
    bars_each = max(sum(r.case == case for r in results) for case in cases)
    size = (_WIDTH / 2 * columns, rows * (0.55 + 0.27 * bars_each) + _TOP + _BOTTOM)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    _reserve(figure, _BOTTOM)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for axis, case in zip(axes.flat, cases, strict=False):
        group = sorted((r for r in results if r.case == case), key=lambda r: r.tflops or 0.0)
        names = [r.contestant for r in group]
        rates = [r.tflops or 0.0 for r in group]
        bars = axis.barh(names, rates, color=[colours[name] for name in names], height=0.74)
        labels = [f"{duration(r.seconds or 0.0)}, {rate(r.tflops or 0.0)}" for r in group]
        axis.bar_label(bars, labels, padding=4, fontsize=8)
        axis.set_xlim(0, max(rates) * 1.45)
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="y", length=0)
        for label, result in zip(axis.get_yticklabels(), group, strict=True):
            label.set_fontweight("bold" if result.ours else "normal")
        axis.set_title(_case_name(case), loc="left", fontsize=10)
    return figure


def _eight_bit(pyplot: Any, results: Sequence[Result], accuracy: dict[str, Any]) -> Any:
    """As the sweep, a line for each contestant and dtype; the mean of V that is retained; and error
    against speed."""
    named = [replace(r, contestant=f"{r.contestant} {r.case.dtype}") for r in results]
    lines = _of_several_points(_of_several_lengths(named))
    lines.sort(key=lambda r: r.ours and r.case.dtype == FLOAT8)  # last, in the strongest colour
    extra: list[Panelist] = []
    if mean_of_v := accuracy.get("mean_of_v"):
        extra.append(lambda axis, colours: _mean(axis, colours, mean_of_v))
    if errors := _errors_and_speeds(named, accuracy.get("distributions", ())):
        extra.append(lambda axis, _: _error_against_speed(axis, *errors))
    return _lines(pyplot, lines, None, extra)


def _of_several_points(results: Sequence[Result]) -> list[Result]:
    """Each contestant's first result of a case, where it has several cases of a panel."""
    first = {(r.contestant, r.case): r for r in reversed(results)}
    once = [r for r in results if first[r.contestant, r.case] is r]
    counts = Counter((r.contestant, _panel_of(r)) for r in once)
    return [r for r in once if counts[r.contestant, _panel_of(r)] > 1]


def _mean(axis: Any, colours: dict[str, str], mean_of_v: Sequence[dict[str, Any]]) -> None:
    found = [e for e in mean_of_v if "mean_ratio" in e and FLOAT8 in e["scheme"]]
    for name in dict.fromkeys(entry["scheme"] for entry in found):
        line = [(e["shape"][2], e["mean_ratio"]) for e in found if e["scheme"] == name]
        axis.plot(*zip(*line, strict=True), color=colours.get(name, _PEERS[-1]), marker="o")
        axis.annotate(f"{line[-1][1]:.3f}", line[-1], (0, -12), textcoords="offset points")
    _length_axis(axis, sorted({entry["shape"][2] for entry in found}))
    axis.set_ylim(bottom=0.0)
    axis.set_ylabel("mean(out) / mean(exact)")
    axis.set_title("Mean of V retained in out, V ~ N(1,1)", loc="left", fontsize=10)


Point = tuple[str, bool, float, float]  # contestant, whether ours, TFLOP/s, relative L2 error


def _errors_and_speeds(
    results: Sequence[Result], distributions: Sequence[dict[str, Any]]
) -> tuple[Case, list[Point]] | None:
    """The contestants of whom both are known, in the case that most of them ran."""
    # 16-bit inputs are float16 where errors are found, so that theirs do not hide the schemes'.
    errors = {
        entry["scheme"].replace("float16", "bfloat16"): entry["relative_l2"]
        for entry in distributions
        if (entry["distribution"], entry["head_dim"]) == ("noise", 128) and "relative_l2" in entry
    }
    by_case: dict[tuple[Any, ...], dict[str, Result]] = {}
    for r in results:
        if r.contestant in errors and r.case.sizes[3] == 128 and not r.case.variant:
            key = (r.case.sizes, r.case.heads_kv, r.case.causal)
            by_case.setdefault(key, {}).setdefault(r.contestant, r)
    if not by_case:
        return None
    runs = max(by_case.values(), key=len)
    points = [(name, r.ours, r.tflops or 0.0, errors[name]) for name, r in runs.items()]
    return next(iter(runs.values())).case, points


def _error_against_speed(axis: Any, case: Case, points: Sequence[Point]) -> None:
    axis.set_yscale("log")
    for (name, ours, speed, error), marker in zip(points, cycle("osD^v*PX<>"), strict=False):
        colour = _OURS[0] if ours else _PEERS[0]
        label = name.replace("bfloat16", "16 bits")
        axis.plot(speed, error, marker, color=colour, markersize=7, label=label)
    speeds, errors = [p[2] for p in points], [p[3] for p in points]
    axis.set_xlim(0, 1.15 * max(speeds))
    axis.set_ylim(0.05 * min(errors), 3 * max(errors))  # room for the legend
    axis.set_xlabel(f"TFLOP/s, {_case_name(case)}")
    axis.set_ylabel("relative L2 error")
    axis.grid(color="#e6e6e6", linewidth=0.8)
    axis.legend(fontsize=7, loc="lower left")  # with a frame: its markers are no points
    title = "Error (noise, 2048 keys) against speed: lower right is better"
    axis.set_title(title, loc="left", fontsize=10)


def _lines(
    pyplot: Any,
    results: Sequence[Result],
    ceiling: tuple[float, str] | None,
    extra: Sequence[Panelist] = (),
) -> Any:
    """A panel for each head_dim, heads and mask: TFLOP/s over sequence length, all to one scale,
    and the ceiling if any. Each of `extra` draws one more."""
    panels = _panels(results)
    speeds = [r.tflops or 0.0 for r in results]
    fastest, slowest = max(speeds), min(speeds)
    logarithmic = fastest > _RANGE * slowest > 0.0
    if ceiling is not None and ceiling[0] < fastest:
        ceiling = None  # it is none
    most = 1.06 * (ceiling[0] if ceiling is not None else fastest)
    colours = _colours(results)
    peers = dict.fromkeys(r.contestant for r in results if not r.ours)
    markers = dict(zip(peers, cycle(_MARKERS), strict=False))
    count = len(panels) + len(extra)
    columns = min(2, count)
    rows = -(-count // columns)
    size = (_WIDTH / 2 * columns, 2.6 * rows + _TOP + _LEGEND + _BOTTOM)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    _reserve(figure, _LEGEND + _BOTTOM)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis, more in zip(axes.flat[len(panels) :], extra, strict=False):
        more(axis, colours)
    for axis, (key, panel) in zip(axes.flat, panels.items(), strict=False):
        for name in dict.fromkeys(r.contestant for r in panel):
            line = sorted((r for r in panel if r.contestant == name), key=lambda r: r.case.sizes[2])
            ours = line[0].ours
            axis.plot(
                [r.case.sizes[2] for r in line],
                [r.tflops for r in line],
                label=name,
                color=colours[name],
                marker="o" if ours else markers[name],
                markersize=4.5 if ours else 3.5,
                linewidth=2.2 if ours else 1.3,
                zorder=3 if ours else 2,
            )
        if ceiling is not None:
            axis.axhline(ceiling[0], color=_PEERS[1], linewidth=1, linestyle=":", label=ceiling[1])
        if logarithmic:
            axis.set_yscale("log")
            ticks = [n for n in _TICKS if slowest <= n <= most]
            axis.set_yticks(ticks, map(str, ticks))
        _length_axis(axis, sorted({r.case.sizes[2] for r in panel}))
        axis.set_ylim(bottom=0.8 * slowest if logarithmic else 0.0, top=most)
        axis.set_ylabel("TFLOP/s")
        axis.set_title(_panel_title(key, panels), loc="left", fontsize=10)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    place = (0.5, _BOTTOM / size[1])
    figure.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=place,
        ncols=min(5, len(labels)),
        frameon=False,
        fontsize=9,
    )
    return figure


def _panel_title(key: Panel, panels: Iterable[Panel]) -> str:
    head_dim, heads, heads_kv, causal, batch = key
    title = f"head_dim {head_dim}, {'causal' if causal else 'full'}"
    if len({other[:3] for other in panels}) > len({other[0] for other in panels}):
        title = f"{heads if heads == heads_kv else f'{heads}/{heads_kv}'} heads, {title}"
    return f"batch {batch}, {title}" if batch else title


def _length_axis(axis: Any, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [_tokens(n) for n in lengths])
    axis.minorticks_off()
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_xlabel("sequence length")


def _ratios(pyplot: Any, results: Sequence[Result]) -> Any:
    """Bars of speed over the baseline's, in operations per second, in the order of the table."""
    compared = [result for result in results if result.vs_baseline is not None]
    names = [
        f"{r.case.label} {r.case.mask} {r.case.dtype}: {_entrant(r)} over {r.baseline}"
        for r in compared
    ]
    ratios = [r.vs_baseline or 0.0 for r in compared]
    size = (_WIDTH, 0.6 + 0.24 * len(compared) + _TOP + _BOTTOM)
    figure, axes = pyplot.subplots(1, 1, figsize=size, squeeze=False, layout="constrained")
    _reserve(figure, _BOTTOM)
    axis = axes[0, 0]
    places = range(len(compared))
    bars = axis.barh(places, ratios, color=_OURS[0], height=0.74)
    axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4, fontsize=8)
    axis.axvline(1.0, color="#3d3d3d", linewidth=0.8)
    axis.set_yticks(places, names, fontsize=8)
    axis.set_ylim(len(compared) - 0.4, -0.6)  # the first on top
    axis.set_xlim(0, max(ratios) * 1.1)
    axis.set_xlabel("operations per second over the baseline's")
    axis.tick_params(axis="y", length=0)
    return figure


def _reserve(figure: Any, bottom: float) -> None:
    """Keep inches free for the title above and for legend and small print below."""
    height = figure.get_size_inches()[1]
    rect = (0.0, bottom / height, 1.0, 1.0 - (_TOP + bottom) / height)
    figure.get_layout_engine().set(rect=rect)


def _title(document: dict[str, Any]) -> str:
    machine = document["machine"]
    dtypes = dict.fromkeys(result["dtype"] for result in document["results"])
    dtype = " and ".join(dtypes) if "eight_bit" in document else next(iter(dtypes))
    backward = any(result.get("passes", FORWARD) != FORWARD for result in document["results"])
    what = "Attention backward" if backward else "Attention forward"
    what = "Decoding" if "decode" in document else what
    busy = f", {BUSY}" if document.get("busy") else ""
    return f"{what}, {dtype}: {machine.get('gpu') or machine['cpu']}{busy}"


def _footnote(document: dict[str, Any], width: float) -> str:
    """The small print, in lines that fit into so many inches."""
    ceiling, git, versions = document["ceiling"], document["git"], document["versions"]
    told = dict(versions)
    if "cudnn" in told:
        told["cudnn"] = record.cudnn_version(told["cudnn"])
    names = ("torch", "fa3", "fa3-fwd", "fa4", "cudnn", "cupy", "numpy")
    peers = [f"{name} {told[name]}" for name in names if name in told]
    threads = document["protocol"]["threads"]
    measured = [
        f"{document['protocol']['method']}; contestants take turns in one run",
        *([] if "decode" in document else [f"ceiling {ceiling_text(ceiling)}"]),
    ]
    made = [
        f"dlattn {versions['dlattn']} at {(git['sha'] or 'unknown')[:10]}, {', '.join(peers)}",
        *([f"{threads} threads"] if threads else []),
        document["date"][:10],
        *document.get("busy", ()),
    ]
    characters = int(width * 72 / (0.55 * _SMALL))
    lines = ["; ".join(measured), "; ".join(made)]
    return "\n".join(textwrap.fill(line, characters) for line in lines)


def _case_name(case: Case) -> str:
    return f"(B,H,S,D) = {case.label}, {case.mask}"


def _entrant(result: Result) -> str:
    variant = result.case.variant
    return f"{result.contestant}, {variant}" if variant else result.contestant


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
