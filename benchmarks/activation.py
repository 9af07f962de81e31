"""The host's time of a call of torch's attention: torch's own, and by dlattn after `activate()`.

dlattn's kernels in torch's dispatcher are native, or Python's where they cannot be; both are
measured. The tensors are small, so that the host is what takes the time:

    DLATTN_NATIVE_ON_CUDA=1 python benchmarks/activation.py --json activation.json
    python benchmarks/activation.py --device cpu

A time is the least of several windows, in each of which calls follow each other without waiting for
the GPU. torch's own is measured before anything is put into its dispatcher.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dlattn
import dlattn.torch
from dlattn.integrations.torch import sdpa_native

SHAPES = [(1, 1, 1, 1, 64), (1, 8, 128, 128, 64)]  # batch, heads, queries, keys, head_dim
BACKENDS = torch.nn.attention.SDPBackend
CUDA = {
    "flash": BACKENDS.FLASH_ATTENTION,
    "efficient": BACKENDS.EFFICIENT_ATTENTION,
    "cudnn": BACKENDS.CUDNN_ATTENTION,
}
CPU = {"flash": BACKENDS.FLASH_ATTENTION}
WINDOWS, CALLS, WARM_UP = 15, 100, 50

Cases = dict[str, Callable[[], Any]]


def host_time(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Microseconds of a call."""
    for _ in range(WARM_UP):
        call()
    least = float("inf")
    for _ in range(WINDOWS):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, time.perf_counter() - start)
    wait()
    return least / CALLS * 1e6


def cases(shape: tuple[int, ...], device: str, with_mask: bool) -> Cases:
    batch, heads, rows, keys, columns = shape
    dtype = torch.float16 if device == "cuda" else torch.float32
    sizes = [(batch, heads, n, columns) for n in (rows, keys, keys)]
    tensors = [torch.randn(size, device=device).to(dtype) for size in sizes]
    trained = [x.clone().requires_grad_() for x in tensors]
    mask = torch.zeros(rows, keys, device=device, dtype=dtype) if with_mask else None
    attention = torch.nn.functional.scaled_dot_product_attention

    def forward() -> None:
        with torch.no_grad():
            attention(*tensors, attn_mask=mask)

    def both() -> None:
        out = attention(*trained, attn_mask=mask)
        torch.autograd.grad(out, trained, out)

    return {"forward": forward, "forward and backward": both}


def measure(device: str) -> dict[str, float | None]:
    """The host's time by backend, mask, shape and pass; None where torch has no such kernel."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found: dict[str, float | None] = {}
    for backend, pinned in (CUDA if device == "cuda" else CPU).items():
        for with_mask in (False, True):
            if with_mask and backend == "flash" and device == "cuda":
                continue
            for shape in SHAPES if device == "cuda" else SHAPES[:1]:  # where the host computes too
                for name, call in cases(shape, device, with_mask).items():
                    key = f"{backend}{' mask' if with_mask else ''} {shape} {name}"
                    with torch.nn.attention.sdpa_kernel(pinned):
                        try:
                            found[key] = host_time(call, wait)
                        except RuntimeError as error:
                            print(f"{key}: {str(error).splitlines()[0]}")
                            found[key] = None
    return found


@contextmanager
def kernels_in_python(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with sdpa_native.in_python():
        yield


def measured_of_all(device: str) -> dict[str, dict[str, float | None]]:
    found = {"torch": measure(device)}
    for gradients in ("auto", "dlattn"):
        for kernels in ("native", "python"):
            with dlattn.torch.active(gradients), kernels_in_python(kernels == "python"):  # type: ignore[arg-type]
                found[f"{kernels}, gradients={gradients}"] = measure(device)
    with kernels_in_python(False):
        found["native, not active"] = measure(device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = measured_of_all(device)
    stats = dlattn.torch.stats()
    print("\n".join(f"{name}: {why or 'native'}" for name, why in sdpa_native.why.items()))
    columns = list(found)
    print("\nµs a call: " + " | ".join(columns))
    for key in found["torch"]:
        times = [found[column][key] for column in columns]
        print(f"{key:55}" + "".join("       -" if t is None else f"{t:8.1f}" for t in times))
    print(stats)
    if args.json:
        document = {
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "dlattn": dlattn.__version__,
            "why_not_native": sdpa_native.why,
            "served": stats.served,
            "refused": stats.refused,
            "host_microseconds": found,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
