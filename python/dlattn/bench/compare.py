"""`python -m dlattn bench --compare`: two results of the benchmark, case by case."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from dlattn.bench import load, record, report
from dlattn.bench.report import Result
from dlattn.console.errors import CommandError
from dlattn.console.text import duration, table

_Key = tuple[Any, str]


def text(paths: list[Path]) -> str:
    """A table of what both documents have, and what has to be known to read it."""
    documents = [_read(path) for path in paths]
    first, second = ({_key(r): r for r in results if r.times} for _, results in documents)
    shared = [key for key in first if key in second]
    if not shared:
        raise CommandError(f"--compare: {paths[0]} and {paths[1]} have no case in common")
    rows = [_row(first[key], second[key]) for key in shared]
    headers = ["(B,H,S,D)", "mask", "dtype", "contestant", "first", "second", "speed", ""]
    lines = [f"first: {paths[0]}", f"second: {paths[1]}", ""]
    lines += [table(headers, rows, right=(4, 5, 6)), ""]
    speeds = [_speed(first[key], second[key]) for key in shared if first[key].ours]
    if speeds:
        lines.append(
            f"dlattn, {len(speeds)} times: the second is {statistics.geometric_mean(speeds):.3f} "
            f"times as fast as the first (geometric mean), {min(speeds):.3f} to {max(speeds):.3f}"
        )
    lines.append("within noise: the medians differ by less than the windows of one of them do")
    only = [len(first) - len(shared), len(second) - len(shared)]
    if any(only):
        lines.append(f"left out: {only[0]} times of the first alone, {only[1]} of the second")
    machines = [record.card(document) for document, _ in documents]
    if machines[0] != machines[1]:
        lines.append(f"WARNING: not the same machine: {machines[0]}; {machines[1]}")
    for name, (document, _) in zip(("first", "second"), documents, strict=True):
        if warning := load.warning(document.get("busy", [])):
            lines.append(f"{name}: {warning}")
    return "\n".join(lines)


def _read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    document = record.read(path, "--compare")
    return document, report.from_json(document)


def _key(result: Result) -> _Key:
    return result.case, result.contestant


def _speed(first: Result, second: Result) -> float:
    """How many times as fast the second is, by the medians."""
    return statistics.median(first.times) / statistics.median(second.times)


def _row(first: Result, second: Result) -> list[str]:
    medians = [statistics.median(result.times) for result in (first, second)]
    spread = max(max(result.times) - min(result.times) for result in (first, second))
    notes = [note for note in dict.fromkeys((first.note, second.note)) if note]
    if abs(medians[0] - medians[1]) < spread:
        notes.insert(0, "within noise")
    case = first.case
    return [
        case.label,
        f"{case.kind} {case.variant}".rstrip(),
        case.dtype,
        first.contestant,
        *map(duration, medians),
        f"{_speed(first, second):.3f}x",
        "; ".join(notes),
    ]
