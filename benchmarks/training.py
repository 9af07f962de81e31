"""Trains a model of GPT-2's size with torch's attention and with dlattn's, and compares the two.

    python benchmarks/training.py --json benchmarks/results/h200-training.json

The data are the bytes of Python's own library, so that nothing is fetched; both runs begin with the
same weights and see the same batches. Written down are the losses of every step, and the times of
steps, which take turns in blocks. A third run has torch's own flash-attention, which torch does not
choose itself where it prefers cuDNN: how far it is from the first shows what another kernel's
rounding makes of losses.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dlattn.torch
from dlattn.bench import load
from dlattn.bench.environment import describe

LAYERS, HEADS, WIDTH, VOCABULARY = 12, 12, 768, 256
BLOCK = 20  # steps of one contestant before it is the next one's turn


class Layer(nn.Module):
    """Attention and a multilayer perceptron, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, width) to the same."""
        batch, rows, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, rows, 3, HEADS, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, rows, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """GPT-2's smallest, over bytes."""

    def __init__(self, seqlen: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(seqlen, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
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

    def __init__(self, name: str, attention: Callable[[], Any], args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name, self.attention, self.device = name, attention, args.device
        self.model = Model(args.seqlen).to(args.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.data = batches(args.batch, args.seqlen, args.device)
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def steps(self, count: int) -> None:
        """So many steps, timed together."""
        with self.attention():
            self._wait()
            start = time.perf_counter()
            for _ in range(count):
                with torch.autocast(self.device, torch.bfloat16):
                    loss = self.model(*next(self.data))
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.detach())
            self._wait()
        self.seconds.append((time.perf_counter() - start) / count)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def to_json(self) -> dict[str, Any]:
        """The median of the blocks' times leaves out the first, which warms up."""
        behind = sorted(self.seconds[1:]) or self.seconds
        return {
            "name": self.name,
            "step_seconds": behind[len(behind) // 2],
            "step_seconds_of_blocks": self.seconds,
            "losses": [loss.item() for loss in self.losses],
        }


def differences(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far each run's losses are from the first one's."""
    first = runs[0]["losses"]
    found = []
    for run in runs[1:]:
        each = [abs(a - b) for a, b in zip(run["losses"], first, strict=True)]
        found.append({"name": run["name"], "mean": sum(each) / len(each), "largest": max(each)})
    return found


def main() -> int:
    """Exit code 1 if dlattn is twice as far off as flash-attention, or left a call to torch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    args = parser.parse_args()
    watch = load.Watch(args.device)
    watch.before()
    dlattn.torch.stats(reset=True)
    contestants = [
        Run("stock", nullcontext, args),
        Run("dlattn", dlattn.torch.active, args),
        Run("stock, flash", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), args),
    ]
    for first in range(0, args.steps, BLOCK):
        for run in contestants:
            run.steps(min(BLOCK, args.steps - first))
            watch.during()
    watch.after()
    runs = [run.to_json() for run in contestants]
    stats = dlattn.torch.stats()
    parts = differences(runs)
    document = {
        **describe(args.device, args.commit),
        "busy": watch.reasons(),
        "model": {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "vocabulary": VOCABULARY},
        "batch": args.batch,
        "seqlen": args.seqlen,
        "steps": args.steps,
        "runs": runs,
        "differences_of_losses": parts,
        "served": stats.served,
        "refused": stats.refused,
    }
    for run in runs:
        print(f"{run['name']}: {1e3 * run['step_seconds']:.2f} ms a step, ", end="")
        print(f"loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}")
    for part in parts:
        print(f"{part['name']}: losses differ by {part['mean']:.5f}, at most {part['largest']:.5f}")
    print(stats)
    if document["busy"]:
        print(load.warning(document["busy"]))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    ours, flash = parts
    complete = sum(stats.served.values()) == args.steps * LAYERS
    return 0 if complete and ours["mean"] <= 2 * flash["mean"] + 1e-3 else 1


if __name__ == "__main__":
    raise SystemExit(main())
