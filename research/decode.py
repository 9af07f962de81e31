"""Few queries over many keys, K and V cold: dlattn's kernels beside cuDNN and FlashAttention-2.

    python research/decode.py --json decode.json --commit SHA

Each call reads other tensors, in turn, of three times the L2 cache in all, as a model's layers do.
Times are those of CUDA graphs of such calls, by events around a replay, medians; contestants take
turns. `floor` is the time of the keys' bytes at the most that an H200 was seen to read of its
memory, 4.42 TB/s. Results are compared with those of `wmma` before.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dlattn
from dlattn.bench.environment import describe

READ_BYTES_PER_US = 4.42e6
Call = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """Sizes; where `page` is not 0 the keys lie in pages of so many, in no order."""

    batch: int
    heads: int
    heads_kv: int
    keys: int
    head_dim: int
    queries: int = 1
    page: int = 0


CASES = [
    *(Case(1, 32, 8, keys, 128) for keys in (1024, 8192, 131072)),
    *(Case(8, 32, 8, 4096, 128, page=page) for page in (0, 256, 16, 1)),
    Case(16, 32, 8, 8192, 128),
    Case(64, 32, 8, 4096, 128),
    Case(16, 32, 32, 4096, 128),
    Case(1, 8, 8, 512, 64),
    Case(1, 32, 8, 8192, 64),
    Case(4, 16, 4, 4096, 256),
    Case(8, 32, 8, 4096, 128, queries=8),
]


class Graph:
    """So many calls, captured."""

    def __init__(self, call: Call, count: int, repeats: int) -> None:
        """Run them once before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(0)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for _ in range(repeats):
                for i in range(count):
                    call(i)
        self._calls = count * repeats
        self.times: list[float] = []

    def replay(self, milliseconds: float) -> None:
        """Warm up and measure, so long."""
        spent = 0.0
        while spent < milliseconds:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
            if spent > milliseconds / 4:
                self.times.append(1e3 * elapsed / self._calls)
            spent += elapsed


def contestants(case: Case, q: Any, ks: list[Any], vs: list[Any]) -> dict[str, Call]:
    """The calls, by name, each with the number of the tensors to read."""
    if case.page:
        pages = case.batch * case.keys // case.page
        order = torch.randperm(pages, dtype=torch.int32, device="cuda")
        table = order.reshape(case.batch, -1)
        used = torch.full((case.batch,), case.keys, dtype=torch.int32, device="cuda")
        pools = [[x.reshape(pages, case.page, *x.shape[2:]) for x in each] for each in (ks, vs)]
        return {
            "dlattn auto": lambda i: dlattn.attention_with_kvcache(
                q, pools[0][i], pools[1][i], seqused_k=used, page_table=table, causal=True
            )
        }
    found: dict[str, Call] = {
        f"dlattn {kernel}": lambda i, kernel=kernel: dlattn.attention(
            q, ks[i], vs[i], causal=True, kernel=kernel
        )
        for kernel in ("auto", "wmma")
    }
    if case.queries == 1:  # torch's causal masks are aligned at the first key
        for name, backend in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("fa2", SDPBackend.FLASH_ATTENTION),
        ):

            def call(i: int, backend: Any = backend) -> Any:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(
                        *(x.transpose(1, 2) for x in (q, ks[i], vs[i])), enable_gqa=True
                    )

            found[name] = call
    return found


def measure(case: Case, milliseconds: float) -> dict[str, Any]:
    """Of all contestants."""
    size = 4 * case.batch * case.heads_kv * case.keys * case.head_dim
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(max(2, math.ceil(3 * l2 / size)), 200)
    shape = (case.batch, case.keys, case.heads_kv, case.head_dim)

    def draw(*sizes: int) -> Any:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) + 0.25

    q = draw(case.batch, case.queries, case.heads, case.head_dim)
    ks, vs = ([draw(*shape) for _ in range(count)] for _ in range(2))
    results: dict[str, Any] = {}
    graphs = {}
    calls = contestants(case, q, ks, vs)
    expected = None if case.page else calls["dlattn wmma"](0).float()
    for name, call in calls.items():
        out = call(0)
        if expected is not None:
            out = out if name.startswith("dlattn") else out.transpose(1, 2)
            error = float((out.float() - expected).abs().max())
            assert error < 0.02, (name, error)
        graphs[name] = Graph(call, count, max(1, 24 // count))
    for order in (list(graphs), list(reversed(graphs))):
        for name in order:
            graphs[name].replay(milliseconds)
    for name, graph in graphs.items():
        results[name] = {"us": statistics.median(graph.times)}
    if not case.page:
        plan = dlattn.plan(q, ks[0], vs[0], causal=True)
        results["dlattn auto"]["plan"] = f"{plan.kernel}:{plan.variant}"
        results["dlattn auto"]["grid"] = plan.grid
    return {"case": asdict(case), "floor_us": size / READ_BYTES_PER_US, "results": results}


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    parser.add_argument("--milliseconds", type=float, default=150.0, help="of a window, of two")
    args = parser.parse_args()
    torch.manual_seed(0)
    document: dict[str, Any] = {**describe("cuda", args.commit), "results": []}
    for case in CASES:
        found = measure(case, args.milliseconds)
        document["results"].append(found)
        times = ", ".join(f"{name} {x['us']:.2f}" for name, x in found["results"].items())
        print(f"{case}: floor {found['floor_us']:.1f}; {times}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
