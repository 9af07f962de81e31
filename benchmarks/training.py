"""Trains a model of GPT-2's size with torch's attention and with dlattn's, and compares the two.

    python benchmarks/training.py --json h200-training.json
    python benchmarks/training.py --quick         # half as many steps: a minute of an H200
    python benchmarks/training.py --device cpu --tiny

The data are the bytes of Python's own library, so that nothing is fetched; all runs see the same
batches, and those that are compared begin with the same weights: torch's attention as torch
chooses it, then under `dlattn.torch.activate()` with gradients by the kernels that are faster, and
always by dlattn's. Written down are the losses of every step, and the times of steps, which take
turns in blocks. One more run has torch's own flash-attention, which torch does not choose itself
where it prefers cuDNN: how far it is from the first shows what another kernel's rounding makes of
losses. More runs of torch's begin with other weights: how far their last losses lie apart is what
the last losses of dlattn's are held against.

Before that, a layer of Llama 3 8B's sizes (bfloat16, causal) runs forward and backward at 4096 and
16384 tokens, by the same contestants in turns; its times are written as soon as they are there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dlattn.torch
from dlattn.bench import load
from dlattn.bench.environment import describe

BLOCK = 20  # steps of one contestant before it is the next one's turn
LAYER_BLOCK = 5  # the same of a layer's
SEEDS = 5
LAST = 20  # steps whose mean is a run's last loss
STOCK = "stock"
OURS: dict[str, Callable[[], Any]] = {
    "dlattn": dlattn.torch.active,
    "dlattn, its gradients": partial(dlattn.torch.active, "dlattn"),
}
FLASH = {"stock, flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)}


@dataclass(frozen=True)
class Gpt:
    """Sizes of a model; GPT-2's smallest, over bytes."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 256


@dataclass(frozen=True)
class Llama:
    """Sizes of a layer; Llama 3 8B's."""

    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    hidden: int = 14336


class GptLayer(nn.Module):
    """Attention and a multilayer perceptron, each behind a layer norm."""

    def __init__(self, sizes: Gpt) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, width) to the same."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """GPT-2's architecture."""

    def __init__(self, sizes: Gpt, seqlen: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(seqlen, sizes.width)
        self.layers = nn.ModuleList([GptLayer(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


class LlamaLayer(nn.Module):
    """RMS norms, rotary embedding, attention with grouped heads, SwiGLU."""

    def __init__(self, sizes: Llama) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.heads * sizes.head_dim
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)])
        all_heads = sizes.heads + 2 * sizes.heads_kv
        self.qkv = nn.Linear(width, all_heads * sizes.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, width) to the same; cos and sin: (seqlen, head_dim)."""
        sizes = self.sizes
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)
        q, k, v = heads.split((sizes.heads, sizes.heads_kv, sizes.heads_kv), dim=1)
        q, k = (rotated(part, cos, sin) for part in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (arXiv:2104.09864) of two halves."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def batches(batch: int, seqlen: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of Python's library at random places, the same ones in every run."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device, torch.long)
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(data) - seqlen - 1, (batch,), generator=generator).to(device)
        ids = data[starts[:, None] + torch.arange(seqlen + 1, device=device)]
        yield ids[:, :-1], ids[:, 1:]


class Run:
    """One contestant's model and optimiser."""

    def __init__(
        self, name: str, attention: Callable[[], Any], args: argparse.Namespace, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.name, self.attention, self.device = name, attention, args.device
        self.model = Model(args.gpt, args.seqlen).to(args.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.data = batches(args.batch, args.seqlen, args.device)
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def steps(self, count: int) -> None:
        """So many steps, timed together."""
        with self.attention():
            wait_for(self.device)
            start = time.perf_counter()
            for _ in range(count):
                with torch.autocast(self.device, torch.bfloat16):
                    loss = self.model(*next(self.data))
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.detach())
            wait_for(self.device)
        self.seconds.append((time.perf_counter() - start) / count)

    def to_json(self) -> dict[str, Any]:
        """The median of the blocks' times leaves out the first, which warms up."""
        behind = sorted(self.seconds[1:]) or self.seconds
        losses = [loss.item() for loss in self.losses]
        return {
            "name": self.name,
            "step_seconds": behind[len(behind) // 2],
            "step_seconds_of_blocks": self.seconds,
            "last_loss": statistics.mean(losses[-LAST:]),
            "losses": losses,
        }


def differences(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far each run's losses are from the first one's."""
    first = runs[0]["losses"]
    found = []
    for run in runs[1:]:
        each = [abs(a - b) for a, b in zip(run["losses"], first, strict=True)]
        found.append(
            {
                "name": run["name"],
                "mean": sum(each) / len(each),
                "largest": max(each),
                "last": abs(run["last_loss"] - runs[0]["last_loss"]),
            }
        )
    return found


def train(args: argparse.Namespace, watch: load.Watch) -> tuple[dict[str, Any], bool]:
    """Training of GPT-2's size, and whether it is as good with dlattn as with torch."""
    dlattn.torch.stats(reset=True)
    contestants = [
        Run(name, attention, args)
        for name, attention in {STOCK: nullcontext, **OURS, **FLASH}.items()
    ]
    for first in range(0, args.steps, BLOCK):
        for run in contestants:
            run.steps(min(BLOCK, args.steps - first))
            watch.during()
    runs = [run.to_json() for run in contestants]
    stats = dlattn.torch.stats()
    lasts = [runs[0]["last_loss"]]
    del contestants
    for seed in range(1, SEEDS):
        other = Run(f"{STOCK}, seed {seed}", nullcontext, args, seed)
        other.steps(args.steps)
        lasts.append(other.to_json()["last_loss"])
    parts = differences(runs)
    spread = max(lasts) - min(lasts)
    found = {
        "model": asdict(args.gpt),
        "batch": args.batch,
        "seqlen": args.seqlen,
        "steps": args.steps,
        "runs": runs,
        "differences_of_losses": parts,
        "last_losses_of_stock_seeds": lasts,
        "served": stats.served,
        "refused": stats.refused,
    }
    for run in runs:
        ratio = run["step_seconds"] / runs[0]["step_seconds"]
        print(f"{run['name']}: {1e3 * run['step_seconds']:.2f} ms a step ({ratio:.3f}), ", end="")
        print(f"loss {run['losses'][0]:.4f} to {run['last_loss']:.4f}")
    for part in parts:
        print(f"{part['name']}: losses differ by {part['mean']:.5f}, at most {part['largest']:.5f}")
    print(f"last losses of {SEEDS} stock seeds: {min(lasts):.4f} to {max(lasts):.4f}\n{stats}")
    forward = sum(n for name, n in stats.served.items() if not name.endswith("_backward"))
    complete = forward == len(OURS) * args.steps * args.gpt.layers and not stats.refused
    flash = parts[-1]["mean"]
    close = all(x["mean"] <= 2 * flash + 1e-3 and x["last"] <= spread for x in parts[: len(OURS)])
    return found, complete and close


def layer_steps(args: argparse.Namespace, watch: load.Watch) -> list[dict[str, Any]]:
    """Times of a layer's forward and backward pass."""
    found = []
    sizes = args.llama
    torch.manual_seed(0)
    layer = LlamaLayer(sizes).to(args.device, torch.bfloat16)
    for seqlen in args.layer_seqlens:
        x = torch.randn(1, seqlen, sizes.heads * sizes.head_dim, device=args.device)
        x = x.to(torch.bfloat16).requires_grad_()
        turns = torch.arange(seqlen, device=args.device)[:, None] * 500000.0 ** (
            -torch.arange(0, sizes.head_dim, 2, device=args.device) / sizes.head_dim
        )
        tables = [f(turns).repeat(1, 2).to(torch.bfloat16) for f in (torch.cos, torch.sin)]
        dout = torch.randn_like(x)

        def step(x: Any = x, tables: Any = tables, dout: Any = dout) -> float:
            wait_for(args.device)
            start = time.perf_counter()
            layer(x, *tables).backward(dout)
            wait_for(args.device)
            taken = time.perf_counter() - start
            layer.zero_grad()
            x.grad = None
            return taken

        contestants = {STOCK: nullcontext, **OURS, **FLASH}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        # A step's clocks depend on what the step before it drew: each contestant's first one in a
        # block is not counted, and blocks follow each other in any order.
        order = random.Random(0)
        for block in range(args.layer_blocks + 1):
            for name in order.sample(list(contestants), len(contestants)):
                with contestants[name]():
                    taken = [step() for _ in range(LAYER_BLOCK)]
                if block > 0:  # the first one warms up
                    times[name] += taken[1:]
            watch.during()
        medians = {name: statistics.median(each) for name, each in times.items()}
        ratios = {name: median / medians[STOCK] for name, median in medians.items()}
        found.append({"seqlen": seqlen, "step_seconds": times, "ratios_to_stock": ratios})
        print(f"Llama layer, {seqlen} tokens: {1e3 * medians[STOCK]:.2f} ms a step; ", end="")
        print(", ".join(f"{name} {ratios[name]:.3f}" for name in contestants if name != STOCK))
    return found


def main() -> int:
    """Exit code 1 if dlattn left a call to torch, if its losses are twice as far off as those of
    flash-attention, or the last ones farther than those of torch's seeds lie apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--layer-blocks", type=int, default=6)
    parser.add_argument("--layer-seqlens", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--quick", action="store_true", help="100 steps")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a look on the CPU")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    args = parser.parse_args()
    args.gpt, args.llama = Gpt(), Llama()
    if args.quick:
        args.steps = 100
    if args.tiny:
        args.gpt, args.llama = Gpt(layers=2, heads=2, width=64), Llama(4, 2, 32, 128)
        args.steps, args.batch, args.seqlen = 40, 2, 128
        args.layer_seqlens, args.layer_blocks = [64, 256], 1
    watch = load.Watch(args.device)
    watch.before()
    layers = layer_steps(args, watch)
    of_layer = {"sizes": asdict(args.llama), "dtype": "bfloat16", "results": layers}

    def write(training: dict[str, Any]) -> None:
        document = {
            **describe(args.device, args.commit),
            "busy": watch.reasons(),
            **training,
            "llama_layer": of_layer,
        }
        if args.json:
            args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")

    write({})
    training, good = train(args, watch)
    watch.after()
    write(training)
    if watch.reasons():
        print(load.warning(watch.reasons()))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
