"""The host's time of a call of torch's attention: torch's own, and by dlattn after `activate()`.

    python benchmarks/activation.py --json h200-activation.json
    python benchmarks/activation.py --device cpu

The tensors are small, so that the host is what takes the time. Each contestant is a process of its
own, in which nothing but its own kernels ever are in torch's dispatcher. They take turns by windows
of calls that follow each other without waiting for the GPU. A figure is the median over the windows
of the ratio to torch's own window beside it: what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import dlattn.torch
from dlattn.bench import load
from dlattn.bench.environment import describe
from dlattn.integrations.torch import sdpa_native

SHAPES = [(1, 1, 1, 1, 64), (1, 8, 128, 128, 64)]  # batch, heads, queries, keys, head_dim
BACKENDS = torch.nn.attention.SDPBackend
CUDA = {
    "flash": BACKENDS.FLASH_ATTENTION,
    "efficient": BACKENDS.EFFICIENT_ATTENTION,
    "efficient mask": BACKENDS.EFFICIENT_ATTENTION,
    "cudnn": BACKENDS.CUDNN_ATTENTION,
    "cudnn mask": BACKENDS.CUDNN_ATTENTION,
}
CPU = {"flash": BACKENDS.FLASH_ATTENTION, "flash mask": BACKENDS.FLASH_ATTENTION}
PASSES = ("forward", "forward and backward")
TORCH, OPERATOR = "torch", "dlattn.torch.attention"
INACTIVE, REMOVED = "not active", "removed"  # torch's own kernels after deactivate()
# The contestants, with whose gradients, by whose kernels.
ACTIVE = {
    "auto": ("auto", "native"),
    "dlattn": ("dlattn", "native"),
    "auto, Python": ("auto", "python"),
    "dlattn, Python": ("dlattn", "python"),
}
WARM_UP = 30


def call_of(kind: str, shape: tuple[int, ...], step: str, device: str, ours: bool) -> Any:
    """The call that is timed; `ours`: of dlattn's operator."""
    batch, heads, rows, keys, columns = shape
    dtype = torch.float16 if device == "cuda" else torch.float32
    sizes = [(batch, heads, n, columns) for n in (rows, keys, keys)]
    tensors = [torch.randn(size, device=device).to(dtype) for size in sizes]
    trained = [x.clone().requires_grad_() for x in tensors]
    mask = torch.zeros(rows, keys, device=device, dtype=dtype) if "mask" in kind else None

    def attention(q: Any, k: Any, v: Any) -> Any:
        if ours:
            return dlattn.torch.attention(q, k, v, bias=mask, layout="bhsd")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward() -> None:
        with torch.no_grad():
            attention(*tensors)

    def both() -> None:
        out = attention(*trained)
        torch.autograd.grad(out, trained, out)

    return forward if step == "forward" else both


def window(call: Callable[[], Any], calls: int, device: str) -> float:
    """Microseconds of a call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    wait()
    return taken / calls * 1e6


def contest(name: str, device: str, calls: int, orders: Any) -> None:
    """One contestant: is sent cases, answers why torch cannot take one, and each order for a window
    with its time; at the end, what was served.
    """
    torch.set_num_threads(1)
    held = ExitStack()
    if name in ACTIVE or name in (INACTIVE, REMOVED):
        gradients, kernels = ACTIVE.get(name, ("dlattn", "native"))
        dlattn.torch.activate(gradients)  # type: ignore[arg-type]
        if name not in ACTIVE:
            dlattn.torch.deactivate(remove=name == REMOVED)
        if kernels == "python":
            held.enter_context(sdpa_native.in_python())
    kinds = CUDA if device == "cuda" else CPU
    while (case := orders.recv()) is not None:
        kind, shape, step = case
        with torch.nn.attention.sdpa_kernel(kinds[kind]):
            try:
                call = call_of(kind, shape, step, device, name == OPERATOR)
                window(call, WARM_UP, device)
                orders.send("")
            except RuntimeError as error:
                orders.send(str(error).splitlines()[0])
            while orders.recv() == "window":
                orders.send(window(call, calls, device))
    stats = dlattn.torch.stats()
    orders.send({"served": stats.served, "refused": stats.refused, "why": sdpa_native.why})


def measure(names: list[str], args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each case's windows by contestant, and what each process tells at its end."""
    processes = multiprocessing.get_context("spawn")
    orders, running = {}, []
    for name in names:
        orders[name], theirs = processes.Pipe()
        given = (name, args.device, args.calls, theirs)
        running.append(processes.Process(target=contest, args=given, daemon=True))
        running[-1].start()
        theirs.close()  # so that a process that ends ends its pipe
    found: dict[str, Any] = {}
    shapes = SHAPES if args.device == "cuda" else SHAPES[:1]  # where the host computes too
    for kind in CUDA if args.device == "cuda" else CPU:
        for shape in shapes:
            for step in PASSES:
                found[f"{kind} {shape} {step}"] = times_of((kind, shape, step), orders, args)
    told = {}
    for name, to in orders.items():
        to.send(None)
        told[name] = to.recv()
    for process in running:
        process.join()
    return found, told


def times_of(case: Any, orders: dict[str, Any], args: argparse.Namespace) -> dict[str, list[float]]:
    """Windows of all contestants, in turns."""
    able = {}
    for name, to in orders.items():
        to.send(case)
        if refusal := to.recv():
            print(f"{case}: {name}: {refusal}")
            to.send("end")
        else:
            able[name] = to
    times: dict[str, list[float]] = {name: [] for name in able}
    for _ in range(args.windows):
        for name, to in able.items():
            to.send("window")
            times[name].append(to.recv())
    for to in able.values():
        to.send("end")
    return times


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Each contestant's time over torch's, the median of the windows."""
    if TORCH not in times:
        return {}
    return {
        name: statistics.median(a / b for a, b in zip(each, times[TORCH], strict=True))
        for name, each in times.items()
        if name != TORCH
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--windows", type=int, default=41)
    parser.add_argument("--calls", type=int, default=30, help="of a window")
    parser.add_argument("--quick", action="store_true", help="without Python's kernels")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    active = [
        name for name, (_, kernels) in ACTIVE.items() if kernels != "python" or not args.quick
    ]
    names = [TORCH, *active, OPERATOR, INACTIVE, REMOVED]
    watch = load.Watch(args.device)
    watch.before()
    found, told = measure(names, args)
    watch.after()
    print("\n".join(f"{name}: {why or 'native'}" for name, why in told["dlattn"]["why"].items()))
    print("\ntorch's own in µs, and times of it: " + " | ".join(names[1:]))
    for key, times in found.items():
        own = statistics.median(times[TORCH]) if TORCH in times else float("nan")
        each = ratios(times)
        parts = (f"{each[name]:7.2f}" if name in each else "      -" for name in names[1:])
        print(f"{key:52}{own:8.1f}" + "".join(parts))
    if watch.reasons():
        print(load.warning(watch.reasons()))
    if args.json:
        document = {
            **describe(args.device, args.commit),
            "busy": watch.reasons(),
            "contestants": told,
            "windows": args.windows,
            "calls": args.calls,
            "median_microseconds": {
                key: {name: statistics.median(each) for name, each in times.items()}
                for key, times in found.items()
            },
            "ratios_to_torch": {key: ratios(times) for key, times in found.items()},
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
