"""What a benchmark found: as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlattn.bench.cases import Case
from dlattn.cli.text import duration, rate, shape, table

SCHEMA = 1


@dataclass
class Result:
    """One contestant on one case."""

    case: Case
    contestant: str
    ours: bool
    max_error: float | None = None
    bound_ratio: float | None = None  # error in units of the bound: right up to 1
    times: list[float] = field(default_factory=list)  # seconds per call, one for each window
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Median over the windows."""
        return statistics.median(self.times) if self.times else None

    @property
    def tflops(self) -> float | None:
        """Rate by the field's count of operations."""
        return None if self.seconds is None else self.case.flops / self.seconds / 1e12

    @property
    def wrong(self) -> bool:
        """Further from float64 than twice a plain computation of the same dtype."""
        return self.bound_ratio is not None and self.bound_ratio > 1.0


def print_results(results: Sequence[Result], ceiling: dict[str, Any]) -> str:
    """The table: each case's contestants together, the fastest peer as the measure."""
    rows = []
    for case in dict.fromkeys(result.case for result in results):
        group = [result for result in results if result.case == case]
        best = best_peer(group)
        for result in group:
            rows.append([*_case_cells(result), *_figures(result, best, ceiling)])
        rows.append([""] * len(rows[0]))
    headers = ["(B,H,S,D)", "mask", "dtype", "contestant", "time", "rate", "vs best peer"]
    headers += ["% ceiling", "error/bound", ""]
    lines = [table(headers, rows[:-1], right=(4, 5, 6, 7, 8)), ""]
    lines += [
        f"Ceiling, measured in this run: {rate(ceiling['tflops'])} ({ceiling['matmul']}); "
        f"copy {ceiling['copy_gb_per_s']:.3g} GB/s.",
        "vs best peer: above 1 is faster. error/bound: largest error against float64, over twice",
        "that of a plain same-dtype computation.",
    ]
    return "\n".join(lines)


def print_host_times(host: dict[str, float | None]) -> str:
    """The eager call's host time for each contestant."""
    rows = [[name, "-" if seconds is None else duration(seconds)] for name, seconds in host.items()]
    return table(["contestant", "host time of a call"], rows, right=(1,))


def best_peer(group: Sequence[Result]) -> float | None:
    """Seconds of the fastest peer of a case."""
    times = [r.seconds for r in group if not r.ours and r.seconds is not None and not r.wrong]
    return min(times, default=None)


def to_json(
    environment: dict[str, Any],
    protocol: dict[str, Any],
    ceiling: dict[str, Any],
    results: Sequence[Result],
    host: dict[str, float | None],
) -> dict[str, Any]:
    """Everything, in SI units but for what a name says."""
    return {
        "schema": SCHEMA,
        **environment,
        "protocol": protocol,
        "ceiling": ceiling,
        "host_seconds": host,
        "results": [
            {
                "shape": list(result.case.sizes),
                "causal": result.case.causal,
                "dtype": result.case.dtype,
                "contestant": result.contestant,
                "ours": result.ours,
                "seconds": result.seconds,
                "window_seconds": result.times,
                "tflops": result.tflops,
                "max_error": _finite(result.max_error),
                "bound_ratio": _finite(result.bound_ratio),
                "wrong": result.wrong,
                "note": result.note,
            }
            for result in results
        ],
    }


def from_json(document: dict[str, Any]) -> list[Result]:
    """The results that `to_json` wrote."""
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema is {document.get('schema')!r}; accepted: {SCHEMA}")
    return [
        Result(
            case=Case(tuple(entry["shape"]), entry["causal"], entry["dtype"]),
            contestant=entry["contestant"],
            ours=entry["ours"],
            max_error=entry["max_error"],
            bound_ratio=math.inf if entry["wrong"] else entry["bound_ratio"],
            times=entry["window_seconds"],
            note=entry["note"],
        )
        for entry in document["results"]
    ]


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity, which stands for a NaN in a result."""
    return value if value is not None and math.isfinite(value) else None


def _case_cells(result: Result) -> list[str]:
    case = result.case
    return [shape(case.sizes), case.mask, case.dtype, result.contestant]


def _figures(result: Result, best: float | None, ceiling: dict[str, Any]) -> list[str]:
    ratio = "-" if result.bound_ratio is None else f"{result.bound_ratio:.2f}"
    note = f"WRONG {result.note}".rstrip() if result.wrong and result.ours else result.note
    if result.seconds is None or result.tflops is None:
        return ["-", "-", "-", "-", ratio, note]
    return [
        duration(result.seconds),
        rate(result.tflops),
        "-" if best is None else f"{best / result.seconds:.2f}",
        f"{100 * result.tflops / ceiling['tflops']:.1f}",
        ratio,
        note,
    ]
