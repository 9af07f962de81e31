"""Shapes of models, grids of few blocks, of uneven ones and of short walks: dlattn and its peers.

    python research/grids.py --json research/steps/h200-grids.json

Shapes of models whose blocks do not fill a device evenly, cross-attention over few keys, and
grouped heads. Each case is timed with `auto` and with the peers of `dlattn bench` that are
installed, in turns, by replays of CUDA graphs; a ratio above 1 says that `auto` is faster.
`--kernels auto sm90:tall sm90:short` has both kinds of sm90's blocks beside it. Needs a GPU and
torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dlattn.bench import cudnn_library, peers, tensors, timing
from dlattn.bench.cases import Case
from dlattn.bench.environment import describe

# batch_size, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, causal
CASES = [
    (2, 8, 8, 2048, 2048, 64, True),
    (1, 8, 8, 4096, 4096, 64, True),
    (2, 8, 8, 2048, 2048, 64, False),
    (1, 8, 8, 2048, 2048, 64, False),
    (1, 16, 16, 1024, 1024, 64, True),  # gpt2-medium
    (1, 12, 12, 1024, 1024, 64, True),  # gpt2
    (8, 12, 12, 197, 197, 64, False),  # ViT-B at 224 px
    (8, 12, 12, 512, 512, 64, False),  # BERT-base
    (16, 16, 16, 512, 512, 64, False),  # BERT-large
    (4, 20, 20, 1500, 1500, 64, False),  # Whisper large's encoder
    (2, 10, 10, 4096, 4096, 64, False),  # SDXL at 1024 px
    (2, 20, 20, 1024, 1024, 64, False),
    (2, 10, 10, 4096, 77, 64, False),  # its cross-attention
    (2, 20, 20, 1024, 77, 64, False),
    (1, 24, 24, 4608, 4608, 128, False),  # Flux at 1024 px
    (1, 32, 8, 1024, 1024, 128, True),  # Llama-3-8B
    (1, 32, 8, 2048, 2048, 128, True),
    (1, 32, 8, 8192, 8192, 128, True),
    (1, 16, 16, 2048, 2048, 128, True),
    (1, 8, 8, 4096, 4096, 128, True),
    (2, 8, 8, 2048, 2048, 128, True),
    (4, 28, 4, 2048, 2048, 128, True),  # Qwen2.5-7B
    (1, 64, 8, 4096, 4096, 128, True),  # Llama-3-70B
    (1, 32, 32, 2048, 2048, 96, True),  # Phi-3-mini
    (1, 24, 8, 2048, 2048, 128, True),  # Llama-3.2-3B
    (1, 32, 8, 2048, 2048, 64, True),  # Llama-3.2-1B
    (4, 32, 8, 4096, 4096, 128, False),  # grouped heads beside the sweep's shapes
    (4, 32, 8, 4096, 4096, 128, True),
]
PEERS = ("torch-flash", "torch-cudnn", "fa3", "fa4")


def problem_of(sizes: tuple[Any, ...], dtype: str) -> peers.Problem:
    """A case's inputs: those of the benchmark, with keys of their own number."""
    batch_size, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, causal = sizes
    grouped = num_heads_kv if num_heads_kv != num_heads else 0
    case = Case((batch_size, num_heads, seqlen_q, head_dim), causal, dtype, grouped)
    q = tensors.draw(case, "cuda")[0]
    longer = Case((batch_size, num_heads, seqlen_k, head_dim), causal, dtype, grouped)
    return peers.Problem(case, q, *tensors.draw(longer, "cuda", seed=1)[1:])


def measure(
    sizes: tuple[Any, ...],
    arguments: argparse.Namespace,
    windows: timing.Windows,
    clock: timing.GpuClock,
) -> dict[str, Any]:
    """Microseconds of everybody who takes part, and auto's plan."""
    problem = problem_of(sizes, arguments.dtype)
    contestants = [peers.ours_with(kernel) for kernel in arguments.kernels]
    asked = arguments.peers
    contestants += [peers.Contestant(name, False, peers.TORCH_PEERS[name]) for name in asked]
    bound, prepared = {}, {}
    for contestant in contestants:
        try:
            bound[contestant.name] = contestant.bind(problem)
            with bound[contestant.name].context():
                prepared[contestant.name] = clock.prepare(bound[contestant.name].call)
        except Exception as error:  # every library refuses in its own way
            if contestant.ours:
                raise
            bound.pop(contestant.name, None)
            print(f"{contestant.name}: {str(error)[:100]}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in bound}
    for turn in range(windows.rounds):
        for name, call in list(prepared.items())[:: 1 if turn % 2 == 0 else -1]:
            seconds[name] += clock.window(call, windows)
    us = {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()}
    return {"sizes": list(sizes), "us": us, "plan": bound["dlattn auto"].plan}


def summarize(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Give each row its fastest peer and auto's speed relative to it; the same of all rows."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        own = row["us"]["dlattn auto"]
        others = {name: row["us"][name] for name in names if name in row["us"]}
        for name, time in others.items():
            ratios.setdefault(name, []).append(time / own)
        if others:
            row["best_peer"] = min(others, key=lambda name: others[name])
            row["ratio"] = round(min(others.values()) / own, 4)
            ratios.setdefault("best peer", []).append(row["ratio"])
    return {
        name: {
            "cases": len(each),
            "geometric_mean": round(statistics.geometric_mean(each), 4),
            "least": round(min(each), 4),
            "below_1": sum(ratio < 1 for ratio in each),
        }
        for name, each in ratios.items()
    }


def earlier_rows(path: Path, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run that was cut off, of the same build, GPU and versions."""
    earlier = json.loads(path.read_text())
    for name in ("git", "versions", "dtype"):
        if earlier[name] != document[name]:
            raise SystemExit(f"{path}: {name} is {earlier[name]}; accepted: {document[name]}")
    gpus = [x["machine"]["gpu"] for x in (earlier, document)]
    if gpus[0] != gpus[1]:
        raise SystemExit(f"{path}: of {gpus[0]}; accepted: {gpus[1]}")
    return list(earlier["cases"])


def main() -> None:
    """Parse arguments, measure, sum up; the file has the figures so far after each case."""
    parser = argparse.ArgumentParser(description="Shapes of models beside the peers.")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="of dlattn, auto among them")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--cudnn", type=Path, metavar="FOLDER", help="as for dlattn bench")
    parser.add_argument("--rounds", type=int, default=timing.SUSTAINED.rounds, help="turns of all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--earlier", type=Path, help="file of a run that was cut off: its cases")
    parser.add_argument("--commit", help="of the build, where there is no git")
    arguments = parser.parse_args()
    if "auto" not in arguments.kernels:
        parser.error("--kernels lacks auto, which the peers are compared with")
    if arguments.cudnn is not None:
        version = cudnn_library.load(arguments.cudnn)
        cudnn_library.check(arguments.cudnn, version)
    clock = timing.GpuClock()
    windows = replace(timing.SUSTAINED, rounds=arguments.rounds)
    document = {**describe("cuda", arguments.commit), "dtype": arguments.dtype}
    document |= {"method": clock.method, "windows": asdict(windows)}
    rows = earlier_rows(arguments.earlier, document) if arguments.earlier else []
    for sizes in CASES[len(rows) :]:
        rows.append(measure(sizes, arguments, windows, clock))
        summary = summarize(rows, arguments.peers)
        print(rows[-1], flush=True)
        if arguments.json:
            text = json.dumps({**document, "summary": summary, "cases": rows}, indent=1)
            arguments.json.write_text(text + "\n")
    for name, line in summary.items():
        print(name, line)


if __name__ == "__main__":
    main()
