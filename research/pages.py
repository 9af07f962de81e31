"""Chunked prefill over pages: the time beside that of the same keys side by side.

    python research/pages.py --json research/steps/h200-pages.json

Each case is timed over contiguous keys (`attention`), and by each kernel asked for over a cache
without pages and over pages of 16, 64 and 256 keys in random order (`attention_with_kvcache`), by
replays of CUDA graphs. They take short turns in an order that is shuffled each time: at a card's
power limit the clock follows what ran before, and a kernel that always came after one that needs
less power would seem faster by up to 4%. `decode` has pages of 64 alone. A ratio is the time over
contiguous keys divided by that over pages: 1 says that pages cost nothing. Contiguous keys timed a
second time, `again`, tell how much is noise. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dlattn
from dlattn.bench import timing
from dlattn.bench.environment import describe

# batch_size, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim; the first two are the ones that
# limits are about.
CASES = [
    (1, 32, 8, 512, 8192, 128),
    (4, 32, 8, 2048, 2048, 128),
    (1, 32, 8, 128, 8192, 128),
    (1, 32, 8, 2048, 32768, 128),
    (8, 32, 8, 256, 4096, 128),
    (1, 32, 8, 512, 8192, 64),
    (4, 32, 8, 2048, 2048, 64),
]
PAGE_SIZES = (16, 64, 256)
TURNS = timing.Windows(rounds=16, warmup_seconds=0.01, measured_seconds=0.05, host_calls=0)


def paged(x: torch.Tensor, page_size: int, order: torch.Tensor) -> torch.Tensor:
    """The rows of (batch, seqlen, heads, dim) as pages in an order."""
    pages = x.reshape(-1, page_size, *x.shape[2:])
    pool = torch.empty_like(pages)
    pool[order.flatten().long()] = pages
    return pool


def calls(sizes: tuple[int, ...], causal: bool, kernels: list[str]) -> dict[str, Callable[[], Any]]:
    """The contestants by name, once their results agree."""
    batch_size, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim = sizes
    torch.manual_seed(0)
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch_size, seqlen_q, num_heads, head_dim, **draw)
    k, v = (torch.randn(batch_size, seqlen_k, num_heads_kv, head_dim, **draw) for _ in "kv")
    used = torch.full((batch_size,), seqlen_k, dtype=torch.int32, device="cuda")
    made: dict[str, Callable[[], Any]] = {
        name: lambda: dlattn.attention(q, k, v, causal=causal) for name in ("contiguous", "again")
    }
    caches: dict[str, tuple[Any, Any, dict[str, Any]]] = {"entries": (k, v, {})}
    for page_size in PAGE_SIZES:
        count = batch_size * seqlen_k // page_size
        order = torch.randperm(count, device="cuda").to(torch.int32).reshape(batch_size, -1)
        pools = (paged(x, page_size, order) for x in (k, v))
        caches[f"pages of {page_size}"] = (*pools, {"page_table": order})
    for kernel in kernels:
        for name, (k_cache, v_cache, given) in caches.items():
            if kernel == "decode" and name != "pages of 64":
                continue
            options = {**given, "seqused_k": used, "causal": causal, "kernel": kernel}
            made[f"{kernel}, {name}"] = lambda k=k_cache, v=v_cache, options=options: (
                dlattn.attention_with_kvcache(q, k, v, **options)
            )
            if name == "pages of 64":
                plan = dlattn.plan(q, k_cache, v_cache, **options)
                print(sizes, "causal" if causal else "full", plan, flush=True)
    expected = made["contiguous"]().float()
    for name, run in made.items():
        worst = (run().float() - expected).abs().max().item()
        if not worst < 0.05:
            raise SystemExit(f"{sizes} {name}: off by {worst}")
    return made


def measure(
    sizes: tuple[int, ...], causal: bool, kernels: list[str], clock: timing.GpuClock
) -> dict[str, Any]:
    """Microseconds of each contestant, and the ratios."""
    prepared = {name: clock.prepare(call) for name, call in calls(sizes, causal, kernels).items()}
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    order = random.Random(0)
    for turn in range(TURNS.rounds + 1):
        for name in order.sample(list(prepared), len(prepared)):
            times = clock.window(prepared[name], TURNS)
            if turn > 0:  # in the first one the card gets warm
                seconds[name].append(statistics.median(times))
    us = {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()}
    ratios = {name: round(us["contiguous"] / time, 4) for name, time in us.items()}
    return {"sizes": list(sizes), "causal": causal, "us": us, "ratios": ratios}


def main() -> None:
    """Parse arguments, measure, sum up."""
    parser = argparse.ArgumentParser(description="Chunked prefill over pages.")
    parser.add_argument("--kernels", nargs="+", default=["auto", "sm90"], help="those over caches")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--commit", help="of the build, where there is no git")
    arguments = parser.parse_args()
    clock = timing.GpuClock()
    rows = []
    for sizes in CASES[: arguments.cases]:
        for causal in (True, False):
            rows.append(measure(sizes, causal, arguments.kernels, clock))
            print(rows[-1]["us"], rows[-1]["ratios"], flush=True)
    least = {name: min(row["ratios"][name] for row in rows[:4]) for name in rows[0]["ratios"]}
    print("least ratios of the first two shapes:", least)
    if arguments.json:
        document = {**describe("cuda", arguments.commit), "kernels": arguments.kernels}
        method = f"{clock.method}; of {TURNS.rounds} such turns in shuffled order, the median"
        document |= {"method": method, "least": least, "cases": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
