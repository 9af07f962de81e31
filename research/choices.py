"""Compares the choice of kernel="auto" with the fastest family, on a GPU, over many shapes.

    python research/choices.py --json research/steps/h200-choices-blocks.json

Each case is timed with every family of --families by replays of a CUDA graph; a ratio is the
fastest one's time over that of the family that auto takes, so that 1 is the best choice. The times
that the families' plans predict stand beside the measured ones: what their constants are fitted to.
Cases are drawn with a fixed seed: fixed lengths, full and causal, few queries, shared heads, score
features, and packed sequences of equal and unequal lengths.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Case = dict[str, Any]

_LARGEST = 3e11  # operations of a case
_FEATURES = ("softcap", "alibi", "bias", "mask")


def fixed_lengths() -> Iterator[Case]:
    """Sequences of one length, and of features one at a time."""
    for head_dim in (64, 96, 128, 192, 256):
        for seqlen in (64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096):
            for heads in (1, 4, 8, 16, 32, 64, 128, 256, 512):
                if 4 * heads * seqlen**2 * head_dim > _LARGEST:
                    continue
                for causal in (False, True):
                    case = {"heads": heads, "q": seqlen, "head_dim": head_dim, "causal": causal}
                    yield case
                    if heads in (1, 4, 16, 64, 256):
                        yield {**case, "feature": random.choice(_FEATURES)}


def unequal_lengths() -> Iterator[Case]:
    """Few queries or keys, and heads of k and v that several of q share."""
    lengths = [(1, 1024), (16, 2048), (64, 2048), (64, 8192), (100, 300), (200, 2000), (512, 64)]
    lengths += [(2048, 64), (2048, 128), (512, 4096), (128, 32)]
    for head_dim in (64, 128, 256):
        for q, k in lengths:
            for heads in (8, 32, 128, 256):
                for shared in (1, 8):
                    if heads < 2 * shared:
                        continue
                    yield {"heads": heads, "q": q, "k": k, "head_dim": head_dim, "shared": shared}


def packs() -> Iterator[Case]:
    """Sequences of least to most tokens each, with max_seqlen as they need it and too large."""
    ranges = [(1000, 1, 1), (1000, 1, 64), (100, 65, 65), (256, 300, 300), (256, 10, 1000)]
    ranges += [(64, 16, 4096), (16, 2048, 2048), (16, 1, 8192), (300, 128, 128), (8, 1000, 4000)]
    for head_dim in (64, 128, 256):
        for count, least, most in ranges:
            for longest in (most, 4096):
                if longest < most:
                    continue
                lengths = [random.randint(least, most) for _ in range(count)]
                causal = random.random() < 0.5
                yield {
                    "heads": 8, "lengths": lengths, "longest": longest, "head_dim": head_dim,
                    "causal": causal,
                }  # fmt: skip


def call_of(case: Case) -> Callable[..., Any]:
    """The call of attention on a case's tensors, or, with plan=True and no packs, the plan of the
    call."""
    import torch

    import dlattn

    heads, head_dim = case["heads"], case["head_dim"]
    options: dict[str, Any] = {"causal": case.get("causal", False)}

    def tensor(*sizes: int) -> Any:
        return (torch.randn(*sizes, device="cuda") + 0.25).half()

    if "lengths" in case:
        tokens = sum(case["lengths"])
        starts = torch.tensor([0, *case["lengths"]], device="cuda").cumsum(0).int()
        q, k, v = (tensor(tokens, heads, head_dim) for _ in range(3))
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": case["longest"], "max_seqlen_k": case["longest"]}
        return lambda kernel: dlattn.attention_varlen(q, k, v, kernel=kernel, **options)
    seqlen_k = case.get("k", case["q"])
    q = tensor(1, case["q"], heads, head_dim)
    k, v = (tensor(1, seqlen_k, heads // case.get("shared", 1), head_dim) for _ in range(2))
    feature = case.get("feature")
    if feature == "softcap":
        options["softcap"] = 20.0
    elif feature == "alibi":
        options["alibi_slopes"] = torch.full((heads,), 0.01, device="cuda")
    elif feature == "bias":
        options["bias"] = tensor(1, 1, case["q"], seqlen_k)
    elif feature == "mask":
        options["mask"] = torch.rand(1, 1, case["q"], seqlen_k, device="cuda") < 0.8

    def call(kernel: str, plan: bool = False) -> Any:
        return (dlattn.plan if plan else dlattn.attention)(q, k, v, kernel=kernel, **options)

    return call


def microseconds(call: Callable[[], Any]) -> float:
    """The median of five replays of a graph of so many calls that it takes 2 ms."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(run: Callable[[], Any]) -> float:
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    call()
    count = max(1, min(20, int(2000 / max(min(once(call), once(call)), 4))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    for _ in range(3):
        graph.replay()
    return statistics.median(once(graph.replay) for _ in range(5)) / count


def measure(case: Case, families: list[str]) -> Case:
    """A case with its times, and what the plans say of them."""
    import dlattn

    call = call_of(case)
    shape = {**case, "lengths": len(case["lengths"])} if "lengths" in case else case
    times, predicted = {}, {}
    for family in families:
        try:
            times[family] = round(microseconds(lambda family=family: call(family)), 2)
        except dlattn.UnsupportedError:
            continue
        if "lengths" not in case:
            predicted[family] = round(call(family, plan=True).predicted_ns / 1e3, 2)
    row: Case = {**shape, "us": times, "predicted_us": predicted}
    if "lengths" in case:
        row["tokens"] = sum(case["lengths"])
        row["auto_us"] = round(microseconds(lambda: call("auto")), 2)
        row["ratio"] = round(min(times.values()) / row["auto_us"], 4)
    else:
        plan = call("auto", plan=True)
        variant = plan.variant if plan.variant == "short" else "tall"  # of sm90
        row["auto"] = plan.kernel if plan.kernel in times else f"{plan.kernel}:{variant}"
        row["ratio"] = round(min(times.values()) / times[row["auto"]], 4)
    return row


def kind_of(row: Case) -> str:
    """The group that a row is counted under."""
    if "lengths" in row:
        return "packs"
    return str(row.get("feature") or ("unequal lengths" if "k" in row else "plain"))


def main() -> None:
    """Parse arguments, measure, sum up."""
    parser = argparse.ArgumentParser(description="auto against the fastest family.")
    parser.add_argument(
        "--families", default="sm90:tall,sm90:short,wmma,decode", help="those that are timed"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="no new case after so many")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--commit", help="of the build, where there is no git")
    arguments = parser.parse_args()
    random.seed(0)
    cases = [*fixed_lengths(), *unequal_lengths(), *packs()]
    random.shuffle(cases)
    start = time.monotonic()
    rows = []
    for case in cases:
        if time.monotonic() - start > arguments.seconds:
            break
        rows.append(measure(case, arguments.families.split(",")))
    ratios = defaultdict(list)
    for row in rows:
        for kind in (kind_of(row), "all"):
            ratios[kind].append(row["ratio"])
    summary = {}
    for kind, found in ratios.items():
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in found))
        summary[kind] = {
            "cases": len(found),
            "geometric_mean": round(mean, 4),
            "least": min(found),
            "below_0.9": sum(ratio < 0.9 for ratio in found),
        }
        print(kind, summary[kind], flush=True)
    if arguments.json:
        from dlattn.bench.environment import describe

        report = {**describe("cuda", arguments.commit), "summary": summary, "cases": rows}
        text = json.dumps(report, separators=(",", ":")).replace('},{"heads"', '},\n{"heads"')
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
