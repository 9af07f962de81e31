"""The results of a run of decoding: a row for each case and contestant, cold and warm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlattn.bench.accuracy import Table
from dlattn.bench.cases import Case
from dlattn.bench.decode.cases import COLD, WARM, parse_variant
from dlattn.bench.report import Result
from dlattn.console.text import duration, markdown_table, table

# The rate at which cuDNN read on an H200: 1.07 GB of keys and values in 243 us. It is a measure to
# go by, not a limit: runs and cards differ by some percent.
H200_READ_TB_PER_S = 4.42

_README_CASES = (  # of the group `contiguous`
    "(1,32/8,1024,128)",
    "(1,32/8,8192,128)",
    "(1,32/8,131072,128)",
    "(8,32/8,4096,128)",
    "(64,32/8,4096,128)",
)
_README_NAMES = {
    "dlattn auto": "dlattn",
    "torch-cudnn": "cuDNN",
    "torch-flash": "FlashAttention-2",
}
_README_MORE = {"fa3": "FlashAttention-3"}  # where it took part


@dataclass
class Row:
    """One contestant on one case."""

    group: str
    what: str
    case: Case  # without temperature
    contestant: str
    ours: bool
    bytes: float
    results: dict[str, Result] = field(default_factory=dict)  # by temperature

    def seconds(self, temperature: str) -> float | None:
        """The time of a call."""
        result = self.results.get(temperature)
        return None if result is None else result.seconds

    def tb_per_s(self, temperature: str) -> float | None:
        """Bytes of K and V that are in use, over the time."""
        seconds = self.seconds(temperature)
        return None if not seconds else self.bytes / seconds / 1e12

    @property
    def any_result(self) -> Result:
        """For what both have."""
        return next(iter(self.results.values()))

    @property
    def wrong(self) -> bool:
        """Whether a result was beyond its bound; ours are not timed then."""
        return any(result.wrong for result in self.results.values())

    @property
    def name(self) -> str:
        """The contestant, with the kernel that `auto` took."""
        plan = self.any_result.plan
        return f"{self.contestant} ({plan})" if plan else self.contestant

    @property
    def key(self) -> tuple[str, Case]:
        """The case."""
        return self.group, self.case


def rows(results: Sequence[Result]) -> list[Row]:
    """A row for each case and contestant, in the order of the results."""
    found: dict[tuple[Any, ...], Row] = {}
    for result in results:
        group, what, temperature = parse_variant(result.case.variant)
        case = replace(result.case, variant=what)
        row = found.setdefault(
            (group, case, result.contestant),
            Row(group, what, case, result.contestant, result.ours, result.facts["bytes"]),
        )
        row.results[temperature] = result
    return list(found.values())


def vs_best_peer(row: Row, everybody: Sequence[Row], temperature: str) -> float | None:
    """The time of the fastest peer of the case over the row's: above 1 is faster."""
    own = row.seconds(temperature)
    rivals = [r for r in everybody if r.key == row.key and not (r.ours or r.wrong)]
    found = [rival.seconds(temperature) for rival in rivals]
    timed = [seconds for seconds in found if seconds is not None]
    return min(timed) / own if own and timed else None


def reference_tb_per_s(machine: Mapping[str, Any]) -> float | None:
    """The read rate with which times are compared on this GPU, if that is known for it."""
    return H200_READ_TB_PER_S if re.search(r"\bH200\b", str(machine.get("gpu"))) else None


def summary(results: Sequence[Result], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the JSON beside the results."""
    reference = reference_tb_per_s(machine)
    everybody = rows(results)
    entries = []
    for row in everybody:
        entry: dict[str, Any] = {
            "group": row.group,
            "what": row.what,
            "case": row.case.label,
            "contestant": row.contestant,
            "bytes": row.bytes,
        }
        for temperature in (COLD, WARM):
            seconds = row.seconds(temperature)
            entry[temperature] = {
                "seconds": seconds,
                "tb_per_s": row.tb_per_s(temperature),
                "vs_best_peer": vs_best_peer(row, everybody, temperature),
                "over_reference": seconds * reference * 1e12 / row.bytes
                if seconds and reference
                else None,
            }
        entries.append(entry)
    return {"reference_tb_per_s": reference, "cases": entries}


def times(results: Sequence[Result], machine: Mapping[str, Any]) -> Table:
    """Every row that was timed, or why it was not."""
    reference = reference_tb_per_s(machine)
    everybody = rows(results)
    lines = []
    for row in everybody:
        result = row.any_result
        cold = row.results.get(COLD, result)
        baseline = f"{cold.vs_baseline:.3f}" if cold.vs_baseline is not None else "-"
        cells = [row.group, row.case.label, row.what, row.name, _size(row.bytes)]
        for temperature in (COLD, WARM):
            seconds, rate = row.seconds(temperature), row.tb_per_s(temperature)
            ratio = vs_best_peer(row, everybody, temperature) if row.ours else None
            cells += [
                "-" if seconds is None else duration(seconds),
                "-" if rate is None else f"{rate:.3f}",
                "-" if ratio is None else f"{ratio:.2f}",
            ]
        if reference:
            seconds = row.seconds(COLD)
            over = "-" if seconds is None else f"{seconds * reference * 1e12 / row.bytes:.2f}"
            cells.append(over)
        errors = [r.bound_ratio for r in row.results.values() if r.bound_ratio is not None]
        cells += [baseline, f"{max(errors):.2f}" if errors else "-", _note(row)]
        lines.append(cells)
    headers = ["group", "(B,H,S,D)", "what", "contestant", "K+V"]
    for temperature in (COLD, WARM):
        headers += [temperature, "TB/s", "vs best peer"]
    if reference:
        headers.append(f"cold over {reference} TB/s")
    return [*headers, "vs baseline", "error/bound", ""], lines


def text(document: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The table for a terminal, and how to read it."""
    headers, lines = times(results, document["machine"])
    about = document["decode"]
    parts = [
        table(headers, lines, right=range(4, len(headers) - 1)),
        "",
        f"S: the longest sequence's keys. TB/s: of the K and V in use. cold: calls read copies in "
        f"turn, at least {about['rotated']} times the L2 cache of {about['l2_bytes'] / 1e6:.0f} MB "
        "in all; warm: one copy.",
        "vs best peer, vs baseline: above 1 is faster; the baseline is the group's first case.",
        f"Copy in this run: {document['ceiling']['copy_gb_per_s']:.4g} GB/s.",
        *(f"Left out: {name}: {why}." for name, why in about["left_out"].items()),
    ]
    return "\n".join(parts)


def markdown(document: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The table for RESULTS.md."""
    headers, lines = times(results, document["machine"])
    return markdown_table([*headers[:-1], "note"], lines)


def readme(document: Mapping[str, Any], results: Sequence[Result], link: str, where: str) -> str:
    """A row for each of some cases, cold, of ours and some peers; `link` leads to the JSON."""
    everybody = [row for row in rows(results) if row.group == "contiguous"]
    present = {row.contestant for row in everybody}
    names = _README_NAMES | {key: name for key, name in _README_MORE.items() if key in present}
    lines = []
    for label in _README_CASES:
        cells = []
        for name in names:
            seconds = [
                row.seconds(COLD)
                for row in everybody
                if (row.case.label, row.contestant) == (label, name)
            ]
            cells.append("-" if not seconds or seconds[0] is None else f"{1e6 * seconds[0]:.1f}")
        lines.append([label, *cells])
    headers = ["(B,H,keys,D)", *names.values()]
    dtype = results[0].case.dtype
    return (
        f"Decoding, one query of each sequence: {where}, {dtype}, microseconds a call, keys and "
        f"values cold ({link}):\n\n{markdown_table(headers, lines)}"
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _note(row: Row) -> str:
    notes = dict.fromkeys(r.note for r in row.results.values() if r.note)
    wrong = "WRONG" if row.ours else "beyond the bound"
    return "; ".join([*([wrong] if row.wrong else []), *notes])
