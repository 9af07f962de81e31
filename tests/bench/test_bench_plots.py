"""Plots of the benchmark: what is in which panel, ceilings, and how large pictures are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlattn.bench import plot, report
from dlattn.bench.cases import Case

pyplot = pytest.importorskip("matplotlib.pyplot")
CEILING = {"matmul": "torch 8192^3", "tflops": 775.0, "copy_gb_per_s": 1.0}


def document_of(
    results: list[report.Result], ceiling: dict[str, Any], method: str = "events"
) -> dict[str, Any]:
    about = {
        "date": "2026-01-02T00:00:00",
        "git": {"sha": None, "dirty": None},
        "machine": {"cpu": "EPYC", "gpu": "NVIDIA X"},
        "versions": {"dlattn": "0.1.0"},
    }
    return report.to_json(about, {"method": method, "threads": None}, ceiling, results, {})


def drawn(document: dict[str, Any], path: Path) -> Any:
    """The only figure of a document."""
    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", figures.append)
        assert plot.draw(document, path) == [path]
    (figure,) = figures
    pyplot.close(figure)
    return figure


def panels_of(figure: Any) -> dict[str, dict[str, Any]]:
    """Each panel's lines, by their labels."""
    return {
        axis.get_title(loc="left"): {line.get_label(): line for line in axis.lines}
        for axis in figure.axes
        if axis.get_visible()
    }


def sweep_of(
    *batches_and_heads: tuple[int, int],
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    tflops: float = 300.0,
) -> list[report.Result]:
    return [
        report.Result(
            Case((batch, heads, seqlen, 128), False, "float16"),
            *(name, name.startswith("dlattn"), 0.0, 0.1, [1e-6 * seqlen]),
            operations=tflops * 1e6 * seqlen,
        )
        for batch, heads in batches_and_heads
        for seqlen in lengths
        for name in ("dlattn auto", "torch-flash")
    ]


@pytest.mark.parametrize(
    ("shapes", "titles"),
    [
        ([(1, 8), (1, 32)], ["8 heads, head_dim 128, full", "32 heads, head_dim 128, full"]),
        ([(1, 8), (4, 8)], ["batch 1, head_dim 128, full", "batch 4, head_dim 128, full"]),
    ],
    ids=["heads", "batch"],
)
def test_lines_never_go_back(
    tmp_path: Path, shapes: list[tuple[int, int]], titles: list[str]
) -> None:
    """Problems that only heads or batch tell apart have panels of their own, all to one scale."""
    figure = drawn(document_of(sweep_of(*shapes), CEILING), tmp_path / "lines.png")
    panels = panels_of(figure)
    assert list(panels) == titles
    for lines in panels.values():
        assert list(lines["dlattn auto"].get_xdata()) == [512, 1024, 2048, 4096]
    assert len({axis.get_ylim() for axis in figure.axes if axis.get_visible()}) == 1


@pytest.mark.parametrize(
    ("tflops", "mma_sync", "label", "value"),
    [
        (600.0, 648.0, "matrix product, torch 8192^3", 775.0),  # wgmma: mma.sync is no bound
        (600.0, 900.0, "mma.sync on registers", 900.0),
        (800.0, 648.0, None, None),  # faster than either: there is no line
    ],
)
def test_the_ceiling_is_above_all_results(
    tmp_path: Path, tflops: float, mma_sync: float, label: str | None, value: float | None
) -> None:
    document = document_of(sweep_of((1, 8), tflops=tflops), CEILING | {"mma_sync_tflops": mma_sync})
    figure = drawn(document, tmp_path / "lines.png")
    (lines,) = panels_of(figure).values()
    others = {"dlattn auto", "torch-flash"}
    assert set(lines) - others == ({label} if label else set())
    if label:
        assert list(lines[label].get_ydata()) == [value, value]
    top = figure.axes[0].get_ylim()[1]
    assert top > max(value or 0.0, tflops)


@pytest.mark.parametrize("lengths", [(512,), (128, 256, 512, 1024)], ids=["bars", "lines"])
def test_a_plot_is_as_wide_as_its_panels(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """Small print is broken into lines instead of widening the picture."""
    path = tmp_path / "plot.png"
    method = "events around each replay, " * 12 + "median"
    figure = drawn(document_of(sweep_of((1, 8), lengths=lengths), CEILING, method), path)
    small_print = figure.texts[1]
    assert small_print.get_text().count("\n") >= 2
    figure.set_dpi(130)  # as in the file
    extent = small_print.get_window_extent()
    assert 0 <= extent.x0 < extent.x1 <= figure.bbox.x1
    width = int.from_bytes(path.read_bytes()[16:20], "big")
    assert width == pytest.approx(figure.get_size_inches()[0] * 130, abs=1)
