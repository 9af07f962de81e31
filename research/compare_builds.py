"""Two builds of dlattn on one GPU, taking turns case by case: what a change costs or brings.

    python research/compare_builds.py --old /path/old --new /path/new --json research/steps/x.json

Each path is a folder that holds the package `dlattn`, as `pip install --target` or a build folder's
`python/` makes it. Each build runs in a process of its own, which waits while the other is timed.
The cases are the sweep, full and causal, (1,8,512,64), small grids, features, float32, and the
host time of eager calls, which wants a machine that does nothing else; inputs are the same, times
are sustained medians of CUDA-graph replays, and a figure is a ratio of one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HEAD_DIMS = (64, 128, 256)
_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
_SHORT = (1, 8, 512, 64)
_CALLS = ("plain", "out", "return_lse")  # of which the host time is taken
_FEATURES = (
    *("varlen", "gqa", "decode", "bias", "padding"),
    *("mask", "softcap", "alibi", "window", "sinks"),
)


def sweep() -> list[dict[str, Any]]:
    """The cases of the sweep and (1,8,512,64), as workers take them."""
    sizes = [(16384 // s, 2048 // d, s, d) for d in _HEAD_DIMS for s in _SEQLENS]
    return [
        {"sizes": shape, "causal": causal, "kernel": kernel}
        for kernel in ("auto", "wmma")
        for causal in (False, True)
        for shape in (*sizes, _SHORT)
    ]


def small_grids() -> list[dict[str, Any]]:
    """Few heads, short sequences."""
    sizes = [(1, *rest) for rest in ((8, 64), (8, 128), (32, 128))]
    return [
        {"sizes": (batch_size, heads, seqlen, head_dim), "causal": causal, "kernel": "auto"}
        for batch_size, heads, head_dim in sizes
        for seqlen in (128, 256, 512, 1024, 2048, 4096)
        for causal in (False, True)
    ]


def features() -> list[dict[str, Any]]:
    """One feature each, on (4, 16, 2048, head_dim), causal, by both families of tensor cores."""
    return [
        {
            "sizes": (4, 16, 2048, head_dim),
            "causal": True,
            "kernel": kernel,
            "feature": feature,
        }
        for kernel in ("auto", "wmma")
        for head_dim in _HEAD_DIMS
        for feature in _FEATURES
    ]


def float32() -> list[dict[str, Any]]:
    """Cases of float32, which CUDA cores compute."""
    sizes = [(1, 1024 // d, s, d) for d in _HEAD_DIMS for s in (512, 1024, 4096, 20480)]
    return [
        {"sizes": shape, "causal": causal, "kernel": "auto", "dtype": "float32"}
        for causal in (False, True)
        for shape in sizes
    ]


def host_times() -> list[dict[str, Any]]:
    """The eager calls of (1,8,512,64)."""
    case = {"sizes": _SHORT, "causal": False, "kernel": "auto"}
    return [{**case, "host": call} for call in _CALLS]


def name_of(case: dict[str, Any]) -> str:
    """One case in a word."""
    mask = "causal" if case["causal"] else "full"
    host = f"host time, {case['host']}, " if "host" in case else ""
    dtype = f"{case['dtype']} " if "dtype" in case else ""
    feature = f" {case['feature']}" if "feature" in case else ""
    return f"{host}{dtype}{case['kernel']} {tuple(case['sizes'])} {mask}{feature}"


class Worker:
    """A process that times cases with one build."""

    def __init__(self, folder: Path, windows: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", windows],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.version = self.ask({"about": True})["build"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a line, wait for a line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended, with exit code {self._process.wait()}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def prepare(case: dict[str, Any]) -> Callable[[], object]:
    """The call of a case, on inputs of its own."""
    import torch

    import dlattn

    batch_size, heads, seqlen, head_dim = case["sizes"]
    feature = case.get("feature")
    device = torch.device("cuda")
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = getattr(torch, case.get("dtype", "float16"))

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device, generator=generator) + 0.25).to(dtype)

    heads_kv = heads // 4 if feature in ("gqa", "decode") else heads
    rows = 1 if feature == "decode" else seqlen
    q = normal(batch_size, rows, heads, head_dim)
    k, v = (normal(batch_size, seqlen, heads_kv, head_dim) for _ in range(2))
    options: dict[str, Any] = {"causal": case["causal"], "kernel": case["kernel"]}
    if case.get("host") == "out":
        options["out"] = torch.empty_like(q)
    if case.get("host") == "return_lse":
        options["return_lse"] = True
    if feature == "bias":
        options["bias"] = normal(seqlen, seqlen)
    elif feature == "padding":  # on the left, as a bias of the least number
        hidden = torch.arange(seqlen, device=device) < seqlen // 4
        options["bias"] = torch.where(hidden, torch.finfo(dtype).min, 0.0).to(dtype)[None]
    elif feature == "mask":
        options["mask"] = torch.rand(seqlen, seqlen, device=device, generator=generator) < 0.8
    elif feature == "softcap":
        options["softcap"] = 30.0
    elif feature == "alibi":
        options["alibi_slopes"] = torch.linspace(0.1, 1.0, heads, device=device)
    elif feature == "window":
        options["window"] = (seqlen // 4, 0)
    elif feature == "sinks":
        options["sinks"] = torch.linspace(-1.0, 1.0, heads, device=device)
    elif feature == "varlen":
        # Sequences of 1/8, 3/8, 5/8 and so on of the longest.
        lengths = [seqlen * (2 * (i % 4) + 1) // 8 for i in range(batch_size)]
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)
        packed = [x.flatten(0, 1)[: sum(lengths)] for x in (q, k, v)]
        longest = max(lengths)
        return lambda: dlattn.attention_varlen(
            *packed, cu_seqlens, cu_seqlens, longest, longest, **options
        )
    return lambda: dlattn.attention(q, k, v, **options)


def work(windows: str) -> None:
    """Answer requests from standard input; nothing but answers goes to standard output."""
    import dlattn
    from dlattn.bench import timing

    chosen = timing.SUSTAINED if windows == "sustained" else timing.QUICK
    clock = timing.GpuClock()
    prepared: dict[str, Any] = {}
    for line in sys.stdin:
        case = json.loads(line)
        if "about" in case:
            print(json.dumps({"build": dlattn.__file__}), flush=True)
            continue
        key = json.dumps(case)
        if key not in prepared:
            prepared.clear()
            call = prepare(case)
            prepared[key] = (call, None if case.get("host") else clock.prepare(call))
        call, graph = prepared[key]
        if case.get("host"):
            answer = {"seconds": clock.host(call, chosen)}
        else:
            answer = {"seconds": statistics.median(clock.window(graph, chosen))}
        print(json.dumps(answer), flush=True)


def compare(
    old: Worker, new: Worker, rounds: int, cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Time all cases, the builds in turns, and print a line for each."""
    rows = []
    for case in cases:
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        for i in range(rounds):
            turn = [("old", old), ("new", new)]
            for which, worker in turn if i % 2 == 0 else reversed(turn):
                seconds[which].append(worker.ask(case)["seconds"])
        medians = {which: statistics.median(values) for which, values in seconds.items()}
        row = {
            "case": name_of(case),
            "old_us": round(medians["old"] * 1e6, 3),
            "new_us": round(medians["new"] * 1e6, 3),
            "speed": round(medians["old"] / medians["new"], 4),  # of new, relative to old
        }
        rows.append(row)
        print(f"{row['case']:52} {row['old_us']:10} {row['new_us']:10} {row['speed']}", flush=True)
    return rows


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="Compare the speed of two builds of dlattn.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--old", type=Path, help="folder that holds the old package")
    parser.add_argument("--new", type=Path, help="folder that holds the new one")
    parser.add_argument(
        "--cases",
        default="auto,host",
        help="of auto and wmma (the sweep), small, features, float32 and host",
    )
    parser.add_argument("--only", default="", help="pattern of the cases' names, to repeat some")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each build in a case")
    parser.add_argument("--quick", action="store_true", help="short windows, for a first look")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--commit", help="of the new build, where there is no git")
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker)
    windows = "quick" if arguments.quick else "sustained"
    old, new = Worker(arguments.old, windows), Worker(arguments.new, windows)
    kinds = arguments.cases.split(",")
    groups = {
        **{kind: [c for c in sweep() if c["kernel"] == kind] for kind in ("auto", "wmma")},
        "small": small_grids(),
        "features": features(),
        "float32": float32(),
        "host": host_times(),
    }
    chosen = {k: [c for c in groups[k] if re.search(arguments.only, name_of(c))] for k in kinds}
    kinds = [kind for kind in kinds if chosen[kind]]
    rows = {kind: compare(old, new, arguments.rounds, chosen[kind]) for kind in kinds}
    old.close()
    new.close()
    summary = {}
    for kind in kinds:
        speeds = [row["speed"] for row in rows[kind]]
        mean = math.exp(statistics.fmean(math.log(speed) for speed in speeds))
        summary[kind] = {"geometric_mean": round(mean, 4), "least": min(speeds)}
        print(f"{kind}: geometric mean {mean:.4f}, least {min(speeds):.4f}")
    if arguments.json:
        from dlattn.bench.environment import describe

        report = {
            **describe("cuda", arguments.commit),
            "windows": windows,
            "rounds": arguments.rounds,
            "summary": summary,
            "cases": [row for kind in kinds for row in rows[kind]],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
