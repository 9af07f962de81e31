"""Attention over several GPUs beside the ideal: one GPU's time for the whole, over their number.

    for n in 2 4; do
        torchrun --nproc-per-node $n research/ring.py --json ring-$n.json --profile traces-$n
    done
    torchrun --nproc-per-node 2 research/ring.py --device cpu --rows 256 --repeats 2

Forward and backward in bfloat16, batch 1, head_dim 128, `--rows` positions a GPU, `--calls` calls
one after the other. A figure is the slowest process's median; efficiency is the ideal over it. The
ideal is the mean of all GPUs, measured in the same run, all of them computing the whole at the same
time; where it is longer than `--whole` rows, it is that many, scaled by operations.
`kernels` is from process 0's trace of one call: milliseconds of attention's kernels, of NCCL's, of
all others, and those in which NCCL's run alone (`exposed`) or nothing does (`idle`); with --profile
the traces are kept. `peak_bytes` is what a call adds to the memory that its inputs take.

With --high-priority the group's messages go before attention, as TORCH_NCCL_HIGH_PRIORITY=1 has it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dlattn.torch
from dlattn.torch import ring_attention, shard_sequence

HEAD_DIM = 128
# name: (num_heads, num_heads_kv), options of ring_attention, parts of a packed whole in 16ths
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], tuple[int, ...]]] = {
    "causal": ((32, 8), {"causal": True}, ()),
    "causal_mha": ((8, 8), {"causal": True}, ()),
    "full": ((32, 8), {}, ()),
    "full_mha": ((8, 8), {}, ()),
    "deterministic": ((32, 8), {"causal": True, "deterministic": True}, ()),
    "packed": ((32, 8), {"causal": True}, (1, 5, 2, 8)),
    "packed_short": ((32, 8), {"causal": True}, (1,) * 16),
    "packed_whole": ((32, 8), {"causal": True, "order": "whole"}, (1,) * 16),
    "window": ((32, 8), {"causal": True, "window": (4096, 0), "order": "contiguous"}, ()),
    "all_to_all": ((32, 8), {"causal": True, "mode": "all_to_all"}, ()),
    "all_to_all_packed": ((32, 8), {"causal": True, "mode": "all_to_all"}, (1, 5, 2, 8)),
}


def inputs(rows: int, heads: tuple[int, int], device: Any) -> list[torch.Tensor]:
    """q, k and v of packed sequences: (rows, heads, head_dim)."""
    torch.manual_seed(1)
    sizes = (heads[0], heads[1], heads[1])
    dtype = torch.bfloat16
    return [torch.randn(rows, h, HEAD_DIM, device=device, dtype=dtype) for h in sizes]


def milliseconds(function: Callable[[], Any], calls: int, repeats: int, device: Any) -> float:
    """The median of repeats; each is a call's share of `calls` one after the other, as in a model.

    All processes begin together, and wait for the GPU at the end alone.
    """
    times = []
    for i in range(repeats + 1):
        if dist.get_world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        for _ in range(calls):
            function()
        took = 1e3 * (time.perf_counter() - start)
        if device.type == "cuda":
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end)
        times += [took / calls] if i else []
    return statistics.median(times)


def of_all(value: float, device: Any) -> list[float]:
    """The value of every process."""
    own = torch.tensor(value, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [float(x) for x in found]


def covered(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans of time, in their order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def total(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in covered(spans)) / 1e3


def kernels_of(trace: Path) -> dict[str, Any]:
    """Milliseconds of a trace's kernels; see the top of this file."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds: dict[str, list[tuple[float, float]]] = {"attention": [], "nccl": [], "others": []}
    others: dict[str, float] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name, span = event["name"], (event["ts"], event["ts"] + event["dur"])
        kind = "nccl" if "nccl" in name.lower() else "attention" if "dlattn" in name else "others"
        kinds[kind].append(span)
        if kind != "nccl":
            short = name.replace("void ", "")[:90]
            others[short] = others.get(short, 0.0) + event["dur"] / 1e3
    busy = kinds["attention"] + kinds["others"]
    everything = busy + kinds["nccl"]
    longest = sorted(others.items(), key=lambda x: -x[1])[:10]
    return {
        **{kind: total(spans) for kind, spans in kinds.items()},
        "exposed": total(everything) - total(busy),
        "idle": (
            max((x[1] for x in everything), default=0) - min((x[0] for x in everything), default=0)
        )
        / 1e3
        - total(everything),
        "longest": {name: round(ms, 3) for name, ms in longest},
    }


def profiled(call: Callable[[], Any], name: str, folder: Path | None) -> dict[str, Any]:
    with torch.profiler.profile() as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as spare:
        into = Path(spare) if folder is None else folder
        into.mkdir(parents=True, exist_ok=True)
        trace = into / f"{name}-{dist.get_world_size()}.json.gz"
        profile.export_chrome_trace(str(trace))
        return kernels_of(trace)


def starts_of(rows: int, parts: tuple[int, ...]) -> list[int]:
    return [0] + [rows * sum(parts[: i + 1]) // sum(parts) for i in range(len(parts))]


def step(attention: Callable[..., Any], x: list[torch.Tensor], **options: Any) -> Callable[[], Any]:
    leaves = [t.detach().requires_grad_() for t in x]
    dout = torch.ones_like(leaves[0])

    def call() -> Any:
        return torch.autograd.grad(attention(*leaves, **options), leaves, dout)

    return call


def whole_attention(
    q: Any, k: Any, v: Any, starts: list[int], deterministic: bool = False, **options: Any
) -> Any:
    from dlattn.integrations.torch.gradients import deterministic_gradients

    with deterministic_gradients(deterministic):
        if len(starts) == 2:
            out = dlattn.torch.attention(q[None], k[None], v[None], **options)
            return out[0]
        cu = torch.tensor(starts, dtype=torch.int32, device=q.device)
        most = max(b - a for a, b in pairwise(starts))
        return dlattn.torch.attention_varlen(q, k, v, cu, cu, most, most, **options)


def operations(starts: list[int], options: dict[str, Any]) -> float:
    """Scores that are computed, but for a factor that all cases share."""
    left = options.get("window", (None, None))[0]
    total = 0.0
    for begin, end in pairwise(starts):
        rows = end - begin
        seen = min(rows, rows if left is None else left + 1)
        causal = seen * (seen + 1) / 2 + (rows - seen) * seen
        total += causal if options.get("causal") else rows * rows
    return total


def measure(name: str, arguments: argparse.Namespace, device: Any) -> dict[str, Any]:
    n, rank = dist.get_world_size(), dist.get_rank()
    heads, options, parts = CASES[name]
    parts = parts or (1,)
    rows = arguments.rows * n
    starts = starts_of(rows, parts)
    order = options.get("order", "zigzag")
    cut = {"dim": 0, "order": order, "cu_seqlens": starts}
    own = [shard_sequence(x, **cut) for x in inputs(rows, heads, device)]
    given = {**options, "check": False}
    if len(starts) > 2:
        given["cu_seqlens"] = starts
    else:
        own = [x[None] for x in own]
    call = step(ring_attention, own, **given)
    call()
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    call()
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    times = of_all(milliseconds(call, arguments.calls, arguments.repeats, device), device)
    kernels: dict[str, Any] = {}
    if device.type == "cuda":
        dist.barrier()
        if rank == 0:
            kernels = profiled(call, name, arguments.profile)
        else:
            call()
    del own, call
    # The ideal: every process computes it, so that the barriers of `milliseconds` are met.
    fitting = min(rows, arguments.whole)
    whole = {x: y for x, y in options.items() if x not in ("mode", "order")}
    one_starts = starts_of(fitting, parts)
    one = step(whole_attention, inputs(fitting, heads, device), starts=one_starts, **whole)
    took = milliseconds(one, 1, arguments.whole_repeats or arguments.repeats, device)
    scale = operations(starts, whole) / operations(one_starts, whole) / n
    ideals = of_all(took * scale, device)
    return {
        "case": name,
        "num_heads": heads[0],
        "num_heads_kv": heads[1],
        "rows_per_process": arguments.rows,
        "options": {**options, "cu_seqlens": starts},
        "ms": max(times),
        "ideal_ms": statistics.mean(ideals),
        "efficiency": statistics.mean(ideals) / max(times),
        "ms_of_each": times,
        "ideal_ms_of_each": ideals,
        "ideal_measured_rows": fitting,
        "peak_bytes": peak,
        "kernels": kernels,
    }


def summary(result: dict[str, Any]) -> str:
    found = {x: y for x, y in result["kernels"].items() if x != "longest"}
    times = {"ms": result["ms"], "ideal": result["ideal_ms"], **found}
    words = " ".join(f"{x} {y:.2f}" for x, y in times.items())
    return f"{result['case']}: {result['efficiency']:.3f} {words} peak {result['peak_bytes']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", type=int, default=32768, help="positions a process has")
    parser.add_argument("--whole", type=int, default=131072, help="rows that one GPU can compute")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--calls", type=int, default=3, help="calls that are timed together")
    parser.add_argument("--whole-repeats", type=int, help="calls of the whole, where not as many")
    parser.add_argument("--seconds", type=float, default=3600, help="no case begins later")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--high-priority", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="folder of process 0's traces")
    arguments = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu" if arguments.device == "cpu" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":
        dist.init_process_group("gloo")
    else:
        first = os.environ.get("TORCH_NCCL_HIGH_PRIORITY") == "1" or arguments.high_priority
        group = dist.ProcessGroupNCCL.Options(is_high_priority_stream=first)
        dist.init_process_group("cpu:gloo,cuda:nccl", pg_options=group)
    head = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "processes": dist.get_world_size(),
        "torch": torch.__version__,
        "dlattn": dlattn.__version__,
        "high_priority": str(int(device.type == "cuda" and first)),
    }
    results = []
    begin = time.monotonic()
    for name in arguments.only:
        late = torch.tensor(float(time.monotonic() - begin > arguments.seconds))
        dist.all_reduce(late)
        if late:
            break
        results.append(measure(name, arguments, device))
        if rank == 0:
            print(summary(results[-1]), flush=True)
        if rank == 0 and arguments.json:
            arguments.json.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
