"""A process of a training run over two of them: gradients against those of one process.

    python torch_training.py RANK FILE

FILE is where the processes find each other.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.parallel import DistributedDataParallel

import dlattn.torch
from dlattn.integrations.torch import sdpa, sdpa_backward

WORLD = 2
FLASH = "_scaled_dot_product_flash_attention"


class Block(torch.nn.Module):
    """Attention with grouped heads and sinks that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 64)
        self.out = torch.nn.Linear(32, 32)
        self.sinks = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5, 0.0]))

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split((4, 2, 2), dim=-2)
        out = dlattn.torch.attention(q, k, v, causal=True, sinks=self.sinks)
        return x + self.out(out.flatten(-2))


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


def gradients(module: Any, x: Any) -> list[Any]:
    module(x).square().mean().backward()
    found = [parameter.grad for parameter in module.parameters()]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]


def check_models(rank: int, mesh: Any) -> None:
    x = torch.randn(2 * WORLD, 19, 32, generator=torch.Generator().manual_seed(1)) + 0.1
    own = x.chunk(WORLD)[rank]
    want = gradients(model(), x)
    sharded = model()
    for part in (*sharded, sharded):
        fully_shard(part, mesh=mesh)
    for found in (gradients(DistributedDataParallel(model()), own), gradients(sharded, own)):
        for a, b in zip(found, want, strict=True):
            assert b.abs().max() > 0
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def check_context_parallel(mesh: Any) -> None:
    """Every part's backward pass gets out and lse of the whole ring.

    torch knows this of CUDA's operators only, which are put under the key of the CPU.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl(FLASH, sdpa.KERNELS["CUDA"][FLASH], "CPU")
    backward = f"{FLASH}_backward"
    library.impl(backward, sdpa_backward.KERNELS["CUDA"][backward], "CPU")
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(2, heads, 24, 16, generator=generator) + 0.1 for heads in (4, 2, 2, 4)]
    whole = [x.clone().requires_grad_() for x in tensors[:3]]
    out = dlattn.torch.attention(*whole, causal=True, layout="bhsd")
    want = torch.autograd.grad(out, whole, tensors[3].clone())
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4):
        *own, dout = (DTensor.from_local(x.clone(), mesh, [Shard(2)]) for x in tensors)
        for x in own:
            x.requires_grad_()
        getattr(torch.ops.aten, FLASH)(*own, 0.0, True)[0].backward(dout)
        found = context_parallel_unshard(mesh, [x.grad.to_local() for x in own], [2] * 3)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def main() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    check_models(rank, mesh)
    check_context_parallel(mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
