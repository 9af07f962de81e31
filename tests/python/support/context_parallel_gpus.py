"""torch's context_parallel with `dlattn.torch.activate()`: a process of it, against float64.

`torchrun --nproc-per-node N context_parallel_gpus.py FOLDER` leaves results0.json and so on in the
folder: by case a list of failures. With `--device cpu` the operators of GPUs compute on the CPU,
of which context_parallel knows no others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from datetime import timedelta
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

FLASH = "_scaled_dot_product_flash_attention"
HEADS, HEADS_KV, HEAD_DIM = 8, 2, 64
ROWS = 192  # of a process, two chunks where load is balanced
# By name: is_causal, with load balancing, and how keys travel.
CASES = {
    "causal": (True, "allgather"),
    "causal, alltoall": (True, "alltoall"),
    "full": (False, "alltoall"),
}
NAMES = ("out", "dq", "dk", "dv")


def balance(on: bool) -> None:
    """Where torch keeps this differs between its releases."""
    for name in ("_context_parallel._attention", "_attention"):
        module = sys.modules.get(f"torch.distributed.tensor.experimental.{name}")
        if hasattr(module, "_cp_options"):
            module._cp_options.enable_load_balance = on  # type: ignore[union-attr]
            return
    raise RuntimeError(f"torch {torch.__version__} has no _cp_options")


def inputs(rows: int, device: Any, dtype: Any) -> list[torch.Tensor]:
    """q, k, v and dout of the whole, the same in all processes."""
    torch.manual_seed(1)
    sizes = [(2, heads, rows, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    return [torch.randn(size).to(device, dtype) for size in sizes]


def both(x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """out, dq, dk and dv, by torch's function on a GPU and by its operator elsewhere."""
    q, k, v = leaves = [t.detach().requires_grad_() for t in x[:3]]
    if q.device.type == "cpu":
        out = getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, causal)[0]
    else:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, x[3])]


def exact(x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    q, k, v = leaves = [t.detach().double().requires_grad_() for t in x[:3]]
    k, v = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / HEAD_DIM**0.5
    if causal:
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = scores.softmax(3) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, x[3].double())]


def over_processes(mesh: Any, x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """The same of the whole, each process with its part."""
    parts = [t.clone() for t in x]
    with context_parallel(
        mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)
    ):
        own = parts
        if x[0].device.type == "cpu":  # F's own wrapper makes these
            own = [DTensor.from_local(t, mesh, [Shard(2)]) for t in parts]
        found = both(own, causal)
        local = [t.to_local() if isinstance(t, DTensor) else t for t in found]
        return list(context_parallel_unshard(mesh, local, [2] * 4))


def failures(name: str, mesh: Any, device: Any) -> list[str]:
    causal, rotation = CASES[name]
    balance(causal)
    set_rotate_method(rotation)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = inputs(ROWS * dist.get_world_size(), device, dtype)
    want, alone = exact(x, causal), both(x, causal)
    dlattn.torch.stats(reset=True)
    found = over_processes(mesh, x, causal)
    told = dlattn.torch.stats()
    wrong = [f"{name}: torch computed: {told}"] if device != "cpu" and told.refused else []
    if device != "cpu":
        for operator in (FLASH, f"{FLASH}_backward"):
            if not told.served.get(operator):
                wrong.append(f"{name}: dlattn served no {operator}: {told}")
    for what, one, other, exactly in zip(NAMES, found, alone, want, strict=True):
        error, of_one = (
            float((t.double() - exactly).norm() / exactly.norm()) for t in (one, other)
        )
        # Parts are rounded before they are added.
        if not error <= 2 * of_one + 1e-6:
            wrong.append(f"{name}: {what} is off by {error:.2g}, alone by {of_one:.2g}")
    return wrong


def on_cpu() -> Any:
    from dlattn.integrations.torch import sdpa, sdpa_backward

    library = torch.library.Library("aten", "IMPL")
    library.impl(FLASH, sdpa.KERNELS["CUDA"][FLASH], "CPU")
    backward = f"{FLASH}_backward"
    library.impl(backward, sdpa_backward.KERNELS["CUDA"][backward], "CPU")
    return library


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    device = arguments.device
    library = on_cpu() if device == "cpu" else None
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
        dlattn.torch.activate("dlattn")
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    mesh = init_device_mesh(arguments.device, (dist.get_world_size(),))
    found: dict[str, list[str]] = {}
    for name in CASES:
        try:
            found[name] = failures(name, mesh, device)
        except Exception:  # the same on all processes
            found[name] = [traceback.format_exc()]
    (arguments.folder / f"results{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    del library


if __name__ == "__main__":
    main()
