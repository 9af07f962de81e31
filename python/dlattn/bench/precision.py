"""The library's attention to 16-bit tensors in 8 bits, and what quantises their keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import dlattn
from dlattn.bench import tensors
from dlattn.bench.accuracy import Table
from dlattn.bench.peers import Bound, Contestant, Problem, ours_with
from dlattn.bench.report import Result
from dlattn.console.text import duration

PRECISIONS = ("int8_fp8", "fp8", "int8_fp16")
MOST_COLUMNS = 128  # head_dim that these take
KEPT, ALONE = "kept QuantizedKV", "quantize_kv"  # variants of cases
_SHARE = 0.8  # of the copy bandwidth, that quantize_kv is to reach
_EMULATED = "compute capability 9.0 multiplies e4m3 by emulation"


def computing_in(precision: str) -> Contestant:
    """The library in that precision, which its problems ask for: the whole call."""
    auto = ours_with("auto")

    def bind(problem: Problem) -> Bound:
        bound = auto.bind(problem)
        has_e4m3 = precision != "int8_fp16"
        emulated = has_e4m3 and bound.plan.startswith("wmma8") and _capability(problem) == (9, 0)
        return replace(bound, note=_EMULATED if emulated else "")

    return Contestant(f"dlattn precision={precision}", True, bind)


def in_precision(problem: Problem, precision: str, variant: str = "") -> Problem:
    """The same problem in 8 bits out of 16; tensors of other dtypes are made bfloat16."""
    inputs, case = (problem.q, problem.k, problem.v), replace(problem.case, variant=variant)
    if case.dtype not in ("float16", "bfloat16"):
        case = replace(case, dtype="bfloat16")
        inputs = tuple(x.to(tensors.torch_module().bfloat16) for x in inputs)
    return Problem(case, *inputs, {**problem.options, "precision": precision}, problem.varlen)


def attending_to_kept(precision: str) -> Contestant:
    """The same to what quantize_kv made before: the kernels of attention alone."""
    whole = computing_in(precision)

    def bind(problem: Problem) -> Bound:
        bound, kept = whole.bind(problem), _quantise(problem)
        return replace(bound, call=lambda: _attend(problem, kept), checked=None)

    return Contestant(whole.name, True, bind)


def quantising(precision: str) -> Contestant:
    """quantize_kv alone. The check is attention to its result."""
    whole = computing_in(precision)

    def bind(problem: Problem) -> Bound:
        whole.bind(problem)  # which says what is not supported
        return Bound(
            lambda: _quantise(problem), checked=lambda: _attend(problem, _quantise(problem))
        )

    return Contestant(f"dlattn quantize_kv {precision}", True, bind)


def bytes_moved(problem: Problem) -> float:
    """By quantize_kv: 2 read and 1 written for each element of k and v; int8_fp16 writes 2 of v."""
    of_v = 4.0 if problem.options["precision"] == "int8_fp16" else 3.0
    return 3.0 * problem.k.numel() + of_v * problem.v.numel()


def quantising_rates(results: Sequence[Result], copy_gb_per_s: float) -> list[dict[str, Any]]:
    """The bytes that quantize_kv moves a second, beside a copy."""
    lines = []
    for result in results:
        if result.case.variant != ALONE or not result.seconds:
            continue
        rate = result.facts["bytes"] / result.seconds / 1e9
        lines.append(
            {
                "contestant": result.contestant,
                "case": result.case.label,
                "bytes": result.facts["bytes"],
                "seconds": result.seconds,
                "gb_per_s": rate,
                "of_copy": rate / copy_gb_per_s,
                "goal": _SHARE,
                "reached": rate >= _SHARE * copy_gb_per_s,
            }
        )
    return lines


def rates_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """The rates of quantize_kv: a row for each precision and case."""
    rows = [
        [
            line["contestant"],
            line["case"],
            f"{line['bytes'] / 1e6:.3g} MB",
            duration(line["seconds"]),
            f"{line['gb_per_s']:.4g} GB/s",
            f"{line['of_copy']:.2f}",
            "yes" if line["reached"] else "no",
        ]
        for line in lines
    ]
    headers = ["quantize_kv", "(B,H,S,D)", "moved", "time", "rate", "of a copy's"]
    return [*headers, f"at least {_SHARE}"], rows


def _capability(problem: Problem) -> tuple[int, int] | None:
    if not problem.q.is_cuda:
        return None
    major, minor = tensors.torch_module().cuda.get_device_capability(problem.q.device)
    return int(major), int(minor)


def _quantise(problem: Problem) -> Any:
    precision = problem.options["precision"]
    return dlattn.quantize_kv(problem.k, problem.v, precision=precision, layout="bhsd")


def _attend(problem: Problem, kept: Any) -> Any:
    causal = problem.case.causal
    return dlattn.attention(problem.q, kept, None, causal=causal, layout="bhsd")
