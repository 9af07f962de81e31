"""Benchmark results as the README and RESULTS.md show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from dlattn.bench import eight_bit, load, plot, record
from dlattn.bench.cases import BACKWARD, FORWARD, Case
from dlattn.bench.decode import report as decode_report
from dlattn.bench.report import Result, best_peer, ceiling_text, from_json, summary_lines
from dlattn.console.text import duration, markdown_table, rate

_MOST_ROWS = 12  # of a table that is shown without being asked
_TOKENS = (1024, 4096, 16384)  # of the README's table
_OURS = "dlattn auto"
_LONG = 4096  # tokens, from which on README shows gradients
_PEERS = {
    "torch-flash": "FlashAttention-2",
    "torch-cudnn": "cuDNN",
    "torch-efficient": "memory-efficient",
    "fa3": "FlashAttention-3",
    "fa3-fwd": "FlashAttention-3 of fa3-fwd",
    "fa4": "FlashAttention-4",
}


def figures_markdown(paths: Sequence[Path], root: Path) -> str:
    """A section for each set on each machine, of one file or of its parts; links are relative to
    `root`."""
    if not paths:
        return "No results are committed yet."
    documents = record.gathered(paths)
    sections = []
    for name, document in sorted(documents.items()):
        files = sorted(path for path in paths if record.stem(path) == name)
        sections.append(_section(document, files, root))
    return "\n\n".join(sections)


def sweep_markdown(paths: Sequence[Path], root: Path) -> str:
    """The sweep in a plot for each card, and a row for each head_dim and mask, cards side by side;
    links are relative to `root`."""
    documents = record.gathered(paths)
    first = from_json(next(iter(documents.values())))
    keys = list(dict.fromkeys((r.case.sizes[3], r.case.mask) for r in first))
    rows = []
    for head_dim, mask in keys:
        cells = []
        for document in documents.values():
            timed = [r for r in from_json(document) if r.case.sizes[3] == head_dim]
            timed = [r for r in timed if r.case.mask == mask]
            cells += [_beside_best([r for r in timed if r.case.sizes[2] == n]) for n in _TOKENS]
        rows.append([str(head_dim), mask, *cells])
    headers = ["head_dim", "mask"]
    for document in documents.values():
        name = f", {short_card(document)}" if len(documents) > 1 else ""
        headers += [f"{tokens} tokens{name}" for tokens in _TOKENS]
    images = _images(documents, paths, root)
    return f"{images}{_sources(documents, paths, root)}:\n\n{markdown_table(headers, rows)}"


def backward_markdown(paths: Sequence[Path], root: Path) -> str:
    """The gradients of some long problems, cards side by side; links are relative to `root`."""
    documents = record.gathered(paths)
    of_cards = [
        [r for r in from_json(document) if r.case.passes == BACKWARD and _is_plain(r.case)]
        for document in documents.values()
    ]
    cases = list(dict.fromkeys(r.case for results in of_cards for r in results))
    cases.sort(key=lambda case: (case.sizes[3], case.sizes[2]))
    rows = []
    for case in cases:
        cells = [_beside_best([r for r in results if r.case == case]) for results in of_cards]
        rows.append([case.label, case.mask, *cells])
    headers = ["(B,H,S,D)", "mask", *(short_card(document) for document in documents.values())]
    told = "Gradients alone, counted as 2.5 times the forward pass's operations"
    return f"{told}: {_sources(documents, paths, root)}:\n\n{markdown_table(headers, rows)}"


def _is_plain(case: Case) -> bool:
    return not case.variant and not case.num_heads_kv and case.sizes[2] >= _LONG


def _beside_best(results: Sequence[Result]) -> str:
    """TFLOP/s of ours, and in parentheses those of the fastest other, with its name."""
    rates = {r.contestant: r.tflops for r in results if r.tflops is not None and not r.wrong}
    theirs = {r.contestant for r in results if not r.ours} & set(rates)
    if _OURS not in rates:
        return "-"
    if not theirs:
        return f"{rates[_OURS]:.0f}"
    peer = max(sorted(theirs), key=lambda name: rates[name])
    return f"{rates[_OURS]:.0f} ({rates[peer]:.0f}, {_PEERS.get(peer, peer)})"


def _images(documents: Mapping[str, Any], paths: Sequence[Path], root: Path) -> str:
    """The plots that are there, each a paragraph."""
    text = ""
    for name, document in documents.items():
        image = paths[0].parent / f"{name}.png"
        if image.is_file():
            link = image.relative_to(root).as_posix()
            text += f"![{_where(document)}: the sweep]({link})\n\n"
    return text


def _sources(documents: Mapping[str, Any], paths: Sequence[Path], root: Path) -> str:
    """Cards, dtype, unit, versions of peers and files: the head of a table."""
    parts = []
    for name, document in documents.items():
        files = sorted(path for path in paths if record.stem(path) == name)
        links = ", ".join(f"[{p.name}]({p.relative_to(root).as_posix()})" for p in files)
        known = document["versions"]
        timed = {r["contestant"] for r in document["results"] if r.get("seconds")}
        names = [
            name
            for name, peer in (("torch", ""), ("fa3", "fa3"), ("fa3-fwd", "fa3"), ("fa4", "fa4"))
            if name in known and (not peer or peer in timed)
        ]
        versions = [f"{_PEERS.get(name, name)} {known[name]}" for name in names]
        if "cudnn" in known:
            versions.append(f"cuDNN {record.cudnn_version(known['cudnn'])}")
        parts.append(f"{_where(document)} with {', '.join(versions)} ({links})")
    dtypes = {r["dtype"] for document in documents.values() for r in document["results"]}
    told = f"{' and '.join(sorted(dtypes))}, TFLOP/s, the fastest of the others in parentheses"
    return f"{'; '.join(parts)}, {told}"


def short_card(document: Mapping[str, Any]) -> str:
    """H100 of "NVIDIA H100 80GB HBM3"."""
    words = [w for w in record.card(dict(document)).split() if w not in ("NVIDIA", "GeForce")]
    ends = [i for i, word in enumerate(words) if any(c.isdigit() for c in word)]
    return " ".join(words[: ends[0] + 1]).partition("-")[0] if ends else " ".join(words)


def decode_markdown(path: Path, root: Path) -> str:
    """Decoding in a row for each of some cases; links are relative to `root`."""
    document = json.loads(path.read_text())
    link = f"[{path.name}]({path.relative_to(root).as_posix()})"
    return decode_report.readme(document, from_json(document), link, _where(document))


def _section(document: dict[str, Any], paths: Sequence[Path], root: Path) -> str:
    results = [result for result in from_json(document) if result.seconds is not None]
    links = ", ".join(f"[{p.name}]({p.relative_to(root).as_posix()})" for p in paths)
    parts = [f"**{_where(document)}** ({links})"]
    whole = paths[0].with_name(f"{record.stem(paths[0])}.png")
    files = (plot.part(whole, number) for number in count(1))
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
    if not record.is_whole(document):
        parts.append("Not all of the set has been measured.")
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
