"""torch's own context_parallel with `dlattn.torch.activate()`, beside the ideal: one GPU over n.

    for n in 2 4; do
        torchrun --nproc-per-node $n research/context_parallel.py --json context-parallel-$n.json
    done
    torchrun --nproc-per-node 2 research/context_parallel.py --device cpu --rows 64 --repeats 1

Forward and backward of F.scaled_dot_product_attention in bfloat16, batch 1, head_dim 128, `--rows`
positions a GPU, with dlattn's gradients, with "auto" ones, and by torch alone. The ideal is one
GPU's time for the whole by the same kernels over the number of GPUs. `error` is the largest
relative error of out, dq, dk and dv of 4096 positions, of which each is a norm over the whole's:
beside float64, and `one_error` what one GPU has there alone. Grouped heads: the operator itself
is called, as F.scaled_dot_product_attention(enable_gqa=True) calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import dlattn.torch

HEAD_DIM = 128
FLASH = "_scaled_dot_product_flash_attention"
# name: (num_heads, num_heads_kv), is_causal (with load balancing), rotation of keys
CASES: dict[str, tuple[tuple[int, int], bool, str]] = {
    "causal": ((32, 32), True, "allgather"),
    "causal_alltoall": ((32, 32), True, "alltoall"),
    "causal_grouped": ((32, 8), True, "allgather"),
    "causal_grouped_alltoall": ((32, 8), True, "alltoall"),
    "full_grouped": ((32, 8), False, "alltoall"),
    "full": ((32, 32), False, "allgather"),
}
KERNELS = ("dlattn", "auto", "torch")  # "torch": not activated


def options() -> Any:
    """torch's settings of context_parallel; where they are differs between its releases."""
    import sys

    for name in ("_context_parallel._attention", "_attention"):
        module = sys.modules.get(f"torch.distributed.tensor.experimental.{name}")
        if hasattr(module, "_cp_options"):
            return module._cp_options  # type: ignore[union-attr]
    raise RuntimeError(f"torch {torch.__version__} has no _cp_options")


def activated(kernels: str) -> Any:
    return (
        contextlib.nullcontext() if kernels == "torch" else dlattn.torch.active(gradients=kernels)
    )


def inputs(rows: int, heads: tuple[int, int], device: Any, dtype: Any) -> list[torch.Tensor]:
    """q, k, v and dout."""
    torch.manual_seed(1)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    return [
        torch.randn(1, h, rows, HEAD_DIM, device=device, dtype=dtype) * 0.7 + 0.1 for h in sizes
    ]


def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    if q.device.type == "cpu":  # where torch knows only the operators of GPUs
        return getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, causal)[0]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def both(x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out = attention(*leaves, causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, x[3])]


@contextlib.contextmanager
def parts(mesh: Any, x: list[torch.Tensor], causal: bool) -> Iterator[Callable[[], Any]]:
    """Within it, the call of this process's part of x."""
    before = options().enable_load_balance
    options().enable_load_balance = causal
    try:
        with context_parallel(mesh, buffers=x, buffer_seq_dims=[2] * 4, no_restore_buffers=set(x)):
            own = x
            if x[0].device.type == "cpu":  # F's own wrapper makes these
                own = [DTensor.from_local(t, mesh, [Shard(2)]) for t in x]
            yield lambda: both(own, causal)
    finally:
        options().enable_load_balance = before


def exact(x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """By definition, in float64, a head at a time."""
    group = x[0].shape[1] // x[1].shape[1]
    found = [torch.zeros_like(t, dtype=torch.float64) for t in (x[0], *x[:3])]
    for h in range(x[0].shape[1]):
        at = (0, h, h // group, h // group, h)
        q, k, v, dout = (t[0, i].double() for t, i in zip(x, at[1:], strict=True))
        scores = q @ k.T / HEAD_DIM**0.5
        if causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        p = scores.softmax(1)
        out = p @ v
        ds = p * (dout @ v.T - (dout * out).sum(1, keepdim=True)) / HEAD_DIM**0.5
        for t, i, value in (
            (found[0], h, out),
            (found[1], h, ds @ k),
            (found[2], h // group, ds.T @ q),
            (found[3], h // group, p.T @ dout),
        ):
            t[0, i] += value
    return found


def largest(found: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    pairs = zip(found, want, strict=True)
    return max(float((x.double() - y).norm() / y.norm()) for x, y in pairs)


def milliseconds(function: Callable[[], Any], repeats: int, device: Any) -> float:
    times = []
    for i in range(repeats + 1):
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            function()
            took = 1e3 * (time.perf_counter() - start)
        times += [took] if i else []
    return statistics.median(times)


def measure(
    name: str, kernels: str, mesh: Any, arguments: argparse.Namespace, device: Any
) -> dict[str, Any]:
    heads, causal, rotation = CASES[name]
    n = dist.get_world_size()
    set_rotate_method(rotation)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with activated(kernels):
        small = inputs(min(4096, arguments.rows * n), heads, device, dtype)
        want = exact(small, causal)
        one_error = largest(both(small, causal), want)
        with parts(mesh, [t.clone() for t in small], causal) as call:
            local = [t.to_local() if isinstance(t, DTensor) else t for t in call()]
            whole = context_parallel_unshard(mesh, local, [2] * 4)
        error = largest(whole, want)
        del small, want, whole, local
        with parts(mesh, inputs(arguments.rows * n, heads, device, dtype), causal) as call:
            call()
            times = torch.tensor(milliseconds(call, arguments.repeats, device), device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        fitting = min(arguments.rows * n, arguments.whole)
        x = inputs(fitting, heads, device, dtype)
        one = milliseconds(lambda: both(x, causal), arguments.whole_repeats, device)
    one *= (arguments.rows * n / fitting) ** 2
    return {
        "case": name,
        "kernels": kernels,
        "num_heads": heads[0],
        "num_heads_kv": heads[1],
        "rotation": rotation,
        "rows_per_process": arguments.rows,
        "ms": float(times),
        "ideal_ms": one / n,
        "efficiency": one / n / float(times),
        "ideal_measured_rows": fitting,
        "error": error,
        "one_error": one_error,
    }


def on_cpu() -> Any:
    """Put the operators of GPUs under the key of the CPU, as torch knows the ring of those only."""
    from dlattn.integrations.torch import sdpa, sdpa_backward

    library = torch.library.Library("aten", "IMPL")
    library.impl(FLASH, sdpa.KERNELS["CUDA"][FLASH], "CPU")
    backward = f"{FLASH}_backward"
    library.impl(backward, sdpa_backward.KERNELS["CUDA"][backward], "CPU")
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", type=int, default=32768, help="positions a process has")
    parser.add_argument("--whole", type=int, default=131072, help="rows that one GPU computes")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--whole-repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--seconds", type=float, default=3600, help="no case begins later")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu" if arguments.device == "cpu" else f"cuda:{rank}")
    library = on_cpu() if device.type == "cpu" else None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    head = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "processes": dist.get_world_size(),
        "torch": torch.__version__,
        "dlattn": dlattn.__version__,
    }
    results = []
    begin = time.monotonic()
    for kernels, name in itertools.product(arguments.kernels, arguments.only):
        late = torch.tensor(float(time.monotonic() - begin > arguments.seconds))
        dist.all_reduce(late)
        if late:
            break
        try:
            results.append(measure(name, kernels, mesh, arguments, device))
        except Exception as error:  # the same on all processes; other cases may run
            results.append({"case": name, "kernels": kernels, "raised": str(error)[:500]})
        if rank == 0:
            print(results[-1], flush=True)
        if rank == 0 and arguments.json:
            text = json.dumps({**head, "results": results}, indent=1)
            arguments.json.write_text(text + "\n")
    if rank == 0:
        print(dlattn.torch.stats())
    del library
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
