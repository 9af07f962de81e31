"""The findings of a benchmark: as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlattn.bench.cases import FLOAT8, FORWARD, Case
from dlattn.bench.load import BUSY
from dlattn.console.text import duration, rate, table

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
    operations: float | None = None  # of a call, where the case's count does not say it
    baseline: str = ""  # whom its speed is compared with
    baseline_plan: str = ""  # the kernel that it took, if it is ours
    vs_baseline: float | None = None  # operations per second over the baseline's
    facts: dict[str, float] = field(default_factory=dict)  # of its problem
    plan: str = ""  # the kernel that a call of ours took, with its shape: "wmma:wide"

    @property
    def seconds(self) -> float | None:
        """Median over the windows."""
        return statistics.median(self.times) if self.times else None

    @property
    def tflops(self) -> float | None:
        """Rate by the field's count of operations."""
        if self.seconds is None:
            return None
        operations = self.case.flops if self.operations is None else self.operations
        return operations / self.seconds / 1e12

    @property
    def kernel(self) -> str:
        """The family that a call of ours took."""
        return self.plan.partition(":")[0]

    @property
    def wrong(self) -> bool:
        """Further from float64 than twice a plain computation of the same dtype."""
        return self.bound_ratio is not None and self.bound_ratio > 1.0


def mark(results: Sequence[Result], is_busy: bool) -> None:
    """Note at results that others used the machine meanwhile."""
    for result in results:
        if is_busy and result.times:
            result.note = "; ".join(note for note in (result.note, BUSY) if note)


def print_results(results: Sequence[Result], ceiling: dict[str, Any]) -> str:
    """The table: each case's contestants together, the fastest peer as the measure."""
    compared = any(result.baseline for result in results)
    rows = []
    for case in dict.fromkeys(result.case for result in results):
        group = [result for result in results if result.case == case]
        best = best_peer(group)
        for result in group:
            rows.append([*_case_cells(result), *_figures(result, best, ceiling, compared)])
        if not compared:
            rows.append([""] * len(rows[0]))
    headers = ["(B,H,S,D)", "mask", "dtype", "contestant", "time", "rate"]
    headers += ["vs baseline", "baseline"] if compared else ["vs best peer"]
    headers += ["% ceiling", "error/bound", ""]
    right = (4, 5, 6, 8, 9) if compared else (4, 5, 6, 7, 8)
    lines = [table(headers, rows if compared else rows[:-1], right=right), ""]
    lines += [
        f"Ceiling, measured in this run: {ceiling_text(ceiling)}; "
        f"copy {ceiling['copy_gb_per_s']:.3g} GB/s.",
        "% ceiling: of the largest of these that multiplies the same dtype.",
        "vs baseline: operations per second over the baseline's, above 1 is faster."
        if compared
        else "vs best peer: above 1 is faster.",
        "error/bound: largest error against float64, over twice that of a plain same-dtype "
        "computation (gradients: three times).",
    ]
    if not compared:
        lines += summary_lines(results)
    return "\n".join(lines)


def ceiling_of(ceiling: dict[str, Any]) -> tuple[float, str]:
    """The most TFLOP/s that this run has seen matrix instructions reach, and its name.

    On GPUs with wgmma mma.sync is no bound: a product by the vendor's library is faster there.
    """
    product = ceiling["tflops"], f"matrix product, {ceiling['matmul']}"
    return max(product, (ceiling.get("mma_sync_tflops") or 0.0, "mma.sync on registers"))


def ceiling_text(ceiling: dict[str, Any]) -> str:
    """The fastest matrix product, and what warp-level matrix instructions reach if it is known."""
    text = f"{rate(ceiling['tflops'])} ({ceiling['matmul']})"
    if ceiling.get("mma_sync_tflops"):
        text += f", {rate(ceiling['mma_sync_tflops'])} (mma.sync on registers)"
    if ceiling.get("float8_tflops"):
        text += f", {rate(ceiling['float8_tflops'])} (float8 product)"
    return text


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Our speed relative to each peer, and to the best of them, over the cases that both did.

    All cases of the same passes together, then those of each head_dim if there are several.
    """
    lines = []
    for passes in dict.fromkeys(result.case.passes for result in results):
        same = [result for result in results if result.case.passes == passes]
        lines += _summary(same, None)
        head_dims = sorted({result.case.sizes[3] for result in same})
        for head_dim in head_dims if len(head_dims) > 1 else ():
            lines += _summary([r for r in same if r.case.sizes[3] == head_dim], head_dim)
    return lines


def _summary(results: Sequence[Result], head_dim: int | None) -> list[dict[str, Any]]:
    by_case: dict[Case, dict[str, Result]] = {}
    for result in results:
        if result.seconds is not None and not result.wrong:
            by_case.setdefault(result.case, {})[result.contestant] = result
    names = list(dict.fromkeys(result.contestant for result in results))
    ours = {result.contestant for result in results if result.ours}
    lines = []
    for name in (name for name in names if name in ours):
        for peer in (*(name for name in names if name not in ours), "best peer"):
            ratios: dict[Case, float] = {}
            for case, group in by_case.items():
                own = group.get(name)
                other = group.get(peer)
                theirs = best_peer(list(group.values())) if other is None else other.seconds
                if peer != "best peer" and other is None:
                    continue
                if own is not None and own.seconds and theirs is not None:
                    ratios[case] = theirs / own.seconds
            if ratios:
                least = min(ratios, key=lambda case: ratios[case])
                lines.append(
                    {
                        "contestant": name,
                        "peer": peer,
                        "head_dim": head_dim,
                        "passes": results[0].case.passes,
                        "cases": len(ratios),
                        "geometric_mean": statistics.geometric_mean(ratios.values()),
                        "least": ratios[least],
                        "least_case": f"{least.label} {least.kind} {least.dtype}",
                        "below_1": sum(ratio < 1.0 for ratio in ratios.values()),
                    }
                )
    return lines


def summary_lines(results: Sequence[Result]) -> list[str]:
    """The summary in words: every peer over all cases, the best of them for each head_dim."""
    busy = any(BUSY in result.note for result in results)
    return [
        (f"On a {BUSY}: " if busy else "")
        + f"{line['contestant']} is {line['geometric_mean']:.3f} times as fast as {line['peer']} "
        + (f"at head_dim {line['head_dim']} " if line["head_dim"] else "")
        + (f"in {line['passes']} " if line["passes"] != FORWARD else "")
        + f"(geometric mean of {line['cases']} cases; least {line['least']:.3f}, at "
        f"{line['least_case']}; {line['below_1']} below 1)."
        for line in summary(results)
        if line["head_dim"] is None or line["peer"] == "best peer"
    ]


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
    complete: bool = True,
) -> dict[str, Any]:
    """Everything, in SI units but for what a name says; `complete`: of all that was asked for."""
    return {
        "schema": SCHEMA,
        "complete": complete,
        **environment,
        "protocol": protocol,
        "ceiling": ceiling,
        "host_seconds": host,
        "summary": [] if any(result.baseline for result in results) else summary(results),
        "results": [
            {
                "shape": list(result.case.sizes),
                "causal": result.case.causal,
                "dtype": result.case.dtype,
                "num_heads_kv": result.case.heads_kv,
                "variant": result.case.variant,
                "passes": result.case.passes,
                "contestant": result.contestant,
                "ours": result.ours,
                "plan": result.plan,
                "seconds": result.seconds,
                "window_seconds": result.times,
                "tflops": result.tflops,
                "operations": result.operations,
                "baseline": result.baseline,
                "baseline_plan": result.baseline_plan,
                "vs_baseline": result.vs_baseline,
                "facts": result.facts,
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
            case=_case_of(entry),
            contestant=entry["contestant"],
            ours=entry["ours"],
            max_error=entry["max_error"],
            bound_ratio=math.inf if entry["wrong"] else entry["bound_ratio"],
            times=entry["window_seconds"],
            note=entry["note"],
            operations=entry.get("operations"),
            baseline=entry.get("baseline", ""),
            baseline_plan=entry.get("baseline_plan", ""),
            vs_baseline=entry.get("vs_baseline"),
            facts=entry.get("facts", {}),
            plan=entry.get("plan", ""),
        )
        for entry in document["results"]
    ]


def _case_of(entry: dict[str, Any]) -> Case:
    """Older documents have neither grouped heads nor variants, and are of the forward pass."""
    sizes = tuple(entry["shape"])
    heads_kv = entry.get("num_heads_kv", sizes[1])
    return Case(
        sizes,
        entry["causal"],
        entry["dtype"],
        0 if heads_kv == sizes[1] else heads_kv,
        entry.get("variant", ""),
        entry.get("passes", FORWARD),
    )


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity, which stands for a NaN in a result."""
    return value if value is not None and math.isfinite(value) else None


def _case_cells(result: Result) -> list[str]:
    case = result.case
    name = f"{result.contestant}, {case.variant}" if case.variant else result.contestant
    chosen = result.plan and f"dlattn {result.plan}" != result.contestant
    return [case.label, case.kind, case.dtype, f"{name} ({result.plan})" if chosen else name]


def _figures(
    result: Result, best: float | None, ceiling: dict[str, Any], compared: bool
) -> list[str]:
    bound_ratio = "-" if result.bound_ratio is None else f"{result.bound_ratio:.2f}"
    note = f"WRONG {result.note}".rstrip() if result.wrong and result.ours else result.note
    facts = ", ".join(f"{name} {value:.3g}" for name, value in result.facts.items())
    note = "; ".join(part for part in (note, facts) if part)
    if compared:
        ratio = "-" if result.vs_baseline is None else f"{result.vs_baseline:.3f}"
        # A baseline on another kernel is no measure of the feature.
        other = result.baseline_plan.partition(":")[0] != result.kernel
        measure = f"{result.baseline} ({result.baseline_plan})"
        comparison = [ratio, measure if result.baseline_plan and other else result.baseline]
    elif best is None or result.seconds is None:
        comparison = ["-"]
    else:
        comparison = [f"{best / result.seconds:.2f}"]
    if result.seconds is None or result.tflops is None:
        return ["-", "-", *comparison, "-", bound_ratio, note]
    if not result.tflops:
        return [duration(result.seconds), "-", *comparison, "-", bound_ratio, note]
    top, _ = ceiling_of(ceiling)
    if result.case.dtype == FLOAT8:
        top = ceiling.get("float8_tflops") or top
    return [
        duration(result.seconds),
        rate(result.tflops),
        *comparison,
        f"{100 * result.tflops / top:.1f}",
        bound_ratio,
        note,
    ]
