"""The backward pass on a GPU: each family's time beside torch's own, of one run.

    python research/backward.py --json research/steps/h200-backward.json

Cases have batch_size x seqlen = 16384 tokens and num_heads x head_dim = 2048. The contestants are
the kernels that compute a case, with `deterministic` too where that is another plan, and torch's
backward pass by FlashAttention-2 and by cuDNN, as it ships them. They are timed in turns, by
replays of CUDA graphs, once dq, dk and dv agree with cuDNN's. TFLOP/s count 10 · batch_size ·
num_heads · seqlen² · head_dim operations, half of them with causality. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dlattn
from dlattn.bench import timing
from dlattn.bench.environment import describe

TOKENS, COLUMNS = 16384, 2048
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def peer(
    backend: SDPBackend, qkv: list[torch.Tensor], dout: torch.Tensor, causal: bool
) -> Callable[[], Any]:
    """torch's backward pass by one of its kernels."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def calls(seqlen: int, head_dim: int, causal: bool) -> dict[str, Callable[[], Any]]:
    """The contestants by name, once their results agree."""
    torch.manual_seed(0)
    shape = (TOKENS // seqlen, COLUMNS // head_dim, seqlen, head_dim)
    draw = {"device": "cuda", "dtype": torch.float16}
    *qkv, dout = (torch.randn(shape, **draw) + 0.05 for _ in range(4))
    options: dict[str, Any] = {"causal": causal, "layout": "bhsd"}
    made = {name: peer(backend, qkv, dout, causal) for name, backend in PEERS.items()}
    out, lse = dlattn.attention(*qkv, return_lse=True, **options)
    for kernel in ("sm90", "wmma"):
        for deterministic in (False, True):
            chosen = {**options, "kernel": kernel, "deterministic": deterministic}

            def call(chosen: Any = chosen) -> Any:
                return dlattn.attention_backward(dout, *qkv, out, lse, **chosen)

            try:
                call()
            except dlattn.UnsupportedError:
                continue
            made[kernel + " deterministic" * deterministic] = call
    expected = made["cudnn"]()
    for name, run in made.items():
        for got, want in zip(run()[:3], expected, strict=True):
            error = ((got - want).float().norm() / want.float().norm()).item()
            if not error < 5e-3:
                raise SystemExit(f"{shape} {name}: off by {error}")
    return made


def measure(
    seqlen: int, head_dim: int, causal: bool, clock: timing.GpuClock, windows: timing.Windows
) -> dict[str, Any]:
    """TFLOP/s of each contestant."""
    made = calls(seqlen, head_dim, causal)
    prepared = {name: clock.prepare(call) for name, call in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(windows.rounds):
        for name, call in prepared.items():
            seconds[name] += clock.window(call, windows)
    operations = 10 * TOKENS * seqlen * COLUMNS / (2 if causal else 1)
    rates = {name: statistics.median(times) for name, times in seconds.items()}
    tflops = {name: round(operations / time / 1e12, 1) for name, time in rates.items()}
    return {"seqlen": seqlen, "head_dim": head_dim, "causal": causal, "tflops": tflops}


def main() -> None:
    """Parse arguments and measure."""
    parser = argparse.ArgumentParser(description="The backward pass beside torch's own.")
    parser.add_argument("--quick", action="store_true", help="short windows, for a first look")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--commit", help="of the build, where there is no git")
    arguments = parser.parse_args()
    clock = timing.GpuClock()
    windows = timing.QUICK if arguments.quick else timing.SUSTAINED
    rows = []
    for head_dim in (64, 128, 256):
        for seqlen in (1024, 4096, 16384):
            for causal in (False, True):
                rows.append(measure(seqlen, head_dim, causal, clock, windows))
                print(rows[-1], flush=True)
    if arguments.json:
        document = {**describe("cuda", arguments.commit), "method": clock.method, "cases": rows}
        document["windows"] = "quick" if arguments.quick else "sustained"
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
