"""Benchmark results as the README and RESULTS.md show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from dlattn.bench import eight_bit, load, plot
from dlattn.bench.cases import FORWARD
from dlattn.bench.decode import report as decode_report
from dlattn.bench.report import Result, best_peer, ceiling_text, from_json, summary_lines
from dlattn.console.text import duration, markdown_table, rate

_MOST_ROWS = 12  # of a table that is shown without being asked
_TOKENS = (1024, 4096, 16384)  # of the README's table
_OURS = "dlattn auto"
_PEERS = {"torch-flash": "FlashAttention-2", "torch-cudnn": "cuDNN", "fa4": "FlashAttention-4"}


def figures_markdown(paths: Sequence[Path], root: Path) -> str:
    """A section for each results file; links are relative to `root`."""
    if not paths:
        return "No results are committed yet."
    return "\n\n".join(_section(path, root) for path in sorted(paths))


def sweep_markdown(path: Path, root: Path) -> str:
    """The sweep in a plot and a row for each head_dim and mask; links are relative to `root`."""
    document = json.loads(path.read_text())
    results = from_json(document)
    rows = []
    for head_dim in dict.fromkeys(result.case.sizes[3] for result in results):
        for mask in dict.fromkeys(result.case.mask for result in results):
            group = [r for r in results if (r.case.sizes[3], r.case.mask) == (head_dim, mask)]
            cells = []
            for tokens in _TOKENS:
                timed = [r for r in group if r.case.sizes[2] == tokens]
                rates = {r.contestant: r.tflops for r in timed if r.tflops is not None}
                peer = max((name for name in rates if name in _PEERS), key=rates.__getitem__)
                cells.append(f"{rates[_OURS]:.0f} ({rates[peer]:.0f}, {_PEERS[peer]})")
            rows.append([str(head_dim), mask, *cells])
    headers = ["head_dim", "mask", *(f"{tokens} tokens" for tokens in _TOKENS)]
    image = path.with_suffix(".png").relative_to(root).as_posix()
    return (
        f"![{_where(document)}: the sweep]({image})\n\n"
        f"{_where(document)}, float16, TFLOP/s, the fastest of the others in parentheses "
        f"([{path.name}]({path.relative_to(root).as_posix()})):\n\n{markdown_table(headers, rows)}"
    )


def decode_markdown(path: Path, root: Path) -> str:
    """Decoding in a row for each of some cases; links are relative to `root`."""
    document = json.loads(path.read_text())
    link = f"[{path.name}]({path.relative_to(root).as_posix()})"
    return decode_report.readme(document, from_json(document), link, _where(document))


def _section(path: Path, root: Path) -> str:
    document = json.loads(path.read_text())
    results = [result for result in from_json(document) if result.seconds is not None]
    parts = [f"**{_where(document)}** ([{path.name}]({path.relative_to(root).as_posix()}))"]
    files = (plot.part(path.with_suffix(".png"), number) for number in count(1))
    for image in takewhile(Path.is_file, files):
        parts.append(f"![{_where(document)}]({image.relative_to(root).as_posix()})")
    if "decode" in document:
        tables, headline = decode_report.markdown(document, results), ""
    elif any(result.baseline for result in results):
        tables, headline = _comparisons(results), ""
    else:
        backward = any(result.case.passes != FORWARD for result in results)
        tables = _rates(results) if backward else _table(results)
        headline = "\n".join(f"- {x}" for x in summary_lines(results))
    rows = tables.count("\n") - 1
    if rows > _MOST_ROWS:
        parts += [headline, f"<details><summary>All {rows} rows</summary>", tables, "</details>"]
    else:
        parts.append(tables)
    if "eight_bit" in document:
        parts += [markdown_table(*found) for found in eight_bit.tables(document)]
    busy = load.warning(document.get("busy", []))
    parts += [busy, _host_line(document), _small_print(document)]
    return "\n\n".join(part for part in parts if part)


def _table(results: Sequence[Result]) -> str:
    names = list(dict.fromkeys(result.contestant for result in results))
    rows = []
    for case in dict.fromkeys(result.case for result in results):
        group = {r.contestant: r for r in results if r.case == case}
        seconds = {name: r.seconds for name, r in group.items() if r.seconds is not None}
        ours = min((s for name, s in seconds.items() if group[name].ours), default=None)
        best = best_peer(list(group.values()))
        ratio = f"{best / ours:.2f}" if ours is not None and best is not None else ""
        cells = [duration(seconds[name]) if name in seconds else "" for name in names]
        rows.append([case.label, case.mask, case.dtype, *cells, ratio])
    headers = ["(B,H,S,D)", "mask", "dtype", *names, "best peer / best of ours"]
    return markdown_table(headers, rows)


def _rates(results: Sequence[Result]) -> str:
    """The same in TFLOP/s, for cases whose passes and variants differ."""
    names = list(dict.fromkeys(result.contestant for result in results))
    rows = []
    for case in dict.fromkeys(result.case for result in results):
        group = {r.contestant: r for r in results if r.case == case}
        rates = {name: r.tflops for name, r in group.items() if r.tflops is not None}
        ours = max((rate for name, rate in rates.items() if group[name].ours), default=None)
        right = [x for name, x in rates.items() if not (group[name].ours or group[name].wrong)]
        ratio = f"{ours / max(right):.2f}" if ours is not None and right else ""
        what = ", ".join(part for part in (case.kind, case.variant) if part)
        cells = [f"{rates[name]:.0f}" if name in rates else "" for name in names]
        rows.append([case.label, what, case.dtype, *cells, ratio])
    headers = ["TFLOP/s at (B,H,S,D)", "what", "dtype", *names, "ours / best"]
    return markdown_table(headers, rows)


def _comparisons(results: Sequence[Result]) -> str:
    """Results that are measured by a baseline, in operations per second over the baseline's."""
    rows = []
    facts = list(dict.fromkeys(name for result in results for name in result.facts))
    for result in results:
        if result.seconds is None or result.tflops is None or result.vs_baseline is None:
            continue
        case = result.case
        rows.append(
            [
                case.variant or "-",
                case.label,
                case.mask,
                case.dtype,
                result.contestant,
                duration(result.seconds),
                rate(result.tflops),
                f"{result.vs_baseline:.2f}",
                result.baseline,
                *(f"{result.facts[name]:.3f}" if name in result.facts else "" for name in facts),
            ]
        )
    headers = ["what", "(B,H,S,D)", "mask", "dtype", "contestant", "time", "rate"]
    return markdown_table([*headers, "vs baseline", "baseline", *facts], rows)


def _host_line(document: dict[str, Any]) -> str:
    times = document["host_seconds"].items()
    told = [f"{name} {duration(seconds)}" for name, seconds in times if seconds is not None]
    return f"Host time of an eager call: {', '.join(told)}." if told else ""


def _small_print(document: dict[str, Any]) -> str:
    git, ceiling, protocol = document["git"], document["ceiling"], document["protocol"]
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    commit = (git["sha"] or "unknown")[:12] + (" with changes" if git["dirty"] else "")
    return (
        f"{document['date'][:10]}, commit {commit}{driver}, {versions}. "
        f"Method: {protocol['method']}. Ceiling in the same run: "
        f"{ceiling_text(ceiling)}, copy {ceiling['copy_gb_per_s']:.3g} GB/s."
    )


def _where(document: dict[str, Any]) -> str:
    machine, threads = document["machine"], document["protocol"]["threads"]
    name = str(machine.get("gpu") or machine["cpu"])
    return f"{name}, {threads} threads" if threads else name
