"""Grids of few blocks, of uneven ones and of short walks: this library against its peers.

    python research/grids.py --json research/steps/h200-grids.json

Shapes of models whose blocks do not fill a device evenly, and cross-attention over few keys. Each
case is timed with `auto`, with both kinds of sm90's blocks, and with the peers of `dlattn bench`
that are installed, in turns, by replays of CUDA graphs; a ratio above 1 says that `auto` is
faster. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from dlattn.bench import peers, tensors, timing
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
    (4, 20, 20, 1500, 1500, 64, False),  # whisper's encoder
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
]
OURS = ("auto", "sm90:tall", "sm90:short")
PEERS = ("torch-flash", "torch-cudnn", "fa4")


def problem_of(sizes: tuple[Any, ...], dtype: str) -> peers.Problem:
    """A case's inputs: those of the benchmark, with keys of their own number."""
    batch_size, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, causal = sizes
    grouped = num_heads_kv if num_heads_kv != num_heads else 0
    case = Case((batch_size, num_heads, seqlen_q, head_dim), causal, dtype, grouped)
    q = tensors.draw(case, "cuda")[0]
    longer = Case((batch_size, num_heads, seqlen_k, head_dim), causal, dtype, grouped)
    return peers.Problem(case, q, *tensors.draw(longer, "cuda", seed=1)[1:])


def measure(sizes: tuple[Any, ...], dtype: str, clock: timing.GpuClock) -> dict[str, Any]:
    """Microseconds of everybody who takes part, and auto's plan."""
    problem = problem_of(sizes, dtype)
    contestants = [peers.ours_with(kernel) for kernel in OURS]
    contestants += [peers.Contestant(name, False, peers.TORCH_PEERS[name]) for name in PEERS]
    bound, prepared = {}, {}
    for contestant in contestants:
        try:
            bound[contestant.name] = contestant.bind(problem)
            with bound[contestant.name].context():
                prepared[contestant.name] = clock.prepare(bound[contestant.name].call)
        except (peers.UnavailableError, RuntimeError) as error:
            bound.pop(contestant.name, None)
            print(f"{contestant.name}: {str(error)[:100]}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in bound}
    for _ in range(timing.SUSTAINED.rounds):
        for name, call in prepared.items():
            seconds[name] += clock.window(call, timing.SUSTAINED)
    us = {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()}
    others = {name: us[name] for name in PEERS if name in us}
    row: dict[str, Any] = {"sizes": list(sizes), "us": us, "plan": bound["dlattn auto"].plan}
    if others:
        row["best_peer"] = min(others, key=lambda name: others[name])
        row["ratio"] = round(min(others.values()) / us["dlattn auto"], 4)
    return row


def main() -> None:
    """Parse arguments, measure, sum up."""
    parser = argparse.ArgumentParser(description="Grids that do not fill a device evenly.")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--commit", help="of the build, where there is no git")
    arguments = parser.parse_args()
    clock = timing.GpuClock()
    rows = []
    for sizes in CASES:
        rows.append(measure(sizes, arguments.dtype, clock))
        print(rows[-1], flush=True)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    summary = {}
    if ratios:
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        summary = {"cases": len(ratios), "geometric_mean": round(mean, 4), "least": min(ratios)}
        print(summary)
    if arguments.json:
        document = {**describe("cuda", arguments.commit), "dtype": arguments.dtype}
        document |= {"method": clock.method, "summary": summary, "cases": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
